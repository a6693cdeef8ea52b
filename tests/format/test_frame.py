"""Test frames: every bit of a header is checked, and lengths follow from one number."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import (
    BadMagicError,
    ChecksumError,
    FormatError,
    LimitError,
    StructureError,
    TruncatedError,
    UnsupportedCodecError,
)
from asymcheck.format import registry
from asymcheck.format.digest import digest, sum8
from asymcheck.format.frame import (
    DESCRIPTOR,
    HEADER_BYTES,
    PLACEMENT,
    FrameDescriptor,
    FrameHeader,
    check_encoding,
    check_frame,
    check_lengths,
    decode_header,
    encode_header,
    frame_length,
    payload_offset,
)
from asymcheck.types import Digest, PackId

PACK = PackId(bytes(range(16)))
ids = st.binary(min_size=16, max_size=16)


def frame(plain: bytes, sequence: int = 0) -> bytes:
    """Return a complete frame."""
    header = encode_header(FrameDescriptor.identity(digest(plain), len(plain)), PACK, sequence)
    return (header.ljust(payload_offset(len(plain)), b"\0") + plain).ljust(frame_length(len(plain)), b"\0")


@pytest.mark.parametrize(
    ("stored", "offset", "length"),
    [
        (1, 128, 4096),
        (3968, 128, 4096),
        (3969, 128, 8192),
        (65535, 128, 69632),
        (65536, 4096, 69632),
        (65537, 4096, 73728),
        (8 << 20, 4096, (8 << 20) + 4096),
        (1 << 30, 4096, (1 << 30) + 4096),
    ],
)
def test_lengths(stored: int, offset: int, length: int) -> None:
    """Test that small payloads share the block of the header, large ones begin on a block, and a frame ends on one."""
    assert payload_offset(stored) == offset
    assert frame_length(stored) == length


@given(ids.map(Digest), st.integers(1, registry.PARTITION_BYTES_MAX), ids.map(PackId), st.integers(0, (1 << 64) - 1))
def test_headers_go_round(name: Digest, length: int, place: PackId, sequence: int) -> None:
    """Test that a header is read as it was written, in 128 bytes."""
    descriptor = FrameDescriptor.identity(name, length)
    data = encode_header(descriptor, place, sequence)
    assert len(data) == HEADER_BYTES == DESCRIPTOR.size + PLACEMENT.size == 128
    assert decode_header(data, "test") == FrameHeader(descriptor, place, sequence)


@given(ids.map(PackId), st.integers(0, (1 << 64) - 1))
def test_the_descriptor_does_not_know_its_place(place: PackId, sequence: int) -> None:
    """Test that bytes 0 to 95 are equal in every pack and at every position, so that frames can be moved."""
    descriptor = FrameDescriptor.identity(digest(b"x"), 1)
    assert encode_header(descriptor, place, sequence)[:96] == encode_header(descriptor, PACK, 0)[:96]


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_the_header_is_found(bit: int) -> None:
    """Test that a header with any flipped bit counts as damaged, never as a newer format."""
    data = frame(b"payload")
    for offset in range(HEADER_BYTES):
        changed = bytearray(data)
        changed[offset] ^= 1 << bit
        with pytest.raises((BadMagicError, ChecksumError)):
            decode_header(changed, "test")


@pytest.mark.parametrize("length", [0, 1, 127])
def test_a_short_header_is_refused(length: int) -> None:
    """Test fewer than 128 bytes."""
    with pytest.raises(TruncatedError, match=f"{length} of 128"):
        decode_header(frame(b"payload")[:length], "test")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kind": 3}, UnsupportedCodecError),
        ({"codec": 5}, UnsupportedCodecError),
        ({"kind": 1}, StructureError),
        ({"codec": 3}, StructureError),
        ({"codec": 4}, StructureError),
        ({"kind": 1, "codec": 3}, StructureError),
        ({"kind": 2, "codec": 4}, StructureError),
        ({"kind": 1, "codec": 3, "base_digest": digest(b"payload")}, StructureError),
        ({"kind": 2, "codec": 3, "base_digest": digest(b"base")}, StructureError),
        ({"codec": 2, "base_digest": digest(b"base")}, StructureError),
        ({"codec": 1, "codec_parameters": bytes(11) + b"\1"}, StructureError),
        ({"digest_algorithm": 2}, UnsupportedCodecError),
        ({"plain_length": 0}, StructureError),
        ({"stored_length": 0}, StructureError),
        ({"plain_length": 8}, StructureError),
        ({"plain_length": registry.PARTITION_BYTES_MAX + 1}, LimitError),
        ({"stored_length": registry.FRAME_STORED_BYTES_MAX + 1}, LimitError),
        ({"stored_sum": bytes(8)}, StructureError),
        ({"base_digest": b"\1" + bytes(15)}, StructureError),
        ({"codec_parameters": bytes(11) + b"\1"}, StructureError),
    ],
    ids=str,
)
def test_fields_that_break_a_rule_are_refused(changes: dict[str, object], error: type[FormatError]) -> None:
    """Test invalid fields with valid checksums: each raises the matching error."""
    sound = FrameDescriptor.identity(digest(b"payload"), 7)
    broken = dataclasses.replace(sound, **changes)  # type: ignore[arg-type]  # fields by name
    with pytest.raises(error):
        decode_header(encode_header(broken, PACK, 0), "test")


@pytest.mark.parametrize("offset", [13, 14, 15])
def test_reserved_bytes_are_refused(offset: int) -> None:
    """Test a reserved byte that is not zero, which may have a meaning in a later version."""
    changed = bytearray(frame(b"payload")[:HEADER_BYTES])
    changed[offset] = 1
    changed[88:96] = sum8(bytes(changed[:88]))
    changed[120:128] = sum8(bytes(changed[88:120]))
    with pytest.raises(StructureError, match="reserved"):
        decode_header(changed, "test")


@pytest.mark.parametrize("length", [1, 3968, 3969, 65535, 65536])
def test_a_sound_frame_gives_its_payload(length: int) -> None:
    """Test that the payload is returned without a copy."""
    plain = bytes(range(1, 252)) * (length // 251 + 1)
    data = frame(plain[:length], 5)
    descriptor, payload = check_frame(memoryview(data), PACK, 5, "test")
    assert payload == plain[:length]
    assert descriptor == FrameDescriptor.identity(digest(plain[:length]), length)
    assert payload.obj is data


@pytest.mark.parametrize("length", [300, 65536])
def test_every_byte_of_padding_is_checked(length: int) -> None:
    """Test a non-zero byte at each position before and after the payload."""
    data = frame(b"\7" * length)
    start = payload_offset(length)
    for offset in [*range(HEADER_BYTES, start), *range(start + length, len(data))]:
        changed = bytearray(data)
        changed[offset] = 1
        with pytest.raises(StructureError, match="padding"):
            check_frame(memoryview(changed), PACK, 0, "test")


def test_a_frame_in_another_place_is_refused() -> None:
    """Test a frame of another pack or position; the error says where it was written."""
    data = memoryview(frame(b"payload", 3))
    for pack, sequence in ((PackId(bytes(16)), 3), (PACK, 4)):
        with pytest.raises(StructureError, match=f"frame 3 of pack {PACK.hex()}"):
            check_frame(data, pack, sequence, "test")


def test_a_frame_of_another_length_is_refused() -> None:
    """Test fewer and more bytes than the header says."""
    data = frame(b"payload")
    with pytest.raises(TruncatedError):
        check_frame(memoryview(data)[:-1], PACK, 0, "test")
    with pytest.raises(StructureError):
        check_frame(memoryview(data + bytes(4096)), PACK, 0, "test")


def test_reserved_numbers_are_refused_by_name() -> None:
    """Test that the error contains the name of a reserved number, if it has one."""
    for kind, codec, algorithm, words in (
        (3, 0, 1, r"frame kind 3 \(lossy\)"),
        (0, 5, 1, r"codec 5 \(unknown\)"),
        (0, 0, 2, r"digest algorithm 2 \(blake3-128\)"),
        (99, 0, 1, r"frame kind 99 \(unknown\)"),
    ):
        with pytest.raises(UnsupportedCodecError, match=words):
            check_encoding(kind, codec, algorithm, "test")


def test_lengths_at_the_limit_pass() -> None:
    """Test the largest partition."""
    check_lengths(registry.PARTITION_BYTES_MAX, registry.PARTITION_BYTES_MAX, registry.CODEC_IDENTITY, "test")


@pytest.mark.parametrize(
    ("kind", "codec", "base"),
    [(0, 1, b""), (0, 2, b""), (1, 3, b"base"), (2, 4, b"base")],
)
def test_encoded_frames_are_read(kind: int, codec: int, base: bytes) -> None:
    """Test every valid pair of kind and codec, with different lengths and a sum other than the digest."""
    base_digest = digest(base) if base else bytes(16)
    described = FrameDescriptor(digest(b"plain"), 5, 7, sum8(b"payload"), kind, codec, base_digest=base_digest)
    assert decode_header(encode_header(described, PACK, 0), "test").descriptor == described


def test_the_payload_of_an_encoded_frame_is_summed() -> None:
    """Test that damage can be distinguished from a wrong decoding."""
    described = FrameDescriptor(digest(b"plain"), 5, 7, sum8(b"payload"), 0, 1)
    data = (encode_header(described, PACK, 0) + b"payload").ljust(4096, b"\0")
    assert check_frame(memoryview(data), PACK, 0, "test") == (described, memoryview(b"payload"))
    with pytest.raises(ChecksumError, match="payload"):
        check_frame(memoryview(data.replace(b"payload", b"paxload")), PACK, 0, "test")
