"""Search schedules with few switches and kills, and leave out switches that change nothing.

A switch matters only before an operation that conflicts with one of the process that goes on instead: both use the same
file, and one of them changes it. Two schedules with the same order of all conflicting operations are equivalent.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from tests.interleaving.execution import Choice, Result, Step, process_of, stay
from tests.interleaving.gate import Operation

_CATALOG = "the catalog"
Touched = tuple[frozenset[str], frozenset[str]]
"""Names that an operation reads, and names that it changes: of entries and listings of folders, contents, and locks."""


def touched(operation: Operation) -> Touched:
    """Return what an operation reads and changes."""
    name, path, target, _ = operation
    entries = [text for place in filter(None, (path, target)) for text in (place, f"{PurePath(place).parent}/")]
    reads: list[str] = []
    changes: list[str] = []
    if name in ("create", "rename", "link", "unlink", "mkdir", "rmdir"):
        changes = entries
        reads = [f"{path}/"] if name == "rmdir" else []
    elif name == "list":
        reads = [f"{path}/"]
    elif name in ("open", "stat"):
        reads = [path]
    elif name in ("lock", "unlock"):
        changes = [f"lock of {path}"]
    elif name == "lock shared":
        reads = [f"lock of {path}"]
    elif name in ("write", "truncate", "read"):
        # A recycled file has another path when it is written than when it is read.
        (reads if name == "read" else changes).append("contents")
    elif name.endswith("ring"):
        (reads if name == "read ring" else changes).append(f"contents of {path}")
    elif name in ("begin read", "begin write"):
        reads = [_CATALOG]
    elif name == "commit":
        changes = [_CATALOG]
    return frozenset(reads), frozenset(changes)


def is_conflict(one: Touched, other: Touched) -> bool:
    """Tell whether the order of two operations matters."""
    return not (one[1].isdisjoint(other[0] | other[1]) and one[0].isdisjoint(other[1]))


def trace(steps: Sequence[Step]) -> int:
    """Return a hash that is equal for equivalent schedules."""
    last_of: dict[str, int] = {}
    last_change: dict[str, int] = {}
    reads_since: dict[str, set[int]] = defaultdict(set)
    for step in steps:
        name, operation = step.choice.process, step.operation
        reads, changes = touched(operation)
        before = {last_change.get(place, 0) for place in reads | changes}
        before = before.union(*(reads_since[place] for place in changes))
        if step.choice.is_killed:
            before |= {key for other, key in last_of.items() if process_of(other) == process_of(name)}
        last_of[name] = key = hash((step.choice, operation, last_of.get(name), frozenset(before)))
        for place in reads:
            reads_since[place].add(key)
        for place in changes:
            last_change[place] = key
            reads_since[place].clear()
    return hash(frozenset(last_of.items()))


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Lets each process run until it ends or waits, with exceptions at some steps."""

    names: tuple[str, ...]
    """Processes, in the order in which they run. The first one follows the last one."""
    changes: Mapping[int, Choice] = dataclasses.field(default_factory=dict)
    """Switches and kills, by the number of the step."""

    def __call__(self, number: int, ready: Sequence[str], last: str) -> Choice:
        """Return the next step."""
        change = self.changes.get(number)
        if change is not None and change.process in ready:
            return change
        first = self.names.index(process_of(last)) if last else 0
        following = next(name for name in (*self.names[first:], *self.names[:first]) if name in map(process_of, ready))
        return Choice(stay(ready, last if process_of(last) == following else following)[0])

    def further(self, steps: Sequence[Step], by_thread: Mapping[str, Touched]) -> Iterator[Bounded]:
        """Yield all schedules with one more switch or kill after the present ones."""
        has_changed: dict[str, bool] = {}
        for number, (choice, operation, others) in enumerate(steps):
            name, found = choice.process, touched(operation)
            if number > max(self.changes, default=-1):
                if has_changed.get(process_of(name)):
                    yield self._with(number, Choice(name, is_killed=True))
                for other in others:
                    if other in by_thread and is_conflict(found, by_thread[other]):
                        yield self._with(number, Choice(other))
            has_changed[process_of(name)] = bool(found[1])

    def _with(self, number: int, choice: Choice) -> Bounded:
        return Bounded(self.names, {**self.changes, number: choice})


def search(
    names: Sequence[str], execute: Callable[[Bounded, set[int]], Result], limits: Sequence[int]
) -> Iterator[Result]:
    """Run schedules with few switches and kills; yield their results.

    Args:
        names: the processes.
        execute: runs a schedule. It receives the known traces, to which it adds that of the schedule.
        limits: maximum number of schedules with 0, 1, … switches and kills, sampled at random if there are more.
    """
    dice, known = random.Random(0), set[int]()
    reads: dict[str, frozenset[str]] = defaultdict(frozenset)
    changed: dict[str, frozenset[str]] = defaultdict(frozenset)
    level = [Bounded((*names[first:], *names[:first])) for first in range(len(names))]
    for limit in limits:
        following: list[Bounded] = []
        for schedule in level if len(level) <= limit else dice.sample(level, limit):
            count = len(known)
            result = execute(schedule, known)
            yield result
            for step in result.steps:
                found = touched(step.operation)
                reads[step.choice.process] |= found[0]
                changed[step.choice.process] |= found[1]
            if len(known) > count:
                following += schedule.further(result.steps, {name: (reads[name], changed[name]) for name in changed})
        level = following
