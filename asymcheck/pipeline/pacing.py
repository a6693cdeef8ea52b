"""Pacing: at which steps a checkpoint is begun, when the interval is to follow from what is measured."""

from __future__ import annotations

import statistics
from collections import deque

from asymcheck.errors import InvalidInputError
from asymcheck.pipeline.background import Statistics
from asymcheck.policies.interval import AutoInterval, ChosenInterval, Pace, choose

_MEASURED = 3
"""Checkpoints that are made early, to measure. The first makes the ring and fills caches: no matter to a median."""
_STEPS_BETWEEN = 2
"""Steps between two of these, at least: the fence of one has to be behind when the next begins."""
_STEPS_KEPT = 63
_CAPTURES_KEPT = 16


class Pacer:
    """Says at each step whether a checkpoint is due. For the training thread."""

    def __init__(self, aim: AutoInterval) -> None:
        """Begin with nothing measured."""
        self._aim = aim
        self._step_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._stalls_s: deque[float] = deque(maxlen=_CAPTURES_KEPT)
        self._begun = 0
        self._stalled_before = 0.0
        self._last: tuple[int, float, float] | None = None
        self._captured: int | None = None
        self._since = 0
        self.chosen = ChosenInterval(0, "no checkpoint was measured yet")
        """How often, and why."""

    def is_due(self, step: int, now_s: float, so_far: Statistics) -> bool:
        """Tell whether a checkpoint is to be begun, as step ``step`` ends at ``now_s`` of a steady clock."""
        stalled = so_far.step_s + so_far.fence_s + so_far.hooks_s
        self._measure(step, now_s, stalled)
        self._since += 1
        if self._begun < _MEASURED:
            # Not at the very first step, which compiles and allocates, and after which no time of a step is known.
            settled = so_far.durable + so_far.lost >= so_far.captures
            return bool(self._step_s) and (not self._begun or (settled and self._since >= _STEPS_BETWEEN))
        self.chosen = choose(self._aim, self._facts(so_far), self.chosen)
        return self._captured is None or step < self._captured or step - self._captured >= self.chosen.steps

    def _measure(self, step: int, now_s: float, stalled: float) -> None:
        if self._stalls_s:
            self._stalls_s[-1] = stalled - self._stalled_before
        if self._last is not None and step > self._last[0]:
            last_step, last_s, last_stalled = self._last
            self._step_s.append(max(now_s - last_s - (stalled - last_stalled), 0.0) / (step - last_step))
        self._last = (step, now_s, stalled)

    def _facts(self, so_far: Statistics) -> Pace:
        each = so_far.captured_bytes / max(so_far.captures, 1)
        return Pace(
            step_s=statistics.median(self._step_s) if self._step_s else 0.0,
            stall_s=statistics.median(self._stalls_s) if self._stalls_s else 0.0,
            durable_s=statistics.median(so_far.durable_s[-_CAPTURES_KEPT:] or [0.0]),
            in_flight=max(int(so_far.ring_bytes // each), 1) if each else 1,
        )

    def began(self, step: int) -> None:
        """Say that a checkpoint of this step was begun."""
        self._begun += 1
        self._since = 0
        self._captured = step
        self._stalled_before = self._last[2] if self._last is not None else 0.0
        self._stalls_s.append(0.0)
        if self._begun < _MEASURED:
            self.chosen = ChosenInterval(0, f"{self._begun} of {_MEASURED} checkpoints were measured")

    def restart(self, step: int) -> None:
        """Say that training goes on from ``step``: what was measured holds, but not the time of this iteration."""
        self._last = None
        self._captured = step


def pacer_of(every: object) -> Pacer | None:
    """Return what decides when a checkpoint is due; None where that is every so many steps.

    Raises:
        InvalidInputError: it is neither a number of steps nor an aim.
    """
    if every == "auto" or isinstance(every, AutoInterval):
        return Pacer(every if isinstance(every, AutoInterval) else AutoInterval())
    if type(every) is not int or every < 1:
        raise InvalidInputError(
            f"every={every!r:.100}: give the number of steps between two checkpoints, 1 or more, or 'auto'"
        )
    return None
