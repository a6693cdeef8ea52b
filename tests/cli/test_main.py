"""What all commands have in common: help, exit statuses, messages on standard error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck.cli import exits
from asymcheck.cli.main import commands
from asymcheck.config import __version__
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_help_lists_the_exit_statuses(call: Call, name: str) -> None:
    """Every command's help names each status."""
    text = call(name, "--help").out
    statuses = [exits.OK, exits.DAMAGED, exits.USAGE, exits.NOT_FOUND, exits.UNREADABLE, exits.STORAGE, exits.WARNINGS]
    assert all(f"\n    {status}  " in text for status in statuses), text


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_a_missing_store(call: Call, name: str, tmp_path: Path) -> None:
    """A store that is not there: status 3, the path in the message, and nothing is created."""
    outcome = call(name, tmp_path / "nowhere")
    assert outcome.status == exits.NOT_FOUND
    assert f"{tmp_path / 'nowhere'} does not exist" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_a_foreign_directory(call: Call, name: str, tmp_path: Path) -> None:
    """A directory that is not a store: status 3, and it says so."""
    (tmp_path / "photo.jpg").write_bytes(b"x")
    outcome = call(name, tmp_path)
    assert outcome.status == exits.NOT_FOUND
    assert "is not an asymcheck store" in outcome.err


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_a_destroyed_descriptor(call: Call, name: str, store: Path) -> None:
    """Both copies of the descriptor destroyed: status 4."""
    (store / "asymcheck.store").write_bytes(bytes(8192))
    outcome = call(name, store)
    assert outcome.status == exits.UNREADABLE
    assert "both copies" in outcome.err


@pytest.mark.parametrize(
    "name",
    sorted(name for name, one in commands.commands.items() if any(option.name == "step" for option in one.params)),
)
def test_a_step_that_is_not_there(call: Call, name: str, store: Path) -> None:
    """Status 3, and the message says which steps there are."""
    outcome = call(name, store, "--step", 99)
    assert outcome.status == exits.NOT_FOUND
    assert "it has steps 10, 20, 25, 30" in outcome.err


def test_a_wrong_option(call: Call, store: Path) -> None:
    """Status 2, by click."""
    assert call("inspect", store, "--nonsense").status == exits.USAGE


def test_the_installed_program_runs() -> None:
    """``python -m asymcheck --version`` prints name and version."""
    done = subprocess.run([sys.executable, "-m", "asymcheck", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"asymcheck, version {__version__}\n"
