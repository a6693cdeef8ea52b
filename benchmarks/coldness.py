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
    """Sync files and drop them from the page cache; return how, for the report.

    The kernel is asked file by file. Only when it kept something is the whole cache of the machine dropped, where that
    is allowed.
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
    kept = cached_bytes(paths)
    return f"{DROP_CACHES}" if not kept else f"in part: {kept / 1e6:.1f} MB stayed in the page cache"


def cached_bytes(paths: Sequence[Path]) -> int:
    """Return how many bytes of files are in the page cache, without bringing any into it."""
    return sum(_cached_pages(path) for path in paths) * mmap.PAGESIZE


def _cached_pages(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    # MAP_PRIVATE and writable only so that ctypes gives the address; nothing is touched.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        there = ctypes.c_char.from_buffer(mapped)
        result = _LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(there)), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del there
        if result:
            raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum())
