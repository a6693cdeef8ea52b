"""Test repacking: mostly garbage packs are freed, and their needed partitions are found elsewhere."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig, events
from asymcheck.errors import OutOfSpaceError
from asymcheck.events import Event
from asymcheck.format import layout, registry
from asymcheck.gc import collect as collect_module
from asymcheck.gc import repack as repack_module
from asymcheck.gc.collect import Collected
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.process_identity import hold, let_go, this_process
from asymcheck.storage.reachability import StoreReachability
from asymcheck.types import PackId
from tests.damage.flips import flip
from tests.store.equality import assert_same

MIB = 1 << 20


def _bytes(seed: int, mebibytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (mebibytes * MIB,), dtype=torch.uint8, generator=generator)


SHARED = _bytes(1000, 1)
PIN = b"p" * 20


def _state(step: int, mebibytes: int = 4) -> dict[str, torch.Tensor]:
    return {"shared": SHARED, "own": _bytes(step, mebibytes)}


def _save(store: Store, *steps: int) -> None:
    for step in steps:
        store.save(_state(step), step=step)


def _whole(store: Store, *steps: int) -> None:
    """Assert that exactly these steps exist, and that they are intact."""
    assert [checkpoint.step for checkpoint in store.checkpoints()] == list(steps)
    for step in steps:
        assert_same(store.load(step), _state(step))
    assert store.verify() == []


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_needed_partitions_are_copied_and_the_pack_freed(store: Store) -> None:
    """Test the numbers and the dry run for a pack of five partitions."""
    _save(store, 0, 1)
    (old,) = {path.name for path in (store.path / "packs").iterdir() if path.stat().st_size > 5 * MIB}
    store.delete(0)
    assert store.disk_usage().locked_bytes > 4 * MIB
    expected = store.gc(dry_run=True)
    done = store.gc()
    assert done == expected
    assert (done.freed_packs, done.repacked_packs, done.kept_packs) == (1, 1, 2)
    assert done.copied_bytes in (MIB + 4096, MIB + 8192), "a shifted payload takes one more block"
    assert old not in _names(store.path / "packs")
    # The file of the old pack is in the pool.
    assert old in _names(store.path / "pool")
    assert store.disk_usage().locked_bytes == 0
    assert store.gc() == store.gc(dry_run=True) == Collected(kept_packs=2)
    _whole(store, 1)


def test_the_manifest_is_not_touched_and_its_hint_fails_softly(store: Store) -> None:
    """Test that readers and the next save find the partition by its digest, although the hint is outdated."""
    _save(store, 0, 1)
    store.delete(0)
    before = {path: path.read_bytes() for path in (store.path / "manifests").rglob("*.manifest")}
    store.gc()
    assert {path: path.read_bytes() for path in (store.path / "manifests").rglob("*.manifest")} == before
    assert store.save({"shared": SHARED}, step=5).written_bytes == 0
    store.resources.rebuild_catalog()
    assert store.save({"shared": SHARED}, step=6).written_bytes == 0
    assert_same(store.load(1), _state(1))


def test_half_of_a_pack_may_be_garbage(store_path: Path) -> None:
    """Test that the limit is configurable, and that only more than the limit triggers a repack."""
    # Two frames of a MiB may differ by a block, depending on the addresses of the tensors.
    for waste, repacked in ((0.51, 0), (0.49, 1), (1.0, 0), (0.0, 1)):
        with Store.open(store_path / str(waste), config=StoreConfig(repack_waste=waste), create=True) as store:
            store.save({"shared": SHARED, "own": _bytes(0, 1)}, step=0)
            store.save({"shared": SHARED, "own": _bytes(1, 1)}, step=1)
            store.delete(0)
            assert store.gc(dry_run=True) == store.gc()
            assert store.resources.usage().packs == 2
            assert (store.disk_usage().locked_bytes == 0) == bool(repacked)


def test_rest_of_many_packs_goes_into_one(store: Store) -> None:
    """Test that no small packs are created."""
    for step in range(6):
        keep = {f"kept{number}": _bytes(100 + number, 1) for number in range(step + 1)}
        store.save({**keep, "own": _bytes(step, 3)}, step=step)
    for step in range(5):
        store.delete(step)
    done = store.gc()
    assert (done.freed_packs, done.repacked_packs, store.resources.usage().packs) == (5, 5, 2)
    # A frame has one more block if its payload is shifted, which depends on the address of the tensor.
    assert done.copied_bytes in range(5 * (MIB + 4096), 5 * (MIB + 8192) + 1, 4096)
    assert store.verify() == []
    assert_same(store.load(5), {**keep, "own": _bytes(5, 3)})


def test_new_packs_are_no_larger_than_packs_may_be(store_path: Path) -> None:
    """Test that the rest goes into a second pack."""
    with Store.open(store_path, config=StoreConfig(pack_bytes=5 * MIB, partition_bytes=MIB), create=True) as store:
        states = [{"kept": _bytes(100, 4)[: n * MIB], "own": _bytes(n, 3)} for n in (1, 2, 3, 4)]
        for step, state in enumerate(states):
            store.save(state, step=step)
        for step in range(3):
            store.delete(step)
        store.gc()
        assert max(path.stat().st_size for path in (store.path / "packs").iterdir()) < 5 * MIB + 16 * 4096
        assert_same(store.load(3), states[3])
        assert store.verify() == []


def test_a_pack_that_is_read_stays_until_the_next_time(store: Store) -> None:
    """Test that nothing is copied, and that the pack counts as busy, also in a dry run."""
    _save(store, 0, 1)
    store.delete(0)
    packs = _names(store.path / "packs")
    readers = [store.resources.tier.open_pack(pack_id) for pack_id in store.resources.tier.pack_ids()]
    try:
        assert store.gc(dry_run=True) == store.gc() == Collected(busy_packs=1, kept_packs=1)
        assert _names(store.path / "packs") == packs
    finally:
        for reader in readers:
            reader.close()
    assert store.gc().repacked_packs == 1
    _whole(store, 1)


Meanwhile = Callable[[Store], object]


@pytest.fixture
def meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[Meanwhile], None]:
    """Call a function when the copies are complete and not yet in the catalog."""

    def arrange(action: Meanwhile) -> None:
        original = repack_module._Batch._enter
        done: list[None] = []

        def enter(self: repack_module._Batch, *arguments: object) -> object:
            if not done:
                done.append(None)
                action(store)
            return original(self, *arguments)  # type: ignore[arg-type]  # as it was called

        monkeypatch.setattr(repack_module._Batch, "_enter", enter)

    return arrange


def test_pinned_pack_stays(store: Store, meanwhile: Callable[[Meanwhile], None]) -> None:
    """Test that the manifest of the save may reference any partition of the pack."""
    _save(store, 0, 1)
    store.delete(0)
    packs = _names(store.path / "packs")

    def pin(one: Store) -> None:

        hold(PIN)
        with one.resources.catalog().write() as transaction:
            transaction.put_pin(PIN, this_process(), one.resources.tier.pack_ids())

    meanwhile(pin)
    assert store.gc() == Collected(kept_packs=2)
    assert _names(store.path / "packs") == packs
    # The save has ended without removing its pin. The collection detects this.
    let_go(PIN)
    assert store.gc().repacked_packs == 1
    _whole(store, 1)


def test_checkpoint_committed_during_a_repack_is_respected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a checkpoint whose pin is gone, and whose reused partitions must stay."""
    _save(store, 0, 1)
    store.delete(0)
    with Store.open(store.path, create=True) as other:
        # The collection reads the packs before they are locked.
        placed: list[None] = []
        original = repack_module._Batch.carry_out

        def carry_out(self: repack_module._Batch, *arguments: object) -> None:
            if not placed:
                placed.append(None)
                assert other.save(_state(0), step=7).written_bytes == 0
            original(self, *arguments)  # type: ignore[arg-type]  # as it was called

        monkeypatch.setattr(repack_module._Batch, "carry_out", carry_out)
        done = store.gc()
    assert placed
    assert done.repacked_packs == 0
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 7]
    assert_same(store.load(7), _state(0))
    assert_same(store.load(1), _state(1))
    assert store.verify() == []


def test_unrelated_checkpoint_does_not_stop_a_repack(store: Store, meanwhile: Callable[[Meanwhile], None]) -> None:
    """Test a manifest that needs no partition of the pack."""
    _save(store, 0, 1)
    store.delete(0)
    meanwhile(lambda one: one.save({"new": _bytes(70, 1)}, step=2))
    assert store.gc().repacked_packs == 1
    assert_same(store.load(2), {"new": _bytes(70, 1)})
    assert_same(store.load(1), _state(1))


def test_a_commit_at_the_last_moment_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a commit between the last read of the manifests and the transaction, after the pin was removed."""
    _save(store, 0, 1)
    store.delete(0)
    pinned, go_on = threading.Event(), threading.Event()

    def pause(event: Event) -> None:
        if event.name == "catalog.pinned" and threading.current_thread() is thread:
            pinned.set()
            assert go_on.wait(60)

    with Store.open(store.path, create=True) as other, events.observe(pause):
        thread = threading.Thread(target=lambda: other.save(_state(0), step=7))
        original, entering = StoreReachability.live, repack_module._Batch._enter

        def enter(self: repack_module._Batch, *arguments: object) -> object:
            def live(needed: StoreReachability) -> object:
                found = original(needed)
                if not go_on.is_set():
                    go_on.set()
                    thread.join()
                return found

            monkeypatch.setattr(StoreReachability, "live", live)
            return entering(self, *arguments)  # type: ignore[arg-type]  # as it was called

        def carry_out(self: repack_module._Batch, *arguments: object) -> None:
            # The save has read the packs, and pinned them, before they are locked.
            thread.start()
            assert pinned.wait(60)
            carrying_out(self, *arguments)  # type: ignore[arg-type]  # as above

        carrying_out = repack_module._Batch.carry_out
        monkeypatch.setattr(repack_module._Batch, "_enter", enter)
        monkeypatch.setattr(repack_module._Batch, "carry_out", carry_out)
        assert store.gc().repacked_packs == 0
    assert_same(store.load(7), _state(0))
    assert_same(store.load(1), _state(1))
    assert store.verify() == []


def _copied_twice(store: Store) -> set[Path]:
    """Repack a pack that is mostly garbage, and bring the pack back, as after a crash; return the packs before."""
    _save(store, 0, 1)
    store.delete(0)
    packs = {path: path.read_bytes() for path in (store.path / "packs").iterdir()}
    store.gc()
    for path, data in packs.items():
        path.write_bytes(data)
    store.resources.rebuild_catalog()
    return set(packs)


def test_relied_copy_must_be_live(store: Store, meanwhile: Callable[[Meanwhile], None]) -> None:
    """Test that the first copy stays if another collection frees the second copy."""
    packs = _copied_twice(store)
    copy = next(path for path in (store.path / "packs").iterdir() if path not in packs)

    def take(one: Store) -> None:
        with one.resources.catalog().write() as transaction:
            transaction.put_pack(PackId(bytes.fromhex(copy.stem)), registry.PACK_FREED, 0, 0)

    meanwhile(take)
    assert store.gc().repacked_packs == 0
    assert {path.name for path in packs} <= _names(store.path / "packs")


def test_two_collections_at_once_lose_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a collection that has chosen frames which the other has already copied: it leaves no file."""
    _save(store, 0, 1)
    store.delete(0)
    results: list[Collected] = []
    original = repack_module._Batch.carry_out

    def carry_out(self: repack_module._Batch, *arguments: object) -> None:
        if not results:
            results.append(Collected())
            with Store.open(store.path, create=True) as other:
                results.append(other.gc())
        original(self, *arguments)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(repack_module._Batch, "carry_out", carry_out)
    assert store.gc().repacked_packs == 0
    assert results[1].repacked_packs == 1
    assert store.resources.usage().packs == 2
    _whole(store, 1)


def test_packs_of_a_later_batch_that_another_collection_frees(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a plan of several new packs, of which another collection carries out all parts first."""
    keep = {f"kept{number}": _bytes(100 + number, 1) for number in range(2)}
    for number, (name, tensor) in enumerate(keep.items()):
        store.save({name: tensor, "own": _bytes(number, 3)}, step=number)
    store.save(keep, step=2)
    store.delete(0)
    store.delete(1)
    original, results = repack_module._Batch.carry_out, list[Collected]()

    def carry_out(self: repack_module._Batch, *arguments: object) -> None:
        if not results:
            results.append(Collected())
            with Store.open(store.path) as other:
                results.append(other.gc())
        original(self, *arguments)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(repack_module, "_BATCH", 1)
    monkeypatch.setattr(repack_module._Batch, "carry_out", carry_out)
    assert store.gc().repacked_packs == 0
    assert results[1].repacked_packs == 2
    assert_same(store.load(2), keep)
    assert store.verify() == []


def test_dry_run_beside_a_collection(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a dry run does not count packs that another collection has repacked since the plan."""
    _save(store, 0, 1)
    store.delete(0)
    original, results = collect_module.plan_repack, list[Collected]()

    def plan(*arguments: object) -> object:
        planned = original(*arguments)  # type: ignore[arg-type]  # as it was called
        with Store.open(store.path) as other:
            results.append(other.gc())
        return planned

    monkeypatch.setattr(collect_module, "plan_repack", plan)
    assert store.gc(dry_run=True).freed_packs == 0
    assert results[0].repacked_packs == 1
    _whole(store, 1)


def test_a_damaged_frame_is_not_copied_and_its_pack_stays(store: Store) -> None:
    """Test that the damage is left to a repair, because a copy would spread it."""
    _save(store, 0, 1)
    store.delete(0)
    (old,) = (path for path in (store.path / "packs").iterdir() if path.stat().st_size > 5 * MIB)
    place = old.read_bytes().index(SHARED[:64].numpy().tobytes())
    flip(old, 8 * (place + 1000))
    assert store.gc() == Collected(kept_packs=2)
    assert old.exists()
    assert {finding.kind for finding in store.verify()} >= {"damaged-frame"}


def test_a_second_copy_needs_no_third(store: Store) -> None:
    """Test a crash after the copy: the pack that is mostly garbage is freed, and nothing is written."""
    _copied_twice(store)
    assert store.resources.usage().packs == 3
    done = store.gc()
    assert (done.freed_packs, done.repacked_packs, done.copied_bytes) == (1, 1, 0)
    _whole(store, 1)


class Full(Files):
    """A disk without space for a new pack."""

    full = False

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Write, or refuse."""
        if self.full and path.suffix == ".tmp":
            raise OutOfSpaceError(f"no room for {path.name}")
        super().pwrite(descriptor, buffers, offset, path)


@pytest.fixture
def full_store(store_path: Path) -> Iterator[tuple[Store, Full]]:
    """Return a store on this disk."""
    disk = Full()
    with Store(NvmeTier(store_path, StoreConfig(), files=disk)) as store:
        yield store, disk


def test_without_room_for_a_copy_the_rest_is_freed_all_the_same(full_store: tuple[Store, Full]) -> None:
    """Test that a collection on a full disk frees space, and that repacks wait."""
    store, disk = full_store
    _save(store, 0, 1)
    store.save({"other": _bytes(50, 2)}, step=2)
    store.delete(0)
    store.delete(2)
    disk.full = True
    done = store.gc()
    assert (done.freed_packs, done.repacked_packs) == (1, 0)
    assert not [path for path in (store.path / "packs").iterdir() if path.suffix == ".tmp"]
    disk.full = False
    assert store.gc().repacked_packs == 1
    _whole(store, 1)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_that_a_kill_left_is_gone_after_one_collection(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """Test both orders of the copy and the original pack."""
    _save(store, 0, 1)
    store.delete(0)
    killed = tmp_path / "killed"

    def kill(event: Event) -> None:
        if event.name == "pack.sealed":
            shutil.copytree(store.path, killed)

    before = {path.name for path in (store.path / "packs").iterdir()}
    with events.observe(kill):
        store.gc()
    (copy,) = {path.name for path in (killed / "packs").iterdir()} - before
    listed = NvmeTier.pack_ids

    def ordered(tier: NvmeTier) -> list[PackId]:
        return sorted(listed(tier), key=lambda pack_id: (layout.pack_name(pack_id) == copy) != is_first)

    monkeypatch.setattr(NvmeTier, "pack_ids", ordered)
    with Store.open(killed, create=True) as again:
        _save(again, 2)
        assert again.gc(dry_run=True) == again.gc()
        assert again.gc().freed_packs == 0
        _whole(again, 1, 2)
