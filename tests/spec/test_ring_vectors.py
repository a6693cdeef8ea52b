"""Test vectors of rings: decoding yields the JSON content, and encoding yields the same bytes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from asymcheck.format.digest import digest
from asymcheck.format.layout import parse_ring_name, ring_name
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.ring_records import (
    CAPTURES_OFFSET,
    ENTRY_BYTES,
    CaptureEntry,
    RingHeader,
    encode_entry,
    encode_ring_header,
)
from asymcheck.types import Owner, SaveId
from tests.spec.corpus import FoundRing, Vector, read_ring, vectors

each = pytest.mark.parametrize("vector", vectors("ring"), ids=str)


def _header(fields: dict[str, Any]) -> RingHeader:
    names = {field.name for field in dataclasses.fields(RingHeader)}
    kept = {name: value for name, value in fields.items() if name in names}
    ids = {name: bytes.fromhex(fields[name]) for name in ("ring_id", "store_id")}
    return RingHeader(**{**kept, **ids, "owner": Owner(**fields["owner"])})


def _capture(value: dict[str, Any]) -> CaptureEntry:
    return CaptureEntry(value["offset"], SaveId(bytes.fromhex(value["save_id"])), value["state"])


@each
def test_a_ring_is_read(vector: Vector, tmp_path: Path) -> None:
    """Test the header, the captures of the entries, and the intact frames with their payloads."""
    value, found = vector.facts["value"], read_ring(vector.data, vector.facts, tmp_path)
    assert found.header == _header(value["header"])
    assert parse_ring_name(vector.facts["path"]) == (found.header.store_id, found.header.ring_id)
    assert found.captures == [_capture(capture) for capture in value["captures"]]
    assert [(offset, name.hex(), stored, plain) for offset, name, stored, plain in found.frames] == [
        (frame["offset"], frame["digest"], frame["stored_length"], frame["plain_length"]) for frame in value["frames"]
    ]
    assert all(digest(found.payloads[offset]) == name for offset, name, _, _ in found.frames)


@each
def test_a_ring_is_written(vector: Vector) -> None:
    """Test that the fields give the same header, if both copies are intact, the same entries and name."""
    value = vector.facts["value"]
    header = _header(value["header"])
    if not vector.facts["damaged_copies"] and "remark" not in value["header"]:
        assert encode_ring_header(header) == vector.data[:CAPTURES_OFFSET]
    assert ring_name(header.store_id, header.ring_id) == vector.facts["path"]
    for capture in value["captures"]:
        start = CAPTURES_OFFSET + ENTRY_BYTES * capture["number"]
        assert encode_entry(_capture(capture)) == vector.data[start : start + ENTRY_BYTES]


def _found(name: str, tmp_path: Path) -> FoundRing:
    vector = Vector("ring", name)
    return read_ring(vector.data, vector.facts, tmp_path)


def test_ring_entries_name_manifests(tmp_path: Path) -> None:
    """Test that they agree with entry and header, have no packs or parent, and that the ring has all partitions."""
    found = _found("captures", tmp_path)
    lengths = {name: plain for _, name, _, plain in found.frames}
    assert len(found.captures) == 2
    for capture in found.captures:
        manifest = decode_manifest(found.payloads[capture.offset], "vector")
        header = manifest.header
        assert (header.ref.save_id, header.run, header.rank) == (capture.save_id, found.header.run, found.header.rank)
        assert (header.packs, header.parent) == ((), None)
        assert manifest.partitions().items() <= lengths.items()


def test_the_vectors_show_both_states_and_the_first_and_last_entry() -> None:
    """Test that a reader that only knows one state, or misses the last entry, fails."""
    captures = [capture for vector in vectors("ring") for capture in vector.facts["value"]["captures"]]
    assert {capture["state"] for capture in captures} == {1, 2}
    assert {0, 63} <= {capture["number"] for capture in captures}
