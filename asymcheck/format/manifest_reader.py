"""Read manifests. Check every rule of SPEC.md §A8, column by column, before any value is returned."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asymcheck.errors import BadMagicError, FormatError, LimitError, StructureError
from asymcheck.format import registry
from asymcheck.format.digest import Buffer, digest
from asymcheck.format.digest_set import has_two_values
from asymcheck.format.layout import is_run
from asymcheck.format.manifest import (
    METADATA_KEY,
    SCHEMA,
    Manifest,
    ManifestHeader,
    distinct,
    fixed_bytes,
    flattened,
    integer_column,
    is_valid,
    list_offsets,
)
from asymcheck.format.record import parent_from_json, parse_id, parse_json, strings
from asymcheck.format.registry import check_reader_features, check_version
from asymcheck.format.spans import read_spans
from asymcheck.format.tree import decode_metric
from asymcheck.types import CheckpointRef, Digest, PackId, SaveId

_TREE_PREFIX, _TREE_SUFFIX = b'"tree":', b',"world_size":'
"""Text before and after the tree in canonical JSON. Headers in another form are parsed without the cache."""
_FLAT_COLUMNS = [name for name in SCHEMA.names if name != "extents"]
_EXTENTS = SCHEMA.field("extents").type
_FIELDS = list(_EXTENTS.value_type)

BatchKey = tuple[Digest, Digest]
"""Digests of the metadata and the body of a record batch message. Equal keys mean equal rows."""


class ManifestCache:
    """Trees and columns that the manifests of one checkpoint share. Not thread-safe.

    A checkpoint of 16,000 ranks has as many manifests, which differ in a few offsets and digests. Without sharing, they
    would take some gigabytes. Shared data is compared byte by byte, or by digest, so that nothing stays unchecked.
    """

    def __init__(self) -> None:
        self._tree: tuple[bytes, object] = b"", None
        self._columns: dict[str, pa.Array] = {}
        self.batches: dict[BatchKey, pa.RecordBatch] = {}
        """Checked rows."""

    def parse(self, text: bytes, where: str) -> object:
        """Parse a header as :func:`parse_json` does. Reuse the tree of the previous header if it has the same text."""
        start, end = text.find(_TREE_PREFIX) + len(_TREE_PREFIX), text.rfind(_TREE_SUFFIX)
        if not len(_TREE_PREFIX) <= start < end:
            return parse_json(text, where)
        # Parse the header with a placeholder number in place of the tree. If the result has the placeholder as its
        # tree, the replaced bytes are exactly the tree. The number is random: a hostile header that contains
        # predictable placeholders could keep this loop busy for minutes.
        placeholder = 1 << 64 | secrets.randbits(64)
        while str(placeholder).encode() in text:
            placeholder = 1 << 64 | secrets.randbits(64)
        try:
            if text[start:end] != self._tree[0]:
                self._tree = text[start:end], parse_json(text[start:end], where)
            fields = parse_json(text[:start] + str(placeholder).encode() + text[end:], where)
        except StructureError:
            return parse_json(text, where)
        if not isinstance(fields, dict) or type(fields.get("tree")) is not int or fields["tree"] != placeholder:
            return parse_json(text, where)
        return {**fields, "tree": self._tree[1]}

    def keep(self, name: BatchKey, batch: pa.RecordBatch) -> None:
        """Copy checked rows into the cache. Columns that equal those of the previous rows share their memory."""
        columns = [self._column(name, batch.column(name)) for name in _FLAT_COLUMNS]
        extents = batch.column("extents")
        flat = flattened(extents)
        fields = [self._column(f"extents.{field.name}", flat.field(field.name)) for field in _FIELDS]
        starts = self._column("extents", integer_column(list_offsets(extents).astype(np.int32)))
        # Lists and their items are never null: this is a checked rule.
        values = pa.StructArray.from_arrays(fields, fields=_FIELDS)
        columns.append(pa.ListArray.from_arrays(starts, values, type=_EXTENTS))
        self.batches[name] = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _column(self, name: str, column: pa.Array) -> pa.Array:
        cached = self._columns.get(name)
        if cached is None or not cached.equals(column):
            # concat_arrays of a single array would return its memory, which keeps the whole file alive.
            self._columns[name] = pa.concat_arrays([column, column.slice(0, 0)])
        return self._columns[name]


DIMENSIONS_MAX = 64
_INVALID = "not a valid Arrow IPC file"
_FILE_MAGIC = b"ARROW1"
_HEAD_BYTES = 8  # the magic, and two bytes that readers ignore
_NOT_NULLABLE = [name for name in SCHEMA.names if not SCHEMA.field(name).nullable]
_EXACT_PRODUCT_MAX = float(1 << 62)
"""A product below this value in binary64 arithmetic is less than 2^63."""


def decode_manifest(data: Buffer, where: str) -> Manifest:
    """Read and check a manifest file. The caller has compared its digest with its name."""
    header, rows = _open(data, where, parse_json)
    batch = _read_rows(rows, where)
    _check_rows(batch, where)
    return Manifest(header, batch)


def decode_manifests(files: Sequence[tuple[Buffer, str]], cache: ManifestCache) -> list[Manifest]:
    """Read and check several manifests of one checkpoint. Equal parts are kept once in ``cache``.

    Raises:
        FormatError: a manifest breaks a rule.
    """
    opened = [_open(data, where, cache.parse) for data, where in files]
    keys = [(digest(rows.metadata), digest(rows.body)) for _, rows in opened]
    new: dict[BatchKey, tuple[pa.RecordBatch, str]] = {}
    for key, (_, rows), (_, where) in zip(keys, opened, files, strict=True):
        # Replicas have the same rows, which are read and checked once.
        if key not in new and key not in cache.batches:
            new[key] = _read_rows(rows, where), where
    if new:
        _check_all(list(new.values()))
    for key, (batch, _) in new.items():
        cache.keep(key, batch)
    return [Manifest(header, cache.batches[key]) for key, (header, _) in zip(keys, opened, strict=True)]


def _check_all(batches: Sequence[tuple[pa.RecordBatch, str]]) -> None:
    try:
        # Rules apply to rows, so checking the rows of all manifests together takes a fraction of the calls.
        columns = [pa.concat_arrays([batch.column(name) for batch, _ in batches]) for name in SCHEMA.names]
        _check_rows(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), "")
    except FormatError:
        # Find the manifest that breaks a rule. No manifest may do so: two ranks may give one partition two lengths.
        for batch, where in batches:
            _check_rows(batch, where)


def check_manifest(manifest: Manifest, where: str) -> None:
    """Check the rows of a manifest that this program built, so that every committed manifest can be read."""
    _check_rows(pa.RecordBatch.from_arrays(manifest.columns, schema=SCHEMA), where)


def _open(data: Buffer, where: str, parse: Callable[[bytes, str], object]) -> tuple[ManifestHeader, pa.Message]:
    """Read the header of a manifest, and return it with the unread record batch message."""
    if len(data) > registry.MANIFEST_BYTES_MAX:
        raise LimitError(f"{where}: manifest of {len(data)} bytes exceeds {registry.MANIFEST_BYTES_MAX} bytes")
    if bytes(data[: len(_FILE_MAGIC)]) != _FILE_MAGIC:
        # Arrow checks only the magic at the end of the file.
        raise BadMagicError(f"{where}: not an Arrow IPC file")
    buffer = pa.py_buffer(data)
    try:
        with pa.ipc.open_file(buffer) as reader:
            schema, batches = reader.schema, reader.num_record_batches
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise StructureError(f"{where}: {_INVALID}: {error}") from error
    metadata = dict(schema.metadata or {})
    if METADATA_KEY not in metadata:
        raise StructureError(f"{where}: schema metadata has no entry 'asymcheck'")
    # Version and features come before all other rules, so that no manifest of a newer program is taken for damaged.
    fields = _known(parse(metadata[METADATA_KEY], f"{where}: header"), where)
    try:
        rows = _rows_message(buffer, schema, batches, where)
    except (pa.ArrowException, OSError, MemoryError, StopIteration) as error:
        # A message reader raises StopIteration when the file has too few messages.
        raise StructureError(f"{where}: {_INVALID}: {error}") from error
    # The dict drops repeated keys. The comparison of schemas counts the entries.
    if len(metadata) != 1 or not schema.equals(SCHEMA.with_metadata(metadata), check_metadata=True):
        raise StructureError(f"{where}: the schema has more metadata than one entry 'asymcheck'")
    return _decode_header(fields, where), rows


def _read_rows(rows: pa.Message, where: str) -> pa.RecordBatch:
    try:
        batch = pa.ipc.read_record_batch(rows, SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise StructureError(f"{where}: {_INVALID}: {error}") from error
    # Arrow does not validate the offsets of empty columns, and aborts the process if they are wrong.
    return batch if batch.num_rows else pa.RecordBatch.from_pylist([], schema=SCHEMA)


def _rows_message(buffer: pa.Buffer, schema: pa.Schema, batches: int, where: str) -> pa.Message:
    # Read the batch from the messages in file order and only compare the footer, because its offsets may be hostile.
    # Refuse a compressed body before it is read, because it could expand to any size.
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(buffer.slice(_HEAD_BYTES)))
    first, second = messages.read_next_message(), messages.read_next_message()
    is_one_batch = (first.type, second.type, batches) == ("schema", "record batch", 1)
    if not is_one_batch or not schema.remove_metadata().equals(SCHEMA):
        raise StructureError(f"{where}: schema or number of record batches is not that of a manifest")
    is_same = pa.ipc.read_schema(first).equals(schema, check_metadata=True)
    if not is_same or _is_compressed(second.metadata.to_pybytes(), where):
        raise StructureError(f"{where}: footer and schema message disagree, or the record batch is compressed")
    return second


def _is_compressed(message: bytes, where: str) -> bool:
    """Tell whether the flatbuffer of a record batch message has field 3 (compression) of its header."""
    try:
        root = struct.unpack_from("<I", message)[0]
        header_field = _field(message, root, 2)
        header = header_field + struct.unpack_from("<I", message, header_field)[0]
        return _field(message, header, 3) != 0
    except struct.error as error:
        raise StructureError(f"{where}: damaged record batch message") from error


def _field(message: bytes, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer table, or 0 if the field is absent."""
    vtable = table - struct.unpack_from("<i", message, table)[0]
    size = struct.unpack_from("<H", message, vtable)[0]
    slot = 4 + 2 * number
    offset = struct.unpack_from("<H", message, vtable + slot)[0] if slot + 2 <= size else 0
    return table + int(offset) if offset else 0


def _known(fields: object, where: str) -> dict[str, object]:
    """Return the object of a header whose version and features this program knows."""
    if not isinstance(fields, dict):
        raise StructureError(f"{where}: manifest header is not an object")
    version = fields.get("format")
    if type(version) is not int:
        raise StructureError(f"{where}: manifest header has no format version")
    check_version(version, where)
    check_reader_features(strings(fields, "reader_features", where), where)
    return fields


def _decode_header(fields: dict[str, Any], where: str) -> ManifestHeader:
    if not isinstance(fields.get("packs"), list):
        raise StructureError(f"{where}: packs is not a list")
    if not isinstance(fields.get("merged", {}), dict):
        raise StructureError(f"{where}: merged is not an object")
    try:
        header = ManifestHeader(
            run=fields["run"],
            ref=CheckpointRef(fields["generation"], fields["step"], SaveId(parse_id(fields["save_id"], where))),
            rank=fields["rank"],
            world_size=fields["world_size"],
            parent=parent_from_json(fields["parent"], where),
            created_ns=fields["created_ns"],
            writer=fields["writer"],
            metrics={str(name): decode_metric(value, where) for name, value in fields["metrics"].items()},
            plan=fields["plan"],
            packs=tuple(PackId(parse_id(pack, where)) for pack in fields["packs"]),
            tree=fields["tree"],
            store_ranks=read_spans(fields, where),
            elsewhere=bytes.fromhex(fields.get("elsewhere", "")),
            merged=fields.get("merged"),
        )
        if header.elsewhere.hex() != fields.get("elsewhere", ""):
            raise StructureError(f"{where}: elsewhere {fields['elsewhere']!r:.100} is not lower-case hexadecimal")
        _check_header(header, where)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StructureError(f"{where}: manifest header is incomplete or mistyped: {error!r}") from error
    return header


def _check_header(header: ManifestHeader, where: str) -> None:
    ref = header.ref
    integers = (ref.generation, ref.step, header.rank, header.world_size, header.created_ns)
    is_typed = (
        all(type(number) is int for number in integers) and type(header.writer) is str and type(header.plan) is dict
    )
    is_in_range = (
        is_typed
        and 1 <= ref.generation <= registry.GENERATION_MAX
        and 0 <= ref.step <= registry.STEP_MAX
        and (header.parent is None or header.parent.generation <= ref.generation)
        and 0 <= header.rank < header.world_size <= registry.WORLD_SIZE_MAX
        and 0 <= header.created_ns < 1 << 64
    )
    has_plan = type(header.plan.get("number")) is int and type(header.plan.get("kind")) is str
    if not (is_in_range and has_plan and type(header.run) is str and is_run(header.run)):
        raise StructureError(f"{where}: a value in the manifest header is outside its limits")
    if len(header.metrics) > registry.METRICS_MAX:
        raise LimitError(f"{where}: {len(header.metrics)} metrics exceed the limit of {registry.METRICS_MAX}")


def _check_rows(batch: pa.RecordBatch, where: str) -> None:
    for name in _NOT_NULLABLE:
        if batch.column(name).null_count:
            raise StructureError(f"{where}: column {name} has nulls")
    extents = batch.column("extents")
    flat = flattened(extents)
    nested = [flat, *(flat.field(name) for name in ("digest", "offset", "length", "partition_length"))]
    lists = [flattened(batch.column(name)) for name in ("aliases", "shape", "global_shape", "offset")]
    if any(column.null_count for column in (*nested, *lists)):
        raise StructureError(f"{where}: a nested value is null")
    unknown = set(distinct(batch.column("role"))[0]) - set(registry.ROLES)
    if unknown:
        raise StructureError(f"{where}: unknown role {min(unknown)!r}")
    _check_shapes(batch, where)
    _check_extents(batch, flat, where)
    if has_two_values(fixed_bytes(flat.field("digest")), flat.field("partition_length").to_numpy()):
        raise StructureError(f"{where}: one partition has two lengths")


def _check_shapes(batch: pa.RecordBatch, where: str) -> None:
    dtypes, dtype_of = distinct(batch.column("dtype"))
    unknown = set(dtypes) - set(registry.DTYPE_BYTES)
    if unknown:
        raise StructureError(f"{where}: unknown dtype {min(unknown)!r}")
    shapes = (batch.column(name) for name in ("shape", "global_shape", "offset"))
    starts = [list_offsets(column) for column in shapes]
    if len(batch) and np.diff(starts[0]).max() > DIMENSIONS_MAX:
        # Check this before computing products: the product of a million dimensions takes hours.
        raise StructureError(f"{where}: a tensor of more than {DIMENSIONS_MAX} dimensions")
    if any(not np.array_equal(starts[0], other) for other in starts[1:]):
        raise StructureError(f"{where}: shape, global shape and offset have different numbers of dimensions")
    shape, whole, offset = (flattened(batch.column(name)).to_numpy() for name in ("shape", "global_shape", "offset"))
    if len(shape) and (min(shape.min(), offset.min()) < 0 or np.any(shape > whole) or np.any(offset > whole - shape)):
        raise StructureError(f"{where}: a part exceeds its tensor")
    sizes = np.array([registry.DTYPE_BYTES[dtype] for dtype in dtypes], dtype=np.int64)
    nbytes, begins = batch.column("nbytes").to_numpy(), starts[0]
    expected = _products(shape, begins, sizes[dtype_of])
    for row in np.flatnonzero((expected != nbytes) | (expected < 0)).tolist():
        # Recompute with Python integers, because the vectorised product may exceed 64 bits.
        size = int(sizes[dtype_of[row]])
        for extent in shape[begins[row] : begins[row + 1]].tolist():
            size *= extent
        if size != nbytes[row] or size >= 1 << 63:
            raise StructureError(f"{where}: row {row}: {nbytes[row]} bytes do not match its shape and dtype")


def _products(
    values: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], factors: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the product of each list of non-negative numbers and its factor, or -1 if it may exceed 64 bits."""
    products: npt.NDArray[np.int64] = factors.copy()
    rows = np.flatnonzero(np.diff(starts))
    if len(rows):
        # Empty lists take no values, so the remaining lists are contiguous as reduceat requires.
        begins = starts[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            approximate = np.multiply.reduceat(values.astype(np.float64), begins) * factors[rows]
            exact = np.multiply.reduceat(values, begins) * factors[rows]
        products[rows] = np.where(approximate < _EXACT_PRODUCT_MAX, exact, -1)
    return products


def _check_extents(batch: pa.RecordBatch, flat: pa.StructArray, where: str) -> None:
    nbytes, inline = batch.column("nbytes").to_numpy(), batch.column("inline")
    offset, length, whole = (flat.field(name).to_numpy() for name in ("offset", "length", "partition_length"))
    if len(length) and whole.max() > registry.PARTITION_BYTES_MAX:
        raise LimitError(f"{where}: partition of {whole.max()} bytes exceeds {registry.PARTITION_BYTES_MAX} bytes")
    if len(length) and (
        length.min() < 1 or offset.min() < 0 or np.any(length > whole) or np.any(offset > whole - length)
    ):
        raise StructureError(f"{where}: an extent exceeds its partition")
    starts = list_offsets(batch.column("extents"))
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length, dtype=np.int64)])[starts]
    is_inline = is_valid(inline)
    has_digest = is_valid(batch.column("inline_digest"))
    expected = np.where(is_inline, 0, nbytes)
    if (
        not np.array_equal(np.diff(sums), expected)
        or np.any(~is_inline & (nbytes == 0))
        or np.any(is_inline != has_digest)
    ):
        raise StructureError(f"{where}: the extents of a row do not add up to its bytes")
    names = batch.column("inline_digest")
    for row in np.flatnonzero(is_inline).tolist():
        data = inline[row].as_py()
        if len(data) > registry.INLINE_BYTES_MAX:
            raise LimitError(f"{where}: row {row}: {len(data)} inline bytes exceed {registry.INLINE_BYTES_MAX}")
        if len(data) != nbytes[row] or digest(data) != names[row].as_py():
            raise StructureError(f"{where}: row {row}: inline bytes do not match their length or digest")
