"""What ``load_state_dict`` of a module or an optimizer would refuse, told before a byte is overwritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from asymcheck.format.manifest import TensorRow
from asymcheck.format.tree import Key
from asymcheck.recovery.shape import RowRef

# torch has no public name for these. An object that has hooks, or loads in its own way, may accept what differs.
_MODULE_HOOKS = "_load_state_dict_pre_hooks"
_MODULE_LOADER = "_load_from_state_dict"
_OPTIMIZER_HOOKS = "_optimizer_load_state_dict_pre_hooks"


def misfits(current: object, stored: Mapping[Key, object], rows: Sequence[TensorRow]) -> Iterator[str]:
    """Yield what in a stored state, whose tensors are ``rows``, an object will refuse.

    Nothing when only the object itself can tell.
    """
    if isinstance(current, torch.nn.Module) and _module_loads_by_name(current):
        yield from _module_misfits(current, stored, rows)
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


def _module_misfits(module: torch.nn.Module, stored: Mapping[Key, object], rows: Sequence[TensorRow]) -> Iterator[str]:
    state = module.state_dict()
    for key, value in state.items():
        if key not in stored:
            yield f"{key}: is not in the checkpoint"
            continue
        item = stored[key]
        if isinstance(value, torch.Tensor) and isinstance(item, RowRef):
            row = rows[item.row]
            if tuple(value.shape) != row.shape:
                dtype = str(value.dtype).removeprefix("torch.")
                yield f"{key}: {dtype} {list(value.shape)} is given, but {row.dtype} {list(row.shape)} is stored"
    yield from (f"{key}: is stored, but not in the given module" for key in stored if key not in state)


def _group_sizes(groups: object) -> list[int]:
    if not isinstance(groups, list):
        return []
    return [len(group["params"]) for group in groups if isinstance(group, dict) and "params" in group]
