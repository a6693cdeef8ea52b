"""Test reports: one line for each background checkpoint, on request."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from asymcheck import Checkpointer, Store
from asymcheck.capture.inflight import CheckpointReport
from asymcheck.checkpointer import OnError
from asymcheck.config import CaptureConfig, Grace
from asymcheck.errors import (
    CaptureWarning,
    InvalidInputError,
    LostCheckpointError,
    LostCheckpointWarning,
    OutOfSpaceError,
    Preempted,
    StaleStateWarning,
)
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import copy_late, copy_of, linear_loop, sized
from tests.store.equality import assert_same

REPORT = CheckpointReport(
    "default", 1200, 1_500_000_000, 213, 0.0094, 0.31, 1.26, 1_200_000_000, 1_200_000_000, 300_000_000, None
)
BEGINNING = "step 1200: 1.4 GiB in 213 partitions; stalled 9.4 ms"
LATER = f"{BEGINNING}, in memory after 310 ms, durable after 1.26 s;"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            f"{LATER} 1.1 GiB written, 286.1 MiB known",
        ),
        (
            {"written_bytes": 900_000_000},
            f"{LATER} 858.3 MiB written for 1.1 GiB, 286.1 MiB known",
        ),
        (
            {"in_memory_s": None, "partitions": 1},
            "step 1200: 1.4 GiB in 1 partition; stalled 9.4 ms, durable after 1.26 s; 1.1 GiB written, 286.1 MiB known",
        ),
        (
            {"error": OutOfSpaceError("no room\nat all")},
            f"{BEGINNING}, lost after 1.26 s: no room at all",
        ),
    ],
    ids=["durable", "encoded", "streamed", "lost"],
)
def test_report_is_one_line(changes: dict[str, object], line: str) -> None:
    """Test the line with readable units."""
    assert str(dataclasses.replace(REPORT, **changes)) == line  # type: ignore[arg-type]  # fields of the report


def test_an_error_of_the_callback_does_not_hide_the_end_of_the_training(store: Store, config: CaptureConfig) -> None:
    """Test a metrics server that ends together with the machine: the exit status is that of the preemption."""

    def export(_report: CheckpointReport) -> None:
        raise ConnectionRefusedError

    _, _, loop = linear_loop()
    grace = Grace(signals=())
    checkpointer = Checkpointer(store, loop.state, capture=config, on_checkpoint=export, save_on_signal=grace)
    loop.iterate(1)
    checkpointer.preempt(20.0)
    with pytest.raises(Preempted), pytest.warns(LostCheckpointWarning, match="ConnectionRefusedError"):
        checkpointer.step(1)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]


def test_an_error_of_the_callback_does_not_hide_other_checkpoints(
    store: Store, disk: Disk, config: CaptureConfig
) -> None:
    """Test that two checkpoints, which became durable together, are both reported, in order."""
    steps: list[int] = []

    def export(report: CheckpointReport) -> None:
        steps.append(report.step)
        if report.step == 0:
            raise ConnectionRefusedError

    _, _, loop = linear_loop()
    disk.opened.clear()
    with Checkpointer(store, loop.state, capture=config, on_checkpoint=export, every=1) as checkpointer:
        for step in range(2):
            loop.iterate(step)
            checkpointer.step(step)
        disk.opened.set()
        with pytest.raises(ConnectionRefusedError):
            checkpointer.wait()
    assert steps == [0, 1]


def test_each_checkpoint_is_reported_once_and_adds_up(store: Store, config: CaptureConfig) -> None:
    """Test the order, the thread, and that the sums equal the statistics."""
    reports: list[CheckpointReport] = []
    threads: set[int] = set()

    def take(report: CheckpointReport) -> None:
        reports.append(report)
        threads.add(threading.get_ident())

    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, on_checkpoint=take, every=2, keep=None) as checkpointer:
        for step in range(12):
            loop.iterate(step)
            before = checkpointer.statistics()
            checkpointer.step(step)
            assert checkpointer.statistics().captures - before.captures == (step % 2 == 0)
            if step == 7:
                loop.iterate(7)
                checkpointer.wait()
                assert [report.step for report in reports] == [0, 2, 4, 6]
        loop.iterate(12)
    assert [report.step for report in reports] == [0, 2, 4, 6, 8, 10]
    assert threads == {threading.get_ident()}
    assert all(report.run == "default" and report.error is None for report in reports)
    total = checkpointer.statistics()
    assert sum(report.state_bytes for report in reports) == total.captured_bytes
    assert sum(report.written_bytes for report in reports) == total.written_bytes > 0
    assert [report.durable_s for report in reports] == total.durable_s
    assert 0 < total.step_s < sum(report.stalled_s for report in reports) <= total.step_s + total.fence_s + 1e-9
    for report in reports:
        assert report.in_memory_s is not None
        assert 0 < report.in_memory_s < report.durable_s
        assert report.written_bytes + report.known_bytes <= report.state_bytes


def test_known_bytes_are_reported(store: Store, config: CaptureConfig) -> None:
    """Test that an unchanged state writes nothing."""
    reports: list[CheckpointReport] = []
    _, _, loop = linear_loop()
    loop.iterate(0)
    checkpointer = Checkpointer(store, loop.state, capture=config, on_checkpoint=reports.append, every=1, keep=None)
    with checkpointer:
        checkpointer.step(0)
        checkpointer.wait()
        checkpointer.step(1)
        with pytest.warns(StaleStateWarning):
            checkpointer.wait()
    first, second = reports
    assert (first.known_bytes, second.written_bytes) == (0, 0)
    assert second.known_bytes == first.written_bytes > 0


def test_streamed_capture_is_never_in_memory(store: Store, config: CaptureConfig) -> None:
    """Test that a capture that would not survive the process is not reported as in memory."""
    reports: list[CheckpointReport] = []
    _, _, loop = linear_loop()
    small = sized(config, 1 << 15)
    with Checkpointer(
        store, loop.state, capture=small, on_checkpoint=reports.append, every=1, keep=None
    ) as checkpointer:
        loop.iterate(0)
        with pytest.warns(CaptureWarning, match="smaller than the state"):
            checkpointer.step(0)
    assert [report.in_memory_s for report in reports] == [None]


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_lost_checkpoint_is_reported_and_raised(
    store: Store, disk: Disk, config: CaptureConfig, raises: bool
) -> None:
    """Test that the report precedes the error, and that a failing callback does not hide the loss."""
    reports: list[CheckpointReport] = []

    def take(report: CheckpointReport) -> None:
        reports.append(report)
        if raises:
            raise ZeroDivisionError

    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config, on_checkpoint=take, every=1, keep=None)
    disk.full = "packs"
    loop.iterate(0)
    checkpointer.step(0)
    with pytest.raises(LostCheckpointError) as caught:
        checkpointer.wait()
    assert isinstance(caught.value.__context__, ZeroDivisionError) == raises
    assert isinstance(caught.value.__cause__, OutOfSpaceError)
    disk.full = None
    checkpointer.close()
    (report,) = reports
    assert report.error is caught.value.__cause__
    assert (report.known_bytes, report.step) == (0, 0)
    assert report.durable_s > 0


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("how", ["restore", "rollback"])
def test_a_loss_does_not_keep_the_state_from_coming_back(
    store: Store, config: CaptureConfig, how: str, on_error: OnError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a rollback after a loss restores the earlier weights, and that the training continues."""
    copy_late(monkeypatch)
    model, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, on_error=on_error, every=1, keep=None) as checkpointer:
        for step in range(2):
            loop.iterate(step)
            checkpointer.step(step)
            checkpointer.wait()
        there = copy_of(loop.state)
        loop.iterate(2)
        checkpointer.step(2)
        # Change the tensor before it is copied, so that the checkpoint is discarded.
        model.weight.data.fill_(float("nan"))
        told = pytest.raises(LostCheckpointError) if on_error == "raise" else pytest.warns(LostCheckpointWarning)
        with told as caught:
            getattr(checkpointer, how)()
        assert "step 2" in str(caught.value if isinstance(caught, pytest.ExceptionInfo) else caught[0].message)
        assert_same(copy_of(loop.state), there)
        assert checkpointer.latest_step == 1
        loop.iterate(3)
        checkpointer.step(2)
        checkpointer.wait()
    assert [(one.step, one.generation) for one in store.checkpoints()] == [(0, 1), (1, 1), (2, 2)]


def test_a_capture_that_never_reached_the_flush_is_reported(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a capture lost with its first partition; its time ends when it was discarded."""
    reports: list[CheckpointReport] = []
    _, _, loop = linear_loop()
    loop.iterate(0)
    checkpointer = Checkpointer(store, loop.state, capture=config, on_checkpoint=reports.append, every=1, keep=None)

    def refuse(*_arguments: object) -> None:
        raise OutOfSpaceError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("asymcheck.capture.ring_flush.RingTransaction", refuse)
        checkpointer.step(0)
        with pytest.raises(LostCheckpointError, match="no memory"):
            checkpointer.wait()
    checkpointer.close()
    (report,) = reports
    assert 0 < report.durable_s < 60
    assert report.in_memory_s is None


def test_invalid_callback_is_refused(store: Store) -> None:
    """Test that the constructor raises the error, not the first durable checkpoint."""
    with pytest.raises(InvalidInputError, match="on_checkpoint='stdout': give a function of one argument, or None"):
        Checkpointer(store, {"a": 1}, on_checkpoint="stdout", every=1, keep=None)  # type: ignore[arg-type]  # what is tested
