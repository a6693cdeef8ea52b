"""A survey: every pack of a store read to the last byte, to say which partitions lie where intact."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from asymcheck.codecs.chain import BaseReader, base_reader, decode_checked
from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    BaseDamagedError,
    DigestMismatchError,
    FormatError,
    MissingPartitionError,
    StorageError,
    UnsupportedFormatError,
)
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.digest import sum8
from asymcheck.format.frame import FrameDescriptor, payload_offset
from asymcheck.format.pack import Entries, PackHeader
from asymcheck.format.registry import CODEC_IDENTITY
from asymcheck.recovery.fetch import read_checked
from asymcheck.recovery.locate import Copy
from asymcheck.tiers.nvme import BaseFrames, NvmeTier, PackFile, Slot
from asymcheck.types import Digest, Location, PackId, Progress


@dataclasses.dataclass
class PackContent:
    """What one pack holds."""

    header: PackHeader
    """Its header, or what a scan makes of it."""
    entries: Entries
    """One for each frame that was found."""
    names: list[Digest]
    """Their digests."""
    damage: str = ""
    """What is wrong with the header or the index; no catalog may promise what such a pack holds."""
    wrong: dict[int, str] = dataclasses.field(default_factory=dict)
    """Frames that break a rule, by number, and which."""
    rescued: set[int] = dataclasses.field(default_factory=set)
    """Those of them whose payload has the digest all the same, so that nothing is lost with the rest of the frame."""
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

    def lost(self) -> list[int]:
        """Return the frames whose partition cannot be had from here."""
        return [i for i in self.wrong if i not in self.rescued]

    def copy(self, sequence: int) -> tuple[Digest, bytes]:
        """Return the digest of a frame, and that of its base; zero for a full one."""
        return self.names[sequence], self.entries["base_digest"][sequence].tobytes()

    def location(self, sequence: int) -> Location:
        """Return where a frame lies, as the catalog says it."""
        row = self.entries[["offset", "stored_length", "plain_length", "kind", "codec", "digest_algorithm"]]
        offset, stored, plain, kind, codec, algorithm = row[sequence].tolist()
        _, base = self.copy(sequence)
        return Location(self.header.pack_id, offset, stored, plain, kind, codec, algorithm, base)


@dataclasses.dataclass
class Survey:
    """What a survey of the packs found."""

    packs: dict[PackId, PackContent] = dataclasses.field(default_factory=dict)
    """Packs that were read."""
    left_out: dict[PackId, AsymcheckError] = dataclasses.field(default_factory=dict)
    """Packs that were not, and why: held by another process, for a newer program, or the device refused."""

    def places(self) -> dict[Digest, PackId]:
        """Return for each partition one sound pack that holds it."""
        return {
            pack.names[sequence]: pack_id
            for pack_id, pack in self.packs.items()
            if pack.is_sound
            for sequence in pack.promised()
        }


def read_indexes(tier: NvmeTier) -> Survey:
    """Read the header and the index of every pack, and no frame."""

    def read(pack_id: PackId) -> PackContent:
        with contextlib.closing(tier.open_pack(pack_id)) as pack:
            return _content(pack)

    return _of_each(tier, read)


def survey(tier: NvmeTier, progress: Progress | None = None) -> Survey:
    """Read every frame of every pack and compare it with its digest.

    Raises:
        TooManyFilesError, ReadOnlyStoreError: this process may not open a file more, or not this one.
    """
    # One for all packs: each that is made looks into every pack.
    read_base = base_reader(BaseFrames(tier).copies_of)
    return _of_each(tier, lambda pack_id: examine(tier, pack_id, read_base), progress)


def _of_each(tier: NvmeTier, read: Callable[[PackId], PackContent], progress: Progress | None = None) -> Survey:
    found, done = Survey(), 0
    sizes = {pack_id: 0 if progress is None else tier.pack_bytes(pack_id) for pack_id in tier.pack_ids()}
    for pack_id, size in sizes.items():
        try:
            found.packs[pack_id] = read(pack_id)
        except UNKNOWING:
            raise  # nothing is wrong with the pack
        except MissingPartitionError:
            pass  # Collected since it was listed.
        except AsymcheckError as error:
            found.left_out[pack_id] = error
        done += size
        if progress is not None:
            progress(done, sum(sizes.values()))
    return found


def examine(tier: NvmeTier, pack_id: PackId, read_base: BaseReader) -> PackContent:
    """Read all of one pack; ``read_base`` reads what its frames are encoded against.

    Raises:
        MissingPartitionError, LockTimeoutError, StorageError, FormatError: it cannot be looked into, and why.
    """
    with contextlib.closing(tier.open_pack_to_repair(pack_id)) as pack:
        content = _content(pack)
        slot = Slot(max((int(length) for length in content.entries["stored_length"]), default=0))
        for sequence, name in enumerate(content.names):
            _check(content, pack, sequence, name, slot, read_base)
        return content


def _content(pack: PackFile) -> PackContent:
    return PackContent(pack.header, pack.entries, pack.digests(), "" if pack.damage is None else str(pack.damage))


def _check(
    content: PackContent, pack: PackFile, sequence: int, name: Digest, slot: Slot, read_base: BaseReader
) -> None:
    try:
        if content.damage:
            # Found by scanning: the header was checked, and its place in a damaged pack does not matter.
            if read_payload(pack, sequence, name, slot, read_base) is None:
                raise DigestMismatchError(f"digest mismatch in frame {sequence} of pack {content.header.pack_id.hex()}")
        else:
            read_checked(Copy(pack, sequence), name, slot, read_base)
    except UnsupportedFormatError:
        raise
    except BaseDamagedError:
        # Nothing is wrong with this frame. Whoever needs it is told; else its base was garbage as it is.
        content.baseless.add(sequence)
    except FormatError as error:
        content.wrong[sequence] = str(error)
        with contextlib.suppress(FormatError, StorageError):
            if read_payload(pack, sequence, name, slot, read_base) is not None:
                content.rescued.add(sequence)
    except StorageError as error:
        content.wrong[sequence] = str(error)
        content.unread.add(sequence)


def read_payload(
    pack: PackFile, sequence: int, name: Digest, slot: Slot, read_base: BaseReader
) -> FrameDescriptor | None:
    """Read one frame; describe its payload if that gives the digest, whatever else is wrong with the frame, else None.

    Raises:
        TruncatedError: the file ends before the frame does.
        BaseDamagedError: what the frame is encoded against cannot be had.
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
    base = entry["base_digest"].tobytes()
    described = FrameDescriptor(name, plain, stored, sum8(payload), kind, codec, base_digest=base, payload_shift=shift)
    try:
        decode_checked(name, described, payload, f"frame {sequence} of pack {pack.path.name}", read_base)
    except BaseDamagedError:
        raise
    except FormatError:
        return None
    return described
