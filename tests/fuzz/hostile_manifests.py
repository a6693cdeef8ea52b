"""Hostile manifests, each of which tries to mislead a reader in one way."""

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from asymcheck.format.digest import digest
from asymcheck.format.manifest import METADATA_KEY, SCHEMA, Extent, TensorRow
from tests.fuzz import trees
from tests.fuzz.manifests import HEADER, ROWS, buffer_places, parts_of, rebuilt, row, with_header
from tests.fuzz.mutate import nested
from tools.manifest_files import encode_manifest

BOMB_BYTES = 256 << 20


def _valid() -> bytes:
    return encode_manifest(HEADER, ROWS)


def _columns() -> Iterator[tuple[str, bytes]]:
    schema, batch = parts_of(_valid())

    def made(arrays: list[pa.Array], fields: list[pa.Field]) -> bytes:
        other = pa.schema(fields, metadata=schema.metadata)
        return rebuilt(other, [pa.RecordBatch.from_arrays(arrays, schema=other)])

    names, arrays, fields = list(SCHEMA.names), list(batch.columns), list(schema)
    yield "column missing", made(arrays[:-1], fields[:-1])
    yield "column more", made([*arrays, arrays[0]], [*fields, pa.field("more", pa.utf8(), nullable=False)])
    yield "column twice", made([*arrays, arrays[0]], [*fields, fields[0]])
    yield "columns in another order", made(arrays[::-1], fields[::-1])
    yield "no columns", made([], [])
    for name, kind in (
        ("nbytes", pa.int32()),
        ("nbytes", pa.uint64()),
        ("nbytes", pa.float64()),
        ("name", pa.large_utf8()),
        ("name", pa.binary()),
        ("name", pa.dictionary(pa.int8(), pa.utf8())),
        ("dtype", pa.string_view()),
        ("shape", pa.list_(pa.int32())),
        ("shape", pa.large_list(pa.int64())),
        ("inline", pa.large_binary()),
        ("inline_digest", pa.binary()),
    ):
        place = names.index(name)
        values = pa.array(arrays[place].to_pylist(), type=kind)
        field = pa.field(name, kind, nullable=fields[place].nullable)
        changed = [*arrays[:place], values, *arrays[place + 1 :]], [*fields[:place], field, *fields[place + 1 :]]
        yield f"{name} as {kind}", made(*changed)
    for name in ("name", "shape", "nbytes", "extents"):
        place = names.index(name)
        field = fields[place].with_nullable(True)
        yield f"{name} may be null", made(arrays, [*fields[:place], field, *fields[place + 1 :]])
    for name in (name for name in names if not SCHEMA.field(name).nullable):
        place = names.index(name)
        values = pa.array([None, *arrays[place].to_pylist()[1:]], type=fields[place].type)
        yield f"null in {name}", made([*arrays[:place], values, *arrays[place + 1 :]], fields)
    for name, item in (("shape", [None, 20]), ("aliases", [None])):
        place = names.index(name)
        values = pa.array([item, *arrays[place].to_pylist()[1:]], type=pa.list_(fields[place].type.value_type))
        yield (
            f"null within {name}",
            made([*arrays[:place], values.cast(fields[place].type), *arrays[place + 1 :]], fields),
        )
    place = names.index("name")
    field = pa.field("name", pa.binary(), nullable=False, metadata={b"ARROW:extension:name": b"arrow.json"})
    yield (
        "an extension type",
        made([*arrays[:place], arrays[place].cast(pa.binary()), *arrays[place + 1 :]], [field, *fields[1:]]),
    )


def _batches() -> Iterator[tuple[str, bytes]]:
    schema, batch = parts_of(_valid())
    yield "two batches", rebuilt(schema, [batch, batch])
    yield "no batch", rebuilt(schema, [])
    yield "an empty batch more", rebuilt(schema, [batch, batch.slice(0, 0)])
    for codec in ("zstd", "lz4"):
        yield f"{codec} body", rebuilt(schema, [batch], pa.ipc.IpcWriteOptions(compression=codec))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    yield "a stream", sink.getvalue().to_pybytes()
    yield "a stream behind the magic", b"ARROW1\0\0" + sink.getvalue().to_pybytes()


def _bombs() -> Iterator[tuple[str, bytes]]:
    schema, _ = parts_of(_valid())
    size = BOMB_BYTES
    big = dataclasses.replace(row("bomb", (4096,), "uint8"), name="b" * 10)
    data = encode_manifest(dataclasses.replace(HEADER, tree=["T", 0]), [big])
    schema, batch = parts_of(data)
    place = SCHEMA.names.index("inline")
    offsets = pa.py_buffer(struct.pack("<ii", 0, size))
    zeros = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(np.zeros(size, dtype=np.uint8))])
    arrays = [*batch.columns[:place], zeros, *batch.columns[place + 1 :]]
    bomb = pa.RecordBatch.from_arrays(arrays, schema=schema)
    for codec in ("zstd", "lz4"):
        yield f"{codec} bomb", rebuilt(schema, [bomb], pa.ipc.IpcWriteOptions(compression=codec))
    small = rebuilt(schema, [batch], pa.ipc.IpcWriteOptions(compression="zstd"))
    claim = (1 << 40).to_bytes(8, "little")
    for length in (batch.column(place).buffers()[2].size, 8, 16):
        yield f"zstd body of {length} that claims a TiB", small.replace(struct.pack("<q", length), claim)


def _buffers() -> Iterator[tuple[str, bytes]]:
    """Yield manifests with each offset and length in the body changed."""
    data = _valid()
    for number, (start, size) in enumerate(buffer_places(data)):
        for place in {start, start + 4, start + size - 4}:
            for value in (-1, -(1 << 31), (1 << 31) - 1, 1 << 20):
                changed = data[:place] + struct.pack("<i", value) + data[place + 4 :]
                if size >= 4 and start <= place <= start + size - 4 and changed != data:
                    yield f"buffer {number}, byte {place - start}: {value}", changed
    without = encode_manifest(dataclasses.replace(HEADER, tree=["l", []]), [])
    for number, (start, _) in enumerate(buffer_places(without)):
        for value in (-1, (1 << 31) - 1, 1 << 16):
            yield (
                f"no rows, buffer {number}: {value}",
                without[:start] + struct.pack("<i", value) + without[start + 4 :],
            )


def _messages() -> Iterator[tuple[str, bytes]]:
    """Yield manifests with changed numbers in the flatbuffers: rows, lengths, and offsets in the footer."""
    data = _valid()
    rows = struct.pack("<q", len(ROWS))
    ends = {"rows": rows, "a buffer of 28": struct.pack("<q", 28), "a buffer of 48": struct.pack("<q", 48)}
    for what, old in ends.items():
        place = data.find(old)
        while place >= 0:
            for value in (-1, 1 << 40, (1 << 63) - 1, 5, 7):
                yield f"{what} at {place}: {value}", data[:place] + struct.pack("<q", value) + data[place + 8 :]
            place = data.find(old, place + 1)
    footer = int.from_bytes(data[-10:-6], "little")
    yield "no footer", data[: -10 - footer]
    yield "a footer of no length", data[:-10] + bytes(4) + b"ARROW1"
    yield "a footer longer than the file", data[:-10] + struct.pack("<i", len(data)) + b"ARROW1"
    yield "a footer of negative length", data[:-10] + struct.pack("<i", -1) + b"ARROW1"
    yield "the footer of another manifest", data[: -10 - footer] + with_header(data, _text(number=1))[-10 - footer :]
    yield "bytes behind the footer", data + b"\0"
    yield "no magic at the end", data[:-6] + b"arrow1"
    yield "no magic at the start", b"ARROW2" + data[6:]
    yield "nothing", b""
    yield "the magic alone", b"ARROW1\0\0"
    yield "both magics", b"ARROW1\0\0ARROW1"


def _text(**changes: object) -> Callable[[bytes], bytes]:
    def make(text: bytes) -> bytes:
        return json.dumps({**json.loads(text), **changes}).encode()

    return make


def _raw(text: bytes) -> Callable[[bytes], bytes]:
    return lambda _: text


def _headers() -> Iterator[tuple[str, bytes]]:
    data = _valid()
    deep = b"[" * 100_000 + b"]" * 100_000
    for name, text in {
        "empty": b"",
        "no JSON": b"{",
        "a list": b"[]",
        "no UTF-8": b'{"format":1,"run":"\xff"}',
        "a million brackets": b"[" * 1_000_000,
        "deep": deep,
        "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "an integer of 100000 digits": b'{"format":' + b"1" * 100_000 + b"}",
        "a million keys": b"{" + b",".join(b'"%d":0' % number for number in range(200_000)) + b"}",
        "the same key twice": b'{"format":1,"format":1}',
        "NaN": b'{"format":NaN}',
    }.items():
        yield f"header: {name}", with_header(data, _raw(text))
    yield "header: UTF-16", with_header(data, lambda text: text.decode().encode("utf-16"))
    yield "header: a byte order mark", with_header(data, lambda text: b"\xef\xbb\xbf" + text)
    yield "header: a key of its own twice", with_header(data, lambda text: text.replace(b"{", b'{"rank":1,', 1))
    yield "header: no entry", with_header(data, lambda _: {})
    yield "header: two entries", with_header(data, lambda text: {METADATA_KEY: text, b"other": b""})
    yield "header: another key", with_header(data, lambda text: {b"pandas": text})
    for key, value in (
        ("format", True),
        ("format", 1.0),
        ("format", -1),
        ("reader_features", None),
        ("run", "../../etc"),
        ("generation", 0),
        ("generation", True),
        ("step", -1),
        ("step", 10**12),
        ("step", 10**400),
        ("save_id", "AB" * 16),
        ("save_id", " " + "0" * 31),
        ("rank", 2),
        ("world_size", 10**6),
        ("parent", []),
        ("created_ns", 1 << 64),
        ("metrics", {"a": "1"}),
        ("metrics", {"a": True}),
        ("metrics", {str(number): 0 for number in range(257)}),
        ("plan", {"number": 0}),
        ("packs", ""),
        ("packs", {"0" * 32: 1}),
        ("packs", ["0" * 31]),
    ):
        yield f"header: {key} {str(value)[:30]}", with_header(data, _text(**{key: value}))
    yield "header: a metric beyond binary64", with_header(data, lambda text: text.replace(b"3.25", b"1e999"))
    yield "header: a metric of 400 digits", with_header(data, lambda text: text.replace(b"3.25", b"9" * 400))


def _trees() -> Iterator[tuple[str, bytes]]:
    data = encode_manifest(HEADER, ROWS[: trees.ROWS])
    good = ["l", [["T", number] for number in range(trees.ROWS)]]
    for name, tree in {
        "one level too deep": trees.depth(65, "l"),
        "one level too deep in metadata": ["l", [good, ["m", [], nested(63, "l")]]],
        "a row twice and one not at all": ["l", [["T", 0], ["T", 0], ["T", 1]]],
        "a row that is not there": ["l", [good, ["T", 3]]],
        "a negative row": ["l", [good, ["T", -1]]],
        "a row that is true": ["l", [good, ["T", True]]],
        "a key twice": ["d", [["a", good], ["a", 0]]],
        "a key twice, written differently": ["d", [[1 << 53, good], [["i", str(1 << 53)], 0]]],
        "a key that is a list": ["d", [[["l", []], good]]],
        "an integer with zeros in front": ["l", [good, ["i", "0" * 50 + "9" * 20]]],
        "an integer in other digits": ["l", [good, ["i", "\uff11" * 20]]],
        "a small integer written as a large one": ["l", [good, ["i", "5"]]],
        "no bytes": ["l", [good, ["b", None]]],
        "bytes with bits over": ["l", [good, ["b", "QR=="]]],
        "a size of 2^63": ["l", [good, ["z", [["i", str(1 << 63)]]]]],
        "upper-case digits": ["l", [good, ["f", "3FF8000000000000"]]],
        "a scalar of an unknown dtype": ["l", [good, ["n", "float99", "00"]]],
        "an unknown node": ["l", [good, ["q", 1]]],
        "an object": {"l": [good]},
        "a fraction": ["l", [good, 1.5]],
    }.items():
        yield f"tree: {name}", with_header(data, _text(tree=tree))
    # Nest as deep as the JSON parser allows, which is limited by Python's stack.
    for levels in (*range(60, 450, 30), *range(700, 1000, 6)):
        for begin, end in ((b'["l",[', b"]]"), (b"[", b"]"), (b'["?",[', b"]]")):
            # Parse also when Python's stack is already deep.
            text = b'["l",[' * (levels % 61) + begin * levels + b"0" + end * levels + b"]]" * (levels % 61)
            marked = _text(tree="HERE")
            yield (
                f"tree: {levels} levels of {begin!r}",
                with_header(data, lambda old, text=text, marked=marked: marked(old).replace(b'"HERE"', text)),
            )


def _rows() -> Iterator[tuple[str, bytes]]:
    one = Extent(ROWS[0].extents[0].digest, 0, 800, 1300)
    good = ROWS[0]

    def made(*rows: TensorRow) -> bytes:
        return encode_manifest(dataclasses.replace(HEADER, tree=["l", [["T", n] for n in range(len(rows))]]), rows)

    def shaped(shape: tuple[int, ...], nbytes: int) -> bytes:
        changed = dataclasses.replace(good, shape=shape, global_shape=shape, offset=(0,) * len(shape), nbytes=nbytes)
        return made(dataclasses.replace(changed, extents=(dataclasses.replace(one, length=max(nbytes, 1)),)))

    yield "rows: nbytes", made(dataclasses.replace(good, nbytes=801))
    yield "rows: a negative size", shaped((-10, -20), 800)
    yield "rows: 65 dimensions", shaped((1,) * 65, 4)
    yield "rows: 300000 dimensions", shaped((3,) * 300_000, 4)
    yield "rows: a product of 2^64", shaped((1 << 32, 1 << 30), 0)
    yield "rows: a product of 2^63", shaped((1 << 31, 1 << 30), -(1 << 63))
    yield "rows: beyond the whole", made(dataclasses.replace(good, offset=(0, 1)))
    yield "rows: an offset that overflows", made(dataclasses.replace(good, offset=(0, (1 << 63) - 1)))
    yield "rows: fewer dimensions of the whole", made(dataclasses.replace(good, global_shape=(10,)))
    yield "rows: an unknown dtype", made(dataclasses.replace(good, dtype="float"))
    yield "rows: an unknown role", made(dataclasses.replace(good, role="gradients" * 1000))
    for name, extents in {
        "none": (),
        "too few bytes": (dataclasses.replace(one, length=799),),
        "too many bytes": (one, dataclasses.replace(one, length=1)),
        "bytes that cancel": (dataclasses.replace(one, length=900), dataclasses.replace(one, length=-100)),
        "an empty one": (one, dataclasses.replace(one, length=0)),
        "a negative offset": (dataclasses.replace(one, offset=-1),),
        "beyond the partition": (dataclasses.replace(one, offset=501),),
        "an offset that overflows": (dataclasses.replace(one, offset=(1 << 63) - 1),),
        "a partition of 2^30 + 1": (dataclasses.replace(one, partition_length=(1 << 30) + 1),),
        "a partition of two lengths": (
            dataclasses.replace(one, length=400),
            Extent(one.digest, 400, 400, 1301),
        ),
    }.items():
        yield f"extents: {name}", made(dataclasses.replace(good, extents=extents))
    huge = Extent(one.digest, 0, 1 << 30, 1 << 30)
    yield "extents: sums that overflow", made(dataclasses.replace(good, nbytes=800, extents=(huge,) * 3))
    inline = row("i", (8,), "uint8")
    for name, changed in {
        "too short": dataclasses.replace(inline, inline=b"1234567"),
        "too long": dataclasses.replace(inline, shape=(4097,), global_shape=(4097,), nbytes=4097, inline=bytes(4097)),
        "and extents": dataclasses.replace(inline, extents=(dataclasses.replace(one, length=8),)),
        "neither": dataclasses.replace(inline, inline=None),
        "neither, and empty": dataclasses.replace(row("e", (0,), "uint8"), inline=None),
    }.items():
        yield f"inline: {name}", made(changed)
    schema, batch = parts_of(made(inline))
    place = SCHEMA.names.index("inline_digest")
    for name, value in (("missing", None), ("of other bytes", digest(b"other"))):
        wrong = pa.array([value], type=pa.binary(16))
        arrays = [*batch.columns[:place], wrong, *batch.columns[place + 1 :]]
        yield f"inline digest {name}", rebuilt(schema, [pa.RecordBatch.from_arrays(arrays, schema=schema)])


FAMILIES: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "columns": _columns,
    "batches": _batches,
    "bombs": _bombs,
    "headers": _headers,
    "trees": _trees,
    "rows": _rows,
}
"""Manifests that must all be refused."""

PERHAPS: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {"buffers": _buffers, "messages": _messages}
"""Manifests of which some have the same meaning, or are valid."""
