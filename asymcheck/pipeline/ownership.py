"""Which tensors only a fenced optimizer changes, so that they may be captured while training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck.errors import CaptureWarning
from asymcheck.partition.leaves import Leaf, identity_key

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_DENSE = (torch.Tensor, torch.nn.Parameter)


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
    """Tell of each leaf whether it is a parameter or a state tensor of one of ``optimizers``.

    Nothing else changes these as a rule. A view of one is not taken for it: what else lies in the same memory is not
    known.
    """
    owned = {identity_key(tensor) for optimizer in optimizers for tensor in _tensors_of(optimizer)}
    # On a device, a copy at once is ordered after what was queued before; a later one would need a stream and events of
    # its own.
    return [leaf.key in owned and leaf.key is not None and _CPU in leaf.key for leaf in leaves]


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) in _DENSE:
                yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if type(value) in _DENSE:
                    yield value


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
