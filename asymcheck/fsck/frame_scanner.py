"""Scan: the packs of a store one after the other, and the frames of each with what is wrong with them.

Verify, repair and rebuild differ only in what they do with a frame. One pack is open and one frame in memory at a time:
a store may have more packs than a process may open files. Errors after which nothing is known of the stored bytes
(:data:`asymcheck.errors.UNKNOWING`) are raised, and never taken for damage.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from asymcheck.codecs.decode import base_reader, decode_checked
from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    BaseDamagedError,
    FormatError,
    MissingPartitionError,
    StorageError,
    UnsupportedFormatError,
)
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.digest import sum8
from asymcheck.format.frame import FrameDescriptor, payload_offset
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import Entries, PackHeader, location_of
from asymcheck.format.registry import CODEC_IDENTITY
from asymcheck.restore.frame_reader import read_checked, read_frame
from asymcheck.restore.partition_locator import PartitionCopy
from asymcheck.storage.base_frames import BaseFrames
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, Location, PackId, Progress

Opened = OpenPack | AsymcheckError
"""An open pack, or why it cannot be opened."""


def each_pack(pack_ids: Iterable[PackId], open_pack: Callable[[PackId], OpenPack]) -> Iterator[tuple[PackId, Opened]]:
    """Open packs one after the other; each is closed before the next is opened."""
    for pack_id in pack_ids:
        try:
            pack = open_pack(pack_id)
        except UNKNOWING:
            raise
        except AsymcheckError as error:
            yield pack_id, error
        else:
            with contextlib.closing(pack):
                yield pack_id, pack


def each_manifest(tier: ReadTier, listing: CheckpointFiles) -> Iterator[tuple[ManifestName, Manifest | AsymcheckError]]:
    """Read the manifests of a checkpoint, or say why not; those that were deleted since it was listed are left out."""
    for name in listing.manifests:
        try:
            manifest = tier.manifests.read(listing.run, listing.ref, name)
        except UNKNOWING:
            raise
        except AsymcheckError as error:
            is_missing = isinstance(error, MissingPartitionError)
            if not is_missing or name in tier.manifests.listing(listing.run, listing.ref).manifests:
                yield name, error
        else:
            yield name, manifest


class Frame(NamedTuple):
    """One frame of an open pack that was read."""

    sequence: int
    name: Digest
    """Digest of its partition, as the index says."""
    problem: AsymcheckError | None
    """The rule that it breaks, or the refusal of the device; None when its plain bytes have the digest."""
    slot: Slot
    """The memory of the scanner, for :meth:`FrameScanner.rescue`."""


class FrameScanner:
    """Reads and checks frames. One serves all packs of a store: to find the bases it looks into every pack."""

    def __init__(self, tier: ReadTier) -> None:
        self._read_base = base_reader(BaseFrames(tier).copies_of)

    def frames(self, pack: OpenPack, wanted: Sequence[int], undecoded: Container[Digest] = ()) -> Iterator[Frame]:
        """Read frames of a pack and check them against header, index entry and digest.

        The payloads of partitions in ``undecoded`` are compared with their checksums only.
        """
        names = pack.digests()
        slot = Slot(int(pack.entries["stored_length"].max(initial=0)))
        pack.expect(wanted)
        for sequence in wanted:
            copy, name, problem = PartitionCopy(pack, sequence), names[sequence], None
            try:
                if name in undecoded:
                    read_frame(copy, slot)
                else:
                    read_checked(copy, name, slot, self._read_base)
            except UNKNOWING:
                raise
            except AsymcheckError as error:
                problem = error
            yield Frame(sequence, name, problem, slot)

    def rescue(self, pack: OpenPack, sequence: int, name: Digest, slot: Slot) -> FrameDescriptor | None:
        """Read a frame; describe its payload if that has the digest, whatever else is wrong with the frame, else None.

        Raises:
            TruncatedError: the file ends before the frame does.
            BaseDamagedError: the base of the frame cannot be had.
            StorageError: the device refused.
        """
        entry = pack.entries[sequence]
        pack.read_frame(sequence, slot)
        stored, plain, kind, codec = (int(entry[field]) for field in ("stored_length", "plain_length", "kind", "codec"))
        shift = int(entry["payload_shift"])
        start = payload_offset(stored, shift)
        payload = slot.memory[start : start + stored]
        if codec == CODEC_IDENTITY:
            return FrameDescriptor.identity(name, stored, shift) if digest_of(payload) == name else None
        base, own_sum = entry["base_digest"].tobytes(), sum8(payload)
        described = FrameDescriptor(name, plain, stored, own_sum, kind, codec, base_digest=base, payload_shift=shift)
        try:
            decode_checked(name, described, payload, str(PartitionCopy(pack, sequence)), self._read_base)
        except BaseDamagedError:
            raise
        except FormatError:
            return None
        return described


@dataclasses.dataclass
class PackContent:
    """Content of one pack."""

    header: PackHeader
    """Its header, or what a scan makes of it."""
    entries: Entries
    """One for each frame that was found."""
    names: list[Digest]
    damage: str
    """Damage of the header or the index; a catalog has no entries of such a pack."""
    wrong: dict[int, str] = dataclasses.field(default_factory=dict)
    """Frames that break a rule, by number, and which."""
    rescued: set[int] = dataclasses.field(default_factory=set)
    """Damaged frames whose payload still has the digest, so that the partition can be rescued."""
    unread: set[int] = dataclasses.field(default_factory=set)
    """Those of them that the device did not give: they may be intact."""
    baseless: set[int] = dataclasses.field(default_factory=set)
    """Frames that break no rule, but cannot be decoded for want of a base; garbage, or the base may come back."""

    @property
    def is_sound(self) -> bool:
        """Whether the pack is as the format says."""
        return not self.damage and not self.wrong

    def promised(self) -> list[int]:
        """Return the frames that a save may rely on."""
        return [] if self.damage else self._but(self.wrong.keys() | self.baseless)

    def intact(self) -> list[int]:
        """Return the frames whose partition can be had."""
        return self._but((self.wrong.keys() - self.rescued) | self.baseless)

    def _but(self, some: set[int]) -> list[int]:
        return [number for number in range(len(self.names)) if number not in some]

    def copy(self, sequence: int) -> tuple[Digest, bytes]:
        """Return the digest of a frame, and that of its base; zero for a full one."""
        return self.names[sequence], self.entries["base_digest"][sequence].tobytes()

    def location(self, sequence: int) -> Location:
        """Return where a frame lies, as a catalog says it."""
        return location_of(self.header.pack_id, self.entries, sequence)

    def check(self, pack: OpenPack, scanner: FrameScanner) -> None:
        """Read all frames of the open pack, and note what is wrong with them.

        Raises:
            UnsupportedFormatError: the pack needs a newer program.
        """
        for frame in scanner.frames(pack, range(len(self.names))):
            problem, sequence = frame.problem, frame.sequence
            if isinstance(problem, UnsupportedFormatError):
                raise problem
            if isinstance(problem, BaseDamagedError):
                # Nothing is wrong with this frame. Whoever needs it is told; else its base was garbage as it is.
                self.baseless.add(sequence)
            elif problem is not None:
                self.wrong[sequence] = str(problem)
            if isinstance(problem, StorageError):
                self.unread.add(sequence)
            elif sequence in self.wrong:
                with contextlib.suppress(FormatError, StorageError):
                    if scanner.rescue(pack, sequence, frame.name, frame.slot) is not None:
                        self.rescued.add(sequence)


@dataclasses.dataclass
class Survey:
    """Contents of the packs of a store."""

    packs: dict[PackId, PackContent] = dataclasses.field(default_factory=dict)
    """Packs that were read."""
    left_out: dict[PackId, AsymcheckError] = dataclasses.field(default_factory=dict)
    """Packs that were not, and why: held by another process, for a newer program, or the device refused."""

    def take(self, pack_id: PackId, pack: Opened, scanner: FrameScanner | None = None) -> None:
        """Note what a pack holds, as its index says; with a ``scanner``, as its frames say."""
        if isinstance(pack, MissingPartitionError):
            return  # Collected since it was listed.
        if isinstance(pack, AsymcheckError):
            self.left_out[pack_id] = pack
            return
        content = PackContent(pack.header, pack.entries, pack.digests(), str(pack.damage or ""))
        try:
            if scanner is not None:
                content.check(pack, scanner)
        except UnsupportedFormatError as error:
            self.left_out[pack_id] = error
        else:
            self.packs[pack_id] = content


def read_indexes(tier: NvmeTier) -> Survey:
    """Read the header and the index of every pack, and no frame."""
    found = Survey()
    for pack_id, pack in each_pack(tier.pack_ids(), tier.open_pack):
        found.take(pack_id, pack)
    return found


def survey(tier: NvmeTier, progress: Progress | None = None) -> Survey:
    """Read every frame of every pack and compare it with its digest."""
    found, done, scanner = Survey(), 0, FrameScanner(tier)
    sizes = {pack_id: 0 if progress is None else tier.pack_bytes(pack_id) for pack_id in tier.pack_ids()}
    for pack_id, pack in each_pack(sizes, tier.open_pack_to_repair):
        found.take(pack_id, pack, scanner)
        done += sizes[pack_id]
        if progress is not None:
            progress(done, sum(sizes.values()))
    return found
