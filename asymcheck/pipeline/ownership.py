"""Which tensors only a fenced optimizer changes, so that they may be captured while training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck.errors import CaptureWarning
from asymcheck.partition.leaves import Leaf

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

    That holds for parameters and state of these optimizers, unless something else in the state lies in the same memory.
    """
    owned = {_storage(tensor) for optimizer in optimizers for tensor in _tensors_of(optimizer)}
    owned.discard(None)
    others = {_memory(leaf.source) for leaf in leaves} - owned
    return [
        isinstance(leaf.source, torch.Tensor)
        # On a device, a copy at once is ordered after what was queued before; a later one would need a stream and
        # events of its own.
        and leaf.source.device.type == "cpu"
        and _storage(leaf.source) in owned - others
        for leaf in leaves
    ]


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _memory(source: object) -> int | None:
    if isinstance(source, torch.Tensor):
        return _storage(source)
    interface = getattr(source, "__array_interface__", None)
    return None if interface is None else int(interface["data"][0])


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        # A subclass without memory of its own.
        return None


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
            self._inside_backward.add(id(optimizer))
            warnings.warn(
                f"{type(optimizer).__qualname__} steps inside the backward pass, so that its tensors are copied at "
                "once in step(), which takes longer",
                CaptureWarning,
                stacklevel=2,
            )
        self._before_step()

    def trusted(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """Return those of ``optimizers`` that step outside the backward pass, as far as was seen."""
        return [optimizer for optimizer in optimizers if id(optimizer) not in self._inside_backward]

    def remove(self) -> None:
        """Call back no more."""
        self._handle.remove()
