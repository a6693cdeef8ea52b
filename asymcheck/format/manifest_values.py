"""Columns of a manifest as numpy arrays and Python values.

Many methods of Arrow's arrays import ``pyarrow.compute``, and ``pyarrow.array()`` of a numpy array imports
``numpy.ma``. Both take tens of milliseconds in every process that saves or restores, so they are not used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asymcheck.format import registry

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


def picked(column: pa.Array, rows: Sequence[int]) -> list[object]:
    """Return some rows as Python values."""
    if len(rows) * 8 < len(column):
        return [column[row].as_py() for row in rows]
    values = column.to_pylist()
    return [values[row] for row in rows]
