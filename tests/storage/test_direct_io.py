"""Test that direct I/O is used if available, and not required."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.errors import StorageError
from asymcheck.storage.local_files import Files, set_direct, translated
from asymcheck.storage.nvme import NvmeTier
from tests.store.equality import assert_same

STATE = {"large": torch.arange(3_000_000), "small": [torch.randn(3000) for _ in range(5)], "odd": torch.ones(70_001)}


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _round_trip(path: Path, files: Files | None = None) -> None:
    with Store(NvmeTier(path, StoreConfig(), files=files)) as store:
        store.save(STATE, step=1)
        assert_same(store.load(), STATE)
        store.delete(1)
        store.gc()
        store.save(STATE, step=2)
        assert_same(store.load(), STATE)
        assert store.verify() == []


class Watching(Files):
    """Records whether frames are read and written with direct I/O."""

    def __init__(self) -> None:
        self.frames_written: set[bool] = set()
        self.frames_read: set[bool] = set()

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Record and write."""
        if path.parent.name == "packs":
            self.frames_written.add(_is_direct(descriptor))
        super().pwrite(descriptor, buffers, offset, path)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Record and read."""
        if path.parent.name == "packs" and sum(map(len, buffers)) > 100_000:
            self.frames_read.add(_is_direct(descriptor))
        return super().pread(descriptor, buffers, offset, path)


class Refusing(Watching):
    """A file system that accepts the flag and then refuses all direct I/O, to several threads at once."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._start = threading.Barrier(threads)
        self._met = threading.local()

    def _refuse(self, descriptor: int, action: str, path: Path) -> None:
        if _is_direct(descriptor):
            if not getattr(self._met, "met", False):
                self._met.met = True
                with contextlib.suppress(threading.BrokenBarrierError):
                    self._start.wait(0.5)
            with translated(action, path):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Refuse direct I/O, or write."""
        self._refuse(descriptor, "write", path)
        super().pwrite(descriptor, buffers, offset, path)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Refuse direct I/O, or read."""
        self._refuse(descriptor, "read", path)
        return super().pread(descriptor, buffers, offset, path)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Return a path in tmpfs, which has no direct I/O on older kernels."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no file system in memory")
    path = Path(tempfile.mkdtemp(dir=shared, prefix="asymcheck-test-"))
    yield path / "store"
    shutil.rmtree(path)


def test_frames_bypass_the_page_cache(store_path: Path) -> None:
    """Test that every frame is read and written directly if the file system of the tests allows it."""
    files = Watching()
    _round_trip(store_path, files)
    probe = os.open(store_path / "asymcheck.store", os.O_RDONLY)
    direct = set_direct(probe)
    os.close(probe)
    assert files.frames_written == files.frames_read == {direct}


def test_a_store_works_in_memory(in_memory: Path) -> None:
    """Test tmpfs, with or without support of the flag."""
    _round_trip(in_memory)


def test_a_file_system_without_direct_access_is_written_through_the_cache(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the first frame is already written through the page cache if the flag is refused."""
    monkeypatch.setattr("asymcheck.storage.local_files.set_direct", lambda _descriptor: False)
    files = Watching()
    _round_trip(store_path, files)
    assert files.frames_written == files.frames_read == {False}


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_a_file_system_that_refuses_late_is_used_through_the_cache(store_path: Path, attempt: int) -> None:
    """Test several threads whose direct I/O is refused after the flag was accepted: none of them fails."""
    files = Refusing(4)
    _round_trip(store_path, files)
    assert files.frames_written == files.frames_read == {False}


def test_other_failures_are_not_retried(store_path: Path) -> None:
    """Test that an error of the device is raised, with and without direct I/O."""

    class Broken(Files):
        attempts = 0

        def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
            if path.parent.name == "packs":
                Broken.attempts += 1
                with translated("write", path):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().pwrite(descriptor, buffers, offset, path)

    with Store(NvmeTier(store_path, StoreConfig(slots=1), files=Broken())) as store:
        with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
            store.save(STATE, step=1)
        assert Broken.attempts == 1
        assert store.checkpoints() == []
    assert list((store_path / "packs").iterdir()) == []
