"""Folders: the client for ``file://``, by the calls of the operating system, which make every name and byte durable."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import PurePosixPath

from asymcheck.tiers.remote.contract import Client, Entry, Readable

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)
"""Errors of a directory above a location that this user cannot open, or that cannot be synced."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without hard links."""


class LocalClient(Client):
    """A folder."""

    kind = "local"

    def __init__(self, top: str) -> None:
        self.top = top

    def look(self, path: str) -> Entry | None:
        """Return what lies at a path; None when nothing does."""
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return None
        is_file = stat.S_ISREG(found.st_mode)
        return Entry(PurePosixPath(path), is_file, found.st_size if is_file else 0, found.st_mtime_ns)

    def children(self, path: str) -> list[Entry]:
        """Return what lies in a directory."""
        paths = [os.path.join(path, name) for name in os.listdir(path)]
        # A link that leads nowhere is something, but no file.
        return [self.look(child) or Entry(PurePosixPath(child), False, 0, 0) for child in paths]

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Readable]:
        """Open a complete file."""
        with io.FileIO(path) as file:
            yield SeekableFile(file, os.fstat(file.fileno()).st_size)

    def create(self, path: str) -> LastingFile:
        """Open a new file for writing."""
        return LastingFile(path)

    def make_directory(self, path: str) -> None:
        """Create a directory durably, with those that lead to it."""
        os.makedirs(path, exist_ok=True)
        # Also an existing one: its creator may have been killed before this.
        for above in (PurePosixPath(path), *PurePosixPath(path).parents):
            try:
                _sync(str(above))
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise

    def publish(self, source: str, target: str) -> bool:
        """Rename a file, durably, unless the target exists; return False then."""
        is_free = True
        try:
            os.link(source, target)
        except FileExistsError:
            is_free = False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            is_free = not os.path.lexists(target)
            if is_free:
                os.rename(source, target)
        else:
            os.unlink(source)
        # Also a taken name: an attempt of ours may have taken it, and have failed here.
        _sync(os.path.dirname(target))
        return is_free

    def rename(self, source: str, target: str) -> None:
        """Rename a file durably."""
        os.rename(source, target)
        _sync(os.path.dirname(target))

    def delete(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def delete_empty(self, path: str) -> None:
        """Remove a directory; one that is not empty stays."""
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


class LastingFile:
    """A file being written. Each piece is durable: the page cache would take any amount at once.

    Then nobody would know how fast the location is, and the last byte would have to wait for all of them.
    """

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(path, "w")
        # A thread that gave up on a write closes the file meanwhile; its number may then be another one's.
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        """Write all of it."""
        left = memoryview(data)
        with self._lock:
            while left:
                left = left[self._file.write(left) :]
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class SeekableFile:
    """A complete file of Python or of pyarrow, read by position."""

    def __init__(self, file: io.FileIO, size: int) -> None:
        self._file = file
        self.size = size

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Read from ``offset`` into ``memory``."""
        self._file.seek(offset)
        return int(self._file.readinto(memory))


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
