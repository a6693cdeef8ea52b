"""Build the header and the columns of a manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asymcheck.commit.save_request import SaveRequest
from asymcheck.config import WRITER
from asymcheck.format.digest_set import as_column
from asymcheck.format.manifest import Column, ManifestHeader, describing_columns, extents_column, inline_columns
from asymcheck.format.tree import Node
from asymcheck.state.leaves import Leaf, whole_bytes
from asymcheck.state.names import role_of
from asymcheck.state.partition_plan import Cut
from asymcheck.state.walk import Columns
from asymcheck.types import CheckpointRef, Digest


def manifest_header(request: SaveRequest, generation: int, plan: Mapping[str, object], tree: Node) -> ManifestHeader:
    """Return a manifest header. The commit replaces the generation and adds the parent and the packs."""
    return ManifestHeader(
        run=request.run,
        ref=CheckpointRef(generation, request.step, request.save_id),
        rank=request.rank,
        world_size=request.world_size,
        parent=None,
        created_ns=time.time_ns(),
        writer=WRITER,
        metrics=request.metrics,
        plan=plan,
        packs=(),
        tree=tree,
        store_ranks=request.store_ranks,
        merged=request.merged,
    )


class ManifestBuilder:
    """Builder of manifest columns: tensors, and the partitions that hold their bytes.

    Columns that do not change from state to state are built once. Usually only digests and small tensors change. For a
    thousand tensors, this needs an eighth of the interpreter time, for which the training thread competes.
    """

    def __init__(self) -> None:
        self._described: Columns | None = None
        self._describing: list[Column] = []
        self._cut: Cut | None = None
        self._starts: npt.NDArray[np.int32]
        self._extents: list[npt.NDArray[np.int64]]

    def columns(
        self, described: Columns, cut: Cut, names: Sequence[Digest], inline: Mapping[int, bytes]
    ) -> list[Column]:
        """Return the columns of a manifest.

        ``names`` has the digest of each partition of ``cut``. ``inline`` has the bytes of the tensors that the manifest
        itself stores, by row.
        """
        count = len(described.names)
        if described is not self._described and described != self._described:
            self._describing = describing_columns(
                {
                    "name": described.names,
                    "aliases": described.aliases,
                    "dtype": described.dtypes,
                    "role": [role_of(name) for name in described.names],
                    "shape": described.shapes,
                    "global_shape": [box.whole for box in described.boxes],
                    "offset": [box.offset for box in described.boxes],
                    "nbytes": described.sizes,
                }
            )
        self._described = described
        if self._cut is not cut:
            self._starts, self._extents = _extents_of(cut, count)
            self._cut = cut
        partitions, offsets, lengths, partition_lengths = self._extents
        digests = as_column([name for _, name in zip(cut.partitions, names, strict=True)])[partitions]
        extents = extents_column(self._starts, digests, offsets, lengths, partition_lengths)
        return [*self._describing, *inline_columns([inline.get(row) for row in range(count)]), extents]


def _extents_of(cut: Cut, rows: int) -> tuple[npt.NDArray[np.int32], list[npt.NDArray[np.int64]]]:
    """Return the first extent of each row, and the columns of the extents.

    The columns are partition number, offset in the partition, extent length, and partition length.
    """
    extents: list[tuple[int, int, int, int, int, int]] = []
    for number, partition in enumerate(cut.partitions):
        length, position = partition.length, 0
        for piece in partition.pieces:
            extents.append((piece.row, piece.start, number, position, piece.length, length))
            position += piece.length
    table = np.array(sorted(extents), dtype=np.int64).reshape(-1, 6)
    starts = np.searchsorted(table[:, 0], np.arange(rows + 1)).astype(np.int32)
    return starts, [np.ascontiguousarray(table[:, column]) for column in range(2, 6)]


def inline_bytes(leaves: Sequence[Leaf], cut: Cut) -> dict[int, bytes]:
    """Return the bytes of the tensors that the manifest itself stores, by row."""
    return dict(zip(cut.inline, whole_bytes([leaves[row] for row in cut.inline]), strict=True))
