"""Build and encode manifests: Arrow IPC files with one row per tensor (SPEC.md §A8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asymcheck.errors import LimitError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.record import canonical_json, parent_to_json
from asymcheck.format.spans import Spans
from asymcheck.format.tree import Node, encode_metric, value_features
from asymcheck.types import CheckpointRef, Digest, PackId

# Many methods of Arrow's arrays import pyarrow.compute, and pyarrow.array() of a numpy array imports numpy.ma. Both
# take tens of milliseconds in every process that saves or restores, so this module avoids them.
_COMPUTE_ROWS_MIN = 4096
"""Number of rows from which importing pyarrow.compute pays off."""


def integer_column(values: npt.NDArray[np.signedinteger]) -> pa.Array:
    """Return integers as a column of the same width. Contiguous arrays are not copied."""
    contiguous = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [None, pa.py_buffer(contiguous)])


def list_offsets(column: pa.ListArray) -> npt.NDArray[np.int64]:
    """Return the start of each list of a column in its flattened values, and the end of the last list."""
    offsets: npt.NDArray[np.int64] = column.offsets.to_numpy().astype(np.int64)
    relative: npt.NDArray[np.int64] = offsets - offsets[0]
    return relative


def flattened(column: pa.ListArray) -> pa.Array:
    """Return the values of all lists of a column without nulls, without a copy."""
    start, end = (column.offsets[index].as_py() for index in (0, -1))
    return column.values.slice(start, end - start)


def fixed_bytes(column: pa.FixedSizeBinaryArray) -> npt.NDArray[np.void]:
    """Return a column of digests as numpy values, without a copy."""
    size = registry.DIGEST_BYTES
    data = column.buffers()[1]
    raw = memoryview(data)[column.offset * size : (column.offset + len(column)) * size] if data is not None else b""
    values: npt.NDArray[np.void] = np.frombuffer(raw, dtype="V16")
    return values


def is_valid(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return for each row whether its value is not null."""
    bitmap = column.buffers()[0]
    if bitmap is None or not column.null_count:
        return np.full(len(column), fill_value=True)
    end = column.offset + len(column)
    bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), count=end, bitorder="little")
    valid: npt.NDArray[np.bool_] = bits[column.offset :].astype(np.bool_)
    return valid


def distinct(column: pa.StringArray) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the distinct values of a column, and the index of each row's value among them."""
    if len(column) < _COMPUTE_ROWS_MIN:
        values = column.to_pylist()
        indices = {value: index for index, value in enumerate(dict.fromkeys(values))}
        return list(indices), np.array([indices[value] for value in values], dtype=np.int64)
    encoded = column.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


Column: TypeAlias = pa.Array
"""The values of one field of the schema, by row."""
_INT_LIST = pa.list_(pa.field("item", pa.int64(), nullable=False))
_EXTENT = pa.struct(
    [
        pa.field("digest", pa.binary(registry.DIGEST_BYTES), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("partition_length", pa.int64(), nullable=False),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("name", pa.utf8(), nullable=False),
        pa.field("aliases", pa.list_(pa.field("item", pa.utf8(), nullable=False)), nullable=False),
        pa.field("dtype", pa.utf8(), nullable=False),
        pa.field("role", pa.utf8(), nullable=False),
        pa.field("shape", _INT_LIST, nullable=False),
        pa.field("global_shape", _INT_LIST, nullable=False),
        pa.field("offset", _INT_LIST, nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("inline", pa.binary(), nullable=True),
        pa.field("inline_digest", pa.binary(registry.DIGEST_BYTES), nullable=True),
        pa.field("extents", pa.list_(pa.field("item", _EXTENT, nullable=False)), nullable=False),
    ]
)
DESCRIBING = SCHEMA.names[:8]
"""Columns that describe tensors, without their bytes."""


def describing_columns(values: Mapping[str, Sequence[object]]) -> list[Column]:
    """Return the columns of :data:`DESCRIBING` from lists of values."""
    return [pa.array(values[name], type=SCHEMA.field(name).type) for name in DESCRIBING]


def inline_columns(inline: Sequence[bytes | None]) -> list[Column]:
    """Return the columns ``inline`` and ``inline_digest``."""
    digests = [None if data is None else digest(data) for data in inline]
    return [
        pa.array(inline, type=SCHEMA.field("inline").type),
        pa.array(digests, type=SCHEMA.field("inline_digest").type),
    ]


def extents_column(
    starts: npt.NDArray[np.int32],
    digests: npt.NDArray[np.void],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    partition_lengths: npt.NDArray[np.int64],
) -> Column:
    """Return the column of extents. Row r has the extents from ``starts[r]`` to ``starts[r + 1]``."""
    fields = [
        pa.Array.from_buffers(_EXTENT.field("digest").type, len(digests), [None, pa.py_buffer(digests.tobytes())]),
        *(integer_column(values) for values in (offsets, lengths, partition_lengths)),
    ]
    values = pa.StructArray.from_arrays(fields, fields=list(_EXTENT))
    return pa.ListArray.from_arrays(integer_column(starts), values, type=SCHEMA.field("extents").type)


METADATA_KEY = b"asymcheck"
_TYPED_VALUE = b'["x","'


@dataclasses.dataclass(frozen=True)
class Extent:
    """A byte range of one partition that stores consecutive bytes of a tensor."""

    digest: Digest
    offset: int
    """Bytes from the start of the partition's plain bytes."""
    length: int
    partition_length: int
    """Plain bytes of the whole partition."""


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """A row of a manifest: one tensor, with its bytes inline or in extents."""

    name: str
    aliases: tuple[str, ...]
    dtype: str
    role: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    nbytes: int
    inline: bytes | None
    extents: tuple[Extent, ...]
    """Byte ranges of partitions, in order; empty for an inline tensor."""


@dataclasses.dataclass(frozen=True)
class ManifestHeader:
    """Header of a manifest."""

    run: str
    ref: CheckpointRef
    rank: int
    world_size: int
    parent: CheckpointRef | None
    """The previous checkpoint on the line, as the writer knew it."""
    created_ns: int
    writer: str
    metrics: Mapping[str, float]
    plan: Mapping[str, object]
    """How the state was cut into partitions."""
    packs: tuple[PackId, ...]
    """Packs that stored the partitions at commit; a hint."""
    tree: Node
    store_ranks: Spans | None = None
    """The ranks that save into the same store; None if all ranks do."""
    elsewhere: bytes = b""
    """One bit for each of :meth:`Manifest.partitions`, lowest first: whether another store of the job pushes the
    partition. A hint."""
    merged: Mapping[str, object] | None = None
    """Method and sources of a merged checkpoint; None if a training saved it."""


class Manifest:
    """A checked manifest: the header, and the rows as columns."""

    def __init__(self, header: ManifestHeader, batch: pa.RecordBatch) -> None:
        """Wrap a record batch that ``manifest_reader`` checked or :func:`manifest_of` built."""
        self.header = header
        self._batch = batch
        extents = batch.column("extents")
        flat = flattened(extents)
        self.extent_starts: npt.NDArray[np.int64] = list_offsets(extents)
        """Row r has the extents from ``extent_starts[r]`` to ``extent_starts[r + 1]``."""
        self.extent_digests: npt.NDArray[np.void] = fixed_bytes(flat.field("digest"))
        self.extent_offsets: npt.NDArray[np.int64] = flat.field("offset").to_numpy()
        self.extent_lengths: npt.NDArray[np.int64] = flat.field("length").to_numpy()
        self.extent_partition_lengths: npt.NDArray[np.int64] = flat.field("partition_length").to_numpy()
        self.nbytes: npt.NDArray[np.int64] = batch.column("nbytes").to_numpy()

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors before encoding."""
        return int(self.nbytes.sum())

    @property
    def columns(self) -> list[pa.Array]:
        """The columns of :data:`SCHEMA`."""
        columns: list[pa.Array] = self._batch.columns
        return columns

    def names(self) -> list[str]:
        """Return the names of all rows."""
        names: list[str] = self._batch.column("name").to_pylist()
        return names

    def roles(self) -> list[str]:
        """Return the roles of all rows."""
        roles: list[str] = self._batch.column("role").to_pylist()
        return roles

    def rows(self) -> list[TensorRow]:
        """Return all rows. Reading single columns is faster."""
        names = (name for name in SCHEMA.names if name not in ("inline_digest", "extents"))
        columns = [self._batch.column(name).to_pylist() for name in names]
        rows = []
        for index, values in enumerate(zip(*columns, strict=True)):
            name, aliases, dtype, role, shape, whole, offset, nbytes, inline = values
            parts = tuple(aliases), dtype, role, tuple(shape), tuple(whole), tuple(offset)
            rows.append(TensorRow(name, *parts, nbytes, inline, self.extents(index)))
        return rows

    def extents(self, index: int) -> tuple[Extent, ...]:
        """Return the extents of one row."""
        columns = self.extent_digests, self.extent_offsets, self.extent_lengths, self.extent_partition_lengths
        own = slice(*self.extent_starts[index : index + 2])
        return tuple(Extent(*values) for values in zip(*(column[own].tolist() for column in columns), strict=True))

    def partitions(self) -> dict[Digest, int]:
        """Return the digests of all partitions in the manifest, with their plain lengths."""
        return dict(zip(self.extent_digests.tolist(), self.extent_partition_lengths.tolist(), strict=True))

    def elsewhere(self) -> set[Digest]:
        """Return the partitions that another store of the job pushes, as far as the hint says."""
        bits = np.unpackbits(np.frombuffer(self.header.elsewhere, dtype=np.uint8), bitorder="little").tolist()
        return {name for name, bit in zip(self.partitions(), bits, strict=False) if bit} if bits else set()


def elsewhere_bits(partitions: Iterable[Digest], elsewhere: Container[Digest]) -> bytes:
    """Return :attr:`ManifestHeader.elsewhere` for a manifest with these partitions."""
    bits = np.array([name in elsewhere for name in partitions], dtype=bool)
    return np.packbits(bits, bitorder="little").tobytes().rstrip(b"\0")


def manifest_of(header: ManifestHeader, columns: Sequence[pa.Array]) -> Manifest:
    """Build a manifest from all columns of the schema."""
    return Manifest(header, pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def renamed_rows(manifest: Manifest, names: Mapping[int, Sequence[str]]) -> list[Column]:
    """Return the columns of some rows. ``names`` has the new name and aliases of each row."""
    _, _, *columns = (column.take(pa.array(list(names), pa.int64())) for column in manifest.columns)
    aliases = [others for _, *others in names.values()]
    first = pa.array([name for name, *_ in names.values()], pa.utf8())
    return [first, pa.array(aliases, SCHEMA.field("aliases").type), *columns]


def encode(manifest: Manifest, header: ManifestHeader | None = None) -> bytes:
    """Return the bytes of a manifest file; ``header`` replaces the header of the manifest.

    Raises:
        LimitError: the file would be too large.
    """
    schema = SCHEMA.with_metadata({METADATA_KEY: _encode_header(header or manifest.header)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(manifest.columns, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    if len(data) > registry.MANIFEST_BYTES_MAX:
        raise LimitError(f"manifest of {len(data)} bytes exceeds the limit of {registry.MANIFEST_BYTES_MAX} bytes")
    return data


def _encode_header(header: ManifestHeader) -> bytes:
    fields: dict[str, object] = {
        "format": registry.FORMAT_WRITE,
        "reader_features": [],
        "run": header.run,
        "generation": header.ref.generation,
        "step": header.ref.step,
        "save_id": header.ref.save_id.hex(),
        "world_size": header.world_size,
        "rank": header.rank,
        "parent": parent_to_json(header.parent),
        "created_ns": header.created_ns,
        "writer": header.writer,
        "metrics": {name: encode_metric(value) for name, value in header.metrics.items()},
        "plan": dict(header.plan),
        "packs": [pack.hex() for pack in header.packs],
        "tree": header.tree,
    }
    if header.store_ranks is not None:
        fields["store_ranks"] = header.store_ranks
    if header.elsewhere:
        fields["elsewhere"] = header.elsewhere.hex()
    if header.merged is not None:
        fields["merged"] = header.merged
    text = canonical_json(fields)
    # Most states have no typed value. The search in the text costs less than a walk over the tree.
    features = value_features(header.tree) if _TYPED_VALUE in text else ()
    return canonical_json({**fields, "reader_features": sorted(features)}) if features else text
