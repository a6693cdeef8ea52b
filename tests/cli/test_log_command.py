"""Test that ``asymcheck log`` shows the history of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import asymcheck
import asymcheck.errors
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


def headings(outcome: Outcome) -> list[str]:
    """Return the lines that are not indented."""
    return [line for line in outcome.out.splitlines() if not line.startswith(" ")]


def test_line_newest_first_with_branches(call: Call, store: Path) -> None:
    """Test one entry per checkpoint, a dashed line at each branch, and the number of hidden entries."""
    outcome = call("log", store)
    assert (outcome.status, outcome.err) == (0, "")
    lines = headings(outcome)
    assert [line.split("  ")[:2] for line in lines if line.startswith("step")] == [
        ["step 25", "generation 2"],
        ["step 20", "generation 1"],
        ["step 10", "generation 1"],
    ]
    assert re.fullmatch(r"step 25 .* s ago  .* s after step 20  \(newest\)", lines[0])
    assert lines[1] == "--- generation 2 continued from step 20 of generation 1; 1 checkpoint abandoned"
    assert lines[-1] == "1 abandoned checkpoint not shown; pass --all to show them"
    assert outcome.out.count("by asymcheck ") == 1, "the version is shown once for each generation"
    assert "  bad nan, loss 0.05\n" in outcome.out


def test_all_marks_abandoned_checkpoints(call: Call, store: Path) -> None:
    """Test that only the abandoned step has a mark."""
    lines = headings(call("log", store, "--all"))
    assert [line.split("  ")[0] for line in lines if line.endswith("(abandoned)")] == ["step 30"]
    assert not any("not shown" in line for line in lines)


def test_a_damaged_manifest_is_marked(call: Call, store: Path) -> None:
    """Test that it is hidden and counted, that --all shows the reason, and status 0, as for inspect."""
    (manifest,) = next(
        path for path in (store / "manifests" / "default").iterdir() if "-000000000010-" in path.name
    ).iterdir()
    manifest.write_bytes(b"x")
    assert (
        headings(call("log", store))[-1]
        == "1 abandoned checkpoint and 1 incomplete checkpoint not shown; pass --all to show them"
    )
    outcome = call("log", store, "--all")
    assert outcome.status == 0
    assert " ago  (incomplete or damaged)\n    manifest default/" in outcome.out


def test_a_lost_head_record(call: Call, store: Path) -> None:
    """Test status 4, because the line is unknown; with --all, all entries are shown with status 6."""
    (store / "heads" / "default" / "00000002.head").write_bytes(bytes(8192))
    assert call("log", store).status == 4
    outcome = call("log", store, "--all")
    assert outcome.status == 6
    assert outcome.out.count("(line unknown)") == 4
    assert "--- generation 2: its head record cannot be read" in outcome.out
    assert "both copies" in outcome.err


def test_a_step_that_was_saved_twice(call: Call, store_path: Path) -> None:
    """Test that no entry of step 5 says "after step 5"."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        for _ in range(2):
            opened.save({"x": 1}, step=5)
    assert " after an earlier save of step 5  (newest)" in call("log", store_path).out


def test_an_older_step_that_was_saved_later(call: Call, store_path: Path) -> None:
    """Test that durations are not negative."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        opened.save({"x": 1}, step=5)
        with pytest.warns(asymcheck.errors.StepOrderWarning):
            opened.save({"x": 1}, step=3)
    out = call("log", store_path).out
    assert " s before step 3  (newest)" in out
    assert "-" not in out.split("before step 3")[0].splitlines()[-1]


def test_runs(call: Call, store: Path, tmp_path: Path) -> None:
    """Test a named run, status 3 for a missing run, and the message for an empty store."""
    assert "step 1  " in call("log", store, "--run", "other").out
    outcome = call("log", store, "--run", "nobody")
    assert (outcome.status, "it has runs default, other" in outcome.err) == (3, True)
    asymcheck.Store.open(tmp_path / "empty", create=True).close()
    assert call("log", tmp_path / "empty").out == "no checkpoints yet\n"
