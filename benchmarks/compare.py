"""``compare OLD.json NEW.json``: list results that became worse or better beyond the spread of both runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.report import Report, Row, UnreadableReportError, read_json

_MORE_IS_BETTER = ("GB/s", "%")
_SINGLE_RUN_TOLERANCE = 0.1
"""Relative difference that counts as a change for a result without a spread."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A result that differs beyond the spread."""

    system: str
    metric: str
    unit: str
    old: float
    new: float
    is_worse: bool


def changes(old: Report, new: Report) -> list[Change]:
    """Return the rows that differ, the worst first, without rows that exist in only one report."""
    before = {(row.system, row.metric, row.unit): row for row in old.results}
    differences = []
    for after in new.results:
        former = before.get((after.system, after.metric, after.unit))
        if former is not None and _differ(former, after):
            more_is_better = after.unit in _MORE_IS_BETTER or after.metric.startswith(("ratio", "bit-exact"))
            worse = (after.median < former.median) == more_is_better
            differences.append(Change(after.system, after.metric, after.unit, former.median, after.median, worse))
    return sorted(differences, key=lambda row: (not row.is_worse, -abs(_factor(row))))


def _differ(old: Row, new: Row) -> bool:
    """Return whether the ranges of two rows are disjoint."""
    return _range(old)[1] < _range(new)[0] or _range(new)[1] < _range(old)[0]


def _range(row: Row) -> tuple[float, float]:
    if row.n > 1:
        return row.min, row.max
    slack = row.median * _SINGLE_RUN_TOLERANCE / 2
    return row.median - slack, row.median + slack


def _factor(change: Change) -> float:
    least = min(change.old, change.new)
    return max(change.old, change.new) / least if least else float("inf")


def main(old_path: Path, new_path: Path) -> int:
    """Print the differences; return 1 if a row became worse, else 0."""
    old, new = read_json(old_path), read_json(new_path)
    if old.workload != new.workload:
        message = f"{old_path} is a report of {old.workload}, {new_path} one of {new.workload}"
        raise UnreadableReportError(message)
    for name in ("processor", "memory", "kernel", "file system", "torch"):
        if old.environment.get(name) != new.environment.get(name):
            print(f"{name} differs: {old.environment.get(name)}, then {new.environment.get(name)}")
    differences = changes(old, new)
    if not differences:
        print(f"{new.workload}: nothing differs beyond the spread")
        return 0
    table = Table(box=SIMPLE_HEAD, title=f"{new.workload}: {old.environment['date']}, then {new.environment['date']}")
    for heading in ("", "system", "metric", "unit", "old", "new", "new / old"):
        table.add_column(heading, no_wrap=True)
    for row in differences:
        quotient = f"{row.new / row.old:.2f}" if row.old else "-"
        word = "worse" if row.is_worse else "better"
        table.add_row(word, row.system, row.metric, row.unit, f"{row.old:.4g}", f"{row.new:.4g}", quotient)
    Console(width=150).print(table)
    return int(any(row.is_worse for row in differences))
