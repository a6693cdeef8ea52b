"""The shape of a stored state: its containers and plain values, with placeholders where tensors go."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch

from asymcheck.errors import StateMismatchError
from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import Key, decode, join_name
from asymcheck.partition.dtypes import NUMPY_DTYPES, TORCH_DTYPES
from asymcheck.recovery.names import no_match

_T = TypeVar("_T")
_METADATA = "_metadata"
"""Where Module.state_dict() hangs the versions of its modules, and Module.load_state_dict() looks for them."""


def _metadata(mapping: object) -> object:
    return getattr(mapping, _METADATA, None)


def _set_metadata(mapping: OrderedDict[Key, object], metadata: object) -> None:
    setattr(mapping, _METADATA, metadata)


@dataclasses.dataclass(frozen=True)
class RowRef:
    """A placeholder for the tensor of a row."""

    row: int
    """Row of the manifest."""
    as_array: bool
    """Whether it was a numpy array."""


class _ShapeBuilder:
    """Builds containers of the original types, with a :class:`RowRef` for each tensor."""

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
        return RowRef(row, as_array)

    def tagged(self, kind: str, value: object) -> object:
        if kind == "z":
            return torch.Size(value)  # type: ignore[arg-type]  # the decoder passes a tuple of int
        if kind == "y":
            return _known(TORCH_DTYPES, str(value), "torch")
        if kind == "v":
            return _device(str(value))
        dtype, data = value  # type: ignore[misc]  # the decoder passes a pair
        return np.frombuffer(data, dtype=_known(NUMPY_DTYPES, dtype, "numpy"))[0]  # type: ignore[has-type]  # as above


def _known(dtypes: Mapping[str, _T], name: str, library: str) -> _T:
    if name not in dtypes:
        raise StateMismatchError(f"the state has a value of dtype {name}, which this {library} lacks")
    return dtypes[name]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StateMismatchError(f"the state has the device {name!r} as a value, which this torch lacks") from error
    if str(device) != name:
        # A large index wraps round.
        raise StateMismatchError(f"the state has the device {name!r} as a value, of which this torch makes {device}")
    return device


def read_shape(manifest: Manifest) -> object:
    """Return the state of a manifest with placeholders for its tensors.

    Raises:
        FormatError: the tree breaks a rule of the format.
        StateMismatchError: it has a value that this torch or numpy cannot make.
    """
    header = manifest.header
    where = f"manifest of {header.run} {header.ref}, rank {header.rank}"
    return decode(header.tree, len(manifest), _ShapeBuilder(), where)


def rows_in(shape: object) -> list[int]:
    """Return the rows that a (part of a) shape names, each once, in order."""
    rows: dict[int, None] = {}

    def note(ref: RowRef) -> object:
        rows[ref.row] = None
        return ref

    replace_rows(shape, note)
    return list(rows)


def replace_rows(shape: object, make: Callable[[RowRef], object]) -> object:
    """Return a copy of a shape with every placeholder replaced."""
    if isinstance(shape, RowRef):
        return make(shape)
    if isinstance(shape, OrderedDict):
        ordered = OrderedDict((key, replace_rows(value, make)) for key, value in shape.items())
        if _metadata(shape) is not None:
            _set_metadata(ordered, replace_rows(_metadata(shape), make))
        return ordered
    if isinstance(shape, dict):
        return {key: replace_rows(value, make) for key, value in shape.items()}
    if type(shape) in (list, tuple):
        return type(shape)(replace_rows(value, make) for value in shape)  # type: ignore[call-arg, attr-defined]  # the type was just compared
    return shape


def _array(tensor: torch.Tensor) -> object:
    try:
        return tensor.cpu().numpy()
    except (TypeError, ValueError) as error:
        shape = list(tensor.shape)
        raise StateMismatchError(f"the state has an array of {tensor.dtype} {shape}, which numpy lacks") from error


def with_tensors(shape: object, tensors: Mapping[int, torch.Tensor]) -> object:
    """Return the state: a shape with its tensors put in; tied tensors are one object."""
    arrays: dict[int, object] = {}

    def make(ref: RowRef) -> object:
        if not ref.as_array:
            return tensors[ref.row]
        return arrays.setdefault(ref.row, _array(tensors[ref.row]))

    return replace_rows(shape, make)


class _Absent:
    """Marks what a selection leaves out."""


_ABSENT = _Absent()


def select(shape: object, pattern: str) -> object:
    """Keep only leaves whose dotted name matches a glob; containers that end up empty are dropped.

    Gaps in sequences become None.

    Raises:
        InvalidInputError: no name matches.
    """
    if pattern == "*":
        return shape
    kept = _select(shape, pattern, ())
    if kept is _ABSENT:
        raise no_match(pattern, [join_name((key,)) for key in shape] if isinstance(shape, dict) else [])
    return kept


def _select(shape: object, pattern: str, path: tuple[Key, ...]) -> object:
    if isinstance(shape, dict):
        kept = {
            key: value for key, item in shape.items() if (value := _select(item, pattern, (*path, key))) is not _ABSENT
        }
        if not kept:
            return _ABSENT
        if not isinstance(shape, OrderedDict):
            return kept
        ordered = OrderedDict(kept)
        if _metadata(shape) is not None:
            _set_metadata(ordered, _metadata(shape))
        return ordered
    if type(shape) in (list, tuple):
        items = [_select(item, pattern, (*path, index)) for index, item in enumerate(shape)]  # type: ignore[arg-type, var-annotated]  # as above
        if all(item is _ABSENT for item in items):
            return _ABSENT
        return type(shape)(None if item is _ABSENT else item for item in items)  # type: ignore[call-arg]  # as above
    return shape if fnmatch.fnmatchcase(join_name(path), pattern) else _ABSENT
