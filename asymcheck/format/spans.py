"""Spans: sets of ranks as first and last of each stretch, as manifests say them (SPEC.md §7.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Spans = tuple[tuple[int, int], ...]
"""First and last rank of each stretch, in order, with a gap between two."""


def spans_of(ranks: Iterable[int]) -> Spans:
    """Return the stretches of some ranks."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank <= spans[-1][1] + 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    return tuple(spans)


def ranks_in(spans: Spans) -> list[int]:
    """Return the ranks of some stretches, in order."""
    return [rank for first, last in spans for rank in range(first, last + 1)]


def read_spans(value: object, rank: object, world_size: object) -> Spans:
    """Return what a manifest of ``rank`` says.

    Raises:
        TypeError, ValueError: the value says no such thing.
    """
    if not isinstance(value, list) or type(rank) is not int or type(world_size) is not int:
        raise TypeError(f"store_ranks {value!r:.100}")
    spans = tuple((first, last) for first, last in value)
    if any(type(number) is not int for span in spans for number in span):
        raise TypeError(f"store_ranks {value!r:.100}")
    is_ordered = all(first <= last for first, last in spans) and all(
        first > last + 1 for (_, last), (first, _) in itertools.pairwise(spans)
    )
    if not is_ordered or not any(first <= rank <= last for first, last in spans):
        raise ValueError(f"store_ranks {value!r:.100}")
    if spans[0][0] < 0 or spans[-1][1] >= world_size:
        raise ValueError(f"store_ranks {value!r:.100}")
    return spans


def named_spans(spans: Spans) -> str:
    """Return them for people, for instance ``0-3, 8``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
