"""Originals: which partitions may be rounded copies of others, as bfloat16 weights are of their float32 masters.

Pure, and only a guess, from dtypes and shapes: whether they are is for who has the bytes to find out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

from asymcheck.partition.plan import Partition

ROUNDED = ("bfloat16", "float16")
"""The dtypes of copies."""


class Originals:
    """The candidates of one plan. Made in no time; each look for candidates goes over the masters of a shape."""

    def __init__(
        self, partitions: Sequence[Partition], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Look at the partitions of a plan; ``dtypes`` and ``shapes`` are those of the tensors, by row."""
        self._dtypes, self._shapes = dtypes, shapes
        self._alone = {
            number: partition.pieces[0] for number, partition in enumerate(partitions) if len(partition.pieces) == 1
        }
        # By shape and row: where each of its partitions begins, in order, and which number that has.
        self._masters: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]] = {}
        for number, piece in self._alone.items():
            if dtypes[piece.row] == "float32":
                rows = self._masters.setdefault(shapes[piece.row], {})
                rows.setdefault(piece.row, []).append((piece.start, number))
        for rows in self._masters.values():
            for starts in rows.values():
                starts.sort()

    def candidates(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield, for a partition by number, others with the byte in each at which its original would begin."""
        piece = self._alone.get(number)
        if piece is None or self._dtypes[piece.row] not in ROUNDED:
            return
        start, end = 2 * piece.start, 2 * (piece.start + piece.length)
        for starts in self._masters.get(self._shapes[piece.row], {}).values():
            at = bisect_right(starts, start, key=itemgetter(0)) - 1
            if at >= 0:
                other = starts[at][1]
                master = self._alone[other]
                if end <= master.start + master.length:
                    yield other, start - master.start
