"""Abstract client of a remote file system."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Literal, Protocol

from asymcheck.storage.slots import SlotPool


@dataclasses.dataclass(frozen=True)
class Entry:
    """File or directory of a remote location."""

    path: PurePosixPath
    is_file: bool
    size: int
    """Bytes of a file; 0 for a directory."""
    mtime_ns: int
    """Time of the last change in nanoseconds since 1970-01-01 UTC, by the server's clock; 0 if unknown."""

    def is_older(self, moment_ns: int) -> bool:
        """Tell whether the entry is known to be unchanged since a moment."""
        return 0 < self.mtime_ns <= moment_ns


class Writable(Protocol):
    """File that is being written."""

    def write(self, data: bytes | memoryview) -> object:
        """Write all of ``data``."""

    def close(self) -> None:
        """Complete the file."""


class Readable(Protocol):
    """Complete file, read by position."""

    @property
    def size(self) -> int:
        """Size of the file in bytes."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Read from ``offset`` into ``memory``; return the bytes read, which may be fewer than requested."""


class OpenedFile:
    """Cache of an open file for repeated reads, if the client can keep files open."""

    def __init__(self) -> None:
        self.file: Readable | None = None


class Client(abc.ABC):
    """Client of a remote location. Operations have no deadline, and may raise any exception.

    Callers distinguish only FileNotFoundError (the path does not exist) and FileExistsError (the name is taken).

    Every location offers one way to make a file: a create-only put of the whole file. An object store has it as an
    operation. A file system has it as a rename of a complete temporary file to an unused name.
    """

    kind: Literal["local", "hdfs-native", "libhdfs", "other", "objects"]
    top: str
    """Path of the location in the file system."""

    @abc.abstractmethod
    def stat(self, path: str) -> Entry | None:
        """Return the entry at a path; None if there is none."""

    @abc.abstractmethod
    def children(self, path: str) -> list[Entry]:
        """Return the entries in a directory; none for a file."""

    def beginning(self, path: str, prefix: str, found: list[Entry]) -> None:
        """Append the entries in a directory whose names begin with ``prefix`` to ``found``, as :meth:`walk` does."""
        found += [entry for entry in self.children(path) if entry.path.name.startswith(prefix)]

    def walk(self, path: str, found: list[Entry]) -> None:
        """Append the entries in and below a directory to ``found``, those of each request at once.

        Directories that are removed meanwhile are skipped.
        """
        found += (below := self.children(path))
        folders = [entry.path for entry in below if not entry.is_file]
        while folders:
            with contextlib.suppress(FileNotFoundError):
                found += (below := self.children(str(folders.pop())))
                folders += [entry.path for entry in below if not entry.is_file]

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file."""


class ObjectStore(Client):
    """Client of an object store: its directories are only prefixes of names, and nothing can be renamed."""

    @abc.abstractmethod
    def read(self, path: str, offset: int, length: int) -> tuple[memoryview, int]:
        """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file."""

    @abc.abstractmethod
    def put(self, path: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """Put a whole file create-only; return False if the name is taken by a file with other bytes.

        The file consists of the pieces, which are sent without a copy.

        Raises:
            RemoteUnreachableError: the service refused the put, but no such file exists; the caller may try again.
        """


class FileSystem(Client):
    """Client of a file system: files are written under temporary names, and published by a rename."""

    keeps_files = False
    """Whether an open file holds no connection, so that it may be kept and need not be closed."""

    @abc.abstractmethod
    def reading(self, path: str) -> contextlib.AbstractContextManager[Readable]:
        """Open a complete file for the ``with`` block; see :attr:`keeps_files`."""

    def read_range(
        self, path: str, offset: int, length: int, kept: OpenedFile, memory: SlotPool | None
    ) -> tuple[memoryview, int]:
        """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file."""
        if (file := kept.file) is not None:
            try:
                return _read(file, offset, length, memory), file.size
            except Exception:  # noqa: BLE001 - blocks move and tokens expire, so any error means to reopen the file
                kept.file = None
        with self.reading(path) as file:
            data = _read(file, offset, length, memory)
            if self.keeps_files:
                kept.file = file
            return data, file.size

    @abc.abstractmethod
    def create(self, path: str) -> Writable:
        """Open a new file for writing."""

    @abc.abstractmethod
    def make_directory(self, path: str) -> None:
        """Create a directory and its parents, if they do not exist."""

    def publish(self, source: str, target: str) -> bool:
        """Rename a complete file durably; return False if the target exists.

        By default, look for the target first. If two programs do this at once, the later one wins.
        """
        if self.stat(target) is not None:
            return False
        self.rename(source, target)
        return True

    @abc.abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Rename a file durably within its directory. The target does not exist."""

    def delete_empty(self, path: str) -> None:
        """Remove a directory if it is empty. Do nothing if the client cannot ensure this atomically.

        By default, do nothing: pyarrow and some file systems of fsspec remove the content, too.
        """


def _read(file: Readable, offset: int, length: int, memory: SlotPool | None) -> memoryview:
    count = max(0, min(length, file.size - offset))
    data = memoryview(bytearray(count)) if memory is None else memory.lend(count)
    done = 0
    while done < count:
        more = file.read_into(data[done:], offset + done)
        if not more:
            break
        done += more
    return data[:done]
