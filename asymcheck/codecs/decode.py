"""Decoding: the plain bytes of a frame's payload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from asymcheck.codecs import container, ordered, planes, zstd
from asymcheck.codecs.container import Chunk, Tables
from asymcheck.codecs.derived import decode_derived
from asymcheck.codecs.planes import Bytes, Words
from asymcheck.errors import StructureError, UnsupportedCodecError
from asymcheck.format import registry
from asymcheck.format.frame import FrameDescriptor


class Mapper(Protocol):
    """How chunks are worked off: the builtin ``map``, or that of an executor with several threads."""

    def __call__(self, work: Callable[[int], None], numbers: Iterable[int], /) -> Iterable[None]:
        """Call ``work`` on every number; the result is consumed."""
        ...


def decode(
    descriptor: FrameDescriptor,
    payload: memoryview,
    base: memoryview | None = None,
    *,
    where: str = "frame",
    mapped: Mapper = map,
) -> memoryview:
    """Return the plain bytes of a payload; for codec identity that is the payload itself, without a copy.

    ``base`` is the plain bytes of the partition ``descriptor.base_digest``, whose digest was checked; ``where`` names
    the frame in errors. The digest of the result is for the caller to check.

    Raises:
        UnsupportedCodecError: the codec is not known.
        StructureError, TruncatedError, LimitError: the payload breaks a rule of its codec, or does not fit the base.
    """
    length = descriptor.plain_length
    if descriptor.codec == registry.CODEC_IDENTITY:
        return payload
    if descriptor.codec == registry.CODEC_ZSTD:
        return memoryview(zstd.decompress(payload, length, where))
    if descriptor.codec == registry.CODEC_BYTE_PLANES:
        return _decode_planes(payload, length, None, where, mapped)
    if descriptor.codec not in registry.SUPPORTED_CODECS:
        name = registry.CODECS.get(descriptor.codec, "unknown")
        raise UnsupportedCodecError(
            f"{where}: codec {descriptor.codec} ({name}) is not supported: install a newer asymcheck"
        )
    if base is None:
        raise StructureError(f"{where}: its base, partition {descriptor.base_digest.hex()}, is not there to decode it")
    if descriptor.codec == registry.CODEC_DELTA:
        if len(base) != length:
            raise StructureError(f"{where}: a delta of {length} bytes against a base of {len(base)}")
        return _decode_planes(payload, length, np.frombuffer(base, dtype=np.uint8), where, mapped)
    return decode_derived(payload, length, base, where)


def _decode_planes(
    payload: memoryview, plain_length: int, base: Bytes | None, where: str, mapped: Mapper
) -> memoryview:
    tables = container.decode_tables(payload, plain_length, where)
    plain = np.empty(plain_length, dtype=np.uint8)

    def fill(number: int) -> None:
        chunk = tables.layout.chunk(number)
        words = _words(payload, tables, chunk, where)
        if base is not None:
            older = planes.as_words(base[chunk.start : chunk.end], chunk.width)
            words = ordered.applied(words, older, is_float=chunk.is_float)
        elif chunk.is_float:
            words = planes.rotated_back(words)
        planes.as_words(plain[chunk.start : chunk.end], chunk.width)[:] = words

    for _ in mapped(fill, range(len(tables.layout))):
        pass
    return plain.data


def _words(payload: memoryview, tables: Tables, chunk: Chunk, where: str) -> Words:
    """Return the elements of a chunk as their planes give them."""
    count = chunk.length // chunk.width
    found: list[Bytes | int] = []
    for entry in range(chunk.entry, chunk.entry + chunk.width):
        encoding, value, start = int(tables.encodings[entry]), int(tables.values[entry]), int(tables.offsets[entry])
        if encoding == container.CONSTANT:
            found.append(value)
            continue
        data: bytes | memoryview = payload[start : start + value]
        if encoding == container.ZSTD:
            data = zstd.decompress(data, count, f"{where}: plane {entry}")
        found.append(np.frombuffer(data, dtype=np.uint8))
    return planes.join(found, count)
