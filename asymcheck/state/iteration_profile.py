"""Profile of a training iteration: the lengths of the windows between module boundaries. Pure functions.

The time from the end of ``step()`` to the fence is divided into windows by marks at module boundaries. Window 0 begins
when ``step()`` returns, window i at mark i. The time before the first mark belongs to window 0.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Phase = Literal["forward", "backward"]

Windows = tuple[tuple[Phase, float], ...]
"""Phase and length in seconds of each window of an iteration, in order."""

AGREEING_MIN = 3  # minimum for a median, because the first iterations often compile, allocate or fill caches


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Measured times of one iteration, in seconds of one clock."""

    begin_s: float  # when ``step()`` returned
    marks: tuple[tuple[Phase, float], ...]  # phase and time of each boundary, in order
    fence_s: float  # when the next optimizer step began

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phase of each window."""
        return tuple(phase for phase, _ in self.marks)

    @property
    def windows(self) -> tuple[tuple[Phase, float, float], ...]:
        """Phase, start and end of each window."""
        if not self.marks:
            return ()
        edges = [self.begin_s, *(time_s for _, time_s in self.marks[1:]), self.fence_s]
        return tuple((phase, *pair) for (phase, _), pair in zip(self.marks, pairwise(edges), strict=True))

    @property
    def seconds(self) -> tuple[float, ...]:
        """Length of each window."""
        return tuple(after - before for _, before, after in self.windows)


def profile_of(iterations: Sequence[Iteration]) -> Windows | None:
    """Return the median length of each window over the iterations with the most frequent sequence of phases.

    The latest of equally frequent sequences counts. Other sequences come from an evaluation, a skipped batch, or a
    shorter accumulation. Iterations whose clock ran backwards are ignored.

    Returns:
        None if fewer than ``AGREEING_MIN`` iterations agree.
    """
    usable = [
        iteration
        for iteration in iterations
        if iteration.marks and all(0 <= length < math.inf for length in iteration.seconds)
    ]
    # In reverse, because most_common() keeps the order of equally frequent elements.
    frequent = collections.Counter(iteration.phases for iteration in reversed(usable)).most_common(1)
    if not frequent or frequent[0][1] < AGREEING_MIN:
        return None
    phases = frequent[0][0]
    lengths = zip(*(iteration.seconds for iteration in usable if iteration.phases == phases), strict=True)
    return tuple(zip(phases, map(statistics.median, lengths), strict=True))
