"""Test that hostile payloads are decoded or refused as malformed, within bounded time and memory."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc

import numpy as np
import pytest

from asymcheck.codecs import zstd
from asymcheck.codecs.container import HEADER, Segment
from asymcheck.codecs.decode import Chain, base_reader, decode, decode_checked
from asymcheck.codecs.encode import Encoded, encode_delta, encode_derived, encode_planes, encode_zstd
from asymcheck.errors import BaseDamagedError, FormatError, LimitError, StructureError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.types import Digest

WEIGHTS = np.random.default_rng(4).standard_normal(6000).astype("<f4")
BASE = WEIGHTS.tobytes()
PLAIN = (WEIGHTS + np.float32(1e-4)).tobytes()
SEGMENTS = [Segment(12_000, 4, is_float=True), Segment(11_997, 1), Segment(3, 1), Segment(0, 8)]
ROUNDED = ((WEIGHTS.view("<u4") >> 16).astype("<u2") + 0).tobytes()

SECONDS = 2.0
BYTES = 4 << 20
"""Limit beyond the plain bytes, about the size of the tables of the largest allowed payload."""


def encodings() -> dict[str, Encoded]:
    """Return a partition in each codec."""
    name, plain, base = digest(PLAIN), memoryview(PLAIN), memoryview(BASE)
    exact = (WEIGHTS.view("<u4") & 0xFFFF0000).astype("<u4").tobytes()
    derived = encode_derived(digest(ROUNDED), memoryview(ROUNDED), 1, digest(exact), memoryview(exact), 0)
    assert derived is not None
    return {
        "zstd": encode_zstd(name, plain),
        "planes": encode_planes(name, plain, SEGMENTS, chunk_bytes=4096),
        "delta": encode_delta(name, plain, SEGMENTS, digest(BASE), base, chunk_bytes=4096),
        "derived": derived,
    }


def _changed(payload: bytes, dice: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        # Change the tables as often as the data, in which every change is only another value.
        end = min(len(data), dice.choice([16, 40, 200, len(data)]))
        match dice.randrange(5) if end else 4:
            case 0:
                data[dice.randrange(end)] ^= 1 << dice.randrange(8)
            case 1:
                at = dice.randrange(end)
                word = dice.choice([0, 1, 2**31, 2**32 - 1, dice.randrange(2**24), 3 << 24])
                data[at : at + 4] = struct.pack("<I", word)[: len(data) - at]
            case 2:
                del data[dice.randrange(end) :]
            case 3:
                at = dice.randrange(end)
                del data[at : at + dice.randrange(1, 9)]
            case _:
                data += dice.randbytes(dice.randrange(1, 20))
    return bytes(data)


@pytest.mark.parametrize("codec", encodings())
def test_changed_payloads_are_decoded_or_refused(codec: str) -> None:
    """Test that the result has the right length, or that a FormatError is raised."""
    encoded, dice = encodings()[codec], random.Random(codec)
    refused = 0
    for _ in range(1500):
        payload = _changed(encoded.payload(), dice)
        try:
            plain = decode(encoded.descriptor, memoryview(payload), memoryview(BASE))
        except FormatError:
            refused += 1
        else:
            assert len(plain) == encoded.descriptor.plain_length
    assert refused > 300


@pytest.mark.parametrize("codec", encodings())
def test_every_prefix_is_refused(codec: str) -> None:
    """Test that no payload is complete before its end, and that further bytes are refused."""
    encoded = encodings()[codec]
    payload = encoded.payload()
    ends = [*range(min(300, len(payload))), *range(300, len(payload), 61), len(payload) - 1]
    for changed in [*(payload[:end] for end in ends if end < len(payload)), payload + b"\0"]:
        with pytest.raises(FormatError):
            decode(encoded.descriptor, memoryview(changed), memoryview(BASE))


def _header(*numbers: int) -> bytes:
    return HEADER.pack(*numbers) + bytes(64)


@pytest.mark.parametrize(
    ("payload", "length"),
    [
        (_header(4096, 1, 2**32 - 1, 0), 1 << 30),
        (_header(2**32 - 4096, 1, 4, 0), 1 << 30),
        (_header(4096, 2**32 - 1, 4, 0), 1 << 30),
        (HEADER.pack(4096, 1, 65536, 0) + struct.pack("<IBBH", 1 << 30, 8, 1, 0) + bytes(4 * 65536), 1 << 30),
        (HEADER.pack(4096, 1, 65536, 0) + struct.pack("<IBBH", 1 << 30, 1, 0, 0) + bytes(4 * 65536), 1 << 30),
    ],
    ids=["planes", "chunk", "segments", "more planes than the table", "lengths of nothing"],
)
def test_false_lengths_allocate_nothing(payload: bytes, length: int) -> None:
    """Test a header that claims a gibibyte."""
    described = FrameDescriptor(Digest(bytes(16)), length, len(payload), bytes(8), 0, registry.CODEC_BYTE_PLANES)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises((StructureError, LimitError)):
            decode(described, memoryview(payload))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < SECONDS
    assert peak < 8 * BYTES


@pytest.mark.slow
def test_the_largest_tables_are_decoded_soon() -> None:
    """Test the maximum number of planes, in segments of one element, which must not be too slow."""
    count = registry.CODEC_PLANES_MAX // 3
    pairs = struct.pack("<IBBHIBBH", 2, 2, 0, 0, 1, 1, 0, 0)
    words = struct.pack("<III", 2 << 24 | 1, 2 << 24 | 2, 2 << 24 | 3)
    payload = HEADER.pack(4096, 2 * count, 3 * count, 0) + pairs * count + words * count
    described = FrameDescriptor(Digest(bytes(16)), 3 * count, len(payload), bytes(8), 0, registry.CODEC_BYTE_PLANES)
    began = time.process_time()
    assert decode(described, memoryview(payload)) == b"\1\2\3" * count
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"\x50\x2a\x4d\x18\3\0\0\0abc", "not a Zstandard frame"),
        (b"\x27\xb5\x2f\xfd\x20\3\x19\0\0abc", "not a Zstandard frame"),
        (b"\x28\xb5\x2f\xfd\x21\7\3\x19\0\0abc", "3 bytes and dictionary 7"),
        (b"\x28\xb5\x2f\xfd\x20\4\x21\0\0abcd", "frame of 4 bytes"),
    ],
    ids=["skippable", "an older magic", "dictionary", "content size"],
)
def test_frames_of_another_kind_are_refused_before_decompression(packed: bytes, words: str) -> None:
    """Test the message, which describes the frame."""
    with pytest.raises(StructureError, match=words):
        zstd.decompress(packed, 3, "test")
    assert zstd.decompress(b"\x28\xb5\x2f\xfd\x20\3\x19\0\0abc", 3, "test") == b"abc"


def test_missing_bases_are_named() -> None:
    """Test that the error names the base."""
    encoded = encodings()["delta"]
    with pytest.raises(StructureError, match=digest(BASE).hex()):
        decode(encoded.descriptor, memoryview(encoded.payload()))
    with pytest.raises(StructureError, match="against a base of 5"):
        decode(encoded.descriptor, memoryview(encoded.payload()), memoryview(b"12345"))
    with pytest.raises(BaseDamagedError, match=f"{digest(PLAIN).hex()} needs base {digest(BASE).hex()}"):
        decode_checked(digest(PLAIN), encoded.descriptor, memoryview(encoded.payload()), "x", base_reader(lambda _: []))


def test_a_chain_has_eight_deltas_and_a_derived_frame_only_on_top() -> None:
    """Test nine deltas, a cycle, and a derived base."""
    chain = Chain()
    for depth in range(registry.DELTA_DEPTH_MAX):
        chain = chain.below(_delta(depth, depth + 1), "frame")
    with pytest.raises(BaseDamagedError, match="more than 8"):
        chain.below(_delta(8, 9), "frame")
    with pytest.raises(BaseDamagedError, match="leads back"):
        Chain().below(_delta(0, 1), "frame").below(_delta(1, 0), "frame")
    derived = FrameDescriptor(_name(7), 2, 16, bytes(8), registry.KIND_DERIVED, 4, base_digest=_name(0))
    assert Chain().below(derived, "frame").below(_delta(0, 1), "frame").deltas == 1
    with pytest.raises(BaseDamagedError, match="derived"):
        Chain().below(_delta(5, 7), "frame").below(derived, "frame")


def _name(number: int) -> Digest:
    return Digest(bytes([number + 1]) * 16)


def _delta(number: int, base: int) -> FrameDescriptor:
    return FrameDescriptor(_name(number), 4, 9, bytes(8), registry.KIND_DELTA, 3, base_digest=_name(base))
