"""Test that lock holders are closed once, because a second close could hit a reused descriptor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.errors import StorageError
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.storage.local_files import DESCRIPTORS
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.shm.ring_reader import RingReader
from tests.storage.ring_cases import make_ring

Closing = Callable[[], object]


def _pack_being_written(folder: Path) -> tuple[Closing, Closing]:
    with Store.open(folder / "store", create=True) as store:
        writer = store.resources.nvme.start_pack(1)
    return writer.close, writer.close


def _pack_given_up(folder: Path) -> tuple[Closing, Closing]:
    with Store.open(folder / "store", create=True) as store:
        writer = store.resources.nvme.start_pack(1)
    return writer.abandon, writer.close


def _pack(folder: Path) -> tuple[Closing, Closing]:
    with Store.open(folder / "store", create=True) as store:
        store.save({"w": torch.arange(3000)}, step=0)
        pack = store.resources.nvme.open_pack(store.resources.nvme.pack_ids()[0])
    return pack.close, pack.close


def _ring(folder: Path) -> tuple[Closing, Closing]:
    ring = make_ring(folder)
    return ring.close, ring.close


def _ring_that_was_left(folder: Path) -> tuple[Closing, Closing]:
    ring = make_ring(folder)
    ring.close(keep=True)
    reader = RingReader(ring.path)
    return reader.close, reader.close


@contextlib.contextmanager
def _opened_instead(end: Closing, path: Path) -> Iterator[int]:
    """Open a new file that gets the descriptor that ``end`` closes."""
    spare, before = os.open(path, os.O_RDWR | os.O_CREAT), set(DESCRIPTORS._open)
    end()
    (number,) = before - DESCRIPTORS._open
    try:
        yield DESCRIPTORS.open(os.dup2, spare, number)
    finally:
        os.close(spare)
        DESCRIPTORS.close(number)


@pytest.mark.parametrize("make", [_pack_being_written, _pack_given_up, _pack, _ring, _ring_that_was_left])
def test_second_close_does_not_close_another_file(
    tmp_path: Path, make: Callable[[Path], tuple[Closing, Closing]]
) -> None:
    """Test a descriptor that the system has reused."""
    end, end_again = make(tmp_path)
    with _opened_instead(end, tmp_path / "other") as other:
        end_again()
        os.fstat(other)


def test_a_late_write_goes_into_no_other_file(tmp_path: Path) -> None:
    """Test a write to an abandoned pack by a thread that was still encoding."""
    with Store.open(tmp_path / "store", create=True) as store:
        tier: NvmeTier = store.resources.nvme
        writer, data = tier.start_pack(1), b"late" * 1000
        with _opened_instead(writer.abandon, tmp_path / "other") as other, tier.slots.slot(len(data)) as slot:
            slot.payload(len(data))[:] = data
            with pytest.raises(StorageError, match="Bad file descriptor"):
                writer.write(slot, FrameDescriptor.identity(digest(data), len(data)))
            assert os.fstat(other).st_size == 0
