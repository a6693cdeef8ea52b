"""Clients of remote locations: a local folder, HDFS, object stores, and other file systems of pyarrow."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal, cast
from urllib.parse import urlencode, urlsplit

from pyarrow import fs

from asymcheck.config import RemoteConfig
from asymcheck.errors import InvalidInputError, RemoteUnreachableError
from asymcheck.storage.remote import fsspec_client, hdfs_native, object_stores
from asymcheck.storage.remote.client_interface import Client, Entry, FileSystem, Readable, Writable
from asymcheck.storage.remote.deadline import within
from asymcheck.storage.remote.location import FSSPEC, OBJECT_SCHEMES, RemoteLocation, unknown_scheme

_PROBE_S = 3.0
"""Timeout for a connection to a NameNode. A NameNode that takes longer may be busy, so the client waits further."""

_INSTALL = "install asymcheck[hdfs], or Hadoop's libhdfs (set ARROW_LIBHDFS_DIR, JAVA_HOME and CLASSPATH)"
_UNSYNCABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)
"""Errors of a parent directory that this user cannot open or sync."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without hard links."""


class _LocalClient(FileSystem):
    kind = "local"

    def __init__(self, top: str) -> None:
        self.top = top

    def stat(self, path: str) -> Entry | None:
        try:
            status = os.stat(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return None
        is_file = stat.S_ISREG(status.st_mode)
        return Entry(PurePosixPath(path), is_file, status.st_size if is_file else 0, status.st_mtime_ns)

    def children(self, path: str) -> list[Entry]:
        try:
            paths = [os.path.join(path, name) for name in os.listdir(path)]
        except NotADirectoryError:
            return []
        # Report a dangling link, but not as a file.
        return [self.stat(child) or Entry(PurePosixPath(child), False, 0, 0) for child in paths]

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Readable]:
        with io.FileIO(path) as file:
            yield _SeekableFile(file, os.fstat(file.fileno()).st_size)

    def create(self, path: str) -> _DurableFile:
        return _DurableFile(path)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        # Sync even if the directory existed, because its creator may have been killed before the sync.
        for parent in (PurePosixPath(path), *PurePosixPath(path).parents):
            try:
                _sync(str(parent))
            except OSError as error:
                if error.errno not in _UNSYNCABLE:
                    raise

    def publish(self, source: str, target: str) -> bool:
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
        # Sync even if the name is taken: an earlier attempt may have created it and failed before the sync.
        _sync(os.path.dirname(target))
        return is_free

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)
        _sync(os.path.dirname(target))

    def delete(self, path: str) -> None:
        os.unlink(path)

    def delete_empty(self, path: str) -> None:
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


class _DurableFile:
    """File that is being written, with a sync after each piece.

    Without these syncs, the page cache would hide the throughput of the location, and the last sync would take long.
    """

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(path, "w")
        # Another thread may close the file after a timeout. The descriptor number could then be reused.
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        remaining = memoryview(data)
        with self._lock:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        with self._lock:
            self._file.close()


class _SeekableFile:
    """Complete file of Python or pyarrow, read by position."""

    def __init__(self, file: io.FileIO, size: int) -> None:
        self._file = file
        self.size = size

    def read_into(self, memory: memoryview, offset: int) -> int:
        self._file.seek(offset)
        return int(self._file.readinto(memory))


class _PyarrowClient(FileSystem):
    """Client for a pyarrow file system: HDFS by libhdfs, or another one."""

    def __init__(self, filesystem: fs.FileSystem, kind: Literal["libhdfs", "other"], top: str) -> None:
        self._filesystem = filesystem
        self.kind = kind
        self.top = top

    def stat(self, path: str) -> Entry | None:
        info = self._filesystem.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            self._check_root()
            return None
        return self._entry(info)

    def _check_root(self) -> None:
        """Raise if the root is not found either. Libhdfs also reports "not found" if the NameNode is down."""
        root = PurePosixPath(self.top).parts[0]
        if self._filesystem.get_file_info(root).type == fs.FileType.NotFound:
            raise RemoteUnreachableError(
                f"cannot access {self.top}: even the root was not found; check that the server is reachable"
            )

    def children(self, path: str) -> list[Entry]:
        return self._select(path, recursive=False)

    def walk(self, path: str, found: list[Entry]) -> None:
        """Append the entries in and below a directory to ``found``, by a single request if possible."""
        found += self._select(path, recursive=True)

    def _select(self, path: str, *, recursive: bool) -> list[Entry]:
        try:
            infos = self._filesystem.get_file_info(fs.FileSelector(path, recursive=recursive, allow_not_found=True))
        except NotADirectoryError:
            return []
        if not infos:
            self._check_root()
        return [self._entry(info) for info in infos]

    def _entry(self, info: fs.FileInfo) -> Entry:
        # Libhdfs omits the prefix of a path. Paths of object stores do not begin with a slash.
        path = PurePosixPath(PurePosixPath(self.top).root, info.path)
        is_file = info.type == fs.FileType.File
        return Entry(path, is_file, info.size or 0 if is_file else 0, info.mtime_ns or 0)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Readable]:
        try:
            file = self._filesystem.open_input_file(path)
        except FileNotFoundError:
            self._check_root()
            raise
        with file:
            yield _SeekableFile(file, file.size())

    def create(self, path: str) -> Writable:
        return cast("Writable", self._filesystem.open_output_stream(path))

    def make_directory(self, path: str) -> None:
        self._filesystem.create_dir(path, recursive=True)

    def rename(self, source: str, target: str) -> None:
        self._filesystem.move(source, target)

    def delete(self, path: str) -> None:
        self._filesystem.delete_file(path)


def connect(location: RemoteLocation, config: RemoteConfig) -> Client:
    """Return the client for a location.

    Raises:
        InvalidInputError: no client is installed, or the client refuses an option.
        RemoteUnreachableError: no NameNode listens at the host and port.
    """
    options = {**config.options, **location.options}
    if location.scheme in OBJECT_SCHEMES:
        return object_stores.connect(location, options, config.deadline_s)
    for name in ("dfs.replication", "dfs.blocksize"):
        number = options.get(name, "1")
        if not (number.isascii() and number.isdigit() and int(number)):
            raise InvalidInputError(f"location {location}: {name} {number!r:.50}: give an integer from 1")
    if location.scheme == "file":
        if options:
            raise InvalidInputError(f"location {location}: a local file system has no option {next(iter(options))!r}")
        return _LocalClient(location.path)
    if location.scheme == "hdfs":
        has_native = importlib.util.find_spec("hdfs_native") is not None
        if config.client == "hdfs-native" and not has_native:
            raise InvalidInputError(f"location {location}: hdfs-native is not installed; {_INSTALL}")
        _probe(location, config.deadline_s)
        if config.client != "libhdfs" and has_native:
            return hdfs_native.connect(location, options)
        return _PyarrowClient(_libhdfs(location, options, config.deadline_s), "libhdfs", location.path)
    if location.scheme.startswith(FSSPEC):
        return fsspec_client.connect(location, options, config.deadline_s)
    filesystem, top = _by_pyarrow(location, options, config.deadline_s)
    return _PyarrowClient(filesystem, "other", top)


def _by_pyarrow(location: RemoteLocation, options: Mapping[str, str], deadline_s: float) -> tuple[fs.FileSystem, str]:
    """Return the pyarrow file system of a URI, and the path of the location in it."""
    query = f"?{urlencode(options)}" if options else ""
    try:
        # This may already send a request, for the region of a bucket.
        filesystem, top = within(
            deadline_s, f"connect to {location}", lambda: fs.FileSystem.from_uri(f"{location}{query}")
        )
        return filesystem, top.rstrip("/")
    except (ValueError, KeyError, NotImplementedError) as error:
        if "Unrecognized filesystem type" in str(error):
            raise unknown_scheme(location, location.scheme) from error
        raise InvalidInputError(f"location {location}: pyarrow has no file system for this URI: {error}") from error
    except OSError as error:
        raise RemoteUnreachableError(f"connect to {location}: {error}") from error


def _probe(location: RemoteLocation, deadline_s: float) -> None:
    """Raise immediately if no NameNode listens. The clients would retry for a minute or more.

    A location without a port is a name service. The client finds its NameNodes in the options or in the configuration
    of Hadoop, and tries each.
    """
    parts = urlsplit(str(location))
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidInputError(f"location {location}: {error}") from error
    if port is None:
        return
    action = f"connect to {location}"
    try:
        within(deadline_s, action, lambda: socket.create_connection((host, port), _PROBE_S).close())
    except TimeoutError:
        return
    except socket.gaierror as error:
        raise RemoteUnreachableError(f"{action}: host {host} is not known ({error}); correct the location") from error
    except OSError as error:
        raise RemoteUnreachableError(
            f"{action}: no NameNode is at host {host}, port {port} ({error}); start it, or use the host and port of "
            "fs.defaultFS in its core-site.xml"
        ) from error


def _libhdfs(location: RemoteLocation, options: Mapping[str, str], deadline_s: float) -> fs.FileSystem:
    host, _, port = location.authority.rpartition(":") if ":" in location.authority else (location.authority, "", "")
    action = f"connect to {location}"
    try:
        return within(
            deadline_s,
            action,
            lambda: fs.HadoopFileSystem(
                host,
                int(port or 8020),
                replication=int(options.get("dfs.replication", 3)),
                default_block_size=int(options["dfs.blocksize"]) if "dfs.blocksize" in options else None,
                extra_conf=dict(options),
            ),
        )
    except OSError as error:
        if "libhdfs" in str(error) or "jvm" in str(error).lower():
            raise InvalidInputError(f"location {location}: no HDFS client is available: {error}; {_INSTALL}") from error
        raise RemoteUnreachableError(f"{action}: {error}") from error


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
