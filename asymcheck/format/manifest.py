"""Manifests: Arrow IPC files with one row a tensor (SPEC.md §7.3). Reading them is in ``manifest_reader``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asymcheck.errors import LimitError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.record import canonical_json, parent_to_json
from asymcheck.format.tree import Node, encode_metric
from asymcheck.types import CheckpointRef, Digest, PackId

METADATA_KEY = b"asymcheck"
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


@dataclasses.dataclass(frozen=True)
class Extent:
    """A byte range of one partition that holds the next bytes of a tensor."""

    digest: Digest
    """The partition."""
    offset: int
    """Bytes from the start of the partition's plain bytes."""
    length: int
    """Bytes."""
    partition_length: int
    """Plain bytes of the whole partition."""


@dataclasses.dataclass(frozen=True)
class TensorRow:
    """One tensor as the manifest describes it; its bytes are inline or in extents."""

    name: str
    """Dotted name in the state."""
    aliases: tuple[str, ...]
    """Further names of the same tied tensor."""
    dtype: str
    """A dtype of the registry."""
    role: str
    """A role of the registry."""
    shape: tuple[int, ...]
    """Shape of this rank's piece."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the piece lies in the whole."""
    nbytes: int
    """Bytes of the piece."""
    inline: bytes | None
    """The bytes themselves, or None."""
    extents: tuple[Extent, ...]
    """Where the bytes lie, in order; empty when inline."""


@dataclasses.dataclass(frozen=True)
class ManifestHeader:
    """What a manifest says apart from its rows."""

    run: str
    """The run."""
    ref: CheckpointRef
    """Generation, step and save id."""
    rank: int
    """This rank."""
    world_size: int
    """How many ranks the checkpoint has."""
    parent: CheckpointRef | None
    """The checkpoint before, as the writer knew it."""
    created_ns: int
    """Nanoseconds since 1970-01-01 UTC."""
    writer: str
    """Name and version of the writing program."""
    metrics: Mapping[str, float]
    """Named numbers of the training loop."""
    plan: Mapping[str, object]
    """How the state was cut."""
    packs: tuple[PackId, ...]
    """Packs in which the partitions lay at commit; a hint."""
    tree: Node
    """Structure of the state."""


class Manifest:
    """A checked manifest: its header, and its rows by column."""

    def __init__(self, header: ManifestHeader, batch: pa.RecordBatch, size: int) -> None:
        """Wrap a record batch that ``manifest_reader`` has checked; ``size`` is the file's size in bytes."""
        self.header = header
        self.size = size
        self._batch = batch
        extents = batch.column("extents")
        flat = extents.flatten()
        self.extent_starts: npt.NDArray[np.int64] = list_offsets(extents)
        """For row r, its extents are those from ``extent_starts[r]`` to ``extent_starts[r + 1]``."""
        self.extent_digests: npt.NDArray[np.void] = fixed_bytes(flat.field("digest"))
        self.extent_offsets: npt.NDArray[np.int64] = flat.field("offset").to_numpy()
        self.extent_lengths: npt.NDArray[np.int64] = flat.field("length").to_numpy()
        self.extent_partition_lengths: npt.NDArray[np.int64] = flat.field("partition_length").to_numpy()
        self.nbytes: npt.NDArray[np.int64] = batch.column("nbytes").to_numpy()

    def __len__(self) -> int:
        """Return the number of tensors."""
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

    def row(self, index: int) -> TensorRow:
        """Return one row as a value; for many rows use the columns."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int]) -> list[TensorRow]:
        """Return some rows as values."""
        batch = self._batch.take(pa.array(indices, type=pa.int64()))
        columns = [batch.column(name).to_pylist() for name in SCHEMA.names if name not in ("inline_digest", "extents")]
        return [self._row(index, *values) for index, *values in zip(indices, *columns, strict=True)]

    def _row(self, index: int, *values: object) -> TensorRow:
        name, aliases, dtype, role, shape, whole, offset, nbytes, inline = values
        return TensorRow(
            str(name),
            tuple(aliases),  # type: ignore[arg-type]  # to_pylist is untyped; the schema was compared
            str(dtype),
            str(role),
            tuple(shape),  # type: ignore[arg-type]  # as above
            tuple(whole),  # type: ignore[arg-type]  # as above
            tuple(offset),  # type: ignore[arg-type]  # as above
            int(nbytes),  # type: ignore[call-overload]  # as above
            inline,  # type: ignore[arg-type]  # as above
            self.extents(index),
        )

    def extents(self, index: int) -> tuple[Extent, ...]:
        """Return the extents of one row."""
        span = range(int(self.extent_starts[index]), int(self.extent_starts[index + 1]))
        return tuple(
            Extent(
                Digest(self.extent_digests[i].tobytes()),
                int(self.extent_offsets[i]),
                int(self.extent_lengths[i]),
                int(self.extent_partition_lengths[i]),
            )
            for i in span
        )

    def partitions(self) -> dict[Digest, int]:
        """Return every partition that the manifest names, with its plain length."""
        digests = self.extent_digests.tobytes()
        size = registry.DIGEST_BYTES
        lengths = self.extent_partition_lengths.tolist()
        return {Digest(digests[i * size : (i + 1) * size]): length for i, length in enumerate(lengths)}


def encode_manifest(header: ManifestHeader, rows: Sequence[TensorRow]) -> bytes:
    """Return the bytes of a manifest file; its name is :func:`digest` of them."""
    columns: dict[str, list[object]] = {
        "name": [row.name for row in rows],
        "aliases": [row.aliases for row in rows],
        "dtype": [row.dtype for row in rows],
        "role": [row.role for row in rows],
        "shape": [row.shape for row in rows],
        "global_shape": [row.global_shape for row in rows],
        "offset": [row.offset for row in rows],
        "nbytes": [row.nbytes for row in rows],
        "inline": [row.inline for row in rows],
        "inline_digest": [None if row.inline is None else digest(row.inline) for row in rows],
    }
    arrays = [pa.array(values, type=SCHEMA.field(name).type) for name, values in columns.items()]
    arrays.append(_extents_array(rows))
    return _encode(header, arrays)


def encode_with_header(manifest: Manifest, header: ManifestHeader) -> bytes:
    """Return the bytes of a manifest that has the tensors of another one.

    Raises:
        LimitError: it would be too large.
    """
    return _encode(header, manifest.columns)


def _encode(header: ManifestHeader, columns: Sequence[pa.Array]) -> bytes:
    schema = SCHEMA.with_metadata({METADATA_KEY: _encode_header(header)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    if len(data) > registry.MANIFEST_BYTES_MAX:
        raise LimitError(f"a manifest of {len(data)} bytes is beyond {registry.MANIFEST_BYTES_MAX}")
    return data


def _extents_array(rows: Sequence[TensorRow]) -> pa.Array:
    # Flat columns, not row objects: a million extents take a tenth of the time and memory.
    flat = [extent for row in rows for extent in row.extents]
    starts = np.cumsum([0, *(len(row.extents) for row in rows)], dtype=np.int32)
    fields = [
        pa.array([extent.digest for extent in flat], type=pa.binary(registry.DIGEST_BYTES)),
        pa.array([extent.offset for extent in flat], type=pa.int64()),
        pa.array([extent.length for extent in flat], type=pa.int64()),
        pa.array([extent.partition_length for extent in flat], type=pa.int64()),
    ]
    values = pa.StructArray.from_arrays(fields, fields=list(_EXTENT))
    return pa.ListArray.from_arrays(pa.array(starts), values, type=SCHEMA.field("extents").type)


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
    return canonical_json(fields)


def list_offsets(column: pa.ListArray) -> npt.NDArray[np.int64]:
    """Return where each list of a column begins in its flattened values, and where the last ends."""
    offsets: npt.NDArray[np.int64] = column.offsets.to_numpy().astype(np.int64)
    relative: npt.NDArray[np.int64] = offsets - offsets[0]
    return relative


def fixed_bytes(column: pa.FixedSizeBinaryArray) -> npt.NDArray[np.void]:
    """Return a column of digests as numpy values, without a copy."""
    size = registry.DIGEST_BYTES
    data = column.buffers()[1]
    raw = memoryview(data)[column.offset * size : (column.offset + len(column)) * size] if data is not None else b""
    values: npt.NDArray[np.void] = np.frombuffer(raw, dtype="V16")
    return values
