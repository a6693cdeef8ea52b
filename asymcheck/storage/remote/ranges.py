"""Range reads from complete files, which never change."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from asymcheck.storage.remote.client_interface import FileSystem, Readable
from asymcheck.storage.slots import Slot


class OpenedFile:
    """Cache of an open file for repeated reads, if the client can keep files open."""

    def __init__(self) -> None:
        self.file: Readable | None = None


class RangeMemory:
    """Pool of ``count`` buffers of ``piece_bytes``, each reused after the last view of it is released. Thread-safe.

    Without reuse, the system would allocate large buffers page by page each time. Measured with 1.15 GB from a local
    HDFS: 1.9 s instead of 4.1 s of CPU time.
    """

    def __init__(self, piece_bytes: int, count: int) -> None:
        self._piece_bytes = piece_bytes
        self._count = count
        self._free: list[Slot] = []
        self._lock = threading.Lock()

    def take(self, count: int) -> memoryview:
        """Return a buffer of ``count`` uninitialized bytes, which returns to the pool with its last view."""
        if count > self._piece_bytes:
            return memoryview(bytearray(count))
        with self._lock:
            slot = self._free.pop() if self._free else Slot(self._piece_bytes)
        # All views keep the owner alive, also the view of a timed-out operation that may still write into the buffer.
        owner = np.frombuffer(slot.memory, dtype=np.uint8)[:count]
        weakref.finalize(owner, self._give_back, slot).atexit = False
        return memoryview(owner.data)

    def let_go(self) -> None:
        """Free the unused buffers now, and the others with their last view."""
        with self._lock:
            self._count = 0
            self._free.clear()

    def _give_back(self, slot: Slot) -> None:
        # No lock: garbage collection may call this method inside another method of the pool.
        if len(self._free) < self._count:
            self._free.append(slot)


def read_range(
    client: FileSystem, path: str, offset: int, length: int, kept: OpenedFile, memory: RangeMemory | None
) -> tuple[memoryview, int]:
    """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file."""
    if (file := kept.file) is not None:
        try:
            return _read(file, offset, length, memory), file.size
        except Exception:  # noqa: BLE001 - blocks move and access tokens expire, so any error means to reopen the file
            kept.file = None
    with client.reading(path) as file:
        data = _read(file, offset, length, memory)
        if client.keeps_files:
            kept.file = file
        return data, file.size


def _read(file: Readable, offset: int, length: int, memory: RangeMemory | None) -> memoryview:
    count = max(0, min(length, file.size - offset))
    data = memoryview(bytearray(count)) if memory is None else memory.take(count)
    done = 0
    while done < count:
        more = file.read_into(data[done:], offset + done)
        if not more:
            break
        done += more
    return data[:done]
