"""Encode and decode the header and the capture entries of a ring (SPEC.md §B8)."""

from __future__ import annotations

import dataclasses
import struct

from asymcheck.errors import StructureError
from asymcheck.format import registry
from asymcheck.format.catalog_records import owner_from_json
from asymcheck.format.digest import Buffer, is_zero, sum8
from asymcheck.format.layout import is_run
from asymcheck.format.record import RECORD_BYTES, decode_record, encode_record, integer, parse_id, string
from asymcheck.types import Owner, SaveId

CAPTURES_MAX = 64
CAPTURES_OFFSET = RECORD_BYTES
DATA_OFFSET = CAPTURES_OFFSET + registry.BLOCK_BYTES
COMPLETE, DURABLE = 1, 2

_ENTRY = struct.Struct("<Q16sQ24s8s")
ENTRY_BYTES = _ENTRY.size
UNUSED = bytes(ENTRY_BYTES)
"""An unused entry."""
_SUMMED = ENTRY_BYTES - 8


@dataclasses.dataclass(frozen=True)
class RingHeader:
    """The header record of a ring."""

    ring_id: bytes
    """16 random bytes; the ``place_id`` of the frames."""
    store_id: bytes
    store: str
    run: str
    rank: int
    owner: Owner
    data_bytes: int
    """Bytes of data, a multiple of the block."""
    created_ns: int
    writer: str


@dataclasses.dataclass(frozen=True)
class CaptureEntry:
    """The entry of a capture in a ring."""

    offset: int
    """Bytes from the start of the file to the frame of the manifest."""
    save_id: SaveId
    state: int


def encode_ring_header(header: RingHeader) -> bytes:
    """Return the header record of a ring.

    Raises:
        LimitError: the path of the store does not fit the record.
    """
    fields = {**vars(header), "kind": "ring", "format": registry.FORMAT_WRITE}
    ids = {"ring_id": header.ring_id.hex(), "store_id": header.store_id.hex()}
    return encode_record({**fields, **ids, "owner": vars(header.owner)})


def decode_ring_header(data: Buffer, where: str) -> RingHeader:
    """Read the header record of a ring."""
    value, _ = decode_record(data, "ring", where)
    run, size = string(value, "run", where), integer(value, "data_bytes", where)
    if not is_run(run) or size % registry.BLOCK_BYTES or not size:
        raise StructureError(f"{where}: invalid run {run!r} or data size of {size} bytes")
    return RingHeader(
        ring_id=parse_id(value.get("ring_id"), where),
        store_id=parse_id(value.get("store_id"), where),
        store=string(value, "store", where),
        run=run,
        rank=integer(value, "rank", where),
        owner=owner_from_json(value.get("owner"), where),
        data_bytes=size,
        created_ns=integer(value, "created_ns", where),
        writer=string(value, "writer", where),
    )


def encode_entry(entry: CaptureEntry) -> bytes:
    """Return the 64 bytes of a capture entry."""
    summed = _ENTRY.pack(entry.offset, entry.save_id, entry.state, bytes(24), bytes(8))[:_SUMMED]
    return summed + sum8(summed)


def decode_entry(data: Buffer, data_bytes: int) -> CaptureEntry | None:
    """Read a capture entry of a ring with ``data_bytes`` bytes of data. Return None for an unused or invalid entry."""
    offset, save_id, state, reserved, own_sum = _ENTRY.unpack_from(data)
    if own_sum != sum8(bytes(data[:_SUMMED])) or state not in (COMPLETE, DURABLE) or not is_zero(reserved):
        return None
    if offset % registry.BLOCK_BYTES or not DATA_OFFSET <= offset < DATA_OFFSET + data_bytes:
        return None
    return CaptureEntry(offset, SaveId(save_id), state)
