"""Test backpressure: with a small ring or a slow disk, training waits and loses nothing."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.capture import background_saver
from asymcheck.config import CaptureConfig
from asymcheck.errors import (
    CaptureWarning,
    LostCheckpointWarning,
)
from asymcheck.storage.shm import ring_writer as ring_module
from asymcheck.types import readable_size
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import (
    CONFIG,
    Loop,
    assert_every_step_is_right,
    assert_stored,
    copy_late,
    copy_of,
    entries,
    linear_loop,
    rings,
    sized,
)
from tests.checkpointer.optimizers import update


def _large_loop(*, eager: bool) -> Loop:
    """Return a loop of many partitions, copied in ``step()`` or during training."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1500 + 300 * number)) for number in range(20)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def iterate(step: int) -> None:
        for value in model:
            value.grad = value.detach() * 0.5 + step
        optimizer.step()

    state: dict[str, object] = {"model": model.state_dict()} if eager else {"model": model, "optimizer": optimizer}
    return Loop(state, iterate)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True], ids=["deferred", "eager"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_ring_of_just_over_one_state_makes_training_wait(
    store: Store, disk: Disk, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, late: bool, eager: bool
) -> None:
    """Test that every step is correct, without a warning, with a disk that is slower than the training."""
    if late:
        copy_late(monkeypatch)
    disk.delay_s = 0.001
    loop = _large_loop(eager=eager)
    needed = (1 if eager else 2) * sum(_frame(1500 + 300 * number) for number in range(20))
    assert_every_step_is_right(store, loop, 6, sized(config, needed + 100_000))


def test_a_default_ring_that_is_too_small_names_the_remedy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the advice for a container whose /dev/shm is smaller than the state."""
    monkeypatch.setattr(background_saver, "default_bytes", lambda *_: 1 << 15)
    with (
        Checkpointer(store, {"weight": torch.zeros(100_000)}, every=1, keep=None) as checkpointer,
        pytest.warns(CaptureWarning, match="enlarge .* docker run --shm-size=…"),
    ):
        checkpointer.step(0)


def _frame(elements: int) -> int:
    pieces = -(-4 * elements // CONFIG.partition_bytes)
    return -(-4 * elements // 4096) * 4096 + pieces * 4096


@pytest.mark.slow(quick=["32768-eager"])
@pytest.mark.parametrize("eager", [False, True], ids=["deferred", "eager"])
@pytest.mark.parametrize("size", [1 << 15, 1 << 17])
def test_a_ring_of_much_less_than_one_state_is_streamed_through(
    store: Store, config: CaptureConfig, tmp_path: Path, size: int, eager: bool
) -> None:
    """Test that one warning is given, every step is correct, and no capture is complete in the ring.

    ``wait("memory")`` therefore waits for the store.
    """
    loop = _large_loop(eager=eager)
    seen = []

    def look(checkpointer: Checkpointer) -> None:
        checkpointer.wait("memory")
        seen.append((entries(tmp_path), len(store.checkpoints())))

    loop.between = look
    with pytest.warns(CaptureWarning, match="smaller than the state") as caught:
        assert_every_step_is_right(store, loop, 4, sized(config, size))
    assert len(caught) == 1
    assert caught[0].filename.endswith("loops.py")
    assert str(caught[0].message).startswith(f"the ring of {readable_size(size)} in ")
    assert str(caught[0].message).endswith("give a larger CaptureConfig(ring_bytes=…)")
    assert seen == [([], number) for number in range(1, 5)]
    assert rings(tmp_path) == []


def test_a_state_that_fits_but_for_gaps_is_streamed_through(store: Store, config: CaptureConfig) -> None:
    """Test a state that is smaller than the free space of the ring, but larger than each gap."""
    block = 2 * 4096 - 4096
    state: dict[str, object] = {}
    loop = Loop(state, lambda _step: None)

    def change(step: int) -> None:
        state.clear()
        sizes = [6] if step % 2 == 0 else [3, 3, 4]
        state.update({str(number): torch.full((size * block // 4,), step + 0.5) for number, size in enumerate(sizes)})

    loop.iterate = change
    assert_every_step_is_right(store, loop, 6, sized(config, 2 * 10 * 4096 + 8192))


@pytest.mark.parametrize("eager", [False, True], ids=["deferred", "eager"])
def test_a_full_disk_ends_a_capture_that_streams(store: Store, disk: Disk, config: CaptureConfig, eager: bool) -> None:
    """Test that a full disk ends a waiting capture with an error, and that the ring is usable when the disk is."""
    loop = _large_loop(eager=eager)
    checkpointer = Checkpointer(store, loop.state, capture=sized(config, 1 << 16), on_error="warn", every=1, keep=None)
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
        expected = copy_of(loop.state)
        checkpointer.close()
    assert_stored(store, {3: expected})


@pytest.mark.slow
def test_more_captures_wait_for_the_disk_than_a_ring_has_entries(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path
) -> None:
    """Test that captures beyond the 64 entries of a ring are correct, and that their ranges are freed once."""
    _, _, loop = linear_loop(24)
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=sized(config, 8 << 20), every=1, keep=None) as checkpointer:
        disk.opened.clear()
        for step in range(90):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
        background = checkpointer._background
        assert background is not None
        for capture in background._captures:
            assert capture.complete.wait(60)
        assert entries(tmp_path) == [1] * 64
        threading.Timer(0.1, disk.opened.set).start()
        checkpointer.wait("memory")
        # The last captures have no entry, so only the store contains them.
        assert len(store.checkpoints()) == 90
        for step in range(90, 100):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
    assert_stored(store, expected)
    assert store.verify() == []


def test_training_continues_with_less_memory(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that every step is saved with a warning if other programs took memory while the ring was created."""
    reserve = os.posix_fallocate

    def refuse(descriptor: int, offset: int, length: int) -> None:
        if offset and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".ring"):
            raise OSError(errno.ENOSPC, "no room")
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(ring_module, "_GROWTH_BYTES", 80 << 10)
    _, _, loop = linear_loop()
    with pytest.warns(CaptureWarning, match=r"ring_bytes.*resumed"):
        assert_every_step_is_right(store, loop, 5, sized(config, 1 << 20))


@pytest.mark.slow
def test_a_plan_of_windows_goes_through_a_small_ring(store: Store, config: CaptureConfig) -> None:
    """Test that a plan with few windows, whose partitions would exceed the ring, is cut for the ring."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = Loop(
        {"model": model, "optimizer": optimizer},
        lambda step: update(optimizer, model(torch.full((2, 1024), float(step))).square().mean()),
    )
    kinds = []
    loop.between = lambda checkpointer: kinds.append(checkpointer._background._schedule._plan.kind)
    with pytest.warns(CaptureWarning, match="stream"):
        assert_every_step_is_right(store, loop, 8, sized(config, 1 << 20))
    assert kinds[-1] == "asymmetric"


def _grows_in_its_first_step() -> Loop:
    """Return a loop that is saved before its first optimizer step, which creates moments of 4 MB."""
    model = torch.nn.Linear(700, 700)
    optimizer = torch.optim.AdamW(model.parameters())

    def iterate(step: int) -> None:
        if step:
            update(optimizer, model(torch.full((2, 700), float(step))).square().mean())

    return Loop({"model": model, "optimizer": optimizer}, iterate)


@pytest.mark.slow
def test_outgrown_ring_is_replaced_once(store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path) -> None:
    """Test that the ring is replaced when its captures are durable, and that a rollback finds the newest capture."""
    loop = _grows_in_its_first_step()
    disk.delay_s = 0.001
    seen = []

    def look(checkpointer: Checkpointer) -> None:
        seen.append((rings(tmp_path), checkpointer.statistics().ring_bytes))

    loop.between = look
    expected = assert_every_step_is_right(store, loop, 5, config)
    names = [paths for paths, _ in seen]
    assert {len(paths) for paths in names} == {1}
    assert names[0] != names[1]
    assert names[1:] == [names[1]] * 4
    first, *later = (size for _, size in seen)
    assert first < 2 * 3 * 700 * 700 * 4 < min(later) == max(later)
    assert sorted(expected) == [0, 1, 2, 3, 4]
    assert rings(tmp_path) == []


@pytest.mark.slow
def test_a_ring_of_the_size_that_was_asked_for_stays(store: Store, config: CaptureConfig, tmp_path: Path) -> None:
    """Test that an explicit ring size is kept when the state grows."""
    loop = _grows_in_its_first_step()
    seen = []
    loop.between = lambda _checkpointer: seen.append(rings(tmp_path))
    assert_every_step_is_right(store, loop, 3, sized(config, 8 << 20))
    assert seen == [seen[0]] * 3


@pytest.mark.slow
def test_a_ring_that_cannot_be_larger_stays(
    store: Store, config: CaptureConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that no capture is flushed for a larger ring if the memory is too small for it."""
    monkeypatch.setattr(background_saver, "default_bytes", lambda *_arguments: 8 << 20)
    loop = _grows_in_its_first_step()
    seen = []
    loop.between = lambda _checkpointer: seen.append(rings(tmp_path))
    assert_every_step_is_right(store, loop, 3, config)
    assert seen == [seen[0]] * 3
