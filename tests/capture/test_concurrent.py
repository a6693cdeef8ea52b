"""Test concurrent saves, loads and collections: each sees complete checkpoints, and no needed data is lost."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig, events
from asymcheck.errors import StorageError
from asymcheck.storage.nvme import PackFile
from asymcheck.types import PackId
from tests.store.equality import assert_same

MIB = 1 << 20
CONFIG = StoreConfig(partition_bytes=65_536, bundle_below_bytes=4096, inline_bytes=64, pack_bytes=MIB)


def _tensor(seed: int, size: int = MIB) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _together(*calls: Callable[[], object]) -> None:
    """Run all functions at the same time; raise the first error."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        try:
            start.wait(60)
            call()
        except BaseException as error:  # noqa: BLE001 - given to the test below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::asymcheck.errors.StepOrderWarning")
def test_threads_may_save_at_the_same_time(store_path: Path) -> None:
    """Test separate runs and a common run, with common bytes: every checkpoint is complete."""
    common = _tensor(0)

    with Store.open(store_path, config=CONFIG, create=True) as store:

        def save(number: int) -> None:
            for step in range(5):
                state = {"common": common, "own": _tensor(100 * number + step)}
                store.save(state, step=10 * step + number, run=f"run{number % 2}")

        _together(*(lambda number=number: save(number) for number in range(4)))
        for number in range(4):
            for step in range(5):
                state = {"common": common, "own": _tensor(100 * number + step)}
                assert_same(store.load(10 * step + number, run=f"run{number % 2}"), state)
        assert store.verify() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::asymcheck.errors.SkippedCheckpointWarning")
def test_collecting_beside_saves_and_loads_loses_nothing(store_path: Path) -> None:
    """Test retention of two checkpoints, a collection and a reader, each with a separate store object."""
    done = threading.Event()
    loads = []

    def expected(step: int) -> dict[str, object]:
        return {"step": step, "x": _tensor(step // 3), "y": _tensor(1000 + step)}

    def save() -> None:
        try:
            with Store.open(store_path, config=CONFIG, create=True) as store:
                for step in range(25):
                    store.save(expected(step), step=step)
                    if step >= 2:
                        store.delete(step - 2)
        finally:
            done.set()

    def collect() -> None:
        with Store.open(store_path, config=CONFIG, create=True) as store:
            while not done.is_set():
                store.gc()

    def load() -> None:
        with Store.open(store_path, config=CONFIG, read_only=True) as store:
            while not done.is_set():
                state = store.load()
                assert isinstance(state, dict)
                assert_same(
                    state, {"step": state["step"], "x": _tensor(state["step"] // 3), "y": _tensor(1000 + state["step"])}
                )
                loads.append(state["step"])

    with Store.open(store_path, config=CONFIG, create=True) as store:
        store.save(expected(0), step=0)
    _together(save, collect, load)
    with Store.open(store_path, config=CONFIG, create=True) as store:
        store.gc()
        for step in (23, 24):
            assert_same(store.load(step), expected(step))
        assert store.verify() == []
    assert loads == sorted(loads)
    assert loads


def _collect_at(event_name: str, store: Store, times: int) -> Callable[[events.Event], None]:
    left = [times]

    def observer(event: events.Event) -> None:
        if event.name == event_name and left[0]:
            left[0] -= 1
            store.gc()

    return observer


def _payloads(store: Store) -> dict[PackId, int]:
    """Return the payload bytes of each pack."""
    tier = store.resources.nvme
    return {pack_id: int(tier.index_of(pack_id).entries["stored_length"].sum()) for pack_id in tier.pack_ids()}


@pytest.mark.slow(quick=["catalog.pinned"])
@pytest.mark.parametrize("event", ["pack.created", "pack.synced", "pack.sealed", "catalog.pinned", "manifest.synced"])
def test_collection_during_a_save_takes_nothing_needed(store_path: Path, event: str) -> None:
    """Test a reused partition that is collected before it is pinned: the save writes it again."""
    old, new = _tensor(1, 4 * MIB), _tensor(2, 4 * MIB)
    with (
        Store.open(store_path, config=CONFIG, create=True) as store,
        Store.open(store_path, config=CONFIG, create=True) as other,
    ):
        store.save({"old": old}, step=1)
        packs = _payloads(store)
        store.delete(1)
        with events.observe(_collect_at(event, other, 1)):
            saved = store.save({"old": old, "new": new}, step=2)
        assert_same(store.load(), {"old": old, "new": new})
        assert store.verify() == []
        # The save may read the index of a pack at the moment of the collection, which keeps that pack.
        kept = sum(packs[pack_id] for pack_id in packs.keys() & _payloads(store).keys())
        assert saved.written_bytes == 8 * MIB - kept
        if event != "pack.created":
            assert kept in (0, 4 * MIB)
        store.gc()
        assert_same(store.load(), {"old": old, "new": new})


def test_partitions_that_were_taken_away_are_written_again(store_path: Path) -> None:
    """Test a collection after the last write and before the pin: the save detects it, and writes again."""
    old, new = _tensor(1, 4 * MIB), _tensor(2, MIB)
    with (
        Store.open(store_path, config=CONFIG, create=True) as store,
        Store.open(store_path, config=CONFIG, create=True) as other,
    ):
        store.save({"old": old}, step=1)
        store.delete(1)
        with events.observe(_collect_at("pack.sealed", other, 1)):
            assert store.save({"old": old, "new": new}, step=2).written_bytes == 5 * MIB
        assert_same(store.load(), {"old": old, "new": new})


def test_save_gives_up_after_repeated_collections(store_path: Path) -> None:
    """Test that the number of attempts is limited, with a clear error and without a commit."""
    config = StoreConfig(partition_bytes=65_536, bundle_below_bytes=4096, commit_attempts=1)
    old, new = _tensor(1), _tensor(2)
    with (
        Store.open(store_path, config=config, create=True) as store,
        Store.open(store_path, config=config, create=True) as other,
    ):
        store.save({"old": old}, step=1)
        store.delete(1)
        with (
            events.observe(_collect_at("pack.sealed", other, 1)),
            pytest.raises(StorageError, match="1 times during one save"),
        ):
            store.save({"old": old, "new": new}, step=2)
        assert store.checkpoints() == []
        store.save({"old": old, "new": new}, step=2)
        assert_same(store.load(), {"old": old, "new": new})


def test_checkpoint_committed_during_a_collection_survives(store_path: Path) -> None:
    """Test a checkpoint that needs a pack, and that is committed after the collection has listed all manifests."""
    old = _tensor(1, 4 * MIB)
    with (
        Store.open(store_path, config=CONFIG, create=True) as store,
        Store.open(store_path, config=CONFIG, create=True) as other,
    ):
        store.save({"old": old}, step=1)
        store.delete(1)
        real = other.resources.tier.open_pack
        saved = []

        def open_pack(pack_id: PackId, *, wait: bool = True) -> PackFile:
            if not saved:
                saved.append(True)
                store.save({"old": old}, step=2)
            return real(pack_id, wait=wait)

        other.resources.tier.open_pack = open_pack  # type: ignore[method-assign]  # between listing and locking
        collected = other.gc()
        assert collected.freed_packs == 0
        assert_same(store.load(), {"old": old})
        assert store.verify() == []
