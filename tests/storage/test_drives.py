"""Test drives that handle each page of a request separately: small pages are copied through huge pages."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.storage import pages
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier, Slot, drives
from asymcheck.storage.nvme.drives import needs_slot
from asymcheck.storage.pages import HUGE_PAGE, are_huge
from tests.storage.test_pages import needs_huge_pages

_is_paravirtual = drives.is_paravirtual
SIZE = 8 << 20


def _small(nbytes: int = SIZE) -> np.ndarray:
    """Return touched memory in small pages."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    return array


def _huge() -> np.ndarray:
    """Return touched memory in huge pages."""
    array = np.frombuffer(Slot(SIZE).memory, dtype=np.uint8)
    array[:] = 1
    if not are_huge(array.ctypes.data, SIZE):
        pytest.skip("the kernel gives no huge pages now, or does not tell")
    return array


class _Watching(Files):
    """Counts the bytes that are written directly from an array's own memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._first, self._last = array.ctypes.data, array.ctypes.data + array.nbytes
        self.direct_bytes = 0

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Count and write."""
        for buffer in filter(len, buffers):
            address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
            self.direct_bytes += len(buffer) if self._first <= address < self._last else 0
        super().pwrite(descriptor, buffers, offset, path)


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return simulated sysfs devices: 8:1 is a partition of an NVMe drive, 254:1 of a virtio drive, 9:0 is a RAID."""
    for number, drive, driver in (("8:1", "nvme0n1", "nvme"), ("254:1", "vda", "virtio_blk")):
        folder = tmp_path / drive
        (folder / f"{drive}p1").mkdir(parents=True)
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (folder / "device").mkdir()
        (folder / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        (tmp_path / number).symlink_to(folder / f"{drive}p1")
    (tmp_path / "9:0" / "slaves").mkdir(parents=True)
    (tmp_path / "9:0" / "slaves" / "vdap1").symlink_to(tmp_path / "vda" / "vdap1")
    return tmp_path


@pytest.mark.parametrize(("major", "minor", "expected"), [(8, 1, False), (254, 1, True), (9, 0, True), (0, 42, False)])
def test_the_driver_tells_whether_a_drive_is_paravirtual(devices: Path, major: int, minor: int, expected: bool) -> None:
    """Test partitions, which have the driver of their drive, a RAID with the drivers of its parts, and others."""
    assert _is_paravirtual(os.makedev(major, minor), devices) is expected


@needs_huge_pages
def test_huge_pages_are_detected() -> None:
    """Test memory with partial first and last pages."""
    huge, small = _huge(), _small()
    assert are_huge(huge.ctypes.data, SIZE)
    assert are_huge(huge.ctypes.data + 64, SIZE - 100)
    assert not are_huge(small.ctypes.data, SIZE)


@needs_huge_pages
def test_untouched_memory_has_no_pages() -> None:
    """Test that advice alone maps no page."""
    memory = mmap.mmap(-1, 4 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    assert not are_huge(np.frombuffer(memory, dtype=np.uint8).ctypes.data, 4 * HUGE_PAGE)


def test_a_kernel_that_does_not_tell_has_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test Linux before 6.7, which does not support the request."""

    def refuse(*_arguments: object) -> int:
        raise OSError(errno.ENOTTY, "no such request")

    array = np.frombuffer(Slot(SIZE).memory, dtype=np.uint8)
    monkeypatch.setattr(pages.fcntl, "ioctl", refuse)
    assert not are_huge(array.ctypes.data, SIZE)


@pytest.mark.parametrize("is_paravirtual", [False, True])
def test_a_slot_is_needed_for_small_pages_on_a_paravirtual_drive(
    monkeypatch: pytest.MonkeyPatch, is_paravirtual: bool
) -> None:
    """Test that other drives write small pages directly."""
    monkeypatch.setattr(drives, "is_paravirtual", lambda _device: is_paravirtual)
    assert needs_slot(0, memoryview(_small())) is is_paravirtual


@needs_huge_pages
def test_no_slot_is_needed_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that requests from huge pages have few segments."""
    monkeypatch.setattr(drives, "is_paravirtual", lambda _device: True)
    assert not needs_slot(0, memoryview(_huge()))


@pytest.mark.parametrize("is_paravirtual", [False, True])
def test_a_save_copies_small_pages_on_a_paravirtual_drive(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, is_paravirtual: bool
) -> None:
    """Test that on other drives all blocks but the first and the last are written from the tensor."""
    monkeypatch.setattr(drives, "is_paravirtual", lambda _device: is_paravirtual)
    weights = _small()
    files = _Watching(weights)
    with Store(NvmeTier(store_path, StoreConfig(compression="off"), files=files)) as store:
        store.save({"w": torch.from_numpy(weights)}, step=1)
    assert (files.direct_bytes == 0) is is_paravirtual


@pytest.mark.parametrize("saved_on", [False, True])
@pytest.mark.parametrize("restored_on", [False, True])
def test_a_store_is_the_same_on_both_kinds_of_drives(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, saved_on: bool, restored_on: bool
) -> None:
    """Test that stores can be moved between machines."""
    weights = torch.from_numpy(_small())
    monkeypatch.setattr(drives, "is_paravirtual", lambda _device: saved_on)
    with Store.open(store_path, create=True) as store:
        store.save({"w": weights}, step=1)
        monkeypatch.setattr(drives, "is_paravirtual", lambda _device: restored_on)
        target = torch.from_numpy(_small())
        target.zero_()
        store.load(into={"w": target})
        assert torch.equal(target, weights)
        assert torch.equal(store.load()["w"], weights)
        assert not store.verify()
