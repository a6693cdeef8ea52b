"""Pages of memory: mapped files, and memory that is taken before it is used."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct

HUGE_PAGE = 2 << 20
"""Bytes of a huge page; the kernel's number for other architectures only changes what is gained."""

_LIBC = ctypes.CDLL(None)
_HUGE = 14
"""MADV_HUGEPAGE of <linux/mman.h>."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of the same, since Linux 5.14."""

_SCAN_ARGUMENT = struct.Struct("=12Q")
"""``struct pm_scan_arg`` of <linux/fs.h>, since Linux 6.7."""
_SCAN_REGION = struct.Struct("=3Q")
"""``struct page_region`` of the same: start, end, and categories."""
_PAGEMAP_SCAN = 3 << 30 | _SCAN_ARGUMENT.size << 16 | ord("f") << 8 | 16
_PAGE_IS_HUGE = 1 << 6
_REGIONS = 8
"""Regions to ask for: a partition in huge pages is one region, or a few where small pages are in between."""
_HUGE_SHARE = 0.75


def use_huge_pages(address: int, nbytes: int) -> None:
    """Let the kernel use huge pages for untouched memory, as far as it contains whole ones.

    A kernel without huge pages refuses, and uses small ones.
    """
    first, last = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    if first < last:
        _advise(first, last - first, _HUGE)


def populate(address: int, nbytes: int) -> None:
    """Have the pages of a part of a mapped file mapped all at once; both ends are those of pages.

    Else each page is a fault when it is touched first: measured, copies into a ring reach 1 to 2 GB/s so, 0.3 GB/s
    beside a training, and 8 GB/s into one that is mapped, which takes 0.27 s for a GB. An older kernel refuses; then it
    is the faults again.
    """
    _advise(address, nbytes, _POPULATE_WRITE)


def are_huge(address: int, nbytes: int) -> bool:
    """Tell whether most of some memory is in huge pages; False where the kernel does not tell."""
    start, end = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    regions = ctypes.create_string_buffer(_SCAN_REGION.size * _REGIONS)
    argument = _SCAN_ARGUMENT.pack(
        _SCAN_ARGUMENT.size,
        0,  # flags
        start,
        end,
        0,  # where the kernel stopped
        ctypes.addressof(regions),
        _REGIONS,
        0,  # no limit of pages
        0,  # no category is inverted
        _PAGE_IS_HUGE,  # needed
        0,  # any of none
        _PAGE_IS_HUGE,  # returned
    )
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(argument))
    except OSError:
        return False
    huge = 0
    for number in range(count):
        first, last, _ = _SCAN_REGION.unpack_from(regions, number * _SCAN_REGION.size)
        huge += int(last) - int(first)
    return huge >= _HUGE_SHARE * (end - start)


def _advise(address: int, nbytes: int, advice: int) -> None:
    # Not madvise() of a mapping itself, which holds the interpreter's lock meanwhile.
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def map_file(descriptor: int, size: int, *, writable: bool = True) -> mmap.mmap:
    """Map the beginning of the file that is open as ``descriptor``, for reading and, if ``writable``, for writing.

    A lock (``flock``) lasts until the last mapping of the open file that holds it is gone: views that somebody still
    has, or the copy of the mapping in a forked child, would keep it. Therefore the file is opened again for the
    mapping.
    """
    other = os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(other, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(other)
