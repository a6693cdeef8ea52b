"""Plain values of a state as texts by dotted name, so that those of two checkpoints can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import Key, decode, join_name
from asymcheck.state.names import told_apart
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES

_METADATA = "_metadata"
# Python refuses to write integers of more than 4300 digits in decimal.
_DECIMAL_BITS = 14_000
_SHOWN = 64

_Texts = list[tuple[tuple[Key, ...], str]]
"""The values in a part of a state, each with the path to it from there."""


class _TextBuilder:
    """Builds texts of values; unlike the state itself, they exist for values that this torch or numpy lacks."""

    def plain(self, value: object) -> _Texts:
        if type(value) is int and value.bit_length() > _DECIMAL_BITS:
            return _one(hex(value))
        return _one(repr(value))

    def sequence(self, kind: str, items: list[object]) -> _Texts:
        return _together("[]" if kind == "l" else "()", list(enumerate(items)))

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> _Texts:
        return _together("{}", [*pairs, *([(_METADATA, metadata)] if kind == "m" else [])])

    def tensor(self, row: int, as_array: bool) -> _Texts:  # noqa: ARG002, FBT001 - as in the protocol
        return []

    def tagged(self, kind: str, value: object) -> _Texts:
        if kind == "z":
            return _one(f"shape {list(value)}")  # type: ignore[call-overload]  # the decoder passes a tuple of int
        if kind == "y":
            return _one(f"dtype {value}")
        if kind == "v":
            return _one(f"device {value}")
        dtype, data = value  # type: ignore[misc]  # the decoder passes a pair
        known = NUMPY_DTYPES.get(dtype)  # type: ignore[has-type]  # as above
        number = data.hex() if known is None else np.frombuffer(data, dtype=known)[0].item()  # type: ignore[has-type]  # as above
        return _one(f"{dtype} {number!r}")  # type: ignore[has-type]  # as above


def _one(text: str) -> _Texts:
    return [((), text)]


def _together(empty: str, items: Sequence[tuple[Key, object]]) -> _Texts:
    """Return the values of a container, whose items the builder has made, or the text of an ``empty`` one."""
    if not items:
        return _one(empty)
    return [((key, *path), text) for key, texts in items for path, text in cast("_Texts", texts)]


def plain_values(manifest: Manifest) -> dict[str, str]:
    """Return the text of every plain value of a manifest by its dotted name; empty containers are values, too.

    Raises:
        FormatError: the tree breaks a rule of the format.
    """
    header = manifest.header
    where = f"manifest of {header.run} {header.ref}, rank {header.rank}"
    taken: dict[str, int] = {}
    found = cast("_Texts", decode(header.tree, len(manifest), _TextBuilder(), where))
    return {told_apart(join_name(path), taken): text for path, text in found}


def shortened(text: str | None) -> str | None:
    """Return the text of a value, without its middle when it is long."""
    if text is None or len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]} … {text[-half:]} ({len(text)} characters)"
