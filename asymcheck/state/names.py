"""Dotted names of tensors: sort order, unique names, globs, and the role in training."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Container, Iterable

from asymcheck.errors import InvalidInputError, listed

_COMPARED_NAMES = 64
_LISTED_NAMES = 8
_NUMBER = re.compile(r" \([0-9]+\)\Z")
_DIGITS = re.compile(r"([0-9]{1,18})", re.ASCII)
_BY_LAST_PART = {
    "exp_avg": "first_moment",
    "momentum_buffer": "first_moment",
    "exp_avg_sq": "second_moment",
    "max_exp_avg_sq": "second_moment",
    "square_avg": "second_moment",
    "grad": "gradient",
    "master": "weights",
    "master_param": "weights",
    "weight": "weights",
    "bias": "weights",
}
_BY_FIRST_PART = {"model": "weights", "module": "weights", "ema": "weights", "rng": "rng"}


def role_of(name: str) -> str:
    """Return the role of a tensor: by the last part of its dotted name, else by the first, else ``other``."""
    parts = name.split(".")
    return _BY_LAST_PART.get(parts[-1]) or _BY_FIRST_PART.get(parts[0], "other")


def in_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key in which layer 10 comes after layer 9."""
    return [(0, int(piece), "") if place % 2 else (1, 0, piece) for place, piece in enumerate(_DIGITS.split(name))]


def unique_name(name: str, taken: dict[str, int]) -> str:
    """Return a unique name, with a number if the name is taken, and add it to ``taken``.

    Tensors of one state may have the same dotted name: ``{"a.b": …, "a": {"b": …}}``, or keys ``1`` and ``"1"``.
    """
    unique, number = name, taken.get(name, 0) + 1
    while unique in taken:
        unique = f"{name} ({number})"
        number += 1
    taken[name] = max(number - 1, 1)
    taken.setdefault(unique, 1)
    return unique


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Tell whether a glob matches a name from :func:`unique_name`, or the stored name without a number."""
    return any(fnmatch.fnmatchcase(form, pattern) for name in names for form in (name, _NUMBER.sub("", name)))


def did_you_mean(key: object, stored: Iterable[object], given: Container[object]) -> str:
    """Return the end of an error about a missing key: a similar stored key that is not given itself, or the others."""
    absent = (other for other in stored if isinstance(other, str) and other not in given)
    # Each of many keys may be missing. Comparing many names with many takes long, and such a state is of another model.
    others = list(itertools.islice(absent, _COMPARED_NAMES + 1))
    close = difflib.get_close_matches(key, others, 1) if isinstance(key, str) and len(others) <= _COMPARED_NAMES else []
    if close:
        return f"; did you mean {close[0]!r}, which is stored?"
    return f"; stored are {listed(others)}" if 0 < len(others) <= _LISTED_NAMES else ""


def no_match(
    pattern: str, names: Iterable[str], where: str = "the checkpoint", have: str = "it has"
) -> InvalidInputError:
    """Return the error for a glob that matches no name; ``names`` are the existing names or their first parts."""
    tops = list(dict.fromkeys(name.split(".", 1)[0] for name in names))
    advice = f"; {have} {listed(tops)} (try '{tops[0]}*')" if tops else ""
    return InvalidInputError(f"tensors={pattern!r} matches no name in {where}{advice}")
