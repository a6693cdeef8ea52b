"""The profile of a training iteration: the lengths of the windows between module boundaries.

Pure. The time from the end of ``step()`` to the fence is cut into windows by the marks of module boundaries: window 0
begins when ``step()`` returns, window i at mark i. The time before the first mark belongs to the first window.
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
"""Phase and length in seconds of each window of an iteration, in order of time."""

AGREEING_MIN = 3  # fewer iterations make no median: the first ones often compile, allocate or fill caches


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The measured times of one iteration, in seconds of one clock."""

    begin_s: float  # when ``step()`` returned
    marks: tuple[tuple[Phase, float], ...]  # phase and time of each boundary, in order
    fence_s: float  # when the next optimizer step began

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phase of each window."""
        return tuple(phase for phase, _ in self.marks)

    @property
    def windows(self) -> tuple[tuple[Phase, float, float], ...]:
        """The phase of each window, when it began and when it ended."""
        if not self.marks:
            return ()
        edges = [self.begin_s, *(time_s for _, time_s in self.marks[1:]), self.fence_s]
        return tuple((phase, *pair) for (phase, _), pair in zip(self.marks, pairwise(edges), strict=True))

    @property
    def seconds(self) -> tuple[float, ...]:
        """The length of each window."""
        return tuple(after - before for _, before, after in self.windows)


MARKS_MIN = 3  # with fewer marks, the length of most of an iteration is all that is known
TIMED_S = 0.005
"""Desired length of a window that is not bounded by marks …"""
TIMED_MAX = 32
"""… and the maximum number of such windows in one iteration."""


def timed_profile(iterations: Sequence[Iteration]) -> Windows | None:
    """Return windows of equal length, for a training whose modules are not seen because they are compiled.

    Their number follows from the median iteration, and their phases from its first mark of backward.

    Returns:
        None while fewer than ``AGREEING_MIN`` iterations were seen, and when one has ``MARKS_MIN`` marks or more, so
        that :func:`profile_of` can say more about it.
    """
    usable = [one for one in iterations if 0 < one.fence_s - one.begin_s < math.inf]
    if len(usable) < AGREEING_MIN or any(len(one.marks) >= MARKS_MIN for one in usable):
        return None
    length = statistics.median(one.fence_s - one.begin_s for one in usable)
    turn = statistics.median(_turn(one) for one in usable)
    count = min(max(round(length / TIMED_S), 1), TIMED_MAX)
    phases: list[Phase] = ["backward" if (number + 0.5) / count > turn else "forward" for number in range(count)]
    return tuple((phase, length / count) for phase in phases)


def _turn(iteration: Iteration) -> float:
    """Return the fraction of an iteration after which backward begins; 1 when it has no mark of that."""
    times = [time_s for phase, time_s in iteration.marks if phase == "backward"]
    return (times[0] - iteration.begin_s) / (iteration.fence_s - iteration.begin_s) if times else 1.0


def profile_of(iterations: Sequence[Iteration]) -> Windows | None:
    """Return the medians, window by window, of the iterations that agree on the sequence of phases.

    Only the most frequent sequence counts; of two equally frequent ones, the one seen last. Others belong to an
    evaluation, a skipped batch, or an accumulation that ended early. Iterations whose clock ran backwards are ignored.

    Returns:
        None while fewer than ``AGREEING_MIN`` iterations agree.
    """
    usable = [one for one in iterations if one.marks and all(0 <= length < math.inf for length in one.seconds)]
    # Newest first, because most_common() keeps the order in which equals were met.
    frequent = collections.Counter(one.phases for one in reversed(usable)).most_common(1)
    if not frequent or frequent[0][1] < AGREEING_MIN:
        return None
    phases = frequent[0][0]
    lengths = zip(*(one.seconds for one in usable if one.phases == phases), strict=True)
    return tuple(zip(phases, map(statistics.median, lengths), strict=True))
