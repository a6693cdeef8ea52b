"""The columns of a manifest, made of Python values and numpy arrays (SPEC.md §7.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.manifest_values import integer_column

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
