"""Flatten consecutive states of one training, based on a template of the previous one.

Saves wait for this. From step to step, a state usually keeps its structure, and its tensors keep their memory. Then
whole mappings are compared with the template, and all tensors together, which takes a quarter of the time of a walk. A
state that differs in more than plain values and addresses of tensors is walked again. The result always equals that of
:func:`asymcheck.state.walk.flatten`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, eq
from typing import Any, Protocol, cast

import torch

from asymcheck.format.tree import Node, join_name
from asymcheck.state.leaves import PLAIN_TENSORS, Leaf, Source, identity_key
from asymcheck.state.shards import TensorShard, is_dtensor, is_laid_out, layout_of
from asymcheck.state.typed_values import typed_value
from asymcheck.state.walk import TENSOR_TAGS, Called, Columns, FlatState, Walker, below, is_to_be_called, state_of

_MAPPING_TAGS: dict[object, type] = {"d": dict, "o": OrderedDict, "m": OrderedDict}
_SEQUENCE_TAGS: dict[object, type] = {"l": list, "t": tuple}

_GETTERS: tuple[Callable[[torch.Tensor], object], ...] = (
    # Compared first, because other layouts have no strides. Quantized tensors have their own dtypes.
    attrgetter("layout"),
    attrgetter("is_nested"),
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("shape"),
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)


class Flattener:
    """Flattener for the states of one training. For one thread at a time; keeps no tensors."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._columns: Columns | None = None

    def flatten(self, state: object) -> FlatState:
        """Return the result of :func:`~asymcheck.state.walk.flatten`."""
        called: Called = {}
        flat = None if self._known is None else self._known.flatten(state, called)
        if flat is None:
            walker = Walker(called)
            tree = walker.node(state, None, 0)
            flat = FlatState(tree, walker.leaves, Columns.of(walker.leaves))
            # A template only pays if the structure returns, which is likely after two occurrences.
            self._known = _Known(flat, walker.visits) if flat.columns == self._columns else None
        self._columns = flat.columns
        return flat


class _Known:
    """Template of the last state, without its tensors."""

    def __init__(self, flat: FlatState, visits: Sequence[tuple[object, int]]) -> None:
        """Build a template of a state; ``visits`` are the occurrences of its tensors, with their rows."""
        self._template = _template_of(flat.tree, None, 0)
        self._columns = flat.columns
        self._keys = [leaf.key for leaf in flat.leaves]
        self._rows = [row for _, row in visits]
        first = {row: visit for visit, row in reversed([*enumerate(self._rows)])}
        self._firsts = [first[row] for row in range(len(flat.leaves))]
        self._is_each_once = len(visits) == len(flat.leaves)
        self._odd = {
            number: (type(given), layout_of(given) if is_dtensor(given) else None)
            for number, (given, _) in enumerate(visits)
            if type(given) not in PLAIN_TENSORS
        }
        sources = [flat.leaves[row].source for row in self._rows]
        tensors = [source for source in sources if isinstance(source, torch.Tensor)]
        # Only complex tensors can be conjugated, and dtypes are compared first.
        is_complex = any(tensor.is_complex() for tensor in tensors)
        self._getters = (*_GETTERS, torch.Tensor.is_conj) if is_complex else _GETTERS
        self._properties = [[*map(get, tensors)] for get in self._getters]
        self._places = [*map(_place, sources)]

    def flatten(self, state: object, called: Called) -> FlatState | None:
        """Flatten a state; return None if its structure differs from the template."""
        walk = _Walk(called)
        tree = self._template.take(walk, state)
        if not walk.is_as_before:
            return None
        # Once for all DTensors. With gradients, to_local() would create new tensors for autograd.
        with torch.no_grad() if self._odd else contextlib.nullcontext():
            resolved = {number: self._resolved(number, walk.visits[number], called) for number in self._odd}
        sources = walk.visits
        for number, source in resolved.items():
            sources[number] = source
        tensors = [source for source in sources if isinstance(source, torch.Tensor)] if self._odd else sources
        if any(source is None for source in resolved.values()) or not self._have_properties(tensors):
            return None
        known = cast("list[Source]", sources)
        places = [*map(_place if self._odd else torch.Tensor.data_ptr, known)]  # type: ignore[arg-type]  # all are tensors
        if places != self._places and not self._have_moved(places, known):
            return None
        return FlatState(tree, self._leaves(known), self._columns)

    def _have_properties(self, tensors: Sequence[Any]) -> bool:
        """Tell whether tensors have the same properties that determine their identity keys, except addresses.

        Properties are compared without storing new ones, because thousands of new shapes can trigger the garbage
        collector.
        """
        return (
            len(tensors) == len(self._properties[0])
            and PLAIN_TENSORS.issuperset(map(type, tensors))
            and all(
                all(map(eq, known, map(get, tensors)))
                for known, get in zip(self._properties, self._getters, strict=True)
            )
        )

    def _resolved(self, number: int, given: object, called: Called) -> object:
        """Return the source of a tensor that is not a plain torch tensor; None if it has changed."""
        kind, layout = self._odd[number]
        if type(given) is not kind:
            return None
        if layout is not None and is_dtensor(given) and is_laid_out(given, layout):
            # The layout, and the shape that is compared later, determine the shard.
            return given.to_local()
        columns, row = self._columns, self._rows[number]
        if isinstance(given, TensorShard):
            return given.local if given.box == columns.boxes[row] else None
        walker = Walker(called)
        walker.node(given, columns.names[row], 1)
        (leaf,) = walker.leaves
        known = (columns.dtypes[row], columns.shapes[row], columns.boxes[row], columns.sizes[row])
        return leaf.source if (leaf.dtype, leaf.shape, leaf.box, leaf.nbytes) == known else None

    def _leaves(self, sources: list[Source]) -> list[Leaf]:
        columns = self._columns
        firsts = sources if self._is_each_once else [sources[visit] for visit in self._firsts]
        described = (columns.dtypes, columns.shapes, columns.sizes, columns.groups, columns.boxes, columns.aliases)
        return [*map(Leaf, firsts, columns.names, *described, self._keys)]

    def _have_moved(self, places: list[int], sources: Sequence[Source]) -> bool:
        """Note new addresses of tensors; return False if a moved tensor shares its memory with another one."""
        moved = {number for number, (old, new) in enumerate(zip(self._places, places, strict=True)) if old != new}
        stayed = {place for number, place in enumerate(places) if number not in moved}
        gone, come = [self._places[number] for number in moved], [places[number] for number in moved]
        if len({*gone}) < len(moved) or len({*come}) < len(moved) or not stayed.isdisjoint((*gone, *come)):
            return False
        for number in moved:
            self._keys[self._rows[number]] = identity_key(sources[number])
        self._places = places
        return True


def _place(source: Source) -> int:
    """Return the address of a tensor; for other sources, the id of the object."""
    return source.data_ptr() if isinstance(source, torch.Tensor) else -id(source)


class _Walk:
    """Walk along a template. Objects in ``called`` are not called again."""

    def __init__(self, called: Called) -> None:
        self.called = called
        self.visits: list[object] = []  # tensors in the order of the walk; only their number was compared
        self.is_as_before = True  # if False, the result of the walk is discarded


class _Template(Protocol):
    """Node of the last state. ``take`` returns the node of a new value, which is the same object if unchanged."""

    @property
    def node(self) -> Node: ...

    def take(self, walk: _Walk, value: object, /) -> Node: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    node: Node

    def take(self, walk: _Walk, value: object) -> Node:
        walk.visits.append(value)
        return self.node


@dataclasses.dataclass(frozen=True, slots=True)
class _Plain:
    """Value without tensors, which is walked in each step."""

    node: Node
    name: str | None
    depth: int

    def take(self, walk: _Walk, value: object) -> Node:
        walker = Walker(walk.called)
        node = walker.node(value, self.name, self.depth)
        walk.is_as_before &= not walker.leaves
        return node


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    node: Node
    tag: str
    children: Sequence[_Template]

    def take(self, walk: _Walk, value: object) -> Node:
        items = value if type(value) is _SEQUENCE_TAGS[self.tag] else ()
        items = cast("Sequence[object]", items)
        if len(items) != len(self.children):
            walk.is_as_before = False
            return None
        nodes = [child.take(walk, item) for child, item in zip(self.children, items, strict=True)]
        return self.node if _are_as_before(self.children, nodes) else [self.tag, nodes]


@dataclasses.dataclass(frozen=True, slots=True)
class _Typed:
    """Typed value with tensors."""

    node: list[Any]
    content: _Template

    def take(self, walk: _Walk, value: object) -> Node:
        _, kind, parameter, _ = self.node
        parts = None if is_to_be_called(value) else typed_value(value)
        if parts is None or (parts.kind, parts.parameter) != (kind, parameter):
            walk.is_as_before = False
            return None
        node = self.content.take(walk, parts.content)
        return self.node if node is self.content.node else ["x", kind, parameter, node]


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    node: Node
    tag: str
    entries: Node
    keys: list[str | int]
    key_types: list[type]
    key_nodes: list[Node]
    children: Sequence[_Template]
    has_tensors_alone: bool
    metadata: _Template | None

    def take(self, walk: _Walk, value: object) -> Node:
        if type(value) not in (dict, OrderedDict) and is_to_be_called(value):
            value = state_of(value, walk.called)
        metadata = getattr(value, "_metadata", None)
        mapping = cast("dict[object, object]", value)
        # Types of keys are compared, too, because 1 equals True.
        if (
            type(value) is not _MAPPING_TAGS[self.tag]
            or [*mapping] != self.keys
            or [*map(type, mapping)] != self.key_types
            or (metadata is None) != (self.metadata is None)
        ):
            walk.is_as_before = False
            return None
        versions = None if self.metadata is None else self.metadata.take(walk, metadata)
        entries = self.entries
        if self.has_tensors_alone:
            walk.visits += mapping.values()
        else:
            nodes = [child.take(walk, item) for child, item in zip(self.children, mapping.values(), strict=True)]
            if not _are_as_before(self.children, nodes):
                entries = [[*pair] for pair in zip(self.key_nodes, nodes, strict=True)]
        if entries is self.entries and (self.metadata is None or versions is self.metadata.node):
            return self.node
        return [self.tag, entries] if self.metadata is None else [self.tag, entries, versions]


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """Mapping of dicts that is compared as a whole: the state of an optimizer, or the versions of modules."""

    node: Node
    kind: type
    keys: list[str | int]
    key_types: list[type]
    lengths: list[int]
    inner_keys: list[str | int]
    inner_types: list[type]
    versions: list[int] | None  # None for tensors

    @classmethod
    def of(cls, node: Node) -> _Table | None:
        """Return the template of a mapping of dicts of tensors, or of dicts of integers; None for other nodes."""
        parts: list[Any] = node if isinstance(node, list) else [None]
        if parts[0] not in ("d", "o") or not all(isinstance(row, list) and row[0] == "d" for _, row in parts[1]):
            return None
        rows = [row[1] for _, row in parts[1]]
        values = [value for row in rows for _, value in row]
        are_versions = all(type(value) is int for value in values)
        if not are_versions and not all(isinstance(value, list) and value[0] in TENSOR_TAGS for value in values):
            return None
        keys, inner = [_key(key) for key, _ in parts[1]], [_key(key) for row in rows for key, _ in row]
        types = [*map(type, keys)], [*map(len, rows)], inner, [*map(type, inner)]
        return cls(node, _MAPPING_TAGS[parts[0]], keys, *types, values if are_versions else None)

    def take(self, walk: _Walk, value: object) -> Node:
        mapping = cast("dict[object, dict[object, object]]", value if type(value) is self.kind else {})
        rows = [*mapping.values()]
        if (
            not {dict}.issuperset(map(type, rows))
            or [*map(len, rows)] != self.lengths
            or [*mapping] != self.keys
            or [*map(type, mapping)] != self.key_types
            or [*chain.from_iterable(rows)] != self.inner_keys
            or [*map(type, chain.from_iterable(rows))] != self.inner_types
            or hasattr(value, "_metadata")
        ):
            walk.is_as_before = False
            return None
        values = [*chain.from_iterable(map(dict.values, rows))]
        if self.versions is None:
            walk.visits += values
        else:
            walk.is_as_before &= values == self.versions and {int}.issuperset(map(type, values))
        return self.node


def _are_as_before(children: Sequence[_Template], nodes: Sequence[Node]) -> bool:
    return all(node is child.node for child, node in zip(children, nodes, strict=True))


def _template_of(node: Node, name: str | None, depth: int) -> _Template:
    """Return the template of a node."""
    # A node with tensors is a list of its tag and its content.
    parts: list[Any] = node if isinstance(node, list) else [None, None]
    tag, content, *rest = parts
    if tag in TENSOR_TAGS:
        return _Tensor(node)
    if tag in _SEQUENCE_TAGS:
        items = [_template_of(item, below(name, str(index)), depth + 1) for index, item in enumerate(content)]
        return _Plain(node, name, depth) if _are_plain(items) else _Sequence(node, tag, items)
    if tag == "x":
        inner = _template_of(rest[1], name, depth + 1)
        return _Plain(node, name, depth) if _are_plain([inner]) else _Typed(parts, inner)
    if tag not in _MAPPING_TAGS:
        return _Plain(node, name, depth)
    keys = [_key(key) for key, _ in content]
    children = [
        _template_of(child, below(name, key if type(key) is str else join_name((key,))), depth + 1)
        for key, (_, child) in zip(keys, content, strict=True)
    ]
    if _are_plain(children):
        return _Plain(node, name, depth)
    if tag == "d" and (table := _Table.of(node)) is not None:
        return table
    return _Mapping(
        node=node,
        tag=tag,
        entries=content,
        keys=keys,
        key_types=[*map(type, keys)],
        key_nodes=[key for key, _ in content],
        children=children,
        has_tensors_alone=all(type(child) is _Tensor for child in children),
        metadata=_Table.of(rest[0]) or _Plain(rest[0], below(name, "_metadata"), depth + 1) if rest else None,
    )


def _are_plain(templates: Iterable[_Template]) -> bool:
    return all(type(template) is _Plain for template in templates)


def _key(node: Any) -> str | int:  # noqa: ANN401 - a node
    return int(node[1]) if isinstance(node, list) else cast("str | int", node)
