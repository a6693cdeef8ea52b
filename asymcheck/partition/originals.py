"""Originals: which partitions may be rounded copies of others, as bfloat16 weights are of their float32 masters.

Pure, and only a guess, from dtypes and shapes: whether they are is for who has the bytes to find out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from asymcheck.partition.plan import Partition

ROUNDED = ("bfloat16", "float16")
"""The dtypes of copies."""


class Originals:
    """The candidates of one plan."""

    def __init__(
        self, partitions: Sequence[Partition], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """Look at the partitions of a plan; ``dtypes`` and ``shapes`` are those of the tensors, by row."""
        alone = {
            number: partition.pieces[0] for number, partition in enumerate(partitions) if len(partition.pieces) == 1
        }
        masters: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, piece in alone.items():
            if dtypes[piece.row] == "float32":
                masters[shapes[piece.row]][piece.row].append(number)
        self._found: dict[int, list[tuple[int, int]]] = {}
        for number, piece in alone.items():
            if dtypes[piece.row] in ROUNDED:
                start, end = 2 * piece.start, 2 * (piece.start + piece.length)
                self._found[number] = [
                    (other, start - alone[other].start)
                    for others in masters.get(shapes[piece.row], {}).values()
                    for other in others
                    if alone[other].start <= start and end <= alone[other].start + alone[other].length
                ]

    def candidates(self, number: int) -> Sequence[tuple[int, int]]:
        """Return, for a partition by number, others with the byte in each at which its original would begin."""
        return self._found.get(number, ())
