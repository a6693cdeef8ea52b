"""Vectors of encoded partitions, each of which breaks one rule of SPEC.md §A10."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Iterator, Sequence

from tools.codec_payloads import (
    CHUNK,
    Stored,
    container,
    delta,
    derived,
    identity,
    pack_of,
    planes,
    zstd_frame,
    zstd_raw,
)
from tools.vectors_base import Vector, fixed_bytes, invalid, patched
from tools.vectors_codecs import HUFFMAN, HUFFMAN_PLAIN
from tools.vectors_pack import PACK_PATH

_PLAIN = b"".join(struct.pack("<I", 0x3D000000 | n << 8 | n % 7) for n in range(200))
_KINDS = [(len(_PLAIN), 4, 1)]
_PLANES = planes(_PLAIN, _KINDS)
_BASE = b"".join(struct.pack("<I", 0x3D000000 | n << 8) for n in range(200))
_DELTA = delta(_PLAIN, _KINDS, _BASE)
# Offsets of the table of planes and of the data in this payload.
_WORDS, _DATA = 16 + 8, 16 + 8 + 4 * 4


def codec_damage_vectors() -> Iterator[Vector]:
    """Yield every malformed encoded partition."""
    yield from _zstd()
    yield from _tables()
    yield from _segments()
    yield from _words()
    yield from _contents()
    yield from _deltas()
    yield from _derived()
    yield from _chains()


def _bad(name: str, stored: Sequence[Stored], kind: str, why: str) -> Vector:
    return invalid("pack", f"codec-{name}", pack_of(stored).data, kind, why, path=PACK_PATH)


def _with(stored: Stored, payload: bytes) -> Stored:
    return dataclasses.replace(stored, payload=payload)


def _zstd() -> Iterator[Vector]:
    plain = fixed_bytes("zstd", 300)
    sound = zstd_raw(plain)
    run = [(1, 100_000, b"\0")]
    for name, payload, why in (
        ("not-a-frame", plain, "bytes that are no Zstandard frame"),
        ("skippable", b"\x50\x2a\x4d\x18" + struct.pack("<I", 300) + plain, "a skippable frame"),
        ("skippable-first", b"\x50\x2a\x4d\x18" + bytes(4) + sound, "a skippable frame in front of the frame"),
        ("shorter", zstd_raw(plain[:299]), "a content size of one byte less"),
        ("longer", zstd_raw(plain + b"\0"), "a content size of one byte more"),
        ("claims-a-gibibyte", zstd_frame(1 << 30, run * 20), "a content size of 2^30"),
        ("bomb", zstd_frame(300, run * 400), "40 MB in a frame that says 300 bytes"),
        ("gives-less", zstd_frame(300, [(0, 200, plain[:200])]), "200 bytes in a frame that says 300"),
        ("no-size", b"\x28\xb5\x2f\xfd\x00\x58" + sound[9:], "a frame without a content size"),
        ("dictionary", b"\x28\xb5\x2f\xfd\xa1\x07" + sound[5:], "a frame that names dictionary 7"),
        ("trailing", sound + b"\0", "a byte behind the frame"),
        ("two-frames", sound + zstd_raw(b"x"), "a second frame"),
        ("truncated", sound[:-1], "a frame whose last byte is missing"),
        ("header-only", sound[:9], "a frame without a block"),
        ("magic-only", sound[:4], "a magic and nothing else"),
        ("reserved-block", zstd_frame(300, [(3, 300, plain)]), "a block of the reserved type"),
    ):
        yield _bad(f"zstd-{name}", [Stored(plain, payload, 0, 1)], "bad-structure", why)
    damaged = patched(HUFFMAN, (40, b"\xff\xff\xff"))
    why = "coded literals that are damaged: not decodable, or other bytes"
    stored = Stored(HUFFMAN_PLAIN, damaged, 0, 1)
    vector = _bad("zstd-literals", [stored], "bad-structure", why)
    yield dataclasses.replace(vector, facts={**vector.facts, "or": "digest-mismatch"})
    yield _bad("zstd-other", [Stored(plain, zstd_raw(plain[::-1]), 0, 1)], "digest-mismatch", "other bytes")


def _tables() -> Iterator[Vector]:
    payload = _PLANES.payload
    for name, changed, kind, why in (
        ("one-byte", payload[:1], "truncated", "no header"),
        ("short-header", payload[:15], "truncated", "15 of 16 header bytes"),
        ("short-segments", payload[:20], "truncated", "half a segment"),
        ("short-words", payload[: _DATA - 1], "truncated", "the table of planes lacks a byte"),
        ("short-data", payload[:-1], "truncated", "the last plane lacks a byte"),
        ("trailing", payload + b"\0", "bad-structure", "a byte behind the last plane"),
        ("reserved", patched(payload, (12, b"\1")), "bad-structure", "reserved_a is not zero"),
        ("chunk-0", patched(payload, (0, struct.pack("<I", 0))), "bad-structure", "chunks of no bytes"),
        ("chunk-8191", patched(payload, (0, struct.pack("<I", 8191))), "bad-structure", "not a multiple of 4096"),
        ("chunk-2048", patched(payload, (0, struct.pack("<I", 2048))), "bad-structure", "fewer than 4096"),
        ("chunk-limit", patched(payload, (0, struct.pack("<I", (8 << 20) + 4096))), "limit-exceeded", "more than 2^23"),
        ("chunk-2-32", patched(payload, (0, b"\xff" * 4)), "limit-exceeded", "all bits of chunk_bytes set"),
        ("segments-0", patched(payload, (4, struct.pack("<I", 0))), "bad-structure", "no segments"),
        ("segments-limit", patched(payload, (4, struct.pack("<I", 65537))), "limit-exceeded", "65537 segments"),
        ("segments-2-32", patched(payload, (4, b"\xff" * 4)), "limit-exceeded", "2^32 - 1 segments"),
        ("segments-65536", patched(payload, (4, struct.pack("<I", 65536))), "truncated", "a table beyond the payload"),
        ("planes-0", patched(payload, (8, struct.pack("<I", 0))), "bad-structure", "no planes"),
        ("planes-3", patched(payload, (8, struct.pack("<I", 3))), "bad-structure", "three planes for four"),
        ("planes-5", patched(payload, (8, struct.pack("<I", 5))), "bad-structure", "five planes for four"),
        ("planes-limit", patched(payload, (8, struct.pack("<I", 65537))), "limit-exceeded", "65537 planes"),
        ("planes-2-32", patched(payload, (8, b"\xff" * 4)), "limit-exceeded", "2^32 - 1 planes"),
    ):
        yield _bad(f"tables-{name}", [_with(_PLANES, changed)], kind, why)
    many = bytes(8 * 65536)
    rows = [(2, 0, b"")] * (8 * 128)
    wrong = container([(len(many), 8, 1)], rows[:-1])
    yield _bad("tables-planes-few", [Stored(many, wrong, 0, 2)], "bad-structure", "1023 planes for 1024")


def _segments() -> Iterator[Vector]:
    half = len(_PLAIN) // 2
    rows: list[tuple[int, int, bytes]] = [(2, 0, b"")] * 4
    for name, segments, count, why in (
        ("sum-less", [(len(_PLAIN) - 4, 4, 1)], 4, "segments that are shorter than the partition"),
        ("sum-more", [(len(_PLAIN) + 4, 4, 1)], 4, "segments that are longer than the partition"),
        ("width-0", [(len(_PLAIN), 0, 0)], 0, "elements of no bytes"),
        ("width-3", [(len(_PLAIN) - 2, 3, 0), (2, 1, 0)], 4, "elements of three bytes"),
        ("width-16", [(len(_PLAIN), 16, 0)], 4, "elements of 16 bytes"),
        ("float-2", [(len(_PLAIN), 4, 2)], 4, "a float mark of 2"),
        ("float-width-1", [(len(_PLAIN), 1, 1)], 1, "floats of one byte"),
        ("uneven", [(len(_PLAIN) - 2, 4, 1), (2, 2, 1)], 6, "a length that is not of whole elements"),
        ("empty", [(len(_PLAIN), 4, 1), (0, 2, 1)], 4, "a segment of no bytes"),
        ("neighbours", [(half, 4, 1), (half, 4, 1)], 8, "two neighbours of one kind"),
    ):
        payload = container(segments, (rows * 2)[:count])
        yield _bad(f"segments-{name}", [_with(_PLANES, payload)], "bad-structure", why)
    reserved = patched(_PLANES.payload, (16 + 6, b"\1"))
    yield _bad("segments-reserved", [_with(_PLANES, reserved)], "bad-structure", "reserved_a is not zero")
    # Lengths of 2^32 - 4 and 804 add up to the right number modulo 2^32.
    payload = container([((1 << 32) - 4, 4, 1), (len(_PLAIN) + 4, 2, 1)], rows * 2)
    yield _bad("segments-overflow", [_with(_PLANES, payload)], "bad-structure", "lengths that add up modulo 2^32 only")


def _words() -> Iterator[Vector]:
    raw = (0, 200, fixed_bytes("raw", 200))
    run = zstd_frame(200, [(1, 200, b"\0")])
    for name, row, kind, why in (
        ("raw-short", (0, 199, raw[2][:199]), "bad-structure", "a raw plane of one byte less"),
        ("raw-long", (0, 201, raw[2] + b"\0"), "bad-structure", "a raw plane of one byte more"),
        ("zstd-0", (1, 0, b""), "bad-structure", "a Zstandard frame of no bytes"),
        ("zstd-long", (1, 212, zstd_raw(raw[2])), "bad-structure", "a Zstandard frame longer than the plane"),
        ("zstd-other-size", (1, 13, zstd_frame(201, [(1, 201, b"\0")])), "bad-structure", "a content size of 201"),
        ("zstd-claims", (1, 13, zstd_frame(1 << 30, [(1, 200, b"\0")])), "bad-structure", "a content size of 2^30"),
        ("zstd-trailing", (1, 14, run + b"\0"), "bad-structure", "a byte behind the Zstandard frame of a plane"),
        ("zstd-damaged", (1, 13, b"\0" * 13), "bad-structure", "a plane that is no Zstandard frame"),
        ("constant-256", (2, 256, b""), "bad-structure", "a constant that is no byte"),
        ("encoding-3", (3, 0, b""), "bad-structure", "an unknown encoding"),
        ("encoding-255", (255, 200, raw[2]), "bad-structure", "an unknown encoding"),
        ("past-the-end", (1, 199, run), "truncated", "a stored length beyond the payload"),
    ):
        payload = container(_KINDS, [raw, raw, raw, row])
        yield _bad(f"words-{name}", [_with(_PLANES, payload)], kind, why)


def _contents() -> Iterator[Vector]:
    other = bytearray(_PLANES.payload)
    other[_DATA] ^= 1
    yield _bad("planes-other", [_with(_PLANES, bytes(other))], "digest-mismatch", "a bit of a raw plane")
    unrotated = container([(len(_PLAIN), 4, 0)], _rows_of(_PLANES.payload))
    yield _bad("planes-float-mark", [_with(_PLANES, unrotated)], "digest-mismatch", "floats that are not marked so")
    parts = pack_of([_PLANES])
    (frame,) = parts.frames
    flipped = patched(frame, (128 + _DATA, bytes([frame[128 + _DATA] ^ 1])))
    data = dataclasses.replace(parts, frames=(flipped,)).data
    why = "a bit of an encoded payload is flipped"
    yield invalid("pack", "codec-planes-payload", data, "bad-checksum", why, path=PACK_PATH)


def _rows_of(payload: bytes) -> list[tuple[int, int, bytes]]:
    rows, at = [], _DATA
    for (word,) in struct.iter_unpack("<I", payload[_WORDS:_DATA]):
        size = 0 if word >> 24 == 2 else word & 0xFFFFFF
        rows.append((word >> 24, word & 0xFFFFFF, payload[at : at + size]))
        at += size
    return rows


def _deltas() -> Iterator[Vector]:
    longer, shorter = _BASE + bytes(4), _BASE[:-4]
    for name, base in (("longer", longer), ("shorter", shorter)):
        stored = delta(_PLAIN, _KINDS, base.ljust(len(_PLAIN), b"\0"))
        stored = dataclasses.replace(stored, base=identity(base).descriptor.digest)
        yield _bad(f"delta-base-{name}", [stored, identity(base)], "bad-structure", f"a base that is {name}")
    trailing = _with(_DELTA, _DELTA.payload + b"\0")
    yield _bad("delta-trailing", [trailing, identity(_BASE)], "bad-structure", "a byte behind the last plane")
    wrong = delta(_PLAIN, _KINDS, _BASE[::-1])
    wrong = dataclasses.replace(wrong, base=_DELTA.base)
    yield _bad("delta-other-base", [wrong, identity(_BASE)], "digest-mismatch", "made against another base")


def _derived() -> Iterator[Vector]:
    base = struct.pack("<40I", *(n << 16 for n in range(1, 41)))
    plain = struct.pack("<40H", *range(1, 41))
    sound = derived(plain, 1, base, 0)
    for name, payload, why in (
        ("short", sound.payload[:15], "15 of 16 bytes"),
        ("long", sound.payload + b"\0", "17 bytes"),
        ("dtype-0", b"\0" + sound.payload[1:], "a dtype that is none"),
        ("dtype-3", b"\3" + sound.payload[1:], "a dtype that is none"),
        ("reserved-first", patched(sound.payload, (1, b"\1")), "reserved_a is not zero"),
        ("reserved-last", patched(sound.payload, (7, b"\1")), "reserved_a is not zero"),
        ("offset-1", patched(sound.payload, (8, b"\1")), "elements that end one byte behind the base"),
        ("offset-2-64", patched(sound.payload, (8, b"\xff" * 8)), "an offset near 2^64"),
    ):
        kind = "truncated" if name == "short" else "bad-structure"
        yield _bad(f"derived-{name}", [_with(sound, payload), identity(base)], kind, why)
    odd = dataclasses.replace(sound, plain=plain[:-1])
    yield _bad("derived-odd", [odd, identity(base)], "bad-structure", "a length that is not of whole elements")
    half = derived(plain, 2, base, 0)
    yield _bad("derived-other-dtype", [half, identity(base)], "digest-mismatch", "bfloat16 that says float16")


def _chains() -> Iterator[Vector]:
    yield _bad("chain-no-base", [_DELTA], "damaged-base", "a base that lies nowhere")
    states = [struct.pack("<64I", *range(at, at + 64)) for at in range(10)]
    chain = [delta(new, [(256, 4, 0)], old) for old, new in itertools.pairwise(states)]
    why = "nine deltas on a full frame"
    yield _bad("chain-of-9", [*chain, identity(states[0])], "damaged-base", why)
    names = fixed_bytes("one", 16), fixed_bytes("two", 16)
    cycle = [dataclasses.replace(_DELTA, name=name, base=base) for name, base in zip(names, names[::-1], strict=True)]
    yield _bad("chain-cycle", cycle, "damaged-base", "two deltas that are each other's base")
    base = struct.pack("<40I", *(n << 16 for n in range(1, 41)))
    middle = derived(struct.pack("<40H", *range(1, 41)), 1, base, 0)
    for name, top in (
        ("delta-on-derived", delta(middle.plain[::-1], [(80, 2, 1)], middle.plain)),
        ("derived-on-derived", derived(bytes(40), 1, middle.plain, 0)),
    ):
        yield _bad(f"chain-{name}", [top, middle, identity(base)], "damaged-base", "a base that is derived itself")
    lost = dataclasses.replace(identity(_BASE), payload=_BASE[::-1])
    yield _bad("chain-damaged", [_DELTA, lost], "damaged-base", "a base whose bytes have another digest")
    assert len(_PLAIN) < CHUNK
