"""Vectors of manifests, each of which breaks one rule (SPEC.md §A8). pyarrow writes most of them."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from asymcheck.format.digest import digest
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import METADATA_KEY, SCHEMA, TensorRow
from asymcheck.format.record import canonical_json
from tools.manifest_files import encode_manifest
from tools.vectors_base import Vector, fixed_bytes, flipped, invalid, partition_digest, patched
from tools.vectors_manifest import (
    BUNDLED_ROWS,
    CUT_ROW,
    HEADER,
    header_for,
    header_json,
    inline_row,
    manifest_path,
    row_json,
)

Columns = dict[str, list[object]]

_ITEM = pa.field("item", pa.int64(), nullable=False, metadata={"a": "b"})
_SHAPE_WITH_METADATA = pa.field("shape", pa.list_(_ITEM), nullable=False)

ROWS = [CUT_ROW, *BUNDLED_ROWS, inline_row("optimizer.state.0.step", "float32", (), b"\0\0\x80\x3f")]
ROWS_HEADER = header_for(["l", [["T", row] for row in range(len(ROWS))]])
_GOOD = encode_manifest(ROWS_HEADER, ROWS)


def columns_of(rows: list[TensorRow]) -> Columns:
    """Return rows as columns of plain values, which a vector may change."""
    columns: Columns = {name: [] for name in SCHEMA.names}
    for row in rows:
        values = row_json(row)
        extents = [{**dataclasses.asdict(item), "digest": item.digest} for item in row.extents]
        inline_digest = None if row.inline is None else digest(row.inline)
        values.update(inline=row.inline, inline_digest=inline_digest, extents=extents)
        for name, value in values.items():
            columns[name].append(value)
    return columns


def arrow_file(
    columns: Columns,
    header: bytes,
    schema: pa.Schema = SCHEMA,
    options: pa.ipc.IpcWriteOptions | None = None,
    batches: int = 1,
    metadata: Mapping[bytes, bytes] | pa.KeyValueMetadata | None = None,
) -> bytes:
    """Return an Arrow IPC file, valid as a manifest or not."""
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    entries = {METADATA_KEY: header} if metadata is None else metadata
    full = schema.with_metadata(entries) if entries else schema
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, full, options=options) as writer:
        for _ in range(batches):
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=full))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def header_bytes(**changes: object) -> bytes:
    """Return the header of a valid manifest with some keys changed."""
    return canonical_json({**header_json(ROWS_HEADER), **changes})


def refused(name: str, data: bytes, kind: str, why: str, path: str | None = None, also: str | None = None) -> Vector:
    """Return the vector of a manifest that a reader must refuse."""
    return invalid("manifest", name, data, kind, why, path=path or manifest_path(data), also=also)


def manifest_damage_vectors() -> Iterator[Vector]:
    """Yield every malformed manifest, except manifests with a wrong header."""
    yield from _files()
    yield from _contradictions()
    yield from _schemas()
    yield from _newer()
    yield from _paths()
    yield from _nulls()
    yield from _shapes()
    yield from _inline()
    yield from _extents()
    yield from _buffers()


def _files() -> Iterator[Vector]:
    yield refused("empty", b"", "bad-magic", "no bytes")
    yield refused("not-arrow", fixed_bytes("not arrow", 2000), "bad-magic", "bytes of something else")
    yield refused("magic", b"PARQUE" + _GOOD[6:], "bad-magic", "another magic in front")
    yield refused("magic-only", b"ARROW1\0\0", "bad-structure", "the magic and nothing more")
    yield refused("last-magic", _GOOD[:-1] + b"2", "bad-structure", "another magic at the end")
    yield refused("cut", _GOOD[:-100], "bad-structure", "the file ends within its footer")
    yield refused("more-behind", _GOOD + bytes(8), "bad-structure", "bytes after the end")
    yield refused(
        "footer-length", patched(_GOOD, (len(_GOOD) - 10, b"\xff\xff\xff\x7f")), "bad-structure", "a footer of 2 GiB"
    )
    yield refused("flipped", flipped(_GOOD, len(_GOOD) // 2), "bad-checksum", "a bit is flipped", manifest_path(_GOOD))
    yield refused("other-digest", _GOOD, "bad-checksum", "the name has another digest", manifest_path(_GOOD + b"\0"))
    # The stream format has the same messages, but not the frame of the file format.
    start = 8
    yield refused("stream", _GOOD[start:], "bad-magic", "Arrow's stream format, not its file format")


def _contradictions() -> Iterator[Vector]:
    """Yield files whose first message and footer contain different schemas."""
    for name, good, other in (
        ("schema", b"global_shape", b"global_shapf"),
        ("header", b'"step":1200', b'"step":1201'),
    ):
        assert _GOOD.count(good) == 2
        first = _GOOD.replace(good, other, 1)
        yield refused(f"{name}-in-message", first, "bad-structure", f"the first message has another {name}")
        footer = patched(_GOOD, (_GOOD.rindex(good), other))
        yield refused(f"{name}-in-footer", footer, "bad-structure", f"the footer has another {name}")


def _newer() -> Iterator[Vector]:
    """Yield manifests of newer programs, which break rules of version 1 that a reader must not check first."""
    columns = columns_of(ROWS)
    more: Columns = {**columns, "strides": [None] * len(ROWS)}
    extra = SCHEMA.append(pa.field("strides", pa.int64(), nullable=True))
    feature = header_bytes(reader_features=["a-feature-of-later"], parent=[])
    version = canonical_json({"format": 2})
    version_and_more = {METADATA_KEY: version, b"statistics": b"{}"}
    for name, data, kind in (
        ("column-and-feature", arrow_file(more, feature, extra), "unsupported-feature"),
        ("column-and-version", arrow_file(more, version, extra), "unsupported-version"),
        ("batches-and-feature", arrow_file(columns, feature, batches=2), "unsupported-feature"),
        ("no-batch-and-version", arrow_file(columns, version, batches=0), "unsupported-version"),
        ("metadata-and-version", arrow_file(columns, b"", metadata=version_and_more), "unsupported-version"),
        ("compressed-and-feature", arrow_file(columns, feature, options=_LZ4), "unsupported-feature"),
    ):
        yield refused(f"newer-{name}", data, kind, "version and features are checked before any other rule")


_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


def _schemas() -> Iterator[Vector]:
    columns, header = columns_of(ROWS), header_bytes()

    def replaced(name: str, field: pa.Field) -> pa.Schema:
        return SCHEMA.set(SCHEMA.get_field_index(name), field)

    backwards = pa.schema(list(SCHEMA)[::-1])
    extra = SCHEMA.append(pa.field("strides", pa.int64(), nullable=True))
    more: Columns = {**columns, "strides": [None] * len(ROWS)}
    dictionary = pa.field("dtype", pa.dictionary(pa.int32(), pa.utf8()), nullable=False)
    for name, schema, why in (
        ("column-missing", SCHEMA.remove(SCHEMA.get_field_index("role")), "a column is missing"),
        ("column-order", backwards, "the columns are in another order"),
        ("column-more", extra, "a column that is not in the schema"),
        ("field-metadata", replaced("name", SCHEMA.field("name").with_metadata({"a": "b"})), "metadata of a column"),
        ("item-metadata", replaced("shape", _SHAPE_WITH_METADATA), "metadata of an item"),
        ("nullable", replaced("name", pa.field("name", pa.utf8(), nullable=True)), "a column that may be null"),
        ("int32", replaced("nbytes", pa.field("nbytes", pa.int32(), nullable=False)), "lengths of 32 bits"),
        ("large-utf8", replaced("name", pa.field("name", pa.large_utf8(), nullable=False)), "another string type"),
        (
            "item-nullable",
            replaced("shape", pa.field("shape", pa.list_(pa.int64()), nullable=False)),
            "items may be null",
        ),
        ("dictionary", replaced("dtype", dictionary), "a column in dictionary encoding"),
    ):
        yield refused(f"schema-{name}", arrow_file(more, header, schema), "bad-structure", why)
    for codec in ("lz4", "zstd"):
        options = pa.ipc.IpcWriteOptions(compression=codec)
        yield refused(
            f"compressed-{codec}", arrow_file(columns, header, options=options), "bad-structure", "a compressed body"
        )
    yield refused("no-batch", arrow_file(columns, header, batches=0), "bad-structure", "no record batch")
    yield refused("two-batches", arrow_file(columns, header, batches=2), "bad-structure", "two record batches")
    yield refused("metadata-none", arrow_file(columns, header, metadata={}), "bad-structure", "no header at all")
    both = {METADATA_KEY: header, b"pandas": b"{}"}
    yield refused("metadata-more", arrow_file(columns, header, metadata=both), "bad-structure", "a second entry")
    twice = pa.KeyValueMetadata([(METADATA_KEY, header), (METADATA_KEY, header_bytes(step=1201))])
    yield refused("metadata-twice", arrow_file(columns, header, metadata=twice), "bad-structure", "two headers")
    other = {b"Asymcheck": header}
    yield refused("metadata-key", arrow_file(columns, header, metadata=other), "bad-structure", "another key")


def _paths() -> Iterator[Vector]:
    path = manifest_path(_GOOD)
    name = ManifestName(0, 1, digest(_GOOD))
    for what, other in (
        ("run", path.replace("gpt2-run1", "gpt2-run2")),
        ("generation", path.replace("/00000003-", "/00000004-")),
        ("step", path.replace("-000000001200-", "-000000001201-")),
        ("save-id", path.replace(HEADER.ref.save_id.hex(), fixed_bytes("another save", 16).hex())),
        ("rank", path.replace(str(name), str(dataclasses.replace(name, rank=1, world_size=2)))),
        ("world-size", path.replace(str(name), str(dataclasses.replace(name, world_size=2)))),
    ):
        assert other != path
        yield refused(f"path-{what}", _GOOD, "bad-structure", f"the header's {what} is not that of the path", other)


def _row_file(changes: Mapping[str, object], row: int = 0) -> bytes:
    """Return a manifest in which some values of one row are replaced."""
    columns = columns_of(ROWS)
    for name, value in changes.items():
        columns[name][row] = value
    return arrow_file(columns, header_bytes())


def _nulls() -> Iterator[Vector]:
    for name in SCHEMA.names:
        if not SCHEMA.field(name).nullable:
            yield refused(f"null-{name}", _row_file({name: None}), "bad-structure", f"{name} is null")
    for name in ("aliases", "shape", "global_shape", "offset"):
        yield refused(f"null-in-{name}", _row_file({name: [None, None]}), "bad-structure", f"an item of {name} is null")
    good = columns_of(ROWS)["extents"][0]
    assert isinstance(good, list)
    yield refused("null-extent", _row_file({"extents": [None, *good[1:]]}), "bad-structure", "an extent is null")
    for key in good[0]:
        extents = [{**good[0], key: None}, *good[1:]]
        yield refused(
            f"null-extent-{key}", _row_file({"extents": extents}), "bad-structure", f"an extent's {key} is null"
        )


def _shapes() -> Iterator[Vector]:
    ones = [1] * 65
    large = [1 << 62, 4, 1]
    for name, changes, why in (
        ("dimensions-differ", {"offset": [0]}, "a shape of 2 dimensions and an offset of 1"),
        ("global-differs", {"global_shape": [40]}, "a shape of 2 dimensions and a global shape of 1"),
        ("shape-negative", {"shape": [-40, -64]}, "negative extents whose product is right"),
        ("offset-negative", {"offset": [-1, 0]}, "a negative offset"),
        ("outside", {"offset": [1, 0]}, "the piece ends beyond the whole tensor"),
        ("outside-overflow", {"offset": [(1 << 63) - 1, 0]}, "offset + shape is beyond 2^63"),
        ("larger-than-whole", {"global_shape": [40, 63]}, "the piece is larger than the whole tensor"),
        ("nbytes", {"nbytes": 10236}, "nbytes is not the product of the shape"),
        ("nbytes-negative", {"nbytes": -10240}, "negative nbytes"),
        (
            "product-overflow",
            {"shape": large, "global_shape": large, "offset": [0, 0, 0]},
            "a product of 2^64 elements",
        ),
        ("dimensions-65", {"shape": ones, "global_shape": ones, "offset": [0] * 65}, "65 dimensions"),
        ("dtype", {"dtype": "float128"}, "a dtype that the registry lacks"),
        ("dtype-case", {"dtype": "Float32"}, "a dtype in another spelling"),
        ("role", {"role": "bias"}, "a role that the registry lacks"),
    ):
        yield refused(f"row-{name}", _row_file(changes), "bad-structure", why)
    # Dimensions of 2^62, 40,000 times: a reader that multiplies before it counts takes minutes.
    many = [1 << 62] * 40_000
    data = _row_file({"shape": many, "global_shape": many, "offset": [0] * len(many)})
    yield refused("row-dimensions-many", data, "bad-structure", "40 000 dimensions of 2^62")


def _inline() -> Iterator[Vector]:
    data = b"\0\0\x80\x3f"
    long = bytes(4100)
    good = columns_of(ROWS)["extents"][0]
    one = {"shape": [1], "global_shape": [1], "offset": [0]}
    for name, changes, why in (
        ("digest", {"inline_digest": digest(b"other")}, "inline_digest is that of other bytes"),
        ("no-digest", {"inline_digest": None}, "inline bytes without a digest"),
        ("short", {"inline": data[:3], "inline_digest": digest(data[:3])}, "3 inline bytes for 4"),
        ("long", {"inline": data + b"\0", "inline_digest": digest(data + b"\0")}, "5 inline bytes for 4"),
        ("and-extents", {"extents": [{**good[0], "offset": 0, "length": 4}]}, "inline bytes and extents"),  # type: ignore[index]  # columns are untyped
        ("neither", {"inline": None, "inline_digest": None}, "4 bytes, neither inline nor in extents"),
        ("null-but-digest", {"inline": None}, "inline_digest where inline is null"),
    ):
        yield refused(f"inline-{name}", _row_file(changes, row=3), "bad-structure", why)
    both = _row_file({"inline_digest": digest(data)})
    yield refused("inline-digest-and-extents", both, "bad-structure", "inline_digest where the bytes lie in extents")
    limit = {**{key: [1025] if key != "offset" else [0] for key in one}, "nbytes": 4100}
    beyond = {**limit, "inline": long, "inline_digest": digest(long)}
    yield refused("inline-limit", _row_file(beyond, row=3), "limit-exceeded", "4100 inline bytes")
    empty = {"shape": [0], "global_shape": [0], "offset": [0], "nbytes": 0, "inline": None, "inline_digest": None}
    yield refused(
        "inline-none-for-empty", _row_file(empty, row=3), "bad-structure", "an empty tensor that is not inline"
    )


def _extents() -> Iterator[Vector]:
    good = columns_of(ROWS)["extents"][0]
    assert isinstance(good, list)
    first, second, third = good
    other = {**third, "digest": partition_digest("longer", 4096), "partition_length": 4096}
    for name, extents, why in (
        ("sum-short", [first, second], "the extents have fewer bytes than the tensor"),
        ("sum-long", [first, second, {**other, "length": 2049}], "the extents have more bytes than the tensor"),
        ("none", [], "no extents and no inline bytes"),
        ("length-0", [first, second, third, {**third, "length": 0}], "an extent of no bytes"),
        (
            "length-negative",
            [first, second, other, {**other, "length": 2048}, {**other, "length": -2048}],
            "a negative length",
        ),
        ("offset-negative", [{**first, "offset": -1}, second, third], "a negative offset"),
        ("outside", [{**first, "offset": 1}, second, third], "an extent ends beyond its partition"),
        ("outside-overflow", [{**first, "offset": (1 << 63) - 1}, second, third], "offset + length is beyond 2^63"),
        ("two-lengths", [first, {**first, "partition_length": 8192}, third], "one partition with two lengths"),
    ):
        yield refused(f"extents-{name}", _row_file({"extents": extents}), "bad-structure", why)
    beyond = _row_file({"extents": [{**first, "partition_length": (1 << 30) + 1}, second, third]})
    why = "a partition of more than 2^30 bytes"
    yield refused("extents-partition-limit", beyond, "limit-exceeded", why, also="bad-structure")
    across = [{**first, "length": 512, "partition_length": 4097}]
    data = _row_file({"extents": across}, row=2)
    yield refused("extents-two-lengths-across", data, "bad-structure", "two rows give one partition two lengths")


def _buffers() -> Iterator[Vector]:
    """Yield files whose buffers contradict each other, which only a full validation detects."""
    names = np.cumsum([0, *(len(row.name) for row in ROWS)]).tolist()
    dimensions = np.cumsum([0, *(len(row.shape) for row in ROWS)]).tolist()

    def offsets(good: list[int], row: int, wrong: int) -> bytes:
        found = _GOOD.index(struct.pack(f"<{len(good)}i", *good))
        return patched(_GOOD, (found + 4 * row, struct.pack("<i", wrong)))

    for name, data, why in (
        ("utf-8", _GOOD.replace(b"model.h.0.weight", b"model.h.0.w\xffight"), "a name that is not UTF-8"),
        ("offsets-fall", offsets(names, 2, names[1] - 1), "offsets of names that fall"),
        ("offsets-beyond", offsets(names, 4, 1 << 30), "an offset beyond the names"),
        ("offsets-negative", offsets(names, 1, -1), "a negative offset of a name"),
        ("list-offsets-fall", offsets(dimensions, 2, dimensions[1] - 1), "offsets of shapes that fall"),
        ("list-offsets-beyond", offsets(dimensions, 4, 1 << 30), "a shape that ends beyond all dimensions"),
        ("list-offsets-negative", offsets(dimensions, 1, -1), "a shape with a negative offset"),
    ):
        assert data != _GOOD
        yield refused(f"arrow-{name}", data, "bad-structure", why)
