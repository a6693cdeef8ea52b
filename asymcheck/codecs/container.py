"""Payload tables of the codecs byte-planes and ordered-integer-delta (SPEC.md §A10.2).

A payload has a table of segments, a table of planes, and the data of the planes. A reader checks both tables completely
before it allocates memory or reads the data.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asymcheck.errors import LimitError, StructureError, TruncatedError
from asymcheck.format import registry

HEADER = struct.Struct("<IIII")
SEGMENT_DTYPE = np.dtype([("length", "<u4"), ("width", "u1"), ("is_float", "u1"), ("reserved_a", "<u2")])
CHUNK_BYTES_MIN = 4096
CHUNK_BYTES_MAX = 8 << 20

RAW, ZSTD, CONSTANT = 0, 1, 2
"""Encodings of a plane: raw bytes, a Zstandard frame, or one repeated byte."""

_VALUE_BITS = 24
_VALUE_MASK = (1 << _VALUE_BITS) - 1


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive elements of one width in a partition."""

    length: int  # bytes, a multiple of the width
    width: int  # bytes of an element, or of a component of a complex element: 1, 2, 4 or 8
    is_float: bool = False
    """Whether elements are IEEE floats (sign, exponent, fraction). Always False for width 1."""


def segment_of(dtype: str, length: int) -> Segment:
    """Return the segment for ``length`` bytes of a dtype of the registry. A complex number has two components."""
    width = registry.DTYPE_BYTES[dtype] // (2 if dtype.startswith("complex") else 1)
    return Segment(length, width, width > 1 and dtype.startswith(("float", "bfloat", "complex")))


class Chunk(NamedTuple):
    """A piece of a segment. Each chunk is encoded and decoded independently."""

    start: int  # bytes from the start of the partition
    length: int  # bytes, a multiple of the width
    width: int  # bytes of an element
    is_float: bool
    entry: int  # index of the first plane of the chunk in the table of planes

    @property
    def end(self) -> int:
        """Bytes from the start of the partition to the end of the chunk."""
        return self.start + self.length

    @property
    def elements(self) -> int:
        """Number of elements, which is the plain length of each plane."""
        return self.length // self.width


def cut(segments: Iterable[Segment], chunk_bytes: int) -> list[Chunk]:
    """Cut segments into chunks of ``chunk_bytes``. The last chunk of a segment may be shorter."""
    chunks: list[Chunk] = []
    start = entry = 0
    for segment in segments:
        for offset in range(0, segment.length, chunk_bytes):
            length = min(chunk_bytes, segment.length - offset)
            chunks.append(Chunk(start + offset, length, segment.width, segment.is_float, entry))
            entry += segment.width
        start += segment.length
    return chunks


def merge_segments(segments: Iterable[Segment], chunk_bytes: int) -> list[Segment]:
    """Join adjacent segments of the same width and type. Return one segment of bytes if they have too many planes."""
    whole = (segment for segment in segments if segment.length)
    alike = itertools.groupby(whole, key=operator.attrgetter("width", "is_float"))
    result = [Segment(sum(segment.length for segment in same), *kind) for kind, same in alike]
    planes = sum(-(-segment.length // chunk_bytes) * segment.width for segment in result)
    if planes > registry.CODEC_PLANES_MAX:
        return [Segment(sum(segment.length for segment in result), 1)]
    return result


def plane_entry(encoding: int, value: int) -> int:
    """Return the entry of a plane in the table; ``value`` is its stored length, or its repeated byte."""
    return encoding << _VALUE_BITS | value


def encode_tables(segments: Sequence[Segment], chunk_bytes: int, entries: Sequence[int]) -> bytes:
    """Return the header and the tables of a payload."""
    rows = [(segment.length, segment.width, int(segment.is_float), 0) for segment in segments]
    table = np.array(rows, dtype=SEGMENT_DTYPE).tobytes() + np.array(entries, dtype="<u4").tobytes()
    return HEADER.pack(chunk_bytes, len(segments), len(entries), 0) + table


@dataclasses.dataclass(frozen=True)
class Tables:
    """The checked tables of a payload."""

    chunks: list[Chunk]
    encodings: npt.NDArray[np.uint32]
    values: npt.NDArray[np.uint32]  # stored length of every plane, or its repeated byte
    offsets: npt.NDArray[np.int64]  # offset of the data of every plane in the payload, in bytes


def decode_tables(payload: memoryview, plain_length: int, where: str) -> Tables:
    """Read and check the tables of a payload. ``where`` names the frame in errors."""
    if len(payload) < HEADER.size:
        raise TruncatedError(f"{where}: payload has {len(payload)} bytes, its header needs {HEADER.size}")
    chunk_bytes, segment_count, entry_count, reserved = HEADER.unpack_from(payload)
    if max(segment_count, entry_count) > registry.CODEC_PLANES_MAX or chunk_bytes > CHUNK_BYTES_MAX:
        counts = f"{segment_count} segments, {entry_count} planes or chunks of {chunk_bytes} bytes"
        raise LimitError(f"{where}: {counts} exceed the limits")
    if reserved or chunk_bytes < CHUNK_BYTES_MIN or chunk_bytes % CHUNK_BYTES_MIN:
        raise StructureError(f"{where}: chunks of {chunk_bytes} bytes are not allowed, or reserved bytes are not zero")
    start = HEADER.size + SEGMENT_DTYPE.itemsize * segment_count
    data = start + 4 * entry_count
    if len(payload) < data:
        raise TruncatedError(f"{where}: payload has {len(payload)} bytes, its tables need {data}")
    chunks = _decode_segments(payload[HEADER.size : start], plain_length, chunk_bytes, entry_count, where)
    entries = np.frombuffer(payload[start:data], dtype="<u4")
    encodings, values = entries >> np.uint32(_VALUE_BITS), entries & np.uint32(_VALUE_MASK)
    plain = np.repeat([chunk.elements for chunk in chunks], [chunk.width for chunk in chunks])
    ends = data + _stored_lengths(encodings, values, plain, where).cumsum()
    if int(ends[-1]) > len(payload):
        raise TruncatedError(f"{where}: payload has {len(payload)} bytes, its planes need {int(ends[-1])}")
    if int(ends[-1]) < len(payload):
        raise StructureError(f"{where}: {len(payload) - int(ends[-1])} bytes after the last plane")
    return Tables(chunks, encodings, values, np.concatenate([[data], ends[:-1]]))


def _decode_segments(
    table: memoryview, plain_length: int, chunk_bytes: int, entry_count: int, where: str
) -> list[Chunk]:
    rows = np.frombuffer(table, dtype=SEGMENT_DTYPE)
    lengths, widths = rows["length"].astype(np.int64), rows["width"].astype(np.int64)
    if not len(rows) or int(lengths.sum()) != plain_length:
        raise StructureError(f"{where}: segments have {int(lengths.sum())} bytes, the partition has {plain_length}")
    is_known = np.isin(widths, (1, 2, 4, 8)).all() and (rows["is_float"] <= (widths > 1)).all()
    if not is_known or rows["reserved_a"].any():
        raise StructureError(f"{where}: a segment has an unknown width or type")
    if (lengths == 0).any() or (lengths % widths).any():
        raise StructureError(f"{where}: a segment is empty, or does not have whole elements")
    if ((widths[1:] == widths[:-1]) & (rows["is_float"][1:] == rows["is_float"][:-1])).any():
        raise StructureError(f"{where}: two adjacent segments have the same width and type")
    planes = int((-(-lengths // chunk_bytes) * widths).sum())
    if planes != entry_count:
        raise StructureError(f"{where}: table has {entry_count} planes, the segments need {planes}")
    segments = (Segment(length, width, bool(is_float)) for length, width, is_float, _ in rows.tolist())
    return cut(segments, chunk_bytes)


def _stored_lengths(
    encodings: npt.NDArray[np.uint32], values: npt.NDArray[np.uint32], plain: npt.NDArray[np.int64], where: str
) -> npt.NDArray[np.int64]:
    is_valid = np.where(encodings == RAW, values == plain, encodings <= CONSTANT)
    is_valid &= (encodings != ZSTD) | ((values > 0) & (values < plain))
    is_valid &= (encodings != CONSTANT) | (values <= 0xFF)  # noqa: PLR2004 - the largest byte
    if not is_valid.all():
        raise StructureError(f"{where}: plane {int(np.argmin(is_valid))} has an impossible length")
    return np.where(encodings == CONSTANT, 0, values).astype(np.int64)
