"""Small rings for tests, with their content."""

import dataclasses
from pathlib import Path

from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.ring_records import RingHeader
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.storage.shm.ring_writer import Ring, RingSlot
from asymcheck.types import Owner, SaveId

BLOCK = 4096
HEADER = RingHeader(
    ring_id=bytes(range(16)),
    store_id=bytes(range(16, 32)),
    store="/stores/one",
    run="run",
    rank=0,
    owner=Owner(4711, 12, "a boot", "pid:[1]"),
    data_bytes=16 * BLOCK,
    created_ns=5,
    writer="tests",
)
SAVE = SaveId(b"s" * 16)


def make_ring(folder: Path, **changes: object) -> Ring:
    """Return a ring of 16 blocks."""
    return Ring(folder, dataclasses.replace(HEADER, **changes))  # type: ignore[arg-type]  # fields by name


def put(ring: Ring, payload: bytes) -> RingSlot:
    """Put a complete frame into the ring."""
    slot = ring.take(len(payload))
    assert slot is not None
    ring.payload(slot)[:] = payload
    ring.complete(slot, FrameDescriptor.identity(digest(payload), len(payload)))
    return slot


def payloads(reader: RingReader) -> dict[int, bytes]:
    """Return the frames that a reader found, by offset."""
    return {offset: bytes(reader.payload_at(offset)) for offset in reader.entries["offset"].tolist()}


def found(path: Path) -> dict[int, bytes]:
    """Return the frames in the ring at ``path``."""
    with RingReader(path) as reader:
        return payloads(reader)
