"""The payload of codecs byte-planes and ordered-integer-delta: tables of segments and planes, then the planes' data.

SPEC.md §12.2. A reader checks both tables whole before it allocates anything or looks at the data.
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
"""How a plane is stored: as it is, as a Zstandard frame, or as the byte that it repeats."""

_VALUE_BITS = 24
_VALUE_MASK = (1 << _VALUE_BITS) - 1


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of elements of one kind in a partition."""

    length: int
    """Bytes, a multiple of the width."""
    width: int
    """Bytes of an element (of a component, where elements are complex): 1, 2, 4 or 8."""
    is_float: bool = False
    """Whether elements are IEEE floats: sign, exponent, fraction. Never for width 1."""


def segment_of(dtype: str, length: int) -> Segment:
    """Return the segment of ``length`` bytes of a dtype of the registry; complex numbers are two components."""
    width = registry.DTYPE_BYTES[dtype] // (2 if dtype.startswith("complex") else 1)
    return Segment(length, width, width > 1 and dtype.startswith(("float", "bfloat", "complex")))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a segment, which is encoded and decoded on its own."""

    start: int
    """Bytes from the start of the partition."""
    length: int
    """Bytes, a multiple of the width."""
    width: int
    """Bytes of an element."""
    is_float: bool
    entry: int
    """Number of the first of its planes in the table."""

    @property
    def end(self) -> int:
        """Bytes from the start of the partition to its end."""
        return self.start + self.length


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a partition is cut: a table of chunks in columns, and how many planes they have together."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    floats: npt.NDArray[np.bool_]
    entries: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def chunk(self, number: int) -> Chunk:
        """Return one chunk."""
        columns = self.starts, self.lengths, self.widths, self.entries
        start, length, width, entry = (int(column[number]) for column in columns)
        return Chunk(start, length, width, bool(self.floats[number]), entry)

    def plane_lengths(self) -> npt.NDArray[np.int64]:
        """Return the plain bytes of every plane in the order of the table."""
        return np.repeat(self.lengths // self.widths, self.widths)


def rows_of(segments: Sequence[Segment]) -> _Rows:
    """Return the table of segments."""
    rows = [(segment.length, segment.width, int(segment.is_float), 0) for segment in segments]
    return np.array(rows, dtype=SEGMENT_DTYPE)


def cut(rows: _Rows, chunk_bytes: int) -> Layout:
    """Cut segments into chunks of ``chunk_bytes``; the last chunk of a segment may be shorter."""
    lengths, widths = rows["length"].astype(np.int64), rows["width"].astype(np.int64)
    counts = -(-lengths // chunk_bytes)
    segment = np.repeat(np.arange(len(lengths)), counts)
    within = (np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk_bytes
    starts = np.repeat(np.cumsum(lengths) - lengths, counts) + within
    of_chunk = widths[segment]
    entries = np.cumsum(of_chunk) - of_chunk
    floats = rows["is_float"].astype(np.bool_)[segment]
    return Layout(starts, np.minimum(chunk_bytes, lengths[segment] - within), of_chunk, floats, entries)


def merged(segments: Iterable[Segment], chunk_bytes: int) -> list[Segment]:
    """Join neighbours of the same kind, as the format asks; what has too many pieces for it becomes bytes."""
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
    """Return the table's word for a plane: how it is stored, and its stored bytes (or the byte that it repeats)."""
    return encoding << _VALUE_BITS | value


def encode_tables(rows: _Rows, chunk_bytes: int, entries: Sequence[int]) -> bytes:
    """Return header and tables of a payload."""
    return HEADER.pack(chunk_bytes, len(rows), len(entries), 0) + rows.tobytes() + np.array(entries, "<u4").tobytes()


@dataclasses.dataclass(frozen=True)
class Tables:
    """A payload whose tables were checked."""

    layout: Layout
    encodings: npt.NDArray[np.uint32]
    values: npt.NDArray[np.uint32]
    """Of every plane: stored bytes, or the byte that it repeats."""
    offsets: npt.NDArray[np.int64]
    """Where the data of every plane starts in the payload."""


def decode_tables(payload: memoryview, plain_length: int, where: str) -> Tables:
    """Read and check the tables of a payload; ``where`` names the frame in errors."""
    if len(payload) < HEADER.size:
        raise TruncatedError(f"{where}: {len(payload)} bytes of payload are no table of planes")
    chunk_bytes, segment_count, entry_count, reserved = HEADER.unpack_from(payload)
    if max(segment_count, entry_count) > registry.CODEC_PLANES_MAX or chunk_bytes > CHUNK_BYTES_MAX:
        raise LimitError(
            f"{where}: {segment_count} segments, {entry_count} planes, chunks of {chunk_bytes} bytes are too many"
        )
    if reserved or chunk_bytes < CHUNK_BYTES_MIN or chunk_bytes % CHUNK_BYTES_MIN:
        raise StructureError(f"{where}: chunks of {chunk_bytes} bytes, or reserved bytes that are not zero")
    start = HEADER.size + SEGMENT_DTYPE.itemsize * segment_count
    data = start + 4 * entry_count
    if len(payload) < data:
        raise TruncatedError(f"{where}: {len(payload)} bytes of payload, its tables have {data}")
    layout = _decode_segments(payload[HEADER.size : start], plain_length, chunk_bytes, entry_count, where)
    entries = np.frombuffer(payload[start:data], dtype="<u4")
    encodings, values = entries >> np.uint32(_VALUE_BITS), entries & np.uint32(_VALUE_MASK)
    ends = data + _stored(encodings, values, layout.plane_lengths(), where).cumsum()
    if int(ends[-1]) > len(payload):
        raise TruncatedError(f"{where}: {len(payload)} bytes of payload, its planes end at {int(ends[-1])}")
    if int(ends[-1]) < len(payload):
        raise StructureError(f"{where}: {len(payload) - int(ends[-1])} bytes behind the last plane")
    return Tables(layout, encodings, values, np.concatenate([[data], ends[:-1]]))


def _decode_segments(table: memoryview, plain_length: int, chunk_bytes: int, entry_count: int, where: str) -> Layout:
    rows = np.frombuffer(table, dtype=SEGMENT_DTYPE)
    lengths, widths = rows["length"].astype(np.int64), rows["width"].astype(np.int64)
    if not len(rows) or int(lengths.sum()) != plain_length:
        raise StructureError(f"{where}: segments of {int(lengths.sum())} bytes in a partition of {plain_length}")
    known = np.isin(widths, (1, 2, 4, 8)).all() and (rows["is_float"] <= (widths > 1)).all()
    if not known or rows["reserved_a"].any():
        raise StructureError(f"{where}: a segment of an unknown kind")
    if (lengths == 0).any() or (lengths % widths).any():
        raise StructureError(f"{where}: a segment that is empty, or not of whole elements")
    if ((widths[1:] == widths[:-1]) & (rows["is_float"][1:] == rows["is_float"][:-1])).any():
        raise StructureError(f"{where}: two neighbouring segments of the same kind")
    planes = int((-(-lengths // chunk_bytes) * widths).sum())
    if planes != entry_count:
        raise StructureError(f"{where}: a table of {entry_count} planes for {planes}")
    return cut(rows, chunk_bytes)


def _stored(
    encodings: npt.NDArray[np.uint32], values: npt.NDArray[np.uint32], plain: npt.NDArray[np.int64], where: str
) -> npt.NDArray[np.int64]:
    """Return the stored bytes of every plane."""
    sound = np.where(encodings == RAW, values == plain, encodings <= CONSTANT)
    sound &= (encodings != ZSTD) | ((values > 0) & (values < plain))
    sound &= (encodings != CONSTANT) | (values <= 0xFF)  # noqa: PLR2004 - the largest byte
    if not sound.all():
        raise StructureError(f"{where}: plane {int(np.argmin(sound))} has a length that it cannot have")
    return np.where(encodings == CONSTANT, 0, values).astype(np.int64)
