"""Test that Ray Train restarts killed and preempted workers, and that the training resumes bit for bit."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Store
from tests.docs.pages import blocks_of
from tests.integrations import launch_ranks
from tests.integrations.ray_ranks import ENDED_IN, EVERY, STEPS
from tests.store.equality import assert_same

pytest.importorskip("ray.train.torch", reason="ray is not installed")


def run(folder: Path, *words: str, **environment: str) -> str:
    """Run ``python words...`` as the driver of a local Ray cluster; return its output."""
    # Ray creates sockets below its folder, and the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        environment |= {
            "HOME": str(folder),  # Ray creates files in the home directory
            "RAY_TMPDIR": scratch,
            "RAY_USAGE_STATS_ENABLED": "0",  # without network access
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # notice a killed worker soon
        }
        return launch_ranks.run_alone(words, **environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for stores and outcomes of the trainings, with the outcome of an uninterrupted one."""
    path = tmp_path_factory.mktemp("ray")
    run(path, "-m", "tests.integrations.ray_ranks", str(path), "whole", "killed")
    return path


def outcome(folder: Path, training: str, rank: int) -> dict[str, Any]:
    """Return losses and final state of a rank."""
    found: dict[str, Any] = torch.load(folder / f"{training}-{rank}.pt", weights_only=True)
    return found


def check(folder: Path, training: str, expected_first: set[int]) -> None:
    """Compare a training that was restarted once with the uninterrupted one."""
    first = {outcome(folder, training, rank)["first"] for rank in range(2)}
    assert len(first) == 1
    assert first <= expected_first
    for rank in range(2):
        found, whole = outcome(folder, training, rank), outcome(folder, "whole", rank)
        losses = whole.pop("losses")
        assert found.pop("losses") == {step: loss for step, loss in losses.items() if step > found["first"]}
        assert found.pop("first") > whole.pop("first") == 0
        assert_same(found, whole)
    with Store.open(folder / training, read_only=True) as store:
        assert store.verify() == []
        assert {one.generation for one in store.checkpoints()} == {1, 2}


@pytest.mark.slow
def test_a_killed_worker_is_restarted_as_never_killed(folder: Path) -> None:
    """Test SIGKILL on one of two workers in its backward pass: every loss and every bit is equal on both ranks."""
    check(folder, "killed", {(ENDED_IN - 1) // EVERY * EVERY})


@pytest.mark.long
def test_a_preempted_worker_is_restarted_as_never_preempted(folder: Path) -> None:
    """Test a notice to one of two workers, whose last step is saved by both."""
    run(folder, "-m", "tests.integrations.ray_ranks", str(folder), "preempted")
    check(folder, "preempted", {*range(ENDED_IN, STEPS)})


@pytest.mark.long
def test_the_example_of_the_documentation_resumes(tmp_path: Path) -> None:
    """Test the example in docs/trainers.md with a killed worker and without: it prints the same weights."""
    text = (launch_ranks.ROOT / "docs" / "trainers.md").read_text()
    (example,) = (block for block in blocks_of(text) if block.file == "train_ray.py")
    (tmp_path / "train_ray.py").write_text(example.body)
    shown = re.findall(r"^step \d+ of generation \d+", text, re.MULTILINE)
    printed = [
        run(tmp_path, str(tmp_path / "train_ray.py"), str(tmp_path / name), **kill).splitlines()[-1].split(",")
        for name, kill in (("killed", {"KILL_AT": "1:17"}), ("uninterrupted", {}))
    ]
    assert [steps for steps, _ in printed] == shown
    assert len({weights for _, weights in printed}) == 1
