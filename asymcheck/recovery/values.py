"""Plain values of a state as texts by dotted name, so that those of two checkpoints can be compared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import Key, decode, join_name
from asymcheck.partition.numpy_dtypes import NUMPY_DTYPES
from asymcheck.recovery.names import told_apart

_METADATA = "_metadata"
# Python refuses to write integers of more than 4300 digits in decimal.
_DECIMAL_BITS = 14_000
_SHOWN = 64


class _Tensor:
    """Marks where a tensor goes."""


class _Named(str):
    """The text of a value, ready to be shown."""

    __slots__ = ()


class _Items:
    """A container with its items by key."""

    def __init__(self, empty: str, items: list[tuple[Key, object]]) -> None:
        self.empty = empty
        self.items = items


class _TextBuilder:
    """Builds containers of texts; unlike the state itself, they exist for values that this torch or numpy lacks."""

    def plain(self, value: object) -> object:
        if type(value) is int and value.bit_length() > _DECIMAL_BITS:
            return _Named(hex(value))
        return _Named(repr(value))

    def sequence(self, kind: str, items: list[object]) -> object:
        return _Items("[]" if kind == "l" else "()", list(enumerate(items)))

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> object:
        return _Items("{}", [*pairs, *([(_METADATA, metadata)] if kind == "m" else [])])

    def tensor(self, row: int, as_array: bool) -> object:  # noqa: ARG002, FBT001 - as in the protocol
        return _Tensor()

    def tagged(self, kind: str, value: object) -> object:
        if kind == "z":
            return _Named(f"shape {list(value)}")  # type: ignore[call-overload]  # the decoder passes a tuple of int
        if kind == "y":
            return _Named(f"dtype {value}")
        if kind == "v":
            return _Named(f"device {value}")
        dtype, data = value  # type: ignore[misc]  # the decoder passes a pair
        known = NUMPY_DTYPES.get(dtype)  # type: ignore[has-type]  # as above
        number = data.hex() if known is None else np.frombuffer(data, dtype=known)[0].item()  # type: ignore[has-type]  # as above
        return _Named(f"{dtype} {number!r}")  # type: ignore[has-type]  # as above


def plain_values(manifest: Manifest) -> dict[str, str]:
    """Return the text of every plain value of a manifest by its dotted name; empty containers are values, too.

    Raises:
        FormatError: the tree breaks a rule of the format.
    """
    header = manifest.header
    where = f"manifest of {header.run} {header.ref}, rank {header.rank}"
    taken: dict[str, int] = {}
    found = _walk(decode(header.tree, len(manifest), _TextBuilder(), where), ())
    return {told_apart(name, taken): text for name, text in found}


def _walk(value: object, path: tuple[Key, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Items) and value.items:
        for key, item in value.items:
            yield from _walk(item, (*path, key))
    elif isinstance(value, _Items):
        yield join_name(path), value.empty
    elif isinstance(value, _Named):
        yield join_name(path), str(value)


def shortened(text: str | None) -> str | None:
    """Return the text of a value, without its middle when it is long."""
    if text is None or len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]} … {text[-half:]} ({len(text)} characters)"
