"""Inventory: what a checkpoint holds and where it lies, without reading a tensor."""

from __future__ import annotations

import dataclasses
import fnmatch

from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.recovery.locate import Needs, Sources
from asymcheck.recovery.names import no_match
from asymcheck.recovery.resolve import candidates, read_manifests
from asymcheck.tiers.nvme import NvmeTier
from asymcheck.types import CheckpointRef


@dataclasses.dataclass(frozen=True)
class StoredPartition:
    """One partition of a tensor, and where it lies."""

    digest: str
    """32 hexadecimal digits."""
    length: int
    """Bytes of this tensor in the partition."""
    partition_length: int
    """Plain bytes of the whole partition."""
    pack: str | None
    """Id of the pack; None when it lies in no readable pack."""
    frame: int | None
    """Number of the frame in the pack."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    """Dotted name in the state."""
    aliases: tuple[str, ...]
    """Further names of the same tied tensor."""
    dtype: str
    """Name of the dtype."""
    role: str
    """What part it plays in training."""
    shape: tuple[int, ...]
    """Shape."""
    nbytes: int
    """Bytes."""
    rank: int
    """The rank that saved it."""
    inline: bool
    """Whether its bytes lie in the manifest itself."""
    partitions: tuple[StoredPartition, ...]
    """Where its bytes lie otherwise, in order."""


def inventory(tier: NvmeTier, run: str, step: int | None, pattern: str) -> tuple[CheckpointRef, list[StoredTensor]]:
    """Return a checkpoint (the newest by default) and its tensors whose name or an alias matches a glob.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, FormatError, HeadRecordError
        InvalidInputError: the glob matches none.
    """
    listing = candidates(tier, run, step)[0]
    tensors: list[StoredTensor] = []
    manifests = read_manifests(tier, listing)
    for manifest in manifests:
        with Sources(tier, Needs.of_manifests([manifest]), manifest.header.packs, must_be_complete=False) as sources:
            tensors += _tensors(manifest, sources, pattern)
    if not tensors and pattern != "*":
        rows = (row for manifest in manifests for row in manifest.rows(range(len(manifest))))
        raise no_match(pattern, (row.name for row in rows), "the tensors of the checkpoint")
    return listing.ref, tensors


def _tensors(manifest: Manifest, sources: Sources, pattern: str) -> list[StoredTensor]:
    rows = manifest.rows(range(len(manifest)))
    chosen = [row for row in rows if any(fnmatch.fnmatchcase(name, pattern) for name in (row.name, *row.aliases))]
    return [
        StoredTensor(
            name=row.name,
            aliases=row.aliases,
            dtype=row.dtype,
            role=row.role,
            shape=row.shape,
            nbytes=row.nbytes,
            rank=manifest.header.rank,
            inline=row.inline is not None,
            partitions=_partitions(row, sources),
        )
        for row in chosen
    ]


def _partitions(row: TensorRow, sources: Sources) -> tuple[StoredPartition, ...]:
    found = []
    for extent in row.extents:
        copy = sources.find(extent.digest)
        pack = None if copy is None else copy.pack.header.pack_id.hex()
        frame = None if copy is None else copy.sequence
        found.append(StoredPartition(extent.digest.hex(), extent.length, extent.partition_length, pack, frame))
    return tuple(found)
