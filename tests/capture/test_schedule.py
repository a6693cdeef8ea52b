"""Test plans of the schedule: measured first, then kept, with adapting release times."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.capture import schedule as module
from asymcheck.capture.background_saver import newest_plan
from asymcheck.capture.schedule import CaptureSchedule
from asymcheck.config import CaptureConfig
from asymcheck.state.partition_plan import Plan, PlanInput
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import CheckpointRef
from tests.checkpointer.loops import CONFIG, folder_for_rings

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
    config = CaptureConfig(schedule=schedule)  # type: ignore[arg-type]  # one of the four
    return CaptureSchedule(config, SMALL, previous, windows.append), windows


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


def test_an_immediate_schedule_has_one_plan_from_the_first_step_on(clock: Clock) -> None:
    """Test large partitions that are all released at once, without a profile."""
    timing, _ = _timing("immediate")
    plan = _iterate(timing, clock)
    assert (plan.kind, plan.number, plan.windows) == ("asymmetric", 0, (("forward", 781250),))
    assert set(plan.release) == {0}
    assert all(_iterate(timing, clock) is plan for _ in range(8))
    large = PlanInput((4 * SMALL.deferred_bytes_max,), ("model",), (True,))
    assert len(_iterate(timing, clock, layout=large).cut.partitions) == 4
    resumed, _ = _timing("immediate", plan.record())
    assert _iterate(resumed, clock) == plan


def test_an_immediate_schedule_observes_no_modules(clock: Clock) -> None:
    """Test that the modules of a training have no hooks."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    for schedule, hooks in (("immediate", 0), ("asymmetric", 4)):
        timing, _ = _timing(schedule)
        timing.watch([model])
        assert sum(len(block._forward_pre_hooks) for block in model) == hooks
        timing.stop()


@pytest.mark.parametrize(("schedule", "other"), [("immediate", "asymmetric"), ("asymmetric", "immediate")])
def test_one_window_and_measured_windows_do_not_replace_each_other(clock: Clock, schedule: str, other: str) -> None:
    """Test that a resumed run with another schedule makes a new plan: without hooks, no measured window begins."""
    if schedule == "asymmetric":
        _, _, plan = _profiled(schedule, clock)
    else:
        plan = _iterate(_timing(schedule)[0], clock)
    timing, _ = _timing(other, plan.record())
    again = _iterate(timing, clock)
    assert again.windows != plan.windows
    assert set(again.release) == {0}


def test_without_boundaries_the_canonical_plan_stays(clock: Clock) -> None:
    """Test a training without visible modules, which releases everything when ``step()`` returns."""
    timing, windows = _timing()
    for _ in range(8):
        plan = timing.plan(LAYOUT)
        timing.began()
        clock.now += 1
        timing.fenced(clock.now, 0.0)
        assert (plan.kind, set(plan.release)) == ("canonical", {0})
    assert windows == []


def test_training_keeps_its_plan_over_a_restart(tmp_path: Path) -> None:
    """Test boundaries of real modules, the plan in manifests, and that a frozen part keeps its partitions."""
    config = CaptureConfig(ring_folder=str(folder_for_rings(tmp_path)), proof="full", schedule="asymmetric")

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


def test_newest_plan_lists_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the first step of a training does not list the thousands of checkpoints that a run may have."""
    with Store.open(tmp_path / "store", config=SMALL, create=True) as store:
        for step in range(4):
            store.save({"step": step}, step=step)
    tier = NvmeTier(tmp_path / "store", SMALL, read_only=True)
    # A checkpoint that is being saved or deleted has no manifest.
    (tier.root / "manifests" / "default" / f"{1:08d}-{9:012d}-{'0' * 32}").mkdir()
    listed: list[int] = []
    original = ManifestReader.listing

    def listing(manifests: ManifestReader, run: str, ref: CheckpointRef) -> CheckpointFiles:
        listed.append(ref.step)
        return original(manifests, run, ref)

    monkeypatch.setattr(ManifestReader, "listing", listing)
    assert newest_plan(tier, "default") is not None
    assert listed == [9, 3]
    tier.close()
