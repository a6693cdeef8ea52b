"""Define every parser of the format as a target: input, mutations, and properties of accepted values.

A mutation either keeps the checksums, or recomputes them, so that later checks are reached.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asymcheck.codecs.decode import decode as decode_payload
from asymcheck.errors import FormatError
from asymcheck.format import catalog_records, frame, layout, pack, record
from asymcheck.format.digest import digest, sum8
from asymcheck.format.record import parse_json
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.types import CheckpointRef, Location, Owner, PackId, SaveId
from tests.fuzz import manifests, mutate, trees

PACK_ID = PackId(bytes(range(16)))
SAVE_ID = SaveId(bytes(range(100, 116)))
REF = CheckpointRef(3, 1200, SAVE_ID)
KEY = bytes(range(32, 48))
WHERE = "input"


class RefusedError(Exception):
    """Stands for the None of a parser that raises no errors."""


@dataclass(frozen=True)
class Target:
    """A parser under test."""

    seeds: Callable[[], list[bytes]]
    """Valid inputs."""
    change: Callable[[bytes, random.Random], bytes]
    """Function that makes another input from a valid one."""
    read: Callable[[bytes], object]
    """Function that parses, and checks accepted values. Raises FormatError or RefusedError."""


def _payload(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def _frame(length: int, sequence: int = 0) -> bytes:
    data = _payload(length)
    head = frame.encode_header(frame.FrameDescriptor.identity(digest(data), length), PACK_ID, sequence)
    return (head.ljust(frame.payload_offset(length), b"\0") + data).ljust(frame.frame_length(length), b"\0")


def _reseal_frame(data: bytes) -> bytes:
    if len(data) < frame.HEADER_BYTES:
        return data
    checked = data[:88] + sum8(data[:88])
    place = data[96:120]
    return checked + place + sum8(checked[88:] + place) + data[128:]


def _change_frame(data: bytes, dice: random.Random) -> bytes:
    fields = dice.random() < 0.5
    data = mutate.struct_field(data, frame.DESCRIPTOR, 0, dice) if fields else mutate.bytes_of(data, dice)
    return data if dice.random() < 0.3 else _reseal_frame(data)


def _read_header(data: bytes) -> object:
    header = frame.decode_header(data, WHERE)
    assert frame.encode_header(header.descriptor, header.place_id, header.sequence) == data[: frame.HEADER_BYTES]
    return header


def _read_frame(data: bytes) -> object:
    descriptor, payload = frame.check_frame(memoryview(data), PACK_ID, 0, WHERE)
    plain = decode_payload(descriptor, payload)
    assert len(plain) == descriptor.plain_length
    assert digest(plain)[8:] == descriptor.stored_sum or digest(plain) != descriptor.digest
    return descriptor


def _pack(lengths: list[int]) -> tuple[pack.PackHeader, bytes]:
    entries = np.zeros(len(lengths), dtype=pack.ENTRY_DTYPE)
    offset = BLOCK_BYTES
    for row, length in enumerate(lengths):
        entries[row]["digest"] = np.void(digest(_payload(length)))
        entries[row]["offset"], entries[row]["stored_length"], entries[row]["plain_length"] = offset, length, length
        entries[row]["digest_algorithm"] = 1
        offset += frame.frame_length(length)
    header = pack.PackHeader(PACK_ID, len(lengths), offset, 1_790_000_000_000_000_000, "asymcheck 0.1.0")
    return header, pack.encode_pack_header(header) + pack.encode_index(PACK_ID, entries)


def _reseal_pack(data: bytes) -> bytes:
    """Return a header block and an index with valid checksums."""
    head, index = data[:BLOCK_BYTES], data[BLOCK_BYTES:]
    if len(head) >= 128:
        head = head[:120] + sum8(head[:120]) + head[128:]
    if len(index) >= 64 and len(head) >= 128:
        length = int.from_bytes(head[48:56], "little")
        index = index[:48] + sum8(index[64 : max(64, min(length, len(index)))]) + index[56:]
        index = index[:56] + sum8(index[:56]) + index[64:]
    return head + index


def _change_pack(data: bytes, dice: random.Random) -> bytes:
    match dice.randrange(4):
        case 0:
            data = mutate.struct_field(data, pack.PACK_HEADER, 0, dice)
        case 1:
            data = mutate.struct_field(data, pack.INDEX_HEADER, BLOCK_BYTES, dice)
        case 2:
            # Most of both blocks is padding, so choose other bytes.
            end = BLOCK_BYTES + 64 + dice.randrange(300)
            data = data[:BLOCK_BYTES] + mutate.bytes_of(data[BLOCK_BYTES:end], dice) + data[end:]
        case _:
            data = mutate.bytes_of(data, dice)
    return data if dice.random() < 0.2 else _reseal_pack(data)


def _read_pack(data: bytes) -> object:
    header = pack.decode_pack_header(data[:BLOCK_BYTES], WHERE)
    assert pack.encode_pack_header(header) == data[:BLOCK_BYTES]
    entries = pack.decode_index(memoryview(data)[BLOCK_BYTES:], header, WHERE)
    encoded = pack.encode_index(header.pack_id, entries)
    assert encoded == data[BLOCK_BYTES : BLOCK_BYTES + len(encoded)]
    assert len(entries) == header.frame_count
    assert int(entries["offset"][0]) == BLOCK_BYTES
    assert not any(entries["reserved_a"].tobytes())
    return entries


def _records() -> list[bytes]:
    head = record.HeadRecord("gpt2-run1", 4, REF, 1_790_000_000_000_000_000, "asymcheck 0.1.0")
    return [
        record.encode_descriptor(record.Descriptor(bytes(range(16)), 1, "asymcheck 0.1.0")),
        record.encode_head(head),
        record.encode_head(record.HeadRecord("r", 1, None, 0, "")),
    ]


def _change_record(data: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.3:
        return mutate.bytes_of(data, dice)
    text = data.partition(b"\n")[0]
    if dice.random() < 0.5:
        text = mutate.bytes_of(text, dice)
    else:
        changed = mutate.json_of(json.loads(text), dice)
        canonical = dice.random() < 0.8
        text = mutate.dumps(changed, sort_keys=canonical, separators=(",", ":") if dice.random() < 0.8 else None)
    block = (text + b"\n" + digest(text).hex().encode() + b"\n").ljust(BLOCK_BYTES - 1, b" ") + b"\n"
    return block + (block if dice.random() < 0.5 else data[BLOCK_BYTES:])


def _read_record(data: bytes) -> object:
    value = _read_either_record(data)
    intact = [text for text in map(record._intact_text, (data[:BLOCK_BYTES], data[BLOCK_BYTES:])) if text is not None]
    assert record.canonical_json(json.loads(intact[0])) == intact[0]
    return value


def _read_either_record(data: bytes) -> object:
    try:
        value, damaged = record.decode_descriptor(data, WHERE)
        again = record.decode_descriptor(record.encode_descriptor(value), WHERE)
    except FormatError:
        head, damaged = record.decode_head(data, WHERE)
        assert record.decode_head(record.encode_head(head), WHERE) == (head, 0)
        return head
    assert again == (value, 0)
    assert damaged in (0, 1)
    return value


def _catalog_values() -> list[bytes]:
    owner = Owner(1234, 56789, "ef572891-d4e8-4612-81a2-e25cafa25b28", "pid:[4026531836]")
    return [
        catalog_records.encode_location(KEY, Location(PACK_ID, 4096, 100, 100)),
        catalog_records.encode_pack_entry(KEY, 1, 7, 1 << 20),
        catalog_records.encode_pin(KEY, owner, [PACK_ID, PackId(KEY)]),
    ]


def _change_catalog_value(data: bytes, dice: random.Random) -> bytes:
    body = data[:-8]
    if body[:1] == b"{" and dice.random() < 0.6:
        body = mutate.dumps(mutate.json_of(json.loads(body), dice))
    else:
        body = mutate.bytes_of(body, dice)
    return body + data[-8:] if dice.random() < 0.2 else catalog_records.seal(KEY, body)


def _read_catalog_value(data: bytes) -> object:
    location = catalog_records.decode_location(KEY, data)
    if location is not None:
        assert catalog_records.encode_location(KEY, location) == data
    pin = catalog_records.decode_pin(KEY, data)
    if pin is not None:
        assert catalog_records.decode_pin(KEY, catalog_records.encode_pin(KEY, *pin)) == (pin[0], sorted(pin[1]))
    state = catalog_records.decode_pack_state(KEY, data)
    if location is pin is state is None:
        raise RefusedError
    return location or pin or state


def _names() -> list[bytes]:
    return [
        name.encode()
        for name in (
            layout.pack_name(PACK_ID),
            layout.head_name(7),
            layout.checkpoint_name(REF),
            str(layout.ManifestName(3, 8, digest(b""))),
            "gpt2-run1",
        )
    ]


def _read_name(data: bytes) -> object:
    name = data.decode("utf-8", "surrogateescape")
    pack_id, head, ref, manifest = (
        parse(name)
        for parse in (
            layout.parse_pack_name,
            layout.parse_head_name,
            layout.parse_checkpoint_name,
            layout.parse_manifest_name,
        )
    )
    for value, make in (
        (pack_id, layout.pack_name),
        (head, layout.head_name),
        (ref, layout.checkpoint_name),
        (manifest, str),
    ):
        assert value is None or make(value) == name, f"{value} is not the only reading of {name!r}"  # type: ignore[operator]  # JSON or a stand-in, untyped on purpose
    if layout.is_run(name):
        assert name.isascii()
        assert "/" not in name
        assert not name.startswith(".")
    known = [pack_id, head, ref, manifest, layout.is_run(name) or None, layout.is_pack_temporary(name) or None]
    if all(value is None for value in known):
        raise RefusedError
    return known


def _json_texts() -> list[bytes]:
    return [b'{"a":[1,-2.5e3,"x\\u00e9\\ud83d\\ude00",null,true],"b":{}}', b"[[[[]]]]", b"0"]


def _read_json(data: bytes) -> object:
    value = parse_json(data, WHERE)
    # Text that two parsers could read differently is refused, so accepted text survives another writer.
    assert parse_json(json.dumps(value, ensure_ascii=False).encode("utf-8"), WHERE) == value
    return value


TARGETS = {
    "frame header": Target(lambda: [_frame(300)[:128], _frame(70000)[:128]], _change_frame, _read_header),
    "frame": Target(lambda: [_frame(1), _frame(300), _frame(3968), _frame(65536)], _change_frame, _read_frame),
    "pack": Target(
        lambda: [_pack(lengths)[1] for lengths in ([1], [300, 5000], [70_000] * 70)], _change_pack, _read_pack
    ),
    "record": Target(_records, _change_record, _read_record),
    "catalog value": Target(_catalog_values, _change_catalog_value, _read_catalog_value),
    "name": Target(_names, mutate.bytes_of, _read_name),
    "json": Target(_json_texts, mutate.bytes_of, _read_json),
    "tree": Target(trees.seeds, trees.change, trees.read),
    "manifest": Target(manifests.seeds, manifests.change, manifests.read),
}
