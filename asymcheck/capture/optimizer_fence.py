"""Fence optimizer steps, and select the tensors that only an optimizer changes (deferred tensors)."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import not_
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from asymcheck.errors import CaptureWarning, listed, warn_user
from asymcheck.state.leaves import PLAIN_TENSORS, Source, identity_key
from asymcheck.state.names import matches
from asymcheck.state.shards import Distributed, is_dtensor, locals_of
from asymcheck.state.walk import Columns, FlatState
from asymcheck.state.zero_redundancy import local_part

_T = TypeVar("_T")
_NO_OBJECTS = PLAIN_TENSORS | {type(None), bool, int, float, str, bytes, np.ndarray}
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_DEFERRED_ON = ("cpu", "cuda")
"""Device types with deferred copies; a later copy on other devices would need synchronization events."""

_CHANGES_OUTSIDE_STEP = ("eval", "first_step")
"""Methods that change parameters outside ``step()``: of schedule-free optimizers, and of SAM."""


def in_backward() -> bool:
    """Return whether this thread runs a backward pass. torch has no public function, and uses this one itself."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - see above


def find(kind: type[_T], state: object) -> Iterator[_T]:
    """Yield the objects of type ``kind`` among the values of the dicts, lists and tuples of a state."""
    values = [state]
    while values:
        value = values.pop()
        # Most values have one of these types. isinstance(value, kind) is slow, and runs in each step().
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
    """Return the parts of a state that are distributed over ranks."""
    return find(Distributed, state)  # type: ignore[type-abstract]  # the protocol is only used for isinstance


class OptimizerOwnership:
    """Selector of deferred tensors: the tensors that only an optimizer step changes.

    Deferred tensors are optimizer parameters, optimizer state, the tensors that distributed parts own, and those that
    the user names. A tensor is eager if another value of the state shares its memory, such as a buffer, a view or a
    numpy array. The weight of an embedding with ``max_norm`` is eager too, because each forward call scales its rows in
    place.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Also defer the tensors whose names match one of ``patterns``."""
        self._patterns = patterns
        self._columns: Columns | None = None
        self._is_named: list[bool] = []
        self._keys: list[tuple[object, ...] | None] = []
        self._storages: list[tuple[int, int]] = []  # start and end of the memory of each owned tensor
        self._modules: list[nn.Module] = []
        self._embeddings: list[Any] = []

    def deferred_rows(
        self,
        state: FlatState,
        optimizers: Iterable[Optimizer],
        parts: Iterable[Distributed] = (),
        modules: Sequence[nn.Module] = (),
    ) -> tuple[bool, ...]:
        """Return whether each leaf is deferred."""
        leaves, is_named = state.leaves, self._named(state.columns)
        tensors = [tensor for optimizer in optimizers for tensor in _tensors_of(optimizer)]
        tensors += [tensor for part in parts for tensor in part.owned()]
        # Most tensors of optimizers are the same objects as in the state. Only the others need their own key.
        key_by_id = {id(leaf.source): leaf.key for leaf in leaves}
        memory = {key_by_id.get(id(tensor)) or identity_key(tensor) for tensor in tensors} - {None}
        is_owned = [named or leaf.key in memory for leaf, named in zip(leaves, is_named, strict=True)]
        owned = [*compress(leaves, is_owned)]
        keys = [leaf.key for leaf in owned]
        # The flattener reuses the key objects, so this comparison is fast.
        if keys != self._keys or modules != self._modules:
            self._keys, self._modules = keys, [*modules]
            self._storages = [_storage(leaf.source) for leaf in owned]
            self._embeddings = [part for module in modules for part in module.modules() if hasattr(part, "max_norm")]
        scaled = _in_memory([module.weight for module in self._embeddings if module.max_norm is not None])
        # An empty tensor, which has no key, changes nothing in the memory that it is a view of.
        others = [leaf.source for leaf in compress(leaves, map(not_, is_owned)) if leaf.key is not None]
        shared, storages = _shared([*others, *scaled], dict(self._storages)), iter(self._storages)
        return tuple([is_own and next(storages)[0] not in shared for is_own in is_owned])

    def _named(self, columns: Columns) -> list[bool]:
        """Return whether the name of each tensor matches a pattern, and warn about patterns without a match."""
        if columns is not self._columns:
            tensors = [(name, *others) for name, others in zip(columns.names, columns.aliases, strict=True)]
            self._is_named = [any(matches(pattern, names) for pattern in self._patterns) for names in tensors]
            unmatched = [pattern for pattern in self._patterns if not any(matches(pattern, names) for names in tensors)]
            is_first, self._columns = self._columns is None, columns
            if unmatched and is_first:
                warn_user(f"deferred: {listed(unmatched)} matches no tensor of the state", CaptureWarning)
        return self._is_named


def _storage(source: Source) -> tuple[int, int]:
    """Return start and end of the memory of a tensor; zeros if the tensor may not be deferred."""
    if not isinstance(source, torch.Tensor):
        return 0, 0
    storage = source.untyped_storage()
    # Another process may change shared memory at any time. CUDA tensors always report is_shared().
    if source.device.type not in _DEFERRED_ON or (source.device.type == "cpu" and storage.is_shared()):
        return 0, 0
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _shared(sources: Iterable[Source], ends: Mapping[int, int]) -> set[int]:
    """Return 0 and the start addresses of the memory ranges that contain one of ``sources``."""
    starts = sorted(ends)
    shared = {0}
    for source in sources:
        address = _address(source)
        index = bisect.bisect(starts, address) - 1
        if index >= 0 and address < ends[starts[index]]:
            shared.add(starts[index])
    return shared


def _address(source: Source) -> int:
    if isinstance(source, torch.Tensor):
        return source.untyped_storage().data_ptr()
    return int(source.__array_interface__["data"][0]) if isinstance(source, np.ndarray) else 0


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer changes, and their state tensors.

    Parameters without ``requires_grad`` are excluded: code outside the optimizer may change them.
    """
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"] if tensor.requires_grad]
    # An optimizer wrapper may have no state attribute.
    state_by_parameter = getattr(local_part(optimizer), "state", {})
    states = [state for parameter in parameters if (state := state_by_parameter.get(parameter)) is not None]
    values = [*parameters, *chain.from_iterable(state.values() for state in states)]
    # Such as the lists of LBFGS. The loop includes the containers that it adds.
    containers = [value for value in values if type(value) in _CONTAINERS]
    for container in containers:
        content = container.values() if isinstance(container, dict) else container
        values.extend(content)
        containers.extend(value for value in content if type(value) in _CONTAINERS)
    return _in_memory(values)


def _in_memory(values: Iterable[object]) -> list[torch.Tensor]:
    """Return the tensors that have memory of this process; for a DTensor, its local part, as in the state."""
    return locals_of([value for value in values if type(value) in PLAIN_TENSORS or is_dtensor(value)])  # type: ignore[misc]  # they are tensors


def _calls_closure_first(optimizer: Optimizer) -> bool:
    """Tell whether nothing changes a parameter between the hook and the closure, as in all optimizers of torch."""
    hooks = len(_global_optimizer_pre_hooks) + len(optimizer._optimizer_step_pre_hooks)  # noqa: SLF001 - no public name
    return hooks == 1 and type(optimizer).__module__.startswith("torch.optim.")


class OptimizerFences:
    """Global optimizer hook that runs a callback before each optimizer step of this process."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        """Call ``before_step`` on the thread of each optimizer step, until :meth:`remove`."""
        self._before_step = before_step
        self._inside_backward: set[int] = set()
        self._handle = register_optimizer_step_pre_hook(self._hook)
        self.come_first()

    def come_first(self) -> None:
        """Move the hook to the front, because other hooks may change tensors that are not copied yet."""
        # torch declares a dict, but creates an OrderedDict. The handle removes the hook from the same object.
        hooks = cast("OrderedDict[int, object]", _global_optimizer_pre_hooks)
        if self._handle.id in hooks and next(iter(hooks)) != self._handle.id:
            hooks.move_to_end(self._handle.id, last=False)

    def _hook(self, optimizer: Optimizer, arguments: Any, options: Any) -> tuple[Any, Any] | None:  # noqa: ANN401 - of torch
        if in_backward() and id(optimizer) not in self._inside_backward:
            # Each parameter may have its own optimizer, so the warning appears once.
            if not self._inside_backward:
                effect = "its tensors are copied at once in step(), which takes longer"
                warn_user(
                    f"{type(optimizer).__qualname__} steps inside the backward pass, so that {effect}", CaptureWarning
                )
            self._inside_backward.add(id(optimizer))
        given = options.get("closure", *arguments[1:2])
        if given is None or not _calls_closure_first(optimizer):
            self._before_step()
            return None

        def closure() -> object:
            # Usually runs forward and backward pass, which overlap with the copy.
            loss = given()
            self._before_step()
            return loss

        return arguments[:1], {**options, "closure": closure}

    def trusted(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """Return the optimizers that change tensors only in ``step()``, and not inside the backward pass."""
        return [
            optimizer
            for optimizer in optimizers
            # The optimizer of Accelerate has eval() for every optimizer that it wraps.
            if not any(hasattr(getattr(optimizer, "optimizer", optimizer), name) for name in _CHANGES_OUTSIDE_STEP)
            and id(optimizer) not in self._inside_backward
        ]

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
