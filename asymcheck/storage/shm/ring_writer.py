"""A ring being written: places for frames, given out and taken back, and the entries of captures."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asymcheck.errors import AsymcheckError, InvalidInputError, LockTimeoutError, OutOfSpaceError, StorageError
from asymcheck.events import emit
from asymcheck.format import registry
from asymcheck.format.frame import HEADER_BYTES, FrameDescriptor, encode_header, frame_length, payload_offset
from asymcheck.format.layout import ring_name
from asymcheck.format.ring_records import (
    CAPTURES_MAX,
    CAPTURES_OFFSET,
    COMPLETE,
    DATA_OFFSET,
    DURABLE,
    ENTRY_BYTES,
    UNUSED,
    CaptureEntry,
    RingHeader,
    encode_entry,
    encode_ring_header,
)
from asymcheck.storage.allocator import Allocator
from asymcheck.storage.local_files import DESCRIPTORS, is_same_file, translated, wait_lock
from asymcheck.storage.pages import map_file, populate, use_huge_pages
from asymcheck.types import PackId, SaveId

if TYPE_CHECKING:
    # With it comes torch, which takes seconds: who only looks at rings needs none.
    from asymcheck.storage.gpu_staging import Link

_LOCK_S = 10.0
_GROWS_BY = 64 << 20
"""Memory that is reserved in one go. Measured: 1 to 8 GB/s, so that 6 GB at once would hold the first step for long."""


@dataclasses.dataclass(frozen=True, eq=False)
class RingSlot:
    """Place of one frame in a ring."""

    offset: int
    """Bytes from the start of the file."""
    length: int
    """Bytes of payload."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole frame."""
        return frame_length(self.length)


class Ring:
    """A ring of this process. Its lock lasts until :meth:`close`. Thread-safe."""

    def __init__(self, folder: Path, header: RingHeader) -> None:
        """Create the file. Its memory is reserved beside the training, by a thread: it is taken piece by piece anyway.

        Raises:
            OutOfSpaceError: the memory is not there; says what to do.
            StorageError: the folder cannot be used.
        """
        self.header = header
        self.path = folder / ring_name(header.store_id, header.ring_id)
        size = DATA_OFFSET + header.data_bytes
        reserved = min(size, _GROWS_BY)
        self._descriptor = self._open_locked()
        try:
            os.ftruncate(self._descriptor, size)
            status = os.statvfs(folder)
            if status.f_bavail * status.f_frsize < size:
                # Refused at once: later it would be in the middle of a capture.
                raise self._no_room(size)
            self._reserve(0, reserved)
            with translated("map", self.path):
                self._map = map_file(self._descriptor, size)
            self._map[:CAPTURES_OFFSET] = encode_ring_header(header)
        except BaseException:
            self.path.unlink(missing_ok=True)
            DESCRIPTORS.close(self._descriptor)
            raise
        self._memory = memoryview(self._map)
        self._address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        # Where the file system has them (tmpfs: huge=advise). Measured: a ring in them is written in two thirds of the
        # time.
        use_huge_pages(self._address, size)
        self._room = Allocator(DATA_OFFSET, reserved - DATA_OFFSET)
        self._taken: set[RingSlot] = set()
        # How many have a place, by its offset; the others have it alone.
        self._shared: dict[int, int] = {}
        self._entries: dict[int, CaptureEntry] = {}
        self._changed = threading.Condition()
        self._pinned_by: Link | None = None
        self._was_to_be_pinned = False
        self.refused: AsymcheckError | None = None
        """Why not all of the memory was there, once that is known; what there was is used."""
        self._closing = False
        self._growing: threading.Thread | None = None
        if reserved < size:
            self._growing = threading.Thread(target=self._grow, args=(reserved, size), name="asymcheck-ring")
            self._growing.daemon = True
            self._growing.start()
        emit("ring.created", self.path.name, size)

    def _no_room(self, size: int) -> OutOfSpaceError:
        return OutOfSpaceError(
            f"{self.path.parent} has no room for a ring of {size} bytes: give fewer ring_bytes, another "
            f"ring_folder, or make it larger (mount -o remount,size=… {self.path.parent})"
        )

    def _reserve(self, start: int, end: int) -> None:
        """Reserve memory before it is touched: a page for which there is none would kill the process (SIGBUS)."""
        try:
            os.posix_fallocate(self._descriptor, start, end - start)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._no_room(end) from error
            raise StorageError(f"reserve {self.path}: {error.strerror}") from error

    def _grow(self, start: int, size: int) -> None:
        try:
            self._reserve_rest(start, size)
        finally:
            # Whatever happened: others wait for the end of this.
            with self._changed:
                self._growing = None
                self._changed.notify_all()

    def _reserve_rest(self, start: int, size: int) -> None:
        populate(self._address, start)
        for end in (*range(start + _GROWS_BY, size, _GROWS_BY), size):
            try:
                # First, for to reserve takes small pages. Where there are none left it refuses, and kills nobody.
                populate(self._address + start, end - start)
                self._reserve(start, end)
            except AsymcheckError as error:
                self.refused = error
            with self._changed:
                if self._closing or self.refused is not None:
                    return
                self._room.give_back(start, end - start)
                self._changed.notify_all()
            start = end

    def _open_locked(self) -> int:
        """Create the file and lock it before anything else: one without a lock is taken for the rest of a dead process.

        Between the two, another process may be looking at it for that, and remove it.
        """
        while True:
            try:
                with translated("create", self.path):
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    descriptor = DESCRIPTORS.open(os.open, self.path, flags, 0o600)
            except FileNotFoundError as error:
                folder = self.path.parent
                raise StorageError(f"{folder} is not there: make it, or give another ring_folder") from error
            if not wait_lock(descriptor, _LOCK_S, exclusive=True):
                self.path.unlink(missing_ok=True)
                DESCRIPTORS.close(descriptor)
                raise LockTimeoutError(f"lock {self.path}: another process has held it for {_LOCK_S:g} seconds")
            if is_same_file(descriptor, self.path):
                return descriptor
            DESCRIPTORS.close(descriptor)

    def pin(self, link: Link) -> None:
        """Pin the memory for copies that come by a link; tried once, which is enough for all devices of one kind."""
        # To pin memory is to touch it.
        with self._changed:
            self._changed.wait_for(lambda: self._growing is None)
        if not self._was_to_be_pinned and self.refused is None:
            self._was_to_be_pinned = True
            self._pinned_by = link if link.pin(self._memory) else None

    @property
    def free_bytes(self) -> int:
        """Bytes of data that no frame takes, of those that are reserved by now."""
        with self._changed:
            return self._room.free_bytes

    def take(self, length: int) -> RingSlot | None:
        """Return a place for a frame with ``length`` bytes of payload; None when none is free.

        Raises:
            InvalidInputError: it would not fit into an empty ring.
            OutOfSpaceError: nor would it fit if all were free, for not all of the memory was there.
        """
        if frame_length(length) > self.header.data_bytes:
            raise InvalidInputError(
                f"a partition of {length} bytes does not fit into a ring of {self.header.data_bytes}: raise ring_bytes"
            )
        with self._changed:
            # While it grows nothing has to make room: that would be taken from older captures, or end in streaming.
            while (offset := self._room.take(frame_length(length))) is None and self._growing is not None:
                self._changed.wait()
            if offset is None:
                # Frames in use become free later; the memory that was reserved has room then.
                if self.refused is not None and not self._taken:
                    raise self.refused
                return None
            slot = RingSlot(offset, length)
            self._taken.add(slot)
        # Before anything else of it is overwritten, so that what lay here is no frame any more.
        self._memory[offset : offset + registry.BLOCK_BYTES] = bytes(registry.BLOCK_BYTES)
        return slot

    def share(self, place: RingSlot) -> RingSlot | None:
        """Return a further hold on the frame of a place, which is free when all were given back; None if it is free."""
        with self._changed:
            if place not in self._taken:
                return None
            another = RingSlot(place.offset, place.length)
            self._taken.add(another)
            self._shared[place.offset] = self._shared.get(place.offset, 1) + 1
            return another

    def payload(self, place: RingSlot) -> memoryview:
        """Return where the payload of a frame goes."""
        start = place.offset + payload_offset(place.length)
        return self._memory[start : start + place.length]

    def frame(self, place: RingSlot) -> memoryview:
        """Return a whole frame."""
        return self._memory[place.offset : place.offset + place.frame_bytes]

    def complete(self, place: RingSlot, descriptor: FrameDescriptor) -> None:
        """Make a frame of a place whose payload is there: the padding, and last of all the header."""
        frame = self.frame(place)
        end = payload_offset(place.length) + place.length
        frame[end:] = bytes(len(frame) - end)
        header = encode_header(descriptor, PackId(self.header.ring_id), place.offset // registry.BLOCK_BYTES)
        frame[:HEADER_BYTES] = header

    def give_back(self, place: RingSlot) -> None:
        """Free a place; who waits for room is woken. To free it twice is no error, for it may be another's by then."""
        with self._changed:
            if place in self._taken:
                self._taken.remove(place)
                holders = self._shared.pop(place.offset, 1) - 1
                if holders:
                    self._shared[place.offset] = holders
                    return
                self._room.give_back(place.offset, place.frame_bytes)
                self._changed.notify_all()

    def wait_for_room(self, seconds: float) -> None:
        """Wait until something is freed, or for some time."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """Wake who waits for room, to look at something else."""
        with self._changed:
            self._changed.notify_all()

    def enter(self, manifest: RingSlot, save_id: SaveId) -> int | None:
        """Say that a capture is complete; return the number of its entry, None when there are too many captures."""
        with self._changed:
            number = next((number for number in range(CAPTURES_MAX) if number not in self._entries), None)
            if number is not None:
                self._write_entry(number, CaptureEntry(manifest.offset, save_id, COMPLETE))
        return number

    def mark_durable(self, number: int) -> None:
        """Say that a capture is committed in the store."""
        with self._changed:
            self._write_entry(number, dataclasses.replace(self._entries[number], state=DURABLE))

    def forget(self, number: int) -> None:
        """Say that the frames of a capture are about to be given up."""
        with self._changed:
            del self._entries[number]
            start = CAPTURES_OFFSET + number * ENTRY_BYTES
            self._memory[start : start + ENTRY_BYTES] = UNUSED

    def _write_entry(self, number: int, entry: CaptureEntry) -> None:
        self._entries[number] = entry
        start = CAPTURES_OFFSET + number * ENTRY_BYTES
        self._memory[start : start + ENTRY_BYTES] = encode_entry(entry)

    def close(self, *, keep: bool = False) -> None:
        """Remove the file and give its memory back; with ``keep`` leave it to the next start."""
        with self._changed:
            growing, self._closing = self._growing, True
        if growing is not None:
            growing.join()
        if not keep:
            self.path.unlink(missing_ok=True)
        if self._pinned_by is not None:
            self._pinned_by.unpin(self._memory)
        self._memory.release()
        # A view that somebody still has keeps the memory; the file is gone anyway.
        with contextlib.suppress(BufferError):
            self._map.close()
        # Taken out first: by a second close the number may be that of another thread's file.
        descriptor, self._descriptor = self._descriptor, -1
        DESCRIPTORS.close(descriptor)
