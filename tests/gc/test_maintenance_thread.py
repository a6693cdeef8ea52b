"""Test background threads of a training: failing commits, and pruning after commits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import CaptureConfig, Checkpointer, Retention, Store, StoreConfig
from asymcheck.capture.inflight import Capture
from asymcheck.capture.ring_flush import RingFlusher
from asymcheck.errors import LostCheckpointError, OutOfSpaceError, PruneError, StorageError
from asymcheck.executor import begin
from asymcheck.gc import retention_runner
from asymcheck.gc.collect import Collected, collect
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.reachability import StoreReachability
from tests.checkpointer.disks import SmallDrive


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Return an empty store."""
    with Store.open(store_path, create=True) as opened:
        yield opened


def test_a_capture_is_lost_and_reported_when_the_commit_thread_meets_an_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that no call waits forever: wait() raises, the next checkpoint is stored, and close() returns."""
    failures = [RuntimeError("broken")]
    queue_write = RingFlusher._queue_write

    def fail_once(flusher: RingFlusher, capture: Capture, number: int) -> None:
        if failures:
            raise failures.pop()
        queue_write(flusher, capture, number)

    monkeypatch.setattr(RingFlusher, "_queue_write", fail_once)
    state = {"w": torch.zeros(100_000)}
    checkpointer = Checkpointer(store, state, capture=CaptureConfig(ring_folder=str(tmp_path)), every=1, keep=None)
    checkpointer.step(0)
    with pytest.raises(LostCheckpointError, match="broken"):
        in_time(checkpointer.wait)
    state["w"] += 1
    checkpointer.step(1)
    in_time(checkpointer.close)
    assert [one.step for one in store.checkpoints()] == [1]


def test_frames_of_the_next_capture_are_written_while_a_collection_is_held_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that pruning has its own thread: the next checkpoint is durable before the collection ends."""
    held, may_go_on = threading.Event(), threading.Event()

    def collect_late(tier: NvmeTier, catalog: Catalog, *, needed: StoreReachability) -> Collected:
        held.set()
        assert may_go_on.wait(60)
        return collect(tier, catalog, needed=needed)

    monkeypatch.setattr(retention_runner, "collect", collect_late)
    state = {"w": torch.zeros(100_000)}
    config = CaptureConfig(ring_folder=str(tmp_path))
    with Checkpointer(store, state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer:
        checkpointer.step(0)
        assert held.wait(60)
        state["w"] += 1
        checkpointer.step(1)
        in_time(checkpointer.wait)
        assert [one.step for one in store.checkpoints()] == [0, 1]
        assert checkpointer.statistics().written_bytes >= 2 * 400_000
        may_go_on.set()
    assert [one.step for one in store.checkpoints()] == [1]
    assert store.verify() == []


def test_close_waits_for_a_collection_and_raises_its_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that close() raises the error of the collection, as for the commit thread."""

    def fail(*_: object, **__: object) -> Collected:
        time.sleep(0.2)
        raise StorageError("the device refused")

    monkeypatch.setattr(retention_runner, "collect", fail)
    config = CaptureConfig(ring_folder=str(tmp_path))
    checkpointer = Checkpointer(store, {"w": torch.zeros(1000)}, keep=Retention(keep_last=1), capture=config, every=1)
    checkpointer.step(0)
    with pytest.raises(PruneError, match="the device refused"):
        in_time(checkpointer.close)


@pytest.mark.slow
def test_a_store_gets_one_commit_ahead_of_a_collection_and_no_more(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that commits finally wait for the deletion of old checkpoints, which frees disk space."""
    may_go_on = threading.Event()

    def collect_late(tier: NvmeTier, catalog: Catalog, *, needed: StoreReachability) -> Collected:
        assert may_go_on.wait(60)
        return collect(tier, catalog, needed=needed)

    monkeypatch.setattr(retention_runner, "collect", collect_late)
    state = {"w": torch.zeros(100_000)}
    config = CaptureConfig(ring_folder=str(tmp_path), ring_bytes=8 << 20)
    with Checkpointer(store, state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer:
        for step in range(4):
            state["w"] += 1
            checkpointer.step(step)
        time.sleep(1)
        assert [one.step for one in store.checkpoints()] == [0, 1]
        may_go_on.set()
    assert [one.step for one in store.checkpoints()] == [3]


@pytest.mark.parametrize("method", ["step", "save"])
def test_a_drive_does_not_stay_full_of_the_packs_of_a_failed_save(
    store_path: Path, tmp_path: Path, method: str
) -> None:
    """Test that a save succeeds again after saves that failed at the last file and at the first."""
    state = {"w": torch.zeros(150_000)}
    config = CaptureConfig(ring_folder=str(tmp_path))
    lost: list[int] = []
    with Store(NvmeTier(store_path, StoreConfig(slots=1), files=SmallDrive())) as store:
        with Checkpointer(store, state, keep=Retention(keep_last=1), capture=config, every=1) as checkpointer:
            for step in range(100):
                state["w"] += 1
                try:
                    getattr(checkpointer, method)(step)
                    in_time(checkpointer.wait)
                except (LostCheckpointError, OutOfSpaceError):
                    lost.append(step)
                else:
                    if lost:
                        break
        assert lost[0] == 1
        assert [one.step for one in store.checkpoints()] == [step]
        assert step < 99


def in_time(call: Callable[[], object]) -> None:
    """Call the function; fail unless it returns soon, and raise its error."""
    begin(call, "test").result(60)
