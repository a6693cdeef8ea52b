"""The machine's own limit: the same bytes by O_DIRECT from aligned memory, synced at the end."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK = 8 << 20
IN_FLIGHT = 4


def write(path: Path, total: int) -> float:
    """Write ``total`` bytes to ``path``, in place when it exists; return seconds until they are durable."""
    buffers = [mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(IN_FLIGHT)]
    for buffer in buffers:
        # Huge pages make direct writes faster, so the limit is taken with them.
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer[:] = os.urandom(1 << 20) * (CHUNK >> 20)
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

    def lane(number: int) -> None:
        for offset in range(number * CHUNK, total, IN_FLIGHT * CHUNK):
            os.pwrite(descriptor, buffers[number], offset)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(lane, range(IN_FLIGHT)))
    os.fdatasync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - began
