"""Test ``asymcheck merge``, and what ``asymcheck inspect`` shows of its result."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asymcheck
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


def test_the_result_and_its_sources_are_shown(call: Call, store: Path) -> None:
    """Test the table of the command, and the same table of inspect."""
    outcome = call("merge", store, "--steps", "20,save:" + _save_id(store, 25), "--method", "ema", "--alpha", "0.25")
    assert (outcome.status, outcome.err) == (0, "")
    assert "run merged, step 25" in outcome.out
    assert "merged from these checkpoints, method ema, alpha 0.25:" in outcome.out
    assert "1 tensor, 39.1 KiB" in outcome.out
    rows = [line.split() for line in outcome.out.splitlines() if line.strip().startswith("default")]
    assert [(row[1], row[-1]) for row in rows] == [("20", "0.75"), ("25", "0.25")]
    shown = call("inspect", store, "--run", "merged", "--step", "25")
    assert [line.split() for line in shown.out.splitlines() if line.strip().startswith("default")] == rows
    with asymcheck.Store.open(store) as opened:
        state = opened.load(run="merged")
    assert torch.equal(state["model"]["weight"], torch.arange(10_000, dtype=torch.float32) + 0.25)  # type: ignore[index]  # JSON


def test_repeated_merge_says_that_the_result_was_there(call: Call, store: Path) -> None:
    """Test the line of the command, and the field for programs."""
    words = ("merge", store, "--steps", "20,25")
    assert "identical" not in call(*words).out
    with asymcheck.Store.open(store, read_only=True) as opened:
        (first,) = opened.checkpoints("merged")
        assert f"identical to save:{first.save_id[:12]} of this step, which the run already had\n" in call(*words).out
        *_, second = opened.checkpoints("merged")
    assert call(*words, "--json").json["duplicate_of"] == second.save_id
    assert call(*words, "--to-step", "26", "--json").json["duplicate_of"] is None


def _save_id(store: Path, step: int) -> str:
    with asymcheck.Store.open(store, read_only=True) as opened:
        return next(item.save_id for item in opened.checkpoints() if item.step == step)


def test_the_newest_checkpoints_and_another_store_are_merged(call: Call, store: Path, tmp_path: Path) -> None:
    """Test --last, --and, and a base in another store."""
    with asymcheck.Store.open(tmp_path / "other", create=True) as other:
        other.save({"model": {"weight": torch.ones(10_000)}}, step=1)
        other.save({"model": {"weight": torch.ones(10_000), "tied": torch.ones(10_000)}}, step=2)
    outcome = call("merge", store, "--last", "2", "--method", "lawa", "--json")
    assert [source["step"] for source in outcome.json["sources"]] == [20, 25]  # type: ignore[attr-defined]  # JSON
    outcome = call("merge", store, "--steps", "25", "--and", tmp_path / "other", "1", "--to-run", "two", "--json")
    assert outcome.status == 0
    base = ("--method", "ties", "--base", "1", "--base-store", tmp_path / "other")
    outcome = call("merge", store, "--steps", "25", *base, "--to-run", "three", "--to-step", "7", "--json")
    assert outcome.json["checkpoint"]["step"] == 7  # type: ignore[index]  # JSON


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (("--steps", "10,99"), 3, "no checkpoint of step 99"),
        (("--steps", "10"), 2, "at least 2 checkpoints"),
        (("--steps", "10,x"), 2, "--steps"),
        (("--last", "9"), 2, "run 'default' of .* has 3 complete checkpoints; give a smaller"),
        (("--last", "2", "--steps", "10,20"), 2, "give one of them"),
        ((), 2, "at least 2 checkpoints, not 0; give --steps or --last"),
        (("--steps", "10,20", "--method", "median"), 2, "median"),
        (("--steps", "10,20", "--method", "weighted", "--weights", "1"), 2, "1 weights for 2 checkpoints"),
        (("--steps", "10,20", "--weights", "a,b"), 2, "numbers separated by commas"),
        (("--steps", "10,20", "--density", "0.3"), 2, "no setting density; leave out --density, .* ties or dare"),
        (("--steps", "10,20", "--method", "ema", "--t", "0.5"), 2, "no setting t; .* choose method slerp"),
        (("--steps", "10,20", "--base-store", "other"), 2, "--base-store names the store of --base: give both"),
        (("--steps", "10,20", "--search", "--evaluate", "true", "--seed", "1"), 2, "leave out --seed"),
        (("--steps", "10,other@1"), 2, "merge checkpoints of one architecture"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_errors_have_a_status_and_change_nothing(
    call: Call, store: Path, words: tuple[str, ...], status: int, problem: str
) -> None:
    """Test the documented exit statuses, and that no run appears."""
    outcome = call("merge", store, *words)
    assert outcome.status == status
    assert re.search(problem, outcome.err), outcome.err
    with asymcheck.Store.open(store) as opened:
        assert "merged" not in opened.runs()
