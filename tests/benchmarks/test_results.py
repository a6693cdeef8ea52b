"""Test the pages of the results, and that an interrupted run continues."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import models, results, results_pages
from benchmarks.models_child import Cell
from benchmarks.report import Report, Row, read_json, row, write_json

ENVIRONMENT = dict.fromkeys(
    ("date", "asymcheck", "python", "torch", "peers", "processor", "memory", "kernel", "file system"), "x"
)


def _report(workload: str, results_: list[Row], ratios: dict[str, float]) -> Report:
    return Report(workload, ENVIRONMENT, results_, ratios)


def test_summary_compares_with_best_library_and_names_missed_targets(tmp_path: Path) -> None:
    """Test that neither the limit nor a mode of asymcheck is called a library."""
    saves = {
        "asymcheck new": 2.0,
        "asymcheck recycled": 1.0,
        "raw new": 1.5,
        "torch.save new": 4.0,
        "safetensors new": 3.0,
    }
    rows = [row(system, "time to durable", "s", [value]) for system, value in saves.items()]
    write_json(
        _report("durable", rows, {"durable_new/limit": 0.75, "durable_new/best_peer": 1.5}), tmp_path / "durable.json"
    )
    results_pages.write_pages(tmp_path)
    summary = (tmp_path / "README.md").read_text()
    assert "| durable save | s | 2 | safetensors new: 3 | 1.5 |" in summary
    assert "1 of 2 targets" in summary
    assert "| [time of a raw write ÷ time of a durable save](all.md#durable) | ≥ 0.9 | 0.75 |" in summary
    assert "durable save of the best other library" not in summary
    assert "| reached | `durable_new/best_peer`" in (tmp_path / "all.md").read_text()


@pytest.mark.parametrize(
    ("line", "workload", "ratio"),
    [
        ("restore into the model", "restore", "restore/best_peer"),
        ("restore into new tensors", "restore", "restore_fresh/best_peer"),
        ("restore onto a GPU", "gpu", "restore/best_peer"),
        ("durable save", "durable", "durable_new/best_peer"),
    ],
)
def test_published_summary_names_the_library_of_the_ratio(line: str, workload: str, ratio: str) -> None:
    """Test that the table does not compare with a slower library than the ratio of the same run."""
    folder = results.TARGET
    (cells,) = re.findall(
        rf"^\| {line} \| s \| ([\d.]+) .*: ([\d.]+) ", (folder / "README.md").read_text(), re.MULTILINE
    )
    quotient = float(cells[1]) / float(cells[0])
    assert quotient == pytest.approx(read_json(folder / f"{workload}.json").ratios[ratio], rel=0.02)


def test_measured_values_differ_visibly_from_their_targets() -> None:
    """Test a ratio that misses its target by less than three digits show."""
    assert results_pages._beside(1.0, 1.0031) == "1.003"
    assert results_pages._beside(1.0, 1.2034) == "1.2"


def test_summary_has_hours_lost_by_each_scheme(tmp_path: Path) -> None:
    """Test the table of goodput."""
    lost = row("asymcheck +S+O", "lost in a month, 512 GPUs", "GPU-hours", [2000.0, 1000.0, 3000.0])
    write_json(_report("goodput", [lost], {"x": 1.0}), tmp_path / "goodput.json")
    results_pages.write_pages(tmp_path)
    assert "| asymcheck +S+O | 2,000 (1,000 to 3,000) |" in (tmp_path / "README.md").read_text()


def test_wrong_restores_are_named(tmp_path: Path) -> None:
    """Test a library that restored a wrong state after some kills."""
    rows = []
    for system, exact in (("asymcheck +S+O", 1.0), ("safetensors", 1.0), ("torch DCP", 0.0)):
        rows += [
            row(system, "steps lost, M", "steps", [1.0]),
            row(system, "bit-exact, M", "share", [exact, exact, 1.0]),
        ]
    write_json(_report("models", rows, {"x": 1.0}), tmp_path / "models.json")
    results_pages.write_pages(tmp_path)
    wrong = (tmp_path / "all.md").read_text().partition("did not restore the state")[2]
    assert [line for line in wrong.splitlines() if line.startswith("-")] == ["- torch DCP: M (at times)"]


def test_other_intervals_have_a_table(tmp_path: Path) -> None:
    """Test a report of one model in which each scheme was measured at other intervals."""
    rows = [row("torch.save", "steps lost, M", "steps", [1.0])]
    for system, every in (("asymcheck +S+O", 1), ("asymcheck +S+O", 10), ("safetensors", 1), ("torch.save", 10)):
        rows.append(row(system, f"slowdown, M, every {every}", "x", [1.0 + every]))
    write_json(_report("models", rows, {"x": 1.0}), tmp_path / "models-gpt2.json")
    results_pages.write_pages(tmp_path)
    table = (tmp_path / "all.md").read_text().partition("**At other intervals** with M")[2].split("\n\n")[1]
    assert [line.split(" | ")[:3] for line in table.splitlines()] == [
        ["| scheme", "slowdown [x], 1", "slowdown [x], 10"],
        ["|---|---|---|---|---|---|---|"],
        ["| asymcheck +S+O", "2", "11"],
        ["| safetensors", "2", "-"],
    ]


def test_missed_targets_are_listed_first(tmp_path: Path) -> None:
    """Test that targets without a measurement are left out."""
    write_json(_report("restore", [], {"restore/limit": 0.9, "other": 1.0}), tmp_path / "restore.json")
    write_json(_report("ranks", [], {"commit_s_at_16384": 12.0}), tmp_path / "ranks.json")
    results_pages.write_pages(tmp_path)
    assert [line for line in (tmp_path / "all.md").read_text().splitlines() if " of [" in line] == [
        "| **missed** | `commit_s_at_16384` of [ranks](#ranks) | ≤ 10 | 12 | Not measured. |",
        "| reached | `restore/limit` of [restore](#restore) | ≥ 0.85 | 0.9 |  |",
    ]
    assert "Missed, but not listed here: 1 of [ranks](all.md#ranks);" in (tmp_path / "README.md").read_text()


def test_interrupted_run_continues_with_unfinished_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that finished workloads are not run again, and that the run after a complete one begins anew."""
    ran: list[str] = []

    def run(workload: str, _arguments: object) -> None:
        if len(ran) == 1:
            ran.append("interrupted")
            raise KeyboardInterrupt
        ran.append(workload)

    monkeypatch.setattr(results, "_run", run)
    arguments = ["--target", str(tmp_path), "--only", "durable", "restore"]
    with pytest.raises(KeyboardInterrupt):
        results.main(arguments)
    (tmp_path / "models.cells.jsonl").write_text("kept")
    results.main(arguments)
    assert ran == ["durable", "interrupted", "restore"]
    assert (tmp_path / "models.cells.jsonl").exists()
    results.main(arguments)
    assert ran[3:] == ["durable", "restore"]
    assert not (tmp_path / "models.cells.jsonl").exists()


def test_quick_figures_are_not_published(capsys: pytest.CaptureFixture[str]) -> None:
    """Test that small sizes need another folder."""
    with pytest.raises(SystemExit) as error:
        results.main(["--quick", "--only", "durable"])
    assert error.value.code == 2
    assert "--target" in capsys.readouterr().err.splitlines()[-1]


def test_finished_cell_of_models_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a run with the cells of an earlier run measures the others, and reports all of them."""
    grid = models.Grid(["GPT-2"], "tiny", {10: 3}, ["asymcheck +S+O", "torch.save"])
    measured: list[Cell] = []

    def measure(_context: object, cell: Cell, _scratch: Path) -> tuple[list[Row], str]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(cell)
        label = "recovery, GPT-2" if cell.every == 0 else "slowdown, GPT-2, every 10"
        return [row(cell.scheme, label, "x", [float(len(measured))])], f"{cell.model}, 5 MB"

    monkeypatch.setattr(models, "_measured_cell", measure)
    cells = tmp_path / "cells"
    first = models.run(tmp_path, quick=True, grid=grid, cells=cells)
    assert len(measured) == 3
    assert first.environment["skipped"].startswith("1 of 4 cells")
    measured.clear()
    second = models.run(tmp_path, quick=True, grid=grid, cells=cells, model="GPT-2")
    assert [(cell.scheme, cell.every) for cell in measured] == [("torch.save", 0)]
    assert "skipped" not in second.environment
    assert [one.median for one in second.results] == [1.0, 2.0, 3.0, 1.0]
    assert second.ratios == {"slowdown_every_10": 1.0, "recovery/best_peer": 2.0, "slowdown/best_peer_every_10": 1 / 3}


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    """Test that the message names the models."""
    with pytest.raises(SystemExit, match=r"--model GPT2: give one of GPT-2, BLOOM"):
        models.run(tmp_path, quick=True, model="GPT2")
