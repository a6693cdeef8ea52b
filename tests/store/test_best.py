"""Test that ``best:METRIC`` names the best checkpoint on the line of training."""

import math
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.cli import exit_status
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError, SkippedCheckpointWarning
from asymcheck.inspect.diff import find_checkpoint
from tests.cli.conftest import run_command
from tests.damage.flips import flip

LOSSES = {1: math.nan, 2: 0.5, 3: 0.25, 4: 0.25, 5: math.inf}


@pytest.fixture
def measured(store: Store) -> Store:
    """Return a store with five checkpoints and their metrics, and one without metrics."""
    for step, loss in LOSSES.items():
        store.save({"x": step}, step=step, metrics={"loss": loss, "accuracy:max": float(step)})
    store.save({"x": 6}, step=6)
    return store


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("best:loss", 3),
        ("best:loss:min", 3),
        ("best:loss:max", 5),
        ("best:accuracy:max:min", 1),
        ("best:accuracy:max:max", 5),
    ],
)
def test_the_best_is_loaded(measured: Store, name: str, step: int) -> None:
    """Test both directions. NaN and missing values do not count, and of equal checkpoints the oldest is taken."""
    assert measured.load(name) == {"x": step}
    assert measured.restore(name).checkpoint.step == step
    listing, others = find_checkpoint(measured.resources.tier, f"default@{name}", "other")
    assert (listing.ref.step, others) == (step, [])


def test_abandoned_checkpoints_are_not_the_best(measured: Store) -> None:
    """Test that only checkpoints on the line count."""
    _, second, *_ = measured.checkpoints()
    measured.training.begin_generation(second)
    assert measured.load("best:loss") == {"x": 2}


def test_a_checkpoint_with_unreadable_metrics_is_reported(measured: Store) -> None:
    """Test that damage does not make another checkpoint the best in silence."""
    listing, _ = find_checkpoint(measured.resources.tier, 3, "default")
    directory = measured.resources.tier.manifests.directory("default", listing.ref)
    flip(directory / str(listing.manifests[0]), 8 * 100)
    with pytest.warns(SkippedCheckpointWarning, match=r"skipped step 3 .*"):
        assert measured.load("best:loss") == {"x": 4}


def test_unknown_metrics_and_invalid_names_are_refused(measured: Store) -> None:
    """Test that the error names the metrics that the run has."""
    with pytest.raises(
        CheckpointNotFoundError, match="no checkpoint of run 'default' has the metric 'los'; it has acc"
    ):
        measured.load("best:los")
    with pytest.raises(CheckpointNotFoundError, match="it has runs default"):
        measured.load("best:loss", run="absent")
    for name in ("best:", "best", "loss"):
        with pytest.raises(InvalidInputError, match="best:METRIC"):
            measured.load(name)


def test_commands_and_remote_locations_take_the_best(measured: Store, tmp_path: Path) -> None:
    """Test a push of the best, and an export of the best from the location."""
    location, target = f"file://{tmp_path}/far", tmp_path / "best.pt"
    assert run_command("push", measured.path, location, "--step", "best:loss", "--create").status == 0
    outcome = run_command("restore", location, "--step", "best:loss", "--to", target)
    assert outcome.out.splitlines()[0].endswith("from run default, step 3")
    assert torch.load(target, weights_only=True) == {"x": 3}
    refused = run_command(
        "restore", measured.path, "--step", "best:loss", "--to", tmp_path / "x.pt", "--tier", "memory"
    )
    assert refused.status == exit_status.USAGE
    assert "best:loss names one of the durable checkpoints: read it without --tier memory" in refused.err
