"""Encode the plain bytes of a partition into a payload and a frame descriptor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from asymcheck.codecs import container, derived, planes, zstd
from asymcheck.codecs.container import Chunk, Segment
from asymcheck.codecs.planes import Bytes
from asymcheck.codecs.zstd import Effort
from asymcheck.errors import InvalidInputError
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST, Buffer, sum8_of
from asymcheck.format.frame import FrameDescriptor
from asymcheck.types import Digest

CHUNK_BYTES = 1 << 19
"""Plain bytes per chunk. Measured: smaller chunks compress worse (each has its own zstd tables), larger ones leave the
cache (docs/decisions/0014)."""

_SAMPLE_BYTES = 8192
# Compression must save at least 2 %. Random bytes show an entropy of 7.98 bits in a sample of this length.
_ENTROPY_BITS_MAX = 7.84
_RATIO_MAX = 0.98


@dataclasses.dataclass(frozen=True)
class Encoded:
    """An encoded partition."""

    descriptor: FrameDescriptor
    parts: tuple[Buffer, ...]

    def write_to(self, buffer: memoryview) -> None:
        """Copy the payload, ``descriptor.stored_length`` bytes, to the start of a buffer."""
        start = 0
        for part in self.parts:
            buffer[start : start + len(part)] = part
            start += len(part)

    def payload(self) -> bytes:
        """Return the payload as one bytes object."""
        return b"".join(self.parts)


def encode_zstd(name: Digest, plain: memoryview) -> Encoded:
    """Encode with codec zstd; ``name`` is the digest of ``plain``."""
    return _encoded(name, plain, registry.CODEC_ZSTD, [zstd.compress(plain, Effort.REPEATS)])


def encode_planes(
    name: Digest, plain: memoryview, segments: Sequence[Segment], *, chunk_bytes: int = CHUNK_BYTES
) -> Encoded:
    """Encode with codec byte-planes. Each plane is stored raw, compressed, or as one repeated byte.

    Raises:
        InvalidInputError: the segments do not fit ``plain``.
    """
    data = np.frombuffer(plain, dtype=np.uint8)

    def rows(chunk: Chunk) -> Bytes:
        words = planes.as_words(data[chunk.start : chunk.end], chunk.width)
        return planes.split_rotated(words) if chunk.is_float else planes.split(words)

    parts = _pack_chunks(len(data), segments, chunk_bytes, rows)
    return _encoded(name, plain, registry.CODEC_BYTE_PLANES, parts)


def encode_delta(
    name: Digest,
    plain: memoryview,
    segments: Sequence[Segment],
    base_name: Digest,
    base: memoryview,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Encoded:
    """Encode with codec ordered-integer-delta against a base of the same length. ``base_name`` is the base's digest.

    Raises:
        InvalidInputError: the base has another length, or the segments do not fit ``plain``.
    """
    if len(base) != len(plain):
        raise InvalidInputError(f"delta of {len(plain)} bytes against a base of {len(base)} bytes: pass one as long")
    data, base_data = np.frombuffer(plain, dtype=np.uint8), np.frombuffer(base, dtype=np.uint8)

    def rows(chunk: Chunk) -> Bytes:
        target, base_words = (planes.as_words(side[chunk.start : chunk.end], chunk.width) for side in (data, base_data))
        return planes.split(planes.difference(target, base_words, is_float=chunk.is_float))

    parts = _pack_chunks(len(data), segments, chunk_bytes, rows)
    return _encoded(name, plain, registry.CODEC_DELTA, parts, base_name)


def encode_derived(
    name: Digest, plain: memoryview, dtype: int, base_name: Digest, base: memoryview, offset: int
) -> Encoded | None:
    """Encode with codec derived-round-to-nearest, or return None if ``plain`` is not the rounded base.

    ``dtype`` is ``derived.BFLOAT16`` or ``derived.FLOAT16``. The float32 elements begin at byte ``offset`` of the base.
    """
    is_possible = len(plain) % 2 == 0 and offset + 2 * len(plain) <= len(base)
    if not is_possible or not derived.is_rounded_base(plain, base, offset, dtype):
        return None
    source = derived.SOURCE.pack(dtype, bytes(7), offset)
    return _encoded(name, plain, registry.CODEC_DERIVED, [source], base_name)


def _encoded(
    name: Digest, plain: memoryview, codec: int, parts: Sequence[Buffer], base_name: bytes = ZERO_DIGEST
) -> Encoded:
    kind = next(kind for kind, codecs in registry.CODECS_OF_KIND.items() if codec in codecs)
    stored = sum(len(part) for part in parts)
    descriptor = FrameDescriptor(name, len(plain), stored, sum8_of(parts), kind, codec, base_digest=base_name)
    return Encoded(descriptor, tuple(parts))


def _pack_chunks(
    length: int, segments: Sequence[Segment], chunk_bytes: int, rows: Callable[[Chunk], Bytes]
) -> list[Buffer]:
    joined = container.merge_segments(segments, chunk_bytes)
    if sum(segment.length for segment in joined) != length or any(segment.length % segment.width for segment in joined):
        raise InvalidInputError(
            f"segments {joined} do not fit a partition of {length} bytes: pass those of its tensors"
        )
    packed = [_pack_plane(plane) for chunk in container.cut(joined, chunk_bytes) for plane in rows(chunk)]
    tables = container.encode_tables(joined, chunk_bytes, [entry for entry, _ in packed])
    return [tables, *(data for _, data in packed if len(data))]


def _pack_plane(plane: Bytes) -> tuple[int, Buffer]:
    """Return the table entry and the data of a plane: constant, compressed if that saves 2 %, or raw."""
    raw = plane.data
    first = int(plane[0])
    if first == plane[-1] and bool((plane == first).all()):
        return container.plane_entry(container.CONSTANT, first), b""
    effort = _effort(plane)
    if effort is not None:
        packed = zstd.compress(raw, effort)
        if len(packed) < _RATIO_MAX * len(plane):
            return container.plane_entry(container.ZSTD, len(packed)), packed
    return container.plane_entry(container.RAW, len(plane)), bytes(raw)  # the memory of the plane is used again


def _effort(plane: Bytes) -> Effort | None:
    """Choose the compression effort from a sample in the middle of a plane; return None for incompressible bytes."""
    if len(plane) < 2 * _SAMPLE_BYTES:
        return Effort.REPEATS
    start = (len(plane) - _SAMPLE_BYTES) // 2
    sample = plane[start : start + _SAMPLE_BYTES]
    repeats = len(zstd.compress(sample.data, Effort.REPEATS))
    if repeats >= _SAMPLE_BYTES:
        # No repeats and no frequent bytes. Three of four planes end here, and this is the fastest test.
        return None
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / _SAMPLE_BYTES
    bits = float(-(shares * np.log2(shares)).sum())
    if repeats < 0.9 * bits / 8 * _SAMPLE_BYTES:
        return Effort.REPEATS
    return Effort.SYMBOLS if bits < _ENTROPY_BITS_MAX else None
