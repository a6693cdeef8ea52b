"""Which tensors only a fenced optimizer changes, so that they may be captured while training goes on."""

from __future__ import annotations

import bisect
import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck.errors import CaptureWarning
from asymcheck.partition.leaves import Leaf, Source, identity_key

_T = TypeVar("_T")


def find(kind: type[_T], state: object) -> Iterator[_T]:
    """Return the objects of a kind in a state: among the values of its dicts, lists and tuples."""
    if isinstance(state, kind):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from find(kind, value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from find(kind, value)


def deferred_rows(leaves: Sequence[Leaf], optimizers: Iterable[Optimizer]) -> list[bool]:
    """Tell of each leaf whether nothing but a step of one of ``optimizers`` changes it, as far as can be known.

    That holds for parameters and state of these optimizers, unless something else in the state lies in the same memory:
    a buffer that shares one allocation with parameters, a view or a numpy array of one.
    """
    owned = {_key(tensor) for optimizer in optimizers for tensor in _tensors_of(optimizer)} - {None}
    spans = _Spans(leaf.source for leaf in leaves if isinstance(leaf.source, torch.Tensor))
    mixed = {spans.start_of(leaf.source) for leaf in leaves if _key(leaf.source) not in owned}
    return [
        isinstance(leaf.source, torch.Tensor)
        # On a device, a copy at once is ordered after what was queued before; a later one would need a stream and
        # events of its own.
        and leaf.source.device.type == "cpu"
        and _key(leaf.source) in owned
        and spans.start_of(leaf.source) not in mixed
        for leaf in leaves
    ]


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _key(source: Source) -> tuple[object, ...] | None:
    try:
        return identity_key(source)
    except (RuntimeError, NotImplementedError):
        # A subclass without memory of its own.
        return None


class _Spans:
    """Where the memory of some tensors lies."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ends: dict[int, int] = {}
        for tensor in tensors:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                storage = tensor.untyped_storage()
                ends[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
        self._starts = sorted(ends)
        self._ends = ends

    def start_of(self, source: Source) -> int | None:
        """Return where the memory begins that a tensor or an array is a part of; None when it is in none of these."""
        address = 0
        with contextlib.suppress(RuntimeError, NotImplementedError):
            if isinstance(source, torch.Tensor):
                address = source.untyped_storage().data_ptr()
            elif isinstance(source, np.ndarray):
                address = int(source.__array_interface__["data"][0])
        index = bisect.bisect(self._starts, address) - 1
        if not address or index < 0 or address >= max(self._ends[self._starts[index]], self._starts[index] + 1):
            return None
        return self._starts[index]


class Fences:
    """Calls back before any optimizer of this process steps, and says which optimizers can be trusted to wait."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        """Call ``before_step`` on the thread that steps, until :meth:`remove`."""
        self._before_step = before_step
        self._inside_backward: set[int] = set()
        self._handle = register_optimizer_step_pre_hook(self._hook)

    def _hook(self, optimizer: Optimizer, _arguments: object, _options: object) -> None:
        # No public function says whether backward is running on this thread.
        inside = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - as above
        if inside and id(optimizer) not in self._inside_backward:
            # There may be one for each parameter, so it is said once.
            if not self._inside_backward:
                warnings.warn(
                    f"{type(optimizer).__qualname__} steps inside the backward pass, so that its tensors are copied "
                    "at once in step(), which takes longer",
                    CaptureWarning,
                    stacklevel=2,
                )
            self._inside_backward.add(id(optimizer))
        self._before_step()

    def trusted(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """Return those of ``optimizers`` that step outside the backward pass, as far as was seen."""
        return [optimizer for optimizer in optimizers if id(optimizer) not in self._inside_backward]

    def remove(self) -> None:
        """Call back no more."""
        self._handle.remove()
