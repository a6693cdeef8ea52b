"""Hold the results of a workload, and print and write them."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_T = TypeVar("_T")
_WIDTH = 140
# Facts that a workload adds to the environment during the run.
_SHOWN_AGAIN = ("best peer", "made cold by", "state", "store", "skipped", "facts")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured quantity, over several runs."""

    system: str
    """System under test."""
    metric: str
    """Name of the quantity."""
    unit: str
    """Unit of the quantity."""
    median: float
    """Median of the runs."""
    min: float
    """Minimum of the runs."""
    max: float
    """Maximum of the runs."""
    n: int
    """Number of runs."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All measurements of a workload."""

    workload: str
    """Name of the workload."""
    environment: dict[str, str]
    """Machine and versions of the run."""
    results: list[Row]
    """Measured quantities."""
    ratios: dict[str, float]
    """Named figures of one run, usually ratios of medians, as described in ``report.schema.json``."""


def row(system: str, metric: str, unit: str, values: Sequence[float]) -> Row:
    """Return the row of these runs."""
    return Row(system, metric, unit, statistics.median(values), min(values), max(values), len(values))


def best(medians: Mapping[str, float], names: Sequence[str]) -> str:
    """Return the name with the lowest median among ``names``."""
    return min(names, key=lambda name: medians[name])


def rotated(items: Sequence[_T], number: int) -> list[_T]:
    """Return the items in order, rotated so that each round starts with a different item."""
    start = number % len(items)
    return [*items[start:], *items[:start]]


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rounded(value: float) -> str:
    """Format a measured value."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_environment(environment: dict[str, str]) -> None:
    """Print the environment of the workload."""
    for name, value in environment.items():
        print(f"{name}: {value}")


def print_report(report: Report) -> None:
    """Print rows and ratios as tables."""
    table = Table(box=SIMPLE_HEAD, title=report.workload)
    for heading in ("system", "metric", "unit", "median", "min", "max", "n"):
        table.add_column(heading, no_wrap=True)
    for item in report.results:
        numbers = (f"{value:.4g}" for value in (item.median, item.min, item.max))
        table.add_row(item.system, item.metric, item.unit, *numbers, str(item.n))
    # Keep each row on one line, also without a terminal.
    console = Console(width=_WIDTH)
    console.print(table)
    for name, text in report.environment.items():
        if name.startswith(_SHOWN_AGAIN):
            console.print(f"{name}: {text}")
    for name, value in report.ratios.items():
        console.print(f"{name} = {value:.3f}")


def write_json(report: Report, path: Path) -> None:
    """Write the report as one JSON document."""
    path.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


class UnreadableReportError(Exception):
    """A file is not a report, or not the required report."""


def read_json(path: Path) -> Report:
    """Read a report that :func:`write_json` wrote.

    Raises:
        UnreadableReportError: the file is not a report.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableReportError(f"{path} cannot be read as a report: {error}") from error
    try:
        return Report(
            document["workload"],
            document["environment"],
            [Row(**one) for one in document["results"]],
            document["ratios"],
        )
    except (KeyError, TypeError) as error:
        raise UnreadableReportError(f"{path} is no report of a workload: it was not written by --json") from error
