"""Resharding: the tensors of a checkpoint over all ranks, and the stored parts of a box (SPEC.md §A11.4)."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Container, Sequence

from asymcheck.errors import StateMismatchError
from asymcheck.format.manifest import SCHEMA, Manifest, TensorRow
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.restore.state_template import read_shape
from asymcheck.state.boxes import Box, Crossing, tile

_Outline = tuple[str, Box]


@dataclasses.dataclass(frozen=True)
class StoredPiece:
    """Stored part that overlaps a box."""

    row: TensorRow  # the stored part
    crossing: Crossing | None  # intersection of the part and the box; None if they are the same


def box_of(row: TensorRow) -> Box:
    """Return the box of a row in its whole tensor."""
    return Box(row.global_shape, row.offset, row.shape)


def of_box(row: TensorRow, box: Box) -> TensorRow:
    """Describe another part of a row's tensor, without the location of its bytes."""
    nbytes = box.elements * DTYPE_BYTES[row.dtype]
    return dataclasses.replace(
        row, shape=box.shape, global_shape=box.whole, offset=box.offset, nbytes=nbytes, inline=None, extents=()
    )


class ShardSet:
    """Numbered tensors of a checkpoint. The manifest of the own rank comes first, by row.

    Shards of one tensor have the same dotted name on all ranks.
    """

    def __init__(self, manifests: Sequence[Manifest], own: int = 0) -> None:
        """Number the tensors of ``manifests``, in the order of ranks; ``own`` is the index of the own rank."""
        self._manifests = [manifests[own], *manifests[:own], *manifests[own + 1 :]]
        self._firsts = list(itertools.accumulate(map(len, self._manifests), initial=0))
        self._rows: dict[int, list[TensorRow]] = {}
        self._outlines: dict[int, list[_Outline]] = {}
        self.gaps: set[str] = set()  # messages about requested parts that no rank saved

    @property
    def own(self) -> int:
        """Rank that saved the own manifest."""
        return self._manifests[0].header.rank

    @property
    def is_whole(self) -> bool:
        """Whether the manifests of all ranks are known."""
        return len(self._manifests) == self._manifests[0].header.world_size

    def shapes(self) -> list[object]:
        """Return the states of ranks that differ, or have empty shards of other tensors; the own first."""
        shapes: list[object] = []
        trees: list[object] = []
        for first, manifest in zip(self._firsts, self._manifests, strict=False):
            tree = manifest.header.tree, (manifest.nbytes > 0).tolist()
            if not any(tree == other for other in (*trees[:1], *trees[1:][-1:])):
                trees.append(tree)
                shapes.append(read_shape(manifest, first))
        return shapes

    def row(self, number: int) -> TensorRow:
        """Return the row of a tensor by its number."""
        position = self._position(number)
        if position not in self._rows:
            self._rows[position] = self._manifests[position].rows()
        return self._rows[position][number - self._firsts[position]]

    def rank_of(self, number: int) -> int:
        """Return the rank that stored a tensor."""
        return self._manifests[self._position(number)].header.rank

    def savers(self, number: int | None) -> Container[int]:
        """Return the ranks that stored elements of a tensor, but none if the own rank did; all ranks for None."""
        if number is None:
            return range(self._manifests[0].header.world_size)
        row = self.row(number)
        parts = self._alike(number, [row.name, *row.aliases]) if self._position(number) or not row.nbytes else []
        ranks = [self.rank_of(part) for part in parts if self._outline(part)[1].elements]
        return () if self.own in ranks else ranks

    def whole(self, number: int) -> Box:
        """Return the box of the whole tensor."""
        return Box.of_whole(self.row(number).global_shape)

    def pieces(self, number: int, box: Box) -> list[StoredPiece]:
        """Return the stored parts that make up a box of a tensor; among replicas, the own rank comes first.

        Raises:
            StateMismatchError: no rank saved some part of the box, or the name is ambiguous.
        """
        row = self.row(number)
        own = box_of(row)
        if own == box:
            return [StoredPiece(row, None)]
        if own.covers(box):
            return list(self._cut([number], box)[0])
        ranks = [self._position(other) for other in self._by_name[row.name]]
        if len(set(ranks)) < len(ranks):
            raise StateMismatchError(
                f"the name {row.name} is used for several tensors of one rank, so parts of {box} from several ranks "
                "are ambiguous"
            )
        pieces, missing = self._cut(self._alike(number, [row.name]), box)
        if missing is not None and row.aliases:
            pieces, missing = self._cut(self._alike(number, [row.name, *row.aliases]), box)
        if missing is not None:
            savers = f"{len(self._manifests)} ranks saved" if len(self._manifests) > 1 else "were saved"
            message = f"{missing} is in none of the parts that {savers}"
            self.gaps.add(message)
            raise StateMismatchError(message)
        return pieces

    def _cut(self, numbers: Sequence[int], box: Box) -> tuple[list[StoredPiece], Box | None]:
        boxes = [self._outline(number)[1] for number in numbers]
        tiling = tile(box, boxes)
        width = DTYPE_BYTES[self._outline(numbers[0])[0]]
        pieces = []
        for place, common in tiling.tiles:
            source = boxes[place]
            crossing = None if source == box == common else Crossing(source, box, common, width)
            pieces.append(StoredPiece(self.row(numbers[place]), crossing))
        return pieces, tiling.missing

    def _alike(self, number: int, names: Sequence[str]) -> list[int]:
        """Return the parts of the same tensor that have one of these names, the given one first."""
        dtype, box = self._outline(number)
        parts = dict.fromkeys([number, *(part for name in names for part in self._by_name[name])])
        return [part for part in parts if (self._outline(part)[0], self._outline(part)[1].whole) == (dtype, box.whole)]

    @functools.cached_property
    def _by_name(self) -> dict[str, list[int]]:
        """Tensors of all ranks by name, including aliases."""
        index: dict[str, list[int]] = {}
        for first, manifest in zip(self._firsts, self._manifests, strict=False):
            rows = zip(manifest.names(), _column(manifest, "aliases"), strict=True)
            for number, (name, aliases) in enumerate(rows, first):
                # A tensor may list the same name twice.
                for distinct in dict.fromkeys([name, *aliases]):
                    index.setdefault(distinct, []).append(number)
        return index

    def _outline(self, number: int) -> _Outline:
        """Return dtype and box of a tensor, which suffices for most rows of many ranks."""
        position = self._position(number)
        if position not in self._outlines:
            columns = (
                _column(self._manifests[position], name) for name in ("dtype", "global_shape", "offset", "shape")
            )
            self._outlines[position] = [
                (dtype, Box(tuple(whole), tuple(offset), tuple(shape)))
                for dtype, whole, offset, shape in zip(*columns, strict=True)
            ]
        return self._outlines[position][number - self._firsts[position]]

    def _position(self, number: int) -> int:
        # Several manifests without tensors may begin at this number; the last one is meant.
        return bisect.bisect_right(self._firsts, number) - 1


def _column(manifest: Manifest, name: str) -> list:  # type: ignore[type-arg]  # to_pylist is untyped; the schema was compared
    values: list = manifest.columns[SCHEMA.get_field_index(name)].to_pylist()  # type: ignore[type-arg]  # as above
    return values
