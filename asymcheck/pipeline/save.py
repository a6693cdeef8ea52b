"""One rank's save, in the order of SPEC.md §8.1. When it returns, the checkpoint is durable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence

from asymcheck.config import WRITER
from asymcheck.errors import AsymcheckError, MissingPartitionError, StorageError
from asymcheck.events import emit
from asymcheck.format import registry
from asymcheck.format.catalog import manifest_key, pin_key
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Extent, ManifestHeader, TensorRow, encode_manifest
from asymcheck.partition.leaves import Leaf
from asymcheck.partition.plan import PLAN_KIND, Cut, Partition, cut
from asymcheck.partition.state import FlatState
from asymcheck.pipeline.flush import Flusher, KnownPartitions
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.tiers.owners import hold, let_go, this_process
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
    flusher = Flusher(tier, KnownPartitions(tier, catalog), leaves)
    save_id = new_save_id()
    ref: CheckpointRef | None = None
    pin = pin_key(save_id, request.rank)
    hold(pin)
    try:
        names = flusher.write(plan.partitions)
        packs = _enter(tier, catalog, flusher, plan.partitions, names, pin)
        rows = _rows(leaves, plan, names)
        place = request.place()
        ref = CheckpointRef(place.generation, request.step, save_id)
        header = _header(request, ref, place.parent, packs, state)
        data = encode_manifest(header, rows)
        name = tier.manifests.publish(request.run, ref, request.rank, request.world_size, data)
        _finish(catalog, request.run, ref, name, len(data), pin)
    except BaseException:
        _take_back(tier, catalog, request, ref, pin)
        raise
    finally:
        let_go(pin)
        flusher.abandon()
        for leaf in leaves:
            leaf.release()
    return SaveResult(ref, sum(leaf.nbytes for leaf in leaves), flusher.written_bytes)


def _enter(
    tier: NvmeTier,
    catalog: Catalog,
    flusher: Flusher,
    partitions: Sequence[Partition],
    names: Sequence[Digest],
    pin: bytes,
) -> list[PackId]:
    """Seal the packs, enter them in the catalog and pin them; write again what collection took meanwhile."""
    for _ in range(tier.config.commit_attempts):
        flusher.seal()
        gone = _pin(catalog, flusher, pin)
        if not gone:
            flusher.close()
            _check_stored(names, flusher)
            return sorted({at.pack_id for at in (*flusher.written.values(), *flusher.reused.values())})
        lost = set(flusher.take_back(gone))
        flusher.write([partition for partition, name in zip(partitions, names, strict=True) if name in lost])
    raise StorageError(
        f"store {tier.root}: collection took partitions away {tier.config.commit_attempts} times during one save; "
        "save again"
    )


def _pin(catalog: Catalog, flusher: Flusher, pin: bytes) -> list[PackId]:
    """Step 3 of §8.1, one transaction: returns the reused packs that are gone, or pins everything and returns none."""
    reused = {location.pack_id for location in flusher.reused.values()}
    with catalog.write() as transaction:
        gone = [pack_id for pack_id in reused if transaction.pack_state(pack_id) != registry.PACK_LIVE]
        for name, location in flusher.written.items():
            transaction.put_location(name, location)
        for pack_id, header in flusher.packs.items():
            transaction.put_pack(pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
        transaction.put_pin(pin, this_process(), {*flusher.packs, *reused} - set(gone))
    emit("catalog.pinned", pin.hex())
    return gone


def _check_stored(names: Sequence[Digest], flusher: Flusher) -> None:
    missing = [name for name in names if name not in flusher.written and name not in flusher.reused]
    if missing:
        raise MissingPartitionError(f"partition {missing[0].hex()} was not stored; nothing was committed")


def _finish(catalog: Catalog, run: str, ref: CheckpointRef, name: ManifestName, size: int, pin: bytes) -> None:
    with catalog.write() as transaction:
        transaction.put_manifest(manifest_key(run, ref, name), size)
        transaction.delete_pin(pin)
    emit("catalog.committed", str(ref))


def _take_back(tier: NvmeTier, catalog: Catalog, request: SaveRequest, ref: CheckpointRef | None, pin: bytes) -> None:
    """Leave no manifest of a failed save, and let collection have what it has stored."""
    if ref is not None:
        with contextlib.suppress(AsymcheckError, FileNotFoundError):
            tier.manifests.withdraw(request.run, ref, request.rank)
    try:
        with catalog.write() as transaction:
            # A manifest that could not be removed keeps its packs.
            listed = () if ref is None else tier.manifests.listing(request.run, ref).manifests
            if all(name.rank != request.rank for name in listed):
                transaction.delete_pin(pin)
    except AsymcheckError:
        # The first failure is the one to report; the pin goes when this process has ended.
        return


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
