"""Test that invalid manifests raise errors of the package, and never yield a wrong value."""

import random

import pyarrow as pa
import pytest

from asymcheck.errors import BadMagicError, FormatError, StructureError
from asymcheck.format.manifest import METADATA_KEY, SCHEMA
from asymcheck.format.manifest_reader import decode_manifest
from tests.spec.corpus import Vector, vectors

GOOD = Vector("manifest", "extents").data


@pytest.mark.parametrize("offset", range(6))
def test_the_magic_is_looked_at(offset: int) -> None:
    """Test a file without the magic at its beginning or end; Arrow's own reader accepts one."""
    changed = bytearray(GOOD)
    changed[offset] ^= 1
    with pytest.raises(BadMagicError):
        decode_manifest(changed, "test")


def test_padding_of_the_magic_is_ignored() -> None:
    """Test a file of another writer, as the other readers of the format read it."""
    padded = GOOD[:6] + b"\1\2" + GOOD[8:]
    assert decode_manifest(padded, "test").rows() == decode_manifest(GOOD, "test").rows()


@pytest.mark.parametrize("vector", vectors("manifest"), ids=str)
def test_flipped_bits_break_nothing(vector: Vector) -> None:
    """Test that even without the digest in the name, a flipped manifest is refused, or read without a crash."""
    good = vector.data
    dice = random.Random(str(vector))
    refused = 0
    for _ in range(150):
        changed = bytearray(good)
        changed[dice.randrange(len(good))] ^= 1 << dice.randrange(8)
        try:
            manifest = decode_manifest(changed, "test")
        except FormatError:
            refused += 1
        else:
            manifest.rows()
    assert refused > 0


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3, 0.6, 0.9, 0.99, 0.999])
def test_a_cut_manifest_is_refused(keep: float) -> None:
    """Test a file that ends too early, at any position."""
    with pytest.raises(FormatError):
        decode_manifest(GOOD[: int(len(GOOD) * keep)], "test")


def test_all_kinds_of_buffers_are_read() -> None:
    """Test bytes, a bytearray and a memoryview."""
    names = {tuple(decode_manifest(kind(GOOD), "test").names()) for kind in (bytes, bytearray, memoryview)}
    assert len(names) == 1


BROKEN = [
    vector
    for vector in vectors("invalid")
    if vector.facts["structure"] == "manifest"
    and not vector.name.startswith(("manifest-path-", "manifest-header-tree-"))
]


@pytest.mark.parametrize("vector", BROKEN, ids=str)
def test_rules_are_checked_without_the_path_too(vector: Vector) -> None:
    """Test that a malformed manifest is refused for its content, not only for its name."""
    if vector.facts["error_kind"] == "bad-checksum":
        # Only the digest in the name shows that these bytes differ from the written ones.
        return
    with pytest.raises(FormatError) as caught:
        decode_manifest(vector.data, "test")
    assert caught.value.kind == vector.facts["error_kind"]


def _file(schema: pa.Schema, batches: int, metadata: dict[bytes, bytes]) -> bytes:
    sink = pa.BufferOutputStream()
    full = schema.with_metadata(metadata)
    with pa.ipc.new_file(sink, full) as writer:
        for _ in range(batches):
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=full))
    data: bytes = sink.getvalue().to_pybytes()
    return data


KNOWN = b'{"format":1,"reader_features":[]}'
"""The part of a header that is checked before the schema."""


@pytest.mark.parametrize("batches", [0, 2, 3])
def test_manifest_has_one_record_batch(batches: int) -> None:
    """Test no batch, and several batches."""
    with pytest.raises(StructureError):
        decode_manifest(_file(SCHEMA, batches, {METADATA_KEY: KNOWN}), "test")


@pytest.mark.parametrize("column", range(len(SCHEMA)))
def test_every_column_is_compared(column: int) -> None:
    """Test a column with another name, another type, or other nullability."""
    field = SCHEMA.field(column)
    for other in (
        field.with_name(f"{field.name}_"),
        field.with_type(pa.float32()),
        field.with_nullable(not field.nullable),
    ):
        with pytest.raises(StructureError, match="schema"):
            decode_manifest(_file(SCHEMA.set(column, other), 1, {METADATA_KEY: KNOWN}), "test")
