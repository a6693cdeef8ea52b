"""Mapping a locked file without binding the lock to the mapping."""

from __future__ import annotations

import mmap
import os


def map_file(descriptor: int, size: int, *, writable: bool = True) -> mmap.mmap:
    """Map the beginning of the file that is open as ``descriptor``, for reading and, if ``writable``, for writing.

    A lock (``flock``) lasts until the last mapping of the open file that holds it is gone: views that somebody still
    has, or the copy of the mapping in a forked child, would keep it. So the file is opened once more for the mapping.
    """
    other = os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(other, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(other)
