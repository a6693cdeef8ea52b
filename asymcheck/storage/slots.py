"""Slots: page-aligned memory for one frame, reused from frame to frame and from save to save."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

import numpy as np

from asymcheck.format import registry
from asymcheck.format.frame import HEADER_BYTES, FrameDescriptor, encode_header, frame_length, payload_offset
from asymcheck.storage.pages import HUGE_PAGE, use_huge_pages
from asymcheck.types import PackId


def _whole_pages(length: int) -> int:
    return -(-length // HUGE_PAGE) * HUGE_PAGE


class Slot:
    """Memory for one frame of up to ``payload_bytes`` of payload, aligned as direct I/O asks.

    Not thread-safe: one thread uses a slot at a time. Views of :attr:`memory` must be released before the slot is.
    """

    def __init__(self, payload_bytes: int) -> None:
        """Map anonymous memory for the header's block, the payload with its shift, and its padding."""
        self.payload_bytes = payload_bytes
        length = payload_bytes + 3 * registry.BLOCK_BYTES
        self._map = mmap.mmap(-1, _whole_pages(length) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages: the kernel pins 4 pages for a direct write of 8 MiB instead of 2,048. Measured: a quarter of the
        # processor time, and half the time of a write to a recycled file.
        address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        use_huge_pages(address, len(self._map))
        # They lie at multiples of their size only; what comes before the first multiple is never touched.
        start = -address % HUGE_PAGE
        self.memory = memoryview(self._map)[start : start + length]

    @classmethod
    def inside(cls, memory: memoryview, payload_bytes: int) -> Slot:
        """Return a slot in a part of another one's memory that holds a whole frame; it begins at a block there."""
        slot = cls.__new__(cls)
        slot.payload_bytes, slot.memory = payload_bytes, memory
        return slot

    def payload(self, length: int) -> memoryview:
        """Return where the payload of ``length`` bytes goes."""
        start = payload_offset(length)
        return self.memory[start : start + length]

    def fill(self, payload: memoryview | bytes) -> None:
        """Put a payload in its place, and zeros behind it."""
        start, end = payload_offset(len(payload)), frame_length(len(payload))
        self.memory[start : start + len(payload)] = payload
        self.memory[start + len(payload) : end] = bytes(end - start - len(payload))

    def stamp(self, descriptor: FrameDescriptor, pack_id: PackId, sequence: int) -> memoryview:
        """Put the header before the payload, zero the padding, and return the whole frame."""
        behind, end = descriptor.payload_offset + descriptor.stored_length, descriptor.frame_length
        self.stamp_header(descriptor, pack_id, sequence)
        self.memory[behind:end] = bytes(end - behind)
        return self.memory[:end]

    def stamp_header(self, descriptor: FrameDescriptor, pack_id: PackId, sequence: int, more: int = 0) -> memoryview:
        """Put the header and the zeros behind it in front of the payload; return that, with ``more`` bytes behind."""
        start = descriptor.payload_offset
        self.memory[:HEADER_BYTES] = encode_header(descriptor, pack_id, sequence)
        self.memory[HEADER_BYTES:start] = bytes(start - HEADER_BYTES)
        return self.memory[: start + more]


class SlotPool:
    """Slots kept from use to use: mapping and zeroing them anew costs as much as a tenth of a save. Thread-safe."""

    def __init__(self, capacity: int, keep_bytes: int) -> None:
        """Keep at most ``capacity`` slots, of at most ``keep_bytes`` of payload each."""
        self._capacity = capacity
        self._keep_bytes = keep_bytes
        self._free: list[Slot] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def slot(self, payload_bytes: int) -> Iterator[Slot]:
        """Lend a slot with room for ``payload_bytes`` of payload."""
        with self._lock:
            fitting = [slot for slot in self._free if slot.payload_bytes >= payload_bytes]
            slot = fitting[0] if fitting else None
            if slot is not None:
                self._free.remove(slot)
        slot = slot or Slot(payload_bytes)
        try:
            yield slot
        finally:
            if slot.payload_bytes <= self._keep_bytes:
                with self._lock:
                    # Larger ones serve more often, so they are the ones to keep.
                    self._free = sorted([*self._free, slot], key=lambda one: -one.payload_bytes)[: self._capacity]
