"""Test plans of the schedule: measured first, then kept, with adapting release times."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.capture import schedule as module
from asymcheck.capture.background_saver import newest_plan
from asymcheck.capture.schedule import CaptureSchedule, WindowTimer
from asymcheck.config import CaptureConfig
from asymcheck.state import iteration_profile
from asymcheck.state.iteration_profile import Phase
from asymcheck.state.partition_plan import Plan, PlanInput
from asymcheck.storage.nvme import NvmeTier
from tests.checkpointer.loops import CONFIG, assert_every_step_is_right, folder_for_rings
from tests.checkpointer.optimizers import WIDTH, simple

LAYOUT = PlanInput((64 << 10,) * 6, ("model",) * 6, (True,) * 6)
SMALL = dataclasses.replace(CONFIG, deferred_bytes_min=4096, deferred_bytes_max=128 << 10)
PHASES = ("forward", "forward", "backward", "backward")


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the timing."""
    return Clock(monkeypatch)


def _timing(schedule: str = "asymmetric", previous: object = None) -> tuple[CaptureSchedule, list[int]]:
    windows: list[int] = []
    config = CaptureConfig(schedule=schedule)  # type: ignore[arg-type]  # one of the three
    return CaptureSchedule(config, SMALL, previous, windows.append, WindowTimer(windows.append)), windows


def _iterate(timing: CaptureSchedule, clock: Clock, waited_s: float = 0.0, layout: PlanInput = LAYOUT) -> Plan:
    """Run an iteration with forward windows of 1 s and backward windows of 3 s."""
    plan = timing.plan(layout)
    timing.began()
    for phase in PHASES:
        timing._mark(phase)  # type: ignore[arg-type]  # one of the two
        clock.now += 1 if phase == "forward" else 3
    timing.fenced(clock.now, waited_s)
    clock.now += 1
    return plan


def _profiled(schedule: str, clock: Clock) -> tuple[CaptureSchedule, list[int], Plan]:
    timing, windows = _timing(schedule)
    kinds = [_iterate(timing, clock).kind for _ in range(5)]
    assert set(kinds) == {"canonical"}
    return timing, windows, _iterate(timing, clock)


@pytest.mark.parametrize("schedule", ["asymmetric", "symmetric"])
def test_a_plan_follows_five_measured_iterations_and_stays(clock: Clock, schedule: str) -> None:
    """Test that the plan object stays the same, so that unchanged bytes keep their digests."""
    timing, _, plan = _profiled(schedule, clock)
    assert (plan.kind, plan.number) == (schedule, 1)
    assert [phase for phase, _ in plan.windows] == list(PHASES)
    assert all(_iterate(timing, clock) is plan for _ in range(8))


def test_short_windows_copy_less_than_long_ones(clock: Clock) -> None:
    """Test that forward windows take a third of the time and of the bytes of backward windows."""
    _, _, plan = _profiled("asymmetric", clock)
    taken = [0] * len(PHASES)
    for partition, window in zip(plan.cut.partitions, plan.release, strict=True):
        taken[window] += partition.length
    assert sum(taken) == sum(LAYOUT.sizes)
    assert 2 * max(taken[:2]) < min(taken[2:])


def test_an_eager_schedule_needs_no_profile(clock: Clock) -> None:
    """Test that all tensors are captured immediately, from the first step on."""
    timing, _ = _timing("eager")
    plans = [_iterate(timing, clock) for _ in range(8)]
    assert {plan.kind for plan in plans} == {"eager"}
    assert set(plans[-1].release) == {-1}


def test_windows_begin_at_the_boundaries_behind_the_first(clock: Clock) -> None:
    """Test that the first boundary belongs to window 0, which begins with the capture."""
    timing, windows = _timing()
    _iterate(timing, clock)
    assert windows == [1, 2, 3]
    timing._mark("forward")
    assert windows == [1, 2, 3], "between the fence and the next capture there is no window"


def test_waiting_fence_releases_earlier(clock: Clock) -> None:
    """Test a shift by one window per wait, up to the number of windows, and back after many fences without a wait."""
    timing, windows = _timing()
    for lead in (0, 1, 2, 3, 4, 4):
        windows.clear()
        _iterate(timing, clock, waited_s=1.0)
        assert windows == [*([lead] if lead else []), *(number + lead for number in (1, 2, 3))]
    for _ in range(16):
        _iterate(timing, clock)
    windows.clear()
    _iterate(timing, clock)
    assert windows == [3, 4, 5, 6]


def test_a_resumed_run_goes_on_with_its_plan(clock: Clock) -> None:
    """Test that number and partitions of the plan are kept without a profile."""
    _, _, plan = _profiled("asymmetric", clock)
    timing, _ = _timing("asymmetric", plan.record())
    assert _iterate(timing, clock) == plan


@pytest.mark.parametrize(("schedule", "first"), [("symmetric", "canonical"), ("eager", "eager")])
def test_a_plan_of_another_schedule_is_not_taken_up(clock: Clock, schedule: str, first: str) -> None:
    """Test that the current setting of the user counts."""
    _, _, plan = _profiled("asymmetric", clock)
    timing, _ = _timing(schedule, plan.record())
    assert _iterate(timing, clock).kind == first


@pytest.mark.parametrize("previous", [None, {}, {"number": 0, "kind": "of a later version"}, [1], {"kind": 3}])
def test_a_record_that_says_nothing_is_no_plan(clock: Clock, previous: object) -> None:
    """Test that the canonical plan is used."""
    timing, _ = _timing("asymmetric", previous)
    assert _iterate(timing, clock).kind == "canonical"


def test_a_state_of_another_layout_is_cut_by_the_same_shares(clock: Clock) -> None:
    """Test that a plan is still used when a tensor is added."""
    timing, _, plan = _profiled("asymmetric", clock)
    larger = PlanInput((*LAYOUT.sizes, 64 << 10), (*LAYOUT.groups, "model"), (*LAYOUT.deferred, True))
    again = _iterate(timing, clock, layout=larger)
    assert again.record() == plan.record()
    assert sum(partition.length for partition in again.cut.partitions) == sum(larger.sizes)


class Alarm(WindowTimer):
    """A timer that only records requests."""

    def __init__(self) -> None:
        super().__init__(lambda _number: None)
        self.asked: list[tuple[int, float]] = []

    def begin(self, times: Sequence[tuple[int, float]]) -> None:
        """Record the times."""
        self.asked = list(times)

    def cancel(self) -> None:
        """Discard the times."""
        self.asked = []


def _blind(
    clock: Clock, previous: object = None
) -> tuple[CaptureSchedule, Alarm, Callable[..., list[tuple[int, float]]]]:
    """Return a timing with at most one boundary, its timer, and a function that iterates and returns requests."""
    alarm = Alarm()
    timing = CaptureSchedule(CaptureConfig(), SMALL, previous, lambda _number: None, alarm)

    def iterate(seconds: float = 0.08, waited_s: float = 0.0, marks: Sequence[Phase] = ()) -> list[tuple[int, float]]:
        timing.plan(LAYOUT)
        timing.began()
        began, asked = clock.now, alarm.asked
        for phase in marks:
            clock.now += seconds / 4
            timing._mark(phase)
        clock.now = began + seconds
        timing.fenced(clock.now, waited_s)
        assert alarm.asked == []
        return [(number, at_s - began) for number, at_s in asked]

    return timing, alarm, iterate


@pytest.mark.parametrize("marks", [(), ("forward", "backward")], ids=["no modules", "a compiled one"])
def test_without_boundaries_windows_are_parts_of_the_time(clock: Clock, marks: Sequence[Phase]) -> None:
    """Test equal windows of some 5 ms; a slower iteration changes their times, and not the plan."""
    timing, _, iterate = _blind(clock)
    assert [iterate(marks=marks) for _ in range(5)] == [[]] * 5
    asked = iterate(marks=marks)
    assert [number for number, _ in asked] == list(range(1, 16))
    assert [at_s for _, at_s in asked] == pytest.approx([0.005 * number for number in range(1, 16)])
    plan = timing.plan(LAYOUT)
    assert plan.kind == "asymmetric"
    assert [phase for phase, _ in plan.windows] == ["forward"] * (8 if marks else 16) + ["backward"] * 8 * bool(marks)
    assert len(set(plan.release)) > 4
    for _ in range(5):
        iterate(0.16, marks=marks)
    assert [at_s for _, at_s in iterate(marks=marks)] == pytest.approx([0.01 * number for number in range(1, 16)])
    assert timing.plan(LAYOUT) is plan


def test_a_timed_window_is_released_earlier_after_a_fence_that_waits(clock: Clock) -> None:
    """Test that timed windows are released earlier, like windows with boundaries."""
    _, _, iterate = _blind(clock)
    for _ in range(6):
        iterate()
    iterate(waited_s=1.0)
    assert [number for number, _ in iterate()] == list(range(2, 17))


def test_a_resumed_run_is_timed_after_its_first_iteration(clock: Clock) -> None:
    """Test the plan of the newest checkpoint with a new measurement of the iteration."""
    timing, _, iterate = _blind(clock)
    for _ in range(6):
        iterate()
    plan = timing.plan(LAYOUT)
    again, _, iterate = _blind(clock, plan.record())
    assert iterate(0.32) == []
    assert iterate()[0] == (1, pytest.approx(0.02))
    assert again.plan(LAYOUT) == plan


def test_a_training_with_boundaries_is_not_timed(clock: Clock) -> None:
    """Test also iterations without boundaries, such as evaluations."""
    _, _, iterate = _blind(clock)
    for _ in range(6):
        iterate(marks=PHASES[:3])
    assert iterate() == []
    assert iterate() == []


def test_timer_returns_due_number_and_remaining_time() -> None:
    """Test the greatest due number, and None after a cancel."""
    timer = WindowTimer(lambda _number: None)
    timer._pending.extend([(1, 10.0), (2, 11.0), (5, 13.0)])
    assert timer.due(9.5) == (None, 0.5)
    assert timer.due(11.5) == (2, 1.5)
    timer.cancel()
    assert timer.due(20.0) == (None, None)


def test_a_timer_calls_on_a_thread_of_its_own() -> None:
    """Test due and distant times, and that the thread ends when the timer is stopped."""
    called: queue.Queue[tuple[int, str]] = queue.Queue()
    timer = WindowTimer(lambda number: called.put((number, threading.current_thread().name)))
    for number in (3, 4):
        timer.begin([(number, 0.0), (9, 1e9)])
        assert called.get(timeout=60) == (number, "asymcheck-timer")
    timer.stop()
    assert called.empty()
    assert "asymcheck-timer" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_a_compiled_model_is_captured_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the manifest names more windows than two boundaries make, and that each step is correct."""
    monkeypatch.setattr(iteration_profile, "TIMED_S", 1e-4)
    config = CaptureConfig(ring_folder=str(folder_for_rings(tmp_path)), proof="full")
    torch.compiler.reset()
    model = torch.compile(torch.nn.Linear(WIDTH, WIDTH), backend="eager")
    assert isinstance(model, torch.nn.Module)
    with Store.open(tmp_path / "store", config=SMALL, create=True) as store:
        assert_every_step_is_right(store, simple(model, torch.optim.AdamW(model.parameters())), 8, config)
    tier = NvmeTier(tmp_path / "store", SMALL, read_only=True)
    record = newest_plan(tier, "default")
    tier.close()
    assert isinstance(record, dict)
    assert len(record["windows"]) > 2
    assert "asymcheck-timer" not in [thread.name for thread in threading.enumerate()]


def test_training_keeps_its_plan_over_a_restart(tmp_path: Path) -> None:
    """Test boundaries of real modules, the plan in manifests, and that a frozen part keeps its partitions."""
    config = CaptureConfig(ring_folder=str(folder_for_rings(tmp_path)), proof="full")

    def train(steps: range) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.AdamW(model[1:].parameters())
        with (
            Store.open(tmp_path / "store", config=SMALL, create=True) as store,
            Checkpointer(
                store, {"model": model, "optimizer": optimizer}, capture=config, every=1, keep=None
            ) as checkpointer,
        ):
            # The moments exist only after a step.
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
            checkpointer.restore()
            for step in steps:
                optimizer.zero_grad()
                model(torch.randn(2, 64)).square().mean().backward()
                optimizer.step()
                checkpointer.step(step)

    train(range(8))
    tier = NvmeTier(tmp_path / "store", SMALL, read_only=True)
    planned = newest_plan(tier, "default")
    train(range(8, 10))
    plans, frozen = [], set()
    for listing in tier.manifests.checkpoints("default"):
        manifest = tier.manifests.read("default", listing.ref, listing.manifests[0])
        plans.append(manifest.header.plan)
        frozen.add(tuple(extent.digest for extent in manifest.extents(manifest.names().index("model.0.weight"))))
    assert [plan["kind"] for plan in plans] == ["canonical"] * 5 + ["asymmetric"] * 5
    assert [plan["windows"] for plan in plans[5:]] == [planned["windows"]] * 5  # type: ignore[index]  # JSON
    assert {phase for phase, _ in plans[-1]["windows"]} == {"forward", "backward"}  # type: ignore[attr-defined]  # JSON
    assert len(frozen) == 1
    tier.close()
