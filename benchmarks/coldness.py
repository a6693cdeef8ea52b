"""Drop files from the page cache, so that a read comes from the device."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_LIBC = ctypes.CDLL(None, use_errno=True)


def make_cold(paths: Sequence[Path]) -> str:
    """Sync files and drop them from the page cache; return the method, for the report.

    Ask the kernel to drop each file. If pages remain, drop the page cache of the whole machine, if this is allowed.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    if not cached_bytes(paths):
        return "posix_fadvise(DONTNEED)"
    if os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("1\n")
    cached = cached_bytes(paths)
    return f"{DROP_CACHES}" if not cached else f"in part: {cached / 1e6:.1f} MB stayed in the page cache"


def cached_bytes(paths: Sequence[Path]) -> int:
    """Return how many bytes of files are in the page cache, without reading any file into the page cache."""
    return sum(_cached_pages(path) for path in paths) * mmap.PAGESIZE


def _cached_pages(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    # MAP_PRIVATE makes the mapping writable, because ctypes needs that to return its address. No page is touched.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        buffer = ctypes.c_char.from_buffer(mapped)
        result = _LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del buffer
        if result:
            raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum())
