"""Test reads by position: reused memory, and files that stay open."""

from __future__ import annotations

import dataclasses
import gc
import threading
import uuid
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import hdfs_native as hdfs_native_client
import numpy as np
import pytest

from asymcheck import Store
from asymcheck.config import RemoteConfig
from asymcheck.storage.remote.client_interface import OpenedFile
from asymcheck.storage.remote.deadline import within
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.storage.slots import SlotPool
from tests.remote.conftest import CONFIG, REMOTE, check_state
from tests.zygote import wait_until

CONTENT = bytes(range(256)) * 1024


@pytest.fixture
def files(any_location: str) -> RemoteFiles:
    """Return the location, with one file."""
    return with_one_file(any_location)


@pytest.fixture
def openable(any_file_system: str) -> RemoteFiles:
    """Return a location of a file system, with one file. Files in an object store are never open."""
    return with_one_file(any_file_system)


def with_one_file(location: str, config: RemoteConfig = REMOTE) -> RemoteFiles:
    """Return an empty location after one file was put."""
    files = RemoteFiles(parse_location(location), config)
    assert files.put_small(path_in(files), CONTENT)
    return files


def path_in(files: RemoteFiles) -> PurePosixPath:
    """Return the path of the file."""
    return files.top / "one"


def address(view: memoryview) -> int:
    """Return the address of the memory."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def test_memory_is_reused_after_the_last_view() -> None:
    """Test a view of any part."""
    memory = SlotPool(2, 4096)
    original = memory.lend(4096)
    first, part = address(original), original[100:200][10:]
    del original
    other = memory.lend(4096)
    assert address(other) != first
    del part
    assert address(memory.lend(100)) == first


def test_no_more_memory_is_kept_than_was_asked_for() -> None:
    """Test that further memory is freed, and that memory larger than a piece is never kept."""
    memory = SlotPool(2, 4096)
    views = [memory.lend(10) for _ in range(5)]
    assert len(memory.lend(5000)) == 5000
    views.clear()
    assert len(memory._free) == 2


def test_a_location_that_is_closed_keeps_no_memory(pushed: Path, folder: str) -> None:
    """Test that memory of a restore is kept for the next restore, until the location is closed."""
    with Store.open(folder, config=CONFIG, create=True) as remote:
        check_state(remote.load(), 2)
        memory = remote.resources.tier._ahead.memory
        # A thread that reads ahead may hold the last piece a moment longer than the load.
        wait_until(lambda: bool(memory._free), "the memory of the restore returns")
    assert memory._free == []
    view = memory.lend(10)
    del view
    assert memory._free == []


def test_a_read_that_fails_keeps_no_memory() -> None:
    """Test that the memory is freed before the next garbage collection."""
    memory = SlotPool(2, 4096)

    def fail() -> None:
        view = memory.lend(10)
        raise OSError(len(view))

    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(OSError, match="10"):
                within(60, "read", fail)
        assert len(memory._free) == 1
    finally:
        gc.enable()


@pytest.mark.slow(quick=["file-memory1"])
@pytest.mark.parametrize("memory", [None, SlotPool(2, 1 << 14)])
def test_ranges_read_with_and_without_such_memory(files: RemoteFiles, memory: SlotPool | None) -> None:
    """Test ranges inside, at the end, beyond it, and larger than a piece, with all results kept."""
    ranges = [(start, 5000) for start in range(0, 40_000, 5000)] + [(260_000, 5000), (300_000, 10), (0, len(CONTENT))]
    opened_file = OpenedFile()
    results = [files.read_range(path_in(files), start, length, opened_file, memory) for start, length in ranges]
    for (start, length), (data, size) in zip(ranges, results, strict=True):
        assert data == CONTENT[start : start + length]
        assert size == len(CONTENT)


@pytest.mark.slow
def test_block_locations_of_a_file_are_requested_once(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test any number of reads; without the cache, each read requests the block locations."""
    files = RemoteFiles(parse_location(f"{hdfs_url}/tests/{uuid.uuid4().hex}"), REMOTE)
    assert files.put_small(path_in(files), CONTENT)
    original: Callable[[hdfs_native_client.Client, str], object] = hdfs_native_client.Client.read
    opened = list[str]()

    def read(self: hdfs_native_client.Client, path: str) -> object:
        opened.append(path)
        return original(self, path)

    monkeypatch.setattr(hdfs_native_client.Client, "read", read)
    opened_file = OpenedFile()
    for start in range(0, 1000, 100):
        files.read_range(path_in(files), start, 100, opened_file)
    assert opened == [str(path_in(files))]
    for start in range(0, 1000, 100):
        files.read_range(path_in(files), start, 100)
    assert len(opened) == 11


def test_a_file_that_was_kept_and_fails_is_opened_again(openable: RemoteFiles) -> None:
    """Test a file that fails, as if its blocks had moved."""

    class Failing:
        size = len(CONTENT)

        def read_into(self, memory: memoryview, offset: int) -> int:
            raise OSError(f"{len(memory)} bytes from {offset}: all DataNodes failed")

    opened_file = OpenedFile()
    opened_file.file = Failing()
    assert openable.read_range(path_in(openable), 10, 20, opened_file)[0] == CONTENT[10:30]
    assert not isinstance(opened_file.file, Failing)


def test_a_client_that_gives_less_than_was_asked_for_is_asked_for_the_rest(openable: RemoteFiles) -> None:
    """Test a client with short reads, as pyarrow allows; this one returns seven bytes, and ends early."""

    class Scanty:
        size = 100

        def read_into(self, memory: memoryview, offset: int) -> int:
            data = CONTENT[offset : min(offset + min(7, len(memory)), 90)]
            memory[: len(data)] = data
            return len(data)

    opened_file = OpenedFile()
    opened_file.file = Scanty()
    assert openable.read_range(path_in(openable), 10, 50, opened_file) == (CONTENT[10:60], 100)
    assert openable.read_range(path_in(openable), 60, 50, opened_file) == (CONTENT[60:90], 100)


@pytest.mark.slow(long=["file"])
def test_a_read_that_never_answers_is_tried_again(any_file_system: str) -> None:
    """Test that the file is opened again; the first attempt gets half of the time."""
    files = with_one_file(any_file_system, dataclasses.replace(REMOTE, deadline_s=8.0, attempts=2))
    asked, opened_file, over = list[int](), OpenedFile(), threading.Event()

    class Silent:
        size = len(CONTENT)

        def read_into(self, _memory: memoryview, offset: int) -> int:
            asked.append(offset)
            over.wait()
            return 0

    opened_file.file = Silent()
    data, size = files.read_range(path_in(files), 100, 1000, opened_file)
    # The abandoned thread must not disturb other tests.
    over.set()
    assert (bytes(data), size, asked) == (CONTENT[100:1100], len(CONTENT), [100])
    assert not isinstance(opened_file.file, Silent)
