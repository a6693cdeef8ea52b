"""Mapping a locked file without binding the lock to the mapping."""

from __future__ import annotations

import mmap
import os


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """Map the beginning of the file that is open as ``descriptor``, for reading and writing.

    A lock (``flock``) lasts until the last mapping of the open file that holds it is gone: views that somebody still
    has, or the copy of the mapping in a forked child, would keep it. So the file is opened once more for the mapping.
    """
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(other, size)
    finally:
        os.close(other)
