"""Test that an interrupted run of the long tests continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TESTS = """
import pathlib, pytest
@pytest.mark.parametrize("number", range(2))
def test_number(number):
    assert number == 0 or pathlib.Path("fixed").exists()
"""


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], cwd=folder, check=True)


def _commit(folder: Path) -> None:
    """Commit the tests and the documentation."""
    _git(folder, "add", *(path.name for path in folder.iterdir() if path.suffix in (".py", ".md")))
    _git(folder, "commit", "-qm", "x")


def _run(folder: Path, *words: str) -> tuple[int, str]:
    """Run the tests of a folder; return the exit status and the numbers of tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.resuming"]
    done = subprocess.run(
        [*command, "--passed", "passed.txt", *words],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()[-1].partition(" in ")[0].partition(", 1 des")[0]


@pytest.mark.slow(long=["workers"])
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "workers"])
def test_run_leaves_out_passed_tests_until_the_code_changes(tmp_path: Path, workers: list[str]) -> None:
    """Test a failed test, which runs again, a commit of documentation, and a change of a file."""
    (tmp_path / "test_numbers.py").write_text(TESTS)
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    assert _run(tmp_path, *workers) == (1, "1 failed, 1 passed")
    (tmp_path / "fixed").touch()
    (tmp_path / "page.md").touch()
    _commit(tmp_path)
    assert _run(tmp_path, *workers) == (0, "1 passed")
    status, nothing = _run(tmp_path, *workers)
    assert (status, "passed" in nothing) == (0, False)
    (tmp_path / "test_numbers.py").write_text(TESTS + "# changed\n")
    assert _run(tmp_path, *workers) == (0, "2 passed")
