"""Timing: which plan a state is captured by, and when its windows begin.

The first steps are captured by the canonical plan while the windows between module boundaries are measured. Then one
plan is made of them and kept: a new one would give all deferred bytes new digests. A resumed run goes on with the plan
of its newest checkpoint. What adapts from step to step is *when* partitions are released, not how they are cut.

Where modules are not seen, because all of them are compiled or there are none, windows are equal parts of the time from
``step()`` to the fence, and a timer says when they begin.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import nn

from asymcheck.config import CaptureConfig, StoreConfig
from asymcheck.partition.plan import EAGER, PLAN_KIND, Layout, Plan, make_plan, plan_from_record
from asymcheck.partition.profile import MARKS_MIN, Iteration, Phase, Windows, profile_of, timed_profile
from asymcheck.pipeline.boundaries import Boundaries
from asymcheck.pipeline.timer import Timer
from asymcheck.tiers.gpu_staging import Link, Mark

_PROFILED = 5
"""Iterations that are measured before a plan is made; the first ones allocate, compile and fill caches."""
_CALM = 16
"""After so many fences without a wait, partitions are released a window later again."""
_WAIT_SHARE = 0.002
"""A fence that takes less than this part of the iteration is none to speak of."""


class Timing:
    """Plans, and the clock of the iteration. For the training thread, but for :meth:`_mark`."""

    def __init__(
        self,
        capture: CaptureConfig,
        store: StoreConfig,
        previous: object,
        enter_window: Callable[[int], None],
        timer: Timer,
    ) -> None:
        """Begin without a profile.

        Args:
            capture: which schedule.
            store: the sizes to aim at.
            previous: the plan record of the run's newest checkpoint, or None.
            enter_window: called when window number n begins, on the thread on which its boundary was met.
            timer: says the same of windows that no boundary begins; it stays the caller's, who stops it.
        """
        self._kind = capture.schedule
        self._config = store
        self._previous = previous
        self._enter_window = enter_window
        self._timer = timer
        self._lately: deque[tuple[float, int]] = deque(maxlen=_PROFILED)
        self._timed: list[tuple[Phase, float]] = []
        self._layout: Layout | None = None
        self._plan: Plan | None = None
        self._iterations: list[Iteration] = []
        self._marks: list[tuple[Phase, float]] = []
        self._link: Link | None = None
        self._points: list[Mark] = []
        self._unread: list[tuple[tuple[Phase, ...], list[Mark]]] = []
        self._began: float | None = None
        self._boundaries: Boundaries | None = None
        self.hooks_s = 0.0
        """Seconds inside the hooks of modules."""
        self._lead = 0
        self._calm = 0

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Look at the boundaries of ``modules`` from now on, and no more at others."""
        self.stop()
        self._boundaries = Boundaries(modules, self._mark) if modules else None

    def stop(self) -> None:
        """Look at no boundaries any more."""
        if self._boundaries is not None:
            self._boundaries.remove()
            self._boundaries = None

    def plan(self, layout: Layout, led: object = None) -> Plan:
        """Return the plan for a state; the same object as long as the state keeps its layout.

        ``led`` is the record of another rank's plan, to cut by: replicas that are cut in two ways have no partition in
        common.
        """
        if led is not None:
            if self._plan is None or self._layout != layout or self._plan.record() != led:
                self._plan = plan_from_record(led, layout, self._config) or self._made(layout, 0, None)
            self._layout = layout
            return self._plan
        if self._plan is None:
            self._plan = self._taken_up(layout) or self._made(layout, 0, None)
        elif self._plan.kind == PLAN_KIND and len(self._iterations) >= _PROFILED:
            self._read_device_times()
            profile = timed_profile(self._iterations) or profile_of(self._iterations)
            self._iterations.clear()
            if profile is not None:
                self._plan = self._made(layout, self._plan.number + 1, profile)
        if self._layout not in (None, layout):
            again = plan_from_record(self._plan.record(), layout, self._config)
            self._plan = again or self._made(layout, self._plan.number, None)
        self._layout = layout
        return self._plan

    def _taken_up(self, layout: Layout) -> Plan | None:
        """Return the plan of the checkpoint before, if it is of the schedule that is asked for, or none yet."""
        plan = plan_from_record(self._previous, layout, self._config)
        return plan if plan is not None and plan.kind in (self._kind, self._kind_before_profile) else None

    def _made(self, layout: Layout, number: int, profile: Windows | None) -> Plan:
        kind = self._kind if profile is not None else self._kind_before_profile
        return make_plan(layout, self._config, kind, number, profile)

    @property
    def _kind_before_profile(self) -> str:
        return EAGER if self._kind == EAGER else PLAN_KIND

    def began(self, link: Link | None = None) -> None:
        """Say that a capture has begun: window 0 begins. What a device computes is timed by marks on its ``link``."""
        self._link = link if len(self._iterations) < _PROFILED else None
        self._points = [] if self._link is None else [self._link.mark()]
        self._marks = []
        self._began = time.perf_counter()
        self._time_windows(self._began)
        if self._lead:
            self._enter_window(self._lead)

    def _time_windows(self, began: float) -> None:
        """Where boundaries are not seen: have the timer say when windows begin, as the last iterations went."""
        self._timed = []
        is_blind = self._lately and all(marks < MARKS_MIN for _, marks in self._lately)
        if not is_blind or self._plan is None or not self._plan.windows:
            return
        windows = self._plan.windows
        length = statistics.median(seconds for seconds, _ in self._lately) / len(windows)
        self._timed = [(phase, began + number * length) for number, (phase, _) in enumerate(windows)]
        self._timer.begin([(number + self._lead, at_s) for number, (_, at_s) in enumerate(self._timed) if number])

    def _mark(self, phase: Phase) -> None:
        if self._began is None:
            return
        began = time.perf_counter()
        self._marks.append((phase, began))
        if self._link is not None and not self._link.is_recorded():
            self._points.append(self._link.mark())
        # The first boundary belongs to window 0, which began when step() returned.
        if len(self._marks) > 1 and not self._timed:
            self._enter_window(len(self._marks) - 1 + self._lead)
        self.hooks_s += time.perf_counter() - began

    def fenced(self, at_s: float, waited_s: float) -> Iteration | None:
        """Say that the fence was met at a time of ``time.perf_counter()``, and how long it held the training.

        Returns what was seen of the iteration; None when the fence is not the first one after a capture began.
        """
        if self._began is None:
            return None
        self._timer.cancel()
        iteration = Iteration(self._began, tuple(self._marks), at_s)
        self._lately.append((at_s - self._began, len(self._marks)))
        windows = self._timed or self._marks
        # Of an iteration of which a part was recorded as a graph not all is known.
        is_known = self._link is None or len(self._points) == len(self._marks) + 1
        if len(self._iterations) < _PROFILED and is_known:
            self._iterations.append(iteration)
            if self._link is not None:
                phases = tuple(phase for phase, _ in self._marks)
                self._unread.append((phases, [*self._points, self._link.mark()]))
        if waited_s > _WAIT_SHARE * (at_s - self._began):
            self._lead, self._calm = min(self._lead + 1, len(windows)), 0
        else:
            self._calm += 1
            if self._calm >= _CALM:
                self._lead, self._calm = max(self._lead - 1, 0), 0
        self._began = None
        return dataclasses.replace(iteration, marks=tuple(windows))

    def _read_device_times(self) -> None:
        """Replace the times at which the program got to the boundaries by those at which the device did."""
        if not self._unread:
            return
        found = []
        for phases, points in self._unread:
            points[-1].wait()
            first, *seconds = (point.seconds_after(points[0]) for point in points)
            found.append(Iteration(first, tuple(zip(phases, seconds[:-1], strict=True)), seconds[-1]))
        self._unread.clear()
        self._iterations = found
