"""The profile of a training iteration: how much can be copied in each window between two module boundaries.

Pure. The time from the end of ``step()`` to the fence is cut into windows by the marks of module boundaries: window 0
begins when ``step()`` returns, window i at mark i. So the time before the first mark belongs to the first window.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from asymcheck.errors import InvalidInputError

Phase = Literal["forward", "backward"]

SAFETY = 0.8
"""Part of a window's idle time that is counted on: a window that is a fifth shorter than its median still suffices."""
AGREEING_MIN = 3
"""A median of fewer iterations is not one: the first of them often compiles, allocates or fills caches."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The time between two boundaries."""

    phase: Phase
    """What the training does in it."""
    seconds: float
    """How long it takes; finite and not negative."""
    idle: float
    """Part of it, 0 to 1, in which the link to the host is free."""

    def __post_init__(self) -> None:
        if self.phase not in ("forward", "backward"):
            raise InvalidInputError(f"phase {self.phase!r}: give 'forward' or 'backward'")
        if not (0 <= self.seconds < math.inf and 0 <= self.idle <= 1):
            raise InvalidInputError(f"window of {self.seconds} s, idle {self.idle}: give seconds >= 0 and 0 to 1")


@dataclasses.dataclass(frozen=True)
class Profile:
    """The windows of one iteration, and the speed of the link."""

    windows: tuple[Window, ...]
    """In order of time."""
    bytes_per_s: float
    """What the link moves while it is free; finite and not negative."""

    def __post_init__(self) -> None:
        if not 0 <= self.bytes_per_s < math.inf:
            raise InvalidInputError(f"bytes_per_s {self.bytes_per_s}: give a finite number >= 0")

    @property
    def capacities(self) -> tuple[float, ...]:
        """Bytes that can be copied in each window."""
        return tuple(window.seconds * window.idle * SAFETY * self.bytes_per_s for window in self.windows)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """What was seen of one iteration; all times in seconds of one clock."""

    begin_s: float
    """When ``step()`` returned."""
    marks: tuple[tuple[Phase, float], ...]
    """Phase and time of each boundary, in order."""
    fence_s: float
    """When the next optimizer step began."""

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


MARKS_MIN = 3
"""Of an iteration with fewer marks, all one can say of most of it is how long it takes."""
TIMED_S = 0.005
"""Length to aim at of a window that is nothing but a stretch of time …"""
TIMED_MAX = 32
"""… and how many there are at most in one iteration."""


def timed_profile(iterations: Sequence[Iteration], bytes_per_s: float) -> Profile | None:
    """Return windows of equal length, for a training whose modules are not seen: all of it compiled, or none there.

    As many as the median iteration has room for, of its phase where there is a mark of it.

    Returns:
        None while fewer than ``AGREEING_MIN`` iterations were seen; also when any has ``MARKS_MIN`` marks or more, so
        that :func:`profile_of` says more of it.
    """
    usable = [one for one in iterations if 0 < one.fence_s - one.begin_s < math.inf]
    if len(usable) < AGREEING_MIN or any(len(one.marks) >= MARKS_MIN for one in usable):
        return None
    length = statistics.median(one.fence_s - one.begin_s for one in usable)
    turn = statistics.median(_turn(one) for one in usable)
    count = min(max(round(length / TIMED_S), 1), TIMED_MAX)
    phases: list[Phase] = ["backward" if (number + 0.5) / count > turn else "forward" for number in range(count)]
    return Profile(tuple(Window(phase, length / count, 1.0) for phase in phases), bytes_per_s)


def _turn(iteration: Iteration) -> float:
    """Return after which part of an iteration backward begins; 1 when that was not seen."""
    times = [time_s for phase, time_s in iteration.marks if phase == "backward"]
    return (times[0] - iteration.begin_s) / (iteration.fence_s - iteration.begin_s) if times else 1.0


def profile_of(iterations: Sequence[Iteration], bytes_per_s: float, *, idle: float = 1.0) -> Profile | None:
    """Return the medians, window by window, of the iterations that agree on the sequence of phases.

    Iterations of another sequence than the most frequent one (of two as frequent, the one seen last) are left out: an
    evaluation, a skipped batch, an accumulation that ended early. So are those whose clock ran backwards.

    Args:
        iterations: in order of time.
        bytes_per_s: speed of the link.
        idle: part of each window in which the link is free.

    Returns:
        None while fewer than ``AGREEING_MIN`` iterations agree.

    Raises:
        InvalidInputError: ``bytes_per_s`` or ``idle`` is out of range.
    """
    usable = [one for one in iterations if one.marks and all(0 <= length < math.inf for length in one.seconds)]
    # Newest first, because most_common() keeps the order in which equals were met.
    frequent = collections.Counter(one.phases for one in reversed(usable)).most_common(1)
    if not frequent or frequent[0][1] < AGREEING_MIN:
        return None
    phases = frequent[0][0]
    lengths = zip(*(one.seconds for one in usable if one.phases == phases), strict=True)
    windows = [Window(phase, statistics.median(some), idle) for phase, some in zip(phases, lengths, strict=True)]
    return Profile(tuple(windows), bytes_per_s)
