"""Test goodput: simulation and formula agree, and only surviving checkpoints count."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks import __main__
from benchmarks.failure_trace import read_trace, repeated
from benchmarks.goodput import (
    LLAMA3_INTERRUPTIONS,
    Costs,
    Failures,
    agreement,
    best_interval,
    formula,
    llama3,
    scenarios,
    simulate,
)
from benchmarks.report import UnreadableReportError

COSTS = Costs(
    iteration_s=1.0,
    stall_s=0.05,
    lag_s={"dram": 1.0, "nvme": 3.0, "remote": 20.0},
    restore_s={"dram": 2.0, "nvme": 4.0, "remote": 30.0},
    least_interval_s=0.0,
)


@pytest.mark.slow(
    quick=["2048 GPUs-failures3"], long=["a failure every*", "8 GPUs-*", "512 GPUs-*", "100000 GPUs-*", "16384 GPUs-*"]
)
@pytest.mark.parametrize(("name", "failures"), list(scenarios()))
def test_simulation_and_formula_agree_within_a_percent(name: str, failures: Failures) -> None:
    """Test the best interval, every step, and four times the best interval."""
    every = best_interval(COSTS, failures)
    # Rare failures need long trainings.
    days = max(4000.0, 20_000 * failures.mean_s / 86_400)
    assert agreement(COSTS, failures, [every, 4 * every], days) < 0.01, name


def test_published_trace_has_all_interruptions() -> None:
    """Test 419 interruptions in 54 days, one in three hours."""
    assert sum(count for count, _ in LLAMA3_INTERRUPTIONS.values()) == 419
    assert llama3(16_384).mean_s == pytest.approx(3.09 * 3600, rel=0.01)
    assert llama3(8192).mean_s == pytest.approx(2 * llama3(16_384).mean_s)
    assert sum(llama3(8).shares.values()) == pytest.approx(1)


def test_useless_tier_does_not_help() -> None:
    """Test the loss of all nodes: only remote checkpoints count, and without them no progress remains."""
    lost = Failures(3600.0, {"dram": 0.0, "nvme": 0.0, "remote": 1.0}, restart_s=60.0)
    slow_memory = dataclasses.replace(COSTS, lag_s=COSTS.lag_s | {"dram": 500.0})
    assert formula(slow_memory, lost, 20) == formula(COSTS, lost, 20)
    local_only = dataclasses.replace(COSTS, lag_s=COSTS.lag_s | {"remote": math.inf})
    assert formula(local_only, lost, 20) == 0
    assert simulate(local_only, lost, 20, days=10) == 0
    process = Failures(3600.0, {"dram": 1.0, "nvme": 0.0, "remote": 0.0}, restart_s=60.0)
    assert formula(slow_memory, process, 20) == pytest.approx(formula(COSTS, process, 20), rel=0.01)
    assert formula(COSTS, process, 20) > formula(COSTS, lost, 20)


def test_the_best_interval_is_near_that_of_young() -> None:
    """Test sqrt(2 c M) for a short recovery, and the limit by checkpoints in flight."""
    failures = Failures(10_000.0, {"dram": 1.0, "nvme": 0.0, "remote": 0.0}, restart_s=0.0)
    young = math.sqrt(2 * COSTS.stall_s * failures.mean_s)
    assert best_interval(COSTS, failures) == pytest.approx(young, rel=0.15)
    assert best_interval(dataclasses.replace(COSTS, least_interval_s=99.0), failures) >= 99


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no JSON", "cannot be read"),
        (json.dumps({"workload": "durable", "environment": {}, "results": [], "ratios": {}}), "a report of durable"),
    ],
)
def test_invalid_models_report_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    """Test the error in one sentence, also for a missing report."""
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(SystemExit, match=problem):
        __main__.main(["goodput", "--from", str(tmp_path / "some.json"), "--quick"])
    with pytest.raises(SystemExit) as caught:
        __main__.main(["goodput", "--quick"])
    assert caught.value.code == 2


SPOT = {"metadata": {"gap_seconds": 300}, "data": [4, 4, 4, 3, 3, 4, 4, 2, 1, 4]}


def test_a_trace_is_the_times_between_failures(tmp_path: Path) -> None:
    """Test published traces, in which each tick with fewer instances is a failure, and texts of unordered times."""
    published, text = tmp_path / "spot.json", tmp_path / "times.txt"
    published.write_text(json.dumps(SPOT))
    text.write_text("2100\n900\n2400\n900\n")
    assert read_trace(published) == read_trace(text) == [900.0, 1200.0, 300.0]


@pytest.mark.parametrize(
    "text",
    ['{"metadata": {}, "data": [1, 0]}', '{"metadata": {"gap_seconds": 1}, "data": 7}', "one", "", "-5", "nan"],
)
def test_invalid_trace_is_refused(text: str, tmp_path: Path) -> None:
    """Test also a trace without failures."""
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UnreadableReportError, match="trace"):
        read_trace(tmp_path / "trace")
    with pytest.raises(UnreadableReportError, match="cannot be read"):
        read_trace(tmp_path / "missing")


def test_replayed_trace_counts_progress_per_gap() -> None:
    """Test failures every 1,000 s: each gap includes the recovery, and only whole periods minus the lag count."""
    lost = Failures(1000.0, {"dram": 0.0, "nvme": 0.0, "remote": 1.0}, restart_s=60.0)
    found = simulate(COSTS, lost, 10, days=100, ups=repeated([1000.0], seed=2))
    up = 1000 - 60 - COSTS.restore_s["remote"] - COSTS.lag_s["remote"]
    kept = int(up / (10 * COSTS.iteration_s + COSTS.stall_s)) * 10 * COSTS.iteration_s
    # The first gap has no recovery.
    assert found == pytest.approx(kept / 1000, rel=1e-4)


def test_a_trace_that_never_lets_a_recovery_end_ends() -> None:
    """Test failures that are more frequent than recoveries, with which a training makes no progress."""
    lost = Failures(10.0, {"dram": 0.0, "nvme": 0.0, "remote": 1.0}, restart_s=60.0)
    assert simulate(COSTS, lost, 1, days=1, ups=repeated([10.0], seed=0)) == 0
