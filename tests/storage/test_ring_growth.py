"""Test that the memory of a ring is reserved during training: waits, refusals, and concurrent readers."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from asymcheck.errors import OutOfSpaceError
from asymcheck.format.ring_records import DATA_OFFSET
from asymcheck.storage.shm import ring_writer as ring_module
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.storage.shm.ring_writer import Ring
from tests.storage.ring_cases import BLOCK, HEADER, found, make_ring, put

PIECE = 8 * BLOCK
FIRST = PIECE - DATA_OFFSET
"""Bytes of data that are reserved immediately."""


class Memory:
    """Reserves the first piece of a ring immediately, and the other pieces on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.left = 1 << 30
        self._is_first = True
        self._reserve, self._populate = os.posix_fallocate, ring_module.populate
        monkeypatch.setattr(ring_module, "_GROWTH_BYTES", PIECE)
        monkeypatch.setattr(os, "posix_fallocate", self.reserve)
        monkeypatch.setattr(ring_module, "populate", self.populate)

    def reserve(self, descriptor: int, start: int, length: int) -> None:
        """Reserve memory, late or never."""
        if start:
            assert self.goes_on.wait(60)
        if start + length > self.left:
            raise OSError(errno.ENOSPC, "no room")
        self._reserve(descriptor, start, length)

    def populate(self, address: int, nbytes: int) -> None:
        """Map pages; the first piece immediately."""
        if self._is_first:
            self._is_first = False
        else:
            assert self.goes_on.wait(60)
        self._populate(address, nbytes)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """Return memory that is reserved on request."""
    held = Memory(monkeypatch)
    yield held
    held.goes_on.set()


def _grown(ring: Ring) -> None:
    with ring._changed:
        assert ring._changed.wait_for(lambda: ring._growing is None, 60)


def test_slot_is_available_before_all_memory(tmp_path: Path, memory: Memory) -> None:
    """Test that larger requests wait, and that the ring finally is one contiguous range."""
    ring = make_ring(tmp_path)
    assert ring._allocator.free_bytes == FIRST
    early = put(ring, b"e" * 5000)
    late = []
    thread = threading.Thread(target=lambda: late.append(ring.take(HEADER.data_bytes - 8192 - 128)))
    thread.start()
    thread.join(0.05)
    assert late == []
    memory.goes_on.set()
    thread.join(60)
    assert late[0] is not None
    _grown(ring)
    assert ring._allocator.free_bytes == 0
    for place in (early, late[0]):
        ring.give_back(place)
    assert ring._allocator.free_bytes == HEADER.data_bytes
    assert os.stat(ring.path).st_size == DATA_OFFSET + HEADER.data_bytes
    ring.close()


def test_memory_refused_later_is_an_error_of_the_user(tmp_path: Path, memory: Memory) -> None:
    """Test that the error has a remedy, and that smaller requests succeed."""
    memory.left = 2 * PIECE
    ring = make_ring(tmp_path)
    memory.goes_on.set()
    _grown(ring)
    assert ring._allocator.free_bytes == FIRST + PIECE
    with pytest.raises(OutOfSpaceError, match=r"ring_bytes.*ring_folder"):
        ring.take(FIRST + PIECE)
    place = ring.take(PIECE)
    assert place is not None
    # The request succeeds once this range is freed.
    assert ring.take(PIECE) is None
    ring.give_back(place)
    ring.close()
    assert list(tmp_path.iterdir()) == []


def test_impossible_ring_is_refused_at_once(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the refusal comes before any capture, and leaves no file."""
    free = HEADER.data_bytes // BLOCK
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_blocks=1, f_bavail=free, f_frsize=BLOCK))
    with pytest.raises(OutOfSpaceError, match=r"ring_bytes.*ring_folder"):
        make_ring(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not memory.goes_on.is_set()


def test_reader_of_a_ring_maps_no_new_memory(tmp_path: Path, memory: Memory) -> None:
    """Test that the reader touches no missing page, and finds all frames."""
    folder = Path("/dev/shm", f"asymcheck-{os.getpid()}-growth")
    folder.mkdir()
    try:
        ring = make_ring(folder)
        place = put(ring, b"x" * 5000)
        taken = os.stat(ring.path).st_blocks
        assert found(ring.path) == {place.offset: b"x" * 5000}
        with RingReader(ring.path) as reader:
            assert len(reader.entries) == 1
        assert os.stat(ring.path).st_blocks == taken
        memory.goes_on.set()
        _grown(ring)
        assert os.stat(ring.path).st_blocks > taken
        ring.close()
    finally:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()


def test_ring_closes_while_it_grows(tmp_path: Path, memory: Memory) -> None:
    """Test that the thread of the ring ends."""
    ring = make_ring(tmp_path)
    threading.Timer(0.05, memory.goes_on.set).start()
    ring.close()
    assert "asymcheck-ring" not in [thread.name for thread in threading.enumerate()]
    assert list(tmp_path.iterdir()) == []
