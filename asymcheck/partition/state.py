"""State to leaves: walks the nested state once, giving the tree of plain values and the list of tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asymcheck.errors import StructureError, UnsupportedValueError
from asymcheck.format.registry import TREE_DEPTH_MAX
from asymcheck.format.tree import Node, encode_integer, encode_plain, join_name
from asymcheck.partition.boxes import Box
from asymcheck.partition.dtypes import TORCH_NAMES, numpy_name
from asymcheck.partition.leaves import PLAIN_TENSORS, Leaf, Source, TensorBytes, identity_key, make_leaf
from asymcheck.partition.shards import TensorShard, is_dtensor, shard_of
from asymcheck.types import Stateful, is_stateful

_TENSOR_TAGS = ("T", "N")
_SHARED_ENTRIES = 16
_SHARED_KEY = 200
"""Longer mappings and keys are few, and would fill the memory with what is not the same."""
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})


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
    return FlatState(walker.node(state, None, 0), walker.leaves)


class _Walker:
    """Walks a state; a node's name is None at the root. A save waits for this: a millisecond for some 300 nodes."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._rows: dict[tuple[object, ...], int] = {}
        self._group = ""

    def node(self, value: object, name: str | None, depth: int) -> Node:
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
        # What there is most of comes first, and types are compared: isinstance() takes longer, above all to say no.
        if kind in PLAIN_TENSORS:
            return self._tensor(value, name or "")  # type: ignore[arg-type]  # the type was just compared
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, name, depth)  # type: ignore[arg-type]  # as above
        if kind is list or kind is tuple:
            items = [self.node(item, _below(name, str(i)), depth + 1) for i, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]  # as above
            return ["l" if kind is list else "t", items]
        if kind is TensorShard or is_dtensor(value):
            return self._shard(value, name or "")
        if isinstance(value, (torch.Tensor, np.ndarray, TensorBytes)):
            return self._tensor(value, name or "")
        if is_stateful(value) and not isinstance(value, (Mapping, type)):
            return self._stateful(value, name, depth)
        return self._plain(value, name)

    def _stateful(self, value: Stateful, name: str | None, depth: int) -> Node:
        state: object = value.state_dict()
        if type(state) not in (dict, OrderedDict):
            raise UnsupportedValueError(
                name or "",
                f"state_dict() of {type(value).__qualname__} returned {type(state).__qualname__}, no dict",
            )
        return self._mapping(state, name, depth)  # type: ignore[arg-type]  # the type was just compared

    def _mapping(self, value: Mapping[object, object], name: str | None, depth: int) -> Node:
        pairs: list[tuple[Node, Node]] = []
        part: str
        for key, item in value.items():
            # Nearly all are, and what has no other letters is valid.
            node, part = (key, key) if type(key) is str and key.isascii() else self._key(key, name)
            pairs.append((node, self.node(item, _below(name, part), depth + 1)))
        if type(value) is dict:
            return _mapping_node("d", pairs)
        # Module.state_dict() hangs the versions of its modules on the mapping; load_state_dict() looks for them there.
        metadata = getattr(value, "_metadata", None)
        if metadata is None:
            return _mapping_node("o", pairs)
        return [*_mapping_node("m", pairs), self._metadata(metadata, _below(name, "_metadata"), depth)]

    def _metadata(self, metadata: object, name: str, depth: int) -> Node:
        versions = _versions(metadata) if depth < TREE_DEPTH_MAX - 2 else None
        return self.node(metadata, name, depth) if versions is None else _versions_node(versions)

    def _key(self, key: object, name: str | None) -> tuple[object, str]:
        """Return the node of a key, and its part of the names below it."""
        if type(key) is str:
            return self._scalar(key, name), key
        if type(key) is int:
            return encode_integer(key), join_name((key,))
        raise UnsupportedValueError(name or "", f"mapping key {key!r} is neither str nor int")

    def _shard(self, value: object, name: str) -> Node:
        if is_dtensor(value):
            shard = shard_of(value, name)
            return self._tensor(shard.local, name, Box.shared(shard.global_shape, shard.offset, (*shard.local.shape,)))
        given: TensorShard = value  # type: ignore[assignment]  # all others are
        if not given.box.is_valid:
            raise UnsupportedValueError(name, f"the shard {given.box} does not lie within its whole tensor")
        return self._tensor(given.local, name, given.box)

    def _tensor(self, value: Source, name: str, box: Box | None = None) -> Node:
        tag = "N" if isinstance(value, np.ndarray) else "T"
        # First of all, because what cannot be stored need not have a place in memory to compare.
        leaf = make_leaf(value, name, self._group, box)
        leaf.key = key = identity_key(value)
        row = None if key is None else self._rows.get(key)
        if row is not None and self.leaves[row].box == leaf.box:
            self.leaves[row].aliases += (name,)
            return _tensor_node(tag, row)
        self.leaves.append(leaf)
        if key is not None:
            self._rows[key] = len(self.leaves) - 1
        return _tensor_node(tag, len(self.leaves) - 1)

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
        except StructureError as error:
            remedy = "give it state_dict() and load_state_dict(), or make it tensors, numbers, strings, lists and dicts"
            raise UnsupportedValueError(name or "", f"{error}; {remedy}") from error


# Nodes are never changed, and most are the same from step to step: see Leaf for why they are shared.
@functools.lru_cache(maxsize=1 << 14)
def _tensor_node(tag: str, row: int) -> list[Node]:
    return [tag, row]


@functools.lru_cache(maxsize=1 << 14)
def _tensor_pair(key: str, tag: str, row: int) -> list[Node]:
    return [key, _tensor_node(tag, row)]


def _mapping_node(tag: str, pairs: Sequence[tuple[Node, Node]]) -> list[Node]:
    entries = [_entry(key, node) for key, node in pairs]
    if len(pairs) <= _SHARED_ENTRIES and None not in entries:
        return _small_mapping_node(tag, tuple(entries))
    return [
        tag,
        [
            _tensor_pair(*entry) if entry is not None and entry[1] else [key, node]
            for entry, (key, node) in zip(entries, pairs, strict=True)
        ],
    ]


def _versions(metadata: object) -> tuple[str | int, ...] | None:
    """Return the names of modules and their versions, one after the other; None if there is anything else in it."""
    if type(metadata) is not OrderedDict:
        return None
    found: list[str | int] = []
    for module, value in metadata.items():
        version = value.get("version") if type(value) is dict and len(value) == 1 else None
        if type(version) is not int or type(module) is not str or not module.isascii():
            return None
        found += (module, version)
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _versions_node(versions: tuple[str | int, ...]) -> Node:
    """Return the node of what :func:`_versions` took apart: a mapping for each module, the same in each step."""
    metadata = zip(versions[::2], versions[1::2], strict=True)
    return _Walker().node(OrderedDict((module, {"version": version}) for module, version in metadata), None, 0)


def _entry(key: Node, node: Node) -> tuple[str, str, int] | None:
    """Return a key with a tensor's tag and row, or with no tag and an integer; None for all else."""
    if type(key) is str and len(key) <= _SHARED_KEY:
        if type(node) is int:
            return key, "", node
        if type(node) is list and node[0] in _TENSOR_TAGS:
            return key, node[0], node[1]
    return None


@functools.lru_cache(maxsize=1 << 12)
def _small_mapping_node(tag: str, entries: tuple[tuple[str, str, int], ...]) -> list[Node]:
    return [tag, [_tensor_pair(*entry) if entry[1] else [entry[0], entry[2]] for entry in entries]]


def _below(name: str | None, part: str) -> str:
    return part if name is None else f"{name}.{part}"
