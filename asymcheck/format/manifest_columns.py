"""The columns of a manifest, made of Python values and numpy arrays (SPEC.md §7.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asymcheck.format import registry
from asymcheck.format.digest import digest

_MANY = 4096
"""So many rows are worth that import."""


def integer_column(values: npt.NDArray[np.signedinteger]) -> pa.Array:
    """Return integers as a column of the same width, without a copy of contiguous ones."""
    contiguous = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [None, pa.py_buffer(contiguous)])


def list_offsets(column: pa.ListArray) -> npt.NDArray[np.int64]:
    """Return where each list of a column begins in its flattened values, and where the last ends."""
    offsets: npt.NDArray[np.int64] = column.offsets.to_numpy().astype(np.int64)
    relative: npt.NDArray[np.int64] = offsets - offsets[0]
    return relative


def flattened(column: pa.ListArray) -> pa.Array:
    """Return the values of all lists of a column, of which none is null, without a copy."""
    first, last = (column.offsets[place].as_py() for place in (0, -1))
    return column.values.slice(first, last - first)


def fixed_bytes(column: pa.FixedSizeBinaryArray) -> npt.NDArray[np.void]:
    """Return a column of digests as numpy values, without a copy."""
    size = registry.DIGEST_BYTES
    data = column.buffers()[1]
    raw = memoryview(data)[column.offset * size : (column.offset + len(column)) * size] if data is not None else b""
    values: npt.NDArray[np.void] = np.frombuffer(raw, dtype="V16")
    return values


def is_valid(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return for each row whether it is not null."""
    bitmap = column.buffers()[0]
    if bitmap is None or not column.null_count:
        return np.full(len(column), fill_value=True)
    end = column.offset + len(column)
    bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), count=end, bitorder="little")
    valid: npt.NDArray[np.bool_] = bits[column.offset :].astype(np.bool_)
    return valid


def distinct(column: pa.StringArray) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the values of a column, each once, and for each row the number of its value among them."""
    if len(column) < _MANY:
        texts = column.to_pylist()
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        return list(numbers), np.array([numbers[text] for text in texts], dtype=np.int64)
    encoded = column.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def picked(column: pa.Array, rows: Sequence[int]) -> list[Any]:
    """Return some rows as Python values."""
    if len(rows) * 8 < len(column):
        return [column[row].as_py() for row in rows]
    values = column.to_pylist()
    return [values[row] for row in rows]


Column: TypeAlias = pa.Array
"""The values of one field, by row."""
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
"""The columns that say what tensors are, not what is in them."""


def describing_columns(values: Mapping[str, Sequence[object]]) -> list[Column]:
    """Return the columns of :data:`DESCRIBING`, of one value a row each."""
    return [pa.array(values[name], type=SCHEMA.field(name).type) for name in DESCRIBING]


def inline_columns(inline: Sequence[bytes | None]) -> list[Column]:
    """Return the columns of bytes that stay in the manifest, by row, and of their digests."""
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
    """Return the column of extents: for row r those from ``starts[r]`` to ``starts[r + 1]`` of the other arrays."""
    fields = [
        pa.Array.from_buffers(_EXTENT.field("digest").type, len(digests), [None, pa.py_buffer(digests.tobytes())]),
        *(integer_column(values) for values in (offsets, lengths, partition_lengths)),
    ]
    values = pa.StructArray.from_arrays(fields, fields=list(_EXTENT))
    return pa.ListArray.from_arrays(integer_column(starts), values, type=SCHEMA.field("extents").type)
