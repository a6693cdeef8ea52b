"""The canonical cut: which byte ranges of which tensors form a partition.

Pure, and a function of names, sizes and groups alone.

So an unchanged tensor gets the same partitions at every step, and its bytes are stored once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asymcheck.config import StoreConfig
from asymcheck.format.registry import BLOCK_BYTES, INLINE_BYTES_MAX


@dataclasses.dataclass(frozen=True)
class Piece:
    """A byte range of one tensor."""

    row: int
    """Row number of the tensor."""
    start: int
    """First byte in the tensor."""
    length: int
    """Bytes."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """Pieces that are stored as one unit, in order."""

    pieces: tuple[Piece, ...]
    """At least one piece."""

    @property
    def length(self) -> int:
        """Plain bytes."""
        return sum(piece.length for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a whole state is cut."""

    inline: tuple[int, ...]
    """Rows whose bytes stay in the manifest."""
    partitions: tuple[Partition, ...]
    """Everything else."""


PLAN_KIND = "canonical"
_MASTER_WIDTH, _COPY_WIDTH = 4, 2
"""Bytes of an element of a tensor, and of its rounded copy, which is cut at the same elements."""


def cut(sizes: Sequence[int], groups: Sequence[str], config: StoreConfig, widths: Sequence[int] | None = None) -> Cut:
    """Cut tensors into partitions.

    Tensors of at least ``config.bundle_below_bytes`` are cut into pieces of equal size, multiples of 4 KiB but for
    the last; smaller ones are
    bundled with others of their group in order of rows; tiny ones stay in the manifest while there is room.

    Args:
        sizes: bytes of each tensor, by row.
        groups: tensors are bundled only within their group.
        config: the sizes to aim at.
        widths: bytes of an element of each tensor, 4 for all when None. Tensors of 2 and 4 bytes are cut at the same
            elements: so a partition of a rounded copy lies within one of its original.
    """
    inline: list[int] = []
    inline_room = config.inline_total_bytes
    partitions: list[Partition] = []
    bundles: dict[str, list[Piece]] = {}
    filled: dict[str, int] = {}
    for row, (size, group) in enumerate(zip(sizes, groups, strict=True)):
        if size <= min(config.inline_bytes, inline_room, INLINE_BYTES_MAX):
            inline.append(row)
            inline_room -= size
        elif size >= config.bundle_below_bytes:
            width = 4 if widths is None else widths[row]
            partitions.extend(
                Partition((Piece(row, start, length),))
                for start, length in _pieces(size, width, config.partition_bytes)
            )
        else:
            if filled.get(group, 0) + size > config.partition_bytes:
                partitions.append(Partition(tuple(bundles.pop(group))))
                filled[group] = 0
            bundles.setdefault(group, []).append(Piece(row, 0, size))
            filled[group] = filled.get(group, 0) + size
    partitions.extend(Partition(tuple(pieces)) for pieces in bundles.values())
    return Cut(tuple(inline), tuple(partitions))


def _pieces(size: int, width: int, most: int) -> list[tuple[int, int]]:
    """Cut at multiples of 4096 elements where these are not too many, and so of 4 KiB."""
    elements, limit = -(-size // width), most // (_MASTER_WIDTH if width == _COPY_WIDTH else width)
    count = -(-elements // limit)
    granule = min(BLOCK_BYTES, limit)
    length = -(-elements // (count * granule)) * granule * width
    return [(start, min(length, size - start)) for start in range(0, size, length)]
