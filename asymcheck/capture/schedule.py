"""Capture schedule: the partition plan of a state, and the start times of its windows.

The immediate schedule has a plan with one window, which begins when ``step()`` returns, and observes no modules. With
others, the first captures use the canonical plan, while the windows between module boundaries are measured. Then one
plan is computed and kept, because another plan would change the digests of all deferred bytes. A resumed run continues
with the plan of its newest checkpoint. Release *times* of partitions adapt from step to step; partition boundaries do
not.

Hooks report module boundaries, at which windows begin. The hooks never replace outputs of a block. Therefore the
backward pass is observed through hooks on graph nodes, not through ``register_full_backward_pre_hook``, which passes
inputs and outputs of the module through another function. In-place operations on the results, such as the next ReLU,
would raise.

Without visible modules, because all are compiled or none exist, the canonical plan stays. It releases everything when
``step()`` returns.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from asymcheck.capture.optimizer_fence import in_backward
from asymcheck.config import CaptureConfig, StoreConfig
from asymcheck.state.partition_plan import (
    ASYMMETRIC,
    PLAN_KIND,
    SYMMETRIC,
    Phase,
    Plan,
    PlanInput,
    Windows,
    make_plan,
    plan_from_record,
)
from asymcheck.storage.gpu_staging import Link, Mark

_OnBoundary = Callable[[Phase], None]

IMMEDIATE = "immediate"
"""Kind of schedule; its plan is asymmetric, with one window."""
_ONE_WINDOW: Windows = (("forward", 1.0),)
_PROFILED = 5
"""Number of iterations to measure before a plan is computed. The first ones allocate, compile and fill caches."""
_CALM = 16
"""Number of fences without a wait, after which partitions are released one window later."""
_AGREEING_MIN = 3  # minimum for a median, because the first iterations often compile, allocate or fill caches
_WAIT_SHARE = 0.002
"""Fraction of an iteration below which a fence counts as no wait."""


class CaptureSchedule:
    """Chooses plans, and measures iterations. For the training thread, except :meth:`_mark`."""

    def __init__(
        self, capture: CaptureConfig, store: StoreConfig, previous: object, enter_window: Callable[[int], None]
    ) -> None:
        """Start without a profile.

        ``previous`` is the plan record of the run's newest checkpoint, or None. ``enter_window`` is called at the start
        of a window, on the thread that reached its boundary.
        """
        self._kind = capture.schedule
        self._config = store
        self._previous = previous
        self._enter_window = enter_window
        self._layout: PlanInput | None = None
        self._plan: Plan | None = None
        self._measured: list[tuple[Iteration, list[Mark]]] = []
        self._marks: list[tuple[Phase, float]] = []
        self._link: Link | None = None
        self._points: list[Mark] = []
        self._began: float | None = None
        self._boundaries: ModuleHooks | None = None
        self.hooks_s = 0.0
        """Seconds inside module hooks."""
        self._lead = 0
        self._calm = 0

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Observe the boundaries of ``modules`` instead of earlier ones."""
        self.stop()
        self._boundaries = ModuleHooks(modules, self._mark) if modules and self._kind != IMMEDIATE else None

    def stop(self) -> None:
        """Stop observing boundaries."""
        if self._boundaries is not None:
            self._boundaries.remove()
            self._boundaries = None

    def plan(self, layout: PlanInput, leading: object = None) -> Plan:
        """Return the plan for a state, which is the same object while the layout of the state stays the same.

        ``leading`` is the plan record of rank 0. Replicas with different boundaries would have no common partitions.
        """
        if leading is not None:
            if self._plan is None or self._layout != layout or self._plan.record() != leading:
                self._plan = plan_from_record(leading, layout, self._config) or self._made(layout, 0, None)
            self._layout = layout
            return self._plan
        if self._plan is None:
            self._plan = self._previous_plan(layout) or self._made(layout, 0, None)
        elif self._plan.kind == PLAN_KIND and len(self._measured) >= _PROFILED:
            profile = profile_of([_on_device(*measured) for measured in self._measured])
            self._measured.clear()
            if profile is not None:
                self._plan = self._made(layout, self._plan.number + 1, profile)
        if self._layout not in (None, layout):
            again = plan_from_record(self._plan.record(), layout, self._config)
            self._plan = again or self._made(layout, self._plan.number, None)
        self._layout = layout
        return self._plan

    def _previous_plan(self, layout: PlanInput) -> Plan | None:
        """Return the plan of the previous checkpoint if it fits the configured schedule."""
        plan = plan_from_record(self._previous, layout, self._config)
        if plan is None:
            return None
        kind = IMMEDIATE if plan.kind == ASYMMETRIC and len(plan.windows) == len(_ONE_WINDOW) else plan.kind
        return plan if kind in (self._kind, self._kind_before_profile) else None

    def _made(self, layout: PlanInput, number: int, profile: Windows | None) -> Plan:
        kind = self._kind if profile is not None else self._kind_before_profile
        if kind == IMMEDIATE:
            kind, profile = ASYMMETRIC, _ONE_WINDOW
        return make_plan(layout, self._config, kind, number, profile)

    @property
    def _kind_before_profile(self) -> str:
        return PLAN_KIND if self._kind in (ASYMMETRIC, SYMMETRIC) else self._kind

    def began(self, link: Link | None = None) -> None:
        """Note the start of a capture and its window 0. Device operations are measured by marks on ``link``."""
        self._link = link if len(self._measured) < _PROFILED else None
        self._points = [] if self._link is None else [self._link.mark()]
        self._marks = []
        self._began = time.perf_counter()
        if self._lead:
            self._enter_window(self._lead)

    def _mark(self, phase: Phase) -> None:
        if self._began is None:
            return
        began = time.perf_counter()
        self._marks.append((phase, began))
        if self._link is not None and not self._link.is_recorded():
            self._points.append(self._link.mark())
        # The first boundary is inside window 0, which began when step() returned.
        if len(self._marks) > 1:
            self._enter_window(len(self._marks) - 1 + self._lead)
        self.hooks_s += time.perf_counter() - began

    def fenced(self, at_s: float, waited_s: float) -> Iteration | None:
        """Note the time of a fence, by ``time.perf_counter()``, and the seconds that training waited there.

        Returns the observed iteration; None if this is not the first fence after the start of a capture.
        """
        if self._began is None:
            return None
        iteration = Iteration(self._began, tuple(self._marks), at_s)
        # Device times of an iteration are incomplete if a part was recorded as a graph.
        has_all = len(self._points) == len(self._marks) + 1
        is_known = self._link is None or (has_all and not self._link.is_recorded())
        if len(self._measured) < _PROFILED and is_known:
            self._measured.append((iteration, [] if self._link is None else [*self._points, self._link.mark()]))
        if waited_s > _WAIT_SHARE * (at_s - self._began):
            self._lead, self._calm = min(self._lead + 1, len(self._marks)), 0
        else:
            self._calm += 1
            if self._calm >= _CALM:
                self._lead, self._calm = max(self._lead - 1, 0), 0
        self._began = None
        return iteration


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Measured times of one iteration, in seconds of one clock.

    Marks at module boundaries divide the time from the end of ``step()`` to the fence into windows. Window i begins at
    mark i, except that window 0 begins when ``step()`` returns.
    """

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
        None if fewer than ``_AGREEING_MIN`` iterations agree.
    """
    usable = [
        iteration
        for iteration in iterations
        if iteration.marks and all(0 <= length < math.inf for length in iteration.seconds)
    ]
    # In reverse, because most_common() keeps the order of equally frequent elements.
    frequent = collections.Counter(iteration.phases for iteration in reversed(usable)).most_common(1)
    if not frequent or frequent[0][1] < _AGREEING_MIN:
        return None
    phases = frequent[0][0]
    lengths = zip(*(iteration.seconds for iteration in usable if iteration.phases == phases), strict=True)
    return tuple(zip(phases, map(statistics.median, lengths), strict=True))


def _on_device(iteration: Iteration, points: Sequence[Mark]) -> Iteration:
    """Replace the program's times of boundaries by the times of the device, if it has reached ``points`` for them."""
    if not points:
        return iteration
    points[-1].wait()
    begin, *seconds, fence = (point.seconds_after(points[0]) for point in points)
    return Iteration(begin, tuple(zip(iteration.phases, seconds, strict=True)), fence)


class ModuleHooks:
    """Calls ``mark`` at the start of each block's forward and when backward reaches each block, until removed.

    Blocks are the elements of the longest ``ModuleList`` or ``Sequential`` of at least two, else the direct children,
    else the module itself. A forward without gradients gives no marks, and neither does one that recomputes activations
    inside backward. A block whose output needs no gradient gives no backward mark, and one in TorchScript, which takes
    no hooks, gives none at all. Inside a region of ``torch.compile`` there are no boundaries: hook such a module as a
    whole.

    On CUDA, autograd calls ``mark`` from its own threads. An exception in ``mark`` ends the training.
    """

    def __init__(self, modules: Sequence[nn.Module], mark: _OnBoundary) -> None:
        """Register the hooks. Each block has two, which take one or two microseconds each."""
        self._mark: _OnBoundary | None = mark
        self._handles: list[RemovableHandle] = []
        blocks = {id(block): block for module in modules for block in blocks_of(module)}
        try:
            for block in blocks.values():
                if not isinstance(block, torch.jit.ScriptModule):
                    self._handles.append(block.register_forward_pre_hook(self._enter))
                    self._handles.append(block.register_forward_hook(self._leave))
        except BaseException:
            self.remove()
            raise

    def __reduce__(self) -> tuple[type[types.SimpleNamespace], tuple[()], dict[str, object]]:
        # A pickled or copied model must load without this package, so its hooks become a function that does nothing.
        nothing = contextlib.nullcontext().__exit__
        return types.SimpleNamespace, (), {"_mark": None, "_enter": nothing, "_leave": nothing}

    def remove(self) -> None:
        """Remove the hooks, and ignore hooks of graphs that still exist. May be called again."""
        self._mark = None
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, _block: nn.Module, _args: object) -> None:
        # The compiler treats the first condition as a constant and omits the hook. A call would break the graph.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_backward():
            return
        if self._mark is not None:
            self._mark("forward")

    def _leave(self, _block: nn.Module, _args: object, output: object) -> None:
        # This includes backward, because reentrant checkpointing only has the graph of the recomputed forward.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        is_reached = False

        def reach(_gradients: object) -> None:
            # Only the first of the outputs that receives its gradient.
            nonlocal is_reached
            if not is_reached and self._mark is not None:
                is_reached = True
                self._mark("backward")

        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reach)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose starts are boundaries; at least one."""
    if _is_compiled(module):
        return [module]
    longest = max(_lists(module), key=len, default=None)
    blocks = list(module.children() if longest is None else longest)
    return blocks or [module]


def _lists(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    """Yield the lists of at least two modules, outermost first."""
    if _is_compiled(module):
        return
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
        yield module
        if isinstance(module, nn.ModuleList):
            # The elements are layers. Lists inside a layer, such as experts of a mixture, are parts of the layer.
            return
    for child in module.children():
        yield from _lists(child)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of ``torch.compile(module)``, whose class has no public name."""
    return hasattr(module, "_orig_mod")


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a block's output. Deeper values, such as a cache, are no input of the next block."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, torch.Tensor):
            yield value
