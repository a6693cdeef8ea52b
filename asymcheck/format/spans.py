"""Convert sets of ranks to and from inclusive ranges, as in ``store_ranks`` of a manifest (SPEC.md §A8)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from asymcheck.errors import StructureError

Spans = tuple[tuple[int, int], ...]
"""First and last rank of each range, in order, with a gap between two ranges."""


def spans_of(ranks: Iterable[int]) -> Spans:
    """Return ranks as ranges."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank <= spans[-1][1] + 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    return tuple(spans)


def ranks_in(spans: Spans) -> list[int]:
    """Return the ranks in ranges, in order."""
    return [rank for first, last in spans for rank in range(first, last + 1)]


def first_of(spans: Spans | None) -> int:
    """Return the first rank in ranges; None stands for all ranks."""
    return spans[0][0] if spans else 0


def read_spans(header: Mapping[str, object], where: str) -> Spans | None:
    """Return the ``store_ranks`` of a manifest header, or None if the header has none."""
    if "store_ranks" not in header:
        return None
    value, rank, world_size = header["store_ranks"], header["rank"], header["world_size"]
    pairs = value if isinstance(value, list) else []
    spans = [tuple(pair) for pair in pairs if isinstance(pair, list) and [type(item) for item in pair] == [int, int]]
    if (
        not spans
        or len(spans) < len(pairs)
        or type(rank) is not int
        or type(world_size) is not int
        or not all(first <= last for first, last in spans)
        or not all(left[1] + 1 < right[0] for left, right in itertools.pairwise(spans))
        or not 0 <= spans[0][0] <= spans[-1][1] < world_size
        or not any(first <= rank <= last for first, last in spans)
    ):
        raise StructureError(f"{where}: store_ranks {value!r:.100} are no ranges below {world_size} with rank {rank}")
    return tuple((first, last) for first, last in spans)


def shown_spans(spans: Spans) -> str:
    """Return ranges as text, for example ``0-3, 8``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def named_spans(spans: Spans) -> str:
    """Return ranges of ranks as text, for example ``ranks 0-3, 8``."""
    return f"{'rank' if len(ranks_in(spans)) == 1 else 'ranks'} {shown_spans(spans)}"
