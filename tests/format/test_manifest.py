"""Test manifests: round trips for no rows, one row, and a hundred thousand."""

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.errors import LimitError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.manifest import SCHEMA, Extent, Manifest, ManifestHeader, TensorRow
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.tree import Node
from asymcheck.types import CheckpointRef, Digest, PackId, SaveId
from tools.manifest_files import encode_manifest

REF = CheckpointRef(2, 30, SaveId(bytes(range(16))))
ids = st.binary(min_size=16, max_size=16)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def header_for(tree: Node) -> ManifestHeader:
    """Return a header with this tree."""
    plan = {"number": 0, "kind": "canonical"}
    return ManifestHeader("run", REF, 0, 1, None, 1, "test", {"loss": 0.5}, plan, (PackId(bytes(16)),), tree)


def named(count: int) -> Node:
    """Return a tree that names all rows."""
    return ["l", [["T", row] for row in range(count)]]


def read(rows: list[TensorRow]) -> Manifest:
    """Return the manifest of these rows after it was written and read."""
    return decode_manifest(encode_manifest(header_for(named(len(rows))), rows), "test")


@st.composite
def tensor_rows(draw: st.DrawFn) -> TensorRow:
    """Return a valid row; all partitions with one digest have the same length, derived from the digest."""
    dtype = draw(st.sampled_from(sorted(registry.DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, 9)) for _ in shape)
    whole = tuple(size + start + draw(st.integers(0, 9)) for size, start in zip(shape, offset, strict=True))
    nbytes = registry.DTYPE_BYTES[dtype]
    for size in shape:
        nbytes *= size
    row = TensorRow(
        name=draw(texts),
        aliases=tuple(draw(st.lists(texts, max_size=2))),
        dtype=dtype,
        role=draw(st.sampled_from(registry.ROLES)),
        shape=shape,
        global_shape=whole,
        offset=offset,
        nbytes=nbytes,
        inline=None,
        extents=(),
    )
    if not nbytes or (nbytes <= registry.INLINE_BYTES_MAX and draw(st.booleans())):
        return dataclasses.replace(row, inline=draw(st.binary(min_size=nbytes, max_size=nbytes)))
    cuts = sorted({0, nbytes, *draw(st.lists(st.integers(1, nbytes), max_size=3))})
    extents = []
    for start, end in itertools.pairwise(cuts):
        length = draw(st.integers(end - start, registry.PARTITION_BYTES_MAX))
        name = Digest(draw(st.binary(min_size=8, max_size=8)) + length.to_bytes(8, "big"))
        extents.append(Extent(name, draw(st.integers(0, length - (end - start))), end - start, length))
    return dataclasses.replace(row, extents=tuple(extents))


@pytest.mark.slow
@given(st.lists(tensor_rows(), max_size=6))
def test_rows_go_round(rows: list[TensorRow]) -> None:
    """Test all rows, and their sums."""
    manifest = read(rows)
    assert len(manifest) == len(rows)
    assert manifest.rows() == rows
    assert manifest.names() == [row.name for row in rows]
    assert manifest.total_bytes == sum(row.nbytes for row in rows)
    extents = [extent for row in rows for extent in row.extents]
    assert manifest.partitions() == {extent.digest: extent.partition_length for extent in extents}


@settings(max_examples=50)
@given(
    st.dictionaries(texts, st.floats(allow_nan=False), max_size=5),
    st.lists(ids.map(PackId), max_size=5).map(tuple),
    st.none() | st.builds(CheckpointRef, st.integers(1, REF.generation), st.integers(0, 10**12 - 1), ids.map(SaveId)),
    st.integers(0, (1 << 64) - 1),
)
def test_headers_go_round(
    metrics: dict[str, float], packs: tuple[PackId, ...], parent: CheckpointRef | None, created: int
) -> None:
    """Test every field of the header."""
    plan = {"number": 3, "kind": "other", "further": [1, {"a": None}]}
    header = ManifestHeader("r.1", REF, 3, 7, parent, created, "wr\u00efter", metrics, plan, packs, ["d", [["k", 1]]])
    assert decode_manifest(encode_manifest(header, []), "test").header == header


def test_no_rows() -> None:
    """Test a state without tensors."""
    manifest = read([])
    assert (len(manifest), manifest.total_bytes, manifest.rows(), manifest.partitions()) == (0, 0, [], {})


def _many(count: int) -> list[TensorRow]:
    rows = []
    for number in range(count):
        name = Digest(digest(number.to_bytes(8, "big")))
        extents = (Extent(name, 0, 4096, 8192), Extent(name, 4096, 4096, 8192))
        rows.append(TensorRow(f"layer.{number}", (), "float32", "weights", (2048,), (2048,), (0,), 8192, None, extents))
    return rows


@pytest.mark.slow
def test_a_hundred_thousand_rows() -> None:
    """Test that 100,000 tensors of two extents each are written and read in seconds."""
    rows = _many(100_000)
    began = time.process_time()
    data = encode_manifest(header_for(named(len(rows))), rows)
    manifest = decode_manifest(data, "test")
    assert time.process_time() - began < 20
    assert manifest.rows() == rows
    assert len(manifest.partitions()) == 100_000
    assert len(data) < 40 << 20


def test_one_extent_in_a_hundred_thousand_is_checked() -> None:
    """Test that a single invalid row of many is detected."""
    rows = _many(2000)
    rows[1234] = dataclasses.replace(rows[1234], nbytes=8191)
    with pytest.raises(Exception, match="row 1234"):
        read(rows)


def test_a_manifest_beyond_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the writer and the reader refuse a manifest above the limit, the reader before it parses."""
    rows = _many(50)
    data = encode_manifest(header_for(named(50)), rows)
    monkeypatch.setattr(registry, "MANIFEST_BYTES_MAX", len(data) - 1)
    with pytest.raises(LimitError, match=str(len(data) - 1)):
        encode_manifest(header_for(named(50)), rows)
    with pytest.raises(LimitError, match=str(len(data) - 1)):
        decode_manifest(data, "test")


def test_the_same_rows_give_the_same_bytes() -> None:
    """Test that the digest of a manifest is a function of its content."""
    rows = _many(100)
    assert encode_manifest(header_for(named(100)), rows) == encode_manifest(header_for(named(100)), rows)


def test_the_schema_allows_nulls_only_for_inline_bytes() -> None:
    """Test that only two columns may be null, and no nested value."""
    assert {field.name for field in SCHEMA if field.nullable} == {"inline", "inline_digest"}
    for field in SCHEMA:
        inner = getattr(field.type, "value_field", None)
        assert inner is None or not inner.nullable
