"""Format the plain values of a state as text, by dotted name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import Key, decode, join_name
from asymcheck.state.names import unique_name
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES

_METADATA = "_metadata"
# Python refuses to format integers of more than 4,300 decimal digits.
_DECIMAL_BITS = 14_000
_SHOWN = 64
_ONE_TEXT = {"set", "frozenset", "path", "pure-path", "date", "time", "datetime", "timedelta", "range", "slice"}
"""Types of typed values that are shown as one value."""

_Texts = list[tuple[tuple[Key, ...], str]]
"""Texts of the values in a subtree, each with its path in the subtree."""


class _TextBuilder:
    """Builds texts of values, including values of types that the installed torch or numpy lacks."""

    def plain(self, value: object) -> _Texts:
        if type(value) is int and value.bit_length() > _DECIMAL_BITS:
            return _leaf(hex(value))
        return _leaf(repr(value))

    def sequence(self, kind: str, items: list[object]) -> _Texts:
        return _join("[]" if kind == "l" else "()", list(enumerate(items)))

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> _Texts:
        return _join("{}", [*pairs, *([(_METADATA, metadata)] if kind == "m" else [])])

    def tensor(self, row: int, as_array: bool) -> _Texts:  # noqa: ARG002, FBT001 - as in the protocol
        return []

    def tagged(self, kind: str, value: object) -> _Texts:
        if kind == "z":
            return _leaf(f"shape {list(value)}")  # type: ignore[call-overload]  # the decoder passes a tuple of int
        if kind == "y":
            return _leaf(f"dtype {value}")
        if kind == "v":
            return _leaf(f"device {value}")
        dtype, data = value  # type: ignore[misc]  # the decoder passes a pair
        numpy_dtype = NUMPY_DTYPES.get(dtype)  # type: ignore[has-type]  # as above
        number = data.hex() if numpy_dtype is None else np.frombuffer(data, dtype=numpy_dtype)[0].item()  # type: ignore[has-type]  # as above
        return _leaf(f"{dtype} {number!r}")  # type: ignore[has-type]  # as above

    def typed(self, kind: str, parameter: str | int | None, content: object) -> _Texts:
        texts = cast("_Texts", content)
        if kind == "enum" and len(texts) == 1 and not texts[0][0]:
            return _leaf(f"{parameter} ({texts[0][1]})")
        if kind not in _ONE_TEXT:
            return texts
        # The content of an empty set is an empty tuple.
        return _leaf(f"{kind}({', '.join(text for _, text in texts if text != '()')})")


def _leaf(text: str) -> _Texts:
    return [((), text)]


def _join(empty: str, items: Sequence[tuple[Key, object]]) -> _Texts:
    """Join the texts of the items of a container, or return the text of an ``empty`` one."""
    if not items:
        return _leaf(empty)
    return [((key, *path), text) for key, texts in items for path, text in cast("_Texts", texts)]


def plain_values(manifest: Manifest) -> dict[str, str]:
    """Return the texts of all plain values of a manifest by dotted name. Empty containers are values, too.

    Raises:
        FormatError: the tree breaks a rule of the format.
    """
    header = manifest.header
    where = f"manifest of run {header.run}, {header.ref}, rank {header.rank}"
    taken: dict[str, int] = {}
    texts = cast("_Texts", decode(header.tree, len(manifest), _TextBuilder(), where))
    return {unique_name(join_name(path), taken): text for path, text in texts}


def shortened(text: str | None) -> str | None:
    """Return the text of a value. Replace the middle of a long text with an ellipsis."""
    if text is None or len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]} … {text[-half:]} ({len(text)} characters)"
