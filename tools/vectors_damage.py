"""Vectors of frames and packs, each of which breaks one rule (SPEC.md §A6, §A7)."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

from asymcheck.format.digest import digest, sum8
from asymcheck.format.frame import FrameDescriptor, encode_header
from tools.vectors_base import Vector, fixed_bytes, flipped, invalid, pack_id, patched, plain_bytes
from tools.vectors_pack import PACK_ID, PACK_PATH, PackParts, make_frame, make_pack

_SMALL = plain_bytes("small", 300)
_FRAME = make_frame(_SMALL)
_ALIGNED = make_frame(plain_bytes("aligned", 65536))
_SHIFTED = make_frame(plain_bytes("aligned", 65536), shift=64)
_PACK = make_pack([_SMALL, plain_bytes("over", 4096 - 127)])
_SHIFTED_PACK = make_pack([_SMALL, plain_bytes("aligned", 65536)], shifts=(0, 64))


def u8(value: int) -> bytes:
    """Return one byte."""
    return struct.pack("<B", value)


def u16(value: int) -> bytes:
    """Return a u16."""
    return struct.pack("<H", value)


def u32(value: int) -> bytes:
    """Return a u32."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Return a u64."""
    return struct.pack("<Q", value)


def reseal_frame(frame: bytes) -> bytes:
    """Recompute both checksums of a frame's header, so that only the rule under test is broken."""
    checked = patched(frame, (88, sum8(frame[:88])))
    return patched(checked, (120, sum8(checked[88:120])))


def damage_vectors() -> Iterator[Vector]:
    """Yield every malformed frame and pack."""
    yield from _frame_headers()
    yield from _frame_contents()
    yield from _unknown_numbers()
    yield from _pack_headers()
    yield from _pack_indexes()
    yield from _pack_entries()
    yield from _pack_frames()


def _frame(name: str, data: bytes, kind: str, why: str, **more: object) -> Vector:
    context = {"place_id": PACK_ID.hex(), "sequence": 0, "path": PACK_PATH}
    return invalid("frame", name, data, kind, why, **context, **more)


def _frame_headers() -> Iterator[Vector]:
    yield _frame("empty", b"", "truncated", "no bytes")
    yield _frame("short-header", _FRAME[:127], "truncated", "127 of 128 header bytes")
    yield _frame("content-sum", flipped(_FRAME, 88), "bad-checksum", "a bit of content_sum is flipped")
    yield _frame("digest-flipped", flipped(_FRAME, 16), "bad-checksum", "a bit under content_sum is flipped")
    yield _frame("placement-sum", flipped(_FRAME, 120), "bad-checksum", "a bit of placement_sum is flipped")
    yield _frame("place-id-flipped", flipped(_FRAME, 96), "bad-checksum", "a bit under placement_sum is flipped")
    for name, frame, offset, change, kind, why in (
        ("magic", _FRAME, 0, b"ASYMFRAm", "bad-magic", "another magic"),
        ("format-2", _FRAME, 8, u16(2), "unsupported-version", "a newer major version"),
        ("format-0", _FRAME, 8, u16(0), "unsupported-version", "a version that never was"),
        ("format-big-endian", _FRAME, 8, b"\0\1", "unsupported-version", "version 1 in big-endian order is 256"),
        ("reserved-a-13", _FRAME, 13, b"\1", "bad-structure", "the first byte of reserved_a is not zero"),
        ("reserved-a-14", _FRAME, 14, b"\1", "bad-structure", "the second byte of reserved_a is not zero"),
        ("reserved-a-15", _FRAME, 15, b"\1", "bad-structure", "the third byte of reserved_a is not zero"),
        ("plain-length-0", _FRAME, 32, u64(0), "bad-structure", "a partition has at least one byte"),
        ("plain-length-limit", _FRAME, 32, u64((1 << 30) + 1), "limit-exceeded", "one byte beyond 2^30"),
        ("plain-length-2-64", _FRAME, 32, u64((1 << 64) - 1), "limit-exceeded", "a length with all bits set"),
        ("stored-length-0", _FRAME, 40, u64(0), "bad-structure", "a payload has at least one byte"),
        ("stored-length-limit", _FRAME, 40, u64(1082130433), "limit-exceeded", "one byte beyond the limit"),
        ("lengths-differ", _FRAME, 40, u64(299), "bad-structure", "identity with two different lengths"),
        ("payload-offset-4096", _FRAME, 72, u32(4096), "bad-structure", "4096 with fewer than 65536 stored bytes"),
        ("payload-offset-128", _ALIGNED, 72, u32(128), "bad-structure", "128 with 65536 stored bytes"),
        ("payload-offset-4095", _ALIGNED, 72, u32(4095), "bad-structure", "a byte before the second block"),
        ("payload-offset-8192", _ALIGNED, 72, u32(8192), "bad-structure", "a shift of a whole block"),
        ("payload-offset-129", _FRAME, 72, u32(129), "bad-structure", "a shift with fewer than 65536 stored bytes"),
        ("payload-offset-0", _FRAME, 72, u32(0), "bad-structure", "a payload on top of the header"),
        ("base-digest", _FRAME, 56, b"\1", "bad-structure", "a full frame has no base"),
        ("kind-delta-codec-0", _FRAME, 10, u8(1), "bad-structure", "a delta of codec identity"),
        ("kind-derived-codec-0", _FRAME, 10, u8(2), "bad-structure", "derived, of codec identity"),
        ("kind-derived-codec-3", _FRAME, 10, b"\2\3", "bad-structure", "derived, of codec ordered-integer-delta"),
        ("kind-delta-codec-4", _FRAME, 10, b"\1\4", "bad-structure", "a delta of codec derived-round-to-nearest"),
        ("kind-delta-codec-2", _FRAME, 10, b"\1\2", "bad-structure", "a delta of codec byte-planes"),
        ("codec-3-full", _FRAME, 11, u8(3), "bad-structure", "codec ordered-integer-delta in a full frame"),
        ("codec-4-full", _FRAME, 11, u8(4), "bad-structure", "codec derived-round-to-nearest in a full frame"),
        ("delta-no-base", _FRAME, 10, b"\1\3", "bad-structure", "a delta without a base"),
        ("derived-no-base", _FRAME, 10, b"\2\4", "bad-structure", "a derived frame without a base"),
        ("codec-parameters-first", _FRAME, 76, b"\1", "bad-structure", "identity has no parameters"),
        ("codec-parameters-last", _FRAME, 87, b"\1", "bad-structure", "identity has no parameters"),
        ("other-pack", _FRAME, 96, pack_id("other"), "bad-structure", "the frame was written into another pack"),
        ("other-sequence", _FRAME, 112, u64(1), "bad-structure", "the frame was written at another place"),
    ):
        yield _frame(name, reseal_frame(patched(frame, (offset, change))), kind, why)
    for number, codec in ((0, 1), (0, 2), (1, 3), (2, 4)):
        based = patched(_FRAME, (10, bytes([number, codec])), (56, fixed_bytes("base", 16) if number else bytes(16)))
        self_based = reseal_frame(patched(based, (56, _FRAME[16:32])))
        yield _frame(f"codec-{codec}-own-base", self_based, "bad-structure", "a base that is the frame itself")
        parameters = reseal_frame(patched(based, (76, b"\1")))
        yield _frame(f"codec-{codec}-parameters", parameters, "bad-structure", "no codec has parameters")
        summed = reseal_frame(patched(based, (48, bytes(8))))
        yield _frame(f"codec-{codec}-stored-sum", summed, "bad-checksum", "the payload of an encoded frame is summed")
    based = patched(_FRAME, (11, u8(2)), (56, fixed_bytes("base", 16)))
    yield _frame("codec-2-base", reseal_frame(based), "bad-structure", "a full frame has no base, however encoded")
    # All limits are respected. A reader that trusts the header allocates 1 GiB for 128 bytes.
    huge = patched(_FRAME, (32, u64(1 << 30)), (40, u64(1 << 30)), (72, u32(4096)))
    yield _frame("claims-a-gibibyte", reseal_frame(huge), "truncated", "the bytes end long before the payload")


def _frame_contents() -> Iterator[Vector]:
    for name, offset in (("before", 4096 + 63), ("behind", 4096 + 64 + 65536)):
        data = patched(_SHIFTED, (offset, b"\1"))
        yield _frame(f"shifted-padding-{name}", data, "bad-structure", f"a byte {name} a shifted payload is not zero")
    yield _frame("shifted-truncated", _SHIFTED[:-4096], "truncated", "the last block is missing")
    wrong, turned = digest(b"something else"), digest(_SMALL)[::-1]
    for name, data, why in (
        ("payload-first", flipped(_FRAME, 128), "a bit of the payload's first byte"),
        ("payload-last", flipped(_FRAME, 427), "a bit of the payload's last byte"),
        ("aligned-payload", flipped(_ALIGNED, 4096), "the first byte behind the header block"),
        ("digest-of-another", patched(_FRAME, (16, wrong), (48, wrong[8:])), "the digest of other bytes"),
        ("digest-little-endian", patched(_FRAME, (16, turned), (48, turned[8:])), "the canonical order is big-endian"),
    ):
        # For codec identity, stored_sum is half of the digest, so a reader may check only the digest.
        yield _frame(name, reseal_frame(data), "digest-mismatch", why, also="bad-checksum")
    half = reseal_frame(patched(_FRAME, (16, wrong[:8])))
    yield _frame("digest-first-half", half, "digest-mismatch", "stored_sum covers only the second half of the digest")
    other_sum = reseal_frame(patched(_FRAME, (48, bytes(8))))
    why = "for identity stored_sum is the second half of the digest"
    yield _frame("stored-sum", other_sum, "bad-structure", why, also="bad-checksum")
    version = patched(_FRAME, (8, u16(2)))
    why = "only the version is damaged, as the checksum tells"
    yield _frame("format-flipped", version, "bad-checksum", why, also="unsupported-version")
    nothing = FrameDescriptor(digest(b""), 0, 0, digest(b"")[8:])
    empty = encode_header(nothing, PACK_ID, 0).ljust(4096, b"\0")
    yield _frame("no-bytes", empty, "bad-structure", "all is consistent, but a partition has at least one byte")
    yield _frame("padding-first", patched(_FRAME, (428, b"\1")), "bad-structure", "the first byte after the payload")
    yield _frame("padding-last", patched(_FRAME, (4095, b"\1")), "bad-structure", "the last byte of the block")
    yield _frame("gap-first", patched(_ALIGNED, (128, b"\1")), "bad-structure", "the first byte after the header")
    yield _frame("gap-last", patched(_ALIGNED, (4095, b"\1")), "bad-structure", "the last byte before the payload")
    yield _frame("no-padding", _FRAME[:428], "truncated", "the padding is missing")
    yield _frame("a-block-more", _FRAME + bytes(4096), "bad-structure", "a frame in a place for two blocks")


def _unknown_numbers() -> Iterator[Vector]:
    for field, offset, registry, numbers in (
        ("kind", 10, "frame_kinds", (3, 4, 250)),
        ("codec", 11, "codecs", (5, 250)),
        ("digest-algorithm", 12, "digests", (0, 2, 3, 250)),
    ):
        for number in numbers:
            data = reseal_frame(patched(_FRAME, (offset, u8(number))))
            why = f"{field} {number} is not one that version 1 defines"
            yield _frame(f"{field}-{number}", data, "unsupported-codec", why, number={"of": registry, "is": number})


def _pack(name: str, data: bytes, kind: str, why: str, **more: object) -> Vector:
    return invalid("pack", name, data, kind, why, path=PACK_PATH, **more)


def _with_header(parts: PackParts, *changes: tuple[int, bytes]) -> bytes:
    header = patched(parts.header, *changes)
    return dataclasses.replace(parts, header=patched(header, (120, sum8(header[:120])))).data


def _pack_headers() -> Iterator[Vector]:
    yield _pack("empty", b"", "truncated", "no bytes")
    yield _pack("short-header", _PACK.data[:4095], "truncated", "4095 of 4096 header bytes")
    yield _pack("header-sum", flipped(_PACK.data, 120), "bad-checksum", "a bit of header_sum is flipped")
    yield _pack("created-flipped", flipped(_PACK.data, 64), "bad-checksum", "a bit under header_sum is flipped")
    yield _pack("header-zero", bytes(4096) + _PACK.data[4096:], "bad-magic", "a header block that was never written")
    end = len(_PACK.data)
    for name, place in (("format-flipped", 8), ("index-format-flipped", end - 4096 + 8)):
        data = patched(_PACK.data, (place, u16(2)))
        why = "only the version is damaged, as the checksum tells"
        yield _pack(name, data, "bad-checksum", why, also="unsupported-version")
    for name, offset, change, kind, why in (
        ("magic", 0, b"ASYMINDX", "bad-magic", "another magic"),
        ("format-2", 8, u16(2), "unsupported-version", "a newer major version"),
        ("format-0", 8, u16(0), "unsupported-version", "a version that never was"),
        ("reserved-a-first", 10, b"\1", "bad-structure", "the first byte of reserved_a is not zero"),
        ("reserved-a-last", 15, b"\1", "bad-structure", "the last byte of reserved_a is not zero"),
        ("reserved-b-first", 104, b"\1", "bad-structure", "the first byte of reserved_b is not zero"),
        ("reserved-b-last", 119, b"\1", "bad-structure", "the last byte of reserved_b is not zero"),
        ("block-first", 128, b"\1", "bad-structure", "the first byte after the header's fields is not zero"),
        ("block-last", 4095, b"\1", "bad-structure", "the last byte of the header block is not zero"),
        ("other-id", 16, pack_id("other"), "bad-structure", "the header disagrees with the file's name"),
        ("frame-count-0", 32, u64(0), "bad-structure", "a pack has at least one frame"),
        ("frame-count", 32, u64(3), "bad-structure", "index_length does not belong to frame_count"),
        ("index-offset-uneven", 40, u64(end - 4095), "bad-structure", "the index does not begin on a block"),
        ("index-length", 48, u64(256), "bad-structure", "index_length does not belong to frame_count"),
        ("index-length-limit", 48, u64((1 << 28) + 1), "limit-exceeded", "an index of more than 2^28 bytes"),
        ("pack-length", 56, u64(end + 4096), "bad-structure", "pack_length does not belong to the index"),
        ("writer", 72, "Käse".encode(), "bad-structure", "a writer that is not ASCII"),
        ("writer-zero", 81, b"\0", "bad-structure", "a zero byte within the writer, before its padding"),
        ("writer-zero-first", 72, b"\0", "bad-structure", "a writer that begins with a zero byte and goes on"),
    ):
        yield _pack(name, _with_header(_PACK, (offset, change)), kind, why)
    whole = make_pack([_SMALL], pack_id("other")).data
    yield _pack("under-another-name", whole, "bad-structure", "a sound pack in a file that is named for another")
    yield _pack("no-frames", make_pack([]).data, "bad-structure", "all is consistent, but a pack has a frame")
    many = (1 << 28) // 64
    over = ((32, u64(many)), (48, u64(64 + 64 * many)), (56, u64(end + (1 << 28))))
    yield _pack(
        "frame-count-limit", _with_header(_PACK, *over), "limit-exceeded", "2^22 frames need too large an index"
    )
    # All limits are respected. A reader that trusts the header allocates 256 MiB for a file of 20 KiB.
    count = (1 << 28) // 64 - 1
    offset = end - 4096
    large = ((32, u64(count)), (48, u64(64 + 64 * count)), (56, u64(offset + (1 << 28))))
    yield _pack("claims-a-large-index", _with_header(_PACK, *large), "truncated", "the file ends before the index does")
    for name, offset in (("far", 1 << 62), ("at-2-63", 1 << 63), ("at-2-64", (1 << 64) - 8192)):
        beyond = ((40, u64(offset)), (56, u64(offset + 4096)))
        why = "an index that begins where no file reaches"
        yield _pack(f"index-offset-{name}", _with_header(_PACK, *beyond), "truncated", why)


def _with_index(parts: PackParts, *changes: tuple[int, bytes]) -> bytes:
    """Change bytes of the index and recompute its checksums."""
    index = patched(parts.index, *changes)
    count = len(parts.frames)
    index = patched(index, (48, sum8(index[64 : 64 + 64 * count]))) if _entries_changed(changes) else index
    return dataclasses.replace(parts, index=patched(index, (56, sum8(index[:56])))).data


def _entries_changed(changes: tuple[tuple[int, bytes], ...]) -> bool:
    return any(offset >= 64 for offset, _ in changes)


def _pack_indexes() -> Iterator[Vector]:
    data, start = _PACK.data, len(_PACK.data) - len(_PACK.index)
    yield _pack("no-index", data[:start], "truncated", "the file ends where the index should begin")
    yield _pack("index-cut", data[: start + 100], "truncated", "the file ends within the index")
    yield _pack("index-padding-cut", data[:-1], "truncated", "the last byte of the padding is missing")
    yield _pack("index-zero", data[:start] + bytes(4096), "bad-magic", "an index that was never written")
    yield _pack("index-header-sum", flipped(data, start + 56), "bad-checksum", "a bit of the index's header_sum")
    yield _pack("index-id-flipped", flipped(data, start + 16), "bad-checksum", "a bit under the index's header_sum")
    yield _pack("index-entry-flipped", flipped(data, start + 64), "bad-checksum", "a bit under entries_sum")
    yield _pack("index-padding-first", patched(data, (start + 192, b"\1")), "bad-structure", "padding is not zero")
    yield _pack("index-padding-last", patched(data, (start + 4095, b"\1")), "bad-structure", "padding is not zero")
    for name, offset, change, kind, why in (
        ("index-magic", 0, b"ASYMPACK", "bad-magic", "another magic"),
        ("index-format-2", 8, u16(2), "unsupported-version", "a newer major version"),
        ("index-entry-size", 10, u16(72), "bad-structure", "entries of 72 bytes"),
        ("index-reserved-a-first", 12, b"\1", "bad-structure", "the first byte of reserved_a is not zero"),
        ("index-reserved-a-last", 15, b"\1", "bad-structure", "the last byte of reserved_a is not zero"),
        ("index-other-id", 16, pack_id("other"), "bad-structure", "the index is that of another pack"),
        ("index-entry-count", 32, u64(1), "bad-structure", "entry_count differs from frame_count"),
        ("index-reserved-b-first", 40, b"\1", "bad-structure", "the first byte of reserved_b is not zero"),
        ("index-reserved-b-last", 47, b"\1", "bad-structure", "the last byte of reserved_b is not zero"),
        ("index-entries-sum", 48, bytes(8), "bad-checksum", "entries_sum is wrong"),
    ):
        yield _pack(name, _with_index(_PACK, (offset, change)), kind, why)


def _pack_entries() -> Iterator[Vector]:
    second = 128
    for name, offset, change, kind, why in (
        ("entry-first-offset", 64 + 32, u64(8192), "bad-structure", "the first frame does not begin at 4096"),
        ("entry-gap", second + 32, u64(12288), "bad-structure", "a gap between two frames"),
        ("entry-overlap", second + 32, u64(4096), "bad-structure", "two frames at one place"),
        ("entry-offset-2-64", second + 32, u64((1 << 64) - 4096), "bad-structure", "an offset near 2^64"),
        ("entry-lengths-differ", second + 48, u64(1), "bad-structure", "identity with two different lengths"),
        ("entry-base", second + 16, b"\1", "bad-structure", "a full frame has no base"),
        ("entry-kind-delta", second + 56, u8(1), "bad-structure", "a delta of codec identity"),
        ("entry-codec-delta", second + 57, u8(3), "bad-structure", "codec ordered-integer-delta in a full frame"),
        ("entry-delta-no-base", second + 56, b"\1\3", "bad-structure", "a delta without a base"),
        ("entry-derived-no-base", second + 56, b"\2\4", "bad-structure", "a derived frame without a base"),
        ("entry-zstd", second + 57, u8(1), "bad-structure", "the entry says zstd, the frame identity"),
        ("entry-reserved-first", second + 59, b"\1", "bad-structure", "a payload shift of a small frame"),
        ("entry-reserved-a-first", second + 61, b"\1", "bad-structure", "the first byte of reserved_a is not zero"),
        ("entry-reserved-last", second + 63, b"\1", "bad-structure", "the last byte of reserved_a is not zero"),
        ("entry-stored-0", second + 40, u64(0), "bad-structure", "a payload has at least one byte"),
        ("entry-plain-0", second + 48, u64(0), "bad-structure", "a partition has at least one byte"),
        ("entry-stored-limit", second + 40, u64(1082130433), "limit-exceeded", "one byte beyond the limit"),
        ("entry-plain-limit", second + 48, u64((1 << 30) + 1), "limit-exceeded", "one byte beyond 2^30"),
    ):
        yield _pack(name, _with_index(_PACK, (offset, change)), kind, why)
    for field, place, registry in (("kind", 56, "frame_kinds"), ("codec", 57, "codecs"), ("digest", 58, "digests")):
        data = _with_index(_PACK, (second + place, u8(250)))
        yield _pack(f"entry-unknown-{field}", data, "unsupported-codec", f"a number that {registry} lack: 250")
    entries = _PACK.index[64:192]
    swapped = _with_index(_PACK, (64, entries[64:] + entries[:64]))
    yield _pack("entry-order", swapped, "bad-structure", "entries are not in the order in which the frames lie")
    nothing = ((64 + 40, u64(0)), (64 + 48, u64(0)))
    why = "all is consistent, but a partition has at least one byte"
    yield _pack("entry-no-bytes", _with_index(_PACK, *nothing), "bad-structure", why)
    longer = ((second + 40, u64(9000)), (second + 48, u64(9000)))
    yield _pack(
        "entry-end", _with_index(_PACK, *longer), "bad-structure", "the last frame does not end at index_offset"
    )


def _pack_frames() -> Iterator[Vector]:
    first, second = _PACK.frames
    foreign = make_frame(_SMALL, pack_id("other"))
    stamped_later = make_frame(_SMALL, PACK_ID, 1)
    for name, frames, kind, why in (
        ("frame-of-other-pack", (foreign, second), "bad-structure", "a frame that was stamped for another pack"),
        (
            "frame-of-other-place",
            (stamped_later, second),
            "bad-structure",
            "a frame that was stamped for another place",
        ),
        ("frame-zero", (bytes(4096), second), "bad-magic", "a frame that was never written"),
    ):
        yield _pack(name, dataclasses.replace(_PACK, frames=frames).data, kind, why)
    payload = dataclasses.replace(_PACK, frames=(first, flipped(second, 128))).data
    why = "a bit of a payload is flipped"
    yield _pack("frame-payload", payload, "digest-mismatch", why, also="bad-checksum")
    for name, shift, why in (
        ("entry-shift-4096", 4096, "a shift of a whole block"),
        ("entry-other-shift", 65, "the shift in the entry is not that of the frame"),
        ("entry-shift-0", 0, "the frame is longer than the entry says"),
    ):
        yield _pack(name, _with_index(_SHIFTED_PACK, (128 + 59, u16(shift))), "bad-structure", why)
    for name, offset, change in (
        ("digest", 64, fixed_bytes("another digest", 16)),
        ("lengths", 64 + 40, u64(299) * 2),
    ):
        why = f"the {name} in the entry is not what the frame's header says"
        yield _pack(f"entry-other-{name}", _with_index(_PACK, (offset, change)), "bad-structure", why)
