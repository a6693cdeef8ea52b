"""Test that ``asymcheck delete`` deletes the checkpoints of a step, and nothing else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import asymcheck
from asymcheck.cli import exit_status, maintenance
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


def steps(store: Path, run: str = "default") -> list[int]:
    """Return the existing steps."""
    with asymcheck.Store.open(store, read_only=True) as opened:
        return [item.step for item in opened.checkpoints(run)]


def test_a_step_is_deleted(call: Call, store: Path) -> None:
    """Test that the output names deleted checkpoints, and the command that frees the space."""
    with asymcheck.Store.open(store, read_only=True) as opened:
        save_id = opened.checkpoints()[0].save_id
    outcome = call("delete", store, 10, "--yes")
    assert (outcome.status, outcome.err) == (exit_status.OK, "")
    assert outcome.out.startswith(f"deleted run default, step 10 (generation 1, save {save_id[:12]}, ")
    assert outcome.out.endswith(f": asymcheck gc {store}\n")
    assert steps(store) == [20, 30, 25]
    assert call("verify", store).status == exit_status.OK


def test_suggested_commands_are_quoted(call: Call, store: Path) -> None:
    """Test a path with a space."""
    there = store.rename(store.with_name("my store"))
    assert call("delete", there, 10, "--yes").out.endswith(f": asymcheck gc '{there}'\n")


def test_nothing_is_deleted_unasked(call: Call, store: Path) -> None:
    """Test that --yes is required in a pipe; the message lists the checkpoints."""
    outcome = call("delete", store, 10)
    assert (outcome.status, outcome.out) == (exit_status.USAGE, "")
    assert "pass --yes to delete run default, step 10 (generation 1, save " in outcome.err
    assert steps(store) == [10, 20, 30, 25]


@pytest.mark.slow(quick=["y\\n-0-left0"])
@pytest.mark.parametrize(("answer", "status", "left"), [("y\n", 0, [20, 30, 25]), ("n\n", 2, [10, 20, 30, 25])])
def test_terminal_asks_for_confirmation(store: Path, answer: str, status: int, left: list[int]) -> None:
    """Test both answers."""
    reader, terminal = pty.openpty()
    try:
        os.write(reader, answer.encode())
        done = subprocess.run(
            [sys.executable, "-m", "asymcheck", "delete", str(store), "10"],
            stdin=terminal,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(reader)
        os.close(terminal)
    assert done.returncode == status
    assert "run default, step 10 (generation 1" in done.stderr
    assert "Delete this checkpoint permanently? [y/N]:" in done.stderr
    assert ("nothing was deleted" in done.stderr) == (status != 0)
    assert steps(store) == left


def test_one_generation_of_a_step(call: Call, store: Path) -> None:
    """Test a generation, for instance the abandoned one; without it, all are deleted."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"x": 1}, step=30)
    outcome = call("delete", store, 30, "--generation", 3, "--yes")
    assert outcome.status == exit_status.NOT_FOUND
    assert "in generation 3; it has that step in generation 1, 2" in outcome.err
    assert call("delete", store, 30, "--generation", 1, "--yes").out.count("deleted run default, step 30") == 1
    assert steps(store) == [10, 20, 25, 30]
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"x": 2}, step=30)
    assert call("delete", store, 30, "--yes").out.count("deleted run default, step 30") == 2
    assert steps(store) == [10, 20, 25]


def test_a_step_that_is_saved_again_before_the_answer(call: Call, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that only the listed checkpoint is deleted."""

    def save_again(_listed: object) -> bool:
        with asymcheck.Store.open(store) as opened:
            opened.save({"x": 1}, step=25)
        return True

    monkeypatch.setattr(maintenance, "_is_confirmed", save_again)
    assert call("delete", store, 25).out.count("deleted run default, step 25") == 1
    assert steps(store) == [10, 20, 30, 25]


def test_a_save_that_is_gone_before_the_answer(call: Call, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the other saves of the step are deleted and listed, if a retention has deleted one of them."""
    with asymcheck.Store.open(store) as opened:
        opened.save({"x": 1}, step=30)

    def delete_one(_listed: object) -> bool:
        with asymcheck.Store.open(store) as opened:
            return len(opened.delete(30, generation=1)) == 1

    monkeypatch.setattr(maintenance, "_is_confirmed", delete_one)
    outcome = call("delete", store, 30)
    assert (outcome.status, outcome.out.count("deleted run default, step 30")) == (exit_status.OK, 1)
    assert "has no checkpoint of run 'default' whose save id is" in outcome.err
    assert steps(store) == [10, 20, 25]


def test_another_run(call: Call, store: Path) -> None:
    """Test that other runs are not changed."""
    assert call("delete", store, 1, "--yes").status == exit_status.NOT_FOUND
    assert call("delete", store, 1, "--run", "other", "--yes").status == exit_status.OK
    assert (steps(store, "other"), steps(store)) == ([], [10, 20, 30, 25])
    assert call("delete", store, 1, "--run", "no/name", "--yes").status == exit_status.USAGE


def test_json(call: Call, store: Path) -> None:
    """Test that the output is one document."""
    document = call("delete", store, 20, "--yes", "--json").json
    assert [item["step"] for item in document["deleted"]] == [20]  # type: ignore[attr-defined]  # JSON
