"""HDFS by hdfs-native, which needs no Java: a handler that makes a pyarrow file system of its client.

The adapter through fsspec would do the same, but hands the client buffers that it copies a byte at a time: 16 MiB/s.
"""

from __future__ import annotations

import importlib
import io
import os
import weakref
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyarrow import fs

from asymcheck.errors import StorageError

_NS_PER_MS = 1_000_000

_NOT_EMPTY = ("PathIsNotEmptyDirectory", "is non empty")
"""What the NameNode says of a directory that is not empty."""

_DEFAULTS = {
    # With three replicas, one DataNode that dies must not fail a write.
    "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
}


def connect(authority: str, options: Mapping[str, str]) -> fs.FileSystem:
    """Return a file system of the NameNode, or name service, ``authority``.

    Raises:
        ImportError: hdfs-native is not installed.
    """
    native = importlib.import_module("hdfs_native")
    return fs.PyFileSystem(_Handler(native, f"hdfs://{authority}", {**_DEFAULTS, **options}))


class _Writer(io.RawIOBase):
    """A file being written; the client is fast for ``bytes`` only."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - the client has no types that are stable
        self._inner = inner

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        view = memoryview(data)
        self._inner.write(data if isinstance(data, bytes) else bytes(view))
        return view.nbytes

    def close(self) -> None:
        # Once: garbage collection calls it again.
        if not self.closed:
            super().close()
            try:
                self._inner.close()
            finally:
                # The client's own object, too, closes itself when it is collected. After a failure that may wait for
                # servers that are gone, in the main thread, and so hold the end of the process.
                self._inner.close = _nothing


class Reader:
    """A complete file, read by position; threads may read together. It holds no connection: nobody closes it."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401 - as above
        self._inner = inner
        self.size: int = len(inner)
        """Its bytes."""

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` from ``offset``, as far as the file goes; return the number of bytes."""
        # Never past the end: the client panics there.
        count = min(len(memory), self.size - offset)
        done = 0
        if count > 0:
            # A packet after the other, 64 KiB: all at once the client would copy twice more, into memory that is new.
            for packet in self._inner.read_range_stream(offset, count):
                memory[done : done + len(packet)] = packet
                done += len(packet)
        return done


_handlers: weakref.WeakSet[_Handler] = weakref.WeakSet()
_inherited: list[_Handler] = []


def _keep_in_child() -> None:
    """Let go of no client in a forked child: its threads are not there, and it would wait for them for ever."""
    _inherited.extend(_handlers)


os.register_at_fork(after_in_child=_keep_in_child)


def _nothing() -> None:
    pass


class _Handler(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """What pyarrow asks of a file system, by the client."""

    def __init__(self, native: Any, url: str, options: Mapping[str, str]) -> None:  # noqa: ANN401 - as above
        self._native = native
        self._url = url
        self._options = dict(options)
        self._client = native.Client(url, self._options)
        _handlers.add(self)

    def get_type_name(self) -> str:
        return "hdfs-native"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        try:
            return _info_of(self._client.get_file_info(path))
        except FileNotFoundError:
            return fs.FileInfo(path, fs.FileType.NotFound)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        try:
            found = self._children(selector.base_dir)
        except FileNotFoundError:
            if not selector.allow_not_found:
                raise
            return []
        # Not by the client's own recursion: that ends with an error where a directory goes that was listed before, so
        # that all others would seem to be gone with it.
        folders = [info.path for info in found if selector.recursive and info.type == fs.FileType.Directory]
        while folders:
            try:
                below = self._children(folders.pop())
            except FileNotFoundError:
                continue
            found += below
            folders += [info.path for info in below if info.type == fs.FileType.Directory]
        return found

    def _children(self, path: str) -> list[fs.FileInfo]:
        return [_info_of(found) for found in self._client.list_status(path, recursive=False)]

    def create_dir(self, path: str, recursive: bool) -> None:  # noqa: FBT001 - pyarrow's way
        self._client.mkdirs(path, create_parent=recursive)

    def delete_file(self, path: str) -> None:
        self._client.delete(path)

    def delete_dir(self, path: str) -> None:
        raise StorageError(f"nobody asks to remove {path} with all that is in it")

    def remove_empty(self, path: str) -> None:
        """Remove a directory; one that is not empty stays."""
        try:
            self._client.delete(path, recursive=False)
        except (OSError, RuntimeError) as error:
            if not any(sign in str(error) for sign in _NOT_EMPTY):
                raise

    def move(self, source: str, target: str) -> None:
        """Rename; a target that exists is an error, which no look beforehand could promise."""
        self._client.rename(source, target)

    def open(self, path: str) -> Reader:
        """Open a complete file for reading by position: the NameNode is asked once where its blocks lie."""
        return Reader(self._client.read(path))

    def open_input_file(self, path: str) -> pa.NativeFile:
        raise StorageError(f"nobody reads {path} through pyarrow")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        raise StorageError(f"nobody reads {path} through pyarrow")

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - pyarrow's
        raise StorageError(f"nobody asks to empty {path} (missing_dir_ok={missing_dir_ok})")

    def delete_root_dir_contents(self) -> None:
        raise StorageError("nobody asks to empty the root")

    def copy_file(self, source: str, target: str) -> None:
        raise StorageError(f"HDFS copies no files ({source} to {target})")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:  # noqa: ANN401, ARG002 - pyarrow's way
        raise StorageError(f"nothing is appended to {path}: files here never change")

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:  # noqa: ANN401, ARG002 - pyarrow's way
        return pa.PythonFile(self.create(path), mode="w")

    def create(self, path: str) -> io.RawIOBase:
        """Open a new file for writing, which takes ``bytes`` as they are."""
        options = self._native.WriteOptions(
            replication=_number(self._options.get("dfs.replication")),
            block_size=_number(self._options.get("dfs.blocksize")),
            create_parent=False,
        )
        return _Writer(self._client.create(path, options))


def _info_of(found: Any) -> fs.FileInfo:  # noqa: ANN401 - the client has no types that are stable
    kind = fs.FileType.Directory if found.isdir else fs.FileType.File
    size = None if found.isdir else found.length
    return fs.FileInfo(found.path, kind, size=size, mtime_ns=found.modification_time * _NS_PER_MS)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
