"""Decoding: the plain bytes of a frame's payload, and of frames that need a base (SPEC.md §12.5 says how deep)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from asymcheck.codecs import container, planes, zstd
from asymcheck.codecs.container import Chunk, Tables
from asymcheck.codecs.derived import decode_derived
from asymcheck.codecs.planes import Bytes, Words
from asymcheck.errors import (
    UNKNOWING,
    BaseDamagedError,
    DigestMismatchError,
    FormatError,
    RecoveryError,
    StorageError,
    StructureError,
    UnsupportedCodecError,
    UnsupportedFormatError,
)
from asymcheck.events import timed
from asymcheck.format import registry
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import FrameDescriptor
from asymcheck.types import Digest

Mapper = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]
"""Works off chunks: the builtin ``map``, or that of an executor with several threads; the result is consumed."""


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
    the frame in errors. The digest of the result is for the caller to check. A payload that breaks a rule of its codec,
    or does not fit the base, raises the FormatError of its kind.
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
            words = planes.applied(words, older, is_float=chunk.is_float)
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


@dataclasses.dataclass(frozen=True)
class Chain:
    """The frames from the partition that is wanted down to the one that is decoded now."""

    names: tuple[Digest, ...] = ()
    deltas: int = 0
    lost: set[tuple[Digest, int]] = dataclasses.field(default_factory=set, compare=False)
    """Bases that could not be had below so many deltas, on any way down from the same partition."""

    def below(self, frame: FrameDescriptor, where: str) -> Chain:
        """Return the chain for the base of ``frame``.

        Raises:
            BaseDamagedError: the frame is derived and somebody's base, the chain is too long, or leads back.
        """
        names = (*self.names, frame.digest)
        deltas = self.deltas + (frame.kind == registry.KIND_DELTA)
        if frame.kind == registry.KIND_DERIVED and self.names:
            raise BaseDamagedError(f"{where}: a derived partition is a base")
        if deltas > registry.DELTA_DEPTH_MAX:
            raise BaseDamagedError(f"{where}: a chain of more than {registry.DELTA_DEPTH_MAX} deltas")
        if frame.base_digest in names:
            raise BaseDamagedError(f"{where}: its chain of bases leads back to {frame.base_digest.hex()}")
        return Chain(names, deltas, self.lost if self.names else set())


_WANTED = Chain()

BaseReader = Callable[[Digest, Chain], memoryview]
"""Returns the plain bytes of a base, whose digest was checked, or raises what is wrong with it."""

FrameReader = Callable[[], tuple[FrameDescriptor, memoryview, str]]
"""Reads and checks one frame: its descriptor, its payload, and its name in errors."""


def base_reader(copies_of: Callable[[Digest], Iterable[FrameReader]]) -> BaseReader:
    """Return a reader of bases that takes the first copy which is intact, and has intact bases itself."""

    def read(name: Digest, chain: Chain) -> memoryview:
        if (name, chain.deltas) in chain.lost:
            # Each copy of each frame above asks for it again: of a few in each place, that would be millions of ways.
            raise BaseDamagedError("as was said of another copy")
        problems = []
        for copy in copies_of(name):
            try:
                frame, payload, where = copy()
                return decode_checked(name, frame, payload, where, read, chain)
            except (UnsupportedFormatError, *UNKNOWING):
                raise
            except (FormatError, RecoveryError, StorageError) as error:
                problems.append(str(error))
        chain.lost.add((name, chain.deltas))
        raise BaseDamagedError("; ".join(problems) or "it lies in no readable pack")

    return read


def decode_checked(
    name: Digest, frame: FrameDescriptor, payload: memoryview, where: str, read_base: BaseReader, chain: Chain = _WANTED
) -> memoryview:
    """Return the plain bytes of a checked frame, which have the digest ``name``; its base is read where it has one.

    Raises:
        BaseDamagedError: the base cannot be had; the message names both.
        FormatError: of the kind that fits.
    """
    base = None
    if frame.kind != registry.KIND_FULL:
        below = chain.below(frame, where)
        base_name = Digest(frame.base_digest)
        try:
            base = read_base(base_name, below)
        except BaseDamagedError as error:
            raise BaseDamagedError(f"{where}: partition {name.hex()} needs base {base_name.hex()}: {error}") from error
    with timed("decode", frame.plain_length) if frame.codec != registry.CODEC_IDENTITY else contextlib.nullcontext():
        plain = decode(frame, payload, base, where=where)
    with timed("verify", len(plain)):
        if frame.digest != name or len(plain) != frame.plain_length or digest_of(plain) != name:
            raise DigestMismatchError(f"digest mismatch in {where}")
    return plain
