"""Checkpoint interval in a training loop: a fixed number of steps, or chosen from measured costs."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from asymcheck.capture.background_saver import Statistics
from asymcheck.errors import InvalidInputError
from asymcheck.policies.interval import AutoInterval, ChosenInterval, TrainingPace, choose_interval, slowest

Broadcast = Callable[[int, Callable[[], object]], Any]
"""Run a function on rank 0 at a step and return its result on all ranks; a late rank gets that of an earlier step."""

_MEASURED = 3
"""Checkpoints made early in order to measure. The first creates the ring and fills caches; the median ignores it."""
_STEPS_BETWEEN = 2
"""Minimum steps between two of these, so that the fence of one has passed before the next begins."""
_STEPS_KEPT = 63
_CAPTURES_KEPT = 16


class FixedInterval:
    """A fixed number of steps between checkpoints."""

    def __init__(self, every: int) -> None:
        self._before: int | None = None
        self.chosen = ChosenInterval(every, "set by the user")
        """The interval and the reason for it."""

    def is_due(self, step: int, _now_s: float, _so_far: Statistics) -> bool:
        """Return whether a checkpoint is due."""
        before, self._before = self._before, step
        # Steps may skip numbers, for instance if several optimizers count them: a multiple in between counts, too.
        every = self.chosen.steps
        return step % every == 0 or (before is not None and step // every > before // every)

    def facts(self, _so_far: Statistics) -> None:
        """Return None: nothing is measured."""

    def began(self, step: int) -> None:
        """Do nothing: due steps are known in advance."""

    def restart(self, step: int) -> None:
        """Continue from ``step``."""
        self._before = step


class IntervalController:
    """An interval chosen from measured costs. For the training thread.

    With several ranks, rank 0 decides for all at steps that it announced before. At each it also announces the next
    one. All ranks measure, and send their measurements to rank 0 with their commits, so that no rank waits for them.
    """

    def __init__(self, aim: AutoInterval, broadcast: Broadcast | None = None) -> None:
        self._aim = aim
        self._announced = None if broadcast is None else AnnouncedSteps(broadcast)
        self._step_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._stalls_s: deque[float] = deque(maxlen=_CAPTURES_KEPT)
        self._begun = 0
        self._stalled_before = 0.0
        self._last: tuple[int, float, float] | None = None
        self._captured: int | None = None
        self._since = 0
        self.chosen = ChosenInterval(0, "no checkpoint measured yet")
        """The interval and the reason for it."""

    def is_due(self, step: int, now_s: float, so_far: Statistics) -> bool:
        """Return whether a checkpoint is due after ``step``, which ends at ``now_s`` [s] of a monotonic clock.

        Raises:
            RanksMissingError: rank 0 does not decide in time.
            RankFailedError: rank 0 is at another step.
        """
        self._measure(step, now_s, so_far.step_s + so_far.fence_s + so_far.hooks_s)
        if self._announced is None:
            return self._decide(step, so_far)
        decision = self._announced.decide(step, partial(self._announce, step, so_far))
        if decision is None:
            return False
        self.chosen = ChosenInterval(decision["steps"], decision["reason"])
        return decision["step"] == step and bool(decision["is_due"])

    def _announce(self, step: int, so_far: Statistics) -> object:
        """Decide on rank 0, and announce the next decision."""
        is_due = self._decide(step, so_far)
        if self.chosen.steps:
            captured = self._captured if self._captured is not None and not is_due else step
            upcoming = max(captured + self.chosen.steps, step + 1)
        else:
            # Nothing is measured yet: decide less and less often.
            upcoming = step + (_STEPS_BETWEEN if is_due else self._since)
        chosen = {"steps": self.chosen.steps, "reason": self.chosen.reason}
        return {"step": step, "is_due": is_due, "next": upcoming, **chosen}

    def _decide(self, step: int, so_far: Statistics) -> bool:
        if self._begun < _MEASURED:
            # Not after the first step, which compiles and allocates, and before a step time is known.
            settled = so_far.durable + so_far.lost >= so_far.captures
            return bool(self._step_s) and (not self._begun or (settled and self._since >= _STEPS_BETWEEN))
        # The medians take longer than the rest of a step that saves nothing.
        if self._is_reached(step) or self._since % _STEPS_KEPT == 0:
            self.chosen = choose_interval(self._aim, slowest([self.facts(so_far), *so_far.paces]), self.chosen)
        return self._is_reached(step)

    def _is_reached(self, step: int) -> bool:
        """Tell whether the chosen interval ends at a step."""
        return self._captured is None or step < self._captured or step - self._captured >= self.chosen.steps

    def _measure(self, step: int, now_s: float, stalled: float) -> None:
        self._since += 1
        if self._stalls_s:
            self._stalls_s[-1] = stalled - self._stalled_before
        if self._last is not None and step > self._last[0]:
            last_step, last_s, last_stalled = self._last
            self._step_s.append(max(now_s - last_s - (stalled - last_stalled), 0.0) / (step - last_step))
        self._last = (step, now_s, stalled)

    def facts(self, so_far: Statistics) -> TrainingPace:
        """Return the measurements of this process."""
        return TrainingPace(
            step_s=statistics.median(self._step_s) if self._step_s else 0.0,
            stall_s=statistics.median(self._stalls_s) if self._stalls_s else 0.0,
            durable_s=statistics.median(so_far.durable_s[-_CAPTURES_KEPT:] or [0.0]),
        )

    def began(self, step: int) -> None:
        """Record that a checkpoint of this step was begun."""
        self._begun += 1
        self._since = 0
        self._captured = step
        self._stalled_before = self._last[2] if self._last is not None else 0.0
        self._stalls_s.append(0.0)
        if self._begun < _MEASURED:
            self.chosen = ChosenInterval(0, f"{self._begun} of {_MEASURED} checkpoints measured")

    def restart(self, step: int) -> None:
        """Continue from ``step``: keep the measurements, except the time of this iteration."""
        self._last = None
        self._captured = step


class AnnouncedSteps:
    """Decisions of rank 0 at steps that it has announced before, so that no rank waits at the steps between them."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._before: int | None = None
        self._next = 0

    def decide(self, step: int, choose: Callable[[], object]) -> Any:  # noqa: ANN401 - JSON
        """Return the decision of ``choose`` on rank 0 if one is due, else None. A late rank may get an older ``step``.

        The decision has its own ``step`` and the ``next`` one.

        Raises:
            RanksMissingError: rank 0 does not decide in time.
            RankFailedError: rank 0 is at another step.
        """
        decision = None
        before, self._before = self._before, step
        while before is None or not before < step < self._next:
            decision = self._broadcast(step, choose)
            self._next, before = decision["next"], decision["step"]
            if before == step:
                break
        return decision


def interval_controller(every: object, broadcast: Broadcast | None = None) -> IntervalController | FixedInterval:
    """Return the controller for ``every``; with ``broadcast``, one for several ranks."""
    if every == "auto" or isinstance(every, AutoInterval):
        return IntervalController(every if isinstance(every, AutoInterval) else AutoInterval(), broadcast)
    if type(every) is not int or every < 1:
        raise InvalidInputError(
            f"every={every!r:.100}: give the number of steps between two checkpoints, 1 or more, or 'auto'"
        )
    return FixedInterval(every)
