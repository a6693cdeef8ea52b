"""Test round trips of every structure of the format; equal values have equal bytes."""

import dataclasses
import json
import math
import string

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.format import catalog_records, frame, layout, pack, record, registry
from asymcheck.format.digest import digest
from asymcheck.format.manifest import Extent, ManifestHeader, TensorRow
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.record import parse_json
from asymcheck.format.tree import decode
from asymcheck.types import CheckpointRef, Digest, Location, Owner, PackId, SaveId
from tests.fuzz.trees import Rewriter
from tools.manifest_files import encode_manifest

IDS = st.binary(min_size=16, max_size=16)
U64 = st.integers(0, (1 << 64) - 1)
LENGTHS = st.one_of(st.integers(1, 1 << 17), st.integers(1, registry.PARTITION_BYTES_MAX))
RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(lambda name: not name.endswith(".tmp"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
REFS = st.builds(
    CheckpointRef,
    st.integers(1, registry.GENERATION_MAX),
    st.integers(0, registry.STEP_MAX),
    IDS.map(SaveId),
)


@given(IDS, LENGTHS, IDS, U64)
def test_frame_headers(name: bytes, length: int, place: bytes, sequence: int) -> None:
    """Test descriptor and placement; the descriptor's bytes do not depend on the placement."""
    descriptor = frame.FrameDescriptor.identity(Digest(name), length)
    data = frame.encode_header(descriptor, PackId(place), sequence)
    assert len(data) == frame.HEADER_BYTES
    assert frame.decode_header(data, "x") == frame.FrameHeader(descriptor, PackId(place), sequence)
    assert data[:96] == frame.encode_header(descriptor, PackId(bytes(16)), 0)[:96]
    assert frame.frame_length(length) % registry.BLOCK_BYTES == 0
    assert frame.frame_length(length) - frame.payload_offset(length) - length < registry.BLOCK_BYTES
    entry = np.array([pack.entry_of(descriptor, 0)], dtype=pack.ENTRY_DTYPE)[0]
    assert frame.frame_length(length) == pack.entry_length(entry)


@given(IDS, st.lists(st.tuples(IDS, LENGTHS), min_size=1, max_size=150), U64, st.text(string.printable, max_size=32))
def test_packs(pack_id: bytes, frames: list[tuple[bytes, int]], created_ns: int, writer: str) -> None:
    """Test header and index, for any number of frames and any lengths."""
    entries = np.zeros(len(frames), dtype=pack.ENTRY_DTYPE)
    end = registry.BLOCK_BYTES
    for number, (name, length) in enumerate(frames):
        entries[number] = (np.void(name), np.void(bytes(16)), end, length, length, 0, 0, 1, 0, np.void(bytes(3)))
        end += frame.frame_length(length)
    header = pack.PackHeader(PackId(pack_id), len(frames), end, created_ns, writer)
    assert pack.decode_pack_header(pack.encode_pack_header(header), "x") == header
    index = pack.encode_index(PackId(pack_id), entries)
    assert len(index) == pack.round_up(header.index_length)
    assert pack.decode_index(index, header, "x").tobytes() == entries.tobytes()


@given(IDS, U64, TEXT, st.lists(TEXT, max_size=3))
def test_descriptors(store_id: bytes, created_ns: int, writer: str, features: list[str]) -> None:
    """Test a descriptor with writer features, for a program that only reads."""
    value = record.Descriptor(store_id, created_ns, writer, (), tuple(features))
    data = record.encode_descriptor(value)
    assert len(data) == record.RECORD_BYTES
    assert record.decode_descriptor(data, "x") == (value, 0)


@given(RUNS, REFS, st.none() | REFS, U64, TEXT)
def test_head_records(run: str, ref: CheckpointRef, parent: CheckpointRef | None, created_ns: int, writer: str) -> None:
    """Test a head record whose parent has a lower generation."""
    if parent is not None and parent.generation >= ref.generation:
        parent = None
    value = record.HeadRecord(run, ref.generation, parent, created_ns, writer)
    assert record.decode_head(record.encode_head(value), "x") == (value, 0)


@given(IDS, IDS, U64, U64, U64, IDS, st.tuples(*[st.integers(0, 255)] * 3))
def test_catalog_values(
    key: bytes, pack_id: bytes, offset: int, stored: int, plain: int, base: bytes, numbers: tuple[int, int, int]
) -> None:
    """Test a location and a pack entry, which count as damaged under another key."""
    at = Location(PackId(pack_id), offset, stored, plain, *numbers, base_digest=base)
    value = catalog_records.encode_location(key, at)
    assert catalog_records.decode_location(key, value) == at
    assert catalog_records.decode_location(digest(key), value) is None
    entry = catalog_records.encode_pack_entry(key, numbers[0], stored, plain)
    assert catalog_records.decode_pack_state(key, entry) == numbers[0]
    assert catalog_records.decode_pack_state(digest(key), entry) is None


@given(IDS, st.integers(0, 99_999), st.integers(1, 1 << 22), U64, TEXT, TEXT, st.lists(IDS, max_size=5))
def test_pins(save_id: bytes, rank: int, pid: int, ticks: int, boot: str, space: str, packs: list[bytes]) -> None:
    """Test owner and packs."""
    key = catalog_records.pin_key(SaveId(save_id), rank)
    owner = Owner(pid, ticks, boot, space)
    value = catalog_records.encode_pin(key, owner, [PackId(one) for one in packs])
    assert catalog_records.decode_pin(key, value) == (owner, sorted(packs))
    assert catalog_records.decode_pin(digest(key), value) is None


@given(RUNS, REFS, IDS, st.integers(1, registry.WORLD_SIZE_MAX), st.data())
def test_names(run: str, ref: CheckpointRef, name: bytes, world_size: int, data: st.DataObject) -> None:
    """Test that every name belongs to one kind of thing only."""
    manifest = layout.ManifestName(data.draw(st.integers(0, world_size - 1)), world_size, Digest(name))
    assert layout.parse_pack_name(layout.pack_name(PackId(name))) == name
    assert layout.parse_head_name(layout.head_name(ref.generation)) == ref.generation
    assert layout.parse_checkpoint_name(layout.checkpoint_name(ref)) == ref
    assert layout.parse_manifest_name(str(manifest)) == manifest
    assert layout.check_run(run) == run
    parsers = (
        layout.parse_pack_name,
        layout.parse_head_name,
        layout.parse_checkpoint_name,
        layout.parse_manifest_name,
    )
    for text in (layout.pack_name(PackId(name)), layout.checkpoint_name(ref), str(manifest)):
        assert sum(parse(text) is not None for parse in parsers) == 1


FLOATS = st.floats(width=64, allow_nan=True).map(lambda value: ["f", np.float64(value).tobytes()[::-1].hex()])
INTEGERS = st.one_of(
    st.integers(-(1 << 53) + 1, (1 << 53) - 1),
    st.integers(1 << 53, 1 << 300).map(lambda value: ["i", str(value)]),
    st.integers(-(1 << 300), -(1 << 53)).map(lambda value: ["i", str(value)]),
)
LEAVES = st.one_of(st.none(), st.booleans(), TEXT, INTEGERS, FLOATS, st.just(["y", "int8"]), st.just(["v", "cpu"]))
KEYS = st.one_of(TEXT, INTEGERS)
NODES = st.recursive(
    LEAVES,
    lambda node: st.one_of(
        st.tuples(st.sampled_from("lt"), st.lists(node, max_size=4)).map(list),
        st.tuples(
            st.sampled_from("do"),
            st.lists(st.tuples(KEYS, node).map(list), max_size=4, unique_by=lambda pair: json.dumps(pair[0])),
        ).map(list),
    ),
    max_leaves=12,
)


@given(NODES)
def test_trees(node: object) -> None:
    """Test every node through JSON, which is written as the same node."""
    parsed = parse_json(json.dumps(node).encode(), "x")
    assert json.dumps(decode(parsed, 0, Rewriter(), "x")) == json.dumps(node)


@st.composite
def _rows(draw: st.DrawFn) -> TensorRow:
    dtype = draw(st.sampled_from(sorted(registry.DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    nbytes = registry.DTYPE_BYTES[dtype] * math.prod(shape)
    offset = tuple(draw(st.integers(0, 99)) for _ in shape)
    inline, extents = draw(st.binary(min_size=nbytes, max_size=nbytes)) if nbytes <= 4096 else None, []
    if nbytes and (inline is None or draw(st.booleans())):
        inline, left = None, nbytes
        while left:
            length = draw(st.integers(1, left))
            # Derive the length from the digest, so that one partition never has two lengths.
            name = draw(st.binary(min_size=15, max_size=15))
            extents.append(Extent(Digest(name + b"\0"), len(name), length, len(name) + nbytes + name[0]))
            extents[-1] = dataclasses.replace(extents[-1], digest=digest(repr(extents[-1]).encode()))
            left -= length if len(extents) < 3 else left
            if not left:
                used = sum(extent.length for extent in extents[:-1])
                last = dataclasses.replace(extents[-1], length=nbytes - used)
                extents[-1] = dataclasses.replace(last, digest=digest(repr(last).encode()))
    return TensorRow(
        name=draw(TEXT),
        aliases=tuple(draw(st.lists(TEXT, max_size=2))),
        dtype=dtype,
        role=draw(st.sampled_from(registry.ROLES)),
        shape=shape,
        global_shape=tuple(size + begin for size, begin in zip(shape, offset, strict=True)),
        offset=offset,
        nbytes=nbytes,
        inline=inline,
        extents=tuple(extents),
    )


@settings(max_examples=60)
@given(st.lists(_rows(), max_size=6), RUNS, REFS, st.none() | REFS, st.dictionaries(TEXT, st.floats(), max_size=3), IDS)
def test_manifests(
    rows: list[TensorRow],
    run: str,
    ref: CheckpointRef,
    parent: CheckpointRef | None,
    metrics: dict[str, float],
    pack_id: bytes,
) -> None:
    """Test rows of every dtype, inline or in extents, and the header; equal manifests have equal bytes."""
    if parent is not None and parent.generation > ref.generation:
        parent = None
    tree: object = ["l", [["T", number] for number in range(len(rows))]]
    plan = {"number": 0, "kind": "canonical"}
    header = ManifestHeader(run, ref, 0, 1, parent, 5, "writer", metrics, plan, (PackId(pack_id),), tree)
    data = encode_manifest(header, rows)
    manifest = decode_manifest(data, "x")
    assert manifest.rows() == rows
    read = manifest.header
    assert dataclasses.replace(read, metrics={}) == dataclasses.replace(header, metrics={})
    assert str(sorted(read.metrics.items())) == str(sorted(metrics.items()))
    assert encode_manifest(read, rows) == data
