"""Test that the catalog is rebuilt from packs and manifests, also while other processes have it open."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import Store, events
from asymcheck.format import registry
from asymcheck.format.catalog_records import pin_key
from asymcheck.fsck.rebuild_catalog import reconcile
from asymcheck.storage.nvme import NvmeTier, Transaction
from asymcheck.storage.process_identity import this_process
from asymcheck.types import Location, Owner, PackId, SaveId
from tests.crash.actions import lose_catalog, open_store
from tests.crash.states import CONFIG, fingerprint, make_state
from tests.crash.survival import check_steps
from tests.fsck.damages import check_idle, flip_index, frames, packs

_DEAD = Owner(1, 1, "another boot", "")


@pytest.fixture
def path(store_path: Path) -> Path:
    """Return a store with two checkpoints."""
    with open_store(store_path) as store:
        for step in range(2):
            store.save(make_state(step), step=step)
    return store_path


def _rows(store: Store) -> tuple[dict[bytes, Location | None], dict[PackId, int | None], set[bytes]]:
    with store.resources.catalog().read() as transaction:
        return dict(transaction.locations()), transaction.pack_states(), transaction.manifests()


def test_lost_catalog_is_rebuilt_exactly(path: Path) -> None:
    """Test each row, and the counts of the result."""
    with open_store(path) as store:
        before = _rows(store)
    lose_catalog(path)
    with open_store(path) as store:
        rebuilt = store.resources.rebuild_catalog()
        assert _rows(store) == before
    assert (rebuilt.packs, rebuilt.partitions, rebuilt.manifests) == (len(before[1]), len(before[0]), len(before[2]))
    assert rebuilt.left_out == ()


def test_catalog_file_is_replaced_if_unused(path: Path) -> None:
    """Test that the file is new, because LMDB would not check pages of the old one."""
    data = path / "catalog" / "data.mdb"
    before = data.stat().st_ino
    keep = path / "catalog" / "keep"
    keep.hardlink_to(data)  # Keep the old inode, so that the new file gets another one.
    with open_store(path) as store:
        store.resources.rebuild_catalog()
        assert data.stat().st_ino != before
        check_idle(store)


def _forget_all(transaction: Transaction) -> None:
    for name, _ in list(transaction.locations()):
        transaction.delete("partitions", name)
    for pack_id in transaction.pack_states():
        transaction.delete("packs", pack_id)
    for key in transaction.manifests():
        transaction.delete("manifests", key)


def _misplace(transaction: Transaction) -> None:
    for name, location in list(transaction.locations()):
        assert location is not None
        transaction.put_location(name, Location(location.pack_id, 1 << 30, 1, 1))


def _name_what_is_not_there(transaction: Transaction) -> None:
    pack_id = PackId(bytes(16))
    transaction.put_pack(pack_id, registry.PACK_LIVE, 1, 1)
    for name, location in list(transaction.locations()):
        assert location is not None
        transaction.put_location(
            name, Location(pack_id, location.offset, location.stored_length, location.plain_length)
        )
    transaction.put_manifest(b"default/00000001-000000000009-" + b"0" * 32 + b"/00000-of-00001-" + b"0" * 32, 1)


@pytest.mark.parametrize("how", ["repair", "rebuild"])
@pytest.mark.parametrize("lie", [_forget_all, _misplace, _name_what_is_not_there])
def test_wrong_catalog_is_corrected(path: Path, lie: Callable[[Transaction], None], how: str) -> None:
    """Test wrong entries with valid checksums, while the store is open."""
    with open_store(path) as store:
        before = _rows(store)
        with store.resources.catalog().write() as transaction:
            lie(transaction)
        assert _rows(store) != before
        if how == "repair":
            assert [one.kind for one in store.repair().done] == ["catalog"]
        else:
            assert store.resources.rebuild_catalog().changed > 0
        assert _rows(store) == before
        assert store.resources.rebuild_catalog().changed == 0
        check_idle(store)


@pytest.mark.parametrize("database", ["partitions", "packs", "manifests"])
def test_wrong_number_in_an_entry_is_corrected(path: Path, database: str) -> None:
    """Test a codec, a frame count and a file size that are wrong, although the checksum of the entry is valid."""
    with open_store(path) as store:
        catalog = store.resources.catalog()
        with catalog.read() as transaction:
            before = _entries(transaction)
        with catalog.write() as transaction:
            if database == "partitions":
                name, location = next(transaction.locations())
                assert location is not None
                transaction.put_location(name, dataclasses.replace(location, codec=registry.CODEC_ZSTD))
            elif database == "packs":
                transaction.put_pack(next(iter(transaction.pack_states())), registry.PACK_LIVE, 9, 9 << 12)
            else:
                transaction.put_manifest(next(iter(transaction.manifests())), 9)
            assert _entries(transaction) != before
        (repaired,) = store.repair().done
        assert repaired.found.startswith("1 entry was")
        with catalog.read() as transaction:
            assert _entries(transaction) == before


def _entries(transaction: Transaction) -> dict[str, dict[bytes, bytes]]:
    return {name: dict(transaction._txn.cursor(db=database)) for name, database in transaction._db.items()}


def test_pins_of_the_living_are_kept(path: Path) -> None:
    """Test that pins of dead processes are removed."""
    living, dead = pin_key(SaveId(b"a" * 16), 0), pin_key(SaveId(b"b" * 16), 0)
    init = Owner(1, _start_of_init(), this_process().boot_id, _namespace())
    mark = path / "catalog" / "open" / f"1-{init.start_ticks}-{init.boot_id}-{init.pid_namespace}"
    with open_store(path) as store, mark.open("x") as mark_file:
        fcntl.flock(mark_file, fcntl.LOCK_EX)
        with store.resources.catalog().write() as transaction:
            transaction.put_pin(living, init, [])
            transaction.put_pin(dead, _DEAD, [])
        rebuilt = store.resources.rebuild_catalog()
        assert rebuilt.kept_pins == 1
        with store.resources.catalog().read() as transaction:
            assert set(transaction.pins()) == {living}


def _start_of_init() -> int:
    return int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])


def _namespace() -> str:
    return this_process().pid_namespace


def test_a_damaged_pack_is_left_out(path: Path) -> None:
    """Test that the result names the pack and the reason, and that no save relies on it."""
    pack = packs(path)[0]
    names = {name for name, _, _ in frames(pack)}
    flip_index(pack)
    with open_store(path) as store:
        rebuilt = store.resources.rebuild_catalog()
        assert len(rebuilt.left_out) == 1
        assert pack.name in rebuilt.left_out[0]
        assert not names & _rows(store)[0].keys()


def test_checkpoint_committed_during_a_rebuild_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the rebuild does not forget the checkpoint, because garbage collection relies on the catalog."""
    with open_store(path) as store, open_store(path) as other:
        original = reconcile.__globals__["_manifest_sizes"]

        def manifests(tier: object) -> object:
            found = original(tier)
            other.save(make_state(5), step=5)
            return found

        with store.resources.catalog().write() as transaction:
            _forget_all(transaction)
        monkeypatch.setitem(reconcile.__globals__, "_manifest_sizes", manifests)
        assert store.resources.rebuild_catalog().manifests == 3
        monkeypatch.undo()
        assert len(_rows(store)[2]) == 3
        assert other.save(make_state(5), step=6).written_bytes == 0
        check_steps(store, {0: 0, 1: 1, 5: 5, 6: 5})


def test_pack_collected_during_a_rebuild_is_not_entered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that no save relies on the missing pack."""
    with open_store(path) as store, open_store(path) as other:
        other.gc()
        original = reconcile.__globals__["_manifest_sizes"]

        def manifests(tier: object) -> object:
            found = original(tier)
            for step in range(2):
                other.delete(step)
            assert other.gc().freed_packs > 0
            return found

        monkeypatch.setitem(reconcile.__globals__, "_manifest_sizes", manifests)
        store.resources.rebuild_catalog()
        monkeypatch.undo()
        assert _rows(store) == ({}, {}, set())
        assert store.save(make_state(0), step=0).written_bytes > 0
        check_steps(store, {0: 0})


def test_pack_held_by_collection_is_not_entered(path: Path) -> None:
    """Test a pack between its mark and its move, when the file still exists."""
    states = []
    config = dataclasses.replace(CONFIG, read_lock_timeout_s=0.05)
    with open_store(path) as store, Store(NvmeTier(path, config)) as other:
        for step in range(2):
            store.delete(step)

        def rebuild(event: events.Event) -> None:
            if event.name == "gc.marked_freed":
                rebuilt = other.resources.rebuild_catalog()
                states.append((rebuilt.packs, len(rebuilt.left_out), set(_rows(other)[1].values())))

        with events.observe(rebuild):
            freed = store.gc().freed_packs
        assert states == [(0, freed, {registry.PACK_FREED})]
        store.save(make_state(0), step=0)
        check_steps(store, {0: 0})


def test_pack_marked_after_its_index_was_read_is_not_entered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a pack that a garbage collection holds at the time of the transaction."""
    pack = packs(path)[0]
    pack_id = PackId(bytes.fromhex(pack.stem))
    with open_store(path) as store, contextlib.ExitStack() as stack:
        catalog = store.resources.catalog()
        original = reconcile.__globals__["_manifest_sizes"]

        def manifests(tier: NvmeTier) -> object:
            assert stack.enter_context(tier.locked(pack))
            with catalog.write() as transaction:
                transaction.put_pack(pack_id, registry.PACK_FREED, 0, 0)
            return original(tier)

        monkeypatch.setitem(reconcile.__globals__, "_manifest_sizes", manifests)
        rebuilt = store.resources.rebuild_catalog()
        assert [pack.name in reason for reason in rebuilt.left_out] == [True]
        assert _rows(store)[1][pack_id] == registry.PACK_FREED


def test_packs_put_back_are_known_again(path: Path) -> None:
    """Test packs that were restored from a copy."""
    away = path.with_name("away")
    shutil.copytree(path / "packs", away)
    for pack in packs(path):
        pack.unlink()
    with open_store(path) as store:
        assert store.resources.rebuild_catalog().packs == 0
        for pack in away.iterdir():
            shutil.copy(pack, path / "packs")
        assert store.resources.rebuild_catalog().packs == len(packs(path))
        assert fingerprint(store.load(1)) == fingerprint(make_state(1))
