"""Predict what load_state_dict() of modules and optimizers would refuse, before any byte is overwritten."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from asymcheck.format.manifest import TensorRow
from asymcheck.format.tree import Key
from asymcheck.format.typed_value import SETS
from asymcheck.restore.state_template import RowRef, like_mapping, merge, rows_in
from asymcheck.state.names import did_you_mean
from asymcheck.state.shards import Distributed, is_dtensor
from asymcheck.state.typed_values import CLASSES, TypedValue, misfit, typed_value, with_class

# torch has no public names for these. An object with hooks, or its own load_state_dict(), may accept differences.
_MODULE_HOOKS = "_load_state_dict_pre_hooks"
_MODULE_LOADER = "_load_from_state_dict"
_OPTIMIZER_HOOKS = "_optimizer_load_state_dict_pre_hooks"
_SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Options that schedulers of torch add to a group."""
_SCHEDULED_OPTIONS = {"params", "param_names", "lr", "betas", "momentum", "max_lr", "min_lr", "swa_lr"}
"""Options that change during a training."""
_IMPLEMENTATION_OPTIONS = {"foreach", "fused"}
"""Options that torch chooses itself where they are None."""
_OPTION_TYPES = (bool, int, float, str, tuple, Counter, type(None))
_ADVICE = (
    "pipeline stages can only be restored by as many ranks as saved them. For another number, save the optimizer's "
    "state by parameter names (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict with "
    "flatten_optimizer_state_dict=True)"
)


class Lacking(str):
    """Problem with an entry that other ranks may have saved."""

    __slots__ = ()


def misfits(
    current: object, stored: Mapping[Key, object], row_of: Callable[[int], TensorRow], where: str
) -> Iterator[str]:
    """Yield the reasons why an object will refuse a stored state; ``row_of`` returns its tensors.

    ``where`` names the checkpoint. Yields nothing if only the object itself can decide.
    """
    if isinstance(current, Distributed):
        yield from current.misfits(stored)
    elif isinstance(current, torch.nn.Module) and _module_loads_by_name(current):
        yield from _module_misfits(current, stored, row_of, where)
    elif isinstance(current, torch.optim.Optimizer) and _optimizer_loads_by_group(current):
        groups = _groups(stored)
        given, kept = ([len(group["params"]) for group in each] for each in (current.param_groups, groups))
        if given != kept:
            yield f"param_groups: groups of {given} parameters are given, but of {kept} are stored"
        else:
            yield from _class_misfits(current, stored)
            yield from _order_misfits(_names(current.param_groups), _names(groups))


def differences(current: object, stored: Mapping[Key, object], row_of: Callable[[int], TensorRow]) -> Iterator[str]:
    """Yield differences between an object and a stored state that ``load_state_dict()`` accepts in silence."""
    if isinstance(current, torch.nn.Module):
        yield from _conversions(current, stored, row_of)
    elif isinstance(current, torch.optim.Optimizer):
        for number, groups in enumerate(zip(current.param_groups, _groups(stored), strict=False)):
            problems = _group_differences(*groups, _counters(current))
            yield from (f"param_groups.{number}: {problem}" for problem in problems)
    elif isinstance(current, LRScheduler):
        yield from _schedule_differences(current, stored)


def _conversions(
    module: torch.nn.Module, stored: Mapping[Key, object], row_of: Callable[[int], TensorRow]
) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for key, value in module.state_dict().items():
        item = stored.get(key)
        if isinstance(value, torch.Tensor) and isinstance(item, RowRef):
            counts[row_of(item.row).dtype, str(value.dtype).removeprefix("torch.")] += 1
    for (kept, given), count in counts.items():
        if kept != given:
            yield f"{count:,} tensor{'s are' if count > 1 else ' is'} converted from {kept} to {given}"


def _class_misfits(optimizer: torch.optim.Optimizer, stored: Mapping[Key, object]) -> Iterator[str]:
    """Yield the evidence that an optimizer of another class was stored, whose state fails at the next step."""
    groups = zip(optimizer.param_groups, _groups(stored), strict=False)
    options = (_unlike("param_groups", given, kept) for given, kept in groups)
    states, given_states = stored.get("state"), optimizer.state_dict()["state"]
    pairs = [(given_states.get(key), kept) for key, kept in states.items()] if isinstance(states, dict) else []
    evidence = next(filter(None, (*options, *(_unlike("state", given, kept) for given, kept in pairs))), None)
    if evidence is not None:
        yield (
            f"{evidence}. An optimizer of another class than {type(optimizer).__qualname__} was saved: construct that "
            "class, or leave the optimizer out of the state to start with a new one"
        )


def _order_misfits(given: Sequence[object], kept: Sequence[object]) -> Iterator[str]:
    """Yield the first named parameter with another number than in the checkpoint. torch ignores the names."""
    if sorted(map(str, given)) != sorted(map(str, kept)):
        # Parameters may have other names now.
        return
    for number, (name, stored) in enumerate(zip(given, kept, strict=True)):
        if name != stored:
            yield (
                f"param_groups: parameter {number} is {name!r} in the given optimizer, but {stored!r} in the "
                "checkpoint; give the parameters in the stored order"
            )
            return


def _names(groups: Sequence[dict[str, Any]]) -> list[object]:
    return [name for group in groups for name in _items(group.get("param_names"))]


def _unlike(what: str, given: object, kept: object) -> str:
    """Return how two mappings differ if each has keys that the other lacks; a newer torch only adds options."""
    if not isinstance(given, Mapping) or not isinstance(kept, Mapping):
        return ""
    lacking, extra = (
        ", ".join(sorted(repr(key) for key in keys - _SCHEDULER_OPTIONS))
        for keys in (given.keys() - kept.keys(), kept.keys() - given.keys())
    )
    return f"{what}: {lacking} given, but not stored; {extra} stored, but not given" if lacking and extra else ""


def _counters(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the defaults that no constructor takes: optimizers outside torch keep state in their groups."""
    kind = type(getattr(optimizer, "optimizer", optimizer))  # Accelerate wraps optimizers
    constructors = [vars(part)["__init__"] for part in kind.__mro__ if "__init__" in vars(part)]
    arguments = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    # An optimizer wrapper may have no defaults attribute.
    return getattr(optimizer, "defaults", {}).keys() - arguments


def _group_differences(given: Mapping[str, object], kept: Mapping[str, object], counters: set[str]) -> Iterator[str]:
    """Yield the differences between the options of a group of parameters, except ``counters``."""
    if unlike := _unlike("options", given, kept):
        yield f"{unlike}. Was it an optimizer of another class?"
    keys = given.keys() & kept.keys() - _SCHEDULED_OPTIONS - counters
    left_to_torch = {key for key in keys & _IMPLEMENTATION_OPTIONS if None in (given[key], kept[key])}
    yield from _changed_options(given, kept, keys - left_to_torch, "optimizer")


def _schedule_differences(schedule: LRScheduler, stored: Mapping[Key, Any]) -> Iterator[str]:
    """Yield the differences between the options of a learning rate schedule of torch, and of its parts."""
    if type(schedule).__module__ != LRScheduler.__module__:
        # Another schedule may change its options during a training.
        return
    given = schedule.state_dict()
    public = [dict.fromkeys(key for key in state if not str(key).startswith("_")) for state in (given, stored)]
    if unlike := _unlike("options", *public):
        yield f"{unlike}. Was it a schedule of another class?"
    arguments = inspect.signature(type(schedule)).parameters.keys() - {"last_epoch"}
    yield from _changed_options(given, stored, arguments & given.keys() & stored.keys(), "schedule")
    # The parts of a sequence, such as a warm-up. torch has no public name for them.
    for part, kept in zip(getattr(schedule, "_schedulers", ()), _items(stored.get("_schedulers")), strict=False):
        if isinstance(kept, dict):
            yield from _schedule_differences(part, kept)


def _changed_options(
    given: Mapping[Any, object], kept: Mapping[Any, object], keys: Iterable[str], what: str
) -> Iterator[str]:
    for key in sorted(keys):
        if type(given[key]) in _OPTION_TYPES and type(kept[key]) in _OPTION_TYPES and given[key] != kept[key]:
            yield f"{key} is {given[key]!r} in the given {what}, and {kept[key]!r} in the checkpoint, which is used"


def _module_loads_by_name(module: torch.nn.Module) -> bool:
    return type(module).load_state_dict is torch.nn.Module.load_state_dict and not any(
        getattr(part, _MODULE_HOOKS, None) or not getattr(type(part), _MODULE_LOADER).__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def _optimizer_loads_by_group(optimizer: torch.optim.Optimizer) -> bool:
    is_plain = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return is_plain and not getattr(optimizer, _OPTIMIZER_HOOKS, None)


def _module_misfits(
    module: torch.nn.Module, stored: Mapping[Key, object], row_of: Callable[[int], TensorRow], where: str
) -> Iterator[str]:
    state = module.state_dict()
    for key, value in state.items():
        if key not in stored:
            yield Lacking(f"{key}: is not in {where}{did_you_mean(key, stored, state)}")
            continue
        item = stored[key]
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            yield f"{key}: is on the meta device and has no memory; call to_empty(device=…) before the restore"
            continue
        if isinstance(value, torch.Tensor) and isinstance(item, RowRef):
            row = row_of(item.row)
            if tuple(value.shape) != row.global_shape:
                dtype = str(value.dtype).removeprefix("torch.")
                yield f"{key}: {dtype} {list(value.shape)} is given, but {row.dtype} {list(row.global_shape)} is stored"
    yield from (f"{key}: is stored, but not in the given module" for key in stored if key not in state)


def _groups(stored: Mapping[Key, Any]) -> list[dict[str, Any]]:
    """Return the groups of parameters in the stored state of an optimizer."""
    groups = _items(stored.get("param_groups"))
    return [group for group in groups if isinstance(group, dict) and isinstance(group.get("params"), list)]


def _with_numbers(stored: dict[Key, Any]) -> dict[Key, Any]:
    """Return the stored state of an optimizer with integers as parameter numbers, which DCP stores as strings."""
    states = stored.get("state")
    groups = _groups(stored)
    numbers: dict[Key, Key] = {str(key): key for group in groups for key in group["params"] if type(key) is int}
    if not isinstance(states, dict) or numbers.keys().isdisjoint(states):
        return stored
    known: dict[Key, Any] = states
    renamed = {numbers.get(key, key): value for key, value in known.items()}
    return like_mapping(stored, {**stored, "state": like_mapping(states, renamed)})


def state_for(
    current: object,
    stored: Sequence[dict[Key, object]],
    state: Mapping[str, object],
    savers: Callable[[torch.nn.Parameter], Container[int]],
    rank_of: Callable[[int], int],
) -> dict[Key, object]:
    """Return the stored state for an object that several ranks stored under one name: that of the first.

    If ranks stored different tensors of a module (pipeline stages), return the tensors that are in ``state``. An
    optimizer gets the state of each parameter that only other ranks stored from one of these ``savers``.
    """
    first = stored[0]
    if isinstance(current, torch.optim.Optimizer):
        return _of_parameters_here(current, [*map(_with_numbers, stored)], savers, rank_of)
    if not isinstance(current, torch.nn.Module) or all(other.keys() == first.keys() for other in stored):
        return first
    merged: Any = merge(stored)
    return like_mapping(merged, {key: value for key, value in merged.items() if key in state})


def _of_parameters_here(
    optimizer: torch.optim.Optimizer,
    stored: Sequence[dict[Key, Any]],
    savers: Callable[[torch.nn.Parameter], Container[int]],
    rank_of: Callable[[int], int],
) -> dict[Key, object]:
    """Return the first stored state of an optimizer, with the state of parameters that only other ranks stored.

    A DTensor on a part of the ranks has no state on the others, or an outdated one, and may be on other ranks now.
    """
    first = stored[0]
    numbers = _numbers(first)
    states: list[Any] = [other.get("state") for other in stored if _numbers(other) == numbers]
    if not numbers or not all(isinstance(known, dict) for known in states):
        return first
    kept = {**states[0]}
    pairs = [(rank_of(row), known) for known in states for row in rows_in(known)[:1]]
    for key, parameter in _numbered(optimizer, first):
        if is_dtensor(parameter) and parameter.device_mesh.get_coordinate() is None:
            kept.pop(key, None)
        elif len(states) > 1:
            ranks = savers(parameter)
            kept.update(next(({key: known[key]} for rank, known in pairs if rank in ranks and key in known), {}))
    return like_mapping(first, {**first, "state": kept})


def _numbers(stored: Mapping[Key, object]) -> list[object]:
    """Return the numbers of the parameters of each group, and their names if the optimizer knows them."""
    return [(group["params"], group.get("param_names")) for group in _groups(stored)]


def _numbered(
    optimizer: torch.optim.Optimizer, stored: Mapping[Key, object]
) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """Yield the parameters of an optimizer with their numbers in a stored state."""
    keys = (key for group in _groups(stored) for key in group["params"])
    yield from zip(keys, (parameter for group in optimizer.param_groups for parameter in group["params"]), strict=False)


def with_classes(
    stored: dict[Key, Any], current: object, instances: Callable[[], Mapping[str, object]]
) -> dict[Key, Any]:
    """Return a stored value with those classes of ``current`` that are not stored: Counter, dataclass, Enum ….

    ``instances`` gives the classes of values that ``current`` lacks.
    """
    given = current if isinstance(current, dict) else {}
    if given and {*map(type, given)} == {int} and all(isinstance(key, str) and key.isdecimal() for key in stored):
        # DCP stores integer keys as strings, such as the milestones of a learning rate schedule.
        stored = like_mapping(stored, {int(key): value for key, value in stored.items()})
    items: dict[Key, Any] = {key: _with_classes(value, given.get(key), instances) for key, value in stored.items()}
    return Counter(items) if type(current) is Counter else like_mapping(stored, items)


def _with_classes(stored: object, current: object, instances: Callable[[], Mapping[str, object]]) -> object:
    if isinstance(stored, dict):
        return with_classes(stored, current, instances)
    if isinstance(stored, TypedValue):
        if stored.kind in SETS:
            return with_class(stored, instances())
        parts = typed_value(current)
        fits = parts is not None and not misfit(current, parts, stored)
        given = parts.content if parts is not None and fits else None
        found = dataclasses.replace(stored, content=_with_classes(stored.content, given, instances))
        if not fits:
            return with_class(found, instances()) if stored.kind in CLASSES else found
        like = copy.copy(current) if stored.kind in CLASSES else None
        if stored.kind == "device-generator":
            # A generator of a device cannot be copied, so the generator of the object takes the state itself.
            like = current
        return dataclasses.replace(found, like=like)
    if type(stored) in (list, tuple):
        given_items: Sequence[object] = current if isinstance(current, (list, tuple)) else ()
        pairs = itertools.zip_longest(stored, given_items[: len(stored)])  # type: ignore[arg-type, call-overload]  # the type was just compared
        return type(stored)(_with_classes(*pair, instances) for pair in pairs)  # type: ignore[call-arg]  # as above
    return stored


def parameters_of(
    current: object, state: Mapping[str, object], stored: Mapping[Key, object]
) -> Iterator[tuple[RowRef, torch.Tensor]]:
    """Yield stored tensors of an object, each with the present DTensor of a module, or parameter of an optimizer."""
    if isinstance(current, torch.nn.Module):
        for name, value in state.items():
            item = stored.get(name)
            if is_dtensor(value) and isinstance(item, RowRef):
                yield item, value
    states = stored.get("state")
    if not isinstance(current, torch.optim.Optimizer) or not isinstance(states, dict):
        return
    for key, parameter in _numbered(current, stored):
        for value in _items(states.get(key)):
            if isinstance(value, RowRef):
                yield value, parameter


def _items(container: object) -> Sequence[object]:
    if isinstance(container, dict):
        return list(container.values())
    return container if isinstance(container, (list, tuple)) else ()


class PipelineStages:
    """Detector of optimizers that would receive the numbered state of another pipeline stage."""

    def __init__(self, own: int, rank_of: Callable[[int], int]) -> None:
        """Start without objects; ``own`` is the own rank, and ``rank_of`` returns the rank that stored a tensor."""
        self._own, self._rank_of = own, rank_of
        # By parameter: its name, by rank that lacks the name and has others instead.
        self._lacking: dict[int, dict[int, str]] = {}
        self._numbered: list[tuple[str, torch.optim.Optimizer, int]] = []

    def add_module(
        self, name: str, module: torch.nn.Module, state: Mapping[str, object], stored: Sequence[Mapping[Key, object]]
    ) -> None:
        """Add a module, its current state, and the states that ranks stored under its name."""
        supplied = {key for mapping in stored for key in mapping}
        parameters = [pair for pair in module.named_parameters(remove_duplicate=False) if pair[0] in supplied]
        # A rank that stored a subset is no other stage; other ranks saved its replicas.
        for mapping in (mapping for mapping in stored if not mapping.keys() <= state.keys()):
            for row in rows_in(mapping)[:1]:
                rank = self._rank_of(row)
                for key, parameter in parameters:
                    if key not in mapping:
                        self._lacking.setdefault(id(parameter), {})[rank] = f"{name}.{key}" if name else key

    def add_optimizer(self, name: str, optimizer: torch.optim.Optimizer, stored: Mapping[Key, object]) -> None:
        """Add an optimizer and its stored state."""
        states = stored.get("state")
        if isinstance(states, dict) and all(type(key) is int for key in states):
            # Without tensors, the states of all stages are equivalent. The options of groups are those of the own rank.
            ranks = [self._rank_of(row) for row in rows_in(states)]
            self._numbered += [(name, optimizer, rank) for rank in dict.fromkeys([self._own, *ranks] if ranks else [])]

    def problems(self) -> Iterator[str]:
        """Yield the problems, once all objects were added."""
        for name, optimizer, rank in self._numbered:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            lacking = (self._lacking.get(id(parameter), {}).get(rank) for parameter in parameters)
            place = next(filter(None, lacking), None)
            if place is not None:
                what = f"its parameters are numbered as rank {rank} has them, which saved no {place}"
                yield f"{name or '<root>'}: {what}: {_ADVICE}"
