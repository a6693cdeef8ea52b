"""Dotted names: the order in which they are shown, and what to say of a glob that matches none."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from asymcheck.errors import InvalidInputError

_SHOWN = 8
_NUMBER = re.compile(r" \([0-9]+\)\Z")
_DIGITS = re.compile(r"([0-9]{1,18})", re.ASCII)


def in_order(name: str) -> list[tuple[int, int, str]]:
    """Return what to sort a name by, so that layer 10 comes after layer 9."""
    return [(0, int(piece), "") if place % 2 else (1, 0, piece) for place, piece in enumerate(_DIGITS.split(name))]


def told_apart(name: str, taken: dict[str, int]) -> str:
    """Return a name, with a number behind it when it is taken, and take it.

    Several of one state may have the same dotted name, such as ``{"a.b": …, "a": {"b": …}}`` or keys ``1`` and ``"1"``.
    """
    found, number = name, taken.get(name, 0) + 1
    while found in taken:
        found = f"{name} ({number})"
        number += 1
    taken[name] = max(number - 1, 1)
    taken.setdefault(found, 1)
    return found


def as_stored(name: str) -> str:
    """Return a name as it was before :func:`told_apart`."""
    return _NUMBER.sub("", name)


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Tell whether a glob matches a name, as it is shown or as it is stored."""
    return any(fnmatch.fnmatchcase(one, pattern) for name in names for one in (name, as_stored(name)))


def no_match(
    pattern: str, names: Iterable[str], where: str = "the checkpoint", have: str = "it has"
) -> InvalidInputError:
    """Return the error for a glob that matches no name; ``names`` are those that there are, or their first parts."""
    tops = list(dict.fromkeys(name.split(".", 1)[0] for name in names))
    listed = ", ".join(tops[:_SHOWN]) + (" …" if len(tops) > _SHOWN else "")
    advice = f"; {have} {listed} (try '{tops[0]}*')" if tops else ""
    return InvalidInputError(f"tensors={pattern!r} matches no name in {where}{advice}")
