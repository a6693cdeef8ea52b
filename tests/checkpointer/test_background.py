"""The background: back-pressure, what fails in it, what it leaves behind, and how it ends."""

from __future__ import annotations

import errno
import gc
import os
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import (
    CaptureWarning,
    CheckpointNotFoundError,
    ClosedStoreError,
    LostCheckpointError,
    LostCheckpointWarning,
    OutOfSpaceError,
    StaleStateWarning,
    UnsupportedValueError,
)
from asymcheck.pipeline import capture
from asymcheck.pipeline.flush import copy_partition
from asymcheck.tiers.dram_ring import RingReader
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import (
    CONFIG,
    Loop,
    assert_every_step_is_right,
    assert_stored,
    copy_late,
    folder_for_rings,
    linear_loop,
    rings,
    snapshot,
)
from tests.store.equality import assert_same

FRAMES = 3 * 20480 + 3 * 4096
"""Bytes of frames of the state of :func:`linear_loop`, about."""


@pytest.fixture
def disk() -> Disk:
    """A disk."""
    return Disk()


@pytest.fixture
def store(disk: Disk, store_path: Path) -> Iterator[Store]:
    """A new store on it."""
    with open_on(disk, store_path) as opened:
        yield opened
        disk.full = None
        disk.opened.set()


@pytest.fixture
def config(tmp_path: Path) -> CaptureConfig:
    """Rings in a folder of the test's own."""
    return CaptureConfig(proof="full", ring_folder=str(folder_for_rings(tmp_path)))


def _sized(config: CaptureConfig, size: int) -> CaptureConfig:
    return CaptureConfig(size, config.ring_folder, config.proof)


def _entries(path: Path) -> list[int]:
    """Return the states of the captures in the only ring."""
    (ring,) = rings(path)
    with RingReader(ring) as reader:
        return [entry.state for entry in reader.captures]


def _large_loop(*, eager: bool) -> Loop:
    """Return a loop of many partitions, all copied in ``step()`` or all beside the training."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1500 + 300 * number)) for number in range(20)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def iterate(step: int) -> None:
        for value in model:
            value.grad = value.detach() * 0.5 + step
        optimizer.step()

    state: dict[str, object] = {"model": model.state_dict()} if eager else {"model": model, "optimizer": optimizer}
    return Loop(state, iterate)


# ------------------------------------------------------------------------------------------------------ back-pressure


@pytest.mark.parametrize("eager", [False, True], ids=["deferred", "eager"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_ring_of_just_over_one_state_makes_training_wait(
    store: Store, disk: Disk, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, late: bool, eager: bool
) -> None:
    """Every step is right, without a warning, though the disk is slower than training."""
    if late:
        copy_late(monkeypatch)
    disk.delay_s = 0.001
    loop = _large_loop(eager=eager)
    needed = (1 if eager else 2) * sum(_frame(1500 + 300 * number) for number in range(20))
    assert_every_step_is_right(store, loop, 6, _sized(config, needed + 100_000))


def _frame(elements: int) -> int:
    pieces = -(-4 * elements // CONFIG.partition_bytes)
    return -(-4 * elements // 4096) * 4096 + pieces * 4096


@pytest.mark.parametrize("eager", [False, True], ids=["deferred", "eager"])
@pytest.mark.parametrize("size", [1 << 15, 1 << 17])
def test_a_ring_of_much_less_than_one_state_is_streamed_through(
    store: Store, config: CaptureConfig, tmp_path: Path, size: int, eager: bool
) -> None:
    """One warning; every step is right; nothing in the ring says that a state is complete there."""
    loop = _large_loop(eager=eager)
    seen = []

    def look(checkpointer: Checkpointer) -> None:
        checkpointer.wait("dram")
        seen.append(_entries(tmp_path))

    loop.between = look
    with pytest.warns(CaptureWarning, match="smaller than the state") as caught:
        assert_every_step_is_right(store, loop, 4, _sized(config, size))
    assert len(caught) == 1
    assert caught[0].filename.endswith("loops.py")
    assert seen == [[]] * 4
    assert rings(tmp_path) == []


def test_a_state_that_fits_but_for_gaps_is_streamed_through(store: Store, config: CaptureConfig) -> None:
    """States of other sizes have left gaps, each too small for what is to come, and together large enough."""
    block = 2 * 4096 - 4096
    state: dict[str, object] = {}
    loop = Loop(state, lambda _step: None)

    def change(step: int) -> None:
        state.clear()
        sizes = [6] if step % 2 == 0 else [3, 3, 4]
        state.update({str(number): torch.full((size * block // 4,), step + 0.5) for number, size in enumerate(sizes)})

    loop.iterate = change
    assert_every_step_is_right(store, loop, 6, _sized(config, 2 * 10 * 4096 + 8192))


def test_a_full_disk_ends_a_capture_that_streams(store: Store, disk: Disk, config: CaptureConfig) -> None:
    """Nobody waits for room that cannot come; when the disk has room again, so has the ring."""
    loop = _large_loop(eager=False)
    checkpointer = Checkpointer(store, loop.state, capture=_sized(config, 1 << 16), on_error="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        warnings.simplefilter("ignore", LostCheckpointWarning)
        disk.full = "packs"
        for step in range(3):
            loop.iterate(step)
            checkpointer.step(step)
        checkpointer.wait()
        assert checkpointer.statistics().lost == 3
        disk.full = None
        loop.iterate(3)
        checkpointer.step(3)
        expected = snapshot(loop.state)
        checkpointer.close()
    assert_stored(store, {3: expected})


def test_more_captures_wait_for_the_disk_than_a_ring_has_entries(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path
) -> None:
    """There are 64 entries; the captures beyond are right, too, and their places are freed once."""
    _, _, loop = linear_loop(24)
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=_sized(config, 8 << 20)) as checkpointer:
        disk.opened.clear()
        for step in range(90):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = snapshot(loop.state)
        checkpointer.wait("dram")
        assert _entries(tmp_path) == [1] * 64
        disk.opened.set()
        for step in range(90, 100):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = snapshot(loop.state)
    assert_stored(store, expected)
    assert store.verify() == []


# ------------------------------------------------------------------------------------------------------- what fails


def test_no_room_for_the_ring_is_a_clear_error(
    store: Store, config: CaptureConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what to do, leaves no file, and the next step may succeed."""
    reserve = os.posix_fallocate

    def refuse(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".ring"):
            raise OSError(errno.ENOSPC, "no room")
        reserve(descriptor, offset, length)

    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        for _ in range(2):
            with pytest.raises(OutOfSpaceError, match=r"ring_bytes.*ring_folder"):
                checkpointer.step(0)
    assert rings(tmp_path) == []
    assert checkpointer.last_step is None
    assert checkpointer.step(0)
    checkpointer.close()
    assert_stored(store, {0: snapshot(loop.state)})


@pytest.mark.parametrize("report", ["step", "wait", "close"])
@pytest.mark.parametrize("what", ["packs", "manifests"])
def test_a_full_disk_is_reported_and_later_steps_are_saved(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path, what: str, report: str
) -> None:
    """In the loop's own thread, with the cause."""
    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config)
    expected: dict[int, object] = {}
    for step in range(4):
        loop.iterate(step)
        disk.full = what if step == 1 else None
        checkpointer.step(step)
        expected[step] = snapshot(loop.state)
        if step == 1:
            _wait_in_silence(checkpointer)
            # Without room for anything: what is reported now is the loss, and not another failure.
            with pytest.raises(LostCheckpointError, match="step 1 of run 'default' was not saved: no room") as caught:
                _call(checkpointer, report)
            assert isinstance(caught.value.__cause__, OutOfSpaceError)
            if report == "close":
                break
        checkpointer.wait()
    checkpointer.close()
    disk.full = None
    assert checkpointer.statistics().lost == 1
    if report == "close":
        _check_taken_up(store, config, expected)
    else:
        del expected[1]
        assert_stored(store, expected)
    assert rings(tmp_path) == []


def _call(checkpointer: Checkpointer, report: str) -> None:
    if report == "step":
        checkpointer.step(9)
    elif report == "wait":
        checkpointer.wait()
    else:
        checkpointer.close()


def _wait_in_silence(checkpointer: Checkpointer) -> None:
    background = checkpointer._background
    assert background is not None
    background.wait("nvme")


def _check_taken_up(store: Store, config: CaptureConfig, expected: dict[int, object]) -> None:
    """What could not be stored stayed in memory for the next start."""
    _, _, loop = linear_loop()
    loop.iterate(0)
    restored = Checkpointer(store, loop.state, capture=config).restore()
    assert restored is not None
    assert restored.step == 1
    assert_stored(store, expected)


def test_a_state_that_is_refused_between_others_costs_nothing(store: Store, config: CaptureConfig) -> None:
    """The error comes from ``step()`` itself; steps before and after are right."""
    _, _, loop = linear_loop()
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=config) as checkpointer:
        for step in range(5):
            loop.iterate(step)
            if step == 2:
                loop.state["culprit"] = {1}
                with pytest.raises(UnsupportedValueError, match="culprit"):
                    checkpointer.step(step)
                del loop.state["culprit"]
                assert checkpointer.last_step == 1
                continue
            checkpointer.step(step)
            expected[step] = snapshot(loop.state)
    assert_stored(store, expected)


def test_a_copy_that_fails_inside_step_frees_its_places(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes from ``step()``; a ring with room for one state has room again at once."""
    state: dict[str, object] = {str(number): torch.randn(1800) for number in range(6)}
    copy, left = copy_partition, [4]

    def fail(*arguments: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        copy(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(capture, "copy_partition", fail)
    with Checkpointer(store, state, capture=_sized(config, 6 * 12288 + 16384)) as checkpointer:
        with pytest.raises(MemoryError):
            checkpointer.step(0)
        checkpointer.step(1)
    assert_stored(store, {1: snapshot(state)})


# ------------------------------------------------------------------------------------------------------------ waiting


def test_waiting_for_memory_does_not_wait_for_the_disk(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path
) -> None:
    """The first step of a run, too, is complete in memory, and durable when the disk has it."""
    _, _, loop = linear_loop()
    loop.iterate(0)
    with Checkpointer(store, loop.state, capture=config) as checkpointer:
        disk.opened.clear()
        checkpointer.step(0)
        checkpointer.wait("dram")
        assert _entries(tmp_path) == [1]
        assert store.checkpoints() == []
        disk.opened.set()
        checkpointer.wait("nvme")
        assert _entries(tmp_path) == [2]
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]
        assert checkpointer.statistics().durable == 1


@pytest.mark.parametrize("steps", [1, 4])
def test_rollback_takes_the_newest_state_from_memory(
    store: Store, disk: Disk, config: CaptureConfig, steps: int
) -> None:
    """Bit for bit, without a look at a pack; training goes on in a generation of its own."""
    model, _, loop = linear_loop()
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=config) as checkpointer:
        for step in range(steps):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = snapshot(loop.state)
        checkpointer.wait()
        loop.iterate(99)
        model.weight.data.fill_(float("nan"))
        disk.read.clear()
        back = checkpointer.rollback()
        assert [path for path in disk.read if path.parent.name == "packs"] == []
        assert back.step == checkpointer.last_step == steps - 1
        assert_same(snapshot(loop.state), expected[steps - 1])
        loop.iterate(steps)
        checkpointer.step(steps)
        expected[steps] = snapshot(loop.state)
    assert_stored(store, expected)
    assert [(c.generation, c.on_line) for c in store.checkpoints()] == [*([(1, True)] * steps), (2, True)]


def test_nothing_in_memory_is_no_rollback(store: Store, config: CaptureConfig) -> None:
    """It says so, and opens no generation."""
    _, _, loop = linear_loop()
    with pytest.raises(CheckpointNotFoundError, match="restore"):
        Checkpointer(store, loop.state, capture=config).rollback()
    assert not list((store.path / "heads").rglob("*.head"))


def test_statistics_add_up_and_outlive_close(store: Store, config: CaptureConfig) -> None:
    """Also over a second stretch of the same checkpointer."""
    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config)
    for stretch in (1, 2):
        for step in range(3 * stretch, 3 * stretch + 3):
            loop.iterate(step)
            checkpointer.step(step)
        checkpointer.close()
        found = checkpointer.statistics()
        assert (found.captures, found.durable, found.lost) == (3 * stretch, 3 * stretch, 0)
        state_bytes = sum(checkpoint.state_bytes for checkpoint in store.checkpoints())
        assert found.captured_bytes == state_bytes
        assert state_bytes // 2 < found.written_bytes <= state_bytes
        assert found.step_s > 0
        assert found.fence_s > 0
        assert found.ring_bytes > 0


# ------------------------------------------------------------------------------------------------------------- ending


def test_a_store_that_is_closed_first_has_everything(disk: Disk, store_path: Path, config: CaptureConfig) -> None:
    """What was begun is durable; closing the checkpointer is no error then, and another step is one."""
    _, _, loop = linear_loop()
    with open_on(disk, store_path) as store:
        checkpointer = Checkpointer(store, loop.state, capture=config)
        disk.delay_s = 0.002
        for step in range(3):
            loop.iterate(step)
            checkpointer.step(step)
    for _ in range(2):
        with pytest.raises(ClosedStoreError):
            checkpointer.step(3)
    checkpointer.close()
    assert list(Path(config.ring_folder).iterdir()) == []
    with Store.open(store_path) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1, 2]


def test_a_checkpointer_that_is_dropped_finishes_with_the_store(
    disk: Disk, store_path: Path, config: CaptureConfig
) -> None:
    """And optimizers are fenced no more."""
    from torch.optim import optimizer as torch_optimizer

    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    _, _, loop = linear_loop()
    with open_on(disk, store_path) as store:
        checkpointer = Checkpointer(store, loop.state, capture=config)
        loop.iterate(0)
        checkpointer.step(0)
        expected = snapshot(loop.state)
        del checkpointer
        gc.collect()
        loop.iterate(1)
    assert len(hooks) == before
    assert list(Path(config.ring_folder).iterdir()) == []
    with Store.open(store_path) as store:
        assert_stored(store, {0: expected})


def test_an_error_in_the_loop_loses_no_step(store: Store, config: CaptureConfig, tmp_path: Path) -> None:
    """Leaving the block by an exception drains all the same."""
    _, _, loop = linear_loop()
    loop.iterate(0)

    def train() -> None:
        with Checkpointer(store, loop.state, capture=config) as checkpointer:
            checkpointer.step(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert_stored(store, {0: snapshot(loop.state)})
    assert rings(tmp_path) == []


def test_two_runs_at_once_have_a_ring_each(store: Store, config: CaptureConfig, tmp_path: Path) -> None:
    """One model, saved by two checkpointers of one process under two names: both have every step."""
    _, _, loop = linear_loop()
    expected: dict[int, object] = {}
    with (
        Checkpointer(store, loop.state, run="one", capture=config) as one,
        Checkpointer(store, loop.state, run="two", every=2, capture=config) as two,
    ):
        for step in range(6):
            loop.iterate(step)
            one.step(step)
            two.step(step)
            expected[step] = snapshot(loop.state)
            assert len(rings(tmp_path)) == 2
    assert_stored(store, expected, "one")
    assert_stored(store, {step: state for step, state in expected.items() if step % 2 == 0}, "two")
    assert rings(tmp_path) == []


def _many_small(store: Store, config: CaptureConfig, look: Callable[[], int]) -> tuple[int, int]:
    """Save 300 steps of a small state; return what ``look`` says after 100 and after all."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    early = 0
    with Checkpointer(store, {"model": model, "optimizer": optimizer}, capture=config) as checkpointer:
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


def test_memory_and_threads_stay_as_they_are(store: Store, config: CaptureConfig) -> None:
    """Three hundred checkpoints: nothing grows with their number, and nothing is left at the end."""
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


# --------------------------------------------------------------------------------------------------- what is noticed


def test_a_state_that_does_not_change_is_noticed(store: Store, config: CaptureConfig) -> None:
    """Every tensor is that of the step before: perhaps another state is trained than the one that is saved."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        checkpointer.step(1)
        with pytest.warns(StaleStateWarning, match="step 1 .* bit for bit"):
            checkpointer.wait()
        loop.iterate(1)
        checkpointer.step(2)
        checkpointer.wait()
