"""Encode the frames of a push for the target: by the element types of tensors, and as deltas on an older checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from asymcheck.codecs.container import Segment, segment_of
from asymcheck.commit.encoder import Base, Contents, Encoder
from asymcheck.errors import AsymcheckError, ReadOnlyStoreError, result_or_error
from asymcheck.format import registry
from asymcheck.format.manifest import Manifest
from asymcheck.replication.transfer_plan import Frame, TransferPlanner, frame_of
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator, PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest

Older = tuple[Sequence[Manifest], PartitionLocator]
"""Manifests of an older checkpoint that exists on both sides, and the locator of its partitions in the source."""


@contextlib.contextmanager
def older_of(local: ReadTier, listing: CheckpointFiles | None) -> Iterator[Older]:
    """Open an older checkpoint for deltas; yields no manifest if there is none."""
    opened: Older | AsymcheckError | None = None
    if listing is not None:
        # A deleted, damaged or unreadable older checkpoint only costs compression.
        with contextlib.suppress(ReadOnlyStoreError):
            opened = result_or_error(_open_older, local, listing)
    if opened is None or isinstance(opened, AsymcheckError):
        opened = (), PartitionLocator(local, PartitionSet.of_lengths({}))
    with opened[1]:
        yield opened


def _open_older(local: ReadTier, listing: CheckpointFiles) -> Older:
    manifests = read_manifests(local, listing)
    return manifests, PartitionLocator.of_manifests(local, manifests, must_be_complete=False)


class Reencoder:
    """Encodes the frames of one checkpoint for the target. Thread-safe."""

    def __init__(self, encoder: Encoder, planner: TransferPlanner, manifests: Sequence[Manifest], older: Older) -> None:
        """Encode partitions of ``manifests``.

        Args:
            encoder: selects the codec of each frame.
            planner: knows the content of the target.
            manifests: manifests of the checkpoint.
            older: an older checkpoint, whose partitions may be bases.
        """
        self._encoder, self._planner, self._manifests = encoder, planner, manifests
        older_manifests, self._bases = older
        before = {other.header.rank: other for other in older_manifests}
        pairs = [(manifest, before.get(manifest.header.rank)) for manifest in manifests]
        self._older = [other if other and _is_cut_alike(manifest, other) else None for manifest, other in pairs]
        self._dtypes = [manifest.columns[2].to_pylist() for manifest in manifests]
        self._roles = [manifest.roles() for manifest in manifests]
        # Extents of each partition, as pairs of manifest number and extent number.
        self._extents: dict[bytes, list[tuple[int, int]]] = {}
        for number, manifest in enumerate(manifests):
            for extent, name in enumerate(manifest.extent_digests.tolist()):
                self._extents.setdefault(name, []).append((number, extent))

    def encoded(self, frame: Frame, slot: Slot) -> Frame:
        """Return a re-encoded frame in memory, or the same frame if re-encoding does not pay."""
        contents = self._contents(frame.name) if frame.is_plain else None
        if contents is None:
            return frame
        base = self._base(frame.name)
        codecs = [registry.CODEC_BYTE_PLANES, *([] if base is None else [registry.CODEC_DELTA])]
        if self._encoder.stays_plain(frame.stored, contents, codecs):
            return frame
        descriptor = frame.read(slot)
        plain = slot.payload(descriptor.stored_length)
        bases = [] if base is None else self._read_base(*base, len(plain))
        choice = self._encoder.choose(plain, contents, bases)
        encoded = self._encoder.encode(frame.name, choice, plain, contents, bases)
        if encoded is None:
            return frame
        payload = encoded.payload()
        return frame_of(encoded.descriptor, lambda: payload)

    def _contents(self, name: Digest) -> Contents | None:
        """Return role and element types of a partition; None if they are unknown for some of its bytes."""
        segments: list[Segment] = []
        role, at, length = "", 0, 0
        for rank, extent in sorted(self._extents.get(name, ()), key=lambda place: self._offset(*place)):
            manifest = self._manifests[rank]
            length = int(manifest.extent_partition_lengths[extent])
            offset, count = self._offset(rank, extent), int(manifest.extent_lengths[extent])
            if offset < at:
                # A second tensor has the same bytes.
                continue
            row = int(np.searchsorted(manifest.extent_starts, extent, side="right")) - 1
            segment = segment_of(self._dtypes[rank][row], count)
            if offset > at or count % segment.width:
                return None
            segments.append(segment)
            role, at = role or self._roles[rank][row], at + count
        return Contents(role, tuple(segments)) if segments and at == length else None

    def _offset(self, rank: int, extent: int) -> int:
        return int(self._manifests[rank].extent_offsets[extent])

    def _base(self, name: Digest) -> tuple[Digest, PartitionCopy] | None:
        """Return the older state of a partition if both sides have it and no chain of deltas becomes too long."""
        base = None if self._planner.carries_deltas(name) else self._older_state(name)
        copy = None if base is None else self._bases.find(base)
        if base is None or copy is None or not self._planner.can_be_base(base):
            return None
        return base, copy

    def _older_state(self, name: Digest) -> Digest | None:
        """Return the digest of a partition in the older checkpoint; None if it is equal or missing."""
        for rank, extent in self._extents.get(name, ()):
            older = self._older[rank]
            if older is not None:
                digest = Digest(older.extent_digests[extent].tobytes())
                return None if digest == name else digest
        return None

    def _read_base(self, base: Digest, copy: PartitionCopy, length: int) -> list[Base]:
        plain = result_or_error(read_any, self._bases, base, first=copy)
        if isinstance(plain, AsymcheckError) or len(plain) != length:
            # Deleted in the meantime, damaged, or of another length.
            return []
        return [Base(registry.CODEC_DELTA, base, plain)]


def _is_cut_alike(manifest: Manifest, other: Manifest) -> bool:
    """Tell whether two checkpoints have the same partition boundaries."""
    return manifest.names() == other.names() and all(
        np.array_equal(getattr(manifest, column), getattr(other, column))
        for column in ("extent_starts", "extent_offsets", "extent_lengths", "extent_partition_lengths")
    )
