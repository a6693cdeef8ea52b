"""Test reader threads: bounded in number, and not blocking the exit of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from asymcheck.errors import ClosedStoreError, StorageError
from asymcheck.storage.remote.readers import Readers
from tests.zygote import REPOSITORY

HANGS = """
import sys, threading
from asymcheck import StoreConfig
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles

there = RemoteTier(parse_location(sys.argv[1]), StoreConfig())
packs = there.pack_ids()
begun = threading.Event()
RemoteFiles.read_range = lambda *_: begun.set() or threading.Event().wait()
threading.Thread(target=there.read_indexes, args=(packs,), daemon=True).start()
begun.wait()
there.close()
"""


def test_a_location_that_hangs_does_not_hold_the_end_of_a_process(pushed: Path, folder: str) -> None:
    """Test a location that never responds; with a deadline, the process would wait until it."""
    subprocess.run([sys.executable, "-c", HANGS, folder], cwd=REPOSITORY, check=True, timeout=60)


def test_no_more_than_so_many_read_at_the_same_time() -> None:
    """Test that exactly the maximum number of threads read at once, and that results keep their order."""
    together, lock, running, most = threading.Barrier(3, timeout=60), threading.Lock(), 0, 0

    def read(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        return number

    readers = Readers(3)
    readings = [readers.submit(read, number) for number in range(30)]
    assert [reading.result(60) for reading in readings] == list(range(30))
    assert most == 3


def test_next_file_is_read_after_a_failure() -> None:
    """Test that the same thread reads on."""

    def read(number: int) -> int:
        if number == 0:
            raise StorageError("it cannot be read")
        return number

    readers = Readers(1)
    failing, other = readers.submit(read, 0), readers.submit(read, 1)
    with pytest.raises(StorageError, match="cannot be read"):
        failing.result(60)
    assert other.result(60) == 1


def test_after_the_end_nothing_is_begun() -> None:
    """Test that begun reads end, waiting reads are cancelled, and new reads are refused."""
    begun, released = threading.Event(), threading.Event()

    def read() -> bool:
        begun.set()
        return released.wait(60)

    readers = Readers(1)
    first, second = readers.submit(read), readers.submit(read)
    assert begun.wait(60)
    readers.close()
    with pytest.raises(ClosedStoreError):
        readers.submit(read)
    released.set()
    assert first.result(60)
    with pytest.raises(CancelledError):
        second.result(60)
