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

Without visible modules, because all are compiled or none exist, windows are equal parts of the time from ``step()`` to
the fence, and a timer starts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from asymcheck.config import CaptureConfig, StoreConfig
from asymcheck.executor import begin
from asymcheck.state.iteration_profile import MARKS_MIN, Iteration, Phase, Windows, profile_of, timed_profile
from asymcheck.state.partition_plan import ASYMMETRIC, EAGER, PLAN_KIND, Plan, PlanInput, make_plan, plan_from_record
from asymcheck.storage.gpu_staging import Link, Mark

_OnBoundary = Callable[[Phase], None]

IMMEDIATE = "immediate"
_ONE_WINDOW: Windows = (("forward", 1.0),)
_PROFILED = 5
"""Number of iterations to measure before a plan is computed. The first ones allocate, compile and fill caches."""
_CALM = 16
"""Number of fences without a wait, after which partitions are released one window later."""
_WAIT_SHARE = 0.002
"""Fraction of an iteration below which a fence counts as no wait."""


class WindowTimer:
    """Calls ``reached`` with a number at a given time, on a thread that the first use starts."""

    def __init__(self, reached: Callable[[int], None]) -> None:
        """Call ``reached``, which must be short and must not raise."""
        self._reached = reached
        self._changed = threading.Condition()
        self._pending: deque[tuple[int, float]] = deque()
        self._stopping = False
        self._thread: Future[None] | None = None

    def begin(self, times: Sequence[tuple[int, float]]) -> None:
        """Replace all pending calls by these numbers and ascending times of ``time.perf_counter()``."""
        with self._changed:
            self._pending = deque(times)
            self._changed.notify_all()
        if self._thread is None and times:
            self._thread = begin(self._run, "timer")

    def cancel(self) -> None:
        """Cancel pending calls. A running call may end later."""
        with self._changed:
            self._pending.clear()

    def due(self, now_s: float) -> tuple[int | None, float | None]:
        """Remove due calls; return the greatest due number and the seconds until the next call, or None."""
        number = None
        while self._pending and self._pending[0][1] <= now_s:
            number = self._pending.popleft()[0]
        return number, self._pending[0][1] - now_s if self._pending else None

    def _run(self) -> None:
        while True:
            with self._changed:
                number, remaining_s = self.due(time.perf_counter())
                if number is None:
                    if self._stopping:
                        return
                    self._changed.wait(remaining_s)
                    continue
            # Outside the lock, because the callee may call cancel() under its own lock.
            self._reached(number)

    def stop(self) -> None:
        """End the thread, and raise the error of a call that ended the thread early. May be called again."""
        with self._changed:
            self._stopping = True
            self._pending.clear()
            self._changed.notify_all()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.result()


class CaptureSchedule:
    """Chooses plans, and measures iterations. For the training thread, except :meth:`_mark`."""

    def __init__(
        self,
        capture: CaptureConfig,
        store: StoreConfig,
        previous: object,
        enter_window: Callable[[int], None],
        timer: WindowTimer,
    ) -> None:
        """Start without a profile.

        Args:
            capture: configuration with the kind of schedule.
            store: configuration with the sizes of partitions.
            previous: plan record of the run's newest checkpoint, or None.
            enter_window: callback at the start of a window, on the thread that reached its boundary.
            timer: timer for windows without a boundary. The caller stops the timer.
        """
        self._kind = capture.schedule
        self._config = store
        self._previous = previous
        self._enter_window = enter_window
        self._timer = timer
        self._recent: deque[tuple[float, int]] = deque(maxlen=_PROFILED)
        self._timed: list[tuple[Phase, float]] = []
        self._layout: PlanInput | None = None
        self._plan: Plan | None = None
        self._iterations: list[Iteration] = []
        self._marks: list[tuple[Phase, float]] = []
        self._link: Link | None = None
        self._points: list[Mark] = []
        self._unread: list[tuple[tuple[Phase, ...], list[Mark]]] = []
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

    def _previous_plan(self, layout: PlanInput) -> Plan | None:
        """Return the plan of the previous checkpoint if it fits the configured schedule."""
        plan = plan_from_record(self._previous, layout, self._config)
        if plan is None:
            return None
        is_immediate = plan.kind == ASYMMETRIC and len(plan.windows) == len(_ONE_WINDOW)
        if self._kind == IMMEDIATE or is_immediate:
            return plan if self._kind == IMMEDIATE and is_immediate else None
        return plan if plan.kind in (self._kind, self._kind_before_profile) else None

    def _made(self, layout: PlanInput, number: int, profile: Windows | None) -> Plan:
        if self._kind == IMMEDIATE:
            return make_plan(layout, self._config, ASYMMETRIC, number, _ONE_WINDOW)
        kind = self._kind if profile is not None else self._kind_before_profile
        return make_plan(layout, self._config, kind, number, profile)

    @property
    def _kind_before_profile(self) -> str:
        return EAGER if self._kind == EAGER else PLAN_KIND

    def began(self, link: Link | None = None) -> None:
        """Note the start of a capture and its window 0. Device operations are measured by marks on ``link``."""
        self._link = link if len(self._iterations) < _PROFILED else None
        self._points = [] if self._link is None else [self._link.mark()]
        self._marks = []
        self._began = time.perf_counter()
        self._time_windows(self._began)
        if self._lead:
            self._enter_window(self._lead)

    def _time_windows(self, began: float) -> None:
        """Without visible boundaries, start windows by the timer, based on recent iterations."""
        self._timed = []
        is_blind = self._recent and all(marks < MARKS_MIN for _, marks in self._recent)
        if not is_blind or self._plan is None or not self._plan.windows:
            return
        windows = self._plan.windows
        length = statistics.median(seconds for seconds, _ in self._recent) / len(windows)
        self._timed = [(phase, began + number * length) for number, (phase, _) in enumerate(windows)]
        self._timer.begin([(number + self._lead, at_s) for number, (_, at_s) in enumerate(self._timed) if number])

    def _mark(self, phase: Phase) -> None:
        if self._began is None:
            return
        began = time.perf_counter()
        self._marks.append((phase, began))
        if self._link is not None and not self._link.is_recorded():
            self._points.append(self._link.mark())
        # The first boundary is inside window 0, which began when step() returned.
        if len(self._marks) > 1 and not self._timed:
            self._enter_window(len(self._marks) - 1 + self._lead)
        self.hooks_s += time.perf_counter() - began

    def fenced(self, at_s: float, waited_s: float) -> Iteration | None:
        """Note the time of a fence, by ``time.perf_counter()``, and the seconds that training waited there.

        Returns the observed iteration; None if this is not the first fence after the start of a capture.
        """
        if self._began is None:
            return None
        self._timer.cancel()
        iteration = Iteration(self._began, tuple(self._marks), at_s)
        self._recent.append((at_s - self._began, len(self._marks)))
        windows = self._timed or self._marks
        # Device times of an iteration are incomplete if a part was recorded as a graph.
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
        """Replace the program's times of boundaries by the device's times."""
        if not self._unread:
            return
        iterations = []
        for phases, points in self._unread:
            points[-1].wait()
            first, *seconds = (point.seconds_after(points[0]) for point in points)
            iterations.append(Iteration(first, tuple(zip(phases, seconds[:-1], strict=True)), seconds[-1]))
        self._unread.clear()
        self._iterations = iterations


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
        self._hooks = _Hooks(mark)
        self._handles: list[RemovableHandle] = []
        blocks = {id(block): block for module in modules for block in blocks_of(module)}
        try:
            for block in blocks.values():
                if not isinstance(block, torch.jit.ScriptModule):
                    self._handles.append(block.register_forward_pre_hook(self._hooks.enter))
                    self._handles.append(block.register_forward_hook(self._hooks.leave))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the hooks, and ignore hooks of graphs that still exist. May be called again."""
        self._hooks.mark = None
        while self._handles:
            self._handles.pop().remove()


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


class _Hooks:
    """Hooks of all blocks. They hold no tensors. Copies of hooks, as in a deep copy of the model, do nothing."""

    def __init__(self, mark: _OnBoundary | None) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[type[types.SimpleNamespace], tuple[()], dict[str, object]]:
        # A pickled model must load without this package, so its hooks become a function that does nothing.
        nothing = contextlib.nullcontext().__exit__
        return types.SimpleNamespace, (), {"mark": None, "enter": nothing, "leave": nothing}

    def enter(self, _block: nn.Module, _args: object) -> None:
        # The compiler treats the first condition as a constant and omits the hook. A call would break the graph.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _in_backward():
            return
        if self.mark is not None:
            self.mark("forward")

    def leave(self, _block: nn.Module, _args: object, output: object) -> None:
        # This includes backward, because reentrant checkpointing only has the graph of the recomputed forward.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        reached = _Reached(self)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)


class _Reached:
    """Mark a block when the first of its outputs receives its gradient."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks: _Hooks | None = hooks

    def __call__(self, _gradients: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None and hooks.mark is not None:
            hooks.mark("backward")


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a block's output. Deeper values, such as a cache, are no input of the next block."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, torch.Tensor):
            yield value


def _in_backward() -> bool:
    """Return whether this thread runs a backward pass. Checkpointing in torch uses the same private function."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - see above
