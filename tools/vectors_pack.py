"""Vectors of well-formed frames and packs (SPEC.md §A6, §A7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, encode_header, payload_offset
from asymcheck.format.pack import ENTRY_DTYPE, PackHeader, encode_index, encode_pack_header
from asymcheck.types import PackId
from tools.vectors_base import CREATED_NS, WRITER, Vector, fixed_bytes, pack_id, plain_bytes, valid

PACK_ID = pack_id("golden")
PACK_PATH = f"packs/{PACK_ID.hex()}.pack"


def make_frame(plain: bytes, place: PackId = PACK_ID, sequence: int = 0, shift: int = 0) -> bytes:
    """Return a whole frame of codec identity."""
    descriptor = FrameDescriptor.identity(digest(plain), len(plain), shift)
    header = encode_header(descriptor, place, sequence)
    return (header.ljust(descriptor.payload_offset, b"\0") + plain).ljust(descriptor.frame_length, b"\0")


@dataclasses.dataclass(frozen=True)
class PackParts:
    """The parts of a pack, each of which an invalid vector may replace."""

    header: bytes
    """The header block."""
    frames: tuple[bytes, ...]
    """The frames."""
    index: bytes
    """The index with its padding."""

    @property
    def data(self) -> bytes:
        """The whole file."""
        return b"".join([self.header, *self.frames, self.index])


def make_pack(plains: Sequence[bytes], place: PackId = PACK_ID, shifts: Sequence[int] = ()) -> PackParts:
    """Return a pack of these partitions; ``shifts`` are the shifts of their payloads, by default 0."""
    shifts = [*shifts, *[0] * (len(plains) - len(shifts))]
    frames = tuple(make_frame(plain, place, i, shifts[i]) for i, plain in enumerate(plains))
    entries = np.zeros(len(plains), dtype=ENTRY_DTYPE)
    offset = 4096
    for row, (plain, frame) in enumerate(zip(plains, frames, strict=True)):
        entries[row]["digest"] = np.void(digest(plain))
        entries[row]["offset"] = offset
        entries[row]["stored_length"] = entries[row]["plain_length"] = len(plain)
        entries[row]["digest_algorithm"] = 1
        entries[row]["payload_shift"] = shifts[row]
        offset += len(frame)
    header = PackHeader(place, len(plains), offset, CREATED_NS, WRITER)
    return PackParts(encode_pack_header(header), frames, encode_index(place, entries))


def _frame_value(plain: bytes, place: PackId, sequence: int, shift: int = 0) -> dict[str, object]:
    """Return the fields of SPEC.md's table of the frame header."""
    return {
        "magic": "ASYMFRAM",
        "format": 1,
        "kind": 0,
        "codec": 0,
        "digest_algorithm": 1,
        "digest": digest(plain).hex(),
        "plain_length": len(plain),
        "stored_length": len(plain),
        "stored_sum": digest(plain)[8:].hex(),
        "base_digest": bytes(16).hex(),
        "payload_offset": payload_offset(len(plain), shift),
        "codec_parameters": bytes(12).hex(),
        "place_id": place.hex(),
        "sequence": sequence,
    }


def frame_vectors() -> Iterator[Vector]:
    """Yield well-formed frames."""

    def frame(name: str, plain: bytes, why: str, place: PackId = PACK_ID, sequence: int = 0, shift: int = 0) -> Vector:
        # The payload repeats 64 bytes. Storing them once keeps the text readable.
        value = {**_frame_value(plain, place, sequence, shift), "payload_pattern": plain[:64].hex()}
        context = {"place_id": place.hex(), "sequence": sequence, "path": f"packs/{place.hex()}.pack"}
        return valid("frame", name, make_frame(plain, place, sequence, shift), why, value, **context)

    yield frame("one-byte", b"\x7f", "the shortest partition")
    yield frame("small", plain_bytes("small", 300), "header and payload share a block")
    yield frame("fills-its-block", plain_bytes("fills", 4096 - 128), "no padding at all")
    yield frame("one-byte-over", plain_bytes("over", 4096 - 127), "one byte in the second block, then padding")
    yield frame("below-aligned", plain_bytes("below", 65535), "the longest payload right behind the header")
    yield frame("aligned", plain_bytes("aligned", 65536), "the shortest payload that begins on a block of its own")
    yield frame("shifted", plain_bytes("aligned", 65536), "a payload 64 bytes behind its block", shift=64)
    yield frame("shifted-most", plain_bytes("odd", 69633), "the largest shift; no padding behind", shift=4095)
    yield frame("zeros", bytes(4096), "zero bytes are content like any other")
    yield frame("later-place", plain_bytes("small", 300), "bytes 0 to 95 are those of `small`", pack_id("other"), 41)
    yield frame("last-sequence", plain_bytes("small", 300), "the largest sequence number", PACK_ID, (1 << 64) - 1)


def pack_vectors() -> Iterator[Vector]:
    """Yield well-formed packs."""

    def pack(
        name: str, plains: Sequence[bytes], why: str, tail: bytes = b"", shifts: Sequence[int] = (0, 0, 0)
    ) -> Vector:
        parts = make_pack(plains, shifts=shifts)
        offsets = np.cumsum([4096, *(len(frame) for frame in parts.frames)]).tolist()
        value = {
            "header": {
                "magic": "ASYMPACK",
                "format": 1,
                "pack_id": PACK_ID.hex(),
                "frame_count": len(plains),
                "index_offset": offsets[-1],
                "index_length": 64 + 64 * len(plains),
                "pack_length": len(parts.data),
                "created_ns": CREATED_NS,
                "writer": WRITER,
            },
            "entries": [
                {
                    **_frame_value(plain, PACK_ID, sequence, shifts[sequence]),
                    "offset": offset,
                    "payload_pattern": plain[:64].hex(),
                }
                for sequence, (plain, offset) in enumerate(zip(plains, offsets, strict=False))
            ],
            "tail_bytes": len(tail),
        }
        return valid("pack", name, parts.data + tail, why, value, path=PACK_PATH)

    three = [plain_bytes("small", 300), plain_bytes("aligned", 65536), plain_bytes("over", 4096 - 127)]
    old_life = make_pack([plain_bytes("old", 9000)], pack_id("old life")).data
    yield pack("one-frame", three[:1], "the smallest pack")
    yield pack("three-frames", three, "frames of one block, of seventeen, and of two")
    yield pack("shifted", three, "the second payload is shifted by 64 bytes", shifts=(0, 64, 0))
    yield pack("same-twice", [three[0], three[0]], "a digest may lie in a pack twice")
    yield pack("recycled", three[:1], "what follows pack_length is left from an earlier life", old_life[4096:])
    yield pack("recycled-uneven", three[:1], "the tail need not end on a block", fixed_bytes("tail", 100))
