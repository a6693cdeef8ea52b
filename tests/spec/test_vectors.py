"""Test well-formed vectors: decoding yields the JSON content, and encoding yields the same bytes."""

import dataclasses
import json
import math
import struct
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asymcheck.format import catalog_records, layout
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, decode_header
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.pack import ENTRY_DTYPE, PackHeader, encode_index, encode_pack_header
from asymcheck.format.record import (
    Descriptor,
    HeadRecord,
    canonical_json,
    encode_descriptor,
    encode_head,
    encode_record,
)
from asymcheck.format.record import decode_descriptor as read_descriptor
from asymcheck.format.tree import value_features
from asymcheck.state.typed_values import TypedValue, build
from asymcheck.state.walk import flatten
from asymcheck.storage.nvme import Slot
from asymcheck.types import CheckpointRef, Digest, Location, Owner, PackId, SaveId
from tests.spec.corpus import READERS, Vector, describe, read_codec, read_manifest, read_pack, read_tree, vectors
from tools.manifest_files import encode_manifest

each = pytest.mark.parametrize


def _payload(value: dict[str, Any]) -> bytes:
    """Return the payload that a vector describes by 64 repeated bytes."""
    pattern = bytes.fromhex(value["payload_pattern"])
    return (pattern * (value["plain_length"] // len(pattern) + 1))[: value["plain_length"]]


@each("vector", vectors("record"), ids=str)
def test_a_record_is_read(vector: Vector, tmp_path: Path) -> None:
    """Test the fields, and the number of damaged copies."""
    facts = vector.facts
    found = READERS[facts["record"]](vector.data, facts, tmp_path)
    assert isinstance(found, tuple)
    record, damaged = found
    assert damaged == facts["damaged_copies"]
    expected = {key: value for key, value in facts["value"].items() if key not in ("format", "kind", "remark")}
    assert isinstance(record, (Descriptor, HeadRecord))
    assert json.loads(canonical_json(_record_fields(record))) == expected


def _record_fields(record: Descriptor | HeadRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    if isinstance(record, Descriptor):
        named = {key: value for key, value in fields.items() if value is not None}
        return {**named, "store_id": record.store_id.hex()}
    if record.parent is not None:
        fields["parent"]["save_id"] = record.parent.save_id.hex()
    return fields


@each("vector", vectors("record"), ids=str)
def test_a_record_is_written(vector: Vector) -> None:
    """Test the bytes, if both copies are intact."""
    facts = vector.facts
    if not facts["damaged_copies"]:
        assert encode_record(facts["value"]) == vector.data
    if vector.name in (
        "descriptor",
        "descriptor-writer-feature",
        "descriptor-longest",
        "descriptor-not-ascii",
        "descriptor-remote",
    ):
        assert encode_descriptor(read_descriptor(vector.data, "vector")[0]) == vector.data
    if facts["record"] == "head":
        value = facts["value"]
        above = value["parent"]
        parent = above and CheckpointRef(above["generation"], above["step"], SaveId(bytes.fromhex(above["save_id"])))
        head = HeadRecord(value["run"], value["generation"], parent, value["created_ns"], value["writer"])
        assert encode_head(head) == vector.data


@each("vector", vectors("frame"), ids=str)
def test_a_frame_is_read(vector: Vector, tmp_path: Path) -> None:
    """Test the fields of the header, and the plain bytes."""
    facts = vector.facts
    value = facts["value"]
    assert READERS["frame"](vector.data, facts, tmp_path) == _payload(value)
    header = decode_header(vector.data, "vector")
    assert header.descriptor.payload_offset == value["payload_offset"]
    fields = {**dataclasses.asdict(header.descriptor), "place_id": header.place_id, "sequence": header.sequence}
    assert {key: item.hex() if isinstance(item, bytes) else item for key, item in fields.items()} == {
        key: _shift(value) if key == "payload_shift" else value[key] for key in fields
    }


@each("vector", vectors("frame"), ids=str)
def test_a_frame_is_written(vector: Vector) -> None:
    """Test that stamping the payload gives the same bytes, in a used slot."""
    value = vector.facts["value"]
    payload = _payload(value)
    place = PackId(bytes.fromhex(value["place_id"]))
    descriptor = FrameDescriptor.identity(digest(payload), len(payload), _shift(value))
    assert _stamped(descriptor, payload, place, value["sequence"]) == vector.data
    assert len(vector.data) == descriptor.frame_length


def _shift(value: dict[str, Any]) -> int:
    """Return the payload shift of a frame's ``payload_offset``."""
    return int(value["payload_offset"]) - 4096 if value["stored_length"] >= 65536 else 0


def _stamped(descriptor: FrameDescriptor, payload: bytes, place: PackId, sequence: int) -> bytes:
    """Return a complete frame, created in a used slot."""
    slot = Slot(len(payload))
    slot.memory[:] = b"\xa5" * len(slot.memory)
    start = descriptor.payload_offset
    slot.memory[start : start + len(payload)] = payload
    return bytes(slot.stamp(descriptor, place, sequence))


@each("vector", vectors("pack"), ids=str)
def test_a_pack_is_read(vector: Vector, tmp_path: Path) -> None:
    """Test the fields of header and index, and that all frames are intact."""
    facts = vector.facts
    value = facts["value"]
    pack = read_pack(vector.data, facts, tmp_path)
    header = pack.header
    assert (header.index_length, header.pack_length) == (
        value["header"]["index_length"],
        value["header"]["pack_length"],
    )
    fields = {**dataclasses.asdict(header), "pack_id": header.pack_id.hex()}
    assert fields == {key: value["header"][key] for key in fields}
    assert len(pack.entries) == len(value["entries"])
    for entry, expected in zip(pack.entries, value["entries"], strict=True):
        for name in ("offset", "stored_length", "plain_length", "kind", "codec", "digest_algorithm"):
            assert int(entry[name]) == expected[name]
        assert int(entry["payload_shift"]) == _shift(expected)
        assert entry["digest"].tobytes().hex() == expected["digest"]
        assert entry["base_digest"].tobytes().hex() == expected["base_digest"]


@each("vector", vectors("pack"), ids=str)
def test_a_pack_is_written(vector: Vector) -> None:
    """Test the bytes of header, frames and index."""
    value = vector.facts["value"]
    fields = value["header"]
    place = PackId(bytes.fromhex(fields["pack_id"]))
    header = PackHeader(place, fields["frame_count"], fields["index_offset"], fields["created_ns"], fields["writer"])
    entries = np.zeros(len(value["entries"]), dtype=ENTRY_DTYPE)
    data = bytearray(encode_pack_header(header))
    for sequence, expected in enumerate(value["entries"]):
        payload = _payload(expected)
        descriptor = FrameDescriptor.identity(digest(payload), len(payload), _shift(expected))
        data += _stamped(descriptor, payload, place, sequence)
        entries[sequence]["payload_shift"] = _shift(expected)
        for name in ("offset", "stored_length", "plain_length", "kind", "codec", "digest_algorithm"):
            entries[sequence][name] = expected[name]
        entries[sequence]["digest"] = np.void(bytes.fromhex(expected["digest"]))
    data += encode_index(place, entries)
    assert bytes(data) == vector.data[: len(data)]
    assert len(vector.data) - len(data) == value["tail_bytes"]


@each("vector", vectors("codec"), ids=str)
def test_an_encoded_partition_is_read(vector: Vector, tmp_path: Path) -> None:
    """Test the plain bytes of every frame, whose base is another frame of the pack."""
    entries = vector.facts["value"]["entries"]
    found = read_codec(vector.data, vector.facts, tmp_path)
    assert [plain.hex() for plain in found] == [entry["plain"] for entry in entries]
    for entry, plain in zip(entries, found, strict=True):
        header = decode_header(vector.data[entry["offset"] :], "vector").descriptor
        fields = {key: item.hex() if isinstance(item, bytes) else item for key, item in vars(header).items()}
        assert fields == {key: entry.get(key, 0) for key in fields}
        assert digest(plain).hex() == entry["digest"]


def _manifest_value(manifest: Manifest) -> dict[str, Any]:
    header = manifest.header
    features = sorted(value_features(header.tree))
    fields: dict[str, Any] = {"format": 1, "reader_features": features, **dataclasses.asdict(header)}
    ref = fields.pop("ref")
    fields.update(generation=ref["generation"], step=ref["step"], save_id=ref["save_id"].hex())
    fields["packs"] = [pack.hex() for pack in header.packs]
    if header.parent is not None:
        fields["parent"]["save_id"] = header.parent.save_id.hex()
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    fields["metrics"] = {
        name: "NaN" if math.isnan(number) else names.get(number, number) for name, number in header.metrics.items()
    }
    del fields["store_ranks"], fields["elsewhere"]
    if header.merged is None:
        del fields["merged"]
    if header.store_ranks is not None:
        fields["store_ranks"] = [list(span) for span in header.store_ranks]
    if header.elsewhere:
        fields["elsewhere"] = header.elsewhere.hex()
    rows = []
    for row in manifest.rows():
        values = dataclasses.asdict(row)
        values["inline_digest"] = None if row.inline is None else digest(row.inline).hex()
        values["inline"] = None if row.inline is None else row.inline.hex()
        values["extents"] = [{**extent, "digest": extent["digest"].hex()} for extent in values["extents"]]
        rows.append(values)
    return {"header": fields, "rows": json.loads(json.dumps(rows))}


@each("vector", vectors("manifest"), ids=str)
def test_a_manifest_is_read(vector: Vector, tmp_path: Path) -> None:
    """Test header and rows, and the path of the manifest."""
    facts = vector.facts
    assert _manifest_value(read_manifest(vector.data, facts, tmp_path)) == facts["value"]
    assert layout.parse_manifest_name(facts["path"].rpartition("/")[2]) == ManifestName(
        facts["value"]["header"]["rank"], facts["value"]["header"]["world_size"], digest(vector.data)
    )


@each("vector", vectors("manifest"), ids=str)
def test_a_manifest_written_again_means_the_same(vector: Vector) -> None:
    """Test that the content is equal, because Arrow's writer may choose other bytes."""
    manifest = decode_manifest(vector.data, "vector")
    again = encode_manifest(manifest.header, manifest.rows())
    assert _manifest_value(decode_manifest(again, "vector")) == vector.facts["value"]


@each("vector", vectors("tree"), ids=str)
def test_a_tree_is_read(vector: Vector, tmp_path: Path) -> None:
    """Test the exact value: types, bits, order and keys."""
    assert describe(read_tree(vector.data, vector.facts, tmp_path)) == vector.facts["value"]


@each("vector", [vector for vector in vectors("tree") if "read_only" not in vector.facts], ids=str)
def test_a_tree_is_written(vector: Vector) -> None:
    """Test that flattening the described state gives the same canonical JSON."""
    value = vector.facts["value"]
    tensors = [torch.zeros(row + 1) for row in range(vector.facts["rows"])]
    assert canonical_json(flatten(_build(value, tensors)).tree) == vector.data


def _build(description: dict[str, Any], tensors: list[torch.Tensor]) -> object:
    """Return the described state, with a tensor for each row."""
    ((kind, value),) = description.items()
    if kind in ("dict", "ordered", "module"):
        items = value["items"] if kind == "module" else value
        pairs = [(_build(key, tensors), _build(item, tensors)) for key, item in items]
        if kind == "dict":
            return dict(pairs)
        ordered = OrderedDict(pairs)
        if kind == "module":
            ordered._metadata = _build(value["metadata"], tensors)  # type: ignore[attr-defined]  # as torch does
        return ordered
    if kind in ("list", "tuple"):
        items = [_build(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "typed":
        return _build_typed(value["type"], value["parameter"], _build(value["content"], tensors))
    if kind in ("tensor", "array"):
        return tensors[value] if kind == "tensor" else tensors[value].numpy()
    return _LEAVES[kind](value)


def _build_typed(kind: str, parameter: Any, content: Any) -> object:  # noqa: ANN401 - JSON, and a value
    """The typed value of these parts, with a class made for it."""
    if kind == "namedtuple":
        return namedtuple(parameter, content)(**content)
    if kind == "dataclass":
        return dataclasses.make_dataclass(parameter, content)(**content)
    if kind == "enum":
        name, _, member = parameter.partition(".")
        return Enum(name, {member: content})[member]
    return build(TypedValue(kind, parameter, content))


def _integer(digits: str) -> int:
    value = 0
    for start in range(0, len(digits.lstrip("-")), 4000):
        piece = digits.lstrip("-")[start : start + 4000]
        value = value * 10 ** len(piece) + int(piece)
    return -value if digits.startswith("-") else value


def _binary64(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


_LEAVES: dict[str, Callable[[Any], object]] = {
    "none": lambda value: value,
    "bool": lambda value: value,
    "str": lambda value: value,
    "int": _integer,
    "float": _binary64,
    "complex": lambda value: complex(*map(_binary64, value)),
    "bytes": bytes.fromhex,
    "size": lambda value: torch.Size([int(item) for item in value]),
    "scalar": lambda value: np.frombuffer(bytes.fromhex(value[1]), dtype=value[0])[0],
    "dtype": lambda value: getattr(torch, value),
    "device": torch.device,
}


@each("vector", vectors("catalog"), ids=str)
def test_a_catalog_entry_is_read(vector: Vector) -> None:
    """Test the fields of an entry; a damaged one counts as absent."""
    facts = vector.facts
    key, value, expected = bytes.fromhex(facts["key"]), vector.data, facts["value"]
    match facts["database"]:
        case "partitions":
            at = catalog_records.decode_location(key, value)
            fields = at and {name: _hex(item) for name, item in dataclasses.asdict(at).items()}
            assert fields == expected
        case "packs":
            assert catalog_records.decode_pack_state(key, value) == (expected and expected["state"])
        case "pins":
            pin = catalog_records.decode_pin(key, value)
            found = pin and {"owner": dataclasses.asdict(pin[0]), "packs": [pack.hex() for pack in pin[1]]}
            assert found == expected
        case "manifests":
            body = catalog_records.unseal(key, value)
            assert body is not None
            assert int.from_bytes(body, "little") == expected["size"]
        case "meta":
            body = catalog_records.unseal(key, value)
            assert body is not None
            assert body.hex() == expected["store_id"]


def _hex(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


@each("vector", [vector for vector in vectors("catalog") if vector.facts["value"] is not None], ids=str)
def test_a_catalog_entry_is_written(vector: Vector) -> None:
    """Test that the fields give the same bytes."""
    facts = vector.facts
    key, value = bytes.fromhex(facts["key"]), facts["value"]
    match facts["database"]:
        case "partitions":
            ids = {name: bytes.fromhex(value[name]) for name in ("pack_id", "base_digest")}
            assert catalog_records.encode_location(key, Location(**{**value, **ids})) == vector.data
        case "packs":
            entry = catalog_records.encode_pack_entry(key, value["state"], value["frame_count"], value["pack_length"])
            assert entry == vector.data
        case "pins":
            packs = [PackId(bytes.fromhex(pack)) for pack in reversed(value["packs"])]
            assert catalog_records.encode_pin(key, Owner(**value["owner"]), packs) == vector.data
            assert catalog_records.pin_key(SaveId(key[:16]), int.from_bytes(key[16:], "little")) == key
        case "manifests":
            assert catalog_records.encode_manifest_entry(key, value["size"]) == vector.data
        case "meta":
            assert catalog_records.seal(key, bytes.fromhex(value["store_id"])) == vector.data


@each("vector", vectors("layout"), ids=str)
def test_a_name_is_parsed(vector: Vector) -> None:
    """Test that a valid name gives its parts, and the reverse; any other name is foreign."""
    facts = vector.facts
    text, value = vector.data.decode(), facts["value"]
    parsed: object
    match facts["kind"]:
        case "run":
            assert layout.is_run(text) == (value is not None)
            return
        case "pack":
            parsed = layout.parse_pack_name(text)
            made = value and layout.pack_name(PackId(bytes.fromhex(value["pack_id"])))
        case "head":
            parsed = layout.parse_head_name(text)
            made = value and layout.head_name(value["generation"])
        case "checkpoint":
            parsed = layout.parse_checkpoint_name(text)
            ref = value and CheckpointRef(value["generation"], value["step"], SaveId(bytes.fromhex(value["save_id"])))
            assert parsed == ref
            made = value and layout.checkpoint_name(ref)
        case "ring":
            parsed = layout.parse_ring_name(text)
            ids = value and tuple(bytes.fromhex(value[part]) for part in ("store_id", "ring_id"))
            assert parsed == ids
            made = value and layout.ring_name(*ids)
        case _:
            parsed = layout.parse_manifest_name(text)
            name = value and ManifestName(value["rank"], value["world_size"], Digest(bytes.fromhex(value["digest"])))
            assert parsed == name
            made = value and str(name)
    assert (parsed is None) == (value is None)
    assert made in (None, text)
