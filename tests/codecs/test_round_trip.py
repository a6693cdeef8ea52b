"""Test that codecs decode to the same bytes, for any bytes and any partition boundaries."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.codecs import container, derived, planes, zstd
from asymcheck.codecs.container import Segment
from asymcheck.codecs.decode import decode
from asymcheck.codecs.derived import rounded_base
from asymcheck.codecs.encode import Encoded, encode_delta, encode_derived, encode_planes, encode_zstd
from asymcheck.errors import InvalidInputError
from asymcheck.format import registry
from asymcheck.format.digest import Buffer, digest, sum8
from asymcheck.format.frame import HEADER_BYTES, decode_header, encode_header
from asymcheck.types import PackId

CHUNK = 4096

KINDS = [
    Segment(0, width, is_float) for width in (1, 2, 4, 8) for is_float in (False, True) if width > 1 or not is_float
]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """Return segments of any kind, some longer than a chunk, and the seed of their bytes."""
    found = draw(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 700)), min_size=1, max_size=5))
    segments = [Segment(kind.width * count, kind.width, kind.is_float) for kind, count in found]
    return segments, draw(st.integers(0, 2**32))


def make(length: int, seed: int) -> bytes:
    """Return bytes of several textures: noise, runs, zeros, and values that change little."""
    numbers = np.random.default_rng(seed)
    pieces: list[bytes] = []
    while sum(map(len, pieces)) < length:
        size = int(numbers.integers(1, 3000))
        match int(numbers.integers(4)):
            case 0:
                pieces.append(numbers.bytes(size))
            case 1:
                pieces.append(bytes([int(numbers.integers(256))]) * size)
            case 2:
                pieces.append(numbers.standard_normal(size).astype("<f4").tobytes())
            case _:
                pieces.append(numbers.integers(0, 9, size).astype("<i8").tobytes())
    return b"".join(pieces)[:length]


def check(encoded: Encoded, plain: bytes, base: bytes | None = None) -> None:
    """Check that the descriptor is valid and matches the payload, and that decoding gives the plain bytes."""
    described, payload = encoded.descriptor, encoded.payload()
    assert (described.plain_length, described.stored_length) == (len(plain), len(payload))
    assert described.stored_sum == sum8(payload)
    header = encode_header(described, PackId(bytes(16)), 0)
    assert len(header) == HEADER_BYTES
    assert decode_header(header, "test").descriptor == described
    room = bytearray(len(payload))
    encoded.write_to(memoryview(room))
    assert bytes(room) == payload
    assert decode(described, memoryview(payload), base if base is None else memoryview(base)) == plain


@given(st.binary(min_size=1, max_size=5000))
def test_zstd_goes_round(plain: bytes) -> None:
    """Test any bytes."""
    check(encode_zstd(digest(plain), memoryview(plain)), plain)


@settings(max_examples=60)
@given(partitions())
def test_planes_go_round(partition: tuple[list[Segment], int]) -> None:
    """Test any segments of any bytes."""
    segments, seed = partition
    plain = make(sum(segment.length for segment in segments), seed)
    check(encode_planes(digest(plain), memoryview(plain), segments, chunk_bytes=CHUNK), plain)


@settings(max_examples=60)
@given(partitions(), st.booleans())
def test_deltas_go_round(partition: tuple[list[Segment], int], near: bool) -> None:
    """Test a similar base, and an unrelated base."""
    segments, seed = partition
    plain = make(sum(segment.length for segment in segments), seed)
    base = bytes(byte ^ (index % 97 == 0) for index, byte in enumerate(plain)) if near else make(len(plain), seed + 1)
    encoded = encode_delta(
        digest(plain), memoryview(plain), segments, digest(base), memoryview(base), chunk_bytes=CHUNK
    )
    check(encoded, plain, base)
    assert encoded.descriptor.base_digest == digest(base)


ODD = (0, 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 0x7C00, 0x7C01, 0xFC00, 0xFE01)


def test_every_pair_of_odd_values_has_a_difference_that_is_undone() -> None:
    """Test zeros, infinities and NaN of both signs, and integers that overflow, in every width."""
    for width in (1, 2, 4, 8):
        shift = np.uint64(8 * max(width - 2, 0))
        values = (np.array(ODD, dtype=np.uint64) << shift).astype(f"<u{width}")
        target, base = (side.ravel().copy() for side in np.meshgrid(values, values))
        for is_float in (False, True):
            made = planes.difference(target, base, is_float=is_float)
            undone = np.empty_like(target)
            planes.apply_difference(made, base, undone, is_float=is_float)
            assert np.array_equal(undone, target)


def test_the_order_of_floats_is_that_of_their_values() -> None:
    """Test the order as two's complement integers, with negative zero just below positive zero."""
    values = np.array([-np.inf, -2.5, -1e-40, -0.0, 0.0, 1e-45, 1.0, np.inf], dtype="<f4")
    words = values.view("<u4")
    made = planes.in_order(words, np.empty_like(words)).view("<i4")
    assert (np.diff(made.astype(np.int64)) > 0).all()
    assert made[4] - made[3] == 1
    small = planes.difference(words[3:4], words[4:5], is_float=True)
    assert small.tolist() == [1]


def test_planes_are_the_bytes_of_elements() -> None:
    """Test that the least significant byte is first, and that the rotation makes the exponent one whole byte."""
    words = np.array([0x80402010, 0x01020304], dtype="<u4")
    assert planes.split(words).tolist() == [[0x10, 4], [0x20, 3], [0x40, 2], [0x80, 1]]
    rotated = planes.rotated(np.array([-1.5], dtype="<f4").view("<u4"), np.empty(1, dtype="<u4"))
    assert planes.split(rotated)[3].tolist() == [127]
    assert int(rotated[0]) & 1 == 1


def test_noise_is_stored_plain_and_exponents_shrink() -> None:
    """Test weights: the plane of exponents shrinks, fractions stay plain, and no plane grows."""
    weights = np.random.default_rng(1).standard_normal(100_000).astype("<f4").tobytes()
    encoded = encode_planes(digest(weights), memoryview(weights), [Segment(len(weights), 4, True)])
    payload = encoded.payload()
    tables = container.decode_tables(memoryview(payload), len(weights), "test")
    assert tables.encodings[:4].tolist() == [container.RAW, container.RAW, container.RAW, container.ZSTD]
    assert len(payload) < 0.87 * len(weights)
    noise = np.random.default_rng(2).bytes(300_000)
    stored = encode_planes(digest(noise), memoryview(noise), [Segment(len(noise), 4)]).descriptor.stored_length
    assert len(noise) < stored < len(noise) + 100


def test_no_time_is_spent_on_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that only samples of noise are compressed."""
    seen: list[int] = []
    compress = zstd.compress

    def counting(plain: Buffer, effort: zstd.Effort) -> bytes:
        seen.append(len(plain))
        return compress(plain, effort)

    monkeypatch.setattr(zstd, "compress", counting)
    noise = np.random.default_rng(2).bytes(400_000)
    encode_planes(digest(noise), memoryview(noise), [Segment(len(noise), 4)])
    assert sum(seen) < len(noise) / 10


def test_repeated_strings_are_found_in_long_planes() -> None:
    """Test bytes with a uniform frequency and repetitions, which are not noise."""
    plain = bytes(range(256)) * 4096
    encoded = encode_planes(digest(plain), memoryview(plain), [Segment(len(plain), 1)])
    assert encoded.descriptor.stored_length < len(plain) // 100
    check(encoded, plain)


def test_threads_give_the_same_payload() -> None:
    """Test that threads that encode and decode at the same time do not disturb each other."""
    plain = make(300_000, 5)
    segments = [Segment(100_000, 4, True), Segment(200_000, 2, True)]
    alone = encode_planes(digest(plain), memoryview(plain), segments, chunk_bytes=CHUNK)

    def round_trip(_: int) -> tuple[bytes, bytes]:
        encoded = encode_planes(digest(plain), memoryview(plain), segments, chunk_bytes=CHUNK)
        return encoded.payload(), bytes(decode(alone.descriptor, memoryview(alone.payload())))

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(round_trip, range(8))) == {(alone.payload(), plain)}


def test_neighbours_of_one_kind_are_joined_and_too_many_become_bytes() -> None:
    """Test equal neighbours, empty segments, and more planes than the limit, which tables must not have."""
    joined = container.merge_segments([Segment(4, 4), Segment(8, 4), Segment(0, 2), Segment(2, 2)], CHUNK)
    assert joined == [Segment(12, 4), Segment(2, 2)]
    count = registry.CODEC_PLANES_MAX // 12 + 1
    many = [Segment(8, 8), Segment(4, 4)] * count
    assert container.merge_segments(many, CHUNK) == [Segment(12 * count, 1)]
    plain = make(12 * count, 3)
    check(encode_planes(digest(plain), memoryview(plain), many, chunk_bytes=CHUNK), plain)


@pytest.mark.parametrize(
    "segments", [[], [Segment(99, 1)], [Segment(101, 1)], [Segment(99, 2), Segment(1, 1)]], ids=str
)
def test_segments_that_do_not_fit_are_refused(segments: list[Segment]) -> None:
    """Test segments that do not cover the partition with whole elements."""
    with pytest.raises(InvalidInputError, match="100 bytes"):
        encode_planes(digest(bytes(100)), memoryview(bytes(100)), segments)


def test_every_dtype_has_a_segment() -> None:
    """Test that floats of 2 or more bytes are marked, and complex numbers count by component."""
    found = {name: container.segment_of(name, 16) for name in registry.DTYPE_BYTES}
    marked = {name: segment.width for name, segment in found.items() if segment.is_float}
    assert marked == {
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 2,
        "complex64": 4,
        "complex128": 8,
    }
    assert {found[name].width for name in ("bool", "uint8", "float8_e4m3fn", "float4_e2m1fn_x2")} == {1}
    assert (found["int64"].width, found["uint16"].width) == (8, 2)


def test_a_base_of_another_length_is_refused() -> None:
    """Test that a delta needs a base of the same length."""
    with pytest.raises(InvalidInputError, match="a base of 96 bytes"):
        encode_delta(digest(b""), memoryview(bytes(100)), [Segment(100, 4)], digest(b"b"), memoryview(bytes(96)))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.integers(0, 7), st.sampled_from([1, 2]))
def test_rounded_copies_are_derived(bits: list[int], offset: int, dtype: int) -> None:
    """Test a copy at any position of the base, which takes 16 bytes, and a copy that differs in one bit."""
    base = bytes(offset) + np.array(bits, dtype="<u4").tobytes()
    plain = rounded_base(memoryview(base), offset, 2 * len(bits), dtype).tobytes()
    encoded = encode_derived(digest(plain), memoryview(plain), dtype, digest(base), memoryview(base), offset)
    assert encoded is not None
    assert encoded.descriptor.stored_length == 16
    check(encoded, plain, base)
    other = bytes([plain[0] ^ 1]) + plain[1:]
    assert encode_derived(digest(other), memoryview(other), dtype, digest(base), memoryview(base), offset) is None
    assert encode_derived(digest(plain), memoryview(plain), dtype, digest(base), memoryview(base), offset + 1) is None


def test_rounding_is_that_of_torch() -> None:
    """Test both dtypes without NaN: random bits, and ties with their neighbours in some exponents."""
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(3)
    ties = [
        (exponent << 23) + (upper << 12) + offset
        for exponent in (0, 1, 100, 101, 102, 103, 112, 113, 127, 142, 143, 254)
        for upper in range(0, 2048, 7)
        for offset in (-1, 0, 1)
    ]
    bits = np.concatenate([numbers.integers(0, 2**32, 50_000), np.array(ties) % 2**32]).astype("<u4")
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]
    for dtype, target in ((derived.BFLOAT16, torch.bfloat16), (derived.FLOAT16, torch.float16)):
        expected = torch.from_numpy(bits.view("<f4").copy()).to(target).view(torch.uint8).numpy()
        assert np.array_equal(rounded_base(bits.data.cast("B"), 0, 2 * len(bits), dtype), expected)
