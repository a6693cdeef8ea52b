"""What a manifest says of a state that was taken apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from asymcheck.config import WRITER
from asymcheck.format.manifest import Extent, ManifestHeader, TensorRow
from asymcheck.format.tree import Node
from asymcheck.partition.leaves import Leaf
from asymcheck.partition.plan import Cut
from asymcheck.pipeline.request import SaveRequest
from asymcheck.types import CheckpointRef, Digest, PackId


def manifest_header(
    request: SaveRequest,
    ref: CheckpointRef,
    parent: CheckpointRef | None,
    packs: Sequence[PackId],
    plan: Mapping[str, object],
    tree: Node,
) -> ManifestHeader:
    """Return the header of the manifest that a request leads to."""
    return ManifestHeader(
        run=request.run,
        ref=ref,
        rank=request.rank,
        world_size=request.world_size,
        parent=parent,
        created_ns=time.time_ns(),
        writer=WRITER,
        metrics=request.metrics,
        plan=plan,
        packs=tuple(packs),
        tree=tree,
    )


def encoding_record(reasons: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """Return what a manifest's ``plan`` says, for people, of why tensors are stored so, by role and codec."""
    return {"encoding": dict(reasons)} if reasons else {}


def manifest_rows(
    leaves: Sequence[Leaf], cut: Cut, names: Sequence[Digest], inline: Mapping[int, bytes]
) -> list[TensorRow]:
    """Return the rows of a manifest: tensors with where their bytes lie, in the partitions ``names`` or ``inline``."""
    extents: list[list[tuple[int, Extent]]] = [[] for _ in leaves]
    for partition, name in zip(cut.partitions, names, strict=True):
        length, position = partition.length, 0
        for piece in partition.pieces:
            extents[piece.row].append((piece.start, Extent(name, position, piece.length, length)))
            position += piece.length
    return [
        TensorRow(
            name=leaf.name,
            aliases=leaf.aliases,
            dtype=leaf.dtype,
            role=leaf.role,
            shape=leaf.shape,
            global_shape=leaf.box.whole,
            offset=leaf.box.offset,
            nbytes=leaf.nbytes,
            inline=inline.get(row),
            extents=tuple(extent for _, extent in sorted(extents[row], key=lambda item: item[0])),
        )
        for row, leaf in enumerate(leaves)
    ]


def inline_bytes(leaves: Sequence[Leaf], cut: Cut) -> dict[int, bytes]:
    """Return the bytes of the tensors that stay in the manifest, by row."""
    return {row: _bytes_of(leaves[row]) for row in cut.inline}


def _bytes_of(leaf: Leaf) -> bytes:
    data = bytearray(leaf.nbytes)
    if data:
        leaf.copy_bytes(0, memoryview(data))
    return bytes(data)
