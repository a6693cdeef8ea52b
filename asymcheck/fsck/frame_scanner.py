"""Scan the packs of a store and check every frame. Verify, repair and catalog rebuild share this scanner.

One pack is open and one frame is in memory at a time, because a store may have more packs than a process may open
files. Errors that say nothing about the stored bytes (:data:`asymcheck.errors.INCONCLUSIVE`) are raised, not recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from asymcheck.codecs.decode import base_reader, decode_checked
from asymcheck.errors import (
    AsymcheckError,
    BaseDamagedError,
    FormatError,
    MissingPartitionError,
    StorageError,
    UnsupportedFormatError,
    result_or_error,
)
from asymcheck.format import registry
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import Entries, PackHeader, described, location_of
from asymcheck.restore.frame_reader import read_checked, read_frame
from asymcheck.restore.partition_locator import PartitionCopy
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, Location, PackId, Progress, ProgressMeter

_LISTINGS = 8
"""Maximum number of listings of packs in a scan. A training may move partitions during each of them."""

_ATTEMPTS = 3
"""Limit on rescans: garbage may lack its base for good, and a training keeps adding packs."""
_NAME = f"S{registry.DIGEST_BYTES}"
"""Type of a digest in an array that can be sorted."""

OpenPackOf = Callable[[PackId], OpenPack]
"""Open a complete pack for reading."""
Opened = OpenPack | AsymcheckError
"""An open pack, or the error of opening it."""


def each_pack(pack_ids: Iterable[PackId], open_pack: OpenPackOf) -> Iterator[tuple[PackId, Opened]]:
    """Open packs one after the other. Each pack is closed before the next is opened."""
    for pack_id in pack_ids:
        pack = result_or_error(open_pack, pack_id)
        if isinstance(pack, AsymcheckError):
            yield pack_id, pack
        else:
            with contextlib.closing(pack):
                yield pack_id, pack


def every_pack(
    tier: NvmeTier, open_pack: OpenPackOf, progress: Progress | None = None
) -> Iterator[tuple[PackId, Opened]]:
    """Open all packs one after the other, including those that appear meanwhile in place of removed ones."""
    meter, listed = ProgressMeter(progress), set[PackId]()
    for _ in range(_LISTINGS):
        sizes = {pack_id: tier.pack_bytes(pack_id) for pack_id in tier.pack_ids() if pack_id not in listed}
        listed.update(sizes)
        meter.total += sum(sizes.values())
        is_missing = False
        for pack_id, pack in each_pack(sizes, open_pack):
            is_missing = is_missing or isinstance(pack, MissingPartitionError)
            yield pack_id, pack
            meter.add(sizes[pack_id])
        # A collection may have copied the partitions of a removed pack into a pack that is not listed yet.
        if not is_missing:
            break


def each_manifest(tier: ReadTier, listing: CheckpointFiles) -> Iterator[tuple[ManifestName, Manifest | AsymcheckError]]:
    """Read the manifests of a checkpoint, or yield the error. Skip manifests that were deleted since the listing."""
    run, ref = listing.run, listing.ref
    for name in tier.manifests.each_name(listing):
        manifest = result_or_error(tier.manifests.read, run, ref, name)
        if not isinstance(manifest, MissingPartitionError) or name in tier.manifests.listing(run, ref).manifests:
            yield name, manifest


class BaseFrames:
    """Frames in the packs of ``tier``, to be found by digest. Packs are scanned at the first lookup. For one thread."""

    def __init__(self, tier: ReadTier, open_pack: OpenPackOf | None = None) -> None:
        """Find bases as readers do. With ``open_pack``, for a repair, also use frames with a damaged header."""
        self._tier, self._open_pack = tier, open_pack or tier.open_pack
        self._is_repair = open_pack is not None
        self._packs: dict[PackId, int] = {}
        # Digests of all frames in order, with the number of the pack and of the frame.
        self._names = np.empty(0, dtype=_NAME)
        self._places = np.empty((0, 2), dtype=np.int64)
        self._missed: Counter[Digest] = Counter()

    def copies_of(self, name: Digest) -> Iterator[Callable[[], tuple[FrameDescriptor, memoryview, str]]]:
        """Yield a reader for each copy of a base frame. Readers return the checked descriptor, payload and frame name.

        Readers raise FormatError, MissingPartitionError, or StorageError. Request the next copy only if no earlier
        copy could be read.
        """
        known = self._locations(name)
        yield from (partial(self._read, *location) for location in known)
        self._missed[name] += 1
        if self._missed[name] <= _ATTEMPTS:
            # A repack may have copied the base into a new pack.
            self._scan()
            yield from (partial(self._read, *location) for location in self._locations(name) if location not in known)

    def _locations(self, name: Digest) -> list[tuple[PackId, int]]:
        if not self._packs:
            self._scan()
        key = np.frombuffer(name, dtype=_NAME)
        first, end = (int(np.searchsorted(self._names, key, side)[0]) for side in ("left", "right"))
        pack_ids = list(self._packs)
        return [(pack_ids[pack], frame) for pack, frame in self._places[first:end].tolist()]

    def _scan(self) -> None:
        """Add the frames of new packs."""
        names, places = [self._names], [self._places]
        for pack_id in self._tier.pack_ids():
            if pack_id not in self._packs:
                number = self._packs[pack_id] = len(self._packs)
                pack = result_or_error(self._open_pack, pack_id)
                if not isinstance(pack, AsymcheckError):
                    with contextlib.closing(pack):
                        names.append(np.frombuffer(pack.entries["digest"].tobytes(), dtype=_NAME))
                    frames = np.arange(len(names[-1]))
                    places.append(np.column_stack((np.full_like(frames, number), frames)))
        if len(names) > 1:
            joined = np.concatenate(names)
            order = np.argsort(joined, kind="stable")
            self._names, self._places = joined[order], np.concatenate(places)[order]

    def _read(self, pack_id: PackId, sequence: int) -> tuple[FrameDescriptor, memoryview, str]:
        with contextlib.closing(self._open_pack(pack_id)) as pack:
            copy = PartitionCopy(pack, sequence)
            slot = Slot(copy.stored_length)
            if self._is_repair:
                return *described(copy.entry, pack.read_frame(sequence, slot)), str(copy)
            return read_frame(copy, slot)


class Frame(NamedTuple):
    """A frame of an open pack, after it was read."""

    sequence: int
    name: Digest
    """Digest of the partition in the pack index."""
    problem: AsymcheckError | None
    """The broken rule or the I/O error; None if the plain bytes have the digest."""
    slot: Slot
    """The read buffer of the scanner, for :meth:`FrameScanner.salvage`."""


class FrameScanner:
    """Reads and checks the frames of any pack of a tier. Bases are searched in all packs."""

    def __init__(self, tier: ReadTier, open_pack: OpenPackOf | None = None) -> None:
        """Read the frames of ``tier``. Find bases as readers do or, with ``open_pack``, as :class:`BaseFrames` says."""
        self._read_base = base_reader(BaseFrames(tier, open_pack).copies_of)

    def frames(self, pack: OpenPack, wanted: Sequence[int], undecoded: Container[Digest] = ()) -> Iterator[Frame]:
        """Read frames of a pack and check header, index entry and digest.

        Partitions in ``undecoded`` are not decoded: only the checksums of their payloads are checked.
        """
        digests = pack.digests()
        slot = Slot(int(pack.entries["stored_length"].max(initial=0)))
        pack.expect(wanted)
        for sequence in wanted:
            copy, name = PartitionCopy(pack, sequence), digests[sequence]
            read = partial(read_checked, copy, name, slot, self._read_base)
            found = result_or_error(partial(read_frame, copy, slot) if name in undecoded else read)
            yield Frame(sequence, name, found if isinstance(found, AsymcheckError) else None, slot)

    def salvage(self, pack: OpenPack, sequence: int, name: Digest, slot: Slot) -> FrameDescriptor | None:
        """Read a frame of which the header may be damaged. Return its descriptor if the payload has the digest.

        Raises:
            TruncatedError: the file ends before the frame.
            BaseDamagedError: the base of the frame is unreadable.
            StorageError: the device failed.
        """
        descriptor, payload = described(pack.entries[sequence], pack.read_frame(sequence, slot))
        try:
            decode_checked(name, descriptor, payload, str(PartitionCopy(pack, sequence)), self._read_base)
        except BaseDamagedError:
            raise
        except FormatError:
            return None
        return descriptor


@dataclasses.dataclass
class PackContent:
    """Frames of one pack, by sequence number, with their damage."""

    header: PackHeader
    """The pack header, or a header rebuilt from a scan."""
    entries: Entries
    """Index entries of the frames."""
    digests: list[Digest]
    damage: str
    """Damage of the header or the index; empty if both are intact. The catalog has no entries of a damaged pack."""
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
    """Damaged frames, with the reasons."""
    salvageable: set[int] = dataclasses.field(default_factory=set)
    """Damaged frames whose payload still has the digest."""
    unreadable: set[int] = dataclasses.field(default_factory=set)
    """Damaged frames that the device could not read. They may be intact."""
    without_base: set[int] = dataclasses.field(default_factory=set)
    """Intact frames whose base is missing. They are garbage, or the base may be stored again."""

    @property
    def is_sound(self) -> bool:
        """Whether the header, the index and all frames are intact."""
        return not self.damage and not self.damaged

    def reusable(self) -> list[int]:
        """Return the frames that a save may reuse."""
        return [] if self.damage else self._without(self.damaged.keys() | self.without_base)

    def readable(self) -> list[int]:
        """Return the frames whose partition can be decoded."""
        return self._without((self.damaged.keys() - self.salvageable) | self.without_base)

    def _without(self, excluded: set[int]) -> list[int]:
        return [sequence for sequence in range(len(self.digests)) if sequence not in excluded]

    def copy(self, sequence: int) -> tuple[Digest, bytes]:
        """Return the digest of a frame, and the digest of its base (zero for a full frame)."""
        return self.digests[sequence], self.entries["base_digest"][sequence].tobytes()

    def location(self, sequence: int) -> Location:
        """Return the location of a frame for the catalog."""
        return location_of(self.header.pack_id, self.entries, sequence)

    def check(self, pack: OpenPack, scanner: FrameScanner) -> None:
        """Read all frames of the open pack and record damage.

        Raises:
            UnsupportedFormatError: the pack needs a newer program.
        """
        for frame in scanner.frames(pack, range(len(self.digests))):
            problem, sequence = frame.problem, frame.sequence
            if isinstance(problem, UnsupportedFormatError):
                raise problem
            if isinstance(problem, BaseDamagedError):
                # The frame itself is intact. Repair reports the loss only if a checkpoint needs the partition.
                self.without_base.add(sequence)
            elif problem is not None:
                self.damaged[sequence] = str(problem)
            if isinstance(problem, StorageError):
                self.unreadable.add(sequence)
            elif sequence in self.damaged:
                with contextlib.suppress(FormatError, StorageError):
                    if scanner.salvage(pack, sequence, frame.name, frame.slot) is not None:
                        self.salvageable.add(sequence)


@dataclasses.dataclass
class ScanResult:
    """The packs of a store."""

    packs: dict[PackId, PackContent] = dataclasses.field(default_factory=dict)
    """Scanned packs."""
    skipped: dict[PackId, AsymcheckError] = dataclasses.field(default_factory=dict)
    """Packs that were not scanned, with the reason: locked by another process, newer format, or I/O error."""

    def add(self, pack_id: PackId, pack: Opened, scanner: FrameScanner | None = None) -> None:
        """Add a pack by its index. With a ``scanner``, also check its frames."""
        if isinstance(pack, MissingPartitionError):
            return  # Garbage collection removed the pack after the listing.
        if isinstance(pack, AsymcheckError):
            self.skipped[pack_id] = pack
            return
        content = PackContent(pack.header, pack.entries, pack.digests(), str(pack.damage or ""))
        try:
            if scanner is not None:
                content.check(pack, scanner)
        except UnsupportedFormatError as error:
            self.skipped[pack_id] = error
        else:
            self.packs[pack_id] = content


def read_indexes(tier: NvmeTier) -> ScanResult:
    """Read the header and the index of every pack, without reading frames."""
    scan = ScanResult()
    for pack_id, pack in each_pack(tier.pack_ids(), tier.open_pack):
        scan.add(pack_id, pack)
    return scan


def scan_packs(tier: NvmeTier, progress: Progress | None = None) -> ScanResult:
    """Read and check every frame of every pack."""
    scan, scanner = ScanResult(), FrameScanner(tier, tier.open_pack_to_repair)
    for pack_id, pack in every_pack(tier, tier.open_pack_to_repair, progress):
        scan.add(pack_id, pack, scanner)
    return scan
