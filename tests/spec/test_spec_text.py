"""Test that SPEC.md, registry.json, vectors and code agree."""

import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from asymcheck import errors
from asymcheck.codecs import container, derived
from asymcheck.format import catalog_records, frame, layout, pack, registry, ring_records, tree, typed_value
from asymcheck.format.digest import digest, sum8
from asymcheck.format.manifest import SCHEMA
from asymcheck.format.record import RECORD_BYTES, encode_record
from asymcheck.storage.nvme import catalog as lmdb_catalog
from asymcheck.types import CheckpointRef, Digest, Location, PackId, SaveId
from tests.spec import spec_text
from tests.spec.corpus import FORMAT_SPEC, Vector, vectors
from tests.spec.spec_text import code, sections, table, tables

REPOSITORY = FORMAT_SPEC.parent

TABLES = {
    *("name_grammar", "record_block", "descriptor_record", "head_record", "frame_header", "pack_header"),
    *("pack_index_header", "pack_index_entry", "manifest_columns", "manifest_header", "tree_nodes"),
    "manifest_header_of_a_part",
    *("catalog_databases", "catalog_partition", "catalog_pack", "invariants", "error_kinds", "missing_kinds"),
    *("registry_magics", "registry_digests", "registry_frame_kinds", "registry_codecs", "registry_pack_states"),
    *(
        "registry_dtypes",
        "registry_value_types",
        "registry_roles",
        "registry_limits",
        "value_parameters",
        "ring_layout",
        "ring_record",
        "ring_capture",
    ),
    *("planes_header", "planes_segment", "planes_encodings", "derived_payload"),
}

LETTERS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}

STRUCTS = {
    "frame_header": frame.DESCRIPTOR.format + frame.PLACEMENT.format.removeprefix("<"),
    "pack_header": pack.PACK_HEADER.format,
    "pack_index_header": pack.INDEX_HEADER.format,
    "catalog_partition": catalog_records.PARTITION.format,
    "catalog_pack": catalog_records.PACK.format,
    "ring_capture": ring_records._ENTRY.format,
    "planes_header": container.HEADER.format,
    "derived_payload": derived.SOURCE.format,
}

DTYPES = {"pack_index_entry": pack.ENTRY_DTYPE, "planes_segment": container.SEGMENT_DTYPE}


def test_every_table_is_known() -> None:
    """Test that every tagged table is compared in this module."""
    assert set(tables()) == TABLES
    assert spec_text.text().count("<!-- table:") == len(TABLES)


def fields(name: str) -> list[tuple[int, int, str, str]]:
    """Return the rows of a binary table: offset, size, type, field."""
    return [(int(row["offset"]), int(row["size"]), row["type"], row["field"]) for row in table(name)]


@pytest.mark.parametrize("name", [*STRUCTS, *DTYPES])
def test_offsets_and_sizes_add_up(name: str) -> None:
    """Test that each field begins at the end of the previous one, and that integers have the size of their type."""
    end = 0
    for offset, size, kind, field in fields(name):
        assert offset == end, field
        assert kind == "bytes" or SIZES[kind] == size, field
        end += size
    assert len({field for *_, field in fields(name)}) == len(fields(name))


@pytest.mark.parametrize(("name", "form"), STRUCTS.items(), ids=STRUCTS)
def test_the_tables_are_the_structs(name: str, form: str) -> None:
    """Test sizes, integer types, order and little-endian byte order of the struct formats."""
    assert form.startswith("<")
    letters = re.findall(r"(\d*)([a-zA-Z])", form)
    assert [struct.calcsize(f"<{count}{letter}") for count, letter in letters] == [
        size for _, size, _, _ in fields(name)
    ]
    for (_, letter), (_, _, kind, field) in zip(letters, fields(name), strict=True):
        # Four reserved bytes may be unpacked as one integer, which must also be zero.
        assert letter == LETTERS.get(kind, "s") or field.startswith("reserved"), field


@pytest.mark.parametrize(("table_name", "dtype"), DTYPES.items(), ids=DTYPES)
def test_tables_of_rows_are_the_dtypes(table_name: str, dtype: np.dtype[np.void]) -> None:
    """Test names, offsets and types of the numpy dtypes of tables in files."""
    assert dtype.fields is not None
    found = [(dtype.fields[name][1], dtype.fields[name][0].itemsize, name) for name in dtype.names or ()]
    assert found == [(offset, size, field) for offset, size, _, field in fields(table_name)]
    kinds = {
        name: "bytes" if dtype.fields[name][0].kind == "V" else f"u{8 * dtype.fields[name][0].itemsize}"
        for name in dtype.names or ()
    }
    assert kinds == {field: kind for _, _, kind, field in fields(table_name)}


def parse(name: str, data: bytes) -> dict[str, object]:
    """Read a binary structure with only its table of SPEC.md."""
    found: dict[str, object] = {}
    for offset, size, kind, field in fields(name):
        raw = data[offset : offset + size]
        found[field] = raw if kind == "bytes" else int.from_bytes(raw, "little")
    return found


def plain(value: object) -> object:
    """Return a field as the vectors write it: bytes in hexadecimal, text unchanged."""
    if not isinstance(value, bytes):
        return value
    text = value.rstrip(b"\0")
    return text.decode() if text.startswith((b"ASYM", b"asymcheck")) else value.hex()


def _structures() -> Iterator[tuple[str, bytes, dict[str, object]]]:
    """Return every binary structure of the vectors: its table, its bytes, and the fields in the JSON."""
    for vector in vectors("frame"):
        yield "frame_header", vector.data, vector.facts["value"]
    for vector in vectors("pack"):
        data, value = vector.data, vector.facts["value"]
        header = value["header"]
        yield "pack_header", data, header
        start = header["index_offset"]
        index = {"magic": "ASYMINDX", "format": 1, "entry_size": 64, "entry_count": len(value["entries"])}
        yield "pack_index_header", data[start:], {**index, "pack_id": header["pack_id"]}
        for number, entry in enumerate(value["entries"]):
            shift = entry["payload_offset"] - 4096 if entry["stored_length"] >= 65536 else 0
            yield "pack_index_entry", data[start + 64 + 64 * number :], {**entry, "payload_shift": shift}
            yield "frame_header", data[entry["offset"] :], entry
    for vector in vectors("codec"):
        for entry in vector.facts["value"]["entries"]:
            yield "frame_header", vector.data[entry["offset"] :], entry
            payload = vector.data[entry["offset"] + entry["payload_offset"] :]
            if "tables" in entry:
                yield "planes_header", payload, entry["tables"]
            if "source" in entry:
                yield "derived_payload", payload, entry["source"]
    for vector in vectors("catalog"):
        name = {"partitions": "catalog_partition", "packs": "catalog_pack"}.get(vector.facts["database"])
        if name and vector.facts["value"]:
            yield name, vector.data, vector.facts["value"]
    for vector in vectors("ring"):
        for capture in vector.facts["value"]["captures"]:
            yield "ring_capture", vector.data[8192 + 64 * capture["number"] :], capture


def test_the_tables_read_the_vectors() -> None:
    """Test that a reader with only the tables finds the fields of the JSON in every vector, and zeros between."""
    seen = set()
    for name, data, value in _structures():
        found = {field: plain(item) for field, item in parse(name, data).items()}
        named = value.keys() & found.keys()
        assert {field: found[field] for field in named} == {field: value[field] for field in named}
        others = {field for field in found.keys() - named if not field.startswith("reserved")}
        assert others <= {"content_sum", "placement_sum", "header_sum", "entries_sum", "entry_sum"}, name
        for field, item in parse(name, data).items():
            assert not field.startswith("reserved") or not item or not any(item), field  # type: ignore[call-overload]  # bytes, or a zero
        seen.add(name)
    assert seen == {*STRUCTS, "pack_index_entry"}


def test_no_two_fields_are_confused() -> None:
    """Test different values in all fields: each is found under its own name."""
    place, base, key = PackId(b"\1" * 16), b"\2" * 16, b"\3" * 16
    described = frame.FrameDescriptor(Digest(b"\4" * 16), 5, 6, b"\7" * 8, 8, 9, 10, base, b"\x0b" * 12)
    found = parse("frame_header", frame.encode_header(described, place, 12))
    expected = {**dataclasses.asdict(described), "place_id": place, "sequence": 12}
    del expected["payload_shift"]
    assert {field: found[field] for field in expected} == expected
    header = pack.PackHeader(place, 13, 14, 15, "asymcheck test")
    found = parse("pack_header", pack.encode_pack_header(header))
    assert [found[name] for name in ("pack_id", "frame_count", "index_offset", "created_ns")] == [place, 13, 14, 15]
    assert (found["index_length"], found["pack_length"]) == (header.index_length, header.pack_length)
    shifted = frame.FrameDescriptor(Digest(b"\5" * 16), 5, 70_000, b"\7" * 8, 8, 9, 10, base, payload_shift=28)
    assert parse("frame_header", frame.encode_header(shifted, place, 12))["payload_offset"] == 4096 + 28
    row = np.array([pack.entry_of(shifted, 29)], dtype=pack.ENTRY_DTYPE).tobytes()
    found = parse("pack_index_entry", row)
    entry = {"offset": 29, "stored_length": 70_000, "plain_length": 5, "kind": 8, "codec": 9, "payload_shift": 28}
    assert {field: found[field] for field in entry} == entry
    at = Location(place, 16, 17, 18, 19, 20, 21, base)
    found = parse("catalog_partition", catalog_records.encode_location(key, at))
    assert {field: found[field] for field in dataclasses.asdict(at)} == dataclasses.asdict(at)
    found = parse("catalog_pack", catalog_records.encode_pack_entry(key, 22, 23, 24))
    assert [found[name] for name in ("state", "frame_count", "pack_length")] == [22, 23, 24]
    found = parse("ring_capture", ring_records.encode_entry(ring_records.CaptureEntry(25, SaveId(b"\x1a" * 16), 27)))
    assert [found[name] for name in ("offset", "save_id", "state")] == [25, b"\x1a" * 16, 27]


def test_checksums_cover_the_fields_of_the_tables() -> None:
    """Test each field that is described as sum8 of some bytes, in every vector."""
    checked = set()
    for name, data, _ in _structures():
        for row in table(name):
            covered = re.fullmatch(r"sum8 of bytes (\d+)–(\d+)", row["meaning"])
            if covered:
                value = parse(name, data)[row["field"]]
                assert value == sum8(data[int(covered[1]) : int(covered[2]) + 1]), row["field"]
                checked.add((name, row["field"]))
    assert len(checked) == 5
    assert ("frame_header", "placement_sum") in checked


def test_the_columns_are_the_schema() -> None:
    """Test names, order, types and nullability of the Arrow schema."""
    rows = [(code(row["column"]), row["Arrow type"], row["nullable"] == "yes") for row in table("manifest_columns")]
    found = [(field.name, str(field.type).replace("string", "utf8"), field.nullable) for field in SCHEMA]
    assert rows == found
    assert {row["nullable"] for row in table("manifest_columns")} == {"yes", "no"}


def test_a_ring_begins_as_the_table_says() -> None:
    """Test the order of header, entries and data, and their offsets in the code."""
    rows = [(int(row["offset"]), row["size"], row["field"]) for row in table("ring_layout")]
    entries = ring_records.CAPTURES_MAX * ring_records.ENTRY_BYTES
    assert rows == [
        (0, str(RECORD_BYTES), "header"),
        (ring_records.CAPTURES_OFFSET, str(entries), "captures"),
        (ring_records.DATA_OFFSET, "-", "data"),
    ]
    assert ring_records.CAPTURES_OFFSET == RECORD_BYTES
    assert ring_records.CAPTURES_OFFSET + entries == ring_records.DATA_OFFSET
    assert (
        table("ring_layout")[1]["meaning"] == f"{ring_records.CAPTURES_MAX} entries of {ring_records.ENTRY_BYTES} bytes"
    )
    offset, size, *_ = fields("ring_capture")[-1]
    assert offset + size == ring_records.ENTRY_BYTES
    meaning = next(row["meaning"] for row in table("ring_capture") if row["field"] == "state")
    assert meaning.startswith(f"{ring_records.COMPLETE} complete, {ring_records.DURABLE} durable")


def _types(value: object) -> set[str]:
    """Return the words of the tables for the type of a JSON value."""
    match value:
        case None:
            return {"object or null"}
        case int():
            return {"integer", "node"}
        case str():
            return {"string", "node"}
        case list():
            return {"list of strings", "node"}
    return {"object", "object or null"}


@pytest.mark.parametrize(
    ("name", "vector"),
    [
        ("descriptor_record", Vector("record", "descriptor")),
        ("descriptor_record", Vector("record", "descriptor-remote")),
        ("head_record", Vector("record", "head")),
        ("head_record", Vector("record", "head-from-nothing")),
        ("manifest_header", Vector("manifest", "extents")),
        ("ring_record", Vector("ring", "captures")),
    ],
    ids=str,
)
def test_the_keys_are_those_that_are_written(name: str, vector: Vector) -> None:
    """Test that JSON objects have exactly the documented keys and types."""
    value = vector.facts["value"]
    if name == "manifest_header":
        with pa.ipc.open_file(pa.py_buffer(vector.data)) as reader:
            value = json.loads(reader.schema.metadata[b"asymcheck"])
    elif name == "ring_record":
        value = value["header"]
    rows = {code(row["key"]): row["type"] for row in table(name)}
    optional = {key for key, kind in rows.items() if kind.endswith(", optional")}
    assert set(rows) - optional <= set(value) <= set(rows)
    for key in value:
        assert rows[key].removesuffix(", optional") in _types(value[key]), key


def test_the_keys_of_a_part_of_a_store_are_those_that_are_written() -> None:
    """Test that such a manifest has the keys of both tables."""
    with pa.ipc.open_file(pa.py_buffer(Vector("manifest", "part-of-a-store").data)) as reader:
        value = json.loads(reader.schema.metadata[b"asymcheck"])
    more = {code(row["key"]) for row in table("manifest_header_of_a_part")}
    assert more == {"store_ranks", "elsewhere"}
    always = {code(row["key"]) for row in table("manifest_header") if not row["type"].endswith(", optional")}
    assert always | more == set(value)


def test_record_matches_its_table() -> None:
    """Test that a block built from the table of §A5 equals the written block, twice."""
    assert [int(row["order"]) for row in table("record_block")] == list(range(1, 7))
    value = {"kind": "store", "format": 1, "b": ["\u00e4"]}
    text = b'{"b":["\\u00e4"],"format":1,"kind":"store"}'
    block = text + b"\n" + digest(text).hex().encode() + b"\n"
    block += b" " * (4095 - len(block)) + b"\n"
    assert encode_record(value) == block * 2


def test_the_nodes_are_those_of_the_decoder() -> None:
    """Test the tags of the decoder, and their numbers of arguments."""
    nodes = [row["node"] for row in table("tree_nodes")]
    tags = {match[1] for node in nodes if (match := re.match(r'`\["(\w)"', node))}
    decoder = tree._Decoder(0, bytearray(), None, "")  # type: ignore[arg-type]  # only its table is looked at
    assert tags == set(decoder.kinds)
    assert [node for node in nodes if not node.startswith("`[")] == [
        "`null`, `true`, `false`",
        "a string",
        "an integer n, with absolute value < 2^53",
    ]
    in_vectors = {vector.data[2:3].decode() for vector in vectors("tree") if vector.data.startswith(b'["')}
    assert tags <= in_vectors


def test_parameters_of_typed_values_are_those_of_the_code() -> None:
    """Test that the table of parameters has every type, and the words that the code accepts."""
    words = {
        name: row["parameter"] for row in table("value_parameters") for name in re.findall(r"`([^`]+)`", row["type"])
    }
    assert set(words) == set(registry.VALUE_TYPES)
    for kind, named in (("defaultdict", typed_value.FACTORIES), ("numpy-generator", typed_value.BIT_GENERATORS)):
        assert set(re.findall(r"`(\w+)`", words[kind])) == set(named)
    in_vectors = {json.loads(vector.data)[1] for vector in vectors("tree") if vector.data.startswith(b'["x"')}
    assert in_vectors == set(registry.VALUE_TYPES)


def test_catalog_databases_are_those_of_the_code() -> None:
    """Test the databases, and a vector with an entry of each."""
    names = [code(row["database"]) for row in table("catalog_databases")]
    assert names == list(lmdb_catalog._DATABASES)
    assert {vector.facts["database"] for vector in vectors("catalog")} == set(names)


def test_names_follow_the_grammar() -> None:
    """Test that names built from §A3 are parsed by the code, and that any other number of digits is foreign."""
    grammar = {row["part"]: row["grammar"] for row in table("name_grammar")}
    assert grammar["run"].startswith(f"`{layout._RUN.pattern.removesuffix(chr(92) + 'Z').split(')')[-1]}`")
    run = code(next(row["example"] for row in table("name_grammar") if row["part"] == "run"))
    assert layout.is_run(run)
    digits = {part: int(rule.split()[0]) for part, rule in grammar.items() if part != "run"}
    assert digits == {"generation": 8, "step": 12, "save id, pack id, digest": 32, "rank": 5, "world size": 5}
    for change in (-1, 0, 1):
        for part, count in digits.items():
            size = {**digits, part: count + change}
            generation, step = "1".rjust(size["generation"], "0"), "0" * size["step"]
            rank, world = "0" * size["rank"], "1".rjust(size["world size"], "0")
            name = "a" * size["save id, pack id, digest"]
            parsed = {
                ("generation",): layout.parse_head_name(f"{generation}.head"),
                ("save id, pack id, digest",): layout.parse_pack_name(f"{name}.pack"),
                ("generation", "step", "save id, pack id, digest"): layout.parse_checkpoint_name(
                    f"{generation}-{step}-{name}"
                ),
                ("rank", "world size", "save id, pack id, digest"): layout.parse_manifest_name(
                    f"{rank}-of-{world}-{name}.manifest"
                ),
            }
            for parts, value in parsed.items():
                assert (value is None) == (change != 0 and part in parts), (part, change, parts)


def test_the_layout_is_that_of_the_code() -> None:
    """Test that the figure in §A3 shows the names of the code."""
    picture = spec_text.text().split("### A3. Layout and names")[1].split("```")[1]
    shown = [line.strip().split("  ")[0] for line in picture.splitlines() if line.startswith("  ")]
    assert {path.split("/")[0] for path in shown} == layout.TOP_LEVEL
    ref = CheckpointRef(1, 2, SaveId(bytes(16)))
    words = {"run": "r", "generation": "00000001", "step": f"{2:012d}", "save id": "0" * 32, "pack id": "0" * 32}
    words |= {"rank": "00000", "world size": "00001", "digest": "0" * 32}
    made = {re.sub("<([a-z ]+)>", lambda match: words[match[1]], path) for path in shown if "<" in path or "." in path}
    assert made == {
        layout.DESCRIPTOR_NAME,
        f"heads/r/{layout.head_name(1)}",
        f"manifests/r/{layout.checkpoint_name(ref)}/{layout.ManifestName(0, 1, Digest(bytes(16)))}",
        f"packs/{layout.pack_name(PackId(bytes(16)))}",
        f"packs/{layout.pack_temporary_name(PackId(bytes(16)))}",
        f"pool/{layout.pack_name(PackId(bytes(16)))}",
        f"locks/{layout.lock_name('r')}",
        f"locks/{'0' * 32}.location",
    } | {path for path in shown if path.startswith("catalog")} - {"catalog/"}


def test_error_kinds_are_those_of_the_code() -> None:
    """Test the kinds of the format errors and of the vectors."""
    kinds = {code(row["kind"]) for row in table("error_kinds")}
    below = errors.FormatError.__subclasses__()
    leaves = {leaf.kind for error in below for leaf in (error.__subclasses__() or [error])}
    assert kinds == leaves
    assert kinds == {vector.facts["error_kind"] for vector in vectors("invalid")}
    assert {row["kind beyond it"].strip("`") for row in table("registry_limits")} - {"–"} <= kinds


def test_kinds_of_missing_structures_are_those_of_the_code() -> None:
    """Test that each kind is that of one error of the library."""
    of_code = {error.kind for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "kind")}
    assert {code(row["kind"]) for row in table("missing_kinds")} <= of_code


INVARIANTS = [row["number"] for row in table("invariants")]


def test_invariants_are_numbered() -> None:
    """Test that numbers have no gaps, and that each invariant has its consequence."""
    assert [f"I{number}" for number in range(1, len(INVARIANTS) + 1)] == INVARIANTS
    assert {row["level"] for row in table("invariants")} == {"must", "should"}
    assert all(row["what is lost if it is broken"] for row in table("invariants"))


@pytest.mark.slow(quick=["I6"])
@pytest.mark.parametrize("number", INVARIANTS)
def test_each_invariant_is_checked_and_tested(number: str) -> None:
    """Test that the checker names each invariant at its check, and that a test breaks it."""
    cited = re.compile(rf"\b{number}\b")
    assert cited.search((REPOSITORY / "asymcheck" / "fsck" / "verify.py").read_text("utf-8"))
    tests = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert [path.name for path in tests if cited.search(path.read_text("utf-8"))]


def test_the_text_refers_to_sections_that_exist() -> None:
    """Test every § in the text, in the code and in the tests."""
    own = re.findall(r"§([A-C]?\d+(?:\.\d+)?)", spec_text.text())
    assert len(own) > 20
    sources = [*(REPOSITORY / "asymcheck").rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")]
    named = re.findall(r"SPEC\.md §([A-C]?\d+(?:\.\d+)?)", "\n".join(path.read_text("utf-8") for path in sources))
    assert len(named) > 20
    assert {*own, *named} <= sections()


def test_part_a_has_at_most_8000_words() -> None:
    """Test that a reader can be written from a text of bounded length, which needs no section of Parts B and C."""
    assert spec_text.reading_words() <= 8000


def test_the_algorithm_names_its_sections() -> None:
    """Test that the algorithm has fifteen numbered lines, and that every section that it names exists."""
    lines = spec_text.text().split("### A1.")[1].split("```")[1].strip("\n").splitlines()
    assert [int(line[:2]) for line in lines] == list(range(1, 16))
    named = re.findall(r"\b[A-C]\d+(?:\.\d+)?\b", "\n".join(lines))
    assert len(named) > 10
    assert set(named) <= sections()


def test_the_encodings_of_planes_are_the_code() -> None:
    """Test the numbers of the encodings of planes, and of derived dtypes."""
    rows = [(int(row["encoding"]), row["name"]) for row in table("planes_encodings")]
    assert rows == [(container.RAW, "raw"), (container.ZSTD, "zstd"), (container.CONSTANT, "constant")]
    (dtype,) = (row["meaning"] for row in table("derived_payload") if row["field"] == "dtype")
    assert dtype == ", ".join(f"{number} {name}" for number, name in derived.DTYPES.items())
    (chunks,) = (row["meaning"] for row in table("planes_header") if row["field"] == "chunk_bytes")
    bounds = (container.CHUNK_BYTES_MIN, container.CHUNK_BYTES_MAX)
    assert chunks == "a multiple of {0}, from {0} to {1}".format(*bounds)


def test_prefixes_of_remote_packs() -> None:
    """Test the two examples in the text."""
    assert f"The prefix of rank 0 is `{layout.pack_prefix(0).hex()}`" in spec_text.text()
    assert f"that of rank 8 is `{layout.pack_prefix(8).hex()}`" in spec_text.text()
