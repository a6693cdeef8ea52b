"""Hostile manifests, each of which tries to mislead a reader in one way, in addition to the vectors in format_spec/."""

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from asymcheck.format.manifest import SCHEMA
from tests.fuzz import trees
from tests.fuzz.manifests import HEADER, ROWS, buffer_places, parts_of, rebuilt, row, with_header
from tools.manifest_files import encode_manifest

BOMB_BYTES = 256 << 20


def _valid() -> bytes:
    return encode_manifest(HEADER, ROWS)


def _files() -> Iterator[tuple[str, bytes]]:
    schema, batch = parts_of(_valid())

    def made(arrays: list[pa.Array], fields: list[pa.Field]) -> bytes:
        other = pa.schema(fields, metadata=schema.metadata)
        return rebuilt(other, [pa.RecordBatch.from_arrays(arrays, schema=other)])

    arrays, fields = list(batch.columns), list(schema)
    yield "a column twice", made([*arrays, arrays[0]], [*fields, fields[0]])
    yield "no columns", made([], [])
    names = pa.field("name", pa.binary(), nullable=False, metadata={b"ARROW:extension:name": b"arrow.json"})
    yield "an extension type", made([arrays[0].cast(pa.binary()), *arrays[1:]], [names, *fields[1:]])
    yield "an empty batch more", rebuilt(schema, [batch, batch.slice(0, 0)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    yield "a stream behind the magic", b"ARROW1\0\0" + sink.getvalue().to_pybytes()
    shape = (1 << 31, 1 << 30)
    changed = dataclasses.replace(ROWS[0], shape=shape, global_shape=shape, offset=(0, 0), nbytes=-(1 << 63))
    header = dataclasses.replace(HEADER, tree=["T", 0])
    yield "a product of 2^63", encode_manifest(header, [changed])
    huge = (dataclasses.replace(ROWS[0].extents[0], length=1 << 30, partition_length=1 << 30),) * 3
    yield "sums that overflow", encode_manifest(header, [dataclasses.replace(ROWS[0], extents=huge)])


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


def _headers() -> Iterator[tuple[str, bytes]]:
    data = _valid()
    deep = b"[" * 100_000 + b"]" * 100_000
    for name, text in {
        "a million brackets": b"[" * 1_000_000,
        "deep": deep,
        "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "an integer of 100000 digits": b'{"format":' + b"1" * 100_000 + b"}",
        "a million keys": b"{" + b",".join(b'"%d":0' % number for number in range(200_000)) + b"}",
    }.items():
        yield f"header: {name}", with_header(data, lambda _, text=text: text)
    for key, value in (("format", 1.0), ("reader_features", None), ("generation", True), ("step", 10**400)):
        yield f"header: {key} {str(value)[:30]}", with_header(data, _text(**{key: value}))
    yield "header: a metric beyond binary64", with_header(data, lambda text: text.replace(b"3.25", b"1e999"))


def _trees() -> Iterator[tuple[str, bytes]]:
    data = encode_manifest(HEADER, ROWS[: trees.ROWS])
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


FAMILIES: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "files": _files,
    "bombs": _bombs,
    "headers": _headers,
    "trees": _trees,
}
"""Manifests that must all be refused."""

PERHAPS: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {"buffers": _buffers, "messages": _messages}
"""Manifests of which some have the same meaning, or are valid."""
