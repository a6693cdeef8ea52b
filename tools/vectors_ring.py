"""Vectors of rings (SPEC.md §B8)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from asymcheck.format.digest import digest, sum8
from asymcheck.format.frame import FrameDescriptor, encode_header
from asymcheck.format.layout import ring_name
from asymcheck.format.manifest import Extent
from asymcheck.format.record import encode_record
from asymcheck.format.ring_records import (
    COMPLETE,
    DATA_OFFSET,
    DURABLE,
    CaptureEntry,
    RingHeader,
    encode_entry,
    encode_ring_header,
)
from asymcheck.format.tree import Node
from asymcheck.types import CheckpointRef, Digest, Owner, PackId, SaveId
from tools.manifest_files import encode_manifest
from tools.vectors_base import (
    CREATED_NS,
    WRITER,
    Vector,
    fixed_bytes,
    flipped,
    invalid,
    patched,
    plain_bytes,
    save_id,
    valid,
)
from tools.vectors_manifest import HEADER, inline_row, stored_row
from tools.vectors_pack import make_frame
from tools.vectors_record import DESCRIPTOR, STORE_ID, fields_of

RING_ID = PackId(fixed_bytes("ring", 16))
PATH = ring_name(STORE_ID, RING_ID)
_OTHER = PackId(fixed_bytes("another ring", 16))
_BLOCK = 4096
_FIRST = DATA_OFFSET // _BLOCK
_OWNER = Owner(4711, 123456, "01234567-89ab-cdef-0123-456789abcdef", "pid:[4026531836]")
_PARTITION, _LONGER = plain_bytes("ring 0", 1200), plain_bytes("ring 1", 5000)

Parts = Mapping[int, bytes]
"""Bytes at each block number of the file."""


def _header(blocks: int) -> bytes:
    return encode_ring_header(
        RingHeader(
            ring_id=RING_ID,
            store_id=STORE_ID,
            store="/stores/gpt2",
            run=HEADER.run,
            rank=HEADER.rank,
            owner=_OWNER,
            data_bytes=blocks * _BLOCK,
            created_ns=CREATED_NS,
            writer=WRITER,
        )
    )


def _changed(header: bytes, **changes: object) -> bytes:
    return encode_record({**fields_of(header), **changes})


def _framed(plain: bytes, block: int) -> bytes:
    return make_frame(plain, RING_ID, block)


def _manifest(step: int, seconds: int, plains: list[bytes]) -> tuple[SaveId, bytes]:
    """Return the save id and the manifest of a capture of these partitions, with one tensor each."""
    ref = CheckpointRef(3, step, save_id(f"ring {step}", seconds))
    rows = [
        stored_row(f"model.{number}", (len(plain) // 4,), [Extent(digest(plain), 0, len(plain), len(plain))])
        for number, plain in enumerate(plains)
    ]
    rows.append(inline_row("step", "float32", ()))
    tree: Node = ["d", [[row.name, ["T", number]] for number, row in enumerate(rows)]]
    header = dataclasses.replace(HEADER, ref=ref, parent=None, packs=(), tree=tree)
    return ref.save_id, encode_manifest(header, rows)


def _ring(blocks: int, parts: Parts, entries: Mapping[int, bytes], header: bytes = b"") -> bytes:
    data = bytearray(DATA_OFFSET + blocks * _BLOCK)
    data[: 2 * _BLOCK] = header or _header(blocks)
    for number, entry in entries.items():
        data[2 * _BLOCK + 64 * number : 2 * _BLOCK + 64 * number + 64] = entry
    end = _FIRST
    for block, part in sorted(parts.items()):
        assert block >= end, "two parts of a ring overlap"
        end = block + -(-len(part) // _BLOCK)
        data[block * _BLOCK : block * _BLOCK + len(part)] = part
    assert end <= _FIRST + blocks
    return bytes(data)


def _frame_json(block: int, plain: bytes) -> dict[str, object]:
    length = len(plain)
    return {
        "offset": block * _BLOCK,
        "digest": digest(plain).hex(),
        "stored_length": length,
        "plain_length": length,
    }


def _capture_json(number: int, entry: CaptureEntry) -> dict[str, object]:
    return {"number": number, "offset": entry.offset, "save_id": entry.save_id.hex(), "state": entry.state}


def _valid(
    name: str, data: bytes, why: str, plains: Parts, captures: Mapping[int, CaptureEntry] | None = None
) -> Vector:
    """Return a ring in which a reader finds the frames ``plains``, by block, and ``captures``, by number."""
    copies = [data[:_BLOCK], data[_BLOCK : 2 * _BLOCK]]
    intact = [copy for copy in copies if digest(copy[: copy.index(b"\n")]).hex().encode() in copy]
    value = {
        "header": json.loads(intact[0][: intact[0].index(b"\n")]),
        "captures": [_capture_json(number, entry) for number, entry in sorted((captures or {}).items())],
        "frames": [_frame_json(block, plain) for block, plain in sorted(plains.items())],
    }
    return valid("ring", name, data, why, value, path=PATH, damaged_copies=2 - len(intact))


def ring_vectors() -> Iterator[Vector]:
    """Yield every vector of a ring."""
    yield from _with_captures()
    yield from _headers()
    yield from _not_frames()
    yield from _malformed()


def _with_captures() -> Iterator[Vector]:
    complete_id, complete = _manifest(1200, 120, [_PARTITION, _LONGER])
    durable_id, durable = _manifest(1100, 60, [_PARTITION])
    size = -(-(128 + len(complete)) // _BLOCK)
    frames = {_FIRST: _PARTITION, _FIRST + 2: _LONGER, _FIRST + 5: complete, _FIRST + 5 + size: durable}
    parts = {block: _framed(plain, block) for block, plain in frames.items()}
    parts[_FIRST + 1] = fixed_bytes("what lay there before", _BLOCK)
    parts[_FIRST + 4] = make_frame(plain_bytes("another life", 900), _OTHER, _FIRST + 4)
    blocks = 6 + size + -(-(128 + len(durable)) // _BLOCK)
    captures = {
        0: CaptureEntry((_FIRST + 5) * _BLOCK, complete_id, COMPLETE),
        63: CaptureEntry((_FIRST + 5 + size) * _BLOCK, durable_id, DURABLE),
    }
    entries = {number: encode_entry(entry) for number, entry in captures.items()}
    why = "two captures, one of them durable; between their frames garbage, and a frame of another ring"
    yield _valid("captures", _ring(blocks, parts, entries), why, frames, captures)
    why = "an entry that was not written to its end names no capture; its manifest is a frame all the same"
    torn = {**entries, 0: entries[0][:40].ljust(64, b"\0")}
    yield _valid("entry-not-written-to-its-end", _ring(blocks, parts, torn), why, frames, {63: captures[63]})
    wrong = {**entries, 63: flipped(entries[63], 24)}
    yield _valid("entry-sum", _ring(blocks, parts, wrong), "a bit of a state is flipped", frames, {0: captures[0]})
    yield _valid("no-captures", _ring(3, {_FIRST: parts[_FIRST]}, {}), "a frame, no capture", {_FIRST: _PARTITION})
    yield _valid("nothing", _ring(1, {}, {}), "a ring into which nothing was written", {})
    yield from _ignored_entries()


def _ignored_entries() -> Iterator[Vector]:
    good = encode_entry(CaptureEntry(DATA_OFFSET, save_id("ring"), COMPLETE))
    end = DATA_OFFSET + 2 * _BLOCK

    def entry(offset: int, change: bytes) -> bytes:
        body = patched(good, (offset, change))[:56]
        return body + sum8(body)

    last = CaptureEntry(end - _BLOCK, save_id("last"), DURABLE)
    kept = {9: CaptureEntry(DATA_OFFSET, save_id("ring"), COMPLETE), 10: last}
    for name, why, bad in (
        ("state", "states 0, 3 and 2^63", [entry(24, state.to_bytes(8, "little")) for state in (0, 3, 1 << 63)]),
        ("reserved", "the first or the last reserved byte is not zero", [entry(32, b"\1"), entry(55, b"\1")]),
        (
            "offset",
            "offsets in the header and the entries, at the end, near 2^64, and not on a block",
            [
                entry(0, offset.to_bytes(8, "little"))
                for offset in (0, 8192, end, (1 << 64) - _BLOCK, DATA_OFFSET + 1, DATA_OFFSET + 64)
            ],
        ),
    ):
        entries = {**dict(enumerate(bad)), **{number: encode_entry(one) for number, one in kept.items()}}
        data = _ring(2, {_FIRST: _framed(_PARTITION, _FIRST)}, entries)
        text = f"entries that are ignored though their sums are right: {why}; two that are not"
        yield _valid(f"entry-{name}", data, text, {_FIRST: _PARTITION}, kept)


def _headers() -> Iterator[Vector]:
    frames = {_FIRST: _PARTITION}
    parts = {_FIRST: _framed(_PARTITION, _FIRST)}
    data = _ring(1, parts, {})
    yield _valid("first-copy-damaged", flipped(data, 40), "the second copy of the header is read", frames)
    yield _valid("second-copy-damaged", flipped(data, _BLOCK + 40), "the first copy of the header is read", frames)
    extra = _changed(_header(1), remark=[1, {}])
    yield _valid("extra-key", _ring(1, parts, {}, extra), "keys of later versions are ignored", frames)
    behind = data + _framed(_LONGER, _FIRST + 1)
    yield _valid("longer-file", behind, "what lies behind the data is not looked at, not even a frame", frames)


def _not_frames() -> Iterator[Vector]:
    at, frames = _FIRST + 1, {_FIRST: _PARTITION}
    sound = _framed(_LONGER, at)

    def described(digest_of: bytes, **changes: int | bytes) -> bytes:
        of = FrameDescriptor.identity(Digest(digest(digest_of)), len(digest_of))
        return encode_header(dataclasses.replace(of, **changes), RING_ID, at)  # type: ignore[arg-type]  # fields by name

    claims = described(_LONGER, plain_length=1 << 30, stored_length=1 << 30)
    for name, bad, why in (
        ("elsewhere", _framed(_LONGER, at + 1), "a frame whose sequence does not fit its place"),
        ("other-ring", make_frame(_LONGER, _OTHER, at), "a frame of another ring"),
        ("payload", flipped(sound, 4000), "a frame whose payload does not have its digest"),
        ("padding", flipped(sound, len(sound) - 1), "a frame whose padding is not zero"),
        ("no-header", patched(sound, (0, bytes(_BLOCK))), "the first block of the place was zeroed already"),
        ("header-flipped", flipped(sound, 40), "a bit of the header is flipped"),
        ("codec", patched(sound, (0, described(_LONGER, codec=1))), "a frame of a codec that is unknown"),
        ("beyond-the-end", patched(sound, (0, described(plain_bytes("long", 9000)))), "a frame longer than the data"),
        ("claims-1-gib", patched(sound, (0, claims)), "a frame that claims 2^30 bytes"),
        ("not-on-a-block", (bytes(64) + sound)[: len(sound)], "a frame that does not begin on a block"),
    ):
        data = _ring(3, {_FIRST: _framed(_PARTITION, _FIRST), at: bad}, {})
        yield _valid(f"no-frame-{name}", data, f"not found: {why}", frames)
    within = _framed(_PARTITION, at)
    unfinished = patched(_framed(plain_bytes("unfinished", 6000), _FIRST), (0, bytes(_BLOCK)), (_BLOCK, within))
    why = "a place that is being filled, and in it a frame of before that is not overwritten yet"
    yield _valid("frame-of-before", _ring(3, {_FIRST: unfinished}, {}), why, {at: _PARTITION})
    large = plain_bytes("ring 2", 65536)
    why = "a frame whose payload begins on a block"
    yield _valid("large-frame", _ring(17, {_FIRST: _framed(large, _FIRST)}, {}), why, {_FIRST: large})


def _malformed() -> Iterator[Vector]:
    header = _header(1)
    sound = _ring(1, {_FIRST: _framed(_PARTITION, _FIRST)}, {})

    def ring(name: str, data: bytes, kind: str, why: str, path: str = PATH) -> Vector:
        return invalid("ring", name, data, kind, why, path=path)

    yield ring("empty", b"", "truncated", "a file of 0 bytes: its memory was not reserved yet")
    yield ring("header-cut", sound[:8191], "truncated", "8191 bytes")
    yield ring("no-data", sound[:DATA_OFFSET], "truncated", "the file ends where the data should begin")
    yield ring("data-cut", sound[:-1], "truncated", "the last byte of the data is missing")
    yield ring("zero", bytes(len(sound)), "bad-checksum", "nothing was written yet")
    both = flipped(flipped(sound, 40), _BLOCK + 40)
    yield ring("both-copies", both, "bad-checksum", "a bit of each copy of the header is flipped")
    descriptor = DESCRIPTOR + sound[2 * _BLOCK :]
    yield ring("descriptor", descriptor, "bad-structure", "a record of another kind: the descriptor of a store")
    for name, store, ring_id, why in (
        ("other-name", STORE_ID, _OTHER, "a sound ring in a file that is named for another"),
        ("other-store", fixed_bytes("another store", 16), RING_ID, "a ring that is named for another store"),
    ):
        yield ring(name, sound, "bad-structure", why, ring_name(store, ring_id))
    for key in fields_of(header):
        kept = encode_record({name: value for name, value in fields_of(header).items() if name != key})
        yield ring(f"no-{key}", kept + sound[2 * _BLOCK :], "bad-structure", f"{key} is missing")
    owner = fields_of(header)["owner"]
    assert isinstance(owner, dict)
    for name, changes, kind, why in (
        ("kind", {"kind": "head"}, "bad-structure", "a record of another kind"),
        ("format-2", {"format": 2}, "unsupported-version", "a newer major version"),
        ("format-true", {"format": True}, "bad-structure", "true is not the integer 1"),
        ("ring-id-upper", {"ring_id": RING_ID.hex().upper()}, "bad-structure", "an id in upper case"),
        ("store-number", {"store": 1}, "bad-structure", "a path that is no string"),
        ("run", {"run": ".hidden"}, "bad-structure", "not the name of a run"),
        ("run-temporary", {"run": "run.tmp"}, "bad-structure", "a temporary name"),
        ("rank-string", {"rank": "0"}, "bad-structure", "a rank that is no integer"),
        ("owner-null", {"owner": None}, "bad-structure", "no owner"),
        ("owner-no-pid", {"owner": {**owner, "pid": None}}, "bad-structure", "an owner without a number"),
        ("data-bytes-0", {"data_bytes": 0}, "bad-structure", "no data"),
        ("data-bytes-uneven", {"data_bytes": 4095}, "bad-structure", "not a multiple of 4096"),
        ("data-bytes-true", {"data_bytes": True}, "bad-structure", "true is not an integer"),
        ("data-bytes-2-60", {"data_bytes": 1 << 60}, "truncated", "more data than any file has"),
        ("data-bytes-near-2-64", {"data_bytes": (1 << 64) - _BLOCK}, "truncated", "more data than 64 bits count"),
        ("data-bytes-2-64", {"data_bytes": 1 << 64}, "bad-structure", "a number of more than 64 bits"),
    ):
        yield ring(name, _changed(header, **changes) + sound[2 * _BLOCK :], kind, why)
