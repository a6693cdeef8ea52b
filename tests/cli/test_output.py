"""Test the printed tables."""

from __future__ import annotations

import pytest
from rich.console import Console

from asymcheck.cli import output

_ROWS = [
    {"run": "default", "step": 5, "none": None, "tensor": "größe.漢字 = x", "bytes": "1.0 KiB"},
    {"run": "b", "step": 12345, "none": None, "tensor": "a\tb", "bytes": ""},
    {"run": None, "step": None, "none": None, "tensor": "", "bytes": "12 B"},
]


def _printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    output.print_table(_ROWS, numbers=("step", "bytes"))
    return [line.rstrip() for line in capsys.readouterr().out.split("\n")]


def test_a_table_that_fits_looks_like_one_of_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that columns, rule, wide characters and escapes are those of a table that rich prints."""
    direct = _printed(capsys)
    monkeypatch.setattr(output, "_fits", lambda *_: False)
    assert _printed(capsys) == direct
    assert direct[4].split() == ["b", "12345", r"a\tb"]


def test_rich_is_not_asked_to_print_ten_thousand_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a table without folded cells is printed directly: rich takes seconds for a long run."""
    monkeypatch.delattr(Console, "print")
    output.print_table([{"run": "default", "step": step} for step in range(10_000)], numbers=["step"])
    assert len(capsys.readouterr().out.splitlines()) == 10_004
