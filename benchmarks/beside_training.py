"""Measure how much pushing checkpoints, and putting as many bytes, slow a training beside servers on this machine."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from asymcheck import Push, Store
from asymcheck.replication.background_push import BackgroundPush
from benchmarks import training
from benchmarks.report import Row, row

PUSH, PUT_FROM_MEMORY = "asymcheck push", "raw put from memory"
_PLAIN = 5


@dataclasses.dataclass(frozen=True)
class Location:
    """A location, the client's view of it, and its servers."""

    url: str
    """Location of the pushes."""
    pack_sizes: Callable[[], list[int]]
    """Return the bytes of each pack at the location."""
    put: Callable[[int, Sequence[int]], AbstractContextManager[Callable[[], bool]]]
    """Put objects of these sizes from memory, with a number as their prefix, in the background at low priority.

    The value of the ``with`` block tells whether all have been put.
    """
    processor_s: Callable[[], float]
    """Return the processor time of the servers [s]."""


@dataclasses.dataclass(frozen=True)
class _Slowed:
    """Slowdown of iterations during other work, relative to the iterations before and after it."""

    with_servers: float
    corrected: float
    """The slowdown without the processor time of the servers."""
    iteration_s: float


class TrainingSlowdown:
    """Save checkpoints of a real training, push each during the training, and put the same number of bytes.

    The put is the minimum cost of sending the bytes.
    """

    def __init__(self, where: Path, location: Location, shape: training.Shape) -> None:
        """Train a model of this shape in mixed precision, with the store at ``where``."""
        self._where, self._location = where, location
        self._run = training.VARIANTS["mixed"](training.pretrained(shape))
        self._alone: list[float] = []

    def state(self) -> training.State:
        """Return the state of the training."""
        return self._run.state()

    def measure(self, count: int) -> tuple[list[Row], dict[str, float]]:
        """Return the rows and ratios of ``count`` checkpoints."""
        ours, raw, sizes = list[_Slowed](), list[_Slowed](), list[int]()
        with (
            Store.open(self._where, create=True) as store,
            store.training.push_in_background(Push(self._location.url, close_s=None)) as pushing,
        ):
            self._run.train(_PLAIN)
            self._plain(_PLAIN)
            for number in range(count):
                self._run.train(1)
                store.save(self._run.state(), step=number)
                # Notify the thread as a Checkpointer does, instead of waiting for its next poll.
                pushing.refresh()
                ours.append(self._slowdown(partial(_is_pushed, pushing, number + 1)))
                new = self._location.pack_sizes()
                with self._location.put(number, [*(Counter(new) - Counter(sizes)).elements()]) as has_ended:
                    raw.append(self._slowdown(has_ended))
                sizes = new
        # Skip the first push and put, which include the setup.
        ours, raw = ours[1:], raw[1:]
        results = [
            row("no push", "iteration", "ms", [one * 1e3 for one in self._alone]),
            row(PUSH, "iteration beside it", "ms", [one.iteration_s * 1e3 for one in ours]),
            row(PUSH, "slowdown", "x", [one.corrected for one in ours]),
            row(PUSH, "slowdown with the servers", "x", [one.with_servers for one in ours]),
            row(PUT_FROM_MEMORY, "slowdown", "x", [one.corrected for one in raw]),
            row(PUT_FROM_MEMORY, "slowdown with the servers", "x", [one.with_servers for one in raw]),
        ]
        return results, {
            "slowdown_while_pushing": statistics.median(one.corrected for one in ours),
            "slowdown_with_servers": statistics.median(one.with_servers for one in ours),
            "slowdown_beside_raw_put": statistics.median(one.corrected for one in raw),
        }

    def _slowdown(self, has_ended: Callable[[], bool]) -> _Slowed:
        """Train until some work has ended, and for as long without it."""
        count, servers = 0, self._location.processor_s()
        began = time.perf_counter()
        while not has_ended() or not count:
            self._run.train(1)
            count += 1
        took = time.perf_counter() - began
        # Real servers run on other machines, so their processor time, divided by the number of processors, is
        # subtracted.
        without = max(took - (self._location.processor_s() - servers) / (os.cpu_count() or 1), 0.0)
        before = self._alone[-1]
        alone = statistics.mean((before, self._plain(max(count, _PLAIN)))) * count
        return _Slowed(took / alone, without / alone, took / count)

    def _plain(self, count: int) -> float:
        """Return the seconds of an iteration without other work."""
        began = time.perf_counter()
        self._run.train(count)
        self._alone.append((time.perf_counter() - began) / count)
        return self._alone[-1]


def _is_pushed(pushing: BackgroundPush, count: int) -> bool:
    now = pushing.statistics()
    if now.problem:
        raise RuntimeError(now.problem)
    return now.pushed >= count
