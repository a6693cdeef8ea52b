"""Test common behaviour of all commands: help, exit statuses, and messages on standard error."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.cli import exit_status
from asymcheck.cli.main import commands
from asymcheck.config import __version__
from tests.cli.conftest import Outcome
from tests.zygote import Zygote

Call = Callable[..., Outcome]


WORDS = {
    "convert": ("out.safetensors",),
    "delete": ("10", "--yes"),
    "diff": ("10", "20"),
    "publish": ("--to", "releases"),
    "push": ("file:///nowhere/remote",),
    "restore": ("--to", "out.safetensors"),
    "subscribe": ("--to", "out.safetensors"),
}
"""Arguments that a command needs after the store."""


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_help_lists_the_exit_statuses(call: Call, name: str) -> None:
    """Test that the help of every command names each status."""
    text = call(name, "--help").out
    statuses = [
        exit_status.OK,
        exit_status.DAMAGED,
        exit_status.USAGE,
        exit_status.NOT_FOUND,
        exit_status.UNREADABLE,
        exit_status.STORAGE,
        exit_status.WARNINGS,
    ]
    assert all(f"\n    {status}  " in text for status in statuses), text


def test_the_page_says_the_same_of_each_status() -> None:
    """Test that docs/cli.md and the help list the same statuses."""
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")
    shown = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    listed = re.findall(r"^ *(\d+)  ((?:.|\n {5})+)$", exit_status.HELP, re.MULTILINE)
    assert [(number, " ".join(meaning.split())) for number, meaning in listed] == shown


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_help_shows_no_escape(call: Call, name: str) -> None:
    """Test that click's marker for "do not wrap" is not printed, and that examples keep their lines."""
    text = call(name, "--help").out
    assert "\\b" not in text
    assert "\b" not in text
    lines = [line for line in text.splitlines() if line.strip().startswith(f"asymcheck {name} ")]
    assert all(line.count(f"asymcheck {name} ") == 1 for line in lines)
    assert len(lines) >= {"convert": 3, "restore": 3}.get(name, 0)


def test_an_empty_store_is_called_empty(call: Call, tmp_path: Path) -> None:
    """Test every command that looks for a checkpoint or a run."""
    asymcheck.Store.open(tmp_path / "store", create=True).close()
    for words in (
        ("inspect", "--step", 1),
        ("inspect", "--run", "x"),
        ("verify", "--run", "x"),
        ("verify", "--step", 1),
        ("delete", 1, "--yes"),
        ("diff", 1, 2),
        ("restore", "--to", tmp_path / "o.pt"),
    ):
        outcome = call(words[0], tmp_path / "store", *words[1:])
        assert (outcome.status, outcome.err.endswith("; it is empty\n")) == (exit_status.NOT_FOUND, True), outcome.err


@pytest.mark.parametrize("name", ["inspect", "verify", "log", "du"])
def test_missing_run_in_all_commands(call: Call, store: Path, name: str) -> None:
    """Test that all commands list the existing runs in the same words."""
    outcome = call(name, store, "--run", "nobody")
    assert outcome.status == exit_status.NOT_FOUND
    assert outcome.err.endswith("has no run 'nobody'; it has runs default, other. Choose one with run= or --run\n")


@pytest.mark.parametrize(
    "words",
    [("inspect",), ("diff", 10, 20), ("restore", "--to", "o.safetensors"), ("restore", "--to", "o.pt")],
    ids=["inspect", "diff", "safetensors", "pt"],
)
def test_a_glob_that_matches_nothing(call: Call, store: Path, words: tuple[object, ...]) -> None:
    """Test status 2 with the existing names, for every command with a glob."""
    outcome = call(words[0], store, *words[1:], "--tensors", "modle.*")
    assert (outcome.status, outcome.out) == (exit_status.USAGE, "")
    assert "tensors='modle.*' matches no name in" in outcome.err
    assert "; it has model (try" in outcome.err or "; they have model, optimizer" in outcome.err
    assert "(try 'model*')" in outcome.err


NAMES = sorted(set(commands.commands) - {"completion", "merge-reports", "pull"})
"""Commands with a store argument; pull reads a remote location and creates its store, merge-reports reads files."""


STORES = sorted(set(NAMES) - {"convert"})
"""Commands that accept only stores; convert also accepts other formats."""


@pytest.mark.parametrize("name", STORES)
def test_a_missing_store(call: Call, name: str, tmp_path: Path) -> None:
    """Test status 3 with the path, and that nothing is created."""
    outcome = call(name, tmp_path / "nowhere", *WORDS.get(name, ()))
    assert outcome.status == exit_status.NOT_FOUND
    assert f"cannot open store {tmp_path / 'nowhere'}: it does not exist" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", STORES)
def test_a_foreign_directory(call: Call, name: str, tmp_path: Path) -> None:
    """Test status 3 for a directory that is not a store."""
    (tmp_path / "photo.jpg").write_bytes(b"x")
    outcome = call(name, tmp_path, *WORDS.get(name, ()))
    assert outcome.status == exit_status.NOT_FOUND
    assert "is not an asymcheck store" in outcome.err


@pytest.mark.parametrize("name", NAMES)
def test_a_store_without_permission(call: Call, name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test status 5: the operating system refuses, and the command line is valid."""
    os_open = os.open

    def refuse(path: str, *arguments: int, **options: int) -> int:
        if os.fspath(path).startswith(str(store)):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return os_open(path, *arguments, **options)

    monkeypatch.setattr(os, "access", lambda path, _mode: os.fspath(path) != str(store))
    monkeypatch.setattr(os, "open", refuse)
    outcome = call(name, store, *WORDS.get(name, ()))
    assert outcome.status == exit_status.STORAGE
    assert "Permission denied" in outcome.err


@pytest.mark.parametrize("name", NAMES)
def test_a_destroyed_descriptor(call: Call, name: str, store: Path) -> None:
    """Test status 4 if both copies of the descriptor are destroyed."""
    (store / "asymcheck.store").write_bytes(bytes(8192))
    outcome = call(name, store, *WORDS.get(name, ()))
    assert outcome.status == exit_status.UNREADABLE
    assert "both copies" in outcome.err


@pytest.mark.parametrize(
    "words",
    [("inspect", "--step", 99), ("verify", "--step", 99), ("diff", 10, 99), ("delete", 99, "--yes")],
    ids=["inspect", "verify", "diff", "delete"],
)
def test_missing_step(call: Call, words: tuple[str, ...], store: Path) -> None:
    """Test status 3 with the existing steps."""
    outcome = call(words[0], store, *words[1:])
    assert outcome.status == exit_status.NOT_FOUND
    assert "it has steps 10, 20, 25, 30" in outcome.err


def test_a_wrong_option(call: Call, store: Path) -> None:
    """Test status 2."""
    assert call("inspect", store, "--nonsense").status == exit_status.USAGE


def test_the_installed_program_runs() -> None:
    """Test that ``python -m asymcheck --version`` prints name and version."""
    done = subprocess.run([sys.executable, "-m", "asymcheck", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"asymcheck, version {__version__}\n"


def _run(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)


def test_a_reader_that_has_seen_enough_is_no_damage(store: Path) -> None:
    """Test `asymcheck inspect STORE | head -0`: the program ends as by SIGPIPE, without a message."""
    for words in (f"inspect {store}", f"inspect {store} --follow", f"inspect {store} --json"):
        done = _run(f"{sys.executable} -m asymcheck {words} | head -c0; echo ${{PIPESTATUS[0]}}")
        assert done.stdout.strip() in ("141", "0")
        assert done.stderr == ""


def test_failed_output_is_reported(store: Path) -> None:
    """Test a full disk under redirected output: status 5, not a traceback or the status of damage."""
    done = _run(f"{sys.executable} -m asymcheck inspect {store} > /dev/full")
    assert done.returncode == exit_status.STORAGE
    assert done.stderr.startswith("asymcheck: cannot write the output: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow(quick=["log nowhere-3"])
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("log nowhere", exit_status.NOT_FOUND),
        ("inspect --nonsense", exit_status.USAGE),
        ("inspect {store} --step 20 > /dev/full", exit_status.STORAGE),
        ("restore {store} --to {store}.safetensors", exit_status.OK),
    ],
)
def test_messages_that_cannot_be_written_change_no_status(store: Path, words: str, status: int) -> None:
    """Test that the status is not 1, which reports a lost checkpoint."""
    done = _run(f"{sys.executable} -m asymcheck {words.format(store=store)} 2> /dev/full")
    assert done.returncode == status


def test_a_signal_at_the_end_of_a_write_repeats_no_message() -> None:
    """Test a handler that raises when the bytes are written, but the write has not returned."""
    script = """
import click, importlib
main = importlib.import_module("asymcheck.cli.main")
class Interrupted(main._LossyStderr):
    def write(self, data):
        if super().write(data):  # click probes the stream with no bytes
            raise SystemExit(3)
        return 0
main._LossyStderr = Interrupted
main._prepare_streams()
click.echo("once", err=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "once\n")


@pytest.mark.slow
def test_a_defect_has_a_status_of_its_own(store: Path) -> None:
    """Test that the status is not Python's 1, which reports a lost checkpoint."""
    script = "import asymcheck.store as s, asymcheck.cli; s.Store.checkpoints = None; asymcheck.cli.main()"
    done = _run(f"{sys.executable} -c '{script}' inspect {store}")
    assert done.returncode == exit_status.DEFECT
    assert "Traceback" in done.stderr
    assert _run(f"{sys.executable} -c '{script}' inspect {store} 2> /dev/full").returncode == exit_status.DEFECT


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_defect(store: Path, closed: str) -> None:
    """Test a start by a service: closed input is at its end, and closed output is discarded."""
    command = f"{sys.executable} -m asymcheck"
    assert _run(f"{command} inspect {store} {closed}").returncode == exit_status.OK
    assert _run(f"{command} delete {store} 10 {closed}").returncode == exit_status.USAGE


def test_the_number_of_a_closed_stream_stays_taken(store: Path) -> None:
    """Test that no file of the store gets the descriptor, and with it the output."""
    script = "import asymcheck.cli, atexit, os; atexit.register(lambda: print(os.readlink('/proc/self/fd/2')))"
    done = _run(f'{sys.executable} -c "{script}; asymcheck.cli.main()" inspect {store} 2>&-')
    assert (done.returncode, done.stdout.splitlines()[-1]) == (exit_status.OK, "/dev/null")


@pytest.mark.slow
def test_no_character_is_too_much_for_a_terminal(tmp_path: Path) -> None:
    """Test names and shapes with characters that the terminal's encoding lacks: they are escaped."""
    with asymcheck.Store.open(tmp_path / "store", create=True) as opened:
        opened.save({"ü→": torch.ones(5, 5)}, step=1)
    ascii_only = "PYTHONIOENCODING=ascii PYTHONUTF8=0"
    done = _run(f"{ascii_only} {sys.executable} -m asymcheck inspect {tmp_path}/store --step 1 --tensors '*'")
    assert (done.returncode, done.stderr) == (exit_status.OK, "")
    assert r"\xfc\u2192" in done.stdout


@pytest.mark.slow(long=["1-129"])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, exit_status.INTERRUPTED), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupt_is_no_damage_and_leaves_nothing_half_written(
    zygote: Zygote, store: Path, tmp_path: Path, number: int, status: int
) -> None:
    """Test that the status is not click's 1, which reports a lost checkpoint."""
    script = (
        "import asymcheck.convert.export_target as f, asymcheck.cli, os, signal, time\n"
        # nohup ignores SIGHUP.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "def stop(self):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(60)\n"
        "f.TargetFile.sync = stop\n"
        "asymcheck.cli.main()"
    )
    done = zygote.run_script(script, "restore", store, "--to", tmp_path / "out.pt")
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path != store] == []
