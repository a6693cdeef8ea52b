"""Vectors of record files: the store's descriptor and head records (SPEC.md §A5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from asymcheck.format.digest import digest
from asymcheck.format.record import LAYOUTS, Descriptor, HeadRecord, encode_descriptor, encode_head, encode_record
from asymcheck.types import CheckpointRef
from tools.vectors_base import CREATED_NS, WRITER, Vector, fixed_bytes, flipped, invalid, patched, save_id, valid

STORE_ID = fixed_bytes("store", 16)
PARENT = CheckpointRef(2, 1200, save_id("parent"))
HEAD_PATH = "heads/gpt2-run1/00000003.head"
DESCRIPTOR_PATH = "asymcheck.store"

DESCRIPTOR = encode_descriptor(Descriptor(STORE_ID, CREATED_NS, WRITER))
HEAD = encode_head(HeadRecord("gpt2-run1", 3, PARENT, CREATED_NS, WRITER))

Fields = dict[str, object]
_BLOCK = 4096


def fields_of(record: bytes) -> Fields:
    """Return the JSON object of a well-formed record file."""
    fields: Fields = json.loads(record[: record.index(b"\n")])
    return fields


def blocks(text: bytes) -> bytes:
    """Return a record file around any text, canonical JSON or not."""
    body = text + b"\n" + digest(text).hex().encode("ascii") + b"\n"
    return (body.ljust(_BLOCK - 1, b" ") + b"\n") * 2


def _changed(record: bytes, **changes: object) -> bytes:
    return encode_record({**fields_of(record), **changes})


def _without(record: bytes, key: str) -> bytes:
    return encode_record({name: value for name, value in fields_of(record).items() if name != key})


def record_vectors() -> Iterator[Vector]:
    """Yield every vector of a record file."""
    yield from _well_formed()
    yield from _damaged_blocks()
    yield from _not_canonical()
    yield from _bad_descriptors()
    yield from _bad_heads()


def _well_formed() -> Iterator[Vector]:
    def record(name: str, data: bytes, why: str, kind: str = "descriptor", damaged: int = 0) -> Vector:
        path = HEAD_PATH if kind == "head" else DESCRIPTOR_PATH
        intact = data if damaged == 0 or data[:_BLOCK] == DESCRIPTOR[:_BLOCK] else data[_BLOCK:]
        return valid("record", name, data, why, fields_of(intact), record=kind, path=path, damaged_copies=damaged)

    features = Descriptor(STORE_ID, CREATED_NS, WRITER, (), ("a-feature-of-later",))
    longest = _changed(DESCRIPTOR, writer="x" * (4000 - _changed(DESCRIPTOR, writer="").index(b"\n")))
    yield record("descriptor", DESCRIPTOR, "the record that makes a directory a store")
    yield record("descriptor-longest", longest, "exactly 4000 bytes of JSON, the most that a block takes")
    yield record("descriptor-not-ascii", _changed(DESCRIPTOR, writer="Käse \U0001f9c0"), "other characters are escaped")
    yield record("descriptor-writer-feature", encode_descriptor(features), "a reader may ignore writer features")
    yield record("descriptor-extra-key", _changed(DESCRIPTOR, remark=[1, {}]), "keys of later versions are ignored")
    for layout in LAYOUTS:
        changed = encode_descriptor(Descriptor(STORE_ID, CREATED_NS, WRITER, layout=layout))
        yield record(f"descriptor-{layout}", changed, f"the directory has the layout {layout}")
    yield record("descriptor-first-copy-damaged", flipped(DESCRIPTOR, 40), "the second copy is read", damaged=1)
    yield record("descriptor-second-copy-damaged", flipped(DESCRIPTOR, _BLOCK + 40), "the first is read", damaged=1)
    torn = bytes(_BLOCK) + DESCRIPTOR[_BLOCK:]
    yield record("descriptor-first-copy-zero", torn, "a block that was never written is a damaged copy", damaged=1)
    yield record("head", HEAD, "generation 3 continues from a checkpoint of generation 2", "head")
    first = encode_head(HeadRecord("gpt2-run1", 3, None, CREATED_NS, WRITER))
    yield record("head-from-nothing", first, "a generation that continues from no checkpoint", "head")


def _damaged_blocks() -> Iterator[Vector]:
    def both(name: str, change: Callable[[bytes], bytes], why: str, kind: str = "bad-checksum") -> Vector:
        data = change(DESCRIPTOR[:_BLOCK]) + change(DESCRIPTOR[_BLOCK:])
        return invalid("descriptor", name, data, kind, why, path=DESCRIPTOR_PATH)

    text = DESCRIPTOR[: DESCRIPTOR.index(b"\n")]
    end = len(text) + 34
    yield both("empty", lambda _: b"", "a file of 0 bytes", "truncated")
    yield invalid("descriptor", "short", DESCRIPTOR[:-1], "truncated", "8191 bytes", path=DESCRIPTOR_PATH)
    yield invalid("descriptor", "long", DESCRIPTOR + b"\n", "truncated", "8193 bytes", path=DESCRIPTOR_PATH)
    yield both("zero", lambda block: bytes(len(block)), "both blocks are zero")
    yield both("text-flipped", lambda block: flipped(block, 40), "a bit of the JSON is flipped in both copies")
    yield both("digest-flipped", lambda block: flipped(block, len(text) + 5), "a bit of both digests is flipped")
    upper = text + b"\n" + digest(text).hex().upper().encode() + b"\n"
    yield both("digest-upper-case", lambda _: upper.ljust(_BLOCK - 1) + b"\n", "the digest is not in lower case")
    yield both("no-line-feed", lambda block: patched(block, (len(text), b" ")), "no line feed after the JSON")
    yield both("padding-zero", lambda block: patched(block, (end, b"\0")), "the padding is not spaces")
    yield both("last-byte", lambda block: patched(block, (_BLOCK - 1, b" ")), "the last byte is no line feed")
    other = _changed(DESCRIPTOR, store_id=fixed_bytes("another store", 16).hex())
    yield invalid(
        "descriptor",
        "copies-differ",
        DESCRIPTOR[:_BLOCK] + other[_BLOCK:],
        "bad-structure",
        "two intact copies that differ",
        path=DESCRIPTOR_PATH,
    )
    long = text[:-1] + b',"z":"' + b"z" * (4001 - len(text) - 7) + b'"}'
    yield invalid(
        "descriptor", "json-too-long", blocks(long), "bad-checksum", "4001 bytes of JSON", path=DESCRIPTOR_PATH
    )


def _not_canonical() -> Iterator[Vector]:
    text = DESCRIPTOR[: DESCRIPTOR.index(b"\n")]
    fields = fields_of(DESCRIPTOR)
    backwards = json.dumps(dict(sorted(fields.items(), reverse=True)), separators=(",", ":")).encode()
    raw = json.dumps({**fields, "writer": "Käse"}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    for name, changed, why in (
        ("not-json", b"descriptor", "the text is not JSON"),
        ("not-an-object", b"[]", "the JSON is not an object"),
        ("spaces", text.replace(b":", b": "), "spaces after the colons"),
        ("key-order", backwards, "keys are not sorted"),
        ("key-twice", text[:-1] + b',"writer":"x"}', "a key is there twice: two readers could take different values"),
        ("not-escaped", raw, "a character that is not ASCII is not escaped"),
        ("utf-16", text.decode().encode("utf-16-le"), "JSON that is not UTF-8"),
        ("nan", text[:-1] + b',"z":NaN}', "NaN is not JSON"),
        ("fraction", text[:-1] + b',"z":1.5}', "a fraction: canonical JSON has integers only"),
        ("exponent", text[:-1] + b',"z":1e+16}', "an exponent"),
        ("minus-zero", text[:-1] + b',"z":-0}', "the integer 0 with a sign"),
    ):
        # A reader may also report such a block as damaged.
        data = blocks(changed)
        yield invalid("descriptor", name, data, "bad-structure", why, also="bad-checksum", path=DESCRIPTOR_PATH)


def _bad_descriptors() -> Iterator[Vector]:
    for key in fields_of(DESCRIPTOR):
        data = _without(DESCRIPTOR, key)
        yield invalid("descriptor", f"no-{key}", data, "bad-structure", f"{key} is missing", path=DESCRIPTOR_PATH)
    for name, changes, kind, why in (
        ("format-2", {"format": 2}, "unsupported-version", "a newer major version"),
        ("format-0", {"format": 0}, "unsupported-version", "a version that never was"),
        ("format-true", {"format": True}, "bad-structure", "true is not the integer 1"),
        ("format-float", {"format": 1.0}, "bad-structure", "1.0 is not the integer 1"),
        ("kind-head", {"kind": "head"}, "bad-structure", "a record of another kind"),
        ("store-id-upper", {"store_id": STORE_ID.hex().upper()}, "bad-structure", "an id in upper case"),
        ("store-id-short", {"store_id": STORE_ID.hex()[:-1]}, "bad-structure", "an id of 31 digits"),
        ("store-id-list", {"store_id": [1]}, "bad-structure", "an id that is no string"),
        ("created-negative", {"created_ns": -1}, "bad-structure", "a negative time"),
        ("created-too-large", {"created_ns": 1 << 64}, "bad-structure", "a time of more than 64 bits"),
        ("layout-unknown", {"layout": "stores"}, "bad-structure", "a layout that is not of version 1"),
        ("layout-null", {"layout": None}, "bad-structure", "a layout that is no string"),
        ("writer-number", {"writer": 1}, "bad-structure", "a writer that is no string"),
        ("features-object", {"reader_features": {}}, "bad-structure", "features that are no list"),
        ("features-number", {"writer_features": [1]}, "bad-structure", "a feature that is no string"),
        ("reader-feature", {"reader_features": ["a-feature-of-later"]}, "unsupported-feature", "an unknown feature"),
    ):
        yield invalid("descriptor", name, _changed(DESCRIPTOR, **changes), kind, why, path=DESCRIPTOR_PATH)


def _bad_heads() -> Iterator[Vector]:
    parent = fields_of(HEAD)["parent"]
    assert isinstance(parent, dict)
    for key in fields_of(HEAD):
        if key != "parent":
            yield invalid(
                "head", f"no-{key}", _without(HEAD, key), "bad-structure", f"{key} is missing", path=HEAD_PATH
            )
    yield invalid(
        "head", "no-parent", _without(HEAD, "parent"), "bad-structure", "no parent is written as null", path=HEAD_PATH
    )
    for name, changes, kind, why in (
        ("format-2", {"format": 2}, "unsupported-version", "a newer major version"),
        ("kind-store", {"kind": "store"}, "bad-structure", "a record of another kind"),
        ("other-run", {"run": "gpt2-run2"}, "bad-structure", "the record disagrees with its path"),
        ("other-generation", {"generation": 4}, "bad-structure", "the record disagrees with its path"),
        ("generation-0", {"generation": 0, "parent": None}, "bad-structure", "generations count from 1"),
        ("generation-9-digits", {"generation": 10**8}, "bad-structure", "a generation of 9 digits"),
        ("parent-same", {"parent": {**parent, "generation": 3}}, "bad-structure", "the parent is not older"),
        ("parent-list", {"parent": []}, "bad-structure", "a parent that is no object"),
        ("parent-no-step", {"parent": {**parent, "step": None}}, "bad-structure", "a parent without a step"),
        ("parent-step", {"parent": {**parent, "step": 10**12}}, "bad-structure", "a step of 13 digits"),
        ("parent-save-id", {"parent": {**parent, "save_id": "00"}}, "bad-structure", "a save id of 2 digits"),
        ("parent-generation-0", {"parent": {**parent, "generation": 0}}, "bad-structure", "generations count from 1"),
    ):
        yield invalid("head", name, _changed(HEAD, **changes), kind, why, path=HEAD_PATH)
