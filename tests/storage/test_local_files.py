"""Test file operations: errors of the package, and complete reads and writes."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from asymcheck.errors import (
    OutOfSpaceError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    StorageError,
    TooManyFilesError,
)
from asymcheck.storage import local_files as module
from asymcheck.storage.local_files import Descriptors, Files, is_same_file, translated, try_lock, unlock, wait_lock

FILES = Files()
PATH = Path("somewhere")


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, OutOfSpaceError, "free space"),
        (errno.EDQUOT, OutOfSpaceError, "free space"),
        (errno.EROFS, ReadOnlyStoreError, "read_only=True"),
        (errno.EACCES, ReadOnlyStoreError, "read_only=True"),
        (errno.EPERM, ReadOnlyStoreError, "read_only=True"),
        (errno.EMFILE, TooManyFilesError, "ulimit -n"),
        (errno.ENFILE, TooManyFilesError, "ulimit -n"),
        (errno.ESTALE, RemoteUnreachableError, "check the mount"),
        (errno.ENOTCONN, RemoteUnreachableError, "check the mount"),
        (errno.EIO, StorageError, os.strerror(errno.EIO)),
        (errno.EINVAL, StorageError, os.strerror(errno.EINVAL)),
    ],
)
def test_errors_of_the_system_get_the_types_of_the_store(number: int, kind: type[Exception], advice: str) -> None:
    """Test that the error names operation, file, reason and remedy, and that the original error is its cause."""
    with pytest.raises(kind) as caught, translated("write", PATH):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert str(caught.value).startswith("write somewhere: ")
    assert advice in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == number


def test_a_missing_file_is_an_answer_and_no_translation() -> None:
    """Test that a missing file is a return value, because its meaning depends on the caller."""
    with pytest.raises(FileNotFoundError), translated("open", PATH):
        raise FileNotFoundError(errno.ENOENT, "no such file")


def test_a_write_goes_on_until_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test short writes of the system, and a write of no bytes on a full device."""
    real = os.pwrite
    monkeypatch.setattr(module.os, "pwritev", lambda fd, buffers, at: real(fd, b"".join(buffers)[:7], at))
    data = bytes(range(100))
    descriptor = FILES.open_new(tmp_path / "x")
    parts = [memoryview(data[start:end]) for start, end in ((0, 10), (10, 10), (10, 13), (13, 15), (15, 100))]
    FILES.pwrite(descriptor, parts, 3, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == bytes(3) + data
    monkeypatch.setattr(module.os, "pwritev", lambda *_: 0)
    with pytest.raises(OutOfSpaceError, match="accepted no bytes"):
        FILES.pwrite(descriptor, [memoryview(data)], 0, tmp_path / "x")
    os.close(descriptor)


def test_a_read_goes_on_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that fewer bytes than requested mean the end of the file."""
    real = os.preadv
    monkeypatch.setattr(module.os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    (tmp_path / "x").write_bytes(bytes(range(100)))
    descriptor = FILES.open_read(tmp_path / "x")
    buffer = bytearray(200)
    assert FILES.pread(descriptor, [memoryview(buffer)], 10, tmp_path / "x") == 90
    assert bytes(buffer[:90]) == bytes(range(10, 100))
    assert FILES.pread(descriptor, [memoryview(buffer)], 1000, tmp_path / "x") == 0
    os.close(descriptor)


def test_a_read_fills_one_buffer_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test short reads of the system, and the end of the file."""
    real = os.preadv

    def some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        left = iter(buffers)
        first = next(left)
        return real(descriptor, [first, next(left, memoryview(bytearray()))[:1]], offset)

    monkeypatch.setattr(module.os, "preadv", some)
    (tmp_path / "x").write_bytes(bytes(range(100)))
    descriptor = FILES.open_read(tmp_path / "x")
    buffers = [bytearray(size) for size in (1, 0, 40, 2, 70)]
    assert FILES.pread(descriptor, [memoryview(one) for one in buffers], 10, tmp_path / "x") == 90
    assert b"".join(buffers) == bytes(range(10, 100)) + bytes(23)
    os.close(descriptor)


def test_a_new_file_must_be_new(tmp_path: Path) -> None:
    """Test that an existing file is never overwritten by accident."""
    (tmp_path / "x").write_text("mine")
    with pytest.raises(StorageError):
        FILES.open_new(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"


def test_existing_and_missing_names_are_answers(tmp_path: Path) -> None:
    """Test the creation of an existing name, and the removal or listing of a missing name."""
    assert FILES.make_directory(tmp_path / "d")
    assert not FILES.make_directory(tmp_path / "d")
    (tmp_path / "d" / "f").write_text("")
    assert FILES.list(tmp_path / "d") == ["f"]
    assert FILES.list(tmp_path / "none") == []
    assert FILES.list(tmp_path / "d" / "f") == []
    assert not FILES.remove_directory(tmp_path / "d")
    assert FILES.link(tmp_path / "d" / "f", tmp_path / "g")
    assert not FILES.link(tmp_path / "d" / "f", tmp_path / "g")
    FILES.unlink(tmp_path / "d" / "f")
    FILES.unlink(tmp_path / "d" / "f")
    assert FILES.remove_directory(tmp_path / "d")
    assert not FILES.remove_directory(tmp_path / "d")
    assert FILES.read_small(tmp_path / "none", 10) is None


def test_a_small_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """Test that a file of one byte more is reported as too long, without reading the rest."""
    (tmp_path / "x").write_bytes(b"0123456789")
    assert FILES.read_small(tmp_path / "x", 10) == b"0123456789"
    assert FILES.read_small(tmp_path / "x", 4) == b"01234"


def test_locks_are_exclusive_or_shared(tmp_path: Path) -> None:
    """Test several readers or one writer, and that a timeout is a return value."""
    (tmp_path / "x").write_text("")
    one, other = (FILES.open_read(tmp_path / "x") for _ in range(2))
    assert try_lock(one, exclusive=False)
    assert try_lock(other, exclusive=False)
    assert not try_lock(other, exclusive=True)
    assert not wait_lock(other, 0.02, exclusive=True)
    unlock(one)
    assert wait_lock(other, 5, exclusive=True)
    assert not try_lock(one, exclusive=False)
    os.close(other)
    assert try_lock(one, exclusive=True)
    os.close(one)


def test_a_path_that_names_another_file_by_now_is_seen(tmp_path: Path) -> None:
    """Test a file that was replaced or removed before its lock was acquired."""
    (tmp_path / "x").write_text("")
    descriptor = FILES.open_read(tmp_path / "x")
    assert is_same_file(descriptor, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "y")
    assert is_same_file(descriptor, tmp_path / "y")
    assert not is_same_file(descriptor, tmp_path / "x")
    (tmp_path / "x").write_text("")
    assert not is_same_file(descriptor, tmp_path / "x")
    os.close(descriptor)


def test_descriptors_are_closed_once(tmp_path: Path) -> None:
    """Test that a second close does not close a descriptor that was reused meanwhile."""
    (tmp_path / "x").write_text("")
    known = Descriptors()
    descriptor = known.open(FILES.open_read, tmp_path / "x")
    known.close(descriptor)
    other = FILES.open_read(tmp_path / "x")
    assert other == descriptor
    known.close(descriptor)
    os.fstat(other)
    os.close(other)
