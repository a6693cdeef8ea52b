"""Test failures, waits and reports of background saves."""

from __future__ import annotations

import errno
import gc
import os
import re
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store, events
from asymcheck.capture import engine
from asymcheck.checkpointer import OnError
from asymcheck.config import CaptureConfig
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    CaptureWarning,
    LostCheckpointError,
    LostCheckpointWarning,
    OutOfSpaceError,
    StaleStateWarning,
    UnsupportedValueError,
)
from asymcheck.state.leaves import copy_partition
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import (
    assert_stored,
    copy_late,
    copy_of,
    entries,
    linear_loop,
    rings,
    sized,
)

# ------------------------------------------------------------------------------------------------------- failures


def test_no_room_for_the_ring_is_a_clear_error(
    store: Store, config: CaptureConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the error says what to do, that no file is left, and that the next step may succeed."""
    reserve = os.posix_fallocate

    def refuse(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".ring"):
            raise OSError(errno.ENOSPC, "no room")
        reserve(descriptor, offset, length)

    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config, every=1, keep=None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        for _ in range(2):
            with pytest.raises(OutOfSpaceError, match=r"ring_bytes.*ring_folder"):
                checkpointer.step(0)
    assert rings(tmp_path) == []
    assert checkpointer.latest_step is None
    assert checkpointer.step(0)
    checkpointer.close()
    assert_stored(store, {0: copy_of(loop.state)})


@pytest.mark.slow(quick=["manifests-close"])
@pytest.mark.parametrize("report", ["step", "wait", "close"])
@pytest.mark.parametrize("what", ["packs", "manifests"])
def test_a_full_disk_is_reported_and_later_steps_are_saved(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path, what: str, report: str
) -> None:
    """Test that the error is raised on the loop's own thread, with its cause."""
    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, every=2, capture=config, keep=None)
    expected: dict[int, object] = {}
    for step in (0, 2, 4, 6):
        loop.iterate(step)
        disk.full = what if step == 2 else None
        checkpointer.step(step)
        expected[step] = copy_of(loop.state)
        if step == 2:
            _wait_in_silence(checkpointer)
            # Keep the disk full, so that the reported error is the loss and not a second failure.
            with pytest.raises(LostCheckpointError, match="step 2 of run 'default' was not saved: no room") as caught:
                _call(checkpointer, report)
            assert isinstance(caught.value.__cause__, OutOfSpaceError)
            if report == "close":
                break
        checkpointer.wait()
    checkpointer.close()
    disk.full = None
    assert checkpointer.statistics().lost == 1
    if report == "close":
        _check_recovered(store, config, expected)
    else:
        del expected[2]
        assert_stored(store, expected)
    assert rings(tmp_path) == []


def test_all_losses_are_named_at_once(store: Store, disk: Disk, config: CaptureConfig) -> None:
    """Test that one error names all steps lost since the last call, with the cause of the first loss."""
    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config, every=1, keep=None)
    disk.opened.clear()
    for step in range(3):
        loop.iterate(step)
        checkpointer.step(step)
    disk.full = "packs"
    disk.opened.set()
    _wait_in_silence(checkpointer)
    with pytest.raises(LostCheckpointError, match="3 steps of run 'default' were not saved:") as caught:
        checkpointer.wait()
    assert re.findall(r"\n  step (\d): no room for", str(caught.value)) == ["0", "1", "2"]
    assert isinstance(caught.value.__cause__, OutOfSpaceError)
    disk.full = None
    checkpointer.close()


def test_save_is_durable_before_an_earlier_loss_is_reported(store: Store, disk: Disk, config: CaptureConfig) -> None:
    """Test that the final state is stored, and that the loss is reported once."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        disk.full = "packs"
        checkpointer.step(0)
        _wait_in_silence(checkpointer)
        disk.full = None
        loop.iterate(1)
        with pytest.raises(LostCheckpointError, match="step 0 of run 'default' was not saved: no room"):
            checkpointer.save(1)
        assert checkpointer.latest_step == 1
        assert_stored(store, {1: copy_of(loop.state)})


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_lost_last_step_is_saved_on_exit(store: Store, disk: Disk, config: CaptureConfig, on_error: OnError) -> None:
    """Test a drive that has space again at the end: no error reports the step as lost."""
    _, _, loop = linear_loop()
    with Checkpointer(
        store, loop.state, capture=config, every=1, keep=None, save_on_exit=True, on_error=on_error
    ) as checkpointer:
        loop.iterate(0)
        disk.full = "packs"
        checkpointer.step(0, {"loss": 1.0})
        _wait_in_silence(checkpointer)
        disk.full = None
    assert checkpointer.statistics().lost == 1
    assert_stored(store, {0: copy_of(loop.state)})
    assert store.checkpoints()[0].metrics == {"loss": 1.0}


@pytest.mark.parametrize("every", [1, 9])
def test_last_step_on_a_full_drive_is_one_warning(store: Store, disk: Disk, config: CaptureConfig, every: int) -> None:
    """Test ``save_on_exit`` with ``on_error="warn"``: the program continues after the training."""
    _, _, loop = linear_loop()
    checkpointer = Checkpointer(
        store, loop.state, capture=config, every=every, keep=None, save_on_exit=True, on_error="warn"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpointer:
            checkpointer.step(0)
            checkpointer.wait()
            loop.iterate(1)
            disk.full = "packs"
            checkpointer.step(1)
    assert [warning.category for warning in caught] == [LostCheckpointWarning]
    assert str(caught[0].message).startswith("step 1 of run 'default' was not saved: no room")
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]


def test_a_closed_background_is_let_go(store: Store, config: CaptureConfig) -> None:
    """Test that a store that outlives many checkpointers keeps none of their resources."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        checkpointer.step(0)
        assert len(store.training._backgrounds) == 1
    assert not store.training._backgrounds


def test_a_capture_that_is_kept_in_memory_keeps_no_tensor(store: Store, config: CaptureConfig) -> None:
    """Test that the memory of a replaced model is freed, although its last state is in the ring."""
    state: dict[str, object] = {"x": torch.randn(5000)}
    watched = weakref.ref(state["x"])
    with Checkpointer(store, state, capture=config, every=1, keep=None) as checkpointer:
        checkpointer.step(0)
        checkpointer.wait()
        state["x"] = torch.zeros(1)
        gc.collect()
        assert watched() is None


def test_contiguous_copies_of_strided_tensors_are_freed_in_step(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a tensor that is copied inside ``step()``, while a parameter is copied later."""
    copy_late(monkeypatch)
    weight = torch.nn.Parameter(torch.randn(5000))
    state = {"x": torch.randn(80, 70).t(), "weight": weight, "optimizer": torch.optim.SGD([weight])}
    with Checkpointer(store, state, capture=config, every=1, keep=None) as checkpointer:
        checkpointer.step(0)
        assert checkpointer._background is not None
        (capture,) = checkpointer._background._captures
        assert not capture.copied.is_set()
        assert all(leaf._flat is None for leaf in capture.state.leaves)


def _call(checkpointer: Checkpointer, report: str) -> None:
    if report == "step":
        # This step is not saved.
        checkpointer.step(3)
    elif report == "wait":
        checkpointer.wait()
    else:
        checkpointer.close()


def _wait_in_silence(checkpointer: Checkpointer) -> None:
    background = checkpointer._background
    assert background is not None
    background.wait("local")


def _check_recovered(store: Store, config: CaptureConfig, expected: dict[int, object]) -> None:
    """Assert that a capture that could not be stored stays in memory for the next start."""
    _, _, loop = linear_loop()
    loop.iterate(0)
    restored = Checkpointer(store, loop.state, capture=config, every=1, keep=None).restore()
    assert restored is not None
    assert restored.step == 2
    assert_stored(store, expected)


def test_a_state_that_is_refused_between_others_costs_nothing(store: Store, config: CaptureConfig) -> None:
    """Test that ``step()`` itself raises the error, and that earlier and later steps are correct."""
    _, _, loop = linear_loop()
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(5):
            loop.iterate(step)
            if step == 2:
                loop.state["culprit"] = object()
                with pytest.raises(UnsupportedValueError, match="culprit"):
                    checkpointer.step(step)
                del loop.state["culprit"]
                assert checkpointer.latest_step == 1
                continue
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
    assert_stored(store, expected)


def fail_copy(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the copy with this number fail, counted from 1."""
    copy, remaining = copy_partition, [number]

    def fail(*arguments: object) -> None:
        remaining[0] -= 1
        if remaining[0] == 0:
            raise MemoryError
        copy(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(engine, "copy_partition", fail)


def test_a_copy_that_fails_inside_step_frees_its_places(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that ``step()`` raises the error, and that the freed range of a small ring is usable immediately."""
    state: dict[str, object] = {str(number): torch.randn(1800) for number in range(6)}
    fail_copy(monkeypatch, 4)
    with Checkpointer(store, state, capture=sized(config, 6 * 12288 + 16384), every=1, keep=None) as checkpointer:
        with pytest.raises(MemoryError):
            checkpointer.step(0)
        checkpointer.step(1)
    assert_stored(store, {1: copy_of(state)})


def test_a_copy_that_fails_inside_step_does_not_end_the_choice_of_an_interval(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the failed step counts neither as begun nor as lost, so that the next measurement does not wait."""
    state: dict[str, object] = {"x": torch.randn(5000)}
    fail_copy(monkeypatch, 1)
    with Checkpointer(store, state, every="auto", capture=config, keep=None) as checkpointer:
        assert not checkpointer.step(0)
        with pytest.raises(MemoryError):
            checkpointer.step(1)
        begun = []
        for step in range(2, 7):
            state["x"] = torch.full((5000,), float(step))
            if checkpointer.step(step):
                begun.append(step)
            checkpointer.wait()
        assert begun == [2, 4, 6]
        found = checkpointer.statistics()
        assert (found.captures, found.durable, found.lost) == (3, 3, 0)
        assert found.captured_bytes == 3 * 5000 * 4


# ------------------------------------------------------------------------------------------------------------ waits


def test_waiting_for_memory_does_not_wait_for_the_disk(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path
) -> None:
    """Test that the first step of a run is complete in memory at once, and durable when the disk has written it."""
    _, _, loop = linear_loop()
    loop.iterate(0)
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        disk.opened.clear()
        checkpointer.step(0)
        checkpointer.wait("memory")
        assert entries(tmp_path) == [1]
        assert store.checkpoints() == []
        disk.opened.set()
        checkpointer.wait("local")
        assert entries(tmp_path) == [2]
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]
        assert checkpointer.statistics().durable == 1


def test_ring_that_another_program_removes_is_replaced(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path
) -> None:
    """Test that ``wait("memory")`` waits for the store, and that later captures survive again."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        disk.delay_s = 0.02
        checkpointer.step(0)
        (removed,) = rings(tmp_path)
        removed.unlink()
        checkpointer.wait("memory")
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]
        loop.iterate(1)
        with pytest.warns(CaptureWarning, match=f"ring {removed} was removed by another program"):
            checkpointer.step(1)
        checkpointer.wait()
        assert entries(tmp_path) == [2]
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1]
    assert rings(tmp_path) == []


def test_capture_without_a_line_waits_for_durability(
    store: Store, disk: Disk, config: CaptureConfig, tmp_path: Path
) -> None:
    """Test that ``wait("memory")`` waits for the store before a restore, because no start would recover the capture."""
    _, _, loop = linear_loop()
    store.save({"x": 1}, step=0)
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        disk.delay_s = 0.02
        with pytest.warns(AbandonedCheckpointsWarning):
            checkpointer.step(1)
        checkpointer.wait("memory")
        assert entries(tmp_path) == []
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1]


def test_a_capture_becomes_durable_without_another_window(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test an evaluation after a step, which reaches neither the windows of the plan nor a fence."""
    monkeypatch.setattr(engine, "_WINDOW_PATIENCE_S", 0.05)
    copy_late(monkeypatch)
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        (capture,) = checkpointer._background._captures  # type: ignore[union-attr]  # it has begun
        assert capture.durable.wait(10)
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]


def test_statistics_add_up_and_outlive_close(store: Store, config: CaptureConfig) -> None:
    """Test the sums after the end of the background thread."""
    _, _, loop = linear_loop()
    loop.state["buffer"] = torch.zeros(5000)
    checkpointer = Checkpointer(store, loop.state, capture=config, every=1, keep=None)
    for step in range(3):
        loop.iterate(step)
        checkpointer.step(step)
    checkpointer.close()
    found = checkpointer.statistics()
    assert (found.captures, found.durable, found.lost) == (3, 3, 0)
    state_bytes = sum(checkpoint.state_bytes for checkpoint in store.checkpoints())
    assert found.captured_bytes == state_bytes
    assert state_bytes // 2 < found.written_bytes <= state_bytes
    assert found.eager_bytes == 3 * 5000 * 4
    assert found.step_s > 0
    assert found.fence_s > 0
    assert found.ring_bytes > 0


# -------------------------------------------------------------------------------------------------------- warnings


def test_a_state_that_does_not_change_is_noticed(store: Store, config: CaptureConfig) -> None:
    """Test the warning for a checkpoint that equals the previous one: the training may use another state."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        checkpointer.step(1)
        with pytest.warns(StaleStateWarning, match="step 1 .*identical"):
            checkpointer.wait()
        loop.iterate(1)
        checkpointer.step(2)
        checkpointer.wait()


def test_a_copy_of_an_optimizer_is_noticed(store: Store) -> None:
    """Test the warning for ``optimizer.state_dict()``, a copy that would be saved without moments."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(StaleStateWarning, match=r"state\['optimizer'\] looks like optimizer.state_dict\(\)"):
        Checkpointer(store, {"model": model, "optimizer": optimizer.state_dict()}).close()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleStateWarning)
        Checkpointer(store, {"model": model, "optimizer": optimizer.state_dict()}).close()  # shares the moments
        Checkpointer(store, {"model": model, "optimizer": optimizer}).close()


def test_a_small_tensor_that_changes_is_a_change(store: Store, config: CaptureConfig) -> None:
    """Test that bytes in the manifest itself count as a change, like bytes in partitions."""
    _, _, loop = linear_loop()
    small = torch.zeros(4)
    with Checkpointer(store, loop.state | {"small": small}, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        small += 1
        checkpointer.step(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StaleStateWarning)
            checkpointer.wait()


def test_an_observer_that_raises_does_not_end_the_background(store: Store, config: CaptureConfig) -> None:
    """Test that later steps are saved, and that no call waits forever."""
    _, _, loop = linear_loop()

    def refuse(event: events.Event) -> None:
        if event.name == "capture.durable":
            raise KeyError(event.detail)

    with events.observe(refuse), Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(3):
            loop.iterate(step)
            checkpointer.step(step)
            checkpointer.wait()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1, 2]
