"""Test the comparison of two reports of a workload: results that became worse beyond the spread are listed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import __main__, results
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


def test_the_page_of_results_says_where_asymcheck_is_not_first(tmp_path: Path) -> None:
    """Test the causes, and a section for each workload that was run."""
    rows = [row("asymcheck +S+O", "steps lost, M", "steps", [0.0])]
    for system, stall, durable in (("asymcheck +S+O", 1.0, 90.0), ("torch.save", 5.0, 30.0)):
        rows.append(row(system, "visible stall p95, M, every 10", "ms", [stall]))
        rows.append(row(system, "time to durable, M, every 10", "ms", [durable]))
    write_json(_report(*rows, workload="models"), tmp_path / "models.json")
    write_json(_report(row("a", "time", "s", [1.0])), tmp_path / "durable.json")
    results.write_page(tmp_path, full=False)
    page = (tmp_path / "README.md").read_text()
    assert "Written by `make report`" in page
    assert "## models" in page
    assert "## durable" in page
    lost = page.partition("is not first")[2]
    assert "| time to durable | M: 90 ms, torch.save 30 |" in lost
    assert "| visible stall" not in lost


def test_wrong_results_are_named_and_excluded(tmp_path: Path) -> None:
    """Test a failed recovery, which would look fast."""
    rows = []
    for system, exact, recovery in (("asymcheck +S+O", 1.0, 50.0), ("safetensors", 1.0, 7.0), ("torch DCP", 0.0, 3.0)):
        rows.append(row(system, "steps lost, M", "steps", [1.0]))
        rows.append(row(system, "bit-exact, M", "share", [exact, exact, 1.0]))
        rows.append(row(system, "recovery, M", "ms", [recovery]))
    write_json(_report(*rows, workload="models"), tmp_path / "models.json")
    results.write_page(tmp_path, full=False)
    page = (tmp_path / "README.md").read_text()
    wrong = page.partition("did not restore the state")[2].partition("is not first")[0]
    assert [line for line in wrong.splitlines() if line.startswith("-")] == ["- torch DCP: M (at times)"]
    assert "| recovery | M: 50 ms, safetensors 7 |" in page


def test_results_page_lists_missed_targets_first(tmp_path: Path) -> None:
    """Test that targets without a measurement are left out."""
    rows = [row("a", "time", "s", [1.0])]
    report = dataclasses.replace(_report(*rows, workload="restore"), ratios={"restore/limit": 0.9, "other": 1.0})
    write_json(report, tmp_path / "restore.json")
    report = dataclasses.replace(_report(*rows, workload="stall"), ratios={"stall_p95/best_peer": 0.2})
    write_json(report, tmp_path / "stall.json")
    results.write_page(tmp_path, full=True)
    page = (tmp_path / "README.md").read_text()
    assert "Written by `python -m benchmarks.results --full --only restore stall`" in page
    assert "--quick" not in page
    assert [line for line in page.splitlines() if " of [" in line] == [
        "| **missed** | `stall_p95/best_peer` of [stall](#stall) | ≤ 0.1 | 0.2 |",
        "| reached | `restore/limit` of [restore](#restore) | ≥ 0.85 | 0.9 |",
    ]


def test_help_describes_each_workload(capsys: pytest.CaptureFixture[str]) -> None:
    """Test one line for each workload, the first of its module."""
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--help"])
    lines = capsys.readouterr().out.partition("workloads:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(__main__.WORKLOADS)
    assert all(line.endswith((".", ":")) and len(line.split()) > 5 for line in lines)
    assert "  hdfs     push to and restore from a real HDFS on this machine" in "\n".join(lines)
