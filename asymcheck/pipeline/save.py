"""One rank's save, in the order of SPEC.md §8.1. When it returns, the checkpoint is durable."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence

from asymcheck.config import WRITER
from asymcheck.format.catalog import pin_key
from asymcheck.format.manifest import Extent, ManifestHeader, TensorRow, encode_manifest
from asymcheck.partition.leaves import Leaf
from asymcheck.partition.plan import PLAN_KIND, Cut, cut
from asymcheck.partition.state import FlatState
from asymcheck.pipeline.commit import enter, finish, take_back
from asymcheck.pipeline.flush import Flusher
from asymcheck.pipeline.packing import Packing
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.tiers.owners import hold, let_go
from asymcheck.types import CheckpointRef, Digest, PackId, SaveId


@dataclasses.dataclass(frozen=True)
class Place:
    """A place on the line of training."""

    generation: int
    """The generation."""
    parent: CheckpointRef | None
    """The checkpoint before it."""


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What a save is to be called."""

    run: str
    """The run."""
    step: int
    """The training step."""
    place: Callable[[], Place]
    """Says where on the line it goes. Asked when all but the manifest is durable: a generation that is opened for a
    checkpoint must not be opened for one that fails."""
    metrics: Mapping[str, float]
    """Named numbers of the training loop."""
    rank: int = 0
    """This rank."""
    world_size: int = 1
    """How many ranks save."""


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """What a save did."""

    ref: CheckpointRef
    """The checkpoint's identity."""
    state_bytes: int
    """Bytes of all tensors."""
    written_bytes: int
    """Payload bytes written; the rest was in the store already."""


def new_save_id() -> SaveId:
    """Return a save id: the time, then random bytes (SPEC.md §4)."""
    return SaveId(time.time_ns().to_bytes(8, "big") + os.urandom(8))


def save(tier: NvmeTier, catalog: Catalog, state: FlatState, request: SaveRequest) -> SaveResult:
    """Store a state and commit it.

    Raises:
        StorageError: the device or file system refused. Nothing was committed, earlier checkpoints are untouched.
    """
    leaves = state.leaves
    plan = cut([leaf.nbytes for leaf in leaves], [leaf.group for leaf in leaves], tier.config)
    packing = Packing(tier, catalog)
    flusher = Flusher(tier, packing, leaves)
    save_id = new_save_id()
    ref: CheckpointRef | None = None
    pin = pin_key(save_id, request.rank)
    hold(pin)
    try:
        names = flusher.write(plan.partitions)
        named = list(zip(plan.partitions, names, strict=True))
        packs = enter(
            tier,
            catalog,
            packing,
            names,
            pin,
            lambda lost: flusher.write([partition for partition, name in named if name in lost]),
        )
        rows = _rows(leaves, plan, names)
        place = request.place()
        ref = CheckpointRef(place.generation, request.step, save_id)
        header = _header(request, ref, place.parent, packs, state)
        data = encode_manifest(header, rows)
        name = tier.manifests.publish(request.run, ref, request.rank, request.world_size, data)
        finish(catalog, request.run, ref, name, len(data), pin)
    except BaseException:
        take_back(tier, catalog, request.run, request.rank, ref, pin)
        raise
    finally:
        let_go(pin)
        packing.abandon()
        for leaf in leaves:
            leaf.release()
    return SaveResult(ref, sum(leaf.nbytes for leaf in leaves), packing.written_bytes)


def _header(
    request: SaveRequest,
    ref: CheckpointRef,
    parent: CheckpointRef | None,
    packs: Sequence[PackId],
    state: FlatState,
) -> ManifestHeader:
    return ManifestHeader(
        run=request.run,
        ref=ref,
        rank=request.rank,
        world_size=request.world_size,
        parent=parent,
        created_ns=time.time_ns(),
        writer=WRITER,
        metrics=request.metrics,
        plan={"number": 0, "kind": PLAN_KIND},
        packs=tuple(packs),
        tree=state.tree,
    )


def _rows(leaves: Sequence[Leaf], plan: Cut, names: Sequence[Digest]) -> list[TensorRow]:
    extents: list[list[tuple[int, Extent]]] = [[] for _ in leaves]
    for partition, name in zip(plan.partitions, names, strict=True):
        length, position = partition.length, 0
        for piece in partition.pieces:
            extents[piece.row].append((piece.start, Extent(name, position, piece.length, length)))
            position += piece.length
    inline = {row: _inline_bytes(leaves[row]) for row in plan.inline}
    return [
        TensorRow(
            name=leaf.name,
            aliases=tuple(leaf.aliases),
            dtype=leaf.dtype,
            role=leaf.role,
            shape=leaf.shape,
            global_shape=leaf.shape,
            offset=(0,) * len(leaf.shape),
            nbytes=leaf.nbytes,
            inline=inline.get(row),
            extents=tuple(extent for _, extent in sorted(extents[row], key=lambda item: item[0])),
        )
        for row, leaf in enumerate(leaves)
    ]


def _inline_bytes(leaf: Leaf) -> bytes:
    data = bytearray(leaf.nbytes)
    if data:
        leaf.copy_bytes(0, memoryview(data))
    return bytes(data)
