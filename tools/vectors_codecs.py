"""Vectors of partitions in every codec (SPEC.md §A10). They are packs, because a frame may need other frames."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

from asymcheck.format.frame import payload_offset
from tools.codec_payloads import Segments, Stored, delta, derived, identity, pack_of, planes, zstd_raw, zstd_runs
from tools.vectors_base import Vector, fixed_bytes, valid
from tools.vectors_pack import PACK_ID, PACK_PATH

HUFFMAN = bytes.fromhex(
    "28b52ffd603e013d030042c40d13c03507c0c88e227b37db5c36171afadddbc54ee3e6f2774a804aeef8adcf644476389412"
    "4a5d924565ebdc6bae998c456602eb1e370811006a2928365906b19a2073f57e063f0dae2f420ebed91fa3b501b85d209505"
    "3a6001182865c155c5e7d72c03"
)
"""A frame of a real compressor, with literals coded by frequency and with matches."""

_SENTENCE = b"I am a plain part of some text; a checkpoint of parts is a plain text of checkpoints. "
_SENTENCES = b"some parts are plain, some checkpoints are text; most are parts of checkpoints."
HUFFMAN_PLAIN = _SENTENCE * 3 + _SENTENCES * 4

# Bits of float32: zeros, the smallest, the largest, infinities, NaN with payloads, and values around ties.
ODD_BITS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x7F800000, 0xFF800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3F817FFF),
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0xC77FF000, 0x33000000, 0x33000001, 0x33800000),
    *(0x33BFFFFF, 0x33C00000, 0x387FC000, 0x387FE000, 0x387FFFFF, 0x38800000, 0x3F801000, 0x3F803000),
)
NAN_BITS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFABCDEF)


# Rounded values of the bits above, computed with exact fractions instead of the library.
BFLOAT16 = (
    *(0x0000, 0x8000, 0x0000, 0x8000, 0x0080, 0x0080, 0x7F80, 0xFF80, 0x7F80, 0xFF80, 0x3F80, 0x3F80, 0x3F82, 0x3F81),
    *(0x3F80, 0x3F81, 0x4780, 0x4780, 0x4780, 0x4780, 0xC780, 0x3300, 0x3300, 0x3380, 0x33C0, 0x33C0, 0x3880, 0x3880),
    *(0x3880, 0x3880, 0x3F80, 0x3F80, 0x7FC0, 0x7FC0, 0x7FC0, 0x7FC0),
)
FLOAT16 = (
    *(0x0000, 0x8000, 0x0000, 0x8000, 0x0000, 0x0000, 0x7C00, 0xFC00, 0x7C00, 0xFC00, 0x3C00, 0x3C04, 0x3C0C, 0x3C04),
    *(0x3C04, 0x3C0C, 0x7BFF, 0x7BFF, 0x7C00, 0x7C00, 0xFC00, 0x0000, 0x0001, 0x0001, 0x0001, 0x0002, 0x03FF, 0x0400),
    *(0x0400, 0x0400, 0x3C00, 0x3C02, 0x7E00, 0xFE00, 0x7E00, 0xFE00),
)


def _like_weights(label: str, width: int, count: int) -> bytes:
    """Return floats like those of a training: exponents that seldom change, pseudo-random signs and fractions."""
    noise = fixed_bytes(label, width * count)
    elements = bytearray(noise)
    for number in range(count):
        last = width * number + width - 1
        elements[last] = (noise[last] & 0x80) | (0x3D if number % 500 < 400 else 0x3C)
    return bytes(elements)


def _small_steps(label: str, older: bytes, width: int, most: int) -> bytes:
    """Return integers near ``older``."""
    steps = fixed_bytes(label, len(older) // width)
    return b"".join(
        (
            (int.from_bytes(older[width * n : width * n + width], "little") + steps[n] % most) % (1 << 8 * width)
        ).to_bytes(width, "little")
        for n in range(len(older) // width)
    )


def _words(values: Sequence[int], form: str) -> bytes:
    return struct.pack(f"<{len(values)}{form}", *values)


def _codec(name: str, stored: Sequence[Stored], why: str) -> Vector:
    offset, entries = 4096, []
    parts = pack_of(stored)
    for sequence, (one, frame) in enumerate(zip(stored, parts.frames, strict=True)):
        about = one.descriptor
        entry = {
            "magic": "ASYMFRAM",
            "format": 1,
            "kind": about.kind,
            "codec": about.codec,
            "digest_algorithm": 1,
            "digest": about.digest.hex(),
            "plain_length": about.plain_length,
            "stored_length": about.stored_length,
            "stored_sum": about.stored_sum.hex(),
            "base_digest": about.base_digest.hex(),
            "payload_offset": payload_offset(about.stored_length),
            "codec_parameters": bytes(12).hex(),
            "place_id": PACK_ID.hex(),
            "sequence": sequence,
            "offset": offset,
            "plain": one.plain.hex(),
        }
        if one.codec in (2, 3):
            chunk, segments, count = struct.unpack_from("<III", one.payload)
            entry["tables"] = {"chunk_bytes": chunk, "segment_count": segments, "plane_count": count}
        if one.codec == 4:
            entry["source"] = {"dtype": one.payload[0], "offset": int.from_bytes(one.payload[8:], "little")}
        entries.append(entry)
        offset += len(frame)
    return valid("codec", name, parts.data, why, {"entries": entries}, path=PACK_PATH)


def codec_vectors() -> Iterator[Vector]:
    """Yield well-formed packs of encoded partitions."""
    yield from _zstd()
    yield from _planes()
    yield from _deltas()
    yield from _derived()


def _zstd() -> Iterator[Vector]:
    def zstd(name: str, plain: bytes, payload: bytes, why: str) -> Vector:
        return _codec(f"zstd-{name}", [Stored(plain, payload, 0, 1)], why)

    yield zstd(
        "raw", fixed_bytes("zstd", 300), zstd_raw(fixed_bytes("zstd", 300)), "a frame longer than the plain bytes"
    )
    yield zstd("runs", bytes(5000) + b"\7" * 900, zstd_runs(bytes(5000) + b"\7" * 900), "two runs of a byte")
    yield zstd("one-byte", b"\x7f", zstd_raw(b"\x7f"), "the shortest partition")
    yield zstd("text", HUFFMAN_PLAIN, HUFFMAN, "a frame of a real compressor, with matches and coded literals")


def _planes() -> Iterator[Vector]:
    def one(name: str, plain: bytes, segments: Segments, why: str) -> Vector:
        return _codec(f"planes-{name}", [planes(plain, segments)], why)

    for name, width in (("bfloat16", 2), ("float32", 4), ("float64", 8)):
        plain = _like_weights(name, width, 1000)
        yield one(name, plain, [(len(plain), width, 1)], "rotated by one bit; the last plane has runs of exponents")
    half = _like_weights("float16", 2, 700)
    yield one("float16", half, [(1400, 2, 1)], "the exponent shares its byte with the fraction")
    odd = _words([*ODD_BITS, *NAN_BITS], "I")
    yield one("odd-values", odd, [(len(odd), 4, 1)], "zeros of both signs, subnormals, infinities, NaN with payloads")
    ints = _words(range(-300, 300), "q")
    yield one("int64", ints, [(len(ints), 8, 0)], "integers are not rotated; most planes have two values")
    yield one("uint8", fixed_bytes("uint8", 777), [(777, 1, 0)], "one plane: the bytes as they are")
    yield one("zeros", bytes(8000), [(8000, 4, 1)], "every plane repeats one byte, so that there is no data")
    for width in (1, 2, 4, 8):
        element = bytes(range(1, width + 1))
        yield one(f"one-element-{width}", element, [(width, width, int(width > 1))], "a plane of one byte is constant")
    long = _like_weights("chunks", 2, 4500)
    yield one("three-chunks", long, [(9000, 2, 1)], "two chunks of 4096 bytes and one of 808")
    exact = _like_weights("exact", 4, 2048)
    yield one("two-whole-chunks", exact, [(8192, 4, 1)], "the length is a multiple of the chunk")
    bundle = _like_weights("a", 4, 1500) + b"\1" + _like_weights("b", 2, 900) + _words(range(50), "q")
    kinds = [(6000, 4, 1), (1, 1, 0), (1800, 2, 1), (400, 8, 0)]
    yield one("mixed", bundle, kinds, "four segments; the second makes those behind it lie at odd offsets")
    same = _words(range(100), "H") + _words(range(100), "H")
    yield one("same-width", same, [(200, 2, 0), (200, 2, 1)], "neighbours of one width differ by the float mark")


def _deltas() -> Iterator[Vector]:
    def pair(name: str, base: bytes, plain: bytes, segments: Segments, why: str) -> Vector:
        return _codec(f"delta-{name}", [identity(base), delta(plain, segments, base)], why)

    for name, width in (("bfloat16", 2), ("float32", 4), ("float64", 8)):
        base = _like_weights(f"base {name}", width, 1200)
        plain = _small_steps(name, base, width, 3)
        yield pair(name, base, plain, [(len(base), width, 1)], "the upper planes of small differences are constant")
    ints = [_words(values, "I") for values in ([0, 2**32 - 1, 2**31, 5], [2**32 - 1, 0, 0, 2**31 - 1])]
    yield pair("wraps", ints[0], ints[1], [(16, 4, 0)], "differences are taken modulo 2^32")
    odd = [_words(values, "I") for values in ([*ODD_BITS, *NAN_BITS], [*NAN_BITS, *ODD_BITS])]
    yield pair("odd-values", odd[0], odd[1], [(len(odd[0]), 4, 1)], "between zeros, infinities and NaN, bit for bit")
    byte = [fixed_bytes("delta a", 300), fixed_bytes("delta b", 300)]
    yield pair("uint8", byte[0], byte[1], [(300, 1, 0)], "elements of one byte")
    old = _like_weights("old", 4, 1500) + b"\1" + _like_weights("old", 2, 900)
    new = _like_weights("new", 4, 1500) + b"\2" + _like_weights("new", 2, 900)
    yield pair("mixed", old, new, [(6000, 4, 1), (1, 1, 0), (1800, 2, 1)], "segments at odd offsets, two chunks")
    states = [_words(range(at, at + 64), "I") for at in range(9)]
    chain = [identity(states[0])]
    chain += [delta(new, [(256, 4, 0)], old) for old, new in itertools.pairwise(states)]
    yield _codec("delta-chain-of-8", chain, "the longest chain that is allowed")
    top = derived(struct.pack("<32H", *(bits >> 16 for bits in range(8, 40))), 1, states[8], 0)
    yield _codec("delta-chain-derived", [top, *reversed(chain)], "derived from the end of it; bases lie behind")
    encoded = planes(_like_weights("encoded base", 4, 200), [(800, 4, 1)])
    on_planes = delta(_small_steps("on planes", encoded.plain, 4, 9), [(800, 4, 1)], encoded.plain)
    yield _codec("delta-on-planes", [encoded, on_planes], "the base is encoded itself")


def _derived() -> Iterator[Vector]:
    base = _words([*ODD_BITS, *NAN_BITS], "I")

    def one(name: str, dtype: int, plain: Sequence[int], offset: int, why: str, before: bytes = b"") -> Vector:
        whole = before + base
        return _codec(f"derived-{name}", [identity(whole), derived(_words(plain, "H"), dtype, whole, offset)], why)

    why = "ties to even, carries into infinity, subnormals, NaN"
    yield one("bfloat16", 1, BFLOAT16, 0, why)
    yield one("float16", 2, FLOAT16, 0, why)
    yield one("part", 2, FLOAT16[10:20], 40, "ten elements from the middle of the base")
    yield one("odd-offset", 1, BFLOAT16, 3, "the elements begin at byte 3", b"abc")
