"""Encode and check frames: the stored form of a partition (SPEC.md §A6)."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable

from asymcheck.errors import ChecksumError, LimitError, StructureError, TruncatedError, UnsupportedCodecError
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST, Buffer, is_zero, sum8
from asymcheck.format.registry import check_sealed
from asymcheck.types import Digest, PackId

DESCRIPTOR = struct.Struct("<8sHBBB3s16sQQ8s16sI12s8s")
PLACEMENT = struct.Struct("<16sQ8s")
HEADER_BYTES = DESCRIPTOR.size + PLACEMENT.size
_SUMMED_BYTES = DESCRIPTOR.size - 8
_RESERVED = bytes(3)
_NO_PARAMETERS = bytes(12)


@dataclasses.dataclass(frozen=True)
class FrameDescriptor:
    """The part of a frame header that is the same in every tier."""

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
    """Digest of the base partition; zero if the frame has no base."""
    codec_parameters: bytes = _NO_PARAMETERS
    """12 bytes defined by the codec."""
    payload_shift: int = 0
    """Bytes from the frame's second block to the payload, fewer than a block; 0 for a small frame."""

    @classmethod
    def identity(cls, digest: Digest, length: int, shift: int = 0) -> FrameDescriptor:
        """Describe a partition stored with codec identity. The sum8 of its payload is part of the digest."""
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
    """A frame header: the descriptor and the placement."""

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
    base_fields = descriptor.base_digest, descriptor.payload_offset, descriptor.codec_parameters, bytes(8)
    summed = DESCRIPTOR.pack(*version, *encoding, *payload, *base_fields)[:_SUMMED_BYTES]
    with_sum = summed + sum8(summed)
    placement = PLACEMENT.pack(place_id, sequence, bytes(8))[:24]
    return with_sum + placement + sum8(with_sum[_SUMMED_BYTES:] + placement)


def decode_header(data: Buffer, where: str) -> FrameHeader:
    """Read and check a frame header. ``where`` names the frame in errors."""
    if len(data) < HEADER_BYTES:
        raise TruncatedError(f"{where}: header has {len(data)} of {HEADER_BYTES} bytes")
    raw = bytes(data[:HEADER_BYTES])
    fields = DESCRIPTOR.unpack_from(raw)
    _, _, kind, codec, algorithm, reserved, name, plain, stored, stored_sum, base, offset, params, own_sum = fields
    check_sealed(raw[:_SUMMED_BYTES], own_sum, registry.FRAME_MAGIC, "frame", where)
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
    """Refuse an unsupported frame kind, codec or digest algorithm, or a codec that the kind does not allow."""
    for field, number, supported, names in (
        ("frame kind", kind, registry.SUPPORTED_KINDS, registry.FRAME_KINDS),
        ("digest algorithm", algorithm, registry.SUPPORTED_DIGESTS, registry.DIGESTS),
        ("codec", codec, registry.SUPPORTED_CODECS, registry.CODECS),
    ):
        if number not in supported:
            name = names.get(number, "unknown")
            raise UnsupportedCodecError(
                f"{where}: {field} {number} ({name}) is not supported: install a newer asymcheck"
            )
    if codec not in registry.CODECS_OF_KIND[kind]:
        raise StructureError(f"{where}: {registry.FRAME_KINDS[kind]} frame cannot have codec {registry.CODECS[codec]}")


def check_base(kind: int, name: bytes, base: bytes, where: str) -> None:
    """Refuse a full frame with a base, another frame without one, and a frame that is its own base."""
    if (base == ZERO_DIGEST) != (kind == registry.KIND_FULL):
        raise StructureError(f"{where}: {registry.FRAME_KINDS[kind]} frame cannot have base {base.hex()}")
    if kind != registry.KIND_FULL and base == name:
        raise StructureError(f"{where}: the frame is its own base")


def check_lengths(plain: int, stored: int, codec: int, where: str) -> None:
    """Refuse lengths beyond the limits, before memory is allocated."""
    if plain > registry.PARTITION_BYTES_MAX or stored > registry.FRAME_STORED_BYTES_MAX:
        raise LimitError(f"{where}: {plain} plain and {stored} stored bytes exceed the limits")
    if plain < 1 or stored < 1:
        raise StructureError(f"{where}: {plain} plain and {stored} stored bytes, a frame has at least one")
    if codec == registry.CODEC_IDENTITY and plain != stored:
        raise StructureError(f"{where}: codec identity with {plain} plain and {stored} stored bytes")


def check_shift(shift: int, stored: int, where: str) -> None:
    """Refuse a payload shift that a payload of this length cannot have."""
    if shift and (stored < registry.ALIGNED_PAYLOAD_MIN_BYTES or not 0 < shift < registry.BLOCK_BYTES):
        raise StructureError(f"{where}: payload shift {shift} is not allowed for {stored} stored bytes")


def check_frame(data: memoryview, pack_id: PackId, sequence: int, where: str) -> tuple[FrameDescriptor, memoryview]:
    """Check a frame of a pack and return its descriptor and payload.

    ``data`` is the frame with its padding. The caller decodes the payload and compares the digest of the plain bytes.
    """
    descriptor = check_header(data, len(data), pack_id, sequence, where)
    start, end = descriptor.payload_offset, descriptor.payload_offset + descriptor.stored_length
    payload = data[start:end]
    if descriptor.codec != registry.CODEC_IDENTITY and sum8(payload) != descriptor.stored_sum:
        raise ChecksumError(f"{where}: payload checksum mismatch")
    check_padding((data[HEADER_BYTES:start], data[end:]), where)
    return descriptor, payload


def check_header(data: memoryview, length: int, pack_id: PackId, sequence: int, where: str) -> FrameDescriptor:
    """Check the header of a frame to which the pack index gives ``length`` bytes."""
    header = decode_header(data, where)
    if header.place_id != pack_id or header.sequence != sequence:
        raise StructureError(
            f"{where}: the frame was written as frame {header.sequence} of pack {header.place_id.hex()}"
        )
    needed = header.descriptor.frame_length
    if length < needed:
        raise TruncatedError(f"{where}: frame has {length} of {needed} bytes")
    if length > needed:
        raise StructureError(f"{where}: frame of {needed} bytes, the pack has {length} bytes for it")
    return header.descriptor


def check_padding(parts: Iterable[memoryview], where: str) -> None:
    """Check that all parts of the padding of a frame are zero."""
    if not all(map(is_zero, parts)):
        raise StructureError(f"{where}: padding is not zero")
