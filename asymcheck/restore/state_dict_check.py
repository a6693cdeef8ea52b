"""What modules and optimizers make of a stored state: what they would refuse, told before a byte is overwritten."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from asymcheck.format.manifest import TensorRow
from asymcheck.format.tree import Key
from asymcheck.restore.state_template import RowRef, like_mapping, merge, rows_in
from asymcheck.state.shards import Distributed

# torch has no public name for these. An object that has hooks, or loads in its own way, may accept what differs.
_MODULE_HOOKS = "_load_state_dict_pre_hooks"
_MODULE_LOADER = "_load_from_state_dict"
_OPTIMIZER_HOOKS = "_optimizer_load_state_dict_pre_hooks"
_ADVICE = (
    "the stages of a pipeline come back by as many ranks as saved them; for other numbers save the optimizer's state "
    "by the names of parameters (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict)"
)


def misfits(current: object, stored: Mapping[Key, object], row_of: Callable[[int], TensorRow]) -> Iterator[str]:
    """Yield what in a stored state, whose tensors ``row_of`` gives, an object will refuse.

    Nothing when only the object itself can tell.
    """
    if isinstance(current, Distributed):
        yield from current.misfits(stored)
    elif isinstance(current, torch.nn.Module) and _module_loads_by_name(current):
        yield from _module_misfits(current, stored, row_of)
    elif isinstance(current, torch.optim.Optimizer) and _optimizer_loads_by_group(current):
        given, kept = _group_sizes(current.param_groups), _group_sizes(stored.get("param_groups"))
        if given != kept:
            yield f"param_groups: groups of {given} parameters are given, but of {kept} are stored"


def _module_loads_by_name(module: torch.nn.Module) -> bool:
    return type(module).load_state_dict is torch.nn.Module.load_state_dict and not any(
        getattr(part, _MODULE_HOOKS, None) or not getattr(type(part), _MODULE_LOADER).__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def _optimizer_loads_by_group(optimizer: torch.optim.Optimizer) -> bool:
    is_plain = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return is_plain and not getattr(optimizer, _OPTIMIZER_HOOKS, None)


def _module_misfits(
    module: torch.nn.Module, stored: Mapping[Key, object], row_of: Callable[[int], TensorRow]
) -> Iterator[str]:
    state = module.state_dict()
    for key, value in state.items():
        if key not in stored:
            yield f"{key}: is not in the checkpoint"
            continue
        item = stored[key]
        if isinstance(value, torch.Tensor) and isinstance(item, RowRef):
            row = row_of(item.row)
            if tuple(value.shape) != row.global_shape:
                dtype = str(value.dtype).removeprefix("torch.")
                yield f"{key}: {dtype} {list(value.shape)} is given, but {row.dtype} {list(row.global_shape)} is stored"
    yield from (f"{key}: is stored, but not in the given module" for key in stored if key not in state)


def _group_sizes(groups: object) -> list[int]:
    if not isinstance(groups, list):
        return []
    return [len(group["params"]) for group in groups if isinstance(group, dict) and "params" in group]


def state_for(current: object, stored: Sequence[dict[Key, object]], state: Mapping[str, object]) -> dict[Key, object]:
    """Return which of the states that several ranks stored under one name an object gets: the first.

    A module whose ranks stored different tensors (the stages of a pipeline) gets those of ``state``, which it has.
    """
    first = stored[0]
    if not isinstance(current, torch.nn.Module) or all(one.keys() == first.keys() for one in stored):
        return first
    merged = merge(stored)
    if not isinstance(merged, dict):
        return first
    return like_mapping(merged, {key: value for key, value in merged.items() if key in state})


def with_counters(stored: dict[Key, object], current: object) -> dict[Key, Any]:
    """Return what is stored with a Counter wherever ``current`` has one: it is stored as a plain mapping."""
    given = current if isinstance(current, dict) else {}
    items: dict[Key, Any] = {key: _with_counters(value, given.get(key)) for key, value in stored.items()}
    return Counter(items) if type(current) is Counter else like_mapping(stored, items)


def _with_counters(stored: object, current: object) -> object:
    if isinstance(stored, dict):
        return with_counters(stored, current)
    if type(stored) in (list, tuple):
        given: Sequence[object] = current if isinstance(current, (list, tuple)) else ()
        pairs = itertools.zip_longest(stored, given[: len(stored)])  # type: ignore[arg-type, call-overload]  # the type was just compared
        return type(stored)(_with_counters(*pair) for pair in pairs)  # type: ignore[call-arg]  # as above
    return stored


def parameters_of(optimizer: object, stored: Mapping[Key, object]) -> Iterator[tuple[RowRef, torch.Tensor]]:
    """Yield the tensors of an optimizer's stored state, each with the present parameter that it belongs to."""
    groups, states = stored.get("param_groups"), stored.get("state")
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(groups, list) or not isinstance(states, dict):
        return
    keys = [key for group in groups if isinstance(group, dict) for key in _items(group.get("params"))]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=False):
        for value in _items(states.get(key)):
            if isinstance(value, RowRef):
                yield value, parameter


def _items(container: object) -> Sequence[object]:
    if isinstance(container, dict):
        return list(container.values())
    return container if isinstance(container, (list, tuple)) else ()


class PipelineStages:
    """Finds optimizers that would get the numbered state of another stage: number 0 is another parameter there."""

    def __init__(self, rank_of: Callable[[int], int]) -> None:
        """Begin without an object; ``rank_of`` gives the rank that stored a tensor."""
        self._rank_of = rank_of
        # By parameter: its name, by ranks that have no such one and others instead.
        self._lacking: dict[int, dict[int, str]] = {}
        self._numbered: list[tuple[str, torch.optim.Optimizer, int]] = []

    def add_module(
        self, name: str, module: torch.nn.Module, state: Mapping[str, object], stored: Sequence[Mapping[Key, object]]
    ) -> None:
        """Take note of a module, of its present state, and of what ranks stored under its name."""
        supplied = {key for one in stored for key in one}
        parameters = [pair for pair in module.named_parameters(remove_duplicate=False) if pair[0] in supplied]
        # Who has less and nothing else is no other stage: it left to others to save what all have.
        for one in (one for one in stored if not one.keys() <= state.keys()):
            for row in rows_in(one)[:1]:
                rank = self._rank_of(row)
                for key, parameter in parameters:
                    if key not in one:
                        self._lacking.setdefault(id(parameter), {})[rank] = _joined(name, key)

    def add_optimizer(self, name: str, optimizer: torch.optim.Optimizer, stored: Mapping[Key, object]) -> None:
        """Take note of an optimizer, and of what it gets."""
        states = stored.get("state")
        if isinstance(states, dict) and all(type(key) is int for key in states):
            # Without a tensor it is as good as that of any other stage.
            for row in rows_in(states)[:1]:
                self._numbered.append((name, optimizer, self._rank_of(row)))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong, when all objects are known."""
        for name, optimizer, rank in self._numbered:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            lacking = (self._lacking.get(id(parameter), {}).get(rank) for parameter in parameters)
            place = next(filter(None, lacking), None)
            if place is not None:
                what = f"its parameters are numbered as rank {rank} has them, which saved no {place}"
                yield f"{name or '<root>'}: {what}: {_ADVICE}"


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
