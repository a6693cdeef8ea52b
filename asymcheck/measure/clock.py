"""How long something takes: several times, within a budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

_ROUNDS_MIN = 3


def seconds_of(work: Callable[[], object], budget_s: float, rounds: int = 100) -> float:
    """Return the median time of calls of ``work``: as many as the budget allows, three at least.

    The first call warms up caches and memory and does not count.
    """
    work()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < rounds and (len(taken) < _ROUNDS_MIN or time.perf_counter() - began < budget_s):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    # A clock has steps.
    return max(statistics.median(taken), 1e-9)
