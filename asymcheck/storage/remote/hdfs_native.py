"""HDFS client based on hdfs-native, which needs no Java.

The fsspec adapter of hdfs-native copies buffers byte by byte, at 16 MiB/s, and is therefore not used.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from asymcheck.errors import InvalidInputError
from asymcheck.storage.remote.client_interface import Entry, FileSystem, Readable, Writable
from asymcheck.storage.remote.location import RemoteLocation

_NS_PER_MS = 1_000_000

_NOT_EMPTY = ("PathIsNotEmptyDirectory", "is non empty")
"""Error texts of the NameNode for a directory that is not empty."""

_DEFAULTS = {
    # The loss of one of three DataNodes must not fail a write.
    "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true"
}
_WRITE_OPTIONS = {"replication": "dfs.replication", "block_size": "dfs.blocksize"}


class _Writer:
    """File that is being written. Converts data to ``bytes``, which the client writes fast."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - the client has no stable types
        self._inner = inner

    def write(self, data: bytes | memoryview) -> None:
        self._inner.write(data if isinstance(data, bytes) else bytes(data))

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            # The client's file also closes itself when it is garbage collected. After a failure, this could block the
            # main thread at exit, waiting for dead servers.
            self._inner.close = lambda: None


class _Reader:
    """Complete file, read by position. Thread-safe. Needs no close, because it holds no connection."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - as above
        self._inner = inner
        self.size: int = len(inner)

    def read_into(self, memory: memoryview, offset: int) -> int:
        # Do not read past the end, where the client panics.
        count = min(len(memory), self.size - offset)
        done = 0
        if count > 0:
            # Read packets of 64 KiB. Reading all bytes at once would copy them twice more, into new memory.
            for packet in self._inner.read_range_stream(offset, count):
                memory[done : done + len(packet)] = packet
                done += len(packet)
        return done


_clients: weakref.WeakSet[_HdfsClient] = weakref.WeakSet()
_inherited: list[_HdfsClient] = []


def _keep_in_child() -> None:
    """Keep all clients alive in a forked child, where their destructors would wait forever for missing threads."""
    _inherited.extend(_clients)


os.register_at_fork(after_in_child=_keep_in_child)


class _HdfsClient(FileSystem):
    kind = "hdfs-native"
    keeps_files = True

    def __init__(self, authority: str, top: str, options: Mapping[str, str]) -> None:
        native: Any = importlib.import_module("hdfs_native")
        self.top = top
        options = {**_DEFAULTS, **options}
        self._client = native.Client(f"hdfs://{authority}", options)
        chosen = {name: int(options[key]) for name, key in _WRITE_OPTIONS.items() if key in options}
        self._write_options = native.WriteOptions(create_parent=False, **chosen)
        _clients.add(self)

    def stat(self, path: str) -> Entry | None:
        try:
            return _entry(self._client.get_file_info(path))
        except FileNotFoundError:
            return None

    def children(self, path: str) -> list[Entry]:
        # Do not use the recursive listing of the client, which fails if any directory is removed meanwhile.
        return [_entry(status) for status in self._client.list_status(path, recursive=False)]

    def reading(self, path: str) -> contextlib.AbstractContextManager[Readable]:
        return contextlib.nullcontext(_Reader(self._client.read(path)))

    def create(self, path: str) -> Writable:
        return _Writer(self._client.create(path, self._write_options))

    def make_directory(self, path: str) -> None:
        self._client.mkdirs(path, create_parent=True)

    def publish(self, source: str, target: str) -> bool:
        """Rename a file. The NameNode raises FileExistsError if the target exists."""
        self.rename(source, target)
        return True

    def rename(self, source: str, target: str) -> None:
        self._client.rename(source, target)

    def delete(self, path: str) -> None:
        if not self._client.delete(path):
            self._client.get_file_info(path)  # raises FileNotFoundError

    def delete_empty(self, path: str) -> None:
        try:
            self._client.delete(path, recursive=False)
        except (OSError, RuntimeError) as error:
            if not any(sign in str(error) for sign in _NOT_EMPTY):
                raise


def _entry(status: Any) -> Entry:  # noqa: ANN401 - the client has no stable types
    size = 0 if status.isdir else status.length
    return Entry(PurePosixPath(status.path), not status.isdir, size, status.modification_time * _NS_PER_MS)


def connect(location: RemoteLocation, options: Mapping[str, str]) -> FileSystem:
    """Return the client for a directory of a NameNode or name service.

    Raises:
        InvalidInputError: hdfs-native refuses the location or an option.
    """
    try:
        return _HdfsClient(location.authority, location.path, options)
    except (OSError, ValueError, RuntimeError) as error:
        is_service = "No NameNode hosts found" in str(error)
        advice = "; without a port it is a name service: give the port, or its options" if is_service else ""
        raise InvalidInputError(f"location {location}: hdfs-native refuses it: {error}{advice}") from error
