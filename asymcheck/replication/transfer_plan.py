"""Transfer plan: select checkpoints and frames to copy, and re-encode frames for the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import (
    INCONCLUSIVE,
    BaseDamagedError,
    CheckpointNotFoundError,
    DamagedPartitionError,
    FormatError,
    MissingPartitionError,
    StorageError,
)
from asymcheck.format import registry
from asymcheck.format.digest_set import as_column
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.pack import ENTRY_DTYPE, entry_of
from asymcheck.inspect.history import known_line
from asymcheck.replication.decodable_frames import DecodableFrames
from asymcheck.restore.frame_reader import read_any, read_stored
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator
from asymcheck.restore.resolve import check_run_exists, first, resolve_one
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

    def checked(listing: CheckpointFiles) -> list[CheckpointFiles]:
        resolve_one(tier, listing).sources.close()
        return [listing]

    return first(tier, run or DEFAULT_RUN, step, checked, "copied")


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
