"""Memory pages: huge pages, populated pages, and mapped files."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable

from asymcheck.executor import share

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64. Another size only reduces the benefit."""

_LIBC = ctypes.CDLL(None)
_HUGE = 14
"""MADV_HUGEPAGE of <linux/mman.h>."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of <linux/mman.h>, since Linux 5.14."""

_SCAN_ARGUMENT = struct.Struct("=12Q")
"""``struct pm_scan_arg`` of <linux/fs.h>, since Linux 6.7."""
_SCAN_REGION = struct.Struct("=3Q")
"""``struct page_region`` of <linux/fs.h>: start, end, and categories."""
_PAGEMAP_SCAN = 3 << 30 | _SCAN_ARGUMENT.size << 16 | ord("f") << 8 | 16
_PAGE_IS_HUGE = 1 << 6
_REGIONS = 8
"""Maximum number of regions per request. A partition in huge pages consists of few regions."""
_HUGE_SHARE = 0.75

_THREADS = 8
"""Maximum number of threads that populate pages, which must be zeroed."""
_BYTES_FOR_A_THREAD = 4 << 20


def use_huge_pages(address: int, nbytes: int) -> None:
    """Advise the kernel to use huge pages for the whole huge pages in untouched memory.

    A kernel without huge pages ignores the advice.
    """
    first, last = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    if first < last:
        _advise(first, last - first, _HUGE)


def populate(address: int, nbytes: int) -> None:
    """Map all pages of a page-aligned part of a mapped file at once. An older kernel ignores the request.

    Otherwise the first touch of each page is a page fault. Measured: copies into a ring reached 1 to 2 GB/s with page
    faults, 0.3 GB/s during training, and 8 GB/s into populated pages. Populating 1 GB took 0.27 to 0.7 s on one thread.
    At most half of the cores take part, because the training uses the others.
    """
    threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)) // 2, nbytes // _BYTES_FOR_A_THREAD))
    length = max(1, -(-nbytes // threads // mmap.PAGESIZE)) * mmap.PAGESIZE
    starts = range(0, nbytes, length)

    def work(taken: Iterable[int]) -> None:
        for start in taken:
            _advise(address + start, min(length, nbytes - start), _POPULATE_WRITE)

    share(starts, work, len(starts), "populate")


def are_huge(address: int, nbytes: int) -> bool:
    """Tell whether most of a memory range is in huge pages; False if the kernel does not say."""
    start, end = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    regions = ctypes.create_string_buffer(_SCAN_REGION.size * _REGIONS)
    argument = _SCAN_ARGUMENT.pack(
        _SCAN_ARGUMENT.size,
        0,  # flags
        start,
        end,
        0,  # address at which the kernel stopped
        ctypes.addressof(regions),
        _REGIONS,
        0,  # no limit of pages
        0,  # inverted categories
        _PAGE_IS_HUGE,  # required categories
        0,  # alternative categories
        _PAGE_IS_HUGE,  # returned categories
    )
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(argument))
    except OSError:
        return False
    found = _SCAN_REGION.iter_unpack(regions.raw[: count * _SCAN_REGION.size])
    huge: int = sum(last - first for first, last, _ in found)
    return huge >= _HUGE_SHARE * (end - start)


def _advise(address: int, nbytes: int, advice: int) -> None:
    # mmap.madvise() would hold the GIL.
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def map_file(descriptor: int, size: int, *, writable: bool = True) -> mmap.mmap:
    """Map the first ``size`` bytes of an open file, for reading and, if ``writable``, for writing.

    A lock (``flock``) lasts as long as any mapping of the open file. A remaining view, or the mapping of a forked
    child, would keep the lock. Therefore the file is opened again for the mapping.
    """
    reopened = os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(reopened, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(reopened)
