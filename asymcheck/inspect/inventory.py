"""Inventory: what a checkpoint holds and where it lies, without reading a tensor."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping

from asymcheck.format.manifest import Extent, Manifest, TensorRow
from asymcheck.format.registry import CODECS
from asymcheck.inspect.values import plain_values
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator, PartitionSet
from asymcheck.restore.resolve import candidates, read_manifests
from asymcheck.state.names import matches, no_match
from asymcheck.storage.interfaces import ReadTier
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
    """Id of the pack; None if the partition is in no readable pack."""
    frame: int | None
    codec: str | None
    """Name of the codec; None if the partition is in no readable pack."""
    stored_length: int | None
    """Bytes of its payload there."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, as one rank saved it."""

    name: str
    aliases: tuple[str, ...]
    dtype: str
    role: str
    shape: tuple[int, ...]
    """Shape; of a tensor that ranks share, that of the part that this rank saved."""
    nbytes: int
    rank: int
    global_shape: tuple[int, ...]
    """Shape of the whole tensor over all ranks."""
    offset: tuple[int, ...]
    """Where the part begins in the whole, for each dimension."""
    inline: bool
    """Whether its bytes are stored in the manifest."""
    partitions: tuple[StoredPartition, ...]
    """Where its bytes lie otherwise, in order."""
    why: Mapping[str, str]
    """Why tensors of its role are stored in a codec, by the names of codecs, as the save noted for people."""


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """One plain value of a checkpoint, as one rank saved it."""

    name: str
    text: str
    """The value as Python writes it, or a few words for what has no literal."""
    rank: int


def values(tier: ReadTier, run: str, step: int | str | None, pattern: str) -> tuple[CheckpointRef, list[StoredValue]]:
    """Return a checkpoint (the newest by default) and its plain values whose name matches a glob, in their order.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, FormatError, HeadRecordError
        InvalidInputError: the glob matches none.
    """
    listing = candidates(tier, run, step)[0]
    found = [
        StoredValue(name, text, manifest.header.rank)
        for manifest in read_manifests(tier, listing)
        for name, text in plain_values(manifest).items()
    ]
    chosen = [one for one in found if matches(pattern, [one.name])]
    if not chosen and pattern != "*":
        raise no_match(pattern, (value.name for value in found), "the plain values of the checkpoint")
    return listing.ref, chosen


def inventory(
    tier: ReadTier, run: str, step: int | str | None, pattern: str
) -> tuple[CheckpointRef, list[StoredTensor]]:
    """Return a checkpoint (the newest by default) and its tensors whose name or an alias matches a glob.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, FormatError, HeadRecordError
        InvalidInputError: the glob matches none.
    """
    listing = candidates(tier, run, step)[0]
    tensors: list[StoredTensor] = []
    manifests = read_manifests(tier, listing)
    for manifest in manifests:
        with PartitionLocator(
            tier, PartitionSet.of_manifests([manifest]), manifest.header.packs, must_be_complete=False
        ) as sources:
            tensors += [
                _tensor(row, manifest, sources)
                for row in manifest.rows(range(len(manifest)))
                if any(fnmatch.fnmatchcase(name, pattern) for name in (row.name, *row.aliases))
            ]
    if not tensors and pattern != "*":
        rows = (row for manifest in manifests for row in manifest.rows(range(len(manifest))))
        raise no_match(pattern, (row.name for row in rows), "the tensors of the checkpoint")
    return listing.ref, tensors


def _tensor(row: TensorRow, manifest: Manifest, sources: PartitionLocator) -> StoredTensor:
    return StoredTensor(
        name=row.name,
        aliases=row.aliases,
        dtype=row.dtype,
        role=row.role,
        shape=row.shape,
        nbytes=row.nbytes,
        rank=manifest.header.rank,
        global_shape=row.global_shape,
        offset=row.offset,
        inline=row.inline is not None,
        partitions=tuple(_partition(extent, sources.find(extent.digest)) for extent in row.extents),
        why=_reasons(manifest, row.role),
    )


def _reasons(manifest: Manifest, role: str) -> dict[str, str]:
    """Return what the plan says for people; it is not checked when a manifest is read."""
    noted = manifest.header.plan.get("encoding")
    reasons = noted.get(role) if isinstance(noted, dict) else None
    given = reasons.items() if isinstance(reasons, dict) else ()
    return {codec: reason for codec, reason in given if isinstance(reason, str)}


def _partition(extent: Extent, copy: PartitionCopy | None) -> StoredPartition:
    wanted = extent.digest.hex(), extent.length, extent.partition_length
    if copy is None:
        return StoredPartition(*wanted, None, None, None, None)
    entry = copy.pack.entries[copy.sequence]
    codec, stored = CODECS[int(entry["codec"])], int(entry["stored_length"])
    return StoredPartition(*wanted, copy.pack.header.pack_id.hex(), copy.sequence, codec, stored)
