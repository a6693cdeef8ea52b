"""Encode and check the header and the index of packs (SPEC.md §A7)."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from asymcheck.errors import ChecksumError, LimitError, StructureError, TruncatedError
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST, Buffer, is_zero, sum8
from asymcheck.format.frame import FrameDescriptor, check_encoding, frame_length, payload_offset
from asymcheck.format.registry import check_sealed
from asymcheck.types import Digest, Location, PackId

PACK_HEADER = struct.Struct("<8sH6s16sQQQQQ32s16s8s")
INDEX_HEADER = struct.Struct("<8sHHI16sQ8s8s8s")
ENTRY_DTYPE = np.dtype(
    [
        ("digest", "V16"),
        ("base_digest", "V16"),
        ("offset", "<u8"),
        ("stored_length", "<u8"),
        ("plain_length", "<u8"),
        ("kind", "u1"),
        ("codec", "u1"),
        ("digest_algorithm", "u1"),
        ("payload_shift", "<u2"),
        ("reserved_a", "V3"),
    ]
)
Entries = npt.NDArray[np.void]
"""One row of :data:`ENTRY_DTYPE` for each frame."""


def location_of(pack_id: PackId, entries: Entries, number: int) -> Location:
    """Return the location of the frame with this number in the pack index."""
    _, base, offset, stored, plain, kind, codec, algorithm, *_ = entries[number].item()
    return Location(pack_id, offset, stored, plain, kind, codec, algorithm, base)


_HEADER_SUMMED = PACK_HEADER.size - 8
_INDEX_SUMMED = INDEX_HEADER.size - 8


@dataclasses.dataclass(frozen=True)
class PackHeader:
    """The header block of a pack."""

    pack_id: PackId
    """Id of the pack. A recycled file gets a new id."""
    frame_count: int
    index_offset: int
    """Bytes from the start of the file to the pack index."""
    created_ns: int
    writer: str

    @property
    def index_length(self) -> int:
        """Bytes of the pack index without padding."""
        return INDEX_HEADER.size + ENTRY_DTYPE.itemsize * self.frame_count

    @property
    def pack_length(self) -> int:
        """Bytes of the pack. The file may be longer."""
        return round_up(self.index_offset + self.index_length)


def round_up(length: int) -> int:
    """Round ``length`` bytes up to a multiple of the block."""
    return (length + registry.BLOCK_BYTES - 1) // registry.BLOCK_BYTES * registry.BLOCK_BYTES


def encode_pack_header(header: PackHeader) -> bytes:
    """Return the header block of a pack."""
    version = registry.PACK_MAGIC, registry.FORMAT_WRITE, bytes(6)
    lengths = header.frame_count, header.index_offset, header.index_length, header.pack_length
    origin = header.created_ns, header.writer.encode("ascii")[:32]
    summed = PACK_HEADER.pack(*version, header.pack_id, *lengths, *origin, bytes(16), bytes(8))[:_HEADER_SUMMED]
    return (summed + sum8(summed)).ljust(registry.BLOCK_BYTES, b"\0")


def decode_pack_header(data: Buffer, where: str) -> PackHeader:
    """Read and check the header block of a pack. ``where`` names the pack in errors."""
    if len(data) < registry.BLOCK_BYTES:
        raise TruncatedError(f"{where}: pack header has {len(data)} of {registry.BLOCK_BYTES} bytes")
    raw = bytes(data[: registry.BLOCK_BYTES])
    _, _, reserved_a, pack_id, *lengths, created_ns, writer, reserved_b, own_sum = PACK_HEADER.unpack_from(raw)
    count, index_offset, index_length, pack_length = lengths
    check_sealed(raw[:_HEADER_SUMMED], own_sum, registry.PACK_MAGIC, "pack", where)
    if not (is_zero(reserved_a) and is_zero(reserved_b) and is_zero(raw[PACK_HEADER.size :])):
        raise StructureError(f"{where}: reserved bytes or padding of the pack header are not zero")
    if index_length > registry.PACK_INDEX_BYTES_MAX:
        raise LimitError(f"{where}: an index of {index_length} bytes exceeds {registry.PACK_INDEX_BYTES_MAX}")
    writer_name = writer.rstrip(b"\0")
    if not writer_name.isascii() or b"\0" in writer_name:
        raise StructureError(f"{where}: the name of the writer is not ASCII, padded with zero")
    header = PackHeader(PackId(pack_id), count, index_offset, created_ns, writer_name.decode("ascii"))
    is_consistent = header.index_length == index_length and header.pack_length == pack_length
    if count < 1 or index_offset % registry.BLOCK_BYTES or not is_consistent:
        raise StructureError(f"{where}: counts and lengths in the pack header contradict each other")
    return header


def encode_index(pack_id: PackId, entries: Entries) -> bytes:
    """Return the pack index, padded with zero to a block boundary."""
    body = entries.tobytes()
    version = registry.PACK_INDEX_MAGIC, registry.FORMAT_WRITE, ENTRY_DTYPE.itemsize, 0
    sums = bytes(8), sum8(body), bytes(8)
    summed = INDEX_HEADER.pack(*version, pack_id, len(entries), *sums)[:_INDEX_SUMMED]
    data = summed + sum8(summed) + body
    return data.ljust(round_up(len(data)), b"\0")


def decode_index(data: Buffer, header: PackHeader, where: str) -> Entries:
    """Read and check the pack index and its padding."""
    if len(data) < round_up(header.index_length):
        raise TruncatedError(f"{where}: pack index has {len(data)} of {round_up(header.index_length)} bytes")
    _, _, entry_size, reserved_a, pack_id, count, reserved_b, entries_sum, own_sum = INDEX_HEADER.unpack_from(data)
    check_sealed(bytes(data[:_INDEX_SUMMED]), own_sum, registry.PACK_INDEX_MAGIC, "pack index", where)
    if entry_size != ENTRY_DTYPE.itemsize or reserved_a or any(reserved_b):
        raise StructureError(f"{where}: wrong reserved bytes or entry size in the pack index")
    if pack_id != header.pack_id or count != header.frame_count:
        raise StructureError(f"{where}: pack index and pack header disagree")
    body = bytes(data[INDEX_HEADER.size : header.index_length])
    if entries_sum != sum8(body):
        raise ChecksumError(f"{where}: pack index checksum mismatch")
    if not is_zero(data[header.index_length : round_up(header.index_length)]):
        raise StructureError(f"{where}: padding after the pack index is not zero")
    entries: Entries = np.frombuffer(body, dtype=ENTRY_DTYPE)
    _check_entries(entries, header, where)
    return entries


def check_entry(entry: np.void, frame: FrameDescriptor, where: str) -> None:
    """Check that an index entry agrees with the header of the frame."""
    if entry.item() != entry_of(frame, int(entry["offset"])):
        raise StructureError(f"{where}: frame header and pack index entry disagree")


def entry_of(frame: FrameDescriptor, offset: int) -> tuple[object, ...]:
    """Return the index entry of a frame at ``offset`` as a row of :data:`ENTRY_DTYPE`."""
    lengths = offset, frame.stored_length, frame.plain_length
    numbers = frame.kind, frame.codec, frame.digest_algorithm
    return (frame.digest, frame.base_digest, *lengths, *numbers, frame.payload_shift, bytes(3))


def entries_of(frames: Iterable[tuple[FrameDescriptor, int]]) -> Entries:
    """Return the index entries of frames, given with their offsets."""
    entries: Entries = np.array([entry_of(*frame) for frame in frames], dtype=ENTRY_DTYPE)
    return entries


def entry_length(entry: np.void) -> int:
    """Return the length of the frame of an index entry, in bytes."""
    return frame_length(int(entry["stored_length"]), int(entry["payload_shift"]))


def described(entry: np.void, frame: memoryview) -> tuple[FrameDescriptor, memoryview]:
    """Return descriptor and payload of a frame by its index entry alone, because the header may be damaged.

    The caller compares the digest of the plain bytes.
    """
    fields = "plain_length", "stored_length", "kind", "codec", "digest_algorithm", "payload_shift"
    plain, stored, kind, codec, algorithm, shift = (int(entry[field]) for field in fields)
    name, base = Digest(entry["digest"].tobytes()), entry["base_digest"].tobytes()
    start = payload_offset(stored, shift)
    payload = frame[start : start + stored]
    descriptor = FrameDescriptor(name, plain, stored, sum8(payload), kind, codec, algorithm, base, payload_shift=shift)
    return descriptor, payload


def frame_lengths(entries: Entries) -> npt.NDArray[np.uint64]:
    """Return the lengths of all frames of an index (vectorised :func:`entry_length`)."""
    stored, shift = entries["stored_length"], entries["payload_shift"].astype(np.uint64)
    block = np.uint64(registry.BLOCK_BYTES)
    start = np.where(stored >= np.uint64(registry.ALIGNED_PAYLOAD_MIN_BYTES), block + shift, np.uint64(128))
    lengths: npt.NDArray[np.uint64] = (start + stored + block - np.uint64(1)) // block * block
    return lengths


def _check_entries(entries: Entries, header: PackHeader, where: str) -> None:
    stored, plain = entries["stored_length"], entries["plain_length"]
    if stored.max() > registry.FRAME_STORED_BYTES_MAX or plain.max() > registry.PARTITION_BYTES_MAX:
        raise LimitError(f"{where}: a length in the pack index exceeds the limits")
    if stored.min() < 1 or plain.min() < 1:
        raise StructureError(f"{where}: a length in the pack index is zero")
    for kind, codec, algorithm in set(entries[["kind", "codec", "digest_algorithm"]].tolist()):
        check_encoding(kind, codec, algorithm, where)
    if ((entries["codec"] == registry.CODEC_IDENTITY) & (stored != plain)).any():
        raise StructureError(f"{where}: stored and plain lengths of unencoded frames differ")
    shift = entries["payload_shift"]
    if (shift >= registry.BLOCK_BYTES).any() or shift[stored < registry.ALIGNED_PAYLOAD_MIN_BYTES].any():
        raise StructureError(f"{where}: a payload shift in the pack index is not allowed for its stored length")
    if not is_zero(entries["reserved_a"].tobytes()):
        raise StructureError(f"{where}: reserved bytes of a pack index entry are not zero")
    has_base = entries["base_digest"] != np.void(ZERO_DIGEST)
    if not np.array_equal(has_base, entries["kind"] != registry.KIND_FULL):
        raise StructureError(f"{where}: a full frame has a base, or another frame has none")
    if (has_base & (entries["base_digest"] == entries["digest"])).any():
        raise StructureError(f"{where}: a frame in the pack index is its own base")
    ends = np.uint64(registry.BLOCK_BYTES) + np.cumsum(frame_lengths(entries), dtype=np.uint64)
    starts = np.concatenate([np.array([registry.BLOCK_BYTES], dtype=np.uint64), ends[:-1]])
    if not np.array_equal(entries["offset"], starts) or int(ends[-1]) != header.index_offset:
        raise StructureError(f"{where}: frames in the pack index are not contiguous")
