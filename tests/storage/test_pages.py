"""Test advice to the kernel about memory pages, and its effect."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck.format.manifest import TensorRow
from asymcheck.restore.assemble import allocate
from asymcheck.storage.nvme import Slot
from asymcheck.storage.pages import HUGE_PAGE, map_file, populate, use_huge_pages
from tests.storage.ring_cases import make_ring

_KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
_HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
needs_huge_pages = pytest.mark.skipif(not _HAS_HUGE_PAGES, reason="this kernel has no huge pages")


def _flags_at(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest
    pytest.fail("no mapping has this address")


def _row(count: int) -> TensorRow:
    return TensorRow("w", (), "float32", "weights", (count,), (count,), (0,), 4 * count, None, ())


@needs_huge_pages
def test_restored_tensor_is_in_huge_pages() -> None:
    """Test all pages except partial first and last pages."""
    tensor = allocate(_row(16 << 20), torch.device("cpu"))
    assert "hg" in _flags_at(tensor.data_ptr() + tensor.nbytes // 2)
    assert allocate(_row(0), torch.device("cpu")).nbytes == 0


@needs_huge_pages
def test_slots_are_in_huge_pages() -> None:
    """Test slots from the first byte on."""
    slot = Slot(4 << 20)
    address = np.frombuffer(slot.memory, dtype=np.uint8).ctypes.data
    assert address % HUGE_PAGE == 0
    assert "hg" in _flags_at(address)


@needs_huge_pages
def test_ring_requests_huge_pages() -> None:
    """Test that the mount options decide."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ring = make_ring(Path(folder), data_bytes=16 << 20)
        try:
            assert "hg" in _flags_at(ring._address + (8 << 20))
        finally:
            ring.close()


@needs_huge_pages
def test_pages_at_the_edges_are_left_alone() -> None:
    """Test that pages that are shared with other memory are not advised."""
    with mmap.mmap(-1, 4 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        first = -(-np.frombuffer(mapped, dtype=np.uint8).ctypes.data // HUGE_PAGE) * HUGE_PAGE
        use_huge_pages(first + 1, 2 * HUGE_PAGE - 2)
        assert "hg" not in _flags_at(first)
        use_huge_pages(first - 1, HUGE_PAGE + 2)
        assert "hg" in _flags_at(first)
        assert "hg" not in _flags_at(first + HUGE_PAGE)


@pytest.mark.skipif(_KERNEL < (5, 14), reason="needs MADV_POPULATE_WRITE, of Linux 5.14")
@pytest.mark.parametrize("cores", [1, 4, 64])
def test_pages_are_mapped_in_advance(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Test that no page fault slows down copies, with one thread and with several."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))
    # Not a multiple of the share of a thread.
    size, half = 48 << 20, (24 << 20) + 3 * mmap.PAGESIZE
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        with map_file(file.fileno(), size) as mapped:
            populate(np.frombuffer(mapped, dtype=np.uint8).ctypes.data, half)
            faults = [_faults_of_touching(mapped, *part) for part in ((0, half), (half, size - half))]
    assert faults[0] < 100
    assert faults[1] >= (size - half) // mmap.PAGESIZE


@pytest.mark.skipif(_KERNEL < (5, 14), reason="needs MADV_POPULATE_WRITE, of Linux 5.14")
def test_pages_are_mapped_while_python_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a Python that starts no thread any more, as during its exit."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(16)))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, 24 << 20)
        with map_file(file.fileno(), 24 << 20) as mapped:
            populate(np.frombuffer(mapped, dtype=np.uint8).ctypes.data, 24 << 20)
            assert _faults_of_touching(mapped, 0, 24 << 20) < 100


def _faults_of_touching(mapped: mmap.mmap, start: int, length: int) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for offset in range(start, start + length, mmap.PAGESIZE):
        mapped[offset] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
