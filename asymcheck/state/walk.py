"""Walk a nested state; return the tree of plain values and the list of tensors."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, TypeGuard

import numpy as np
import torch

from asymcheck.errors import LimitError, StructureError, UnsupportedValueError
from asymcheck.format.registry import TREE_DEPTH_MAX
from asymcheck.format.tree import Node, encode_integer, encode_plain, join_name
from asymcheck.format.typed_value import SETS, in_order, is_typed_value
from asymcheck.state.boxes import Box
from asymcheck.state.dtypes import TORCH_NAMES
from asymcheck.state.leaves import PLAIN_TENSORS, Leaf, Source, TensorBytes, identity_key, make_leaf
from asymcheck.state.numpy_dtypes import numpy_name
from asymcheck.state.shards import TensorShard, is_dtensor, layout_of, shard_of
from asymcheck.state.typed_values import TypedValue, is_nested, remedy_for, typed_value
from asymcheck.state.zero_redundancy import local_part
from asymcheck.types import Stateful, is_stateful

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
"""Types that are stored as mappings. A Counter, as in learning rate schedulers, is stored as a plain mapping."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Properties of tensors, by row. The object stays the same while no property changes."""

    names: tuple[str, ...]  # dotted name of the first occurrence in the state
    aliases: tuple[tuple[str, ...], ...]  # further names
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[Box, ...]  # boxes in whole tensors
    sizes: tuple[int, ...]  # bytes of all elements
    widths: tuple[int, ...]  # bytes of an element
    groups: tuple[str, ...]  # only tensors of the same group are bundled

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Columns:
        """Describe leaves."""
        columns = ("name", "aliases", "dtype", "shape", "box", "nbytes", "width", "group")
        return cls(*(tuple(map(attrgetter(column), leaves)) for column in columns))


@dataclasses.dataclass(frozen=True)
class FlatState:
    """A flattened state."""

    tree: Node  # structure and plain values; tensors are row numbers
    leaves: list[Leaf]  # tensors by row number; a tied tensor has one row
    columns: Columns


Called = dict[int, tuple[Stateful, object]]
"""Objects and their ``state_dict()`` by id. The objects are kept, so that ids stay unique."""
Mappings = dict[str | None, tuple[str, list[Node], list[Node], list[Any]]]
"""Tag, keys, content and node of mappings, by name."""


def flatten(state: object) -> FlatState:
    """Flatten a nested state without copying a tensor; see also :class:`asymcheck.state.flattener.Flattener`.

    Containers are dict, OrderedDict, Counter, list and tuple; keys are str and int; leaves are tensors, numpy arrays
    and scalars, plain values, and the types of :mod:`asymcheck.state.typed_values`. Objects with ``state_dict`` and
    ``load_state_dict`` are replaced by their state.

    Raises:
        UnsupportedValueError: a value cannot be stored; the error names its path.
    """
    return Walker({}).flatten(state)


class Walker:
    """Walk over a state. The name of the root is None. Saves wait for it: a millisecond for about 300 nodes."""

    def __init__(self, called: Called) -> None:
        """Start a walk. Objects in ``called`` are not called again."""
        self.leaves: list[Leaf] = []  # tensors by row
        # For each occurrence of a tensor: its bytes, then name, group and box (None for a whole tensor), and its node.
        self.sources: list[Source] = []
        self.places: list[tuple[str, str, Box | None]] = []
        self.nodes: list[list[Any]] = []
        self.layouts: dict[int, tuple[Box, tuple[object, ...]]] = {}  # box and layout of DTensors, by occurrence
        self.mappings: Mappings = {}
        self._known_mappings: Mappings = {}  # of an earlier walk
        self._called = called
        self._rows: dict[tuple[object, ...], int] = {}
        self._group = ""  # first part of the name

    def flatten(self, state: object) -> FlatState:
        """Return the result of :func:`flatten`."""
        tree = self.node(state, None, 0)
        return FlatState(tree, self.leaves, Columns.of(self.leaves))

    def node(self, value: object, name: str | None, depth: int) -> Node:
        """Return the node of a value."""
        if depth >= TREE_DEPTH_MAX:
            raise UnsupportedValueError(
                ".".join((name or "").split(".")[:6]) + "…",
                f"the state is nested deeper than {TREE_DEPTH_MAX - 1}, or contains itself",
            )
        kind = type(value)
        if kind in _SCALARS:
            return self._scalar(value, name)
        if depth == 1:
            self._group = name or ""
        # Frequent types come first. Comparing types is faster than isinstance().
        if kind in PLAIN_TENSORS and not value.is_nested:  # type: ignore[attr-defined]  # as below
            return self._tensor(value, name or "")  # type: ignore[arg-type]  # the type was just compared
        if kind in _MAPPINGS:
            return self._mapping(value, name, depth)  # type: ignore[arg-type]  # as above
        if kind is list or kind is tuple:
            items = [self.node(item, below(name, str(i)), depth + 1) for i, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]  # as above
            return ["l" if kind is list else "t", items]
        if kind is TensorShard or is_dtensor(value):
            return self._shard(value, name or "")
        if isinstance(value, (torch.Tensor, np.ndarray, TensorBytes)) and not is_nested(value):
            return self._tensor(value, name or "")
        if is_to_be_called(value):
            return self._stateful(value, name, depth)
        parts = typed_value(value)
        return self._plain(value, name) if parts is None else self._typed(parts, name, depth)

    def _typed(self, parts: TypedValue, name: str | None, depth: int) -> Node:
        if parts.kind in SETS:
            # The order of a set differs from process to process, so items are named like the set.
            nodes = [self.node(item, name, depth + 2) for item in parts.content]
            content = ["t", in_order(nodes)] if nodes else self.node((), name, depth + 1)
        else:
            content = self.node(parts.content, name, depth + 1)
        if not is_typed_value(parts.kind, parts.parameter, content):
            remedy = (
                "use only numbers, strings, paths, dates, Enum members and tuples of them in it, or store list(value)"
            )
            raise UnsupportedValueError(name or "", f"the items of a {parts.kind} cannot be stored; {remedy}")
        return ["x", parts.kind, self._scalar(parts.parameter, name), content]

    def _stateful(self, value: Stateful, name: str | None, depth: int) -> Node:
        state = state_of(value, self._called)
        if type(state) not in (dict, OrderedDict):
            raise UnsupportedValueError(
                name or "",
                f"state_dict() of {type(value).__qualname__} returned {type(state).__qualname__}, no dict",
            )
        return self._mapping(state, name, depth)  # type: ignore[arg-type]  # the type was just compared

    def _mapping(self, value: Mapping[object, object], name: str | None, depth: int) -> Node:
        keys: list[Node] = []
        content: list[Node] = []
        prefix = below(name, "")
        part: str
        for key, item in value.items():
            # ASCII strings, which are most, are always valid.
            node, part = (key, key) if type(key) is str and key.isascii() else self._key(key, name)
            keys.append(node)
            content.append(self.node(item, prefix + part, depth + 1))
        tag = "d"
        if type(value) is OrderedDict:
            tag = "o"
            # Module.state_dict() stores versions of modules in an attribute of the mapping, for load_state_dict().
            metadata = getattr(value, "_metadata", None)
            if metadata is not None:
                tag = "m"
                content.append(self.node(metadata, prefix + "_metadata", depth + 1))
        known = self._known_mappings.get(name)
        # Keys may be compared by value: none is a bool, which would equal 1.
        if known is None or tag != known[0] or keys != known[1] or not all(map(is_, content, known[2])):
            pairs = [[*pair] for pair in zip(keys, content, strict=False)]
            known = tag, keys, content, [tag, pairs, *content[len(keys) :]]
        self.mappings[name] = known
        return known[3]

    def _key(self, key: object, name: str | None) -> tuple[object, str]:
        """Return the node of a key, and its part of the dotted names."""
        if type(key) is str:
            return self._scalar(key, name), key
        if type(key) is int:
            node = self._scalar(key, name)
            return node, str(key) if node is key else join_name((key,))
        raise UnsupportedValueError(name or "", f"mapping key {key!r} is neither str nor int; use str(key) or int(key)")

    def _shard(self, value: object, name: str) -> Node:
        if is_dtensor(value):
            shard = shard_of(value, name)
            box = Box.shared(shard.global_shape, shard.offset, (*shard.local.shape,))
            self.layouts[len(self.sources)] = box, layout_of(value)
            return self._tensor(shard.local, name, box)
        given: TensorShard = value  # type: ignore[assignment]  # all others are
        if not given.box.is_valid:
            raise UnsupportedValueError(name, f"the shard {given.box} is not inside of its whole tensor")
        return self._tensor(given.local, name, given.box)

    def _tensor(self, value: Source, name: str, box: Box | None = None) -> Node:
        tag = "N" if isinstance(value, np.ndarray) else "T"
        # Described first, because an unsupported tensor may have no address.
        leaf = make_leaf(value, name, self._group, box)
        leaf.key = key = identity_key(value)
        row = None if key is None else self._rows.get(key)
        if row is not None and self.leaves[row].box == leaf.box:
            self.leaves[row].aliases += (name,)
        else:
            row = len(self.leaves)
            self.leaves.append(leaf)
            if key is not None:
                self._rows[key] = row
        node: list[Any] = [tag, row]
        self.sources.append(value)
        self.places.append((name, self._group, box))
        self.nodes.append(node)
        return node

    def _plain(self, value: object, name: str | None) -> Node:
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
        return self._scalar(value, name)

    def _scalar(self, value: object, name: str | None) -> Node:
        try:
            return encode_plain(value)
        except LimitError as error:
            raise UnsupportedValueError(name or "", str(error)) from error
        except StructureError as error:
            raise UnsupportedValueError(name or "", f"{error}; {remedy_for(value)}") from error


def is_to_be_called(value: object) -> TypeGuard[Stateful]:
    """Tell whether a value is replaced by its ``state_dict()``."""
    return is_stateful(value) and not isinstance(value, (Mapping, type))


def state_of(value: Stateful, called: Called) -> object:
    """Return the state of an object, whose ``state_dict()`` is called once."""
    if id(value) not in called:
        called[id(value)] = value, local_part(value).state_dict()
    return called[id(value)][1]


def below(name: str | None, part: str) -> str:
    """Return the dotted name of a child."""
    return part if name is None else f"{name}.{part}"
