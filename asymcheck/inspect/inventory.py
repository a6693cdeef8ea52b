"""List the tensors and values of a checkpoint and where they are stored, without reading tensors."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping

from asymcheck.format.manifest import Extent, Manifest, TensorRow
from asymcheck.format.registry import CODECS
from asymcheck.inspect.values import plain_values
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator
from asymcheck.restore.resolve import find_readable, read_manifests
from asymcheck.state.names import matches, no_match
from asymcheck.storage.interfaces import ReadTier
from asymcheck.types import Checkpoint, CheckpointRef, Digest


@dataclasses.dataclass(frozen=True)
class StoredPartition:
    """A partition of a tensor, and its location."""

    digest: str
    """32 hexadecimal digits."""
    length: int
    """Bytes of the tensor in the partition."""
    partition_length: int
    """Plain bytes of the whole partition."""
    pack: str | None
    """Id of the pack; None if the partition is in no readable pack."""
    frame: int | None
    """Number of the frame in the pack."""
    codec: str | None
    """Name of the codec; None if the partition is in no readable pack."""
    stored_length: int | None
    """Bytes of the payload."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, as saved by one rank."""

    name: str
    aliases: tuple[str, ...]
    dtype: str
    role: str
    shape: tuple[int, ...]
    """Shape of the part that this rank saved."""
    nbytes: int
    rank: int
    global_shape: tuple[int, ...]
    """Shape of the whole tensor over all ranks."""
    offset: tuple[int, ...]
    """Offset of the part in the whole tensor, for each dimension."""
    inline: bool
    """Whether the bytes are stored in the manifest."""
    partitions: tuple[StoredPartition, ...]
    """Partitions with the bytes, in order; empty if inline."""
    why: Mapping[str, str]
    """Reasons why the save chose codecs for tensors of this role, by codec name."""


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """A plain value of a checkpoint, as saved by one rank."""

    name: str
    text: str
    """The value as a Python literal, or a description if it has no literal."""
    rank: int


def values(tier: ReadTier, run: str, step: int | str | None, pattern: str) -> tuple[CheckpointRef, list[StoredValue]]:
    """Return a checkpoint (the newest readable one by default) and its plain values whose names match a glob.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError
        InvalidInputError: the glob matches no value.
    """
    listing, manifests = find_readable(tier, run, step)
    stored = [
        StoredValue(name, text, manifest.header.rank)
        for manifest in manifests
        for name, text in plain_values(manifest).items()
    ]
    chosen = [value for value in stored if matches(pattern, [value.name])]
    if not chosen and pattern != "*":
        raise no_match(pattern, (value.name for value in stored), "the plain values of the checkpoint")
    return listing.ref, chosen


def inventory(
    tier: ReadTier, run: str, step: int | str | None, pattern: str
) -> tuple[CheckpointRef, list[StoredTensor]]:
    """Return a checkpoint (the newest readable one by default) and its tensors with a matching name or alias.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError
        InvalidInputError: the glob matches no tensor.
    """
    listing, manifests = find_readable(tier, run, step)
    tensors: list[StoredTensor] = []
    for manifest in manifests:
        with PartitionLocator.of_manifests(tier, [manifest], must_be_complete=False) as sources:
            # Hundreds of small tensors share a partition.
            find = functools.cache(sources.find)
            tensors += [
                _tensor(row, manifest, find)
                for row in manifest.rows()
                if any(fnmatch.fnmatchcase(name, pattern) for name in (row.name, *row.aliases))
            ]
    if not tensors and pattern != "*":
        rows = (row for manifest in manifests for row in manifest.rows())
        raise no_match(pattern, (row.name for row in rows), "the tensors of the checkpoint")
    return listing.ref, tensors


def merge_of(tier: ReadTier, checkpoint: Checkpoint) -> Mapping[str, object] | None:
    """Return method and sources of a merged checkpoint; None if a training saved it."""
    listing = tier.manifests.listing(checkpoint.run, checkpoint.ref)
    return read_manifests(tier, listing)[0].header.merged


def _tensor(row: TensorRow, manifest: Manifest, find: Callable[[Digest], PartitionCopy | None]) -> StoredTensor:
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
        partitions=tuple(_partition(extent, find(extent.digest)) for extent in row.extents),
        why=_reasons(manifest, row.role),
    )


def _reasons(manifest: Manifest, role: str) -> dict[str, str]:
    """Return the encoding notes in the plan, which readers do not validate."""
    notes = manifest.header.plan.get("encoding")
    reasons = notes.get(role) if isinstance(notes, dict) else None
    items = reasons.items() if isinstance(reasons, dict) else ()
    return {codec: reason for codec, reason in items if isinstance(reason, str)}


def _partition(extent: Extent, copy: PartitionCopy | None) -> StoredPartition:
    lengths = extent.digest.hex(), extent.length, extent.partition_length
    if copy is None:
        return StoredPartition(*lengths, None, None, None, None)
    codec = CODECS[int(copy.entry["codec"])]
    return StoredPartition(*lengths, copy.pack.header.pack_id.hex(), copy.sequence, codec, copy.stored_length)
