"""Checkpoint interval: choose the number of steps from the cost of a checkpoint and the rate of failures.

Young's interval sqrt(2 c M) loses the least time: c is the stall per checkpoint, M the mean time between failures. The
interval has two lower bounds: the time Tw until a checkpoint is durable, and c / q for the permitted overhead q. Room
for N checkpoints in the ring does not lower Tw, because all share one drive. With an interval of Tw / N, the ring would
soon be full, and training would wait for the drive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from datetime import timedelta

from asymcheck.config import check_number
from asymcheck.errors import InvalidInputError

_STAY = 1.25
"""A chosen interval stays until the optimum differs by this factor, at which the extra loss is below 3 %."""
_WHOLE_SECOND, _MINUTE, _HOUR = 0.9995, 60.0, 3600.0  # three digits of a shorter time are less than 1,000 ms


@dataclasses.dataclass(frozen=True)
class AutoInterval:
    """Goals of ``every="auto"``."""

    overhead: float = 0.01
    """Maximum fraction of the training time that checkpoints may stall."""
    mtbf: timedelta = timedelta(hours=3)
    """Mean time between failures of any process or node.

    Jobs on 16,000 GPUs have about three hours; give the value of your cluster.
    """

    def __post_init__(self) -> None:
        """Refuse invalid goals."""
        check_number("overhead", self.overhead, 1e-9, 1)
        mtbf: object = self.mtbf
        if not isinstance(mtbf, timedelta) or mtbf <= timedelta():
            raise InvalidInputError(f"mtbf={mtbf!r:.100}: give a timedelta above zero")


@dataclasses.dataclass(frozen=True)
class TrainingPace:
    """Measurements of a training. Times are in seconds."""

    step_s: float
    """Median time of a training step without a checkpoint."""
    stall_s: float
    """Median stall of the training per checkpoint."""
    durable_s: float
    """Median time until a checkpoint is durable."""


def slowest(paces: Sequence[TrainingPace]) -> TrainingPace:
    """Return the pace of several ranks, which is that of the slowest."""
    return TrainingPace(
        step_s=max(pace.step_s for pace in paces),
        stall_s=max(pace.stall_s for pace in paces),
        durable_s=max(pace.durable_s for pace in paces),
    )


@dataclasses.dataclass(frozen=True)
class ChosenInterval:
    """Steps between checkpoints, with the reason. ``str()`` returns a sentence."""

    steps: int
    """Steps between two checkpoints; 0 during the first measurements."""
    reason: str

    def __str__(self) -> str:
        if not self.steps:
            return f"not chosen yet: {self.reason}"
        return f"every {'step' if self.steps == 1 else f'{self.steps} steps'}: {self.reason}"


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval in seconds for a stall per checkpoint and a mean time between failures."""
    return math.sqrt(2 * stall_s * mtbf_s)


def choose_interval(aim: AutoInterval, facts: TrainingPace, present: ChosenInterval | None = None) -> ChosenInterval:
    """Return the interval for these measurements, or ``present`` if it is close enough."""
    failure_s = aim.mtbf.total_seconds()
    bounds = {
        f"Young's interval for {span(facts.stall_s)} of stall and a failure every {span(failure_s)}": (
            young_s(facts.stall_s, failure_s)
        ),
        "the store takes so long until one is durable": facts.durable_s,
        f"{span(facts.stall_s)} of stall may take {aim.overhead:.2g} of the time": facts.stall_s / aim.overhead,
    }
    reason, seconds = max(bounds.items(), key=lambda item: item[1])
    # Rounded up, because the bounds are minima. The floor of 1 µs avoids a division by zero.
    steps = max(math.ceil(seconds / max(facts.step_s, 1e-6) - 1e-9), 1)
    if present is not None and present.steps and present.steps / _STAY <= steps <= present.steps * _STAY:
        return present
    whole = f"{span(seconds)} at {span(facts.step_s)} a step, for {reason}"
    return ChosenInterval(steps, whole)


def span(seconds: float) -> str:
    """Format a time, for instance ``1.5 ms`` or ``3 h``."""
    if seconds < _WHOLE_SECOND:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    return f"{seconds / _MINUTE:.3g} min" if seconds < _HOUR else f"{seconds / _HOUR:.3g} h"
