"""Check typed values of a tree: values of the standard library, torch and numpy (SPEC.md §A9)."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable
from typing import Any, Final

from asymcheck.format.record import canonical_json
from asymcheck.format.registry import VALUE_TYPES

FACTORIES: Final = ("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
BIT_GENERATORS: Final = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
MAXLEN_MAX: Final = (1 << 53) - 1

SETS: Final = ("set", "frozenset")

_FLAVOURS = ("posix", "windows")
_HASHABLE_LEAVES = frozenset("ifcbznyv")
_HASHABLE_TYPES = frozenset({"frozenset", "path", "pure-path", "date", "time", "datetime", "timedelta", "range"})
_DAYS_MAX = 999_999_999
_DAY_SECONDS = 86_400
_SECOND_US = 1_000_000


def in_order(items: list[Any]) -> list[Any]:
    """Return the nodes of a set's items in the order in which a tree stores them."""
    return sorted(items, key=canonical_json)


def is_item(node: object) -> bool:
    """Tell whether a node is hashable in Python, so that a set can contain its value."""
    if not isinstance(node, list):
        return True
    tag, content = node[0], node[-1]
    if tag == "t":
        return all(map(is_item, content))
    if tag == "x" and node[1] == "enum":
        return is_item(content)
    return tag in _HASHABLE_LEAVES or (tag == "x" and node[1] in _HASHABLE_TYPES)


def is_typed_value(kind: str, parameter: object, node: object) -> bool:
    """Tell whether parameter and content fit a type. The nodes inside the content were checked before."""
    form = VALUE_TYPES[kind]
    if form == "node":
        return _RULES[kind](parameter, node)
    if form == "string":
        return isinstance(node, str) and _RULES[kind](parameter, node)
    return isinstance(node, list) and node[0] == form and _RULES[kind](parameter, node[1])


def _is_integer(node: object) -> bool:
    return type(node) is int or (isinstance(node, list) and node[0] == "i")


def _is_set(parameter: object, items: list[object]) -> bool:
    if parameter is not None or not all(map(is_item, items)):
        return False
    texts = [canonical_json(item) for item in items]
    return all(first < second for first, second in itertools.pairwise(texts))


def _has_fields(parameter: object, pairs: list[list[object]]) -> bool:
    return isinstance(parameter, str) and all(isinstance(key, str) for key, _ in pairs)


def _is_fold(parameter: object) -> bool:
    return parameter is None or (type(parameter) is int and parameter == 1)


def _is_iso(kind: Any, text: str) -> bool:  # noqa: ANN401 - a class of datetime
    try:
        return bool(kind.fromisoformat(text).isoformat() == text)
    except ValueError:
        return False


def _is_timedelta(parameter: object, items: list[Any]) -> bool:
    if parameter is not None or [*map(type, items)] != [int] * 3:
        return False
    days, seconds, microseconds = items
    return bool(abs(days) <= _DAYS_MAX and 0 <= seconds < _DAY_SECONDS and 0 <= microseconds < _SECOND_US)


def _are_three(parameter: object, items: list[object], *, may_be_none: bool) -> bool:
    """Tell whether items are three integers: start, stop and step."""
    are_integers = all(_is_integer(item) or (may_be_none and item is None) for item in items)
    return parameter is None and len(items) == 3 and are_integers  # noqa: PLR2004 - as above


def _is_random(parameter: object, items: list[Any]) -> bool:
    if parameter is not None or len(items) != 3:  # noqa: PLR2004 - version, words, gauss
        return False
    version, words, gauss = items
    is_float = isinstance(gauss, list) and gauss[0] == "f"
    return type(version) is int and isinstance(words, list) and words[0] == "N" and (gauss is None or is_float)


def _is_nested(parameter: object, items: list[object]) -> bool:
    counts: dict[object, bool] = {"jagged": len(items) in (2, 3), "strided": bool(items)}
    are_rows = all(isinstance(item, list) and item[0] == "T" for item in items)
    return isinstance(parameter, str) and counts.get(parameter, False) and are_rows


_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "defaultdict": lambda parameter, _pairs: parameter is None or parameter in FACTORIES,
    "deque": lambda parameter, items: (
        parameter is None or (type(parameter) is int and len(items) <= parameter <= MAXLEN_MAX)
    ),
    "set": _is_set,
    "frozenset": _is_set,
    "namedtuple": _has_fields,
    "dataclass": _has_fields,
    "enum": lambda parameter, _node: isinstance(parameter, str),
    "path": lambda parameter, _text: parameter in _FLAVOURS,
    "pure-path": lambda parameter, _text: parameter in _FLAVOURS,
    "date": lambda parameter, text: parameter is None and _is_iso(dt.date, text),
    "time": lambda parameter, text: _is_fold(parameter) and _is_iso(dt.time, text),
    "datetime": lambda parameter, text: _is_fold(parameter) and _is_iso(dt.datetime, text),
    "timedelta": _is_timedelta,
    "range": lambda parameter, items: _are_three(parameter, items, may_be_none=False) and items[2] != 0,
    "slice": lambda parameter, items: _are_three(parameter, items, may_be_none=True),
    "torch-generator": lambda parameter, _row: parameter == "cpu",
    "device-generator": lambda parameter, _row: parameter == "cuda",
    "nested-tensor": _is_nested,
    "numpy-generator": lambda parameter, _pairs: parameter in BIT_GENERATORS,
    "python-random": _is_random,
}
