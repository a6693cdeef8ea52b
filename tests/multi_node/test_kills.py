"""Test machines with killed ranks: common commits are restored bit for bit from each store."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import cast

import pytest

from asymcheck import Store
from asymcheck.fsck.verify import Severity
from tests.distributed.job import LIMIT_S, Job
from tests.multi_node.conftest import Launch
from tests.multi_node.scenarios import store_of

_SPAN_S = 0.3


def newest_of_all(folder: Path) -> int:
    """Return the newest step that is complete in the stores of both machines."""
    found = []
    for machine in range(2):
        if not (store_of(folder, machine) / "asymcheck.store").exists():
            return -1
        with Store.open(store_of(folder, machine), read_only=True) as store:
            found.append({one.step for one in store.checkpoints() if one.complete})
    return max(found[0] & found[1], default=-1)


def check_restored(job: Job, least: int) -> int:
    """Check that all ranks have restored one step, with the right state of each; return the step."""
    reports = [job.report(rank) for rank in range(len(job.processes))]
    assert not [one["refused"] for one in reports if "refused" in one]
    (step,) = {-1 if one["restored"] is None else cast(int, one["restored"]) for one in reports}
    assert step >= least
    for rank, one in enumerate(reports if step >= 0 else []):
        assert one["state"] == (job.folder / f"state-{step}-{rank}").read_text()
    return step


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.long)])
def test_after_a_kill_all_machines_resume_from_the_last_common_commit(
    launch: Launch, tmp_path: Path, rounds: int
) -> None:
    """Test kills of both machines at random moments."""
    chance = random.Random(rounds)
    least = -1
    for _ in range(rounds):
        for path in tmp_path.glob("report-*.json"):
            path.unlink()
        job = launch("trained", tmp_path, 200, world_size=2, PER_MACHINE=1)
        for rank in range(2):
            job.until(rank, f"report-{rank}.json")
        restored = check_restored(job, least)
        began = time.monotonic()
        while newest_of_all(tmp_path) <= restored + 1:
            assert time.monotonic() - began < LIMIT_S, job.output(0)
            time.sleep(0.01)
        for victim in chance.sample(range(2), 2):
            time.sleep(chance.random() * _SPAN_S)
            job.kill(victim)
        least = newest_of_all(tmp_path)
    job = launch("trained", tmp_path, 2, world_size=2, PER_MACHINE=1)
    job.wait()
    step = check_restored(job, least)
    assert newest_of_all(tmp_path) == step + 2
    for machine in range(2):
        with Store.open(store_of(tmp_path, machine), read_only=True) as store:
            assert not [one for one in store.verify() if one.severity == Severity.ERROR]


@pytest.mark.slow
def test_only_captures_of_all_machines_are_recovered(launch: Launch, tmp_path: Path) -> None:
    """Test kills when step 1 was complete in memory, after which machine 1 loses its memory."""
    for name, lost, step in (("kept", False, 1), ("lost", True, 0)):
        folder = tmp_path / name
        job = launch("stuck", folder, world_size=2, PER_MACHINE=1)
        for rank in range(2):
            job.until(rank, f"in-memory-{rank}")
        job.kill()
        assert newest_of_all(folder) == 0
        for ring in (folder / "machine-1" / "memory").iterdir() if lost else ():
            ring.unlink()
        job = launch("trained", folder, 1, world_size=2, PER_MACHINE=1)
        job.wait()
        assert check_restored(job, 0) == step
        assert newest_of_all(folder) == step + 1
        for machine in () if lost else range(2):
            with Store.open(store_of(folder, machine), read_only=True) as store:
                # Otherwise, the machines would retain different checkpoints.
                assert store.checkpoints()[1].metrics == {"loss": 1.0, "of-0": 1.0, "of-1": 1.0}
        assert any("skipped step 1" in text for text in cast(list[str], job.report(0)["reports"])) == lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "machines", "per_machine"), [("capture", 2, 1), ("manifest", 1, 2), ("manifest", 2, 2)]
)
def test_a_job_that_is_killed_during_its_first_checkpoint_starts_from_scratch(
    launch: Launch, tmp_path: Path, killed: str, machines: int, per_machine: int
) -> None:
    """Test a kill of the last rank before its capture is complete, or before its manifest and with a loss of memory."""
    world_size = machines * per_machine
    job = launch("first", tmp_path, killed, world_size=world_size, PER_MACHINE=per_machine)
    assert job.processes[-1].has_ended(LIMIT_S)
    for rank in range(world_size - 1):
        job.until(rank, f"in-memory-{rank}")
    began = time.monotonic()
    while killed == "manifest" and len([*tmp_path.glob("machine-*/store/manifests/*/*/*")]) < world_size - 1:
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.01)
    job.kill()
    for ring in tmp_path.glob("machine-*/memory/*") if killed == "manifest" else ():
        ring.unlink()
    for restored in (-1, 1):
        job = launch("trained", tmp_path, 2, world_size=world_size, PER_MACHINE=per_machine)
        job.wait()
        assert check_restored(job, -1) == restored
