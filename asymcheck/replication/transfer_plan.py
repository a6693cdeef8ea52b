"""Transfer plan: which checkpoints go to another place, which of their frames are sent, and how they are encoded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from asymcheck.codecs.container import Segment, segment_of
from asymcheck.commit.encoder import Base, Contents, Encoder
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    BaseDamagedError,
    CheckpointNotFoundError,
    DamagedPartitionError,
    DigestMismatchError,
    FormatError,
    InconsistentCheckpointError,
    MissingPartitionError,
    SkippedCheckpointWarning,
    StorageError,
    warn_user,
)
from asymcheck.format import registry
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import ENTRY_DTYPE, entry_of
from asymcheck.inspect.history import known_line
from asymcheck.restore.frame_reader import read_frame, read_plain
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator, PartitionSet
from asymcheck.restore.resolve import candidates, check_run_exists, read_manifests, resolve_each
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId

_LONGEST = registry.DELTA_DEPTH_MAX + 1
"""Frames of a chain above the one that is stored whole: a derived one on as many deltas as there may be."""


def selected(tier: ReadTier, run: str | None, step: int | str | None, *, everything: bool) -> list[CheckpointFiles]:
    """Return the newest consistent checkpoint, that of ``step``, or all complete ones on the line, oldest first.

    Raises:
        CheckpointNotFoundError: there is none.
        InconsistentCheckpointError: none is consistent.
        HeadRecordError: which one is newest cannot be known.

    Warns:
        SkippedCheckpointWarning: a newer checkpoint was passed over.
    """
    if everything:
        return _all(tier, run)
    listings = candidates(tier, run or DEFAULT_RUN, step)
    skipped: list[str] = []
    for resolved in resolve_each(tier, listings, skipped, whole=False):
        resolved.sources.close()
        for reason in skipped:
            warn_user(f"run {resolved.run!r}: passed over {reason}", SkippedCheckpointWarning)
        return [listing for listing in listings if listing.ref == resolved.ref]
    raise InconsistentCheckpointError(f"store {tier.root}: no checkpoint can be copied:", skipped)


def _all(tier: ReadTier, run: str | None) -> list[CheckpointFiles]:
    runs = tier.manifests.runs()
    if run is not None:
        check_run_exists(tier.root, run, runs)
        runs = [run]
    found: list[CheckpointFiles] = []
    for name in runs:
        line = known_line(tier, name)
        listings = tier.manifests.checkpoints(name)
        found += [one for one in listings if one.is_complete and (line is None or one.ref in line)]
    if not found:
        raise CheckpointNotFoundError(f"store {tier.root} has no complete checkpoint to copy")
    return found


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame to be sent."""

    name: Digest
    entry: np.void
    """Its row in the index to come, but for the place."""
    read: Callable[[Slot], FrameDescriptor]
    """Reads it into a slot, padding and all, and checks it."""

    @property
    def stored(self) -> int:
        """Bytes of payload."""
        return int(self.entry["stored_length"])

    @property
    def is_plain(self) -> bool:
        """Whether it is not encoded."""
        return int(self.entry["codec"]) == registry.CODEC_IDENTITY


class TransferPlanner:
    """Chooses the frames of one checkpoint that are sent, and the packs there that are relied upon."""

    def __init__(self, here: PartitionLocator, there: PartitionLocator, whole: set[Digest]) -> None:
        """Take frames from ``here``; those of ``whole`` are sent decoded, because they are damaged as they lie."""
        self._here = here
        self._there = there
        self._whole = whole
        self.full: list[Frame] = []
        """Frames to be sent that need no other."""
        self.based: list[Frame] = []
        """Frames that need others, each behind its base: they are sent when the full ones have arrived."""
        self.relied: set[PackId] = set()
        """Packs there that hold the rest."""
        self.reused = 0
        """Partitions that were there already."""
        self._depths: dict[Digest, int] = {}
        # Sent, but not as what others can be decoded from.
        self._sent_derived: set[Digest] = set()
        self._under_deltas: set[Digest] = set()

    @property
    def stored(self) -> int:
        """Bytes of payload to be sent."""
        return sum(frame.stored for frame in (*self.full, *self.based))

    def choose(self, names: Sequence[Digest]) -> None:
        """Choose what to send so that ``names`` can be read there."""
        for name in names:
            if self._depth_there(name, as_base=False) is None:
                self._send(name, self._here.copy(name), as_base=False)
            else:
                self.reused += 1

    def carries_deltas(self, name: Digest) -> bool:
        """Tell whether deltas on a partition are to be sent: their chain is counted from it as it lies. Thread-safe."""
        return name in self._under_deltas

    def can_be_base(self, name: Digest) -> bool:
        """Tell whether a delta may be made against a partition that is there; it is relied upon then. Thread-safe."""
        depth = self._depth_there(name, as_base=True)
        return depth is not None and depth < registry.DELTA_DEPTH_MAX

    def _depth_there(self, name: Digest, *, as_base: bool) -> int | None:
        """Return how many deltas lie between a partition there and a full frame; None when it cannot be used."""
        copy = self._there.find(name)
        return None if copy is None else self._depth_of(copy, frozenset({name}), as_base=as_base)

    def _depth_of(self, copy: PartitionCopy, above: frozenset[Digest], *, as_base: bool) -> int | None:
        kind = copy.kind()
        if copy.pack.damage is not None:
            # What a scan finds in a damaged pack can be read, and is not relied upon: it is sent once more.
            return None
        if kind == registry.KIND_DERIVED and as_base:
            return None
        depth = 0
        if len(above) > _LONGEST + 1:
            return None
        for base in copy.bases() - above:
            below = [self._depth_of(other, above | {base}, as_base=True) for other in self._there.base_copies(base)[:1]]
            if not below or below[0] is None:
                return None
            depth = below[0] + (kind == registry.KIND_DELTA)
        if copy.bases() & above or depth > registry.DELTA_DEPTH_MAX:
            return None
        self.relied.add(copy.pack.header.pack_id)
        return depth

    def _send(self, name: Digest, copy: PartitionCopy, *, as_base: bool, above: frozenset[Digest] = frozenset()) -> int:
        """Add a frame, after its base; return how many deltas lie between it and a full one.

        ``above`` are the frames for the sake of which it is sent.

        Raises:
            BaseDamagedError: it is its own base, or there are more of them than can be decoded.
        """
        if name in self._depths and not (as_base and name in self._sent_derived):
            return self._depths[name]
        if name in above or len(above) > _LONGEST:
            raise BaseDamagedError(f"{copy}: its bases lead back to it, or on further than can be decoded")
        depth = 0
        derived_base = as_base and copy.kind() == registry.KIND_DERIVED
        if copy.kind() == registry.KIND_FULL or name in self._whole or derived_base:
            self._add(name, copy, decoded=name in self._whole or derived_base)
            self._sent_derived.discard(name)
        else:
            for base in copy.bases():
                depth = self._base(base, above | {name}) + (copy.kind() == registry.KIND_DELTA)
            too_deep = depth > registry.DELTA_DEPTH_MAX
            if copy.kind() == registry.KIND_DELTA and not too_deep:
                self._under_deltas |= copy.bases()
            self._add(name, copy, decoded=too_deep)
            depth = 0 if too_deep else depth
            if copy.kind() == registry.KIND_DERIVED and not too_deep:
                self._sent_derived.add(name)
        self._depths[name] = depth
        return depth

    def _base(self, base: Digest, above: frozenset[Digest]) -> int:
        there = self._depth_there(base, as_base=True)
        if there is not None:
            return there
        copies = self._here.base_copies(base)
        if not copies:
            raise MissingPartitionError(f"base {base.hex()} lies in no readable pack", base)
        return self._send(base, copies[0], as_base=True, above=above)

    def _add(self, name: Digest, copy: PartitionCopy, *, decoded: bool) -> None:
        frame = self._decoded(name, copy) if decoded else _as_stored(name, copy)
        is_full = int(frame.entry["kind"]) == registry.KIND_FULL
        (self.full if is_full else self.based).append(frame)

    def _decoded(self, name: Digest, copy: PartitionCopy) -> Frame:
        plain = int(copy.pack.entries[copy.sequence]["plain_length"])
        return frame_of(FrameDescriptor.identity(name, plain), partial(read_plain, self._here, name, copy))


def frame_of(descriptor: FrameDescriptor, payload: Callable[[], memoryview | bytes]) -> Frame:
    """Return a frame whose ``payload`` is made when it is sent."""

    def read(slot: Slot) -> FrameDescriptor:
        slot.fill(payload())
        return descriptor

    return Frame(descriptor.digest, np.array([entry_of(descriptor, 0)], dtype=ENTRY_DTYPE)[0], read)


def _as_stored(name: Digest, copy: PartitionCopy) -> Frame:
    entry = copy.pack.entries[copy.sequence].copy()
    is_shifted = entry["payload_shift"] != 0
    # A shift serves the memory that the frame was written from. Without it, a location needs no feature.
    entry["payload_shift"] = 0

    def read(slot: Slot) -> FrameDescriptor:
        try:
            descriptor, payload, where = read_frame(copy, Slot(int(entry["stored_length"])) if is_shifted else slot)
            # The sum of an encoded payload was checked; of one that is not encoded the digest is the sum.
            if descriptor.codec == registry.CODEC_IDENTITY and digest_of(payload) != name:
                raise DigestMismatchError(f"digest mismatch in {where}")
        except FormatError as error:
            raise DamagedPartitionError(str(error), name) from error
        except UNKNOWING:
            raise
        except StorageError as error:
            # What the drive here does not give is no matter of the place where it goes.
            raise DamagedPartitionError(f"{copy}: {error}", name) from error
        if payload.obj is not slot.memory.obj:
            slot.fill(payload)
        return dataclasses.replace(descriptor, payload_shift=0)

    return Frame(name, entry, read)


def all_needs(here: PartitionLocator, manifests: Sequence[Manifest], older: Sequence[Manifest]) -> PartitionSet:
    """Return what a checkpoint needs, with what its frames are encoded against here, or could be there."""
    lengths: dict[Digest, int] = {}
    for manifest in manifests:
        lengths.update(manifest.partitions())
    todo = list(lengths)
    for manifest in older:
        lengths.update(manifest.partitions())
    while todo:
        name = todo.pop()
        found = here.find(name)
        for copy in [found] if found is not None else here.base_copies(name)[:1]:
            lengths.setdefault(name, int(copy.pack.entries[copy.sequence]["plain_length"]))
            todo += [base for base in copy.bases() if base not in lengths]
    return PartitionSet.of_lengths(lengths)


@dataclasses.dataclass(frozen=True)
class SharedCheckpoint:
    """An older checkpoint that exists on both sides."""

    manifests: Sequence[Manifest]
    """Manifests of all its ranks; none if there is no such checkpoint."""
    sources: PartitionLocator | None
    """Where its partitions lie here."""


@contextlib.contextmanager
def older_of(here: ReadTier, listing: CheckpointFiles | None, encoder: Encoder) -> Iterator[SharedCheckpoint]:
    """Open what deltas may be made against; nothing where there is none, or where it is not worth it."""
    if listing is None or not encoder.wants_bases:
        yield SharedCheckpoint((), None)
        return
    try:
        manifests = read_manifests(here, listing)
        hints = dict.fromkeys(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        sources = PartitionLocator(here, PartitionSet.of_manifests(manifests), hints, must_be_complete=False)
    except UNKNOWING:
        raise
    except AsymcheckError:
        # Deleted meanwhile, or damaged: it is of no use as a base, and no reason not to send the other one.
        yield SharedCheckpoint((), None)
        return
    with sources:
        yield SharedCheckpoint(manifests, sources)


class PartitionIndex:
    """The partitions of one checkpoint: what their bytes are, and which ones they were one checkpoint earlier."""

    def __init__(self, manifests: Sequence[Manifest], older: Sequence[Manifest]) -> None:
        """Look into ``manifests``, and into those of an older checkpoint; none where there is nothing older."""
        before = {other.header.rank: other for other in older}
        pairs = [(manifest, before.get(manifest.header.rank)) for manifest in manifests]
        self._manifests = manifests
        self._older = [other if other and _is_cut_alike(manifest, other) else None for manifest, other in pairs]
        self._dtypes = [manifest.columns[2].to_pylist() for manifest in manifests]
        self._roles = [manifest.roles() for manifest in manifests]
        # The extents of a partition: which manifest, and which of its extents.
        self._extents: dict[bytes, list[tuple[int, int]]] = {}
        for number, manifest in enumerate(manifests):
            for extent, name in enumerate(manifest.extent_digests.tolist()):
                self._extents.setdefault(name, []).append((number, extent))

    def contents(self, name: Digest) -> Contents | None:
        """Return what the bytes of a partition are; None when that is not clear for all of them."""
        segments: list[Segment] = []
        role, at, length = "", 0, 0
        for rank, extent in sorted(self._extents.get(name, ()), key=lambda place: self._offset(*place)):
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
        for rank, extent in self._extents.get(name, ()):
            older = self._older[rank]
            if older is not None:
                found = Digest(older.extent_digests[extent].tobytes())
                return None if found == name else found
        return None


def _is_cut_alike(manifest: Manifest, other: Manifest) -> bool:
    """Return whether two checkpoints are cut into partitions in the same way."""
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
    chooser: TransferPlanner
    """Chooser of frames, which knows the content of the location."""
    older: PartitionLocator | None
    """Where the partitions of an older checkpoint lie here, which frames may be encoded against."""

    def encoded(self, frame: Frame, slot: Slot) -> Frame:
        """Return a frame as it is to be sent, in memory, or the same where it goes as it lies."""
        contents = self.partitions.contents(frame.name) if frame.is_plain else None
        if contents is None:
            return frame
        found = self._base(frame.name)
        codecs = [registry.CODEC_BYTE_PLANES, *([] if found is None else [registry.CODEC_DELTA])]
        if self.encoder.stays_plain(frame.stored, contents, codecs):
            return frame
        descriptor = frame.read(slot)
        plain = slot.payload(descriptor.stored_length)
        bases = [] if found is None else _read_base(*found, len(plain))
        choice = self.encoder.choose(plain, contents, bases)
        encoded = self.encoder.encode(frame.name, choice, plain, contents, bases)
        if encoded is None:
            return frame
        payload = encoded.payload()
        return frame_of(encoded.descriptor, lambda: payload)

    def _base(self, name: Digest) -> tuple[PartitionLocator, Digest, PartitionCopy] | None:
        """Return the older state of a partition, when it is here and there, and no chain of deltas becomes too long."""
        base = None if self.chooser.carries_deltas(name) else self.partitions.older(name)
        copy = None if base is None or self.older is None else self.older.find(base)
        if base is None or self.older is None or copy is None or not self.chooser.can_be_base(base):
            return None
        return self.older, base, copy


def _read_base(sources: PartitionLocator, base: Digest, copy: PartitionCopy, length: int) -> list[Base]:
    try:
        plain = read_plain(sources, base, copy)
    except UNKNOWING:
        raise
    except AsymcheckError:
        # Damaged, or deleted meanwhile.
        return []
    return [Base(registry.CODEC_DELTA, base, plain)] if len(plain) == length else []
