"""Manifests as a fuzzing target: other bytes, columns, headers, and other values in the right columns."""

import json
import random
from collections.abc import Callable, Mapping

import pyarrow as pa

from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.manifest import METADATA_KEY, SCHEMA, Extent, ManifestHeader, TensorRow
from asymcheck.format.manifest_reader import decode_manifest
from asymcheck.format.tree import decode
from asymcheck.types import CheckpointRef, Digest, PackId, SaveId
from tests.fuzz import mutate
from tests.fuzz.trees import Rewriter
from tools.manifest_files import encode_manifest

_ONE, _TWO = (Digest(bytes([number]) * 16) for number in (1, 2))
_INTEGERS = (-(1 << 63), -1, 0, 1, 2, 63, 4096, (1 << 30) + 1, 1 << 31, 1 << 62, (1 << 63) - 1)


def row(name: str, shape: tuple[int, ...], dtype: str, extents: tuple[Extent, ...] = (), **more: object) -> TensorRow:
    """Return a consistent row; without extents it is inline."""
    nbytes = registry.DTYPE_BYTES[dtype]
    for size in shape:
        nbytes *= size
    inline = None if extents else bytes(range(256)) * 16
    values: dict[str, object] = {
        "aliases": (),
        "role": "other",
        "global_shape": shape,
        "offset": (0,) * len(shape),
        "inline": None if inline is None else inline[:nbytes],
        **more,
    }
    return TensorRow(name=name, dtype=dtype, shape=shape, nbytes=nbytes, extents=extents, **values)  # type: ignore[arg-type]  # JSON or a stand-in, untyped on purpose


ROWS = [
    row("w", (10, 20), "float32", (Extent(_ONE, 0, 800, 1300),), role="weights", aliases=("tied",)),
    row("b", (125,), "float32", (Extent(_ONE, 800, 500, 1300),), global_shape=(1000,), offset=(250,)),
    row("two", (3000,), "uint8", (Extent(_TWO, 100, 2000, 4096), Extent(_TWO, 0, 1000, 4096))),
    row("scalar", (), "int64"),
    row("empty", (0, 7), "bfloat16"),
    row("small", (3, 5), "complex64"),
]

HEADER = ManifestHeader(
    run="gpt2-run1",
    ref=CheckpointRef(2, 1200, SaveId(bytes(range(16)))),
    rank=1,
    world_size=2,
    parent=CheckpointRef(1, 1100, SaveId(bytes(range(1, 17)))),
    created_ns=1_790_000_000_000_000_000,
    writer="asymcheck 0.1.0",
    metrics={"loss": 3.25, "nan": float("nan"), "inf": float("inf")},
    plan={"number": 0, "kind": "canonical"},
    packs=(PackId(bytes(range(16))),),
    tree=["d", [*([name.name, ["T", number]] for number, name in enumerate(ROWS)), ["tied", ["T", 0]], ["step", 5]]],
)


def seeds() -> list[bytes]:
    """Return a manifest with every way to store bytes, one of a single inline row, and one without rows."""
    from dataclasses import replace

    return [
        encode_manifest(HEADER, ROWS),
        encode_manifest(replace(HEADER, tree=["T", 0], metrics={}, parent=None), [row("x", (2,), "bool")]),
        encode_manifest(replace(HEADER, tree=["l", []]), []),
    ]


def read(data: bytes) -> object:
    """Parse, read all content, and write it again."""
    manifest = decode_manifest(data, "input")
    rows = manifest.rows()
    assert manifest.names() == [one.name for one in rows]
    assert manifest.total_bytes >= 0
    for one in rows:
        assert one.nbytes == (len(one.inline) if one.inline is not None else sum(e.length for e in one.extents))
        assert all(name in manifest.partitions() for name in (extent.digest for extent in one.extents))
    again = encode_manifest(manifest.header, rows)
    second = decode_manifest(again, "again")
    assert second.rows() == rows
    assert encode_manifest(second.header, rows) == again
    decode(manifest.header.tree, len(manifest), Rewriter(), "input")
    return manifest


def parts_of(data: bytes) -> tuple[pa.Schema, pa.RecordBatch]:
    """Return the schema and the record batch of a manifest."""
    with pa.ipc.open_file(pa.py_buffer(data)) as reader:
        return reader.schema, reader.get_batch(0)


def rebuilt(schema: pa.Schema, batches: list[pa.RecordBatch], options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    """Return an Arrow file of these batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def with_header(data: bytes, make: Callable[[bytes], Mapping[bytes, bytes] | bytes]) -> bytes:
    """Return the same rows with another header, or with other metadata."""
    schema, batch = parts_of(data)
    made = make(schema.metadata[METADATA_KEY])
    schema = schema.with_metadata({METADATA_KEY: made} if isinstance(made, bytes) else dict(made))
    return rebuilt(schema, [batch.replace_schema_metadata(schema.metadata)])


def buffer_places(data: bytes) -> list[tuple[int, int]]:
    """Return the offsets and lengths of the buffers of the record batch."""
    whole = pa.py_buffer(data)
    with pa.ipc.open_file(whole) as reader:
        batch = reader.get_batch(0)
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
        places = [(buffer.address - whole.address, buffer.size) for buffer in buffers]
    return [(start, size) for start, size in places if start >= 0 and size and start + size <= len(data)]


def _other_buffer(data: bytes, dice: random.Random) -> bytes:
    """Change a number among offsets, lengths, sizes or validity bits."""
    start, size = dice.choice(buffer_places(data))
    width = dice.choice((1, 4, 4, 8))
    place = start + dice.randrange(max(1, size // width)) * width
    value = dice.choice(_INTEGERS) % (1 << 8 * width)
    return data[:place] + value.to_bytes(width, "little") + data[place + width :]


def _other_values(data: bytes, dice: random.Random) -> bytes:
    """Change a value in one row, in a column of the right type."""
    schema, batch = parts_of(data)
    if not batch.num_rows:
        return data
    columns = {name: batch.column(name).to_pylist() for name in SCHEMA.names}
    name, place = dice.choice(SCHEMA.names), dice.randrange(batch.num_rows)
    value = columns[name][place]
    if name == "extents" and value:
        extent = dice.choice(value)
        field = dice.choice(list(extent))
        extent[field] = dice.choice((_ONE, _TWO)) if field == "digest" else dice.choice(_INTEGERS)
    elif isinstance(value, list):
        pool: tuple[object, ...] = ("a", "") if name == "aliases" else _INTEGERS
        columns[name][place] = [*value[:-1], dice.choice(pool)] * dice.choice((1, 1, 2, 40))
    elif isinstance(value, int):
        columns[name][place] = dice.choice((*_INTEGERS, value + 1, value * 2))
    elif isinstance(value, str):
        columns[name][place] = dice.choice(("", "bool", "float99", "rng", value * 1000, "\0", *registry.DTYPE_BYTES))
    else:
        other = dice.choice((None, b"", bytes(16), dice.randbytes(16), bytes(5000)))
        columns[name][place] = digest(other or b"") if name == "inline_digest" and other else other
    arrays = [pa.array(columns[name], type=SCHEMA.field(name).type) for name in SCHEMA.names]
    return rebuilt(schema, [pa.RecordBatch.from_arrays(arrays, schema=schema)])


def _other_header(data: bytes, dice: random.Random) -> bytes:
    def make(text: bytes) -> bytes:
        if dice.random() < 0.3:
            return mutate.bytes_of(text, dice)
        return mutate.dumps(mutate.json_of(json.loads(text), dice))

    return with_header(data, make)


def change(data: bytes, dice: random.Random) -> bytes:
    """Change any byte, a buffer, a value, or the header."""
    make = dice.choice((mutate.bytes_of, _other_buffer, _other_buffer, _other_values, _other_header))
    try:
        return make(data, dice)
    except (pa.ArrowException, OverflowError, UnicodeError, IndexError, TypeError):
        # Arrow does not write the requested values.
        return mutate.bytes_of(data, dice)
