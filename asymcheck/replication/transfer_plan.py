"""Transfer plan: select checkpoints and frames to copy, and re-encode frames for the target."""

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
    INCONCLUSIVE,
    AsymcheckError,
    BaseDamagedError,
    CheckpointNotFoundError,
    DamagedPartitionError,
    FormatError,
    MissingPartitionError,
    SkippedCheckpointWarning,
    StorageError,
    result_or_error,
    warn_user,
)
from asymcheck.format import registry
from asymcheck.format.digest_set import as_column
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import ENTRY_DTYPE, entry_of
from asymcheck.inspect.history import known_line
from asymcheck.replication.decodable_frames import DecodableFrames
from asymcheck.restore.frame_reader import read_any, read_stored
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator, PartitionSet
from asymcheck.restore.resolve import candidates, check_run_exists, inconsistent, read_manifests, resolve_each
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId

_CHAIN_MAX = registry.DELTA_DEPTH_MAX + 1
"""Longest chain of frames on a full frame: the maximum of deltas, and a derived frame on top."""


def selected(tier: ReadTier, run: str | None, step: int | str | None, *, everything: bool) -> list[CheckpointFiles]:
    """Return the newest consistent checkpoint, that of ``step``, or all complete ones on the line, oldest first.

    Raises:
        CheckpointNotFoundError: no such checkpoint exists.
        InconsistentCheckpointError: no checkpoint is consistent.
        HeadRecordError: the newest checkpoint is unknown, because a head record is damaged.

    Warns:
        SkippedCheckpointWarning: a newer checkpoint was skipped.
    """
    if everything:
        return _all(tier, run)
    run, skipped = run or DEFAULT_RUN, list[str]()
    listings = candidates(tier, run, step)
    for resolved in resolve_each(tier, listings, skipped, whole=False):
        resolved.sources.close()
        for reason in skipped:
            warn_user(f"run {resolved.run!r}: skipped {reason}", SkippedCheckpointWarning)
        return [listing for listing in listings if listing.ref == resolved.ref]
    raise inconsistent(tier, run, step, skipped, "copied")


def _all(tier: ReadTier, run: str | None) -> list[CheckpointFiles]:
    runs = tier.manifests.runs()
    if run is not None:
        check_run_exists(tier.root, run, runs)
        runs = [run]
    complete: list[CheckpointFiles] = []
    for name in runs:
        line = known_line(tier, name)
        complete += [
            listing
            for listing in tier.manifests.checkpoints(name)
            if listing.is_complete and (line is None or listing.ref in line)
        ]
    if not complete:
        raise CheckpointNotFoundError(f"store {tier.root} has no complete checkpoint to copy")
    return complete


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame to send."""

    name: Digest
    entry: np.void
    """Row of the index of the new pack, without the position."""
    read: Callable[[Slot], FrameDescriptor]
    """Read the frame with its padding into a slot, and verify it."""

    @property
    def stored(self) -> int:
        """Bytes of payload."""
        return int(self.entry["stored_length"])

    @property
    def is_plain(self) -> bool:
        """Whether the payload is not encoded."""
        return int(self.entry["codec"]) == registry.CODEC_IDENTITY


class TransferPlanner:
    """Selects the frames of one checkpoint to send, and the remote packs that hold the rest."""

    def __init__(self, local: PartitionLocator, remote: DecodableFrames, decoded: set[Digest]) -> None:
        """Select frames of ``local`` that ``remote`` lacks; partitions in ``decoded`` are sent decoded."""
        self._local = local
        self._remote = remote
        self._decoded = decoded
        self.full: list[Frame] = []
        """Frames that need no base."""
        self.based: list[Frame] = []
        """Frames with a base, each after its base. They are sent after the full frames."""
        self.relied: set[PackId] = set()
        """Remote packs that hold the other frames."""
        self.reused = 0
        """Number of partitions that the target already has."""
        self._depths: dict[Digest, int] = {}
        # Sent as derived frames, which cannot be bases.
        self._sent_derived: set[Digest] = set()
        self._under_deltas: set[Digest] = set()

    @property
    def stored(self) -> int:
        """Payload bytes to send."""
        return sum(frame.stored for frame in (*self.full, *self.based))

    def choose(self, names: Sequence[Digest]) -> None:
        """Select the frames that make ``names`` readable at the target."""
        copies = [self._local.copy(name) for name in names]
        digests = as_column(names)
        is_present = self._remote.have(digests, np.array([copy.plain_length for copy in copies], dtype=np.int64))
        self.relied.update(self._remote.packs_of(digests[is_present]))
        self.reused += int(is_present.sum())
        for number in np.flatnonzero(~is_present).tolist():
            self._send(names[number], copies[number], as_base=False)

    def carries_deltas(self, name: Digest) -> bool:
        """Tell whether deltas on a partition are sent. Re-encoding it would lengthen their chain. Thread-safe."""
        return name in self._under_deltas

    def can_be_base(self, name: Digest) -> bool:
        """Tell whether a partition at the target may be the base of a new delta, and rely on its packs. Thread-safe."""
        depth = self._depth_at_target(name)
        return depth is not None and depth < registry.DELTA_DEPTH_MAX

    def _depth_at_target(self, base: Digest) -> int | None:
        """Return the number of deltas below a base at the target, and rely on its packs; None if it lacks the base."""
        depth = self._remote.depth(base)
        if depth is not None:
            self.relied.update(self._remote.packs_of(as_column([base])))
        return depth

    def _send(self, name: Digest, copy: PartitionCopy, *, as_base: bool, above: frozenset[Digest] = frozenset()) -> int:
        """Add a frame after its base; return the number of deltas between the frame and its full frame.

        ``above`` holds the frames that need this one.

        Raises:
            BaseDamagedError: the chain of bases is a cycle, or too long to decode.
        """
        if name in self._depths and not (as_base and name in self._sent_derived):
            return self._depths[name]
        if name in above or len(above) > _CHAIN_MAX:
            raise BaseDamagedError(f"{copy}: its chain of bases is cyclic or too long; run asymcheck verify")
        kind = copy.kind()
        is_decoded = name in self._decoded or (as_base and kind == registry.KIND_DERIVED)
        depth = 0
        for base in () if is_decoded else copy.bases():
            depth = self._base(base, above | {name}) + (kind == registry.KIND_DELTA)
        if depth > registry.DELTA_DEPTH_MAX:
            is_decoded, depth = True, 0
        self._sent_derived.discard(name)
        if is_decoded:
            read = partial(read_any, self._local, name, first=copy)
            self.full.append(frame_of(FrameDescriptor.identity(name, copy.plain_length), read))
        elif kind == registry.KIND_FULL:
            self.full.append(_as_stored(name, copy))
        else:
            self.based.append(_as_stored(name, copy))
            if kind == registry.KIND_DELTA:
                self._under_deltas |= copy.bases()
            else:
                self._sent_derived.add(name)
        self._depths[name] = depth
        return depth

    def _base(self, base: Digest, above: frozenset[Digest]) -> int:
        depth = self._depth_at_target(base)
        if depth is not None:
            return depth
        copies = self._local.base_copies(base)
        if not copies:
            raise MissingPartitionError(f"base {base.hex()} is in no readable pack; run asymcheck verify", base)
        return self._send(base, copies[0], as_base=True, above=above)


def frame_of(descriptor: FrameDescriptor, payload: Callable[[], memoryview | bytes]) -> Frame:
    """Return a frame whose ``payload`` is computed when it is sent."""

    def read(slot: Slot) -> FrameDescriptor:
        slot.fill(payload())
        return descriptor

    return Frame(descriptor.digest, np.array([entry_of(descriptor, 0)], dtype=ENTRY_DTYPE)[0], read)


def _as_stored(name: Digest, copy: PartitionCopy) -> Frame:
    entry = copy.entry.copy()
    is_shifted = entry["payload_shift"] != 0
    # Only writers that use the memory of tensors need a shift. Without it, the location needs no reader feature.
    entry["payload_shift"] = 0

    def read(slot: Slot) -> FrameDescriptor:
        try:
            descriptor, payload = read_stored(copy, Slot(copy.stored_length) if is_shifted else slot)
        except FormatError as error:
            raise DamagedPartitionError(str(error), name) from error
        except INCONCLUSIVE:
            raise
        except StorageError as error:
            # A read error of the local drive is damage of this partition, not a failure of the location.
            raise DamagedPartitionError(f"{copy}: {error}", name) from error
        if payload.obj is not slot.memory.obj:
            slot.fill(payload)
        return dataclasses.replace(descriptor, payload_shift=0)

    return Frame(name, entry, read)


Older = tuple[Sequence[Manifest], PartitionLocator]
"""Manifests of an older checkpoint that exists on both sides, and the locator of its partitions in the source."""


@contextlib.contextmanager
def older_of(local: ReadTier, listing: CheckpointFiles | None) -> Iterator[Older]:
    """Open an older checkpoint for deltas; yields no manifest if there is none."""
    opened = None if listing is None else result_or_error(_open_older, local, listing)
    if opened is None or isinstance(opened, AsymcheckError):
        # A deleted or damaged older checkpoint only costs compression.
        opened = (), PartitionLocator(local, PartitionSet.of_lengths({}), ())
    with opened[1]:
        yield opened


def _open_older(local: ReadTier, listing: CheckpointFiles) -> Older:
    manifests = read_manifests(local, listing)
    return manifests, PartitionLocator.of_manifests(local, manifests, must_be_complete=False)


class PartitionIndex:
    """Content of the partitions of one checkpoint, and their counterparts in an older checkpoint."""

    def __init__(self, manifests: Sequence[Manifest], older: Sequence[Manifest]) -> None:
        """Index ``manifests``, and those of an older checkpoint, which may be empty."""
        before = {other.header.rank: other for other in older}
        pairs = [(manifest, before.get(manifest.header.rank)) for manifest in manifests]
        self._manifests = manifests
        self._older = [other if other and _is_cut_alike(manifest, other) else None for manifest, other in pairs]
        self._dtypes = [manifest.columns[2].to_pylist() for manifest in manifests]
        self._roles = [manifest.roles() for manifest in manifests]
        # Extents of each partition, as pairs of manifest number and extent number.
        self._extents: dict[bytes, list[tuple[int, int]]] = {}
        for number, manifest in enumerate(manifests):
            for extent, name in enumerate(manifest.extent_digests.tolist()):
                self._extents.setdefault(name, []).append((number, extent))

    def contents(self, name: Digest) -> Contents | None:
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

    def older(self, name: Digest) -> Digest | None:
        """Return the digest of a partition in the older checkpoint; None if it is equal or missing."""
        for rank, extent in self._extents.get(name, ()):
            older = self._older[rank]
            if older is not None:
                digest = Digest(older.extent_digests[extent].tobytes())
                return None if digest == name else digest
        return None


def _is_cut_alike(manifest: Manifest, other: Manifest) -> bool:
    """Tell whether two checkpoints have the same partition boundaries."""
    return manifest.names() == other.names() and all(
        np.array_equal(getattr(manifest, column), getattr(other, column))
        for column in ("extent_starts", "extent_offsets", "extent_lengths", "extent_partition_lengths")
    )


@dataclasses.dataclass(frozen=True)
class Reencoder:
    """Encodes the frames of one checkpoint for the target. Thread-safe."""

    encoder: Encoder
    """Selects the codec of each frame."""
    partitions: PartitionIndex
    planner: TransferPlanner
    """Planner, which knows the content of the location."""
    older: PartitionLocator
    """Locator of the partitions of an older checkpoint, which may be bases."""

    def encoded(self, frame: Frame, slot: Slot) -> Frame:
        """Return a re-encoded frame in memory, or the same frame if re-encoding does not pay."""
        contents = self.partitions.contents(frame.name) if frame.is_plain else None
        if contents is None:
            return frame
        base = self._base(frame.name)
        codecs = [registry.CODEC_BYTE_PLANES, *([] if base is None else [registry.CODEC_DELTA])]
        if self.encoder.stays_plain(frame.stored, contents, codecs):
            return frame
        descriptor = frame.read(slot)
        plain = slot.payload(descriptor.stored_length)
        bases = [] if base is None else self._read_base(*base, len(plain))
        choice = self.encoder.choose(plain, contents, bases)
        encoded = self.encoder.encode(frame.name, choice, plain, contents, bases)
        if encoded is None:
            return frame
        payload = encoded.payload()
        return frame_of(encoded.descriptor, lambda: payload)

    def _base(self, name: Digest) -> tuple[Digest, PartitionCopy] | None:
        """Return the older state of a partition if both sides have it and no chain of deltas becomes too long."""
        base = None if self.planner.carries_deltas(name) else self.partitions.older(name)
        copy = None if base is None else self.older.find(base)
        if base is None or copy is None or not self.planner.can_be_base(base):
            return None
        return base, copy

    def _read_base(self, base: Digest, copy: PartitionCopy, length: int) -> list[Base]:
        plain = result_or_error(read_any, self.older, base, first=copy)
        if isinstance(plain, AsymcheckError) or len(plain) != length:
            # Deleted in the meantime, damaged, or of another length.
            return []
        return [Base(registry.CODEC_DELTA, base, plain)]
