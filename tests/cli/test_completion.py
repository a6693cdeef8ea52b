"""Test shell completion of the values that a store knows."""

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from asymcheck.cli.main import commands


def _completions(*words: str) -> list[str]:
    *args, incomplete = words
    completer = ShellComplete(commands, {}, "asymcheck", "_ASYMCHECK_COMPLETE")
    return [str(item.value) for item in completer.get_completions(list(args), incomplete)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["restore", "STORE", "--step", ""], ["25", "30", "20", "10"]),
        (["restore", "STORE", "--step", "2"], ["25", "20"]),
        (["inspect", "STORE", "--run", "o"], ["other"]),
        (["restore", "STORE", "--part", "m"], ["model"]),
        (["diff", "STORE", "3"], ["30"]),
        (["delete", "STORE", "1"], ["10"]),
    ],
)
def test_values_of_the_store_are_completed(store: Path, words: list[str], expected: list[str]) -> None:
    """Test steps, newest first, runs, and parts of the state."""
    words = [str(store) if word == "STORE" else word for word in words]
    assert list(dict.fromkeys(_completions(*words))) == expected


def test_a_missing_store_completes_nothing(tmp_path: Path) -> None:
    """Test that no error is printed into the command line."""
    assert _completions("restore", str(tmp_path / "none"), "--step", "") == []
