"""What the manifests of one checkpoint are alike in: parsed once, and kept once for all ranks.

Sixteen thousand ranks have as many manifests, of which most say the same but for some offsets and digests: kept as they
were read, they would take some gigabytes. Nothing is left unchecked: what is taken for the same has been compared, or
has the same digest, by which all bytes of a store are known.
"""

from __future__ import annotations

import secrets

import numpy as np
import pyarrow as pa

from asymcheck.errors import StructureError
from asymcheck.format.manifest_columns import SCHEMA
from asymcheck.format.manifest_values import flattened, integer_column, list_offsets
from asymcheck.format.strict_json import parse_json
from asymcheck.types import Digest

_BEFORE, _AFTER = b'"tree":', b',"world_size":'
"""What stands around the tree in canonical JSON; a header of another form is parsed as a whole."""
_NAMES = [name for name in SCHEMA.names if name != "extents"]
_EXTENTS = SCHEMA.field("extents").type
_FIELDS = list(_EXTENTS.value_type)

RowsName = tuple[Digest, Digest]
"""The digests of a message with rows, of its metadata and of its body: what has the same has the same rows."""


class Alike:
    """Compares each manifest with the one before it, of the rank beside it. For one thread."""

    def __init__(self) -> None:
        """Begin without any."""
        self._tree: tuple[bytes, object] = b"", None
        self._columns: dict[str, pa.Array] = {}
        self.batches: dict[RowsName, pa.RecordBatch] = {}
        """The rows that were met and are checked."""

    def parse(self, text: bytes, where: str) -> object:
        """Return what :func:`parse_json` returns; the tree, if the text before had the same, is the same object.

        Raises:
            StructureError: as that.
        """
        start, end = text.find(_BEFORE) + len(_BEFORE), text.rfind(_AFTER)
        if not len(_BEFORE) <= start < end:
            return parse_json(text, where)
        # A number that the text does not have stands in for the tree. If it comes out under the key of the tree, then
        # that is what stood in this place, from its first byte to its last; else the text is not what it seemed to be.
        # One that nobody can foresee: a text that has those that would be tried takes minutes.
        mark = 1 << 64 | secrets.randbits(64)
        while str(mark).encode() in text:
            mark = 1 << 64 | secrets.randbits(64)
        try:
            if text[start:end] != self._tree[0]:
                self._tree = text[start:end], parse_json(text[start:end], where)
            fields = parse_json(text[:start] + str(mark).encode() + text[end:], where)
        except StructureError:
            return parse_json(text, where)
        if not isinstance(fields, dict) or type(fields.get("tree")) is not int or fields["tree"] != mark:
            return parse_json(text, where)
        return {**fields, "tree": self._tree[1]}

    def keep(self, name: RowsName, batch: pa.RecordBatch) -> None:
        """Keep rows that are checked, in memory of their own; columns that those before have, too, in that of them.

        The file that they were read from, and the header that it has twice, are not kept.
        """
        columns = [self._column(name, batch.column(name)) for name in _NAMES]
        extents = batch.column("extents")
        flat = flattened(extents)
        fields = [self._column(f"extents.{one.name}", flat.field(one.name)) for one in _FIELDS]
        starts = self._column("extents", integer_column(list_offsets(extents).astype(np.int32)))
        # Neither lists nor what is in them are null: that is one of the rules.
        values = pa.StructArray.from_arrays(fields, fields=_FIELDS)
        columns.append(pa.ListArray.from_arrays(starts, values, type=_EXTENTS))
        self.batches[name] = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _column(self, name: str, column: pa.Array) -> pa.Array:
        before = self._columns.get(name)
        if before is None or not before.equals(column):
            # Of one array this would return the same memory, which is all of the file.
            self._columns[name] = pa.concat_arrays([column, column.slice(0, 0)])
        return self._columns[name]
