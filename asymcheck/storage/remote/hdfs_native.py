"""HDFS by hdfs-native, which needs no Java.

Its adapter for fsspec hands the client buffers that it copies a byte at a time: 16 MiB/s.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from asymcheck.storage.remote.client_interface import Client, Entry, Readable, Writable

_NS_PER_MS = 1_000_000

_NOT_EMPTY = ("PathIsNotEmptyDirectory", "is non empty")
"""Texts of the NameNode about a directory that is not empty."""

_DEFAULTS = {
    # With three replicas, one DataNode that dies must not fail a write.
    "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true"
}
_WRITE_OPTIONS = {"replication": "dfs.replication", "block_size": "dfs.blocksize"}


class _Writer:
    """A file being written; the client is fast for ``bytes`` only."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - the client has no types that are stable
        self._inner = inner

    def write(self, data: bytes | memoryview) -> None:
        self._inner.write(data if isinstance(data, bytes) else bytes(data))

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            # The client's own object, too, closes itself when it is collected. After a failure that may wait for
            # servers that are gone, in the main thread, and so hold the end of the process.
            self._inner.close = lambda: None


class _Reader:
    """A complete file, read by position; threads may read together. It holds no connection: nobody closes it."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - as above
        self._inner = inner
        self.size: int = len(inner)

    def read_into(self, memory: memoryview, offset: int) -> int:
        # Never past the end: the client panics there.
        count = min(len(memory), self.size - offset)
        done = 0
        if count > 0:
            # A packet after the other, 64 KiB: all at once the client would copy twice more, into memory that is new.
            for packet in self._inner.read_range_stream(offset, count):
                memory[done : done + len(packet)] = packet
                done += len(packet)
        return done


_clients: weakref.WeakSet[_HdfsClient] = weakref.WeakSet()
_inherited: list[_HdfsClient] = []


def _keep_in_child() -> None:
    """Let go of no client in a forked child: its threads are not there, and it would wait for them for ever."""
    _inherited.extend(_clients)


os.register_at_fork(after_in_child=_keep_in_child)


class _HdfsClient(Client):
    """A directory in HDFS."""

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

    def look(self, path: str) -> Entry | None:
        try:
            return _entry(self._client.get_file_info(path))
        except FileNotFoundError:
            return None

    def children(self, path: str) -> list[Entry]:
        # Not by the client's own recursion: that ends with an error where a directory goes that was listed before, so
        # that all others would seem to be gone with it.
        return [_entry(found) for found in self._client.list_status(path, recursive=False)]

    def reading(self, path: str) -> contextlib.AbstractContextManager[Readable]:
        return contextlib.nullcontext(_Reader(self._client.read(path)))

    def create(self, path: str) -> Writable:
        return _Writer(self._client.create(path, self._write_options))

    def make_directory(self, path: str) -> None:
        self._client.mkdirs(path, create_parent=True)

    def publish(self, source: str, target: str) -> bool:
        """Rename a file; the NameNode refuses a target that exists."""
        self.rename(source, target)
        return True

    def rename(self, source: str, target: str) -> None:
        self._client.rename(source, target)

    def delete(self, path: str) -> None:
        self._client.delete(path)

    def delete_empty(self, path: str) -> None:
        try:
            self._client.delete(path, recursive=False)
        except (OSError, RuntimeError) as error:
            if not any(sign in str(error) for sign in _NOT_EMPTY):
                raise


def _entry(found: Any) -> Entry:  # noqa: ANN401 - the client has no types that are stable
    size = 0 if found.isdir else found.length
    return Entry(PurePosixPath(found.path), not found.isdir, size, found.modification_time * _NS_PER_MS)


def connect(authority: str, top: str, options: Mapping[str, str]) -> Client:
    """Return the client for a directory of the NameNode, or name service, ``authority``.

    Raises:
        ImportError: hdfs-native is not installed.
    """
    return _HdfsClient(authority, top, options)
