"""Encode and decode the tree of a manifest: the structure and plain values of a state as JSON (SPEC.md §A9)."""

from __future__ import annotations

import base64
import binascii
import math
import re
import reprlib
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Protocol, TypeVar, cast

from asymcheck.errors import LimitError, StructureError, UnsupportedFeatureError
from asymcheck.format import registry
from asymcheck.format.typed_value import SETS, is_typed_value

Node = object
"""A JSON value of the table of nodes in SPEC.md §A9."""

Key = str | int

_EXACT_INTEGER = 1 << 53
_BIG_INTEGER = re.compile(r"-?[1-9][0-9]*\Z", re.ASCII)
_SIZE_END = 1 << 63
_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_T_co = TypeVar("_T_co", covariant=True)


class TreeBuilder(Protocol[_T_co]):
    """Builds values from nodes. :func:`decode` calls the methods bottom-up."""

    def plain(self, value: object) -> _T_co:
        """Build a None, bool, int, float, complex, str or bytes."""

    def sequence(self, kind: str, items: list[object]) -> _T_co:
        """Build a list (``l``) or a tuple (``t``)."""

    def mapping(self, kind: str, pairs: list[tuple[Key, object]], metadata: object) -> _T_co:
        """Build a mapping (``d``), an ordered mapping (``o``) or a module's state (``m``, with version metadata)."""

    def tensor(self, row: int, as_array: bool) -> _T_co:  # noqa: FBT001 - a protocol method, called by position in one place
        """Build the tensor of a row, or a numpy array."""

    def tagged(self, kind: str, value: object) -> _T_co:
        """Build a value of torch or numpy.

        The values are a tensor shape (``z``) from a tuple of int, a numpy scalar (``n``) from its dtype and bytes, and
        a dtype (``y``) or a device (``v``) from its name.
        """

    def typed(self, kind: str, parameter: str | int | None, content: object) -> _T_co:
        """Build a typed value (``x``) from its type, its parameter and its content."""


def encode_plain(value: object) -> Node:
    """Return the node of a None, bool, int, float, complex, str or bytes.

    Raises:
        StructureError: the type is another one, or a string has lone surrogates.
        LimitError: an integer has too many digits.
    """
    if value is None or isinstance(value, bool):
        return value
    if type(value) is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise StructureError("cannot encode a string with lone surrogates as UTF-8") from error
        return value
    if type(value) is int:
        return encode_integer(value)
    if type(value) is float:
        return ["f", _float_hex(value)]
    if type(value) is complex:
        return ["c", _float_hex(value.real), _float_hex(value.imag)]
    if type(value) is bytes:
        return ["b", base64.b64encode(value).decode("ascii")]
    raise StructureError(f"values of type {type(value).__qualname__} cannot be stored")


def encode_integer(value: int) -> Node:
    """Return the node of an integer; raise LimitError if it has too many digits."""
    if -_EXACT_INTEGER < value < _EXACT_INTEGER:
        return value
    # A decimal digit has less than four bits. Refuse far too large integers before the slow conversion to decimal, for
    # which Python limits str() to 4,300 digits.
    text = str(Decimal(value)) if value.bit_length() <= 4 * registry.INTEGER_DIGITS_MAX else None
    if text is None or len(text.removeprefix("-")) > registry.INTEGER_DIGITS_MAX:
        raise LimitError(f"integer of more than {registry.INTEGER_DIGITS_MAX} digits: convert it with int.to_bytes")
    return ["i", text]


def encode_metric(value: float) -> object:
    """Return the JSON form of a metric: a number, or the name of a non-finite value."""
    return value if math.isfinite(value) else _NON_FINITE[str(value)]


def decode_metric(value: object, where: str) -> float:
    """Read the JSON form of a metric."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if value in _NON_FINITE.values():
        return float(str(value))
    raise StructureError(f"{where}: metric {value!r} is not a number")


def decode(node: Node, rows: int, build: TreeBuilder[object], where: str) -> object:
    """Check a tree and build a value from it. The tree must name each of ``rows`` rows at least once."""
    seen = bytearray(rows)
    value = _Decoder(rows, seen, build, where).value(node, 1)
    if not all(seen):
        raise StructureError(f"{where}: row {seen.index(0)} of the manifest is not in the tree")
    return value


def check(node: Node, rows: int, where: str) -> None:
    """Check a tree without building values."""
    decode(node, rows, _NullBuilder(), where)


class _NullBuilder:
    def plain(self, *_: object, **__: object) -> None: ...

    sequence = mapping = tensor = tagged = typed = plain


class _Decoder:
    def __init__(self, rows: int, seen: bytearray, build: TreeBuilder[object], where: str) -> None:
        self.rows, self.seen, self.build, self.where = rows, seen, build, where
        self.kinds: dict[object, tuple[int, Callable[[list[object], int], object]]] = {
            "i": (1, lambda node, _depth: build.plain(self._big_integer(node))),
            "f": (1, lambda node, _depth: build.plain(self._binary64(node[1]))),
            "c": (2, lambda node, _depth: build.plain(complex(self._binary64(node[1]), self._binary64(node[2])))),
            "b": (1, lambda node, _depth: build.plain(self._bytes(node))),
            "l": (1, self._sequence),
            "t": (1, self._sequence),
            "z": (1, self._shape),
            "d": (1, self._mapping),
            "o": (1, self._mapping),
            "m": (2, self._mapping),
            "T": (1, self._row),
            "N": (1, self._row),
            "n": (2, self._scalar),
            "y": (1, self._name),
            "v": (1, self._name),
            "x": (3, self._typed),
        }

    def value(self, node: Node, depth: int) -> object:
        if depth > registry.TREE_DEPTH_MAX:
            raise LimitError(f"{self.where}: tree is deeper than {registry.TREE_DEPTH_MAX}")
        if node is None or isinstance(node, (bool, str)):
            return self.build.plain(node)
        if isinstance(node, int):
            if abs(node) >= _EXACT_INTEGER:
                raise self.bad(node)
            return self.build.plain(node)
        if not isinstance(node, list) or not node or not isinstance(node[0], str) or node[0] not in self.kinds:
            raise self.bad(node)
        count, make = self.kinds[node[0]]
        if len(node) != count + 1:
            raise self.bad(node)
        return make(node, depth)

    def bad(self, node: Node) -> StructureError:
        return StructureError(f"{self.where}: not a node of the tree: {reprlib.repr(node)[:80]}")

    def _big_integer(self, node: list[object]) -> int:
        text = node[1] if _is_pair(node) else None
        if not isinstance(text, str):
            raise self.bad(node)
        digits = text.removeprefix("-")
        if len(digits) > registry.INTEGER_DIGITS_MAX:
            raise LimitError(
                f"{self.where}: integer of {len(digits)} digits exceeds {registry.INTEGER_DIGITS_MAX} digits"
            )
        if not _BIG_INTEGER.match(text):
            raise self.bad(node)
        number = _natural(digits)
        if number < _EXACT_INTEGER:
            raise self.bad(node)
        return -number if text.startswith("-") else number

    def _binary64(self, bits: object) -> float:
        value: float = struct.unpack(">d", self._hex(bits, 8))[0]
        return value

    def _hex(self, text: object, size: int) -> bytes:
        if isinstance(text, str) and len(text) == 2 * size and text == text.lower():
            try:
                return binascii.unhexlify(text)
            except (binascii.Error, ValueError):
                pass
        raise self.bad(text)

    def _bytes(self, node: list[object]) -> bytes:
        text = node[1]
        if not isinstance(text, str):
            raise self.bad(node)
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.bad(node) from error
        if base64.b64encode(data) != text.encode():
            # Unused bits are set, so that two texts would encode the same bytes.
            raise self.bad(node)
        return data

    def _sequence(self, node: list[object], depth: int) -> object:
        items = node[1]
        if not isinstance(items, list):
            raise self.bad(node)
        return self.build.sequence(str(node[0]), [self.value(item, depth + 1) for item in items])

    def _shape(self, node: list[object], _depth: int) -> object:
        items = node[1]
        if not isinstance(items, list):
            raise self.bad(node)
        shape = tuple(self._integer(item) for item in items)
        if any(not -_SIZE_END <= item < _SIZE_END for item in shape):
            raise self.bad(node)
        return self.build.tagged("z", shape)

    def _mapping(self, node: list[object], depth: int) -> object:
        _, pairs, *metadata = node
        if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            raise self.bad(node)
        items = [(self._key(key), self.value(value, depth + 1)) for key, value in pairs]
        if len({key for key, _ in items}) != len(items):
            raise StructureError(f"{self.where}: mapping of the tree has a key twice")
        return self.build.mapping(str(node[0]), items, self.value(metadata[0], depth + 1) if metadata else None)

    def _key(self, key: object) -> Key:
        return key if isinstance(key, str) else self._integer(key)

    def _integer(self, node: object) -> int:
        if isinstance(node, int) and not isinstance(node, bool) and abs(node) < _EXACT_INTEGER:
            return node
        if isinstance(node, list) and node[:1] == ["i"]:
            return self._big_integer(node)
        raise self.bad(node)

    def _row(self, node: list[object], _depth: int) -> object:
        row = node[1]
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < self.rows:
            raise StructureError(f"{self.where}: the tree names row {row} of {self.rows}")
        self.seen[row] = 1
        return self.build.tensor(row, node[0] == "N")

    def _scalar(self, node: list[object], _depth: int) -> object:
        _, dtype, data = node
        if not isinstance(dtype, str) or dtype not in registry.DTYPE_BYTES:
            raise self.bad(node)
        return self.build.tagged("n", (dtype, self._hex(data, registry.DTYPE_BYTES[dtype])))

    def _name(self, node: list[object], _depth: int) -> object:
        name = node[1]
        if not isinstance(name, str) or (node[0] == "y" and name not in registry.DTYPE_BYTES):
            raise self.bad(node)
        return self.build.tagged(str(node[0]), name)

    def _typed(self, node: list[object], depth: int) -> object:
        _, kind, parameter, content = node
        if not isinstance(kind, str):
            raise self.bad(node)
        if kind not in registry.VALUE_TYPES:
            raise UnsupportedFeatureError(
                f"{self.where}: the tree has a value of unknown type {kind[:80]!r}: install a newer asymcheck"
            )
        value = self.value(content, depth + 1)
        if not is_typed_value(kind, parameter, content):
            raise self.bad(node)
        return self.build.typed(kind, cast("str | int | None", parameter), value)


def value_features(node: Node, *, in_set: bool = False) -> set[str]:
    """Return the reader features of a manifest with this tree. ``in_set``: the node belongs to an item of a set."""
    if not isinstance(node, list) or not node:
        return set()
    tag, *parts = node
    found: set[str] = set()
    children: list[Any] = []
    if tag in ("l", "t"):
        children = parts[0]
    elif tag in ("d", "o", "m"):
        children = [*(value for _, value in parts[0]), *parts[1:]]
    elif tag == "x":
        found = {registry.TYPED_VALUE, *({parts[0]} & registry.READER_FEATURES)}
        if in_set and parts[0] == "enum":
            found.add(registry.ENUM_ITEM)
        children, in_set = [parts[2]], in_set or parts[0] in SETS
    return found.union(*(value_features(child, in_set=in_set) for child in children))


def join_name(path: Sequence[Key]) -> str:
    """Return the dotted name of a leaf."""
    return ".".join(str(Decimal(key)) if isinstance(key, int) else key for key in path)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2  # noqa: PLR2004 - a pair has two members


def _float_hex(value: float) -> str:
    return struct.pack(">d", value).hex()


_DIGITS = 4000
"""Python refuses to convert integers of more than 4,300 digits at once, because that takes quadratic time."""


def _natural(digits: str) -> int:
    if len(digits) <= _DIGITS:
        return int(digits)
    # Python multiplies large integers in less than quadratic time, so convert the digits in halves.
    low = len(digits) // 2
    power: int = 10**low
    return _natural(digits[:-low]) * power + _natural(digits[-low:])
