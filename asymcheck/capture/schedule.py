"""Timing: the plan by which a state is captured, and the times at which its windows begin.

The first steps are captured by the canonical plan while the windows between module boundaries are measured. Then one
plan is made of them and kept: a new one would give all deferred bytes new digests. A resumed run goes on with the plan
of its newest checkpoint. The release *times* of partitions adapt from step to step; the cut does not.

Windows begin at module boundaries, which hooks report. The hooks only look: the outputs of a block are the very tensors
they would be without. Therefore the backward pass is observed through hooks on nodes of the graph, not through
``register_full_backward_pre_hook``. That hook passes inputs and outputs of the module through a function of its own,
after which an in-place operation on them, such as the next ReLU, raises.

Where modules are not seen, because all of them are compiled or there are none, windows are equal parts of the time from
``step()`` to the fence, and a timer says when they begin.
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
from asymcheck.state.partition_plan import EAGER, PLAN_KIND, Plan, PlanInput, make_plan, plan_from_record
from asymcheck.storage.gpu_staging import Link, Mark

_OnBoundary = Callable[[Phase], None]

_PROFILED = 5
"""Iterations that are measured before a plan is made; the first ones allocate, compile and fill caches."""
_CALM = 16
"""After so many fences without a wait, partitions are released a window later again."""
_WAIT_SHARE = 0.002
"""A fence that takes less than this part of the iteration is none to speak of."""


class WindowTimer:
    """Calls ``reached`` with a number when its time has come, on a thread of its own that the first call starts."""

    def __init__(self, reached: Callable[[int], None]) -> None:
        """Call ``reached``, which must be short, and must not raise."""
        self._reached = reached
        self._changed = threading.Condition()
        self._ahead: deque[tuple[int, float]] = deque()
        self._stopping = False
        self._thread: Future[None] | None = None

    def begin(self, times: Sequence[tuple[int, float]]) -> None:
        """Forget what was asked for before; call at these times of ``time.perf_counter()``, given in order."""
        with self._changed:
            self._ahead = deque(times)
            self._changed.notify_all()
        if self._thread is None and times:
            self._thread = begin(self._run, "timer")

    def cancel(self) -> None:
        """Call no more; a call that is under way may still end after this."""
        with self._changed:
            self._ahead.clear()

    def due(self, now_s: float) -> tuple[int | None, float | None]:
        """Take what has come by a time: its greatest number, and how long it is until the next; None for neither."""
        number = None
        while self._ahead and self._ahead[0][1] <= now_s:
            number = self._ahead.popleft()[0]
        return number, self._ahead[0][1] - now_s if self._ahead else None

    def _run(self) -> None:
        while True:
            with self._changed:
                number, left_s = self.due(time.perf_counter())
                if number is None:
                    if self._stopping:
                        return
                    self._changed.wait(left_s)
                    continue
            # Outside the lock: who is called takes one of its own, under which it may cancel.
            self._reached(number)

    def stop(self) -> None:
        """End the thread, and raise what a call raised that ended the thread early. May be called again."""
        with self._changed:
            self._stopping = True
            self._ahead.clear()
            self._changed.notify_all()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.result()


class CaptureSchedule:
    """Plans, and the clock of the iteration. For the training thread, but for :meth:`_mark`."""

    def __init__(
        self,
        capture: CaptureConfig,
        store: StoreConfig,
        previous: object,
        enter_window: Callable[[int], None],
        timer: WindowTimer,
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
        """Seconds inside the hooks of modules."""
        self._lead = 0
        self._calm = 0

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Look at the boundaries of ``modules`` from now on, and no more at others."""
        self.stop()
        self._boundaries = ModuleHooks(modules, self._mark) if modules else None

    def stop(self) -> None:
        """Look at no boundaries any more."""
        if self._boundaries is not None:
            self._boundaries.remove()
            self._boundaries = None

    def plan(self, layout: PlanInput, led: object = None) -> Plan:
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

    def _taken_up(self, layout: PlanInput) -> Plan | None:
        """Return the plan of the checkpoint before, if it is of the schedule that is asked for, or none yet."""
        plan = plan_from_record(self._previous, layout, self._config)
        return plan if plan is not None and plan.kind in (self._kind, self._kind_before_profile) else None

    def _made(self, layout: PlanInput, number: int, profile: Windows | None) -> Plan:
        kind = self._kind if profile is not None else self._kind_before_profile
        return make_plan(layout, self._config, kind, number, profile)

    @property
    def _kind_before_profile(self) -> str:
        return EAGER if self._kind == EAGER else PLAN_KIND

    def began(self, link: Link | None = None) -> None:
        """Note that a capture and its window 0 begin. Computation on a device is timed by marks on its ``link``."""
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
        """Register the hooks: two for each block, a microsecond or two each."""
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
        """Remove the hooks; graphs that are still alive give no marks any more. May be called again."""
        self._hooks.mark = None
        while self._handles:
            self._handles.pop().remove()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose beginnings are boundaries; at least one."""
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
            # Its elements are layers; lists inside a layer are parts of it, such as the experts of one mixture.
            return
    for child in module.children():
        yield from _lists(child)


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returns; its class has no public name."""
    return hasattr(module, "_orig_mod")


class _Hooks:
    """The hooks of all blocks. They hold no tensor; copies, as in a deep copy of the model, are silent."""

    def __init__(self, mark: _OnBoundary | None) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[type[types.SimpleNamespace], tuple[()], dict[str, object]]:
        # Who loads a model that was pickled whole need not have this package: this one takes anything and does nothing.
        nothing = contextlib.nullcontext().__exit__
        return types.SimpleNamespace, (), {"mark": None, "enter": nothing, "leave": nothing}

    def enter(self, _block: nn.Module, _args: object) -> None:
        # The compiler takes the first for a constant and leaves the hook out; a call of mark would break its graph.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _in_backward():
            return
        if self.mark is not None:
            self.mark("forward")

    def leave(self, _block: nn.Module, _args: object, output: object) -> None:
        # Also in backward: reentrant checkpointing has no graph but that of the recomputed forward.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        reached = _Reached(self)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)


class _Reached:
    """Marks a block when the first of its outputs has its gradient."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks: _Hooks | None = hooks

    def __call__(self, _gradients: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None and hooks.mark is not None:
            hooks.mark("backward")


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a block's output; what is nested deeper, such as a cache, is not for the next block."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, torch.Tensor):
            yield value


def _in_backward() -> bool:
    """Whether this thread runs a backward pass. Checkpointing in torch asks the same way; there is no public one."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - see above
