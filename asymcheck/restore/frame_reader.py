"""Fetch: frames read several at a time, every one checked before its bytes are handed on.

Frames are read into private memory or into the memory of the tensor that wants them. Frames in the ring of a dead
process are used in place, because nobody writes to that memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from asymcheck.codecs.decode import BaseReader, FrameReader, base_reader, decode_checked
from asymcheck.errors import UNKNOWING, DamagedPartitionError, FormatError, StorageError
from asymcheck.events import timed
from asymcheck.format.frame import HEADER_BYTES, FrameDescriptor, check_frame, check_header, check_padding
from asymcheck.format.pack import check_entry, entry_length
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator
from asymcheck.storage.nvme import run_with_slots
from asymcheck.storage.slots import Slot, SlotPool
from asymcheck.types import Digest

_ONE_THREAD_BYTES = 16 << 20
"""Up to so many bytes the calling thread reads: to start others, and to wait for them, takes longer than they save."""

Place = Callable[[Digest, memoryview], None]
"""Takes the checked plain bytes of a partition; called on worker threads; must not keep the view."""
Room = Callable[[Digest], memoryview | None]
"""Gives memory that the first copy of a partition can be read into directly, or None; called on worker threads.

The bytes are there before they are checked. If they are sound, ``place`` gets the same view.
"""


def fetch(
    sources: PartitionLocator,
    digests: Sequence[Digest],
    place: Place,
    slots: SlotPool,
    threads: int,
    room: Room = lambda _name: None,
) -> None:
    """Read partitions by several threads and hand each to ``place``, in no particular order.

    Raises:
        DamagedPartitionError: no copy of a partition is intact; the message names pack and frame.
        StorageError: the device refused.
    """

    def read(name: Digest, slot: Slot) -> None:
        plain = read_any(sources, name, slot, room(name))
        with timed("place", len(plain)):
            place(name, plain)

    ordered = sources.in_reading_order(digests)
    sources.expect(ordered)
    largest, total = sources.payload_bytes(digests)
    threads = threads if total > _ONE_THREAD_BYTES else 1
    run_with_slots(ordered, read, slots=slots, payload_bytes=largest, threads=threads, name="fetch")


def stored_length(copy: PartitionCopy) -> int:
    """Return the bytes of payload of a copy's frame."""
    return int(copy.pack.entries[copy.sequence]["stored_length"])


def read_plain(sources: PartitionLocator, name: Digest, first: PartitionCopy) -> memoryview:
    """Do as :func:`read_any` does, in memory of its own."""
    return read_any(sources, name, Slot(stored_length(first)), first=first)


def read_any(
    sources: PartitionLocator,
    name: Digest,
    slot: Slot,
    room: memoryview | None = None,
    first: PartitionCopy | None = None,
) -> memoryview:
    """Read a partition from the first of its copies that is intact and return its plain bytes.

    Args:
        sources: the packs to look into.
        name: the digest of the partition.
        slot: memory that the bytes are read into, as a rule.
        room: memory that they are read into directly instead, and are in if the first copy is sound.
        first: the copy to read first; None for that which ``sources`` found first.

    Raises:
        DamagedPartitionError: no copy is intact; the message names packs and frames.
    """
    first = first or sources.copy(name)
    read_base = _base_reader_of(sources)
    problems: list[str] = []
    for copy in itertools.chain([first], sources.other_copies(name, [first])):
        if problems:
            slot, room = Slot(max(slot.payload_bytes, stored_length(copy), BLOCK_BYTES)), None
        try:
            return read_checked(copy, name, slot, read_base, room)
        except UNKNOWING:
            raise
        except StorageError as error:
            # An error of the device does not know which frame it hit.
            problems.append(f"{copy}: {error}")
        except FormatError as error:
            problems.append(str(error))
    raise DamagedPartitionError("; ".join(problems), name)


def _base_reader_of(sources: PartitionLocator) -> BaseReader:
    """Return a reader of bases from the packs of ``sources``."""

    def read_copy(copy: PartitionCopy) -> tuple[FrameDescriptor, memoryview, str]:
        return read_frame(copy, Slot(stored_length(copy)))

    def copies_of(name: Digest) -> Iterator[FrameReader]:
        near = sources.base_copies(name)
        # Only when none of them is intact are others worth the way.
        for copy in itertools.chain(near, sources.other_copies(name, near)):
            yield partial(read_copy, copy)

    return base_reader(copies_of)


def read_frame(
    copy: PartitionCopy, slot: Slot, room: memoryview | None = None
) -> tuple[FrameDescriptor, memoryview, str]:
    """Read one frame and check all but its plain bytes; return descriptor, payload, and its name.

    The payload is read into ``room`` if one is given and the device does not refuse, else into ``slot``.

    Raises:
        FormatError: of the kind that fits.
        StorageError: the device refused.
    """
    where, entry = str(copy), copy.pack.entries[copy.sequence]
    place = copy.pack.header.pack_id, copy.pack.stamped(copy.sequence), where
    with timed("read", stored_length(copy)):
        parts = None if room is None else copy.pack.read_payload(copy.sequence, room, slot)
        frame = copy.pack.read_frame(copy.sequence, slot) if parts is None else slot.memory[:0]
    if parts is None:
        descriptor, payload = check_frame(frame, *place)
        check_entry(entry, descriptor, where)
        return descriptor, payload, where
    head, payload, padding = parts
    descriptor = check_header(head, entry_length(entry), *place)
    check_entry(entry, descriptor, where)
    check_padding((head[HEADER_BYTES:], padding), where)
    return descriptor, payload, where


def read_checked(
    copy: PartitionCopy, name: Digest, slot: Slot, read_base: BaseReader, room: memoryview | None = None
) -> memoryview:
    """Read one frame and return its plain bytes, which have the digest ``name``; see :func:`read_frame`.

    ``read_base`` reads what the frame is encoded against.

    Raises:
        FormatError: of the kind that fits.
        StorageError: the device refused.
    """
    descriptor, payload, where = read_frame(copy, slot, room)
    return decode_checked(name, descriptor, payload, where, read_base)
