"""Read frames on several threads, and verify each before its bytes are passed on.

Frames are read into private memory, or directly into the memory of a tensor. Frames in the ring of a dead process are
used in place, because no process writes to that memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from asymcheck.codecs.decode import BaseReader, FrameReader, base_reader, decode_checked
from asymcheck.errors import (
    INCONCLUSIVE,
    DamagedPartitionError,
    DigestMismatchError,
    FormatError,
    LockTimeoutError,
    StorageError,
)
from asymcheck.events import timed
from asymcheck.format.digest import digest
from asymcheck.format.frame import HEADER_BYTES, FrameDescriptor, check_frame, check_header, check_padding
from asymcheck.format.pack import check_entry, entry_length
from asymcheck.format.registry import BLOCK_BYTES, CODEC_IDENTITY
from asymcheck.restore.partition_locator import PartitionCopy, PartitionLocator
from asymcheck.storage import damaged_frames
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme import run_with_slots
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest

_ONE_THREAD_BYTES = 16 << 20
"""Number of bytes up to which the calling thread reads alone, because starting threads would take longer."""

Place = Callable[[Digest, memoryview], None]
"""Receive the verified plain bytes of a partition, on a worker thread. The view must not be kept."""
Room = Callable[[Digest], memoryview | None]
"""Return memory for the plain bytes of a partition, or None; called on worker threads.

The memory receives the bytes before they are verified. If they are intact, ``place`` receives the same view.
"""


def fetch(
    sources: PartitionLocator,
    digests: Sequence[Digest],
    place: Place,
    tier: ReadTier,
    room: Room = lambda _name: None,
) -> None:
    """Read partitions on several threads, and pass each to ``place``, in any order.

    The slots of ``tier`` receive the frames. Each thread has one slot.

    Raises:
        DamagedPartitionError: no copy of a partition is intact; the message names pack and frame.
        StorageError: the drive failed.
    """

    def read(name: Digest, slot: Slot) -> None:
        plain = read_any(sources, name, slot, room(name))
        with timed("place", len(plain)):
            place(name, plain)

    ordered = sources.in_reading_order(digests)
    largest, total = sources.expect(ordered)
    threads = tier.config.slots if total > _ONE_THREAD_BYTES else 1
    run_with_slots(ordered, read, slots=tier.slots, payload_bytes=largest, threads=threads, name="fetch")


def read_any(
    sources: PartitionLocator,
    name: Digest,
    slot: Slot | None = None,
    room: memoryview | None = None,
    first: PartitionCopy | None = None,
) -> memoryview:
    """Read a partition from its first intact copy, and return the plain bytes.

    The frame is read into ``slot``, by default into new memory. The plain bytes of the first copy may be read into
    ``room``. ``first`` is the copy to read first, by default the first one in ``sources``.

    Raises:
        DamagedPartitionError: no copy is intact; the message names packs and frames.
        LockTimeoutError: another process has locked a pack that may hold an intact copy.
    """
    first = first or sources.copy(name)
    slot = slot or Slot(first.stored_length)
    problems: list[str] = []
    for copy in itertools.chain([first], sources.other_copies(name, [first])):
        if problems:
            slot, room = Slot(max(slot.payload_bytes, copy.stored_length, BLOCK_BYTES)), None
        try:
            with contextlib.ExitStack() as slots:
                return read_checked(copy, name, slot, _base_reader_of(sources, slots), room)
        except (LockTimeoutError, *INCONCLUSIVE):
            raise
        except StorageError as error:
            # Errors of the drive do not name the frame.
            problems.append(f"{copy}: {error}")
        except FormatError as error:
            problems.append(str(error))
        _note_damage(sources, copy)
    sources.check_locks()
    raise DamagedPartitionError("; ".join(problems), name)


def _note_damage(sources: PartitionLocator, copy: PartitionCopy) -> None:
    """Record a damaged frame and its bases, so that later saves of this process write these partitions again."""
    for frame in (copy, *(base for name in copy.bases() for base in sources.base_copies(name))):
        damaged_frames.note(frame.pack.header.pack_id, int(frame.entry["offset"]))


def _base_reader_of(sources: PartitionLocator, slots: contextlib.ExitStack) -> BaseReader:
    """Return a function that reads bases from ``sources``, into memory that ``slots`` holds."""

    def copies_of(name: Digest) -> Iterator[FrameReader]:
        near = sources.base_copies(name)
        # Copies in other packs are only searched if none of these is intact.
        for copy in itertools.chain(near, sources.other_copies(name, near)):
            yield partial(read_frame, copy, slots.enter_context(sources.tier.slots.slot(copy.stored_length)))

    return base_reader(copies_of)


def read_frame(
    copy: PartitionCopy, slot: Slot, room: memoryview | None = None
) -> tuple[FrameDescriptor, memoryview, str]:
    """Read a frame and verify everything except its plain bytes; return descriptor, payload and name.

    A plain payload is read into ``room`` if possible, any other one into ``slot``.

    Raises:
        FormatError: the frame is damaged.
        StorageError: the drive failed.
    """
    where, entry = str(copy), copy.entry
    place = copy.pack.header.pack_id, copy.pack.stamped(copy.sequence), where
    with timed("read", copy.stored_length):
        if room is not None and (len(room) != copy.stored_length or copy.pack.direct_shift(copy.sequence) is None):
            room = None
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


def read_stored(copy: PartitionCopy, slot: Slot) -> tuple[FrameDescriptor, memoryview]:
    """Read a frame to be copied as stored, and verify it without its base; see :func:`read_frame`."""
    descriptor, payload, where = read_frame(copy, slot)
    # read_frame() verified the checksum of an encoded payload. The checksum of a plain payload is its digest.
    if descriptor.codec == CODEC_IDENTITY and digest(payload) != descriptor.digest:
        raise DigestMismatchError(f"digest mismatch in {where}")
    return descriptor, payload


def read_checked(
    copy: PartitionCopy, name: Digest, slot: Slot, read_base: BaseReader, room: memoryview | None = None
) -> memoryview:
    """Read and decode a frame, and verify that its plain bytes have the digest ``name``.

    ``read_base`` reads the base of the frame.

    Raises:
        FormatError: the frame is damaged.
        StorageError: the drive failed.
    """
    descriptor, payload, where = read_frame(copy, slot, room)
    return decode_checked(name, descriptor, payload, where, read_base, room=room)
