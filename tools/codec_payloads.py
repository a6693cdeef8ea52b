"""Encode payloads of SPEC.md §A10 integer by integer, so that vectors do not depend on the library's codecs."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from asymcheck.format.digest import digest, sum8
from asymcheck.format.frame import FrameDescriptor, encode_header, frame_length, payload_offset
from asymcheck.format.pack import ENTRY_DTYPE, PackHeader, encode_index, encode_pack_header
from asymcheck.types import Digest, PackId
from tools.vectors_base import CREATED_NS, WRITER
from tools.vectors_pack import PACK_ID, PackParts

CHUNK = 4096
"""Plain bytes of a chunk in vectors: the minimum that the format allows."""

Segments = Sequence[tuple[int, int, int]]
"""Length, width and float mark of each segment."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A partition in one of the codecs."""

    plain: bytes
    """The plain bytes."""
    payload: bytes
    """Stored bytes."""
    kind: int
    """Frame kind."""
    codec: int
    """Codec number."""
    base: bytes = bytes(16)
    """Digest of the base."""
    name: bytes = b""
    """Digest, if it differs from the digest of the plain bytes."""

    @property
    def descriptor(self) -> FrameDescriptor:
        """Descriptor in the frame's header."""
        name = Digest(self.name) if self.name else digest(self.plain)
        own = name[8:] if self.codec == 0 else sum8(self.payload)
        lengths = (len(self.plain), len(self.payload))
        return FrameDescriptor(name, *lengths, own, self.kind, self.codec, base_digest=self.base)


def identity(plain: bytes) -> Stored:
    """Return a partition with codec identity."""
    return Stored(plain, plain, 0, 0)


def pack_of(stored: Sequence[Stored], place: PackId = PACK_ID) -> PackParts:
    """Return a pack of these partitions."""
    entries = np.zeros(len(stored), dtype=ENTRY_DTYPE)
    frames, offset = [], 4096
    for row, one in enumerate(stored):
        described = one.descriptor
        start, end = payload_offset(described.stored_length), frame_length(described.stored_length)
        frames.append((encode_header(described, place, row).ljust(start, b"\0") + one.payload).ljust(end, b"\0"))
        for field in ("stored_length", "plain_length", "kind", "codec", "digest_algorithm"):
            entries[row][field] = getattr(described, field)
        entries[row]["digest"], entries[row]["base_digest"] = np.void(described.digest), np.void(one.base)
        entries[row]["offset"] = offset
        offset += end
    header = PackHeader(place, len(stored), offset, CREATED_NS, WRITER)
    return PackParts(encode_pack_header(header), tuple(frames), encode_index(place, entries))


def zstd_frame(length: int, blocks: Iterable[tuple[int, int, bytes]], flags: int = 0xA0) -> bytes:
    """Return a Zstandard frame with a content size of 4 bytes; a block is type (0 raw, 1 run), size and content."""
    data, rows = bytearray(b"\x28\xb5\x2f\xfd" + struct.pack("<BI", flags, length)), list(blocks)
    for number, (kind, size, content) in enumerate(rows):
        word = (number == len(rows) - 1) | kind << 1 | size << 3
        data += word.to_bytes(3, "little") + content
    return bytes(data)


def zstd_raw(plain: bytes) -> bytes:
    """Return a Zstandard frame with raw blocks."""
    return zstd_frame(len(plain), [(0, len(plain), plain)])


def zstd_runs(plain: bytes) -> bytes:
    """Return a Zstandard frame of one block for each run of a byte."""
    runs = [(byte, len(list(group))) for byte, group in itertools.groupby(plain)]
    return zstd_frame(len(plain), [(1, size, bytes([byte])) for byte, size in runs])


def planes_of(plain: bytes, segments: Segments, value: Callable[[int, int, int, int], int]) -> list[bytes]:
    """Return the planes in order; ``value`` maps an element: position in the partition, bits, width, float mark."""
    found, start = [], 0
    for length, width, is_float in segments:
        for begin in range(start, start + length, CHUNK):
            end = min(begin + CHUNK, start + length)
            elements = [
                value(at, int.from_bytes(plain[at : at + width], "little"), width, is_float).to_bytes(width, "little")
                for at in range(begin, end, width)
            ]
            found += [bytes(element[number] for element in elements) for number in range(width)]
        start += length
    return found


def packed_planes(planes: Iterable[bytes]) -> list[tuple[int, int, bytes]]:
    """Choose the encoding of each plane: encoding, value, data."""
    rows: list[tuple[int, int, bytes]] = []
    for plane in planes:
        runs = zstd_runs(plane)
        if len(set(plane)) == 1:
            rows.append((2, plane[0], b""))
        elif len(runs) < len(plane):
            rows.append((1, len(runs), runs))
        else:
            rows.append((0, len(plane), plane))
    return rows


def container(segments: Segments, rows: Sequence[tuple[int, int, bytes]], chunk_bytes: int = CHUNK) -> bytes:
    """Return the payload of SPEC.md §A10.2."""
    head = struct.pack("<IIII", chunk_bytes, len(segments), len(rows), 0)
    table = b"".join(struct.pack("<IBBH", *segment, 0) for segment in segments)
    words = b"".join(struct.pack("<I", encoding << 24 | value) for encoding, value, _ in rows)
    return head + table + words + b"".join(data for _, _, data in rows)


def _rotated(_at: int, bits: int, width: int, is_float: int) -> int:
    size = 8 * width
    return (bits << 1 | bits >> (size - 1)) & ((1 << size) - 1) if is_float else bits


def planes(plain: bytes, segments: Segments) -> Stored:
    """Return a partition in codec byte-planes."""
    return Stored(plain, container(segments, packed_planes(planes_of(plain, segments, _rotated))), 0, 2)


def _order(bits: int, size: int, is_float: int) -> int:
    return bits ^ ((1 << (size - 1)) - 1) if is_float and bits >> (size - 1) else bits


def delta(plain: bytes, segments: Segments, base: bytes) -> Stored:
    """Return a partition in codec ordered-integer-delta."""

    def difference(at: int, bits: int, width: int, is_float: int) -> int:
        size = 8 * width
        older = int.from_bytes(base[at : at + width], "little")
        signed = (_order(bits, size, is_float) - _order(older, size, is_float)) % (1 << size)
        doubled = 2 * signed % (1 << size)
        return doubled ^ ((1 << size) - 1) if signed >> (size - 1) else doubled

    rows = packed_planes(planes_of(plain, segments, difference))
    return Stored(plain, container(segments, rows), 1, 3, digest(base))


def derived(plain: bytes, dtype: int, base: bytes, offset: int) -> Stored:
    """Return a partition in codec derived-round-to-nearest. The caller must pass matching ``plain`` bytes."""
    return Stored(plain, struct.pack("<B7xQ", dtype, offset), 2, 4, digest(base))
