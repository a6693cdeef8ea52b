"""State to leaves: walks the nested state once, giving the tree of plain values and the list of tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch

from asymcheck.errors import StructureError, UnsupportedValueError
from asymcheck.format.registry import TREE_DEPTH_MAX
from asymcheck.format.tree import Key, Node, encode_integer, encode_plain, join_name
from asymcheck.partition.dtypes import TORCH_NAMES, numpy_name
from asymcheck.partition.leaves import Leaf, Source, TensorBytes, identity_key, make_leaf
from asymcheck.types import Stateful


@dataclasses.dataclass(frozen=True)
class FlatState:
    """A state taken apart."""

    tree: Node
    """Its structure and plain values; tensors are row numbers."""
    leaves: list[Leaf]
    """Its tensors by row number; a tied tensor is there once."""


def flatten(state: object) -> FlatState:
    """Take a nested state apart without copying a tensor.

    Containers are dict, OrderedDict, list and tuple; keys are str and int; leaves are tensors, numpy arrays and
    scalars, and plain values. Objects
    with ``state_dict`` and ``load_state_dict`` are replaced by what ``state_dict()`` returns.

    Raises:
        UnsupportedValueError: something cannot be stored; names its path.
    """
    walker = _Walker()
    return FlatState(walker.node(state, ()), walker.leaves)


class _Walker:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._rows: dict[tuple[object, ...], int] = {}

    def node(self, value: object, path: tuple[Key, ...]) -> Node:
        if len(path) >= TREE_DEPTH_MAX:
            raise UnsupportedValueError(
                join_name(path[:6]) + "…", f"the state is nested deeper than {TREE_DEPTH_MAX - 1}, or contains itself"
            )
        if isinstance(value, (torch.Tensor, np.ndarray, TensorBytes)):
            return self._tensor(value, path)
        if type(value) in (dict, OrderedDict):
            return self._mapping(value, path)  # type: ignore[arg-type]  # the type was just compared
        if type(value) in (list, tuple):
            items = [self.node(item, (*path, index)) for index, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]  # as above
            return ["l" if type(value) is list else "t", items]
        if isinstance(value, Stateful) and not isinstance(value, (Mapping, type)):
            return self._stateful(value, path)
        return self._plain(value, path)

    def _stateful(self, value: Stateful, path: tuple[Key, ...]) -> Node:
        state: object = value.state_dict()
        if type(state) not in (dict, OrderedDict):
            raise UnsupportedValueError(
                join_name(path),
                f"state_dict() of {type(value).__qualname__} returned {type(state).__qualname__}, no dict",
            )
        return self._mapping(state, path)  # type: ignore[arg-type]  # the type was just compared

    def _mapping(self, value: Mapping[object, object], path: tuple[Key, ...]) -> Node:
        pairs = [[self._key(key, path), self.node(item, (*path, key))] for key, item in value.items()]  # type: ignore[arg-type]  # _key checks
        if type(value) is dict:
            return ["d", pairs]
        # Module.state_dict() hangs the versions of its modules on the mapping; load_state_dict() looks for them there.
        metadata = getattr(value, "_metadata", None)
        return ["o", pairs] if metadata is None else ["m", pairs, self.node(metadata, (*path, "_metadata"))]

    def _key(self, key: object, path: tuple[Key, ...]) -> object:
        if type(key) is int:
            return encode_integer(key)
        if type(key) is str:
            return self._plain(key, path)
        raise UnsupportedValueError(join_name(path), f"mapping key {key!r} is neither str nor int")

    def _tensor(self, value: Source, path: tuple[Key, ...]) -> Node:
        name = join_name(path)
        tag = "N" if isinstance(value, np.ndarray) else "T"
        # First of all, because what cannot be stored need not have a place in memory to compare.
        leaf = make_leaf(value, name, join_name(path[:1]))
        key = identity_key(value)
        row = None if key is None else self._rows.get(key)
        if row is not None:
            self.leaves[row].aliases.append(name)
            return [tag, row]
        self.leaves.append(leaf)
        if key is not None:
            self._rows[key] = len(self.leaves) - 1
        return [tag, len(self.leaves) - 1]

    def _plain(self, value: object, path: tuple[Key, ...]) -> Node:
        if isinstance(value, torch.Size):
            return ["z", [encode_integer(size) for size in value]]
        if isinstance(value, torch.dtype) and value in TORCH_NAMES:
            return ["y", TORCH_NAMES[value]]
        if isinstance(value, torch.device):
            return ["v", str(value)]
        if isinstance(value, np.generic):
            dtype = numpy_name(value.dtype)
            if dtype is not None:
                return ["n", dtype, value.tobytes().hex()]
        try:
            return encode_plain(value)
        except StructureError as error:
            remedy = "give it state_dict() and load_state_dict(), or make it tensors, numbers, strings, lists and dicts"
            raise UnsupportedValueError(join_name(path), f"{error}; {remedy}") from error
