"""The client that serves a location: a folder, HDFS by hdfs-native, or a file system of pyarrow."""

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
from asymcheck.storage.remote import hdfs_native
from asymcheck.storage.remote.client_interface import Client, Entry, Readable, Writable
from asymcheck.storage.remote.deadline import within
from asymcheck.storage.remote.location import RemoteLocation, unknown_scheme

_KNOCK_S = 3.0
"""How long to wait for a NameNode to take a connection; one that takes longer may be busy, and the client waits."""

_INSTALL = "install asymcheck[hdfs], or Hadoop's libhdfs (ARROW_LIBHDFS_DIR, JAVA_HOME and CLASSPATH say where)"
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)
"""Errors of a directory above a location that this user cannot open, or that cannot be synced."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without hard links."""


class _LocalClient(Client):
    """A folder."""

    kind = "local"

    def __init__(self, top: str) -> None:
        self.top = top

    def look(self, path: str) -> Entry | None:
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return None
        is_file = stat.S_ISREG(found.st_mode)
        return Entry(PurePosixPath(path), is_file, found.st_size if is_file else 0, found.st_mtime_ns)

    def children(self, path: str) -> list[Entry]:
        try:
            paths = [os.path.join(path, name) for name in os.listdir(path)]
        except NotADirectoryError:
            return []
        # A link that leads nowhere is something, but no file.
        return [self.look(child) or Entry(PurePosixPath(child), False, 0, 0) for child in paths]

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Readable]:
        with io.FileIO(path) as file:
            yield _SeekableFile(file, os.fstat(file.fileno()).st_size)

    def create(self, path: str) -> _LastingFile:
        return _LastingFile(path)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        # Also an existing one: its creator may have been killed before this.
        for above in (PurePosixPath(path), *PurePosixPath(path).parents):
            try:
                _sync(str(above))
            except OSError as error:
                if error.errno not in _NOT_OURS:
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
        # Also a taken name: an attempt of ours may have taken it, and have failed here.
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


class _LastingFile:
    """A file being written. Each piece is durable: the page cache would take any amount at once.

    Then nobody would know how fast the location is, and the last byte would have to wait for all of them.
    """

    def __init__(self, path: str) -> None:
        self._file = io.FileIO(path, "w")
        # A thread that gave up on a write closes the file meanwhile; its number may then be another one's.
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        with self._lock:
            while left:
                left = left[self._file.write(left) :]
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        with self._lock:
            self._file.close()


class _SeekableFile:
    """A complete file of Python or of pyarrow, read by position."""

    def __init__(self, file: io.FileIO, size: int) -> None:
        self._file = file
        self.size = size

    def read_into(self, memory: memoryview, offset: int) -> int:
        self._file.seek(offset)
        return int(self._file.readinto(memory))


class _PyarrowClient(Client):
    """A file system of pyarrow: HDFS by libhdfs, or an object store."""

    def __init__(self, filesystem: fs.FileSystem, kind: Literal["libhdfs", "other"], top: str) -> None:
        self._filesystem = filesystem
        self.kind = kind
        self.top = top

    def look(self, path: str) -> Entry | None:
        info = self._filesystem.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            self._check_root()
            return None
        return self._entry(info)

    def _check_root(self) -> None:
        """Make sure that nothing was found because nothing is there: libhdfs also says so when the NameNode is down."""
        root = PurePosixPath(self.top).parts[0]
        if self._filesystem.get_file_info(root).type == fs.FileType.NotFound:
            raise RemoteUnreachableError(f"look at {self.top}: not even the root was found; is it reachable?")

    def children(self, path: str) -> list[Entry]:
        return self._select(path, recursive=False)

    def walk(self, path: str) -> list[Entry]:
        """Return the entries in and below a directory, by one request if the file system supports it."""
        return self._select(path, recursive=True)

    def _select(self, path: str, *, recursive: bool) -> list[Entry]:
        try:
            found = self._filesystem.get_file_info(fs.FileSelector(path, recursive=recursive, allow_not_found=True))
        except NotADirectoryError:
            return []
        if not found:
            self._check_root()
        return [self._entry(info) for info in found]

    def _entry(self, info: fs.FileInfo) -> Entry:
        # libhdfs leaves out what stands before a path; others have none that begins with a slash.
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

    def publish(self, source: str, target: str) -> bool:
        """Rename a file. Most of these replace a target in silence: of two programs at once, the later one wins."""
        if self.look(target) is not None:
            return False
        self.rename(source, target)
        return True

    def rename(self, source: str, target: str) -> None:
        self._filesystem.move(source, target)

    def delete(self, path: str) -> None:
        self._filesystem.delete_file(path)

    def delete_empty(self, path: str) -> None:
        """Do nothing: pyarrow removes a directory with its content, which another program may be writing."""


def connect(location: RemoteLocation, config: RemoteConfig) -> Client:
    """Return the client for a location.

    Raises:
        InvalidInputError: no client for it is installed, or it refuses an option.
        RemoteUnreachableError: there is no NameNode at the host and port.
    """
    options = {**config.options, **location.options}
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
        _knock(location, config.deadline_s)
        if config.client != "libhdfs" and has_native:
            return _native(location, options)
        return _PyarrowClient(_libhdfs(location, options, config.deadline_s), "libhdfs", location.path)
    filesystem, top = _by_pyarrow(location, options, config.deadline_s)
    return _PyarrowClient(filesystem, "other", top)


def _by_pyarrow(location: RemoteLocation, options: Mapping[str, str], deadline_s: float) -> tuple[fs.FileSystem, str]:
    """Return the file system that pyarrow has for a URI, and what that calls the location."""
    query = f"?{urlencode(options)}" if options else ""
    try:
        # It may ask a server already, for the region of a bucket.
        filesystem, top = within(
            deadline_s, f"connect to {location}", lambda: fs.FileSystem.from_uri(f"{location}{query}")
        )
        return filesystem, top.rstrip("/")
    except (ValueError, KeyError, NotImplementedError) as error:
        if "Unrecognized filesystem type" in str(error):
            raise unknown_scheme(location, location.scheme) from error
        raise InvalidInputError(f"location {location}: pyarrow has no file system for it: {error}") from error
    except OSError as error:
        raise RemoteUnreachableError(f"connect to {location}: {error}") from error


def _knock(location: RemoteLocation, deadline_s: float) -> None:
    """Find out at once that nobody listens: the clients try again for a minute or more before they say so.

    A location without a port is a name service, whose NameNodes the client knows from its options or from Hadoop's own
    configuration, and tries in turn.
    """
    where = urlsplit(str(location))
    try:
        host, port = where.hostname or "", where.port
    except ValueError as error:
        raise InvalidInputError(f"location {location}: {error}") from error
    if port is None:
        return
    what = f"connect to {location}"
    try:
        within(deadline_s, what, lambda: socket.create_connection((host, port), _KNOCK_S).close())
    except TimeoutError:
        return
    except socket.gaierror as error:
        raise RemoteUnreachableError(f"{what}: host {host} is not known ({error}); correct the location") from error
    except OSError as error:
        raise RemoteUnreachableError(
            f"{what}: no NameNode is at host {host}, port {port} ({error}); start it, or give the host and port of "
            "fs.defaultFS in its core-site.xml"
        ) from error


def _native(location: RemoteLocation, options: Mapping[str, str]) -> Client:
    try:
        return hdfs_native.connect(location.authority, location.path, options)
    except (OSError, ValueError, RuntimeError) as error:
        is_service = "No NameNode hosts found" in str(error)
        advice = "; without a port it is a name service: give the port, or the service's options" if is_service else ""
        raise InvalidInputError(f"location {location}: hdfs-native refuses it: {error}{advice}") from error


def _libhdfs(location: RemoteLocation, options: Mapping[str, str], deadline_s: float) -> fs.FileSystem:
    host, _, port = location.authority.rpartition(":") if ":" in location.authority else (location.authority, "", "")
    what = f"connect to {location}"
    try:
        return within(
            deadline_s,
            what,
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
            raise InvalidInputError(f"location {location}: no client for hdfs: {error}; {_INSTALL}") from error
        raise RemoteUnreachableError(f"{what}: {error}") from error


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
