"""Re-encoding: what lies plain on a fast drive is encoded on its way to a slower place, where that is there sooner."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from asymcheck.codecs.container import Segment, segment_of
from asymcheck.errors import UNKNOWING, AsymcheckError
from asymcheck.format import registry
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.manifest import Manifest
from asymcheck.migration.transfer_plan import Chooser, Frame, frame_of
from asymcheck.pipeline.encoder import Base, Contents, Encoder
from asymcheck.recovery.fetch import read_plain
from asymcheck.recovery.locate import Needs, Sources
from asymcheck.recovery.resolve import read_manifests
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.slots import Slot
from asymcheck.types import Digest


@dataclasses.dataclass(frozen=True)
class Older:
    """A checkpoint before the one that is sent, which lies on both sides."""

    manifests: Sequence[Manifest]
    """Of all its ranks; none where there is no such checkpoint."""
    sources: Sources | None
    """Where its partitions lie here."""


@contextlib.contextmanager
def older_of(here: ReadTier, listing: CheckpointFiles | None, encoder: Encoder) -> Iterator[Older]:
    """Open what deltas may be made against; nothing where there is none, or where it is not worth it."""
    if listing is None or not encoder.wants_bases:
        yield Older((), None)
        return
    try:
        manifests = read_manifests(here, listing)
        hints = dict.fromkeys(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        sources = Sources(here, Needs.of_manifests(manifests), hints, must_be_complete=False)
    except UNKNOWING:
        raise
    except AsymcheckError:
        # Deleted meanwhile, or damaged: it is of no use as a base, and no reason not to send the other one.
        yield Older((), None)
        return
    with sources:
        yield Older(manifests, sources)


class PartitionIndex:
    """The partitions of one checkpoint: what their bytes are, and which ones they were one checkpoint earlier."""

    def __init__(self, manifests: Sequence[Manifest], older: Sequence[Manifest]) -> None:
        """Look into ``manifests``, and into those of an older checkpoint; none where there is nothing older."""
        self._manifests = manifests
        self._older = [
            other if other is not None and _is_cut_alike(manifest, other) else None
            for manifest, other in zip(manifests, _by_rank(manifests, older), strict=True)
        ]
        digests = np.concatenate([manifest.extent_digests for manifest in manifests])
        self._set = DigestSet(digests)
        numbers = self._set.numbers(digests)
        # The extents of a partition are neighbours in this order.
        self._order = np.argsort(numbers, kind="stable")
        self._starts = np.searchsorted(numbers[self._order], np.arange(len(self._set) + 1))
        self._firsts = np.cumsum([0, *(len(manifest.extent_digests) for manifest in manifests)])
        self._dtypes = [manifest.columns[2].to_pylist() for manifest in manifests]
        self._roles = [manifest.roles() for manifest in manifests]

    def _places(self, name: Digest) -> list[tuple[int, int]]:
        """Return the extents of a partition: which manifest, and which of its extents."""
        number = self._set.number(name)
        if number < 0:
            return []
        found = self._order[self._starts[number] : self._starts[number + 1]]
        ranks = np.searchsorted(self._firsts, found, side="right") - 1
        return list(zip(ranks.tolist(), (found - self._firsts[ranks]).tolist(), strict=True))

    def contents(self, name: Digest) -> Contents | None:
        """Return what the bytes of a partition are; None when that is not clear for all of them."""
        segments: list[Segment] = []
        role, at, length = "", 0, 0
        for rank, extent in sorted(self._places(name), key=lambda place: self._offset(*place)):
            manifest = self._manifests[rank]
            length = int(manifest.extent_partition_lengths[extent])
            offset, count = self._offset(rank, extent), int(manifest.extent_lengths[extent])
            if offset < at:
                # The same bytes once more, of a tensor that is equal.
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

    def older(self, name: Digest) -> Digest | None:
        """Return the partition that lay in the same place one checkpoint earlier; None where there is none."""
        for rank, extent in self._places(name):
            older = self._older[rank]
            if older is not None:
                found = Digest(older.extent_digests[extent].tobytes())
                return None if found == name else found
        return None


def _by_rank(manifests: Sequence[Manifest], older: Sequence[Manifest]) -> list[Manifest | None]:
    ranks = {other.header.rank: other for other in older}
    return [ranks.get(manifest.header.rank) for manifest in manifests]


def _is_cut_alike(manifest: Manifest, other: Manifest) -> bool:
    """Tell whether the partitions of two checkpoints lie in the same places."""
    return manifest.names() == other.names() and all(
        np.array_equal(getattr(manifest, column), getattr(other, column))
        for column in ("extent_starts", "extent_offsets", "extent_lengths", "extent_partition_lengths")
    )


@dataclasses.dataclass(frozen=True)
class Reencoder:
    """Encodes the frames of one checkpoint for the place where they go. Thread-safe."""

    encoder: Encoder
    """Decides how frames are stored there."""
    partitions: PartitionIndex
    """The partitions of the checkpoint."""
    chooser: Chooser
    """Knows what is there."""
    older: Older
    """What frames may be encoded against."""

    def encoded(self, frame: Frame, slot: Slot) -> Frame:
        """Return a frame as it is to be sent, in memory, or the same where it goes as it lies.

        Raises:
            DamagedPartitionError: it cannot be read.
        """
        contents = self.partitions.contents(frame.name) if frame.is_plain else None
        if contents is None:
            return frame
        base = self._base(frame.name)
        codecs = [registry.CODEC_BYTE_PLANES, *([] if base is None else [registry.CODEC_DELTA])]
        if self.encoder.stays_plain(frame.stored, contents, codecs):
            return frame
        descriptor = frame.read(slot)
        plain = slot.payload(descriptor.stored_length)
        bases = [] if base is None else self._read(base, len(plain))
        move = self.encoder.move(frame.name, "nvme", plain, contents, bases)
        encoded = self.encoder.carry_out(move, plain, contents, bases)
        if encoded is None:
            return frame
        payload = encoded.payload()
        return frame_of(encoded.descriptor, lambda: payload)

    def _base(self, name: Digest) -> Digest | None:
        """Return the older state of a partition, when it is here and there, and no chain of deltas becomes too long."""
        base = None if self.chooser.carries_deltas(name) else self.partitions.older(name)
        if base is None or self.older.sources is None or self.older.sources.find(base) is None:
            return None
        return base if self.chooser.can_be_base(base) else None

    def _read(self, base: Digest, length: int) -> list[Base]:
        sources = self.older.sources
        copy = None if sources is None else sources.find(base)
        if sources is None or copy is None:
            return []
        try:
            plain = read_plain(sources, base, copy)
        except UNKNOWING:
            raise
        except AsymcheckError:
            # Damaged, or deleted meanwhile.
            return []
        return [Base(registry.CODEC_DELTA, base, plain)] if len(plain) == length else []
