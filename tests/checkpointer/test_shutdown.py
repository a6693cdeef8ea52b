"""Test the end of background saves, and their use of resources."""

from __future__ import annotations

import gc
import signal
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import ClosedStoreError, StorageError
from asymcheck.storage.shm import ring_writer
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import (
    assert_stored,
    copy_of,
    linear_loop,
    rings,
)


def test_a_store_that_is_closed_first_has_everything(disk: Disk, store_path: Path, config: CaptureConfig) -> None:
    """Test that checkpoints in flight become durable, that closing is allowed, and that another step raises."""
    _, _, loop = linear_loop()
    with open_on(disk, store_path) as store:
        checkpointer = Checkpointer(store, loop.state, capture=config, every=1, keep=None)
        disk.delay_s = 0.002
        for step in range(3):
            loop.iterate(step)
            checkpointer.step(step)
    for _ in range(2):
        with pytest.raises(ClosedStoreError):
            checkpointer.step(3)
    checkpointer.close()
    assert list(Path(config.ring_folder).iterdir()) == []
    with Store.open(store_path, create=True) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1, 2]


def test_closed_checkpointer_saves_and_restores_nothing(store_path: Path, config: CaptureConfig) -> None:
    """Test each method that would start the background thread and take the lock of the run again."""
    _, _, loop = linear_loop()
    with Store.open(store_path, create=True) as store:
        checkpointer = Checkpointer(store, loop.state, capture=config, every=1, keep=None)
        loop.iterate(0)
        checkpointer.step(0)
        for _ in range(2):
            checkpointer.close()
        calls = [
            lambda: checkpointer.step(1),
            lambda: checkpointer.save(1),
            checkpointer.restore,
            checkpointer.rollback,
        ]
        for call in calls:
            with pytest.raises(ClosedStoreError, match="Checkpointer of run 'default' was closed; call close"):
                call()
        assert checkpointer.latest_step == 0
        with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as another:
            assert another.restore() is not None


@pytest.mark.slow
def test_a_checkpointer_that_is_dropped_finishes_with_the_store(
    disk: Disk, store_path: Path, config: CaptureConfig
) -> None:
    """Test that a dropped checkpointer fences no more optimizers, and that SIGTERM has its default effect again."""
    from torch.optim import optimizer as torch_optimizer

    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    _, _, loop = linear_loop()
    with open_on(disk, store_path) as store:
        checkpointer = Checkpointer(store, loop.state, capture=config, every=1, keep=None)
        loop.iterate(0)
        checkpointer.step(0)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        expected = copy_of(loop.state)
        del checkpointer
        gc.collect()
        loop.iterate(1)
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(hooks) == before
    assert list(Path(config.ring_folder).iterdir()) == []
    with Store.open(store_path, create=True) as store:
        assert_stored(store, {0: expected})


def test_an_error_in_the_loop_loses_no_step(store: Store, config: CaptureConfig, tmp_path: Path) -> None:
    """Test that leaving the block by an exception drains the background."""
    _, _, loop = linear_loop()
    loop.iterate(0)

    def train() -> None:
        with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
            checkpointer.step(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert_stored(store, {0: copy_of(loop.state)})
    assert rings(tmp_path) == []


@pytest.mark.parametrize("started", range(10))
def test_a_limit_of_threads_costs_only_the_steps_it_refuses(
    store: Store, config: CaptureConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    """Test that no ring and no thread stays behind, and that a later step is saved."""
    _, _, loop = linear_loop()
    start, allowed, before = threading.Thread.start, iter(range(started)), threading.active_count()

    def start_some(thread: threading.Thread) -> None:
        if next(allowed, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(ring_writer, "_GROWTH_BYTES", 1 << 20)
    with Checkpointer(store, loop.state, capture=config, every=1) as checkpointer:
        loop.iterate(0)
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", start_some)
            with pytest.raises(StorageError, match=r"cannot start thread asymcheck-.*ulimit -u.*pids.max"):
                checkpointer.step(0)
        assert (rings(tmp_path), threading.active_count()) == ([], before)
        loop.iterate(1)
        checkpointer.step(1)
    assert_stored(store, {1: copy_of(loop.state)})


def test_two_runs_at_once_have_a_ring_each(store: Store, config: CaptureConfig, tmp_path: Path) -> None:
    """Test one model that two checkpointers of one process save as two runs."""
    _, _, loop = linear_loop()
    expected: dict[int, object] = {}
    with (
        Checkpointer(store, loop.state, run="one", capture=config, every=1, keep=None) as one,
        Checkpointer(store, loop.state, run="two", every=2, capture=config, keep=None) as two,
    ):
        for step in range(6):
            loop.iterate(step)
            one.step(step)
            two.step(step)
            expected[step] = copy_of(loop.state)
            assert len(rings(tmp_path)) == 2
    assert_stored(store, expected, "one")
    assert_stored(store, {step: state for step, state in expected.items() if step % 2 == 0}, "two")
    assert rings(tmp_path) == []


def _many_small(store: Store, config: CaptureConfig, look: Callable[[], int]) -> tuple[int, int]:
    """Save 300 steps of a small state; return the results of ``look`` after 100 and after all steps."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    early = 0
    with Checkpointer(
        store, {"model": model, "optimizer": optimizer}, capture=config, every=1, keep=None
    ) as checkpointer:
        for step in range(300):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
            if step == 100:
                checkpointer.wait()
                early = look()
        checkpointer.wait()
        return early, look()


@pytest.mark.slow
def test_memory_and_threads_stay_constant(store: Store, config: CaptureConfig) -> None:
    """Test 300 checkpoints, and that no thread or memory is left at the end."""
    threads = threading.active_count()
    counts: list[int] = []

    def look() -> int:
        gc.collect()
        counts.append(threading.active_count())
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early, late = _many_small(store, config, look)
    finally:
        tracemalloc.stop()
    assert late - early < 400_000, f"{late - early} bytes more after 200 checkpoints"
    assert counts[0] == counts[1]
    assert threading.active_count() == threads
