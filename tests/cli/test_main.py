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


WORDS = {
    "convert": ("out.safetensors",),
    "diff": ("10", "20"),
    "restore": ("--to", "out.safetensors"),
}
"""What a command needs after the store."""


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_help_lists_the_exit_statuses(call: Call, name: str) -> None:
    """Every command's help names each status."""
    text = call(name, "--help").out
    statuses = [exits.OK, exits.DAMAGED, exits.USAGE, exits.NOT_FOUND, exits.UNREADABLE, exits.STORAGE, exits.WARNINGS]
    assert all(f"\n    {status}  " in text for status in statuses), text


NAMES = sorted(set(commands.commands) - {"completion"})
"""The commands that take a store."""


STORES = sorted(set(NAMES) - {"convert"})
"""Those to which nothing else can be given: convert takes files of other formats as well."""


@pytest.mark.parametrize("name", STORES)
def test_a_missing_store(call: Call, name: str, tmp_path: Path) -> None:
    """A store that is not there: status 3, the path in the message, and nothing is created."""
    outcome = call(name, tmp_path / "nowhere", *WORDS.get(name, ()))
    assert outcome.status == exits.NOT_FOUND
    assert f"{tmp_path / 'nowhere'} does not exist" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", STORES)
def test_a_foreign_directory(call: Call, name: str, tmp_path: Path) -> None:
    """A directory that is not a store: status 3, and it says so."""
    (tmp_path / "photo.jpg").write_bytes(b"x")
    outcome = call(name, tmp_path, *WORDS.get(name, ()))
    assert outcome.status == exits.NOT_FOUND
    assert "is not an asymcheck store" in outcome.err


@pytest.mark.parametrize("name", NAMES)
def test_a_destroyed_descriptor(call: Call, name: str, store: Path) -> None:
    """Both copies of the descriptor destroyed: status 4."""
    (store / "asymcheck.store").write_bytes(bytes(8192))
    outcome = call(name, store, *WORDS.get(name, ()))
    assert outcome.status == exits.UNREADABLE
    assert "both copies" in outcome.err


@pytest.mark.parametrize(
    "words", [("inspect", "--step", 99), ("verify", "--step", 99), ("diff", 10, 99)], ids=["inspect", "verify", "diff"]
)
def test_a_step_that_is_not_there(call: Call, words: tuple[str, ...], store: Path) -> None:
    """Status 3, and the message says which steps there are."""
    outcome = call(words[0], store, *words[1:])
    assert outcome.status == exits.NOT_FOUND
    assert "it has steps 10, 20, 25, 30" in outcome.err


def test_a_wrong_option(call: Call, store: Path) -> None:
    """Status 2, by click."""
    assert call("inspect", store, "--nonsense").status == exits.USAGE


def test_the_installed_program_runs() -> None:
    """``python -m asymcheck --version`` prints name and version."""
    done = subprocess.run([sys.executable, "-m", "asymcheck", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"asymcheck, version {__version__}\n"


def _run(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)


def test_a_reader_that_has_seen_enough_is_no_damage(store: Path) -> None:
    """As in `asymcheck inspect STORE | head -0`: the signal ends the program quietly, with no status of ours."""
    done = _run(f"{sys.executable} -m asymcheck inspect {store} | head -c0; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.strip() in ("141", "0")
    assert done.stderr == ""


def test_output_that_cannot_be_written_is_said(store: Path) -> None:
    """A full disk under a redirected output: status 5, not a traceback and not the status of damage."""
    done = _run(f"{sys.executable} -m asymcheck inspect {store} > /dev/full")
    assert done.returncode == exits.STORAGE
    assert done.stderr.startswith("asymcheck: cannot write the output: ")
    assert "Traceback" not in done.stderr


def test_a_defect_has_a_status_of_its_own(store: Path) -> None:
    """Python's own would be 1, which says that a checkpoint is lost."""
    script = "import asymcheck.store as s, asymcheck.cli; s.Store.checkpoints = None; asymcheck.cli.main()"
    done = _run(f"{sys.executable} -c '{script}' inspect {store}")
    assert done.returncode == exits.DEFECT
    assert "Traceback" in done.stderr
