"""Test concurrent repairs, saves, loads and collections: forced races between two steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asymcheck.errors import RecoveryError
from asymcheck.fsck.repair import Replacement
from asymcheck.storage.nvme import NvmeTier, PackFile, Transaction
from asymcheck.store import Store
from asymcheck.types import PackId
from tests.crash.actions import open_store
from tests.crash.states import CONFIG, fingerprint, make_state
from tests.crash.survival import check_steps
from tests.crash.test_races import at_first
from tests.fsck.damages import check_idle, flip_frame_header, flip_header, locked, packs

REPAIR = ["frame.written", "pack.sealed", "repair.entered", "repair.removed", "repair.forgotten"]


@pytest.fixture
def path(store_path: Path) -> Path:
    """Return a store whose first pack has a damaged header."""
    with open_store(store_path) as store:
        store.save(make_state(0), step=0)
        store.save(make_state(1), step=1)
    flip_header(packs(store_path)[0])
    return store_path


def _save(store: Store) -> None:
    store.save(make_state(1), step=2)


def _collect(store: Store) -> None:
    store.gc()


def _load(store: Store) -> None:
    assert fingerprint(store.load(1)) == fingerprint(make_state(1))


def _repair(store: Store) -> None:
    store.repair()


@pytest.fixture
def impatient(path: Path) -> Iterator[Store]:
    """Return the damaged store with a short lock timeout, because no lock is released meanwhile."""
    config = dataclasses.replace(CONFIG, read_lock_timeout_s=0.05)
    with Store(NvmeTier(path, config)) as store:
        yield store


@pytest.mark.slow(quick=["repair.removed-_collect"])
@pytest.mark.parametrize("other", [_save, _collect, _repair])
@pytest.mark.parametrize("event", REPAIR)
def test_between_two_steps_of_a_repair(
    path: Path, impatient: Store, event: str, other: Callable[[Store], None]
) -> None:
    """Test any operation at any step: every checkpoint exists, and finally no damage is left."""
    with open_store(path) as store:
        with at_first(event, lambda: other(impatient)) as seen:
            store.repair()
        assert event in seen
        store.repair()
        check_idle(store)
        check_steps(store, {0: 0, 1: 1} | ({2: 1} if other is _save else {}))


@pytest.mark.parametrize("event", REPAIR)
def test_a_load_that_begins_between_two_steps(path: Path, event: str) -> None:
    """Test a load that waits for a locked pack, and finds its partitions in the old or the new pack."""
    with open_store(path) as store, open_store(path) as other, ThreadPoolExecutor() as threads:
        loads = []
        with at_first(event, lambda: loads.append(threads.submit(_load, other))):
            store.repair()
        loads[0].result()
        store.repair()
        check_idle(store)


@pytest.mark.slow(quick=["manifest.committed"])
@pytest.mark.parametrize("event", ["pack.sealed", "catalog.pinned", "manifest.renamed", "manifest.committed"])
def test_a_repair_in_the_middle_of_a_save(store_path: Path, event: str) -> None:
    """Test a save that relies on packs to be removed: once pinned, they stay until a later repair."""
    config = dataclasses.replace(CONFIG, read_lock_timeout_s=0.05)
    with open_store(store_path) as store, Store(NvmeTier(store_path, config)) as other:
        store.save(make_state(0), step=0)
        damaged = packs(store_path)
        for pack in damaged:
            flip_frame_header(pack, 0)
        kept: list[Path] = []

        def repair() -> None:
            other.repair()
            kept.extend(pack for pack in damaged if pack.exists())

        with at_first(event, repair):
            store.save(make_state(1), step=1)
        assert bool(kept) == (event != "pack.sealed")
        store.repair()
        check_idle(store)
        check_steps(store, {0: 0, 1: 1})


def test_a_reader_comes_while_partitions_are_copied(path: Path) -> None:
    """Test that the damaged pack stays for the reader, and that the new pack is removed."""
    damaged, before = packs(path)[0], set(packs(path))
    with open_store(path) as store, contextlib.ExitStack() as stack:
        with at_first("pack.sealed", lambda: stack.enter_context(locked(damaged))):
            repaired = store.repair()
        assert {one.kind for one in repaired.left} == {"busy-pack"}
        assert set(packs(path)) == before


def test_partitions_that_move_during_the_scan_are_not_lost(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a collection that repacks a pack after the repair has listed the packs, and before it opens them."""
    # With one slot, the frames of a save are always in the same packs.
    with open_store(store_path, slots=1) as store, open_store(store_path) as other:
        store.save(make_state(0), step=0)
        store.save(make_state(1), step=1)
        store.delete(0)
        original, repacked = NvmeTier.open_pack_to_repair, []

        def open_pack(tier: NvmeTier, pack_id: PackId) -> PackFile:
            repacked.append(other.gc().repacked_packs)
            return original(tier, pack_id)

        monkeypatch.setattr(NvmeTier, "open_pack_to_repair", open_pack)
        assert store.repair().left == ()
        assert repacked[0] > 0
        check_steps(store, {1: 1})


def test_copy_is_collected_before_it_is_relied_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a copy counts only while the catalog shows that it was not collected."""
    with open_store(path) as store:
        original = Replacement._enter
        seen = []

        def enter(self: Replacement, *arguments: object) -> str:
            with store.resources.catalog().write() as transaction:
                for pack_id in {location.pack_id for location in self._replacements.values()}:
                    transaction.put_pack(pack_id, 2, 0, 0)
            reason = original(self, *arguments)  # type: ignore[arg-type]  # passed on as they are
            seen.append(reason)
            return reason

        # Store a second copy of everything in intact packs.
        away = path.with_name("away")
        (path / "packs").rename(away)
        (path / "packs").mkdir()
        with open_store(path) as fresh:
            fresh.resources.rebuild_catalog()
            fresh.save(make_state(0), step=5)
            fresh.save(make_state(1), step=6)
        for pack in away.iterdir():
            pack.rename(path / "packs" / pack.name)
        monkeypatch.setattr(Replacement, "_enter", enter)
        before = set(packs(path))
        left = store.repair().left
        assert seen == ["the store changed during the repair"]
        assert {one.kind for one in left} == {"busy-pack"}
        assert set(packs(path)) == before


def test_a_repair_that_ignores_pins_is_noticed(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the checkpoint in progress is lost without pins, so that the test above can fail."""
    with open_store(store_path) as store, open_store(store_path) as other:
        store.save(make_state(0), step=0)
        for pack in packs(store_path):
            flip_frame_header(pack, 0)

        def repair() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(Transaction, "pins", lambda _self: {})
                other.delete(0)
                other.repair()
                other.gc()

        with at_first("catalog.pinned", repair):
            store.save(make_state(0), step=1)
        with pytest.raises(RecoveryError):
            store.load(1)
