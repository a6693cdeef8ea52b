"""Frames: one encoded partition as stored (SPEC.md §7.1)."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable

from asymcheck.errors import (
    BadMagicError,
    ChecksumError,
    LimitError,
    StructureError,
    TruncatedError,
    UnsupportedCodecError,
)
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST, Buffer, is_zero, sum8
from asymcheck.format.registry import check_binary_version
from asymcheck.types import Digest, PackId

DESCRIPTOR = struct.Struct("<8sHBBB3s16sQQ8s16sI12s8s")
PLACEMENT = struct.Struct("<16sQ8s")
HEADER_BYTES = DESCRIPTOR.size + PLACEMENT.size
_SUMMED_BYTES = DESCRIPTOR.size - 8
_RESERVED = bytes(3)
_NO_PARAMETERS = bytes(12)


@dataclasses.dataclass(frozen=True)
class FrameDescriptor:
    """The part of a frame's header that is the same in every tier."""

    digest: Digest
    """Digest of the plain bytes."""
    plain_length: int
    stored_length: int
    stored_sum: bytes
    """sum8 of the payload."""
    kind: int = registry.KIND_FULL
    codec: int = registry.CODEC_IDENTITY
    digest_algorithm: int = registry.DIGEST_XXH3_128
    base_digest: bytes = ZERO_DIGEST
    """Digest of the base partition; zero when there is none."""
    codec_parameters: bytes = _NO_PARAMETERS
    """12 bytes that the codec defines."""
    payload_shift: int = 0
    """Bytes from the frame's second block to the payload, fewer than a block; 0 for a small frame."""

    @classmethod
    def identity(cls, digest: Digest, length: int, shift: int = 0) -> FrameDescriptor:
        """Describe a partition stored as it is: its payload's sum8 is part of the digest already."""
        return cls(digest, length, length, digest[8:], payload_shift=shift)

    @property
    def payload_offset(self) -> int:
        """Bytes from the start of the frame to the payload."""
        return payload_offset(self.stored_length, self.payload_shift)

    @property
    def frame_length(self) -> int:
        """Bytes of the whole frame, a multiple of the block."""
        return frame_length(self.stored_length, self.payload_shift)


@dataclasses.dataclass(frozen=True)
class FrameHeader:
    """A whole frame header: the descriptor, and where the frame was stamped to lie."""

    descriptor: FrameDescriptor
    place_id: PackId
    sequence: int
    """Number of the frame in its pack, from 0."""


def payload_offset(stored_length: int, shift: int = 0) -> int:
    """Return the bytes from the start of a frame to its payload."""
    return registry.BLOCK_BYTES + shift if stored_length >= registry.ALIGNED_PAYLOAD_MIN_BYTES else HEADER_BYTES


def frame_length(stored_length: int, shift: int = 0) -> int:
    """Return the bytes of a whole frame, a multiple of the block."""
    block = registry.BLOCK_BYTES
    return (payload_offset(stored_length, shift) + stored_length + block - 1) // block * block


def encode_header(descriptor: FrameDescriptor, place_id: PackId, sequence: int) -> bytes:
    """Return the 128 header bytes of a frame."""
    version = registry.FRAME_MAGIC, registry.FORMAT_WRITE
    encoding = descriptor.kind, descriptor.codec, descriptor.digest_algorithm, _RESERVED
    payload = descriptor.digest, descriptor.plain_length, descriptor.stored_length, descriptor.stored_sum
    rest = descriptor.base_digest, descriptor.payload_offset, descriptor.codec_parameters, bytes(8)
    summed = DESCRIPTOR.pack(*version, *encoding, *payload, *rest)[:_SUMMED_BYTES]
    checked = summed + sum8(summed)
    place = PLACEMENT.pack(place_id, sequence, bytes(8))[:24]
    return checked + place + sum8(checked[_SUMMED_BYTES:] + place)


def decode_header(data: Buffer, where: str) -> FrameHeader:
    """Read and check a frame header; ``where`` names the frame in errors."""
    if len(data) < HEADER_BYTES:
        raise TruncatedError(f"{where}: header has {len(data)} of {HEADER_BYTES} bytes")
    raw = bytes(data[:HEADER_BYTES])
    fields = DESCRIPTOR.unpack_from(raw)
    magic, _, kind, codec, algorithm, reserved, name, plain, stored, stored_sum, base, offset, params, own_sum = fields
    if magic != registry.FRAME_MAGIC:
        raise BadMagicError(f"{where}: no frame begins here")
    check_binary_version(raw[:_SUMMED_BYTES], own_sum, where)
    if own_sum != sum8(raw[:_SUMMED_BYTES]):
        raise ChecksumError(f"{where}: header checksum mismatch")
    if reserved != _RESERVED:
        raise StructureError(f"{where}: reserved header bytes are not zero")
    check_encoding(kind, codec, algorithm, where)
    check_lengths(plain, stored, codec, where)
    shift = offset - payload_offset(stored)
    check_shift(shift, stored, where)
    if params != _NO_PARAMETERS:
        raise StructureError(f"{where}: codec parameters are not zero")
    check_base(kind, name, base, where)
    if codec == registry.CODEC_IDENTITY and stored_sum != name[8:]:
        raise StructureError(f"{where}: payload checksum and digest of an unencoded frame differ")
    place_id, sequence, place_sum = PLACEMENT.unpack_from(raw, DESCRIPTOR.size)
    if place_sum != sum8(raw[_SUMMED_BYTES : HEADER_BYTES - 8]):
        raise ChecksumError(f"{where}: placement checksum mismatch")
    descriptor = FrameDescriptor(Digest(name), plain, stored, stored_sum, kind, codec, algorithm, base, params, shift)
    return FrameHeader(descriptor, PackId(place_id), sequence)


def check_encoding(kind: int, codec: int, algorithm: int, where: str) -> None:
    """Refuse frame kinds, codecs and digest algorithms that this program does not know, or that do not go together."""
    for what, number, known, names in (
        ("frame kind", kind, registry.SUPPORTED_KINDS, registry.FRAME_KINDS),
        ("digest algorithm", algorithm, registry.SUPPORTED_DIGESTS, registry.DIGESTS),
        ("codec", codec, registry.SUPPORTED_CODECS, registry.CODECS),
    ):
        if number not in known:
            name = names.get(number, "unknown")
            raise UnsupportedCodecError(
                f"{where}: {what} {number} ({name}) is not supported: install a newer asymcheck"
            )
    if codec not in registry.CODECS_OF_KIND[kind]:
        raise StructureError(f"{where}: a {registry.FRAME_KINDS[kind]} frame with codec {registry.CODECS[codec]}")


def check_base(kind: int, name: bytes, base: bytes, where: str) -> None:
    """Refuse a full frame with a base, and another without one or that is its own."""
    if (base == ZERO_DIGEST) != (kind == registry.KIND_FULL):
        raise StructureError(f"{where}: a {registry.FRAME_KINDS[kind]} frame whose base is {base.hex()}")
    if kind != registry.KIND_FULL and base == name:
        raise StructureError(f"{where}: the frame is its own base")


def check_lengths(plain: int, stored: int, codec: int, where: str) -> None:
    """Refuse lengths beyond the limits, before anything is allocated."""
    if plain > registry.PARTITION_BYTES_MAX or stored > registry.FRAME_STORED_BYTES_MAX:
        raise LimitError(f"{where}: {plain} plain and {stored} stored bytes are beyond the limits")
    if plain < 1 or stored < 1:
        raise StructureError(f"{where}: {plain} plain and {stored} stored bytes: a frame holds at least one")
    if codec == registry.CODEC_IDENTITY and plain != stored:
        raise StructureError(f"{where}: codec identity with {plain} plain and {stored} stored bytes")


def check_shift(shift: int, stored: int, where: str) -> None:
    """Refuse a payload that begins where none of so many bytes may."""
    if shift and (stored < registry.ALIGNED_PAYLOAD_MIN_BYTES or not 0 < shift < registry.BLOCK_BYTES):
        raise StructureError(f"{where}: payload shift {shift} does not belong to {stored} stored bytes")


def check_frame(data: memoryview, pack_id: PackId, sequence: int, where: str) -> tuple[FrameDescriptor, memoryview]:
    """Check a whole frame as read from a pack, all but the plain digest, and return its descriptor and payload.

    ``data`` is the frame with its padding. The caller decodes the payload and compares the digest.
    """
    descriptor = check_header(data, len(data), pack_id, sequence, where)
    start, end = descriptor.payload_offset, descriptor.payload_offset + descriptor.stored_length
    payload = data[start:end]
    if descriptor.codec != registry.CODEC_IDENTITY and sum8(payload) != descriptor.stored_sum:
        raise ChecksumError(f"{where}: payload checksum mismatch")
    check_padding((data[HEADER_BYTES:start], data[end:]), where)
    return descriptor, payload


def check_header(data: memoryview, length: int, pack_id: PackId, sequence: int, where: str) -> FrameDescriptor:
    """Check the header at the beginning of ``data``, of a frame in a place for ``length`` bytes of a pack.

    Raises:
        FormatError: of the kind that fits.
    """
    header = decode_header(data, where)
    if header.place_id != pack_id or header.sequence != sequence:
        raise StructureError(
            f"{where}: the frame was written as frame {header.sequence} of pack {header.place_id.hex()}"
        )
    needed = header.descriptor.frame_length
    if length < needed:
        raise TruncatedError(f"{where}: {length} of {needed} bytes")
    if length > needed:
        raise StructureError(f"{where}: frame of {needed} bytes in a place for {length}")
    return header.descriptor


def check_padding(parts: Iterable[memoryview], where: str) -> None:
    """Check that the padding of a frame, which is in several parts, is zero.

    Raises:
        StructureError
    """
    if not all(map(is_zero, parts)):
        raise StructureError(f"{where}: padding is not zero")
