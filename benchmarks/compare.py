"""``compare OLD.json NEW.json``: what became slower, or larger, beyond the spread of both runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.report import Report, Row, UnreadableReportError, read_json

_MORE_IS_BETTER = ("GB/s", "%", "share")
_SINGLE_RUN_TOLERANCE = 0.1
"""A figure of one run has no spread: it has changed when it differs by more than this share."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure that differs beyond the spread."""

    system: str
    metric: str
    unit: str
    old: float
    new: float
    is_worse: bool


def changes(old: Report, new: Report) -> list[Change]:
    """Return the differing rows, the worst first, without rows that only one report has."""
    before = {(one.system, one.metric, one.unit): one for one in old.results}
    found = []
    for after in new.results:
        former = before.get((after.system, after.metric, after.unit))
        if former is not None and _differ(former, after):
            more_is_better = after.unit in _MORE_IS_BETTER or after.metric.startswith("ratio")
            worse = (after.median < former.median) == more_is_better
            found.append(Change(after.system, after.metric, after.unit, former.median, after.median, worse))
    return sorted(found, key=lambda one: (not one.is_worse, -abs(_factor(one))))


def _differ(old: Row, new: Row) -> bool:
    """Tell whether the ranges of two rows, least to greatest, have nothing in common."""
    return _range(old)[1] < _range(new)[0] or _range(new)[1] < _range(old)[0]


def _range(one: Row) -> tuple[float, float]:
    if one.n > 1:
        return one.min, one.max
    slack = one.median * _SINGLE_RUN_TOLERANCE / 2
    return one.median - slack, one.median + slack


def _factor(change: Change) -> float:
    least = min(change.old, change.new)
    return max(change.old, change.new) / least if least else float("inf")


def main(old_path: Path, new_path: Path) -> int:
    """Print the differences; return 1 when a row became worse, else 0."""
    old, new = read_json(old_path), read_json(new_path)
    if old.workload != new.workload:
        message = f"{old_path} is a report of {old.workload}, {new_path} one of {new.workload}"
        raise UnreadableReportError(message)
    for name in ("processor", "memory", "kernel", "file system", "torch"):
        if old.environment.get(name) != new.environment.get(name):
            print(f"{name} differs: {old.environment.get(name)}, then {new.environment.get(name)}")
    found = changes(old, new)
    if not found:
        print(f"{new.workload}: nothing differs beyond the spread")
        return 0
    table = Table(box=SIMPLE_HEAD, title=f"{new.workload}: {old.environment['date']}, then {new.environment['date']}")
    for heading in ("", "system", "metric", "unit", "old", "new", "new / old"):
        table.add_column(heading, no_wrap=True)
    for one in found:
        quotient = f"{one.new / one.old:.2f}" if one.old else "-"
        word = "worse" if one.is_worse else "better"
        table.add_row(word, one.system, one.metric, one.unit, f"{one.old:.4g}", f"{one.new:.4g}", quotient)
    Console(width=150).print(table)
    return int(any(one.is_worse for one in found))
