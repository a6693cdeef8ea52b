"""Encoding: a payload for the plain bytes of a partition, and the descriptor that goes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from asymcheck.codecs import container, derived, planes, zstd
from asymcheck.codecs.container import Segment
from asymcheck.codecs.planes import Bytes
from asymcheck.codecs.zstd import Effort
from asymcheck.errors import InvalidInputError
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST, Buffer, sum8_of
from asymcheck.format.frame import FrameDescriptor
from asymcheck.types import Digest

CHUNK_BYTES = 1 << 19
"""Plain bytes that one call works on. Measured: shorter pieces pack worse by the zstd tables in each, longer ones leave
the cache (docs/decisions/0014)."""

_SAMPLE_BYTES = 8192
# Bits of a byte that are worth the work: 2 % of eight. Of a sample that long, noise shows 7.98.
_WORTH_BITS = 7.84
_WORTH = 0.98


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A partition ready to be stored."""

    descriptor: FrameDescriptor
    parts: tuple[Buffer, ...]

    def write_to(self, room: memoryview) -> None:
        """Copy the payload to where it goes, ``descriptor.stored_length`` bytes."""
        start = 0
        for part in self.parts:
            room[start : start + len(part)] = part
            start += len(part)

    def payload(self) -> bytes:
        """Return the payload in one piece."""
        return b"".join(self.parts)


_Packed = list[tuple[int, Buffer]]
"""Of every plane of a chunk: its word in the table, and its data."""

Mapper = Callable[[Callable[[int], _Packed], Iterable[int]], Iterable[_Packed]]
"""How chunks are worked off, in order: the builtin ``map``, or that of an executor with several threads."""


def encode_zstd(name: Digest, plain: memoryview) -> Encoded:
    """Encode with codec zstd; ``name`` is the digest of ``plain``."""
    return _encoded(name, plain, registry.CODEC_ZSTD, [zstd.compress(plain, Effort.REPEATS)])


def encode_planes(
    name: Digest,
    plain: memoryview,
    segments: Sequence[Segment],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    mapped: Mapper = map,
) -> Encoded:
    """Encode with codec byte-planes: floats and integers plane by plane, each stored in the shortest way.

    Raises:
        InvalidInputError: the segments are not those of ``plain``.
    """
    data = np.frombuffer(plain, dtype=np.uint8)

    def rows(chunk: container.Chunk) -> Bytes:
        words = planes.as_words(data[chunk.start : chunk.end], chunk.width)
        return planes.split_rotated(words) if chunk.is_float else planes.split(words)

    parts = _pack_chunks(len(data), segments, chunk_bytes, rows, mapped)
    return _encoded(name, plain, registry.CODEC_BYTE_PLANES, parts)


def encode_delta(
    name: Digest,
    plain: memoryview,
    segments: Sequence[Segment],
    base_name: Digest,
    base: memoryview,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    mapped: Mapper = map,
) -> Encoded:
    """Encode with codec ordered-integer-delta, against a base of the same length; ``base_name`` is its digest.

    Raises:
        InvalidInputError: the base has another length, or the segments are not those of ``plain``.
    """
    if len(base) != len(plain):
        raise InvalidInputError(f"a base of {len(base)} bytes for a partition of {len(plain)}: give one as long")
    data, older = np.frombuffer(plain, dtype=np.uint8), np.frombuffer(base, dtype=np.uint8)

    def rows(chunk: container.Chunk) -> Bytes:
        target, of_base = (planes.as_words(side[chunk.start : chunk.end], chunk.width) for side in (data, older))
        return planes.split(planes.difference(target, of_base, is_float=chunk.is_float))

    parts = _pack_chunks(len(data), segments, chunk_bytes, rows, mapped)
    return _encoded(name, plain, registry.CODEC_DELTA, parts, base_name)


def encode_derived(
    name: Digest, plain: memoryview, dtype: int, base_name: Digest, base: memoryview, offset: int
) -> Encoded | None:
    """Encode with codec derived-round-to-nearest, or return None where the bytes are not the rounded base.

    ``dtype`` is ``rounding.BFLOAT16`` or ``FLOAT16``; the float32 elements begin at byte ``offset`` of the base.
    """
    if len(plain) % 2 or offset + 2 * len(plain) > len(base):
        return None
    if not derived.is_rounded_base(plain, base, offset, dtype):
        return None
    return _encoded(name, plain, registry.CODEC_DERIVED, [derived.encode_source(dtype, offset)], base_name)


def _encoded(
    name: Digest, plain: memoryview, codec: int, parts: Sequence[Buffer], base_name: bytes = ZERO_DIGEST
) -> Encoded:
    kind = next(kind for kind, codecs in registry.CODECS_OF_KIND.items() if codec in codecs)
    stored = sum(len(part) for part in parts)
    descriptor = FrameDescriptor(name, len(plain), stored, sum8_of(parts), kind, codec, base_digest=base_name)
    return Encoded(descriptor, tuple(parts))


def _pack_chunks(
    length: int, segments: Sequence[Segment], chunk_bytes: int, rows: Callable[[container.Chunk], Bytes], mapped: Mapper
) -> list[Buffer]:
    joined = container.merged(segments, chunk_bytes)
    if sum(segment.length for segment in joined) != length or any(one.length % one.width for one in joined):
        raise InvalidInputError(f"segments {joined} are not those of a partition of {length} bytes")
    table = container.rows_of(joined)
    layout = container.cut(table, chunk_bytes)
    packed = mapped(lambda number: [_pack_plane(plane) for plane in rows(layout.chunk(number))], range(len(layout)))
    found = [one for chunk in packed for one in chunk]
    tables = container.encode_tables(table, chunk_bytes, [entry for entry, _ in found])
    return [tables, *(data for _, data in found if len(data))]


def _pack_plane(plane: Bytes) -> tuple[int, Buffer]:
    """Store a plane as one byte, as a Zstandard frame where that is worth it, or as it is."""
    raw = plane.data
    first = int(plane[0])
    if first == plane[-1] and bool((plane == first).all()):
        return container.plane_entry(container.CONSTANT, first), b""
    effort = _effort(plane)
    if effort is not None:
        packed = zstd.compress(raw, effort)
        if len(packed) < _WORTH * len(plane):
            return container.plane_entry(container.ZSTD, len(packed)), packed
    return container.plane_entry(container.RAW, len(plane)), raw


def _effort(plane: Bytes) -> Effort | None:
    """Look at a piece from the middle: what a plane is worth; None for noise."""
    if len(plane) < 2 * _SAMPLE_BYTES:
        return Effort.REPEATS
    start = (len(plane) - _SAMPLE_BYTES) // 2
    sample = plane[start : start + _SAMPLE_BYTES]
    repeats = len(zstd.compress(sample.data, Effort.REPEATS))
    if repeats >= _SAMPLE_BYTES:
        # Neither repeats nor frequent bytes: three planes of four, and this is the quickest way to see it.
        return None
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / _SAMPLE_BYTES
    bits = float(-(shares * np.log2(shares)).sum())
    if repeats < 0.9 * bits / 8 * _SAMPLE_BYTES:
        return Effort.REPEATS
    return Effort.SYMBOLS if bits < _WORTH_BITS else None
