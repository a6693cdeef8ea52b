"""Slots: page-aligned memory for one frame, reused from frame to frame."""

from __future__ import annotations

import mmap

from asymcheck.format import registry
from asymcheck.format.frame import HEADER_BYTES, FrameDescriptor, encode_header, frame_length, payload_offset
from asymcheck.types import PackId


class Slot:
    """Memory for one frame of up to ``payload_bytes`` of payload, aligned as direct I/O asks.

    Not thread-safe: one thread uses a slot at a time. Views of :attr:`memory` must be released before the slot is.
    """

    def __init__(self, payload_bytes: int) -> None:
        """Map anonymous memory for the header's block, the payload and its padding."""
        self.payload_bytes = payload_bytes
        self._map = mmap.mmap(-1, payload_bytes + 2 * registry.BLOCK_BYTES)
        self.memory = memoryview(self._map)

    def payload(self, length: int) -> memoryview:
        """Return where the payload of ``length`` bytes goes."""
        start = payload_offset(length)
        return self.memory[start : start + length]

    def frame(self, length: int) -> memoryview:
        """Return the whole frame for a payload of ``length`` bytes."""
        return self.memory[: frame_length(length)]

    def stamp(self, descriptor: FrameDescriptor, pack_id: PackId, sequence: int) -> memoryview:
        """Put the header before the payload, zero the padding, and return the whole frame."""
        stored = descriptor.stored_length
        start, end = payload_offset(stored), frame_length(stored)
        self.memory[:HEADER_BYTES] = encode_header(descriptor, pack_id, sequence)
        self.memory[HEADER_BYTES:start] = bytes(start - HEADER_BYTES)
        self.memory[start + stored : end] = bytes(end - start - stored)
        return self.memory[:end]
