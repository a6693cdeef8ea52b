"""Which tensors only a fenced optimizer changes, so that they may be captured while training goes on."""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck.errors import CaptureWarning
from asymcheck.partition.distributed import Distributed
from asymcheck.partition.leaves import PLAIN_TENSORS, Leaf, Source, identity_key
from asymcheck.partition.shards import is_dtensor, local_of

_T = TypeVar("_T")
_NO_OBJECTS = PLAIN_TENSORS | {type(None), bool, int, float, str, bytes, np.ndarray}
_DEFERRED_ON = ("cpu", "cuda")
"""On devices of other kinds a copy at once is ordered after what was queued before; a later one would need marks."""


def find(kind: type[_T], state: object) -> Iterator[_T]:
    """Yield the objects of a kind in a state: among the values of its dicts, lists and tuples."""
    values = [state]
    while values:
        value = values.pop()
        # Before the kind, which takes long to tell: most are one of these, and looked at in each step().
        if type(value) in _NO_OBJECTS:
            continue
        if isinstance(value, (list, tuple)):
            values.extend(reversed(value))
        elif isinstance(value, dict):
            values.extend(reversed(value.values()))
        elif isinstance(value, kind):
            yield value
        elif isinstance(value, Mapping):
            values.extend(reversed(list(value.values())))


def distributed(state: object) -> Iterator[Distributed]:
    """Return the parts of a state that ranks hold together."""
    return find(Distributed, state)  # type: ignore[type-abstract]  # looked for, and never made


def deferred_rows(
    leaves: Sequence[Leaf], optimizers: Iterable[Optimizer], parts: Iterable[Distributed] = ()
) -> list[bool]:
    """Tell of each leaf whether nothing but a step of one of ``optimizers`` changes it, as far as can be known.

    That holds for parameters and state of these optimizers, and for what ``parts`` say of themselves, unless something
    else in the state lies in the same memory: a buffer that shares one allocation with parameters, a view or a numpy
    array of one.
    """
    theirs = {id(tensor): tensor for optimizer in optimizers for tensor in _tensors_of(optimizer)}
    theirs |= {id(tensor): tensor for part in parts for tensor in part.owned()}
    ours = {id(leaf.source) for leaf in leaves}
    # Most of a state are the very objects that optimizers have; only for the rest is it worth to compare memory.
    owned = {identity_key(tensor) for name, tensor in theirs.items() if name not in ours} - {None}
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    others: list[Source] = []
    for row, leaf in enumerate(leaves):
        if leaf.key is None or (id(leaf.source) not in theirs and leaf.key not in owned):
            others.append(leaf.source)
        elif isinstance(leaf.source, torch.Tensor) and leaf.source.device.type in _DEFERRED_ON:
            storage = leaf.source.untyped_storage()
            starts[row] = storage.data_ptr()
            ends[starts[row]] = starts[row] + storage.nbytes()
    mixed = _shared(others, ends)
    return [starts.get(row, 0) not in mixed for row in range(len(leaves))]


def _shared(sources: Iterable[Source], ends: Mapping[int, int]) -> set[int]:
    """Return 0, and the beginnings of the memories, given with their ends, in which one of ``sources`` lies, too."""
    beginnings = sorted(ends)
    shared = {0}
    for source in sources:
        address = _address(source)
        index = bisect.bisect(beginnings, address) - 1
        if index >= 0 and address < ends[beginnings[index]]:
            shared.add(beginnings[index])
    return shared


def _address(source: Source) -> int:
    if isinstance(source, torch.Tensor):
        return source.untyped_storage().data_ptr()
    return int(source.__array_interface__["data"][0]) if isinstance(source, np.ndarray) else 0


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in (parameter, *optimizer.state.get(parameter, {}).values()):
                # Those of other types have no memory of their own that could be compared.
                if type(value) in PLAIN_TENSORS:
                    yield value
                elif isinstance(value, torch.Tensor) and is_dtensor(value):
                    # What the optimizer changes is the part that is here; the state has that very memory.
                    yield local_of(value)


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
