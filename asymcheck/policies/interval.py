"""Interval: after how many steps the next checkpoint, by what a checkpoint costs and how often training fails.

Young's interval sqrt(2 c M) loses least: c is the time for which a checkpoint holds the training, M the mean time
between failures. It is never shorter than what the store keeps up with, the time Tw until a checkpoint is durable; nor
than the overhead q allows, c / q. That the ring has room for N of them makes Tw no shorter: they share one drive. Were
checkpoints begun every Tw / N, the ring would be full soon, and what then holds the training is time of the drive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from datetime import timedelta

from asymcheck.errors import InvalidInputError

_STAY = 1.25
"""What was chosen stays until the best is off by more than this: the loss is flat there, less than 3 %."""
_MINUTE, _HOUR = 60.0, 3600.0


@dataclasses.dataclass(frozen=True)
class AutoInterval:
    """Goals of ``every="auto"``."""

    overhead: float = 0.01
    """The part of the training time that checkpoints may hold it, at most."""
    mtbf: timedelta = timedelta(hours=3)
    """Mean time between failures: how long training goes on, on average, until a process or a node is lost.

    Three hours is what jobs on 16,000 GPUs have; give what yours has.
    """

    def __post_init__(self) -> None:
        """Refuse what no interval can be made of."""
        overhead: object = self.overhead
        mtbf: object = self.mtbf
        if isinstance(overhead, bool) or not isinstance(overhead, (int, float)) or not 0 < overhead <= 1:
            raise InvalidInputError(f"overhead={overhead!r:.100}: give a number above 0 and at most 1")
        if not isinstance(mtbf, timedelta) or mtbf <= timedelta():
            raise InvalidInputError(f"mtbf={mtbf!r:.100}: give a timedelta above zero")


@dataclasses.dataclass(frozen=True)
class TrainingPace:
    """Measurements of a training. Times are in seconds."""

    step_s: float
    """Time of one training step without a checkpoint; the median."""
    stall_s: float
    """How long one checkpoint held the training; the median."""
    durable_s: float
    """How long one takes until it is durable; the median."""


def slowest(paces: Sequence[TrainingPace]) -> TrainingPace:
    """Return what holds for ranks that train together: the slowest one holds up the others."""
    return TrainingPace(
        step_s=max(pace.step_s for pace in paces),
        stall_s=max(pace.stall_s for pace in paces),
        durable_s=max(pace.durable_s for pace in paces),
    )


@dataclasses.dataclass(frozen=True)
class ChosenInterval:
    """How often a checkpoint is made; ``str()`` of it is a sentence."""

    steps: int
    """Steps between two checkpoints; 0 while that is still being measured."""
    reason: str
    """Why."""

    def __str__(self) -> str:
        if not self.steps:
            return f"not chosen yet: {self.reason}"
        return f"every {'step' if self.steps == 1 else f'{self.steps} steps'}: {self.reason}"


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval in seconds, for a stall at each checkpoint and the mean time between failures."""
    return math.sqrt(2 * stall_s * mtbf_s)


def choose(aim: AutoInterval, facts: TrainingPace, present: ChosenInterval | None = None) -> ChosenInterval:
    """Return the interval for these facts, or ``present`` as long as it is near enough."""
    failure_s = aim.mtbf.total_seconds()
    bounds = {
        f"Young's interval for {span(facts.stall_s)} of stall and a failure every {span(failure_s)}": (
            young_s(facts.stall_s, failure_s)
        ),
        "the store takes so long until one is durable": facts.durable_s,
        f"{span(facts.stall_s)} of stall may take {aim.overhead:.2g} of the time": facts.stall_s / aim.overhead,
    }
    reason, seconds = max(bounds.items(), key=lambda item: item[1])
    # Rounded up: the bounds are least ones. Steps of no measurable time are none to count by.
    steps = max(math.ceil(seconds / max(facts.step_s, 1e-6) - 1e-9), 1)
    if present is not None and present.steps and present.steps / _STAY <= steps <= present.steps * _STAY:
        return present
    whole = f"{span(seconds)} at {span(facts.step_s)} a step, for {reason}"
    return ChosenInterval(steps, whole)


def span(seconds: float) -> str:
    """Return a time for people, for instance ``1.5 ms`` or ``3 h``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    return f"{seconds / _MINUTE:.3g} min" if seconds < _HOUR else f"{seconds / _HOUR:.3g} h"
