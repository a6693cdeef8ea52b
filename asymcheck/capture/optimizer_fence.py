"""Which tensors only a fenced optimizer changes, so that they may be captured while training goes on."""

from __future__ import annotations

import bisect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import eq
from typing import TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from asymcheck.errors import CaptureWarning
from asymcheck.state.leaves import PLAIN_TENSORS, Leaf, Source, identity_key
from asymcheck.state.shards import Distributed, is_dtensor, locals_of

_T = TypeVar("_T")
_NO_OBJECTS = PLAIN_TENSORS | {type(None), bool, int, float, str, bytes, np.ndarray}
_NOWHERE = frozenset({0})
"""Where tensors lie that have no memory."""
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


class OptimizerOwnership:
    """Tells which tensors of a state nothing but a step of an optimizer changes, as far as can be known.

    That holds for parameters and state of optimizers, and for what parts say of themselves, unless something else in
    the state lies in the same memory: a buffer that shares one allocation with parameters, a view or a numpy array of
    one. It does not hold for the weight of an embedding with ``max_norm``, whose rows each call of it scales in place.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._modules: list[nn.Module] = []
        self._embeddings: list[nn.Module] = []

    def deferred_rows(
        self,
        leaves: Sequence[Leaf],
        optimizers: Iterable[Optimizer],
        parts: Iterable[Distributed] = (),
        modules: Sequence[nn.Module] = (),
    ) -> tuple[bool, ...]:
        """Tell it of each leaf of a state; sooner where the last one had the same tensors at the same places."""
        theirs = [tensor for optimizer in optimizers for tensor in _tensors_of(optimizer)]
        theirs += [tensor for part in parts for tensor in part.owned()]
        ours = {id(leaf.source): row for row, leaf in enumerate(leaves)}
        objects, rest = self._found(theirs, ours)
        if self._known is None or modules != self._modules or not self._known.holds_for(leaves, objects, rest):
            self._modules = [*modules]
            self._embeddings = [part for one in modules for part in one.modules() if hasattr(part, "max_norm")]
            self._known = _Known(leaves, *self._found(theirs, ours))
        return self._known.rows

    def _found(self, theirs: Sequence[torch.Tensor], ours: Mapping[int, int]) -> tuple[list[int], list[torch.Tensor]]:
        """Return in which rows the tensors of optimizers are, and those that are in none."""
        scaled = {id(one.weight) for one in self._embeddings if getattr(one, "max_norm", None) is not None}
        if scaled:
            theirs = [tensor for tensor in theirs if id(tensor) not in scaled]
        # Most of a state are the very objects that optimizers have; only for the rest is it worth to compare memory.
        objects = [ours.get(name, -1) for name in map(id, theirs)]
        return objects, [tensor for tensor, row in zip(theirs, objects, strict=True) if row < 0]


class _Known:
    """Facts about a state that were derived from its objects."""

    def __init__(self, leaves: Sequence[Leaf], objects: list[int], rest: Sequence[torch.Tensor]) -> None:
        """Find out which ``leaves`` are deferred, of which optimizers have some, by row, and ``rest`` besides."""
        self._keys = [leaf.key for leaf in leaves]
        self._objects, self._rest = objects, [*map(identity_key, rest)]
        # One object may have several rows, as different parts of wholes.
        memory = {*self._rest, *(self._keys[row] for row in objects if row >= 0)} - {None}
        starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        others: list[Source] = []
        for row, leaf in enumerate(leaves):
            if leaf.key not in memory:
                others.append(leaf.source)
            elif isinstance(leaf.source, torch.Tensor) and _may_be_deferred(leaf.source):
                storage = leaf.source.untyped_storage()
                starts[row] = storage.data_ptr()
                self._ends[starts[row]] = starts[row] + storage.nbytes()
        mixed = _shared(others, self._ends)
        self._is_mixed = mixed != _NOWHERE
        self.rows = tuple([starts.get(row, 0) not in mixed for row in range(len(leaves))])
        """Whether each is deferred."""
        self._arrays = {row for row, leaf in enumerate(leaves) if not isinstance(leaf.source, torch.Tensor)}
        self._others = {row for row, key in enumerate(self._keys) if key not in memory}

    def holds_for(self, leaves: Sequence[Leaf], objects: list[int], rest: Sequence[torch.Tensor]) -> bool:
        """Tell whether it is what would be found out of another state."""
        keys = [leaf.key for leaf in leaves]
        if len(keys) != len(self._keys) or objects != self._objects:
            return False
        # As many as before, for as many objects have no row.
        if not all(map(eq, self._rest, map(identity_key, rest))):
            return False
        # The flattener gives the very keys of before, which are not compared one by one.
        moved = set[int]() if keys == self._keys else {row for row, key in enumerate(keys) if key != self._keys[row]}
        # Of an array, the key is which object it is: that may be another one by now, where the old one was.
        moved |= self._arrays
        if not moved:
            return True
        # The state of a generator, for instance, made anew in each step, and no optimizer has anything to do with it.
        # What shares an optimizer's memory no more lets that be deferred again.
        if self._is_mixed or not moved <= self._others or not {*self._rest}.isdisjoint(keys[row] for row in moved):
            return False
        if _shared((leaves[row].source for row in moved), self._ends) != _NOWHERE:
            return False
        self._keys = keys
        return True


def _may_be_deferred(tensor: torch.Tensor) -> bool:
    # In shared memory any process may change it at any time. What lies on CUDA says that it is shared, always.
    kind = tensor.device.type
    return kind in _DEFERRED_ON and not (kind == "cpu" and tensor.is_shared())


def _shared(sources: Iterable[Source], ends: Mapping[int, int]) -> set[int]:
    """Return 0, and the beginnings of the memories, given with their ends, in which one of ``sources`` lies, too."""
    beginnings = sorted(ends)
    shared = {*_NOWHERE}
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


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer changes, and the tensors of their state; thousands, and in each step.

    Those without a gradient it leaves as they are: who moves them, as an average of others in ``forward``, is not it.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    # A wrapper of another optimizer may have none.
    known = getattr(optimizer, "state", {})
    states = [state for parameter in parameters if (state := known.get(parameter)) is not None]
    values = [*parameters, *chain.from_iterable(state.values() for state in states)]
    # Those of other types have no memory of their own that could be compared. Of a DTensor, the optimizer changes the
    # part that is here, and the state has that very memory.
    return locals_of([value for value in values if type(value) in PLAIN_TENSORS or is_dtensor(value)])


class OptimizerFences:
    """Calls back before any optimizer of this process steps, and says which optimizers can be trusted to wait."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        """Call ``before_step`` on the thread that steps, until :meth:`remove`."""
        self._before_step = before_step
        self._inside_backward: set[int] = set()
        self._handle = register_optimizer_step_pre_hook(self._hook)
        self.come_first()

    def come_first(self) -> None:
        """Be called before the hooks of others, which may change what is not copied yet."""
        # An OrderedDict, whatever torch declares: the handle removes the hook from that very one.
        hooks = cast("OrderedDict[int, object]", _global_optimizer_pre_hooks)
        if self._handle.id in hooks and next(iter(hooks)) != self._handle.id:
            hooks.move_to_end(self._handle.id, last=False)

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
