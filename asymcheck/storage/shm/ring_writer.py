"""Writing of a ring in shared memory: allocation of frames, and entries of captures."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asymcheck.errors import AsymcheckError, InvalidInputError, OutOfSpaceError, ReadOnlyStoreError, StorageError
from asymcheck.events import emit
from asymcheck.executor import Thread, start
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
from asymcheck.storage.local_files import DESCRIPTORS, Files, create_locked, is_same_file, translated
from asymcheck.storage.pages import map_file, populate, use_huge_pages
from asymcheck.types import PackId, SaveId, readable_size

if TYPE_CHECKING:
    # This module loads torch, which takes seconds. Reading a ring does not need torch.
    from asymcheck.storage.gpu_staging import Link

_GROWTH_BYTES = 64 << 20
"""Memory reserved per request. At 1 to 8 GB/s, as measured, reserving 6 GB at once would block the first step."""


@dataclasses.dataclass(frozen=True, eq=False)
class RingSlot:
    """Allocated range of a ring for one frame."""

    offset: int
    """Bytes from the start of the file."""
    length: int
    """Bytes of payload."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frame, including header and padding."""
        return frame_length(self.length)


class Ring:
    """Ring of this process, locked until :meth:`close`. Thread-safe."""

    def __init__(self, folder: Path, header: RingHeader) -> None:
        """Create the file. A background thread reserves most of the memory while training continues.

        Raises:
            OutOfSpaceError: the folder does not have enough free memory.
            StorageError: the folder cannot be used, or no thread can be started.
        """
        self.header = header
        self.path = folder / ring_name(header.store_id, header.ring_id)
        size = DATA_OFFSET + header.data_bytes
        reserved = min(size, _GROWTH_BYTES)
        try:
            # Another process would take an unlocked ring for orphaned.
            self._descriptor = create_locked(Files(), self.path, 0o600)
        except FileNotFoundError as error:
            raise StorageError(f"{folder} does not exist: create it, or choose another ring_folder") from error
        except (OutOfSpaceError, ReadOnlyStoreError) as error:
            # Their advice is for files of a store.
            raise StorageError(
                f"cannot create a ring in {folder}: {error.__cause__}. Make the folder writable, or choose another "
                "ring_folder"
            ) from error
        try:
            with translated("enlarge", self.path):
                os.ftruncate(self._descriptor, size)
                status = os.statvfs(folder)
            # A tmpfs without a limit (size=0) reports no blocks.
            if status.f_blocks and status.f_bavail * status.f_frsize < size:
                # Fail now instead of in the middle of a capture.
                raise self._out_of_space(size)
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
        # The file system may support huge pages (tmpfs: huge=advise). Measured: two thirds of the time to write a ring.
        use_huge_pages(self._address, size)
        self._allocator = Allocator(DATA_OFFSET, reserved - DATA_OFFSET)
        self._taken: set[RingSlot] = set()
        # Number of holders of each shared slot, by offset. Other slots have one holder.
        self._holders: dict[int, int] = {}
        self._entries: dict[int, CaptureEntry] = {}
        self._changed = threading.Condition()
        self._pinned_by: Link | None = None
        self._is_pin_attempted = False
        self.refused: AsymcheckError | None = None
        """Error of a failed reservation. The memory that was reserved before is still used."""
        self._closing = False
        self._growing: Thread | None = None
        if reserved < size:
            self._grow_later(reserved, size)
        emit("ring.created", self.path.name, size)

    def _out_of_space(self, size: int) -> OutOfSpaceError:
        return OutOfSpaceError(
            f"{self.path.parent} has not enough free memory for a ring of {readable_size(size)}: reduce ring_bytes, "
            f"choose another ring_folder, or enlarge the file system (mount -o remount,size=… {self.path.parent})"
        )

    def _reserve(self, start: int, end: int) -> None:
        """Reserve memory before it is touched. Touching a page without memory would kill the process (SIGBUS)."""
        try:
            os.posix_fallocate(self._descriptor, start, end - start)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._out_of_space(end) from error
            raise StorageError(f"reserve {self.path}: {error.strerror}") from error

    def _grow_later(self, reserved: int, size: int) -> None:
        self._growing = Thread(self._grow, "asymcheck-ring", (reserved, size))
        try:
            start(self._growing)
        except StorageError:
            self._growing = None
            self.close()
            raise

    def _grow(self, start: int, size: int) -> None:
        try:
            self._reserve_rest(start, size)
        finally:
            # Always wake the threads that wait for the end of the growth.
            with self._changed:
                self._growing = None
                self._changed.notify_all()

    def _reserve_rest(self, start: int, size: int) -> None:
        populate(self._address, start)
        for end in (*range(start + _GROWTH_BYTES, size, _GROWTH_BYTES), size):
            try:
                # Populate before fallocate, which uses small pages. Without free memory, populate fails harmlessly.
                populate(self._address + start, end - start)
                self._reserve(start, end)
            except AsymcheckError as error:
                self.refused = error
            with self._changed:
                if self._closing or self.refused is not None:
                    return
                self._allocator.give_back(start, end - start)
                self._changed.notify_all()
            start = end

    def pin(self, link: Link) -> None:
        """Pin the memory for copies from a device. Only the first call tries, and pins for all devices."""
        # Pinning touches the memory, which must be reserved first.
        with self._changed:
            self._changed.wait_for(lambda: self._growing is None)
        if not self._is_pin_attempted and self.refused is None:
            self._is_pin_attempted = True
            self._pinned_by = link if link.pin(self._memory) else None

    def take(self, length: int) -> RingSlot | None:
        """Allocate a slot for a frame with ``length`` bytes of payload; None if no free range is long enough.

        Raises:
            InvalidInputError: the frame does not fit into an empty ring.
            OutOfSpaceError: the frame does not fit, because not all of the memory could be reserved.
        """
        if frame_length(length) > self.header.data_bytes:
            raise InvalidInputError(
                f"a partition of {length} bytes does not fit into a ring of {self.header.data_bytes}: raise ring_bytes"
            )
        with self._changed:
            # Wait while the ring grows. Otherwise the caller would evict older captures, or stream.
            while (offset := self._allocator.take(frame_length(length))) is None and self._growing is not None:
                self._changed.wait()
            if offset is None:
                # Frames in use are freed later, so the reserved memory may suffice then.
                if self.refused is not None and not self._taken:
                    raise self.refused
                return None
            slot = RingSlot(offset, length)
            self._taken.add(slot)
        # Erase the old header before the payload is overwritten.
        self._memory[offset : offset + registry.BLOCK_BYTES] = bytes(registry.BLOCK_BYTES)
        return slot

    def share(self, place: RingSlot) -> RingSlot | None:
        """Return another reference to the frame of a slot; None if the slot is free."""
        with self._changed:
            if place not in self._taken:
                return None
            another = RingSlot(place.offset, place.length)
            self._taken.add(another)
            self._holders[place.offset] = self._holders.get(place.offset, 1) + 1
            return another

    def payload(self, place: RingSlot) -> memoryview:
        """Return the memory of the payload of a frame."""
        start = place.offset + payload_offset(place.length)
        return self._memory[start : start + place.length]

    def frame(self, place: RingSlot) -> memoryview:
        """Return a whole frame."""
        return self._memory[place.offset : place.offset + place.frame_bytes]

    def complete(self, place: RingSlot, descriptor: FrameDescriptor) -> None:
        """Complete a frame whose payload is written: write the padding, then the header."""
        frame = self.frame(place)
        end = payload_offset(place.length) + place.length
        frame[end:] = bytes(len(frame) - end)
        header = encode_header(descriptor, PackId(self.header.ring_id), place.offset // registry.BLOCK_BYTES)
        frame[:HEADER_BYTES] = header

    def give_back(self, place: RingSlot) -> None:
        """Release a slot and wake waiting threads. Releasing twice is allowed."""
        with self._changed:
            if place in self._taken:
                self._taken.remove(place)
                holders = self._holders.pop(place.offset, 1) - 1
                if holders:
                    self._holders[place.offset] = holders
                    return
                self._allocator.give_back(place.offset, place.frame_bytes)
                self._changed.notify_all()

    def wait_for_room(self, seconds: float) -> None:
        """Wait until a slot is freed, for at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """Wake the threads in :meth:`wait_for_room`, so that they check other conditions."""
        with self._changed:
            self._changed.notify_all()

    def is_removed(self) -> bool:
        """Tell whether another program has removed the file, so that no capture survives this process."""
        return not is_same_file(self._descriptor, self.path)

    def enter(self, manifest: RingSlot, save_id: SaveId) -> int | None:
        """Record that a capture is complete; return the number of its entry, or None if all entries are used."""
        with self._changed:
            number = next((number for number in range(CAPTURES_MAX) if number not in self._entries), None)
            if number is not None:
                self._write_entry(number, CaptureEntry(manifest.offset, save_id, COMPLETE))
        return number

    def mark_durable(self, number: int) -> None:
        """Record that a capture is committed in the store."""
        with self._changed:
            self._write_entry(number, dataclasses.replace(self._entries[number], state=DURABLE))

    def forget(self, number: int) -> None:
        """Remove the entry of a capture before its frames are released."""
        with self._changed:
            del self._entries[number]
            start = CAPTURES_OFFSET + number * ENTRY_BYTES
            self._memory[start : start + ENTRY_BYTES] = UNUSED

    def _write_entry(self, number: int, entry: CaptureEntry) -> None:
        self._entries[number] = entry
        start = CAPTURES_OFFSET + number * ENTRY_BYTES
        self._memory[start : start + ENTRY_BYTES] = encode_entry(entry)

    def close(self, *, keep: bool = False) -> None:
        """Remove the file and release its memory. With ``keep``, leave the file to the next start."""
        with self._changed:
            growing, self._closing = self._growing, True
        if growing is not None:
            growing.join()
        if not keep:
            self.path.unlink(missing_ok=True)
        if self._pinned_by is not None:
            self._pinned_by.unpin(self._memory)
        self._memory.release()
        # A remaining view keeps the memory, but the file is removed.
        with contextlib.suppress(BufferError):
            self._map.close()
        # Forget the descriptor first: a second close might hit a file that reuses the number.
        descriptor, self._descriptor = self._descriptor, -1
        DESCRIPTORS.close(descriptor)
