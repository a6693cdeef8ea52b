"""Templates: the structure of a state, along which a later state is walked, as long as it has the same."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol, cast

from asymcheck.format.tree import Node, join_name
from asymcheck.partition.state import Called, Walker, below, is_to_be_called, state_of

_TENSOR_TAGS = ("T", "N")
_MAPPING_TAGS: dict[object, type] = {"d": dict, "o": OrderedDict, "m": OrderedDict}
_SEQUENCE_TAGS: dict[object, type] = {"l": list, "t": tuple}


class Walk:
    """One walk along a template."""

    def __init__(self, called: Called) -> None:
        """Begin; what is in ``called`` is not called again."""
        self.called = called
        self.visits: list[object] = []
        """Tensors as they were met; nothing was looked at but their number."""
        self.is_as_before = True
        """Whether everything was found where it was expected, up to now; else what was found is of no use."""


class Template(Protocol):
    """A node, and what a value is compared with that is expected to have one like it."""

    @property
    def node(self) -> Node:
        """The node of before."""
        ...

    def take(self, walk: Walk, value: object, /) -> Node:
        """Return the node of a value: the same object where that is as before."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    node: Node

    def take(self, walk: Walk, value: object) -> Node:
        walk.visits.append(value)
        return self.node


@dataclasses.dataclass(frozen=True, slots=True)
class _Plain:
    """What has no tensor in it; it is walked each time, for its values change."""

    node: Node
    name: str | None
    depth: int
    is_metadata: bool = False
    """Whether it is the versions of modules of a mapping at that depth."""

    def take(self, walk: Walk, value: object) -> Node:
        walker = Walker(walk.called)
        if self.is_metadata:
            node = walker.metadata(value, self.name or "", self.depth)
        else:
            node = walker.node(value, self.name, self.depth)
        walk.is_as_before &= not walker.leaves
        return node


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    node: Node
    tag: str
    children: Sequence[Template]

    def take(self, walk: Walk, value: object) -> Node:
        items = value if type(value) is _SEQUENCE_TAGS[self.tag] else ()
        items = cast("Sequence[object]", items)
        if len(items) != len(self.children):
            walk.is_as_before = False
            return None
        nodes = [child.take(walk, item) for child, item in zip(self.children, items, strict=True)]
        return self.node if _are_as_before(self.children, nodes) else [self.tag, nodes]


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    node: Node
    tag: str
    entries: Node
    keys: list[str | int]
    key_types: list[type]
    key_nodes: list[Node]
    children: Sequence[Template]
    has_tensors_alone: bool
    metadata: _Plain | None

    def take(self, walk: Walk, value: object) -> Node:
        mapping = self._mapping(walk, value)
        metadata = getattr(mapping, "_metadata", None)
        # The types of keys, too: 1 and True are equal.
        if (
            mapping is None
            or [*mapping] != self.keys
            or [*map(type, mapping)] != self.key_types
            or (metadata is None) != (self.metadata is None)
        ):
            walk.is_as_before = False
            return None
        versions = None if self.metadata is None else self.metadata.take(walk, metadata)
        entries = self._entries(walk, mapping)
        if entries is self.entries and (self.metadata is None or versions is self.metadata.node):
            return self.node
        return [self.tag, entries] if self.metadata is None else [self.tag, entries, versions]

    def _mapping(self, walk: Walk, value: object) -> dict[object, object] | None:
        kind = type(value)
        if kind is not dict and kind is not OrderedDict and is_to_be_called(value):
            value = state_of(value, walk.called)
        return cast("dict[object, object]", value) if type(value) is _MAPPING_TAGS[self.tag] else None

    def _entries(self, walk: Walk, mapping: dict[object, object]) -> Node:
        if self.has_tensors_alone:
            walk.visits += mapping.values()
            return self.entries
        nodes = [child.take(walk, item) for child, item in zip(self.children, mapping.values(), strict=True)]
        if _are_as_before(self.children, nodes):
            return self.entries
        return [[*pair] for pair in zip(self.key_nodes, nodes, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A dict of plain dicts that hold nothing but tensors, as the state of an optimizer: all are compared at once."""

    node: Node
    keys: list[str | int]
    key_types: list[type]
    lengths: list[int]
    inner_keys: list[str | int]
    inner_types: list[type]

    @classmethod
    def of(cls, mapping: _Mapping) -> Template:
        """Return what takes the same as ``mapping``, which may be itself."""
        rows = [child for child in mapping.children if type(child) is _Mapping]
        if len(rows) < len(mapping.children) or mapping.tag != "d" or mapping.metadata is not None:
            return mapping
        if not all(row.has_tensors_alone and row.tag == "d" and row.metadata is None for row in rows):
            return mapping
        inner = [*chain.from_iterable(row.keys for row in rows)]
        lengths = [len(row.keys) for row in rows]
        return cls(mapping.node, mapping.keys, mapping.key_types, lengths, inner, [*map(type, inner)])

    def take(self, walk: Walk, value: object) -> Node:
        rows = [*value.values()] if type(value) is dict else []
        if (
            not {dict}.issuperset(map(type, rows))
            or [*map(len, rows)] != self.lengths
            or [*cast("dict[object, object]", value)] != self.keys
            or [*map(type, cast("dict[object, object]", value))] != self.key_types
            or [*chain.from_iterable(rows)] != self.inner_keys
            or [*map(type, chain.from_iterable(rows))] != self.inner_types
        ):
            walk.is_as_before = False
            return None
        walk.visits += chain.from_iterable(map(dict.values, rows))
        return self.node


@dataclasses.dataclass(frozen=True, slots=True)
class _Never:
    """What is never like before."""

    node: Node

    def take(self, walk: Walk, _value: object) -> Node:
        walk.is_as_before = False
        return self.node


def _are_as_before(children: Sequence[Template], nodes: Sequence[Node]) -> bool:
    return all(node is child.node for child, node in zip(children, nodes, strict=True))


def template_of(node: Node, name: str | None, depth: int) -> Template:
    """Return the template of a node."""
    # One with tensors is a list, of its tag and what lies in it.
    parts: list[Any] = node if isinstance(node, list) else [None, None]
    tag, content, *rest = parts
    if tag in _TENSOR_TAGS:
        return _Tensor(node)
    if tag in _SEQUENCE_TAGS:
        items = [template_of(item, below(name, str(index)), depth + 1) for index, item in enumerate(content)]
        return _Plain(node, name, depth) if _are_plain(items) else _Sequence(node, tag, items)
    if tag not in _MAPPING_TAGS:
        return _Plain(node, name, depth)
    keys = [_key(key) for key, _ in content]
    children = [
        template_of(child, below(name, key if type(key) is str else join_name((key,))), depth + 1)
        for key, (_, child) in zip(keys, content, strict=True)
    ]
    metadata = [template_of(one, None, depth) for one in rest]
    if _are_plain([*children, *metadata]):
        return _Plain(node, name, depth)
    if not _are_plain(metadata):
        return _Never(node)
    mapping = _Mapping(
        node=node,
        tag=tag,
        entries=content,
        keys=keys,
        key_types=[*map(type, keys)],
        key_nodes=[key for key, _ in content],
        children=children,
        has_tensors_alone=all(type(child) is _Tensor for child in children),
        metadata=_Plain(rest[0], below(name, "_metadata"), depth, is_metadata=True) if rest else None,
    )
    return _Table.of(mapping)


def _are_plain(templates: Iterable[Template]) -> bool:
    return all(type(template) is _Plain for template in templates)


def _key(node: Any) -> str | int:  # noqa: ANN401 - a node
    return int(node[1]) if isinstance(node, list) else cast("str | int", node)
