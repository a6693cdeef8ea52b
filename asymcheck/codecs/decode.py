"""Decode payloads into plain bytes, with the chain of bases of delta and derived frames (SPEC.md §A10.5)."""

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
    INCONCLUSIVE,
    BaseDamagedError,
    DigestMismatchError,
    FormatError,
    RecoveryError,
    StorageError,
    StructureError,
    UnsupportedFormatError,
)
from asymcheck.events import timed
from asymcheck.format import registry
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import FrameDescriptor
from asymcheck.types import Digest


def decode(
    descriptor: FrameDescriptor,
    payload: memoryview,
    base: memoryview | None = None,
    *,
    where: str = "frame",
    room: memoryview | None = None,
) -> memoryview:
    """Return the plain bytes of a payload. For codec identity, return the payload itself, without a copy.

    The caller checks the digest of the result.

    Args:
        descriptor: descriptor of the frame, which was checked.
        payload: its payload.
        base: plain bytes of the partition ``descriptor.base_digest``, whose digest was checked.
        where: the frame in error messages.
        room: memory of the plain length, which a codec may fill and return.

    Raises:
        FormatError: the payload breaks a rule of its codec, or does not fit the base.
    """
    length = descriptor.plain_length
    if descriptor.codec == registry.CODEC_IDENTITY:
        return payload
    if descriptor.codec == registry.CODEC_ZSTD:
        return memoryview(zstd.decompress(payload, length, where))
    if descriptor.codec == registry.CODEC_BYTE_PLANES:
        return _decode_planes(payload, length, None, where, room)
    if base is None:
        raise StructureError(f"{where}: cannot decode without the base, partition {descriptor.base_digest.hex()}")
    if descriptor.codec == registry.CODEC_DELTA:
        if len(base) != length:
            raise StructureError(f"{where}: delta of {length} bytes against a base of {len(base)} bytes")
        return _decode_planes(payload, length, np.frombuffer(base, dtype=np.uint8), where, room)
    return decode_derived(payload, length, base, where)


def _decode_planes(
    payload: memoryview, plain_length: int, base: Bytes | None, where: str, room: memoryview | None
) -> memoryview:
    tables = container.decode_tables(payload, plain_length, where)
    if room is None or len(room) != plain_length:
        room = np.empty(plain_length, dtype=np.uint8).data
    plain = np.frombuffer(room, dtype=np.uint8)
    for chunk in tables.chunks:
        words = _read_planes(payload, tables, chunk, where)
        target = planes.as_words(plain[chunk.start : chunk.end], chunk.width)
        if base is not None:
            base_words = planes.as_words(base[chunk.start : chunk.end], chunk.width)
            planes.apply_difference(words, base_words, target, is_float=chunk.is_float)
        elif chunk.is_float:
            planes.rotated_back(words, target)
        else:
            target[:] = words
    return room


def _read_planes(payload: memoryview, tables: Tables, chunk: Chunk, where: str) -> Words:
    count = chunk.length // chunk.width
    chunk_planes: list[Bytes | int] = []
    for entry in range(chunk.entry, chunk.entry + chunk.width):
        encoding, value, start = int(tables.encodings[entry]), int(tables.values[entry]), int(tables.offsets[entry])
        if encoding == container.CONSTANT:
            chunk_planes.append(value)
            continue
        data: bytes | memoryview = payload[start : start + value]
        if encoding == container.ZSTD:
            data = zstd.decompress(data, count, f"{where}: plane {entry}")
        chunk_planes.append(np.frombuffer(data, dtype=np.uint8))
    return planes.join(chunk_planes, count)


@dataclasses.dataclass(frozen=True)
class Chain:
    """The frames from the requested partition down to the frame that is decoded now."""

    names: tuple[Digest, ...] = ()
    deltas: int = 0
    lost: set[tuple[Digest, int]] = dataclasses.field(default_factory=set, compare=False)
    """Unreadable bases, each with the number of deltas above it, shared by all chains of one partition."""

    def below(self, frame: FrameDescriptor, where: str) -> Chain:
        """Return the chain for the base of ``frame``.

        Raises:
            BaseDamagedError: a derived frame is used as a base, the chain is too long, or the chain is a cycle.
        """
        names = (*self.names, frame.digest)
        deltas = self.deltas + (frame.kind == registry.KIND_DELTA)
        if frame.kind == registry.KIND_DERIVED and self.names:
            raise BaseDamagedError(f"{where}: a derived partition is used as a base")
        if deltas > registry.DELTA_DEPTH_MAX:
            raise BaseDamagedError(f"{where}: the chain of bases has more than {registry.DELTA_DEPTH_MAX} deltas")
        if frame.base_digest in names:
            raise BaseDamagedError(f"{where}: the chain of bases leads back to {frame.base_digest.hex()}")
        return Chain(names, deltas, self.lost if self.names else set())


_START = Chain()

BaseReader = Callable[[Digest, Chain], memoryview]
"""Returns the plain bytes of a base, with a checked digest, or raises the reason why it is unreadable."""

FrameReader = Callable[[], tuple[FrameDescriptor, memoryview, str]]
"""Reads and checks one frame. Returns its descriptor, its payload, and its name in errors."""


def base_reader(copies_of: Callable[[Digest], Iterable[FrameReader]]) -> BaseReader:
    """Return a reader that decodes the first intact copy of a base. The bases of that copy must be intact, too."""

    def read(name: Digest, chain: Chain) -> memoryview:
        if (name, chain.deltas) in chain.lost:
            # Every copy of every frame above asks for this base again. Without this check, a few copies of each frame
            # would lead to millions of attempts.
            raise BaseDamagedError("the base is unreadable, as reported for another copy")
        problems = []
        for copy in copies_of(name):
            try:
                frame, payload, where = copy()
                return decode_checked(name, frame, payload, where, read, chain)
            except (UnsupportedFormatError, *INCONCLUSIVE):
                raise
            except (FormatError, RecoveryError, StorageError) as error:
                problems.append(str(error))
        chain.lost.add((name, chain.deltas))
        raise BaseDamagedError("; ".join(problems) or "no readable pack stores it")

    return read


def decode_checked(
    name: Digest,
    frame: FrameDescriptor,
    payload: memoryview,
    where: str,
    read_base: BaseReader,
    chain: Chain = _START,
    room: memoryview | None = None,
) -> memoryview:
    """Decode a checked frame, with its base if it has one, and compare the plain bytes with the digest ``name``.

    Raises:
        BaseDamagedError: the base is unreadable. The message names the partition and the base.
        FormatError: the payload is damaged, or the plain bytes have another digest.
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
        plain = decode(frame, payload, base, where=where, room=room)
    with timed("verify", len(plain)):
        if frame.digest != name or len(plain) != frame.plain_length or digest_of(plain) != name:
            raise DigestMismatchError(f"digest mismatch in {where}")
    return plain
