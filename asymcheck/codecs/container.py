"""Payload tables of the codecs byte-planes and ordered-integer-delta (SPEC.md §A10.2).

A payload has a table of segments, a table of planes, and the data of the planes. A reader checks both tables completely
before it allocates memory or reads the data.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from asymcheck.errors import LimitError, StructureError, TruncatedError
from asymcheck.format import registry

HEADER = struct.Struct("<IIII")
SEGMENT_DTYPE = np.dtype([("length", "<u4"), ("width", "u1"), ("is_float", "u1"), ("reserved_a", "<u2")])
_Rows = npt.NDArray[np.void]
CHUNK_BYTES_MIN = 4096
CHUNK_BYTES_MAX = 8 << 20

RAW, ZSTD, CONSTANT = 0, 1, 2
"""Encodings of a plane: raw bytes, a Zstandard frame, or one repeated byte."""

_VALUE_BITS = 24
_VALUE_MASK = (1 << _VALUE_BITS) - 1


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive elements of one width in a partition."""

    length: int
    """Bytes, a multiple of the width."""
    width: int
    """Bytes of an element, or of a component of a complex element: 1, 2, 4 or 8."""
    is_float: bool = False
    """Whether elements are IEEE floats (sign, exponent, fraction). Always False for width 1."""


def segment_of(dtype: str, length: int) -> Segment:
    """Return the segment for ``length`` bytes of a dtype of the registry. A complex number has two components."""
    width = registry.DTYPE_BYTES[dtype] // (2 if dtype.startswith("complex") else 1)
    return Segment(length, width, width > 1 and dtype.startswith(("float", "bfloat", "complex")))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a segment. Each chunk is encoded and decoded independently."""

    start: int
    """Bytes from the start of the partition."""
    length: int
    """Bytes, a multiple of the width."""
    width: int
    """Bytes of an element."""
    is_float: bool
    entry: int
    """Index of the first plane of the chunk in the table of planes."""

    @property
    def end(self) -> int:
        """Bytes from the start of the partition to the end of the chunk."""
        return self.start + self.length


@dataclasses.dataclass(frozen=True)
class Layout:
    """The chunks of a partition, as columns."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    floats: npt.NDArray[np.bool_]
    entries: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def chunk(self, number: int) -> Chunk:
        """Return the chunk with the index ``number``."""
        columns = self.starts, self.lengths, self.widths, self.entries
        start, length, width, entry = (int(column[number]) for column in columns)
        return Chunk(start, length, width, bool(self.floats[number]), entry)

    def plane_lengths(self) -> npt.NDArray[np.int64]:
        """Return the plain length of every plane, in the order of the table."""
        return np.repeat(self.lengths // self.widths, self.widths)


def segment_table(segments: Sequence[Segment]) -> _Rows:
    """Return segments as rows of the table of segments."""
    rows = [(segment.length, segment.width, int(segment.is_float), 0) for segment in segments]
    return np.array(rows, dtype=SEGMENT_DTYPE)


def cut(rows: _Rows, chunk_bytes: int) -> Layout:
    """Cut segments into chunks of ``chunk_bytes``. The last chunk of a segment_of_chunk may be shorter."""
    lengths, widths = rows["length"].astype(np.int64), rows["width"].astype(np.int64)
    counts = -(-lengths // chunk_bytes)
    segment_of_chunk = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(segment_of_chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk_bytes
    starts = np.repeat(np.cumsum(lengths) - lengths, counts) + offsets
    chunk_widths = widths[segment_of_chunk]
    entries = np.cumsum(chunk_widths) - chunk_widths
    floats = rows["is_float"].astype(np.bool_)[segment_of_chunk]
    return Layout(starts, np.minimum(chunk_bytes, lengths[segment_of_chunk] - offsets), chunk_widths, floats, entries)


def merge_segments(segments: Iterable[Segment], chunk_bytes: int) -> list[Segment]:
    """Join adjacent segments of the same width and type. Return one segment of bytes if they have too many planes."""
    result: list[Segment] = []
    for segment in segments:
        if segment.length == 0:
            continue
        last = result[-1] if result else None
        if last is not None and (last.width, last.is_float) == (segment.width, segment.is_float):
            result[-1] = dataclasses.replace(last, length=last.length + segment.length)
        else:
            result.append(segment)
    planes = sum(-(-segment.length // chunk_bytes) * segment.width for segment in result)
    if planes > registry.CODEC_PLANES_MAX:
        return [Segment(sum(segment.length for segment in result), 1)]
    return result


def plane_entry(encoding: int, value: int) -> int:
    """Return the entry of a plane in the table; ``value`` is its stored length, or its repeated byte."""
    return encoding << _VALUE_BITS | value


def encode_tables(rows: _Rows, chunk_bytes: int, entries: Sequence[int]) -> bytes:
    """Return the header and the tables of a payload."""
    return HEADER.pack(chunk_bytes, len(rows), len(entries), 0) + rows.tobytes() + np.array(entries, "<u4").tobytes()


@dataclasses.dataclass(frozen=True)
class Tables:
    """The checked tables of a payload."""

    layout: Layout
    encodings: npt.NDArray[np.uint32]
    values: npt.NDArray[np.uint32]
    """Stored length of every plane, or its repeated byte."""
    offsets: npt.NDArray[np.int64]
    """Offset of the data of every plane in the payload, in bytes."""


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
    layout = _decode_segments(payload[HEADER.size : start], plain_length, chunk_bytes, entry_count, where)
    entries = np.frombuffer(payload[start:data], dtype="<u4")
    encodings, values = entries >> np.uint32(_VALUE_BITS), entries & np.uint32(_VALUE_MASK)
    ends = data + _stored_lengths(encodings, values, layout.plane_lengths(), where).cumsum()
    if int(ends[-1]) > len(payload):
        raise TruncatedError(f"{where}: payload has {len(payload)} bytes, its planes need {int(ends[-1])}")
    if int(ends[-1]) < len(payload):
        raise StructureError(f"{where}: {len(payload) - int(ends[-1])} bytes after the last plane")
    return Tables(layout, encodings, values, np.concatenate([[data], ends[:-1]]))


def _decode_segments(table: memoryview, plain_length: int, chunk_bytes: int, entry_count: int, where: str) -> Layout:
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
    return cut(rows, chunk_bytes)


def _stored_lengths(
    encodings: npt.NDArray[np.uint32], values: npt.NDArray[np.uint32], plain: npt.NDArray[np.int64], where: str
) -> npt.NDArray[np.int64]:
    is_valid = np.where(encodings == RAW, values == plain, encodings <= CONSTANT)
    is_valid &= (encodings != ZSTD) | ((values > 0) & (values < plain))
    is_valid &= (encodings != CONSTANT) | (values <= 0xFF)  # noqa: PLR2004 - the largest byte
    if not is_valid.all():
        raise StructureError(f"{where}: plane {int(np.argmin(is_valid))} has an impossible length")
    return np.where(encodings == CONSTANT, 0, values).astype(np.int64)
