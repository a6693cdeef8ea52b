"""Timing: which plan a state is captured by, and when its windows begin.

The first steps are captured by the canonical plan while the windows between module boundaries are measured. Then one
plan is made of them and kept: a new one would give all deferred bytes new digests. A resumed run goes on with the plan
of its newest checkpoint. What adapts from step to step is *when* partitions are released, not how they are cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import nn

from asymcheck.config import CaptureConfig, StoreConfig
from asymcheck.partition.plan import PLAN_KIND
from asymcheck.partition.profile import Iteration, Phase, Profile, profile_of
from asymcheck.partition.schedule import EAGER, Layout, Plan, make_plan, plan_from_record
from asymcheck.pipeline.boundaries import Boundaries

_PROFILED = 5
"""Iterations that are measured before a plan is made; the first ones allocate, compile and fill caches."""
_CALM = 16
"""After so many fences without a wait, partitions are released a window later again."""
_WAIT_SHARE = 0.002
"""A fence that takes less than this part of the iteration is none to speak of."""


class Timing:
    """Plans, and the clock of the iteration. For the training thread, but for :meth:`_mark`."""

    def __init__(
        self, capture: CaptureConfig, store: StoreConfig, previous: object, enter_window: Callable[[int], None]
    ) -> None:
        """Begin without a profile.

        Args:
            capture: which schedule.
            store: the sizes to aim at.
            previous: the plan record of the run's newest checkpoint, or None.
            enter_window: called when window number n begins, on the thread on which its boundary was met.
        """
        self._kind = capture.schedule
        self._config = store
        self._previous = previous
        self._enter_window = enter_window
        self._layout: Layout | None = None
        self._plan: Plan | None = None
        self._iterations: list[Iteration] = []
        self._marks: list[tuple[Phase, float]] = []
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

    def plan(self, layout: Layout) -> Plan:
        """Return the plan for a state; the same object as long as the state keeps its layout."""
        if self._plan is None:
            self._plan = self._taken_up(layout) or self._made(layout, 0, None)
        elif self._plan.kind == PLAN_KIND and len(self._iterations) >= _PROFILED:
            # The speed of the link is the same for all windows, so it does not matter for their shares.
            profile = profile_of(self._iterations, 1e9)
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

    def _made(self, layout: Layout, number: int, profile: Profile | None) -> Plan:
        kind = self._kind if profile is not None else self._kind_before_profile
        return make_plan(layout, self._config, kind, number, profile)

    @property
    def _kind_before_profile(self) -> str:
        return EAGER if self._kind == EAGER else PLAN_KIND

    def began(self) -> None:
        """Say that a capture has begun: window 0 begins."""
        self._marks = []
        self._began = time.perf_counter()
        if self._lead:
            self._enter_window(self._lead)

    def _mark(self, phase: Phase) -> None:
        if self._began is None:
            return
        began = time.perf_counter()
        self._marks.append((phase, began))
        # The first boundary belongs to window 0, which began when step() returned.
        if len(self._marks) > 1:
            self._enter_window(len(self._marks) - 1 + self._lead)
        self.hooks_s += time.perf_counter() - began

    def fenced(self, at_s: float, waited_s: float) -> None:
        """Say that the fence was met at a time of ``time.perf_counter()``, and how long it held the training."""
        if self._began is None:
            return
        if len(self._iterations) < _PROFILED:
            self._iterations.append(Iteration(self._began, tuple(self._marks), at_s))
        if waited_s > _WAIT_SHARE * (at_s - self._began):
            self._lead, self._calm = min(self._lead + 1, len(self._marks)), 0
        else:
            self._calm += 1
            if self._calm >= _CALM:
                self._lead, self._calm = max(self._lead - 1, 0), 0
        self._began = None
