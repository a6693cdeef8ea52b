"""Index of a pack: read from the file, or rebuilt by a scan of the frames if damaged (SPEC.md §A7)."""

from __future__ import annotations

import dataclasses
import errno
import math
from collections.abc import Callable

from asymcheck.errors import (
    FormatError,
    RemoteUnreachableError,
    StorageError,
    StructureError,
    TruncatedError,
    UnsupportedFormatError,
)
from asymcheck.format import registry
from asymcheck.format.frame import HEADER_BYTES, FrameDescriptor, FrameHeader, decode_header
from asymcheck.format.pack import (
    Entries,
    PackHeader,
    decode_index,
    decode_pack_header,
    entries_of,
    entry_length,
    round_up,
)
from asymcheck.types import Digest, PackId

ReadRange = Callable[[int, int], tuple[memoryview, int]]
"""Function of offset and length. Returns bytes of a file, fewer only at the end, and the size of the file."""


@dataclasses.dataclass(frozen=True)
class PackIndex:
    """Header and index entries of a pack."""

    header: PackHeader
    """Header of the pack, or a header rebuilt by a scan."""
    entries: Entries
    damage: FormatError | None
    """Damage of the header or the index, if the frames were found by scanning; else None."""
    stamped: tuple[int, ...] = ()
    """Sequence numbers in the frame headers, if they may differ from the positions: after a scan, and in a ring."""


def digests_of(entries: Entries) -> list[Digest]:
    """Return the digests of all frames of an index, in order."""
    digests: list[Digest] = entries["digest"].tolist()
    return digests


def bases_in(entries: Entries) -> dict[Digest, Digest]:
    """Return the digests of the frames that need a base, with the digest of the base."""
    based = entries[entries["kind"] != registry.KIND_FULL]
    return dict(zip(based["digest"].tolist(), based["base_digest"].tolist(), strict=True))


def find_frames(read: ReadRange, name: str, pack_id: PackId, *, thorough: bool = False) -> PackIndex:
    """Read and check header and index of a pack. If they are damaged or on a bad sector, find the frames by scanning.

    Raises:
        FormatError: header or index is damaged and no frame was found, or the pack needs a newer program.
        StorageError: the drive cannot read the frames, either.
    """
    where, end = f"pack {name}", math.inf
    try:
        block, size = read(0, registry.BLOCK_BYTES)
        header = decode_pack_header(block, where)
        if header.pack_id != pack_id:
            raise StructureError(f"{where}: the header names pack {header.pack_id.hex()}")
        end = header.index_offset
        if size < header.pack_length:
            # Check before memory is allocated for the index, or bytes beyond the end of the file are read.
            raise TruncatedError(f"{where}: the file has {size} of {header.pack_length} bytes")
        index, _ = read(header.index_offset, round_up(header.index_length))
        return PackIndex(header, decode_index(index, header, where), None)
    except (UnsupportedFormatError, RemoteUnreachableError):
        raise
    except (FormatError, StorageError) as error:
        if isinstance(error, FormatError):
            damage = error
        elif getattr(error.__cause__, "errno", None) == errno.EIO:
            damage = StructureError(f"{where}: {error}")
        else:
            raise
        entries, stamped = _scan(read, name, pack_id, end, thorough=thorough)
        if not len(entries) and not thorough:
            raise
        length = int(entries["offset"][-1]) + entry_length(entries[-1]) if len(entries) else 0
        return PackIndex(PackHeader(pack_id, len(entries), length, 0, ""), entries, damage, stamped)


def _scan(
    read: ReadRange, name: str, pack_id: PackId, end: float, *, thorough: bool
) -> tuple[Entries, tuple[int, ...]]:
    """Find the frames of a pack before ``end`` by their headers, as SPEC.md §A7 allows if header or index is damaged.

    Return their entries and their sequence numbers.

    A thorough scan continues block by block after a damaged frame, so sequence numbers may have gaps.

    Raises:
        UnsupportedFormatError: the scan is thorough, and a frame needs a newer program.
        StructureError: all frames belong to another pack, so the file has a wrong name.
    """
    frames: list[tuple[FrameDescriptor, int]] = []
    stamped: list[int] = []
    offset, foreign_frames = registry.BLOCK_BYTES, 0
    while offset < end and len(block := read(offset, HEADER_BYTES)[0]) == HEADER_BYTES:
        header = _frame_header(block, f"frame {len(frames)} of pack {name}", thorough=thorough)
        # In a recycled file, a frame of the earlier pack has the id of that pack.
        if header is not None and header.place_id == pack_id and (thorough or header.sequence == len(frames)):
            frames.append((header.descriptor, offset))
            stamped.append(header.sequence)
            offset += header.descriptor.frame_length
        elif thorough:
            foreign_frames += header is not None
            offset += registry.BLOCK_BYTES
        else:
            break
    if foreign_frames and not frames:
        raise StructureError(f"pack {name} is damaged: it contains only frames of another pack")
    return entries_of(frames), tuple(stamped)


def _frame_header(data: memoryview, where: str, *, thorough: bool) -> FrameHeader | None:
    try:
        return decode_header(data, where)
    except UnsupportedFormatError:
        if thorough:
            raise
    except FormatError:
        pass
    return None
