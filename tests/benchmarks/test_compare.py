"""Test the comparison of two reports of a workload: results that became worse beyond the spread are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__
from benchmarks.report import Report, Row, row, write_json

ENVIRONMENT = {"date": "then", "processor": "one", "state": "a state"}


def _report(*rows: Row, workload: str = "durable") -> Report:
    return Report(workload, ENVIRONMENT, list(rows), {"quotient": 1.0})


def _compared(tmp_path: Path, old: Report, new: Report) -> object:
    for name, report in (("old", old), ("new", new)):
        write_json(report, tmp_path / f"{name}.json")
    with pytest.raises(SystemExit) as caught:
        __main__.main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])
    return caught.value.code


def test_slower_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Test status 1, and that results within the spread, and better ones, do not count."""
    old = _report(
        row("a", "time", "s", [1.0, 1.1, 1.2]), row("b", "time", "s", [1.0, 1.1, 1.2]), row("c", "speed", "GB/s", [4.0])
    )
    new = _report(
        row("a", "time", "s", [1.3, 1.4, 1.5]), row("b", "time", "s", [1.1, 1.3, 1.5]), row("c", "speed", "GB/s", [5.0])
    )
    assert _compared(tmp_path, old, new) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "worse" in line or "better" in line]
    assert [line[:2] for line in lines] == [["worse", "a"], ["better", "c"]]


def test_less_throughput_is_worse(tmp_path: Path) -> None:
    """Test a unit for which more is better."""
    assert _compared(tmp_path, _report(row("c", "x", "GB/s", [4.0])), _report(row("c", "x", "GB/s", [3.0]))) == 1
    assert _compared(tmp_path, _report(row("c", "x", "GB/s", [4.0])), _report(row("c", "x", "GB/s", [3.9]))) == 0
    exact = [_report(row("c", "bit-exact, M", "share", [value])) for value in (0.5, 1.0)]
    assert (_compared(tmp_path, *exact), _compared(tmp_path, *reversed(exact))) == (0, 1)
    assert _compared(tmp_path, *(_report(row("c", "error, M", "share", [value])) for value in (0.1, 0.2))) == 1


def test_equal_reports_and_reports_of_different_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Test that equal reports pass, and that reports of different workloads and other files are refused."""
    one = _report(row("a", "time", "s", [1.0]))
    assert _compared(tmp_path, one, one) == 0
    assert _compared(tmp_path, one, _report(row("a", "time", "s", [1.0]), workload="restore")) == 2
    assert "one of restore" in capsys.readouterr().err
    for text, problem in (("{}", "is no report"), ("no JSON", "cannot be read")):
        (tmp_path / "none.json").write_text(text)
        with pytest.raises(SystemExit) as caught:
            __main__.main(["compare", str(tmp_path / "none.json"), str(tmp_path / "old.json")])
        assert caught.value.code == 2
        assert problem in capsys.readouterr().err


def test_help_describes_each_workload(capsys: pytest.CaptureFixture[str]) -> None:
    """Test one line for each workload, the first of its module."""
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--help"])
    lines = capsys.readouterr().out.partition("workloads:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(__main__.WORKLOADS)
    assert all(line.endswith((".", ":")) and len(line.split()) > 5 for line in lines)
    assert "  hdfs     push to and restore from a real HDFS on this machine" in "\n".join(lines)
