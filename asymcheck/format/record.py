"""Encode and decode record files: the store descriptor and head records (SPEC.md §A5), with strict JSON (§A4)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

from asymcheck.errors import ChecksumError, LimitError, StructureError, TruncatedError
from asymcheck.format import registry
from asymcheck.format.digest import Buffer, digest
from asymcheck.format.registry import check_reader_features, check_version
from asymcheck.types import CheckpointRef, SaveId


def parse_json(text: bytes, where: str) -> object:
    """Parse JSON strictly. ``where`` names the structure in errors.

    Raises:
        StructureError: the text is not UTF-8 or not JSON, or has a byte order mark, a repeated key, NaN, an infinity,
            a lone surrogate, or too deep nesting.
    """
    try:
        value: object = json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse)
        if b"\\ud" in text.lower():
            # Only an escape can produce a lone surrogate. Such a string can be neither printed nor encoded.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise StructureError(f"{where}: not valid JSON: {error}") from error
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise StructureError("JSON object has a key twice")
    return value


def _refuse(number: str) -> object:
    raise StructureError(f"{number} is not JSON")


RECORD_BYTES = 2 * registry.BLOCK_BYTES
STORE_LAYOUT, REMOTE_LAYOUT = LAYOUTS = "store", "remote"
"""Values of the key ``layout`` of a descriptor: a store on a local drive, or copies at a remote location."""
_HEX32 = re.compile(r"[0-9a-f]{32}\Z")


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """The record that makes a directory a store."""

    store_id: bytes
    created_ns: int
    writer: str
    reader_features: tuple[str, ...] = ()
    writer_features: tuple[str, ...] = ()
    layout: str | None = None
    """``store`` or ``remote``; None in descriptors of early programs, which did not write the key."""


@dataclasses.dataclass(frozen=True)
class HeadRecord:
    """The record that opens a generation of a run."""

    run: str
    generation: int
    parent: CheckpointRef | None
    """The checkpoint that training continued from; None if it began without one."""
    created_ns: int
    writer: str

    def is_same(self, other: HeadRecord) -> bool:
        """Tell whether another record of this generation is of the same training: it has the same parent and time."""
        return (self.parent, self.created_ns) == (other.parent, other.created_ns)


def canonical_json(value: object) -> bytes:
    """Encode as canonical JSON: ASCII, sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def encode_record(value: Mapping[str, object]) -> bytes:
    """Return the 8192 bytes of a record file.

    Raises:
        LimitError: the JSON has more than 4,000 bytes.
    """
    text = canonical_json(value)
    if len(text) > registry.RECORD_JSON_BYTES_MAX:
        raise LimitError(f"record of {len(text)} bytes exceeds the limit of {registry.RECORD_JSON_BYTES_MAX} bytes")
    body = text + b"\n" + digest(text).hex().encode("ascii") + b"\n"
    return (body.ljust(registry.BLOCK_BYTES - 1, b" ") + b"\n") * 2


def decode_record(data: Buffer, kind: str, where: str) -> tuple[dict[str, object], int]:
    """Return the object of a record file, and the number of damaged copies (0 or 1)."""
    if len(data) != RECORD_BYTES:
        raise TruncatedError(f"{where}: record file has {len(data)} bytes, not {RECORD_BYTES}")
    blocks = [bytes(data[: registry.BLOCK_BYTES]), bytes(data[registry.BLOCK_BYTES :])]
    texts = [text for text in map(_intact_text, blocks) if text is not None]
    if not texts:
        raise ChecksumError(f"{where}: both copies of the record are damaged")
    if len(set(texts)) > 1:
        raise StructureError(f"{where}: the two copies are intact but differ, and no program writes such a record")
    value = parse_json(texts[0], where)
    if not isinstance(value, dict) or not is_canonical(value, texts[0]):
        raise StructureError(f"{where}: record is not a JSON object in canonical form")
    check_version(integer(value, "format", where), where)
    if value.get("kind") != kind:
        raise StructureError(f"{where}: record is of kind {value.get('kind')!r}, not {kind!r}")
    return value, len(blocks) - len(texts)


def repaired_record(data: bytes) -> bytes | None:
    """Return the record file with two intact copies, or None if no copy is intact. Unknown keys are kept."""
    blocks = [data[: registry.BLOCK_BYTES], data[registry.BLOCK_BYTES : RECORD_BYTES]]
    intact = [block for block in blocks if _intact_text(block) is not None]
    if not intact:
        return None
    return data if len(intact) == len(blocks) and len(data) == RECORD_BYTES else intact[0] * len(blocks)


def is_canonical(value: dict[str, object], text: bytes) -> bool:
    """Tell whether ``text`` is the canonical JSON of ``value``, in which all numbers are integers."""
    try:
        json.loads(text, parse_float=_refuse)
        return canonical_json(value) == text
    except (ValueError, RecursionError, StructureError):
        # An integer with too many digits, or nesting that the parser accepts but the encoder does not.
        return False


def _intact_text(block: bytes) -> bytes | None:
    text, _, rest = block.partition(b"\n")
    if len(text) > registry.RECORD_JSON_BYTES_MAX:
        return None
    expected = digest(text).hex().encode("ascii") + b"\n"
    padded = (text + b"\n" + expected).ljust(registry.BLOCK_BYTES - 1, b" ") + b"\n"
    return text if rest and block == padded else None


def encode_descriptor(descriptor: Descriptor) -> bytes:
    """Return the bytes of ``asymcheck.store``. The keys of a record are the names of the fields."""
    fields = {**vars(descriptor), "kind": "store", "format": registry.FORMAT_WRITE}
    if descriptor.layout is None:
        del fields["layout"]
    return encode_record({**fields, "store_id": descriptor.store_id.hex()})


def decode_descriptor(data: Buffer, where: str) -> tuple[Descriptor, int]:
    """Return a store descriptor, and the number of damaged copies."""
    value, damaged = decode_record(data, "store", where)
    # Before all other keys, so that no descriptor of a newer program is taken for damaged.
    readers = strings(value, "reader_features", where)
    check_reader_features(readers, where)
    writers = strings(value, "writer_features", where)
    created = integer(value, "created_ns", where)
    store_id = parse_id(value.get("store_id"), where)
    layout = string(value, "layout", where) if "layout" in value else None
    if layout not in (None, *LAYOUTS):
        raise StructureError(f"{where}: layout {layout!r:.100} is none of {', '.join(LAYOUTS)}")
    return Descriptor(store_id, created, string(value, "writer", where), readers, writers, layout), damaged


def head_to_json(head: HeadRecord) -> dict[str, object]:
    """Return the JSON form of a head record."""
    fields = {**vars(head), "kind": "head", "format": registry.FORMAT_WRITE}
    return {**fields, "parent": parent_to_json(head.parent)}


def encode_head(head: HeadRecord) -> bytes:
    """Return the bytes of a head record file."""
    return encode_record(head_to_json(head))


def decode_head(data: Buffer, where: str) -> tuple[HeadRecord, int]:
    """Return a head record, and the number of damaged copies."""
    value, damaged = decode_record(data, "head", where)
    return head_from_json(value, where), damaged


def head_from_json(value: Mapping[str, object], where: str) -> HeadRecord:
    """Read the JSON form of a head record."""
    generation = integer(value, "generation", where)
    if "parent" not in value:
        raise StructureError(f"{where}: head record lacks the key parent")
    parent = parent_from_json(value["parent"], where)
    if not 1 <= generation <= registry.GENERATION_MAX or (parent is not None and parent.generation >= generation):
        raise StructureError(f"{where}: generation {generation} does not follow its parent")
    created = integer(value, "created_ns", where)
    return HeadRecord(string(value, "run", where), generation, parent, created, string(value, "writer", where))


def parent_to_json(parent: CheckpointRef | None) -> dict[str, object] | None:
    """Return the JSON form of a parent."""
    return None if parent is None else {**vars(parent), "save_id": parent.save_id.hex()}


def parent_from_json(value: object, where: str) -> CheckpointRef | None:
    """Read the JSON form of a parent."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise StructureError(f"{where}: parent is neither an object nor null")
    generation, step = integer(value, "generation", where), integer(value, "step", where)
    if not (1 <= generation <= registry.GENERATION_MAX and 0 <= step <= registry.STEP_MAX):
        raise StructureError(f"{where}: parent generation {generation} or step {step} is outside its limits")
    return CheckpointRef(generation, step, SaveId(parse_id(value.get("save_id"), where)))


def parse_id(value: object, where: str) -> bytes:
    """Return the 16 bytes of an id of 32 lower-case hexadecimal digits."""
    if not isinstance(value, str) or not _HEX32.match(value):
        raise StructureError(f"{where}: not an id of 32 lower-case hexadecimal digits: {value!r}")
    return bytes.fromhex(value)


def integer(value: Mapping[str, object], key: str, where: str) -> int:
    """Return the integer under a key of a record."""
    number = value.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 64:
        raise StructureError(f"{where}: {key} is not an integer from 0 to 2^64 - 1")
    return number


def string(value: Mapping[str, object], key: str, where: str) -> str:
    """Return the string under a key of a record."""
    text = value.get(key)
    if not isinstance(text, str):
        raise StructureError(f"{where}: {key} is not a string")
    return text


def strings(value: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    """Return the strings under a key of a record."""
    items = value.get(key)
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise StructureError(f"{where}: {key} is not a list of strings")
    return tuple(items)
