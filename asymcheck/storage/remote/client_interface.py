"""The contract of a client: the operations that a remote location asks of a file system, one class for each kind."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from pathlib import PurePosixPath
from typing import Literal, Protocol


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file or directory of a location."""

    path: PurePosixPath
    is_file: bool
    size: int
    """Bytes of a file; 0 for a directory."""
    mtime_ns: int
    """When it was last changed, nanoseconds since 1970-01-01 UTC by the clock there; 0 when nobody knows."""

    def is_older(self, moment_ns: int) -> bool:
        """Tell whether it was last changed by a moment, as far as anybody knows."""
        return 0 < self.mtime_ns <= moment_ns


class Writable(Protocol):
    """A file being written."""

    def write(self, data: bytes | memoryview) -> object:
        """Write all of it."""

    def close(self) -> None:
        """Make it complete."""


class Readable(Protocol):
    """A complete file, read by position."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Read from ``offset`` into ``memory``; return how many bytes, fewer at the end, and perhaps before."""


class Client(abc.ABC):
    """A file system. Operations have no deadline, and may raise any exception.

    Only two have a meaning: FileNotFoundError (nothing is at the path) and FileExistsError (the name is taken).
    """

    kind: Literal["local", "hdfs-native", "libhdfs", "other"]
    top: str
    """The path of the location in the file system."""
    keeps_files = False
    """Whether an opened file may be kept for any time, because it holds no connection and nobody closes it."""

    @abc.abstractmethod
    def look(self, path: str) -> Entry | None:
        """Return the entry at a path; None if there is none."""

    @abc.abstractmethod
    def children(self, path: str) -> list[Entry]:
        """Return the entries in a directory; none for a file."""

    def walk(self, path: str) -> list[Entry]:
        """Return the entries in and below a directory, without directories that vanish meanwhile."""
        found = self.children(path)
        folders = [entry.path for entry in found if not entry.is_file]
        while folders:
            with contextlib.suppress(FileNotFoundError):
                below = self.children(str(folders.pop()))
                found += below
                folders += [entry.path for entry in below if not entry.is_file]
        return found

    @abc.abstractmethod
    def reading(self, path: str) -> contextlib.AbstractContextManager[Readable]:
        """Open a complete file, for the block of a ``with``; see :attr:`keeps_files`."""

    @abc.abstractmethod
    def create(self, path: str) -> Writable:
        """Open a new file for writing."""

    @abc.abstractmethod
    def make_directory(self, path: str) -> None:
        """Create a directory and those that lead to it; an existing one is no error."""

    @abc.abstractmethod
    def publish(self, source: str, target: str) -> bool:
        """Rename a complete file, durably, unless the target exists; return False then."""

    @abc.abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Rename a file, durably, in its directory, to a name that is free."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file."""

    @abc.abstractmethod
    def delete_empty(self, path: str) -> None:
        """Remove a directory; one that is not empty stays. A client that cannot promise that does nothing."""
