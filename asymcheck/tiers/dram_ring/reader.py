"""A ring that another process left, or this one's own, read as it lies."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asymcheck.errors import DigestMismatchError, FormatError, TruncatedError
from asymcheck.format import registry
from asymcheck.format.digest import digest as digest_of
from asymcheck.format.frame import HEADER_BYTES, check_frame, decode_header, frame_length
from asymcheck.format.pack import ENTRY_DTYPE, Entries
from asymcheck.format.record import RECORD_BYTES
from asymcheck.format.ring import (
    CAPTURES_MAX,
    CAPTURES_OFFSET,
    DATA_OFFSET,
    ENTRY_BYTES,
    CaptureEntry,
    decode_entry,
    decode_ring_header,
)
from asymcheck.tiers.files import DESCRIPTORS, translated, try_lock, unlock
from asymcheck.types import Digest, PackId


class RingReader:
    """The frames and captures of a ring, found when it is opened. Close it, or use it in a ``with`` block."""

    def __init__(self, path: Path) -> None:
        """Open a ring; :attr:`is_owned` says whether a process still uses it.

        Raises:
            FileNotFoundError: it is gone.
            StorageError, FormatError: it cannot be read, or is no ring.
        """
        self.path = path
        with translated("open", path):
            self._descriptor = DESCRIPTORS.add(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        try:
            self.is_owned = not try_lock(self._descriptor, exclusive=True)
            where = f"ring {path}"
            head = os.pread(self._descriptor, RECORD_BYTES, 0)
            self.header = decode_ring_header(head, where)
            size = DATA_OFFSET + self.header.data_bytes
            if os.fstat(self._descriptor).st_size < size:
                raise TruncatedError(f"{where}: {os.fstat(self._descriptor).st_size} of {size} bytes")
            self._map = mmap.mmap(self._descriptor, size)
        except BaseException:
            DESCRIPTORS.close(self._descriptor)
            raise
        self._memory = memoryview(self._map)
        self.captures = [entry for number in range(CAPTURES_MAX) if (entry := self._entry(number)) is not None]
        """The captures that are complete or durable."""
        self.entries = self._find_frames()
        """One row for each frame that was found by its header; ``offset`` is in the file."""

    def _entry(self, number: int) -> CaptureEntry | None:
        start = CAPTURES_OFFSET + number * ENTRY_BYTES
        return decode_entry(self._memory[start : start + ENTRY_BYTES], self.header.data_bytes)

    def _find_frames(self) -> Entries:
        magic = np.frombuffer(registry.FRAME_MAGIC, dtype=np.uint64)[0]
        words: npt.NDArray[np.uint64] = np.frombuffer(self._memory[DATA_OFFSET:], dtype=np.uint64)
        blocks = np.flatnonzero(words[:: registry.BLOCK_BYTES // 8] == magic)
        found = []
        for block in blocks.tolist():
            offset = DATA_OFFSET + block * registry.BLOCK_BYTES
            with contextlib.suppress(FormatError):
                header = decode_header(self._memory[offset : offset + HEADER_BYTES], "ring")
                frame = header.descriptor
                fits = offset + frame_length(frame.stored_length) <= len(self._memory)
                stamped = (header.place_id, header.sequence) == (self.header.ring_id, offset // registry.BLOCK_BYTES)
                if fits and stamped:
                    sizes = (offset, frame.stored_length, frame.plain_length)
                    numbers = (frame.kind, frame.codec, frame.digest_algorithm)
                    found.append((frame.digest, frame.base_digest, *sizes, *numbers, bytes(5)))
        return np.array(found, dtype=ENTRY_DTYPE)

    def frame(self, offset: int, stored_length: int) -> memoryview:
        """Return a whole frame as it lies."""
        return self._memory[offset : offset + frame_length(stored_length)]

    def payload_at(self, offset: int) -> memoryview:
        """Return the checked payload of the frame at ``offset``.

        Raises:
            FormatError: no intact frame lies there.
        """
        where = f"frame at byte {offset} of ring {self.path.name}"
        header = decode_header(self._memory[offset : offset + HEADER_BYTES], where)
        frame = self.frame(offset, header.descriptor.stored_length)
        sequence = offset // registry.BLOCK_BYTES
        descriptor, payload = check_frame(frame, PackId(self.header.ring_id), sequence, where)
        if digest_of(payload) != descriptor.digest:
            raise DigestMismatchError(f"digest mismatch in {where}")
        return payload

    def offsets(self) -> dict[Digest, list[int]]:
        """Return where frames of each digest lie; their payloads are not checked."""
        places: dict[Digest, list[int]] = {}
        for name, offset in zip(self.entries["digest"], self.entries["offset"].tolist(), strict=True):
            places.setdefault(Digest(name.tobytes()), []).append(offset)
        return places

    def unlink(self) -> None:
        """Remove the file."""
        with translated("remove", self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the memory and the lock back."""
        self.entries = self.entries[:0].copy()
        self._memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        # Said in so many words: a map that is kept has the file open, too, and with it the lock.
        unlock(self._descriptor)
        DESCRIPTORS.close(self._descriptor)

    def __enter__(self) -> RingReader:
        """Return itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.close()
