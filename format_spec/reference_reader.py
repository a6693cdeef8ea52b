"""A second reader of the asymcheck format, version 1, from SPEC.md alone; it shares no code with the library."""

import argparse
import base64
import datetime as dt
import fcntl
import functools
import itertools
import json
import math
import os
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
import zstandard

BLOCK, ALIGNED_MIN, PARTITION_MAX, STORED_MAX, INDEX_MAX, MANIFEST_MAX = 4096, 65536, 2**30, 1082130432, 2**28, 2**30
INLINE_MAX, RECORD_MAX, DEPTH_MAX, METRICS_MAX, DIMENSIONS_MAX, DIGITS_MAX = 4096, 4000, 64, 256, 64, 65536
PLANES_MAX, CHUNK_MAX, DELTAS_MAX = 65536, 2**23, 8
WAIT_S, ATTEMPTS = 10, 8  # bounds of waiting for a lock, and of reading beside a writer
CODECS = {0: (0, 1, 2), 1: (3,), 2: (4,)}  # of each frame kind
SIZES = {1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"}
SIZES |= {2: "uint16 int16 float16 bfloat16", 4: "uint32 int32 float32 complex32", 16: "complex128"}
SIZES |= {8: "uint64 int64 float64 complex64"}
DTYPES = {name: size for size, names in SIZES.items() for name in names.split()}
ROLES = ("weights", "first_moment", "second_moment", "gradient", "rng", "other")
# The binary layouts of §A6: fields as name:struct code, in order; then each magic and where the sum of the header lies.
_SHARED = "kind:B codec:B digest_algorithm:B"
ENTRY = f"digest:16s base_digest:16s offset:Q stored_length:Q plain_length:Q {_SHARED} payload_shift:H reserved_a:3s"
FRAME = f"magic:8s format:H {_SHARED} reserved_a:3s digest:16s plain_length:Q stored_length:Q stored_sum:8s"
FRAME += (
    " base_digest:16s payload_offset:I codec_parameters:12s content_sum:8s place_id:16s sequence:Q placement_sum:8s"
)
PACK = "magic:8s format:H reserved_a:6s pack_id:16s frame_count:Q index_offset:Q index_length:Q pack_length:Q"
PACK += " created_ns:Q writer:32s reserved_b:16s header_sum:8s"
INDEX = "magic:8s format:H entry_size:H reserved_a:4s pack_id:16s entry_count:Q reserved_b:8s entries_sum:8s"
INDEX += " header_sum:8s"
MAGICS = {FRAME: (b"ASYMFRAM", 88), PACK: (b"ASYMPACK", 120), INDEX: (b"ASYMINDX", 56)}
# The names of §A3, and the types of the keys of JSON objects.
HEX, RUN = "[0-9a-f]{32}", r"(?!.*\.tmp$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
DIRECTORY_NAME, HEAD_NAME = f"(?!0{{8}})([0-9]{{8}})-([0-9]{{12}})-({HEX})", r"(?!0{8})([0-9]{8})\.head"
MANIFEST_NAME, PACK_NAME = rf"([0-9]{{5}})-of-([0-9]{{5}})-({HEX})\.manifest", rf"({HEX})\.pack"
DOOMED_NAME = rf"({HEX})\.{HEX}\.doomed"
RING_NAME = rf"asymcheck-({HEX})-({HEX})\.ring"
STORE_KEYS = {"store_id": str, "created_ns": int, "writer": str, "reader_features": list, "writer_features": list}
HEAD_KEYS = {"run": str, "generation": int, "parent": dict | None, "created_ns": int, "writer": str}
MANIFEST_KEYS = HEAD_KEYS | {"step": int, "save_id": str, "world_size": int, "rank": int, "reader_features": list}
MANIFEST_KEYS |= {"metrics": dict, "plan": dict, "packs": list, "tree": object}
OWNER_KEYS = {"boot_id": str, "pid": int, "pid_namespace": str, "start_ticks": int}
RING_KEYS = {"ring_id": str, "store_id": str, "store": str, "run": str, "rank": int, "owner": dict, "data_bytes": int}
RING_KEYS |= {"created_ns": int, "writer": str}
# Tree (§A9): an integer node; string leaves with their count, joined by line feeds.
INTEGER = "-?[1-9][0-9]*"
BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"
LEAVES = {"f": (1, "[0-9a-f]{16}"), "c": (2, "[0-9a-f]{16}\n[0-9a-f]{16}"), "b": (1, BASE64), "v": (1, "(?s:.*)")}
LEAVES["n"] = (2, "|".join(f"{name}\n[0-9a-f]{{{2 * size}}}" for name, size in DTYPES.items()))
LEAVES["y"] = (1, "|".join(DTYPES))
# Typed values (§A9): the tag of the content of each type, and words that are parameters.
TYPES = {"defaultdict": "d", "deque": "l", "namedtuple": "d", "dataclass": "d", "enum": "node", "numpy-generator": "d"}
TYPES |= dict.fromkeys(("set", "frozenset", "timedelta", "range", "slice", "python-random"), "t")
TYPES |= dict.fromkeys(("path", "pure-path", "date", "time", "datetime"), "string")
TYPES |= dict.fromkeys(("torch-generator", "device-generator"), "T") | {"nested-tensor": "l"}
WORDS = {"defaultdict": "bool bytes complex dict float frozenset int list set str tuple", "torch-generator": "cpu"}
WORDS |= {
    "device-generator": "cuda",
    "nested-tensor": "jagged strided",
    "path": "posix windows",
    "pure-path": "posix windows",
    "numpy-generator": "MT19937 PCG64 PCG64DXSM Philox SFC64",
}
FEATURES = {"shifted-payload", "typed-value", "enum-item", "device-generator", "nested-tensor"}
ITEM_TAGS, ITEM_TYPES = "ifcbznyv", {"frozenset", "path", "pure-path", "date", "time", "datetime", "timedelta", "range"}
# The Arrow schema of a manifest (§A8), as pyarrow writes types.
_INTS, _TEXT = "list<item: int64 not null> not null", "string not null"
_PLACE = "digest: fixed_size_binary[16] not null, offset: int64 not null, length: int64 not null"
COLUMNS = f"name: {_TEXT}, aliases: list<item: {_TEXT}> not null, dtype: {_TEXT}, role: {_TEXT}, shape: {_INTS}, "
COLUMNS += f"global_shape: {_INTS}, offset: {_INTS}, nbytes: int64 not null, inline: binary, "
COLUMNS += "inline_digest: fixed_size_binary[16], "
COLUMNS += f"extents: list<item: struct<{_PLACE}, partition_length: int64 not null> not null> not null"


class SpecError(Exception):
    """Something that a reader must refuse; ``kind`` names the class of the fault."""

    def __init__(self, message: str, kind: str = "bad-structure") -> None:
        """Keep the message and the kind."""
        super().__init__(message)
        self.kind = kind


def need(condition: object, message: str, kind: str = "bad-structure") -> None:
    """Refuse with a SpecError unless the condition holds."""
    if not condition:
        raise SpecError(message, kind)


def digest(data: bytes | memoryview) -> str:
    """The digest (§A4) in hexadecimal; its last 16 digits are the sum8."""
    return xxhash.xxh3_128_hexdigest(data)


def frame_length(stored: int, shift: int) -> int:
    """Bytes of a whole frame: header, gap, payload and padding (§A6)."""
    return -(-((BLOCK + shift if stored >= ALIGNED_MIN else 128) + stored) // BLOCK) * BLOCK


def length_of(entry: dict[str, Any]) -> int:
    """Bytes of the frame of an index entry, or of a frame header, with its shift."""
    return frame_length(entry["stored_length"], entry["payload_shift"])


def unpack(data: bytes, layout: str, what: str) -> dict[str, Any]:
    """Unpack a binary header, byte strings as hexadecimal; check size, magic, format, its own sum, reserved bytes."""
    fields = dict(part.split(":") for part in layout.split())
    form = struct.Struct("<" + "".join(fields.values()))
    need(len(data) >= form.size, f"{what}: {len(data)} bytes, its header has {form.size}", "truncated")
    values = (value.hex() if isinstance(value, bytes) else value for value in form.unpack_from(data))
    h: dict[str, Any] = dict(zip(fields, values, strict=True))
    if layout in MAGICS:
        magic, end = MAGICS[layout]
        need(data[:8] == magic, f"{what}: magic {data[:8]!r}", "bad-magic")
        # A version whose sum is right for version 1 is damaged (§A11.3).
        is_sound = digest(data[:8] + b"\1\0" + data[10:end])[16:] == data[end : end + 8].hex()
        need(h["format"] == 1 or not is_sound, f"{what}: damaged version {h['format']}", "bad-checksum")
        need(h["format"] == 1, f"{what}: format version {h['format']}, this reader knows 1", "unsupported-version")
        need(is_sound, f"{what}: header sum", "bad-checksum")
    need(not (h["reserved_a"] + h.get("reserved_b", "")).strip("0"), f"{what}: reserved bytes are not zero")
    return h


def decode_zstd(data: bytes, length: int, what: str) -> bytes:
    """The content of one Zstandard frame (§A10.1), which has this length."""
    need(data[:4] == b"\x28\xb5\x2f\xfd", f"{what}: not a Zstandard frame")
    try:
        about = zstandard.get_frame_parameters(data)
        good = about.content_size == length and about.dict_id == 0
        need(good, f"{what}: content size {about.content_size}, dictionary {about.dict_id}")
        plain = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SpecError(f"{what}: {error}") from error
    need(len(plain) == length, f"{what}: {len(plain)} bytes decompressed")
    return plain


def read_tables(data: bytes, length: int, what: str) -> Iterator[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """Check the tables of a container (§A10.2): each chunk's elements, width, float mark, and planes."""
    need(len(data) >= 16, f"{what}: {len(data)} bytes", "truncated")
    size, segments, count, reserved = struct.unpack_from("<4I", data)
    need(max(segments, count) <= PLANES_MAX and size <= CHUNK_MAX, f"{what}: {size, segments, count}", "limit-exceeded")
    need(size >= BLOCK and size % BLOCK == 0 and reserved == 0, f"{what}: chunk_bytes {size}, reserved {reserved}")
    table, at = 16 + 8 * segments, 16 + 8 * segments + 4 * count
    need(len(data) >= at, f"{what}: {len(data)} bytes, its tables have {at}", "truncated")
    rows = list(struct.iter_unpack("<IBBH", data[16:table]))
    need(rows and sum(row[0] for row in rows) == length, f"{what}: segments of {sum(row[0] for row in rows)} bytes")
    for n, width, mark, zero in rows:
        need(width in (1, 2, 4, 8) and mark <= (width > 1) and zero == 0, f"{what}: segment {n, width, mark, zero}")
        need(n >= 1 and n % width == 0, f"{what}: a segment of {n} bytes, width {width}")
    need(all(a[1:3] != b[1:3] for a, b in itertools.pairwise(rows)), f"{what}: neighbours of one kind")
    planes = sum(-(-n // size) * width for n, width, _, _ in rows)
    need(planes == count, f"{what}: {count} planes, the segments have {planes}")
    chunks = [(min(size, n - x) // w, w, mark) for n, w, mark, _ in rows for x in range(0, n, size)]
    words, found = iter(struct.unpack_from(f"<{count}I", data, table)), []
    for n, width, mark in chunks:
        places = []
        for word in (next(words) for _ in range(width)):
            encoding, value = word >> 24, word & 0xFFFFFF
            bounds = {0: (n, n), 1: (1, n - 1), 2: (0, 255)}.get(encoding, (1, 0))
            need(bounds[0] <= value <= bounds[1], f"{what}: encoding {encoding}, value {value} of a plane of {n}")
            places.append((encoding, value, at))
            at += 0 if encoding == 2 else value
        found.append((n, width, mark, places))
    need(at <= len(data), f"{what}: {len(data)} bytes, its planes end at {at}", "truncated")
    need(at == len(data), f"{what}: {len(data) - at} bytes behind the planes")
    return iter(found)


def order(x: npt.NDArray[np.uint64], mask: np.uint64) -> npt.NDArray[np.uint64]:
    """The order of floats given by their bits (§A10.3); its own inverse."""
    return np.where(x > mask >> np.uint64(1), x ^ (mask >> np.uint64(1)), x)


def decode_planes(data: bytes, length: int, base: bytes | None, what: str) -> bytes:
    """The plain bytes of a payload of codec byte-planes (§A10.2), or with a base of ordered-integer-delta (§A10.3)."""
    need(base is None or len(base) == length, f"{what}: a base of another length")
    plain, one = bytearray(), np.uint64(1)
    for n, width, mark, places in read_tables(data, length, what):
        z, mask = np.zeros(n, dtype=np.uint64), np.uint64(2 ** (8 * width) - 1)
        for number, (encoding, value, at) in enumerate(places):
            part = data[at : at + value]
            plane = bytes([value]) * n if encoding == 2 else decode_zstd(part, n, what) if encoding == 1 else part
            z |= np.frombuffer(plane, dtype=np.uint8).astype(np.uint64) << np.uint64(8 * number)
        if base is not None:
            older = np.frombuffer(base[len(plain) : len(plain) + n * width], dtype=f"<u{width}").astype(np.uint64)
            z = (order(older, mask) if mark else older) + np.where(z & one, ~(z >> one), z >> one) & mask
            z = order(z, mask) if mark else z
        elif mark:
            z = (z >> one | z << np.uint64(8 * width - 1)) & mask
        plain += z.astype(f"<u{width}").tobytes()
    return bytes(plain)


def decode_derived(data: bytes, length: int, base: bytes, what: str) -> bytes:
    """The plain bytes of a payload of codec derived-round-to-nearest (§A10.4)."""
    need(len(data) >= 16, f"{what}: {len(data)} bytes", "truncated")
    dtype, reserved, offset = struct.unpack("<B7sQ", data[:16])
    need(len(data) == 16 and dtype in (1, 2) and not any(reserved), f"{what}: dtype {dtype}, {len(data)} bytes")
    need(length % 2 == 0 and offset + 2 * length <= len(base), f"{what}: {length} bytes at {offset} of {len(base)}")
    x = np.frombuffer(base[offset : offset + 2 * length], dtype="<u4").astype(np.uint64)
    nan = x & 0x7FFFFFFF > 0x7F800000
    if dtype == 1:
        rounded, other = x + 0x7FFF + (x >> 16 & 1) >> 16, np.uint64(0x7FC0)
    else:
        with np.errstate(all="ignore"):
            rounded = x.astype("<u4").view("<f4").astype("<f2").view("<u2").astype(np.uint64)
        other = 0x7E00 | x >> 16 & 0x8000
    return bytes(np.where(nan, other, rounded).astype("<u2").tobytes())


Bases = Callable[[str], "list[Callable[[list[dict[str, Any]]], bytes]]"]


def read_base(h: dict[str, Any], above: list[dict[str, Any]], bases: Bases, what: str) -> bytes:
    """The plain bytes of a frame's base (§A10.5), from the first copy that is intact."""
    chain, name, kind = [*above, h], h["base_digest"], "damaged-base"
    need(h["kind"] == 1 or not above, f"{what}: a derived frame is a base", kind)
    need(sum(frame["kind"] == 1 for frame in chain) <= DELTAS_MAX, f"{what}: more than {DELTAS_MAX} deltas", kind)
    need(name not in [frame["digest"] for frame in chain], f"{what}: the chain leads back to {name}", kind)
    problem = SpecError(f"{what}: its base {name} is in no complete pack", kind)
    for copy in bases(name):
        try:
            return copy(chain)
        except SpecError as error:
            problem = SpecError(f"{what}: its base {name}: {error}", kind)
    raise problem


def decode_payload(h: dict[str, Any], data: bytes, above: list[dict[str, Any]], bases: Bases, what: str) -> bytes:
    """The plain bytes of a payload by its frame's codec (§A10)."""
    base = read_base(h, above, bases, what) if h["kind"] else None
    if h["codec"] == 1:
        return decode_zstd(data, h["plain_length"], what)
    if h["codec"] == 4 and base is not None:
        return decode_derived(data, h["plain_length"], base, what)
    return decode_planes(data, h["plain_length"], base, what) if h["codec"] else data


def check_encoding(h: dict[str, Any], what: str) -> None:
    """Kind, codec, digest number, lengths and base of a frame or an index entry (§A6)."""
    kind, codec, plain, stored = h["kind"], h["codec"], h["plain_length"], h["stored_length"]
    need(kind in CODECS, f"{what}: frame kind {kind}", "unsupported-codec")
    need(h["digest_algorithm"] == 1, f"{what}: digest algorithm {h['digest_algorithm']}", "unsupported-codec")
    need(codec <= 4, f"{what}: codec {codec}", "unsupported-codec")
    need(codec in CODECS[kind], f"{what}: kind {kind} with codec {codec}")
    need(plain <= PARTITION_MAX and stored <= STORED_MAX, f"{what}: lengths {plain}, {stored}", "limit-exceeded")
    need(plain >= 1 and stored >= 1 and (codec or plain == stored), f"{what}: lengths {plain}, {stored}")
    need((kind == 0) == (not h["base_digest"].strip("0")), f"{what}: kind {kind} with base {h['base_digest']}")
    need(kind == 0 or h["base_digest"] != h["digest"], f"{what}: its own base")


def decode_frame_header(data: bytes, what: str, expected: dict[str, Any] | None = None) -> dict[str, Any]:
    """Decode the header of a frame, with the checks 1 to 3 of §A6."""
    h = unpack(data, FRAME, what)
    stored, start = h["stored_length"], h["payload_offset"]
    check_encoding(h, what)
    need(not h["codec_parameters"].strip("0"), f"{what}: codec parameters are not zero")
    h["payload_shift"] = shift = start - BLOCK if stored >= ALIGNED_MIN else start - 128
    need(0 <= shift < BLOCK and (shift == 0 or stored >= ALIGNED_MIN), f"{what}: payload_offset {start}")
    need(digest(data[88:120])[16:] == h["placement_sum"], f"{what}: placement_sum", "bad-checksum")
    for key in h.keys() & (expected or {}):
        need(expected and h[key] == expected[key], f"{what}: {key} is {h[key]}, not as the pack says")
    return h


def decode_frame(
    data: bytes,
    what: str,
    expected: dict[str, Any] | None = None,
    bases: Bases = lambda _name: [],
    above: list[dict[str, Any]] | None = None,
) -> tuple[dict[str, Any], bytes]:
    """Decode one frame (§A6), with the checks in the order given there: its header fields and its plain bytes."""
    h, view = decode_frame_header(data, what, expected), memoryview(data)
    stored, start = h["stored_length"], h["payload_offset"]
    need(len(data) >= length_of(h), f"{what}: {len(data)} bytes of {length_of(h)}", "truncated")
    need(len(data) == length_of(h), f"{what}: {len(data)} bytes, not {length_of(h)}")
    payload = view[start : start + stored]
    need(digest(payload)[16:] == h["stored_sum"], f"{what}: stored_sum", "bad-checksum")
    need(not any(view[128:start]) and not any(view[start + stored :]), f"{what}: padding is not zero")
    plain = decode_payload(h, bytes(payload), above or [], bases, what)
    good = len(plain) == h["plain_length"] and digest(plain) == h["digest"]
    need(good, f"{what}: the plain bytes have another digest", "digest-mismatch")
    return h, plain


def decode_pack(read: Callable[[int, int], bytes], size: int, what: str) -> list[dict[str, Any]]:
    """Decode header and index of a pack (§A7): its entries."""
    block, pack_id = read(0, BLOCK), what.rsplit("/", 1)[-1].partition(".")[0]
    h = unpack(block, PACK, what)
    count, end, length, total = h["frame_count"], h["index_offset"], h["index_length"], h["pack_length"]
    need(not any(block[128:]), f"{what}: padding is not zero")
    need(re.fullmatch(rb"[\x01-\x7f]*\0*", block[72:104]), f"{what}: writer is not ASCII padded with zero")
    need(h["pack_id"] == pack_id, f"{what}: the header names the pack {h['pack_id']}")
    need(length <= INDEX_MAX, f"{what}: an index of {length} bytes", "limit-exceeded")
    good = count >= 1 and length == 64 + 64 * count and end % BLOCK == 0
    need(good and total == end + -(-length // BLOCK) * BLOCK, f"{what}: count, offset and lengths disagree")
    need(len(block) == BLOCK and total <= size, f"{what}: {size} bytes of {total}", "truncated")
    data, what = read(end, total - end), f"{what}: index"
    index = unpack(data, INDEX, what)
    need(digest(data[64:length])[16:] == index["entries_sum"], f"{what}: entries_sum", "bad-checksum")
    need(not any(data[length:]), f"{what}: padding is not zero")
    good = (index["entry_size"], index["pack_id"], index["entry_count"]) == (64, pack_id, count)
    need(good, f"{what}: disagrees with the pack header")
    entries, offset = [], BLOCK
    for sequence in range(count):
        entry = unpack(data[64 * sequence + 64 : 64 * sequence + 128], ENTRY, what)
        del entry["reserved_a"]
        entries.append(entry | {"place_id": pack_id, "sequence": sequence})
        check_encoding(entry, f"{what}: entry {sequence}")
        need(entry["offset"] == offset, f"{what}: entry {sequence} is not of a frame at {offset}")
        shift = entry["payload_shift"]
        good = shift < BLOCK and (shift == 0 or entry["stored_length"] >= ALIGNED_MIN)
        need(good, f"{what}: entry {sequence}: payload_shift {shift}")
        offset += length_of(entry)
    need(offset == end, f"{what}: the last frame ends at {offset}, not at index_offset")
    return entries


def scan_pack(read: Callable[[int, int], bytes], what: str) -> list[dict[str, Any]]:
    """Scan a pack whose header or index is refused (§A7): the entries of the frames that follow one another."""
    entries: list[dict[str, Any]] = []
    offset = BLOCK
    with suppress(SpecError):
        while True:
            place = {"place_id": what.partition(".")[0], "sequence": len(entries)}
            entries.append(decode_frame_header(read(offset, 128), what, place) | {"offset": offset})
            offset += length_of(entries[-1])
    return entries


def parse_json(text: bytes, what: str) -> object:
    """The value of a JSON text (§A4): no key twice in an object, no half of a pair of surrogates, no NaN."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        need(len(dict(pairs)) == len(pairs), f"{what}: a key is there twice")
        return dict(pairs)

    def refuse(name: str) -> None:
        need(False, f"{what}: {name} is not JSON")

    try:
        value: object = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
        below = [value]
        while below:
            item = below.pop()
            if isinstance(item, str):
                item.encode()
            elif isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{what}: {type(error).__name__}: {error}") from error
    return value


def parse_known(text: bytes, what: str, kind: dict[str, str], keys: dict[str, Any]) -> dict[str, Any]:
    """Parse a JSON object and check its version, its kind and its features, which every version keeps (§A13)."""
    value = parse_json(text, what)
    if not isinstance(value, dict) or type(value.get("format")) is not int:
        raise SpecError(f"{what}: not an object with a format version")
    need(value["format"] == 1, f"{what}: format version {value['format']}, this reader knows 1", "unsupported-version")
    need(kind.items() <= value.items(), f"{what}: kind {value.get('kind')!r}")
    names: Any = value.get("reader_features", [] if "reader_features" not in keys else None)
    good = isinstance(names, list) and all(isinstance(name, str) for name in names)
    need(good, f"{what}: reader_features {names!r:.60}")
    unknown = set(names) - FEATURES if "reader_features" in keys else set()
    need(not unknown, f"{what}: reader features {unknown}", "unsupported-feature")
    return dict(value)


def fields_below(fields: Iterable[pa.Field]) -> Iterator[pa.Field]:
    """All fields of a schema, also those of nested types."""
    for field in fields:
        yield field
        yield from fields_below(field.type.field(number) for number in range(field.type.num_fields))


def decode_object(text: bytes, keys: dict[str, Any], expected: dict[str, Any], what: str) -> dict[str, Any]:
    """Parse and check a JSON object of the format: version, keys, agreement with its place, features (§A13)."""
    value = parse_known(text, what, {"kind": expected["kind"]} if "kind" in expected else {}, keys)
    for key, kind in keys.items():
        good = key in value and isinstance(value[key], kind) and (kind is not int or type(value[key]) is int)
        need(good and (kind is not int or 0 <= value[key] < 2**64), f"{what}: {key} is missing or malformed")
    for key, part in expected.items():
        need(value.get(key) == part, f"{what}: {key} is {value.get(key)!r}, its place says {part!r}")
    names = value.get("writer_features", [])
    need(keys is not STORE_KEYS or all(isinstance(name, str) for name in names), f"{what}: features are not strings")
    ids = [value["store_id"]] if "store_id" in keys else value.get("packs", [])
    need(all(isinstance(i, str) and re.fullmatch(HEX, i) for i in ids), f"{what}: malformed ids")
    good = keys is not STORE_KEYS or value.get("layout", "store") in ("store", "remote")
    need(good, f"{what}: layout {value.get('layout')!r}")
    if (parent := value["parent"] if "parent" in keys else None) is not None:
        g, s = parent.get("generation"), parent.get("step")
        good = type(g) is type(s) is int and 1 <= g < value["generation"] + (keys is MANIFEST_KEYS)
        named = re.fullmatch(HEX, str(parent.get("save_id")))
        need(good and named and 0 <= s < 10**12, f"{what}: parent is malformed, or of too high a generation")
    return dict(value)


def decode_record(data: bytes, kind: str, keys: dict[str, Any], place: dict[str, Any], what: str) -> dict[str, Any]:
    """Decode a record file (§A5), with the checks in the order given there: the object of its first intact block."""
    need(len(data) == 2 * BLOCK, f"{what}: {len(data)} bytes, not 8192", "truncated")
    texts = []
    for block in (data[:BLOCK], data[BLOCK:]):
        match = re.fullmatch(rb"([^\n]*)\n([0-9a-f]{32})\n *\n", block)
        if match and len(match[1]) <= RECORD_MAX and digest(match[1]).encode() == match[2]:
            texts.append(match[1])
    need(texts, f"{what}: neither block is intact", "bad-checksum")
    need(texts[0] == texts[-1], f"{what}: both blocks are intact, and differ")
    value = parse_json(texts[0], what)
    need(isinstance(value, dict) and canonical_json(value) == texts[0], f"{what}: not canonical JSON of an object")
    return decode_object(texts[0], keys, {"kind": kind} | place, what)


def canonical_json(value: object) -> bytes:
    """Canonical JSON (§A4), or no bytes for a value with a number that is no integer."""
    below = [value]
    for item in below:
        below += [*item.values()] if isinstance(item, dict) else item if isinstance(item, list) else []
    has_fraction = any(isinstance(item, float) for item in below)
    return b"" if has_fraction else json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def check_integer(node: object) -> str:
    """Check an integer node (§A9), which a key and a size of ``z`` is, too; return its decimal form."""
    match node:
        case int() if type(node) is int and abs(node) < 2**53:
            return str(node)
        case ["i", str(text)] if re.fullmatch(INTEGER, text):
            digits = text.removeprefix("-")
            need(len(digits) <= DIGITS_MAX, f"an integer of {len(digits)} digits", "limit-exceeded")
            need((len(digits), digits) >= (16, str(2**53)), f"{text} is written as a large integer")
            return text
    raise SpecError(f"malformed integer {str(node)[:60]}")


def is_item(node: Any) -> bool:  # noqa: ANN401 - a checked node
    """Whether a set may contain the value of a checked node (§A9)."""
    match node:
        case ["t", items]:
            return all(is_item(item) for item in items)
        case ["x", kind, _, content]:
            return kind in ITEM_TYPES or (kind == "enum" and is_item(content))
        case [tag, *_]:
            return tag in ITEM_TAGS
    return True


def is_integer(node: object) -> bool:
    """Whether a checked node is an integer."""
    return type(node) is int or (isinstance(node, list) and node[0] == "i")


def is_typed(kind: str, parameter: object, content: Any) -> bool:  # noqa: ANN401 - a checked node
    """Whether parameter and content of a typed value follow the tables of §A9 and §A15."""
    tag = content[0] if isinstance(content, list) else "string" if isinstance(content, str) else ""
    items = content[1] if isinstance(content, list) and len(content) > 1 else []
    return TYPES[kind] in (tag, "node") and is_parameter(kind, parameter, items) and is_content(kind, content, items)


def is_parameter(kind: str, parameter: Any, items: list[Any]) -> bool:  # noqa: ANN401 - any JSON
    """Whether a parameter follows the table of §A9."""
    if kind in ("namedtuple", "dataclass", "enum"):
        return isinstance(parameter, str)
    if parameter is None:
        return kind not in WORDS or kind == "defaultdict"
    if kind == "deque":
        return type(parameter) is int and len(items) <= parameter < 2**53
    if kind == "nested-tensor" and parameter == "jagged":
        return len(items) in (2, 3)
    if kind in ("time", "datetime"):
        return type(parameter) is int and parameter == 1
    return isinstance(parameter, str) and parameter in WORDS.get(kind, "").split()


def is_content(kind: str, content: Any, items: list[Any]) -> bool:  # noqa: ANN401 - a checked node
    """Whether the content of a typed value, whose tag is right, follows the table of §A9."""
    good = True
    match kind:
        case "namedtuple" | "dataclass":
            good = all(isinstance(key, str) for key, _ in items)
        case "set" | "frozenset":
            texts = [json.dumps(item, sort_keys=True, separators=(",", ":")) for item in items]
            good = all(map(is_item, items)) and texts == sorted(set(texts))
        case "date" | "time" | "datetime":
            good = is_iso(kind, content)
        case "nested-tensor":
            good = len(items) > 0 and all(isinstance(item, list) and item[0] == "T" for item in items)
        case "timedelta":
            good = [type(item) for item in items] == [int] * 3 and abs(items[0]) < 10**9
            good = good and 0 <= items[1] < 86400 and 0 <= items[2] < 10**6
        case "range":
            good = len(items) == 3 and all(map(is_integer, items)) and items[2] != 0
        case "slice":
            good = len(items) == 3 and all(item is None or is_integer(item) for item in items)
        case "python-random":
            good = [type(item) for item in items[:2]] == [int, list] and items[1][0] == "N" and len(items) == 3
            good = good and (items[2] is None or (isinstance(items[2], list) and items[2][0] == "f"))
    return good


def is_iso(kind: str, text: str) -> bool:
    """Whether a text is the one form of a date or a time."""
    try:
        return bool(getattr(dt, kind).fromisoformat(text).isoformat() == text)
    except ValueError:
        return False


def check_tree(node: object, rows: int, depth: int = 1) -> set[int]:
    """Check a node of the tree (§A9) and all below it; return the rows that it names."""
    need(depth <= DEPTH_MAX, f"the tree is deeper than {DEPTH_MAX}", "limit-exceeded")
    below: list[Any] = []
    match node:
        case None | bool() | str() | int() if not isinstance(node, int) or abs(node) < 2**53:
            pass
        case ["i", _]:
            check_integer(node)
        case [str(tag), *parts] if tag in LEAVES and all(isinstance(part, str) for part in parts):
            count, form = LEAVES[tag]
            well_formed = len(parts) == count and re.fullmatch(form, "\n".join(map(str, parts)))
            need(well_formed, f"malformed tree node {str(node)[:60]}")
        case ["z", list(sizes)]:
            words = [check_integer(size) for size in sizes]
            # The length first: Python converts no more than 4,300 digits.
            good = all(len(word) <= 20 and -(2**63) <= int(word) < 2**63 for word in words)
            need(good, f"a size that no shape can have in {str(node)[:60]}")
        case ["T" | "N", row] if type(row) is int and 0 <= row < rows:
            return {row}
        case ["l" | "t", list(items)]:
            below = items
        case ["d" | "o", list(pairs)] | ["m", list(pairs), _] if all(type(p) is list and len(p) == 2 for p in pairs):
            keys = {(True, key) if isinstance(key, str) else (False, check_integer(key)) for key, _ in pairs}
            need(len(keys) == len(pairs), "a key twice in a mapping of the tree")
            below = [*(value for _, value in pairs), *list(node)[2:]]
        case ["x", str(kind), parameter, content]:
            need(kind in TYPES, f"a value of type {kind[:60]}", "unsupported-feature")
            named = check_tree(content, rows, depth + 1)
            need(is_typed(kind, parameter, content), f"malformed typed value {str(node)[:60]}")
            return named
        case _:
            raise SpecError(f"unknown or malformed tree node {str(node)[:60]}")
    return set().union(*(check_tree(item, rows, depth + 1) for item in below))


def describe_tree(node: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON that follows the table of nodes
    """The value of a checked node, as the vectors of trees write it: an object with one key, the kind of value."""
    match node:
        case None | bool() | str():
            return {"none" if node is None else "bool" if isinstance(node, bool) else "str": node}
        case int() | ["i", _]:
            return {"int": check_integer(node)}
        case ["b", text]:
            return {"bytes": base64.b64decode(text).hex()}
        case ["z", sizes]:
            return {"size": [check_integer(size) for size in sizes]}
        case ["l" | "t" as tag, items]:
            return {"list" if tag == "l" else "tuple": [describe_tree(item) for item in items]}
        case ["d" | "o" | "m" as tag, pairs, *metadata]:
            items = [[describe_tree(key), describe_tree(value)] for key, value in pairs]
            module = {"items": items, "metadata": describe_tree(metadata[0])} if metadata else {}
            return {"module": module} if metadata else {"dict" if tag == "d" else "ordered": items}
        case ["x", kind, parameter, content]:
            return {"typed": {"type": kind, "parameter": parameter, "content": describe_tree(content)}}
    names = {"f": "float", "c": "complex", "T": "tensor", "N": "array", "n": "scalar", "y": "dtype", "v": "device"}
    return {names[node[0]]: node[1:] if node[0] in "cn" else node[1]}


def check_row(row: dict[str, Any], lengths: dict[bytes, int], what: str) -> None:
    """Check the rules of a row (§A8); ``lengths`` holds the partition lengths that the manifest has named so far."""
    nested = [row["aliases"], row["shape"], row["global_shape"], row["offset"], row["extents"]]
    flat = [value for key, value in row.items() if key not in ("inline", "inline_digest")]
    need(None not in flat and all(None not in part for part in nested), f"{what}: a null")
    need(all(None not in extent.values() for extent in row["extents"]), f"{what}: a null in an extent")
    inline, extents, total = row["inline"], row["extents"], sum(extent["length"] for extent in row["extents"])
    need(row["dtype"] in DTYPES and row["role"] in ROLES, f"{what}: dtype {row['dtype']!r} or role {row['role']!r}")
    need(len(row["shape"]) == len(row["global_shape"]) == len(row["offset"]) <= DIMENSIONS_MAX, f"{what}: rule 1")
    places = zip(row["offset"], row["shape"], row["global_shape"], strict=True)
    need(all(at >= 0 and size >= 0 and at + size <= whole for at, size, whole in places), f"{what}: rule 1")
    need(row["nbytes"] == math.prod(row["shape"]) * DTYPES[row["dtype"]], f"{what}: rule 2")
    if inline is None:
        need(row["inline_digest"] is None and row["nbytes"] == total > 0, f"{what}: rule 3")
    else:
        need(len(inline) <= INLINE_MAX, f"{what}: {len(inline)} bytes inline", "limit-exceeded")
        need(len(inline) == row["nbytes"] and row["inline_digest"] and not extents, f"{what}: rule 3")
        need(digest(inline) == row["inline_digest"].hex(), f"{what}: inline_digest")
    for extent in extents:
        at, length, partition = extent["offset"], extent["length"], extent["partition_length"]
        need(length >= 1 and at >= 0 and at + length <= partition <= PARTITION_MAX, f"{what}: rule 4")
        need(lengths.setdefault(extent["digest"], partition) == partition, f"{what}: rule 5")


def check_part(header: dict[str, Any], what: str) -> None:
    """Check the optional keys of a manifest (§A8)."""
    spans, bits = header.get("store_ranks", [[0, header["world_size"] - 1]]), header.get("elsewhere", "")
    pairs = type(spans) is list and all(type(span) is list and len(span) == 2 for span in spans)
    numbers = [number for span in spans for number in span] if pairs else []
    need(bool(numbers) and all(type(number) is int for number in numbers), f"{what}: store_ranks")
    rising = all(a <= b for a, b in spans) and all(a[1] + 1 < b[0] for a, b in itertools.pairwise(spans))
    need(rising and numbers[0] >= 0 and numbers[-1] < header["world_size"], f"{what}: store_ranks")
    rank = "store_ranks" not in header or any(a <= header["rank"] <= b for a, b in spans)
    need(rank, f"{what}: store_ranks without its rank")
    need(type(bits) is str and re.fullmatch("([0-9a-f]{2})*", bits) is not None, f"{what}: elsewhere")
    need(type(header.get("merged", {})) is dict, f"{what}: merged")


def is_finite(number: float) -> bool:
    """Tell whether the binary64 that is nearest to a number is finite."""
    try:
        return math.isfinite(float(number))
    except OverflowError:
        return False


def decode_manifest(data: bytes, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Decode the manifest (§A8) named ``[[<run>/]<directory>/]<file>``: its header, and its rows by column."""
    run, directory, what = ("//" + name).rsplit("/", 3)[-3:]
    file, place = re.fullmatch(MANIFEST_NAME, what), re.fullmatch(DIRECTORY_NAME, directory)
    if file is None or (directory and place is None):
        raise SpecError(f"{name}: not a manifest's name")
    expected = {"rank": int(file[1]), "world_size": int(file[2])} | ({"run": run} if run else {})
    expected |= {"generation": int(place[1]), "step": int(place[2]), "save_id": place[3]} if place else {}
    need(digest(data) == file[3], f"{what}: its digest is {digest(data)}", "bad-checksum")
    need(data[:6] == b"ARROW1", f"{what}: not an Arrow file", "bad-magic")
    try:
        source = pa.py_buffer(data)
        reader = pa.ipc.open_file(source)
        metadata = dict(reader.schema.metadata or {})
        need(b"asymcheck" in metadata, f"{what}: no header")
        parse_known(metadata[b"asymcheck"], what, {}, MANIFEST_KEYS)
        columns = ", ".join(f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in reader.schema)
        plain = len(metadata) == 1 and not any(f.metadata for f in fields_below(reader.schema))
        need(columns == COLUMNS and plain, f"{what}: the Arrow schema is {columns}")
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(source.slice(8)))
        first, second = messages.read_next_message(), messages.read_next_message()
        same = first.type == "schema" and pa.ipc.read_schema(first).equals(reader.schema, check_metadata=True)
        need(same, f"{what}: the schema in the footer is not that of the first message")
        # pyarrow gives metadata as a dict, which hides a key that is there twice: count the key's flatbuffer strings.
        keys = first.metadata.to_pybytes().count(b"\x09\0\0\0asymcheck\0")
        need(keys == 1, f"{what}: the metadata entry is there {keys} times")
        need(reader.num_record_batches == 1, f"{what}: {reader.num_record_batches} record batches")
        need(second.type == "record batch", f"{what}: the second message is of type {second.type}")
        batch = pa.ipc.read_record_batch(second, reader.schema)
        batch.validate(full=True)
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer and buffer.size]
        need(all(0 <= b.address - source.address < len(data) for b in buffers), f"{what}: the body is compressed")
        rows = batch.to_pylist()
    except (pa.ArrowException, ValueError, OSError, MemoryError, StopIteration) as error:
        raise SpecError(f"{what}: {type(error).__name__}: {error}") from error
    header = decode_object(metadata[b"asymcheck"], MANIFEST_KEYS, expected, what)
    numbers = [value for value in header["metrics"].values() if value not in ("NaN", "Infinity", "-Infinity")]
    good = all(type(n) in (int, float) and is_finite(n) for n in numbers)
    plan = header["plan"]
    need(good and type(plan.get("number")) is int and type(plan.get("kind")) is str, f"{what}: metrics or plan")
    check_part(header, what)
    need(len(header["metrics"]) <= METRICS_MAX, f"{what}: more than {METRICS_MAX} metrics", "limit-exceeded")
    need(len(check_tree(header["tree"], len(rows))) == len(rows), f"{what}: a row that the tree does not name")
    lengths: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        check_row(row, lengths, f"{what}: row {number} ({str(row['name'])[:60]!r})")
    return header, rows


def decode_ring(data: bytes, name: str) -> dict[str, Any]:
    """Decode the ring (§B8) of this name: its header, the captures of its entries, and the frames in it."""
    named = re.fullmatch(rf"(?:.*/)?{RING_NAME}", name)
    if named is None:
        raise SpecError(f"{name}: not a ring's name")
    ids, start = {"store_id": named[1], "ring_id": named[2]}, 3 * BLOCK
    header = decode_record(data[: 2 * BLOCK], "ring", RING_KEYS, ids, name)
    owner, end = header["owner"], start + header["data_bytes"]
    need(all(type(owner.get(key)) is kind for key, kind in OWNER_KEYS.items()), f"{name}: owner {owner}")
    need(re.fullmatch(RUN, header["run"]), f"{name}: run {header['run']!r}")
    need(end > start and end % BLOCK == 0, f"{name}: {end - start} bytes of data")
    need(len(data) >= end, f"{name}: {len(data)} bytes of {end}", "truncated")
    captures, frames = [], []
    for number in range(64):
        entry = data[2 * BLOCK + 64 * number :][:64]
        offset, save_id, state, reserved = struct.unpack("<Q16sQ24s", entry[:56])
        placed = start <= offset < end and offset % BLOCK == 0
        if placed and state in (1, 2) and not any(reserved) and digest(entry[:56])[16:] == entry[56:].hex():
            captures.append({"number": number, "offset": offset, "save_id": save_id.hex(), "state": state})
    for offset in range(start, end, BLOCK):
        length = frame_length(int.from_bytes(data[offset + 40 : offset + 48], "little"), 0)
        try:
            place = {"place_id": named[2], "sequence": offset // BLOCK}
            h, _ = decode_frame(data[offset : min(offset + length, end)], name, place)
            need(h["codec"] == h["payload_shift"] == 0, f"{name}: codec {h['codec']} or a shift in a ring")
            frames.append({"offset": offset} | {key: h[key] for key in ("digest", "plain_length", "stored_length")})
        except SpecError:
            continue
    return {"header": header, "captures": captures, "frames": frames}


@contextmanager
def open_file(path: Path, missing: str, limit: int = 2**63) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
    """Hold a shared lock on a file that its path still names (§A12); give a function to read from it, and its size.

    ``missing`` is the kind of the error if the file does not exist.
    """
    deadline = time.monotonic() + WAIT_S
    try:
        while True:
            with path.open("rb", buffering=0) as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                status = os.fstat(file.fileno())
                if os.path.samestat(status, path.stat()):
                    need(status.st_size <= limit, f"{path.name}: more than {limit} bytes", "limit-exceeded")
                    yield lambda offset, length: os.pread(file.fileno(), length, offset), status.st_size
                    return
            need(time.monotonic() < deadline, f"{path.name}: locked for {WAIT_S} seconds", "lock-timeout")
            time.sleep(0.01)
    except OSError as error:
        raise SpecError(f"{path.name}: {error.strerror}", missing) from error


def read_file(path: Path, missing: str, limit: int) -> bytes:
    """Read a whole file of at most ``limit`` bytes."""
    with open_file(path, missing, limit) as (read, size):
        return read(0, size)


class Store:
    """One run of a store: the location of each digest, the refused packs with reasons, and the checkpoints."""

    def __init__(self, path: Path, run: str | None = None) -> None:
        """Read the descriptor, the index of every complete pack, the line, and all manifests of the run."""
        descriptor = read_file(path / "asymcheck.store", "store-not-found", 2 * BLOCK)
        self.path, self.descriptor = path, decode_record(descriptor, "store", STORE_KEYS, {}, "descriptor")
        self.locations: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
        self.damaged: dict[str, str] = {}
        self.seen: set[str] = set()
        self.unsupported: SpecError | None = None
        self.generation = 0
        lost = (path / "manifests").is_dir() or not any(re.fullmatch(PACK_NAME, p.name) for p in self.files("packs"))
        need(lost, f"{path}: packs, but no manifests/")
        runs = {p.name for part in ("heads", "manifests") for p in self.files(part) if re.fullmatch(RUN, p.name)}
        self.run = run or "".join(sorted(runs)[:1])
        named = self.run in runs and (run or len(runs) == 1)
        need(named, f"run {run}: the store has {sorted(runs)}", "checkpoint-not-found")
        self.read_line()

    def files(self, *parts: str) -> list[Path]:
        """The files in a directory below the store, in order of their names."""
        return sorted(self.path.joinpath(*parts).glob("*"))

    def read_packs(self) -> bool:
        """Read the index of every pack that was not listed before; tell whether there was any (§A12)."""
        pattern = PACK_NAME if self.descriptor.get("layout") == "store" else f"{PACK_NAME}|{DOOMED_NAME}"
        packs = [p for p in self.files("packs") if p.name not in self.seen and re.fullmatch(pattern, p.name)]
        for pack in sorted(packs, key=lambda pack: pack.suffix == ".doomed"):
            self.seen.add(pack.name)
            try:
                with open_file(pack, "missing-partition") as (read, size):
                    entries = self.read_entries(read, size, pack.name)
            except SpecError as error:
                self.damaged[pack.name] = str(error)
                continue
            for entry in entries:
                self.locations.setdefault(entry["digest"], []).append((pack, entry))
        return bool(packs)

    def read_entries(self, read: Callable[[int, int], bytes], size: int, what: str) -> list[dict[str, Any]]:
        """The entries of a pack, by a scan if its header or index is damaged; none if it is unsupported (§A7)."""
        try:
            return decode_pack(read, size, what)
        except SpecError as error:
            self.damaged[what] = str(error)
            if error.kind.startswith("unsupported"):
                self.unsupported = error
                return []
            return scan_pack(read, what)

    def directories(self) -> list[tuple[str, list[str]]]:
        """The checkpoint directories of the run that have manifests (§A11.2), with the names of these."""
        found = []
        for folder in (p for p in self.files("manifests", self.run) if re.fullmatch(DIRECTORY_NAME, p.name)):
            matches = [re.fullmatch(MANIFEST_NAME, p.name) for p in sorted(folder.glob("*"))]
            names = [match[0] for match in matches if match and int(match[1]) < int(match[2])]
            if names:
                found.append((folder.name, names))
        return found

    def read_line(self) -> None:
        """List all checkpoints, oldest first, with line (§A11.1) and consistency (§A11.2)."""
        # Directories before head records, so that every listed generation has its record (§A12).
        self.listed = self.directories()
        self.checkpoints: list[dict[str, Any]] = []
        self.problem: SpecError | None = None
        try:
            bounds = self.read_heads()
            last = int(self.listed[-1][0][:8]) if self.listed else 0
            need(last <= self.generation, f"no head record of generation {last}, which has a checkpoint", "head-record")
        except SpecError as error:
            self.generation, bounds, self.problem = 0, {}, error
        self.read_packs()
        for folder, names in self.listed:
            generation, step, save_id = int(folder[:8]), int(folder[9:21]), folder[22:]
            checkpoint: dict[str, Any] = {"generation": generation, "step": step, "save_id": save_id}
            checkpoint |= {"world_size": None, "on_line": (step, save_id) <= bounds.get(generation, (-1, ""))}
            checkpoint |= {"consistent": False, "reason": None, "names": names}
            self.checkpoints.append(checkpoint)
            try:
                checkpoint |= {"world_size": len(self.manifests(checkpoint)), "consistent": True}
            except SpecError as error:
                checkpoint["reason"] = f"{error.kind}: {error}"

    def read_heads(self) -> dict[int, tuple[int, str]]:
        """The last (step, save id) of each generation on the line (§A11.1); find the present generation."""
        heads = {int(p.stem): p for p in self.files("heads", self.run) if re.fullmatch(HEAD_NAME, p.name)}
        generation = self.generation = max(heads, default=1)
        bounds = {generation: (10**12, "")}
        while generation > 1 or generation in heads:
            what, place = f"head record {self.run}/{generation}", {"run": self.run, "generation": generation}
            need(generation in heads, f"{what} is missing", "head-record")
            try:
                data = read_file(heads[generation], "head-record", 2 * BLOCK)
                head = decode_record(data, "head", HEAD_KEYS, place, what)
            except SpecError as error:
                raise SpecError(f"{what}: {error.kind}: {error}", "head-record") from error
            if head["parent"] is None:
                break
            generation = head["parent"]["generation"]
            bounds[generation] = (head["parent"]["step"], head["parent"]["save_id"])
        return bounds

    def manifests(self, checkpoint: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """The manifests of all ranks of a checkpoint, which is refused unless it is consistent (§A11.2)."""
        directory = "{generation:08d}-{step:012d}-{save_id}".format_map(checkpoint)
        folder, result, kind = self.path / "manifests" / self.run / directory, [], "inconsistent-checkpoint"
        ranks = [(int(name[:5]), int(name[9:14])) for name in checkpoint["names"]]
        good = ranks == [(rank, ranks[0][1]) for rank in range(ranks[0][1])]
        need(good, f"{directory}: manifests of (rank, world size) {ranks}", kind)
        for name in checkpoint["names"]:
            data = read_file(folder / name, kind, MANIFEST_MAX)
            result.append(decode_manifest(data, f"{self.run}/{directory}/{name}"))
            for extent in (extent for row in result[-1][1] for extent in row["extents"]):
                while not self.has(extent) and self.read_packs():
                    pass
                if self.unsupported is not None and not self.has(extent):
                    raise self.unsupported
                lost = f"partition {extent['digest'].hex()}, or its base, is in no complete pack"
                need(self.has(extent), f"{lost}; refused packs: {self.damaged}", "missing-partition")
        return result

    def has(self, extent: dict[str, Any]) -> bool:
        """Whether a partition is in a pack with its length, full, or with the bases that it needs (§A11.2)."""
        lengths = {entry["plain_length"] for _, entry in self.locations.get(extent["digest"].hex(), [])}
        return extent["partition_length"] in lengths and self.is_there(extent["digest"].hex())

    def is_there(self, name: str, depth: int = 0) -> bool:
        """Whether a partition is in a pack, full, or with the bases that it needs (§A11.2)."""
        entries = [entry for _, entry in self.locations.get(name, [])] if depth <= DELTAS_MAX + 1 else []
        return any(entry["kind"] == 0 or self.is_there(entry["base_digest"], depth + 1) for entry in entries)

    def read_frame(self, pack: Path, entry: dict[str, Any], above: list[dict[str, Any]]) -> bytes:
        """The plain bytes of one frame."""
        with open_file(pack, "missing-partition") as (read, _):
            data = read(entry["offset"], length_of(entry))
        return decode_frame(data, f"{pack.name}, frame {entry['sequence']}", entry, self.bases, above)[1]

    def bases(self, name: str) -> list[Callable[[list[dict[str, Any]]], bytes]]:
        """Functions that read the copies of a partition."""
        return [functools.partial(self.read_frame, *place) for place in self.locations.get(name, [])]

    def read_partition(self, extent: dict[str, Any], hints: list[str]) -> bytes:
        """The plain bytes of a partition, from the first copy that is intact, the hinted packs first (§A11.3)."""
        tried: list[tuple[Path, dict[str, Any]]] = []
        problem = SpecError(f"partition {extent['digest'].hex()} is in no complete pack", "missing-partition")
        while True:
            places = [place for place in self.locations.get(extent["digest"].hex(), []) if place not in tried]
            for pack, entry in sorted(places, key=lambda place: place[0].name[:32] not in hints):
                tried.append((pack, entry))
                try:
                    need(entry["plain_length"] == extent["partition_length"], f"{pack.name}: another plain_length")
                    return self.read_frame(pack, entry, [])
                except SpecError as error:
                    # A copy that needs a newer program may be intact.
                    problem = problem if problem.kind.startswith("unsupported") else error
            if not self.read_packs():
                raise problem

    def read_tensor(self, row: dict[str, Any], hints: list[str]) -> bytes:
        """The bytes of a row's tensor, every one of them verified."""
        parts = [row["inline"] or b""]
        for extent in row["extents"]:
            data = memoryview(self.read_partition(extent, hints))
            parts.append(bytes(data[extent["offset"] : extent["offset"] + extent["length"]]))
        return b"".join(parts)

    def read_whole(self, checkpoint: dict[str, Any], name: str, rank: int = 0) -> bytes:
        """The bytes of a whole tensor of this name (§A11.4), as far as possible from the manifest of one rank."""
        manifests = self.manifests(checkpoint)
        named = [[(row, {row["name"], *row["aliases"]}) for row in rows] for _, rows in manifests]
        # A name that two rows of one manifest have says nothing.
        said = [Counter(itertools.chain(*(names for _, names in rows))) for rows in named]
        unclear = {word for counts in said for word, count in counts.items() if count > 1}
        need(name not in unclear, f"two tensors of one rank have the name {name}")
        ordered = [(*pair, number) for number in [*range(rank, len(named)), *range(rank)] for pair in named[number]]
        first = next(((row, names - unclear) for row, names, _ in ordered if name in names), None)
        if first is None:
            raise SpecError(f"no tensor has the name {name}")
        own, wanted = first
        agree = [item for item in ordered if all(item[0][key] == own[key] for key in ("dtype", "global_shape"))]
        parts = [(row, manifests[number][0]["packs"]) for row, names, number in agree if wanted & names]
        shape, size = own["global_shape"], DTYPES[own["dtype"]]
        boxes = [tuple(slice(a, a + n) for a, n in zip(row["offset"], row["shape"], strict=True)) for row, _ in parts]
        # Before any memory is taken: a whole may be of any size.
        enough = sum(row["nbytes"] for row, _ in parts) >= math.prod(shape) * size
        need(enough, f"{name}: its parts lack elements of {shape}")
        whole, seen = np.zeros((*shape, size), np.uint8), np.zeros(shape, bool)
        for box in boxes:
            seen[box] = True
        need(seen.all(), f"{name}: its parts lack the element {np.argwhere(~seen)[:1].tolist()} of {shape}")
        for box, (row, hints) in reversed([*zip(boxes, parts, strict=True)]):
            whole[box] = np.frombuffer(self.read_tensor(row, hints), np.uint8).reshape(*row["shape"], size)
        return whole.tobytes()

    def candidates(self, step: int | None) -> list[dict[str, Any]]:
        """The candidates (§A11.1), the preferred first: those on the line, or of that step."""
        named = [c for c in self.checkpoints[::-1] if step in (None, c["step"])]
        if self.problem is not None and (step is None or len(named) != 1):
            raise self.problem
        abandoned = [c for c in named if step is not None and c["generation"] == named[0]["generation"]]
        return [c for c in named if c["on_line"]] or abandoned

    def resolve(self, step: int | None = None, rank: int = 0) -> dict[str, Any]:
        """The newest candidate that can be read in full; list again before an older one is taken (§A12)."""
        wanted = []
        for _ in range(ATTEMPTS):
            wanted = self.candidates(step)
            for checkpoint in wanted:
                if checkpoint is not wanted[0] and self.has_changed():
                    break
                try:
                    return self.read(checkpoint, rank)
                except SpecError as error:
                    if error.kind.startswith("unsupported"):
                        raise
                    checkpoint["reason"] = checkpoint["reason"] or f"{error.kind}: {error}"
            else:
                if not self.has_changed():
                    break
            self.read_line()
        reasons = [f"step {c['step']}: {c['reason']}" for c in wanted]
        kind = "inconsistent-checkpoint" if wanted else "checkpoint-not-found"
        raise SpecError(f"run {self.run}: no checkpoint to read; {reasons}", kind)

    def has_changed(self) -> bool:
        """Whether the run has a checkpoint that it lacked when it was listed."""
        return any(found not in self.listed for found in self.directories())

    def read(self, checkpoint: dict[str, Any], rank: int) -> dict[str, Any]:
        """The tree of a checkpoint as one rank saved it, and the digests of its tensors."""
        manifests = self.manifests(checkpoint)
        need(rank < len(manifests), f"rank {rank} of {len(manifests)}", "inconsistent-checkpoint")
        header, rows = manifests[rank]
        tensors = []
        for row in rows:
            shown = {key: row[key] for key in ("name", "aliases", "dtype", "role", "shape", "nbytes")}
            tensors.append(shown | {"digest": digest(self.read_tensor(row, header["packs"]))})
        return checkpoint | {"metrics": header["metrics"], "tree": header["tree"], "tensors": tensors}


def read_store(path: str | Path, run: str | None = None) -> Store:
    """Open a store at the run of this name, or at its only run."""
    return Store(Path(path), run)


def check_file(kind: str, data: bytes, name: str, row_count: int = 0) -> dict[str, Any]:
    """Decode one structure (frame, pack, manifest, ring, descriptor, head) from bytes; ``name`` is its path.

    Or a tree that stands in a manifest of so many rows.
    """
    if kind == "frame":
        return decode_frame(data, name)[0]
    if kind == "pack":
        entries = decode_pack(lambda at, length: data[at : at + length], len(data), name)

        def read(e: dict[str, Any], above: list[dict[str, Any]]) -> bytes:
            part = data[e["offset"] : e["offset"] + length_of(e)]
            return decode_frame(part, name, e, bases, above)[1]

        def bases(wanted: str) -> list[Callable[[list[dict[str, Any]]], bytes]]:
            return [functools.partial(read, e) for e in entries if e["digest"] == wanted]

        plains = [read(e, []).hex() for e in entries]
        return unpack(data, PACK, name) | {"entries": entries, "plains": plains}
    if kind == "manifest":
        header, rows = decode_manifest(data, name)
        return dict(json.loads(json.dumps({"header": header, "rows": rows}, default=bytes.hex)))
    if kind == "tree":
        tree = parse_json(data, name)
        need(len(check_tree(tree, row_count)) == row_count, f"{name}: a row that the tree does not name")
        return describe_tree(tree)
    if kind == "ring":
        return decode_ring(data, name)
    if kind == "descriptor":
        return decode_record(data, "store", STORE_KEYS, {}, name)
    match = re.fullmatch(rf"(?:.*/)?({RUN})/{HEAD_NAME}", name)
    if kind != "head" or match is None:
        raise SpecError(f"{kind} {name!r}: no such kind, or not the name of a head record")
    return decode_record(data, "head", HEAD_KEYS, {"run": match[1], "generation": int(match[2])}, name)


def main() -> int:
    """Print a run of a store, with the newest checkpoint or that of a step, or print the error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--run", help="needed when the store has several")
    parser.add_argument("--step", type=int, help="default: the newest checkpoint on the line that can be read")
    parser.add_argument("--rank", type=int, default=0, help="whose state to show")
    options = parser.parse_args()
    try:
        store = read_store(options.store, options.run)
        chosen = store.resolve(options.step, options.rank)
    except SpecError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 1
    intact = [c for c in store.checkpoints if c["on_line"] and c["consistent"] and not c["reason"]]
    result = {"store_id": store.descriptor["store_id"], "run": store.run, "generation": store.generation}
    print(
        json.dumps(
            result | {"checkpoints": store.checkpoints, "newest": intact[-1] if intact else None, "chosen": chosen},
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
