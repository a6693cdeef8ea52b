"""What a workload returns, and how it is printed and written."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured quantity, over several runs."""

    system: str
    """What was measured."""
    metric: str
    """Which quantity."""
    unit: str
    """Its unit."""
    median: float
    """Median of the runs."""
    min: float
    """Least."""
    max: float
    """Greatest."""
    n: int
    """Number of runs."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that a workload measured."""

    workload: str
    """Its name."""
    environment: dict[str, str]
    """Where it ran."""
    results: list[Row]
    """What was measured."""
    ratios: dict[str, float]
    """Named quotients of medians, in one run."""


def row(system: str, metric: str, unit: str, values: Sequence[float]) -> Row:
    """Return the row of some runs."""
    return Row(system, metric, unit, statistics.median(values), min(values), max(values), len(values))


def print_environment(environment: dict[str, str]) -> None:
    """Print where the workload runs."""
    for name, value in environment.items():
        print(f"{name}: {value}")


def print_report(report: Report) -> None:
    """Print rows and ratios as tables."""
    table = Table("system", "metric", "unit", "median", "min", "max", "n", box=SIMPLE_HEAD, title=report.workload)
    for item in report.results:
        numbers = (f"{value:.4g}" for value in (item.median, item.min, item.max))
        table.add_row(item.system, item.metric, item.unit, *numbers, str(item.n))
    console = Console()
    console.print(table)
    for name, value in report.ratios.items():
        console.print(f"{name} = {value:.3f}")


def write_json(report: Report, path: Path) -> None:
    """Write the report as one JSON document."""
    path.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
