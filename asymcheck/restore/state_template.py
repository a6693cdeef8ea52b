"""Template of a stored state: containers and plain values, with placeholders for tensors."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from asymcheck.errors import StateMismatchError
from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import Key, decode, join_name
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.state.names import no_match
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES
from asymcheck.state.typed_values import TypedValue, build

_T = TypeVar("_T")
ABSENT = object()
"""Stands for an item of a sequence outside of a selection."""
_DIVISIBLE = ("defaultdict", "deque", "dataclass", "namedtuple")
"""Types of typed values of which a part can be selected."""
_METADATA = "_metadata"
"""Attribute in which Module.state_dict() stores the versions of modules for Module.load_state_dict()."""
_WRAPPERS = ("_orig_mod", "module")
"""Parts of names that torch.compile and DistributedDataParallel add."""


def _metadata(mapping: object) -> object:
    return getattr(mapping, _METADATA, None)


def _set_metadata(mapping: object, metadata: object) -> None:
    setattr(mapping, _METADATA, metadata)


@dataclasses.dataclass(frozen=True)
class RowRef:
    """Placeholder for the tensor of a row."""

    row: int  # row of the manifest, or number of the tensor in a ShardSet
    as_array: bool  # whether the tensor was a numpy array


class _ShapeBuilder:
    """Builds containers of the original types, with a :class:`RowRef` for each tensor."""

    def __init__(self, first: int) -> None:
        self._first = first

    def plain(self, value: object) -> object:
        return value

    def sequence(self, kind: str, items: list[object]) -> object:
        return items if kind == "l" else tuple(items)

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> object:
        if kind == "d":
            return dict(pairs)
        ordered = OrderedDict(pairs)
        if kind == "m":
            _set_metadata(ordered, metadata)
        return ordered

    def tensor(self, row: int, as_array: bool) -> object:  # noqa: FBT001 - as in the protocol
        return RowRef(self._first + row, as_array)

    def tagged(self, kind: str, value: object) -> object:
        if kind == "z":
            return torch.Size(value)  # type: ignore[arg-type]  # the decoder passes a tuple of int
        if kind == "y":
            return _known(TORCH_DTYPES, str(value), "torch")
        if kind == "v":
            return _device(str(value))
        dtype, data = value  # type: ignore[misc]  # the decoder passes a pair
        return np.frombuffer(data, dtype=_known(NUMPY_DTYPES, dtype, "numpy"))[0]  # type: ignore[has-type]  # as above

    def typed(self, kind: str, parameter: str | int | None, content: object) -> object:
        return TypedValue(kind, parameter, content)


def _known(dtypes: Mapping[str, _T], name: str, library: str) -> _T:
    if name not in dtypes:
        raise StateMismatchError(f"the state has a value of dtype {name}, which this version of {library} lacks")
    return dtypes[name]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StateMismatchError(
            f"the state has the device {name!r} as a value, which this version of torch lacks"
        ) from error
    if str(device) != name:
        # A large index overflows.
        raise StateMismatchError(f"the state has the device {name!r} as a value, which torch changes to {device}")
    return device


def read_shape(manifest: Manifest, first: int = 0) -> object:
    """Return the state of a manifest with placeholders for its tensors, numbered from ``first``.

    Raises:
        FormatError: the tree breaks a rule of the format.
        StateMismatchError: a value is not supported by this version of torch or numpy.
    """
    header = manifest.header
    where = f"manifest of run {header.run}, {header.ref}, rank {header.rank}"
    return decode(header.tree, len(manifest), _ShapeBuilder(first), where)


def rows_in(shape: object) -> list[int]:
    """Return the distinct rows in a shape, in order."""
    rows: list[int] = []
    map_leaves(shape, lambda leaf: rows.append(leaf.row) if isinstance(leaf, RowRef) else None)
    return list(dict.fromkeys(rows))


def map_leaves(
    value: object,
    make: Callable[[object], object] = lambda leaf: leaf,
    typed: Callable[[TypedValue], object] = lambda value: value,
) -> Any:  # noqa: ANN401 - a nested state
    """Return a copy of a nested state: ``make`` replaces each leaf, and ``typed`` each copy of a typed value."""
    if isinstance(value, TypedValue):
        return typed(dataclasses.replace(value, content=map_leaves(value.content, make, typed)))
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)({key: map_leaves(item, make, typed) for key, item in value.items()})  # type: ignore[call-arg, attr-defined]  # the type was just compared
        if _metadata(value) is not None:
            _set_metadata(copy, map_leaves(_metadata(value), make, typed))
        return copy
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, make, typed) for item in value)  # type: ignore[call-arg, attr-defined]  # as above
    return make(value)


def _array(tensor: torch.Tensor) -> object:
    try:
        return tensor.cpu().numpy()
    except (TypeError, ValueError) as error:
        shape = list(tensor.shape)
        raise StateMismatchError(f"the state has an array of {tensor.dtype} {shape}, which numpy lacks") from error


def with_tensors(shape: object, tensors: Mapping[int, object]) -> object:
    """Return a shape with its tensors in place and its typed values built. Tied tensors are one object.

    Raises:
        RefusedStateError: a class or a random number generator refused its content.
    """
    arrays: dict[int, object] = {}

    def make(leaf: object) -> object:
        if not isinstance(leaf, RowRef):
            return None if leaf is ABSENT else leaf
        value = tensors[leaf.row]
        if not leaf.as_array or not isinstance(value, torch.Tensor):
            return value
        return arrays.setdefault(leaf.row, _array(value))

    return map_leaves(shape, make, build)


def merge(shapes: Sequence[object]) -> object:
    """Merge the shapes of several ranks: mappings by key, sequences of equal length by item, otherwise the first."""
    first = shapes[0]
    if len(shapes) == 1:
        return first
    if isinstance(first, dict):
        mappings = [shape for shape in shapes if isinstance(shape, dict)]
        keys = dict.fromkeys(key for mapping in mappings for key in mapping)
        merged = {key: merge([mapping[key] for mapping in mappings if key in mapping]) for key in keys}
        return like_mapping(first, merged, merge_metadata=mappings)
    if isinstance(first, TypedValue):
        kin = [shape for shape in shapes if isinstance(shape, TypedValue) and shape.kind == first.kind]
        return dataclasses.replace(first, content=merge([shape.content for shape in kin]))
    if type(first) in (list, tuple):
        alike = [shape for shape in shapes if type(shape) is type(first) and len(shape) == len(first)]  # type: ignore[arg-type]  # the type was just compared
        return type(first)(merge(items) for items in zip(*alike, strict=True))  # type: ignore[call-arg]  # as above
    return first


def like_mapping(
    like: dict[Key, object], items: dict[Key, object], merge_metadata: Sequence[object] = ()
) -> dict[Key, object]:
    """Return items as a mapping of the type of ``like``, with its metadata, merged with that of others."""
    if not isinstance(like, OrderedDict):
        return items
    ordered = OrderedDict(items)
    versions = [metadata for shape in (like, *merge_metadata) if (metadata := _metadata(shape)) is not None]
    if versions:
        _set_metadata(ordered, merge(versions))
    return ordered


def with_names_of(given: Mapping[str, object], stored: dict[Key, object]) -> dict[Key, object]:
    """Return a stored state of a module under the names of ``given``, where they differ only by wrappers.

    ``torch.compile`` and ``DistributedDataParallel`` add the parts ``_orig_mod`` and ``module`` to names.
    """
    renamed = _names_of(given, stored)
    if all(name == key for key, name in renamed.items()):
        return stored
    result = like_mapping(stored, {renamed[key]: value for key, value in stored.items()})
    kept, metadata = _metadata(stored), _metadata(given)
    if isinstance(result, OrderedDict) and isinstance(kept, dict) and isinstance(metadata, dict):
        names = _names_of(metadata, kept)
        _set_metadata(result, {names[key]: value for key, value in kept.items()})
    return result


def _names_of(given: Mapping[str, object], stored: Mapping[Key, object]) -> dict[Key, Key]:
    """Map each stored name to the given name that differs only by wrappers; to itself if none or several do."""
    by_bare: dict[str, list[str]] = {}
    for name in given:
        by_bare.setdefault(_without_wrappers(name), []).append(name)
    names: dict[Key, Key] = {}
    for key in stored:
        alike = by_bare.get(_without_wrappers(key), []) if isinstance(key, str) and key not in given else []
        names[key] = alike[0] if len(alike) == 1 and alike[0] not in stored else key
    return names if len(set(names.values())) == len(names) else {key: key for key in stored}


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def select(shape: object, pattern: str) -> object:
    """Keep only leaves whose dotted name matches a glob; containers that end up empty are dropped.

    Gaps in sequences become None.

    Raises:
        InvalidInputError: no name matches.
    """
    if pattern == "*":
        return shape
    kept = _select(shape, pattern, ())
    if kept is ABSENT:
        raise no_match(pattern, [join_name((key,)) for key in shape] if isinstance(shape, dict) else [])
    return map_leaves(kept, lambda leaf: None if leaf is ABSENT else leaf)


def select_each(shapes: Sequence[object], pattern: str) -> list[object]:
    """Apply :func:`select` to the shapes of several ranks, and leave out ranks without a match.

    Gaps in sequences become :data:`ABSENT`.

    Raises:
        InvalidInputError: no name matches.
    """
    if pattern == "*":
        return [*shapes]
    kept = [selected for shape in shapes if (selected := _select(shape, pattern, ())) is not ABSENT]
    return kept or [select(merge(shapes), pattern)]


def _select(shape: object, pattern: str, path: tuple[Key, ...]) -> object:
    if isinstance(shape, dict):
        kept = {
            key: value for key, item in shape.items() if (value := _select(item, pattern, (*path, key))) is not ABSENT
        }
        if not kept:
            return ABSENT
        return like_mapping(shape, kept)
    if isinstance(shape, TypedValue):
        content = _select(shape.content, pattern, path)
        if shape.kind in _DIVISIBLE:
            return ABSENT if content is ABSENT else dataclasses.replace(shape, content=content)
        # Values of the other types are only valid as a whole. A set or a range has a single name, that of the whole.
        return shape if content is not ABSENT or fnmatch.fnmatchcase(join_name(path), pattern) else ABSENT
    if type(shape) in (list, tuple):
        items = [_select(item, pattern, (*path, index)) for index, item in enumerate(shape)]  # type: ignore[arg-type, var-annotated]  # as above
        if all(item is ABSENT for item in items):
            return ABSENT
        return type(shape)(items)  # type: ignore[call-arg]  # as above
    return shape if fnmatch.fnmatchcase(join_name(path), pattern) else ABSENT
