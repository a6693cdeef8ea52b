"""Clients: which pyarrow file system serves a location."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Literal, Protocol, cast
from urllib.parse import urlencode, urlsplit

from pyarrow import NativeFile, fs

from asymcheck.config import RemoteConfig
from asymcheck.errors import InvalidInputError, RemoteUnreachableError
from asymcheck.tiers.remote import hdfs_native, local
from asymcheck.tiers.remote.deadline import within
from asymcheck.tiers.remote.location import RemoteLocation, unknown_scheme

_KNOCK_S = 3.0
"""How long to wait for a NameNode to take a connection; one that takes longer may be busy, and the client waits."""

_INSTALL = "install asymcheck[hdfs], or Hadoop's libhdfs (ARROW_LIBHDFS_DIR, JAVA_HOME and CLASSPATH say where)"


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


class _ByPyarrow:
    """One of pyarrow's files."""

    def __init__(self, file: NativeFile) -> None:
        self._file = file
        self.size: int = file.size()

    def read_into(self, memory: memoryview, offset: int) -> int:
        self._file.seek(offset)
        return int(self._file.readinto(memory))


@dataclasses.dataclass(frozen=True)
class Client:
    """A pyarrow file system, and what it promises."""

    filesystem: fs.FileSystem
    """The file system."""
    kind: Literal["local", "hdfs-native", "libhdfs", "other"]
    """Which one it is."""
    top: str
    """What it calls the location: a path, or of others than these three, what pyarrow makes of the URI."""

    def create(self, path: str) -> Writable:
        """Open a new file for writing.

        Of hdfs-native its own: through pyarrow each piece would be copied once more. In a folder what is written lasts.
        """
        if self.kind == "local":
            return local.LastingFile(path)
        if self.kind == "hdfs-native":
            return cast("Writable", self.filesystem.handler.create(path))
        return cast("Writable", self.filesystem.open_output_stream(path))

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Readable]:
        """Open a file, for the block of a ``with`` or, with those that keep files, for longer."""
        if self.kind == "hdfs-native":
            yield self.filesystem.handler.open(path)
            return
        with self.filesystem.open_input_file(path) as file:
            yield _ByPyarrow(file)

    @property
    def keeps_files(self) -> bool:
        """Whether what was opened for reading may be kept for as long as one likes: nothing is held open for it."""
        return self.kind == "hdfs-native"

    @property
    def removes_empty(self) -> bool:
        """Whether it can remove a directory only if that is empty; pyarrow's own way takes what is in it, too."""
        return self.kind in ("local", "hdfs-native")

    def remove_empty(self, path: str) -> None:
        """Remove a directory; one that is not empty stays."""
        if self.kind == "hdfs-native":
            self.filesystem.handler.remove_empty(path)
            return
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    @property
    def is_frank(self) -> bool:
        """Whether "not found" means that; libhdfs says so, too, when the NameNode is down."""
        return self.kind in ("local", "hdfs-native")


def connect(location: RemoteLocation, config: RemoteConfig) -> Client:
    """Return the client for a location.

    Raises:
        InvalidInputError: no client for it is installed, or it refuses an option.
        RemoteUnreachableError: there is no NameNode at the host and port.
    """
    options = {**config.options, **location.options}
    _check_numbers(location, options)
    if location.scheme == "file":
        if options:
            raise InvalidInputError(f"location {location}: a local file system has no option {next(iter(options))!r}")
        return Client(fs.LocalFileSystem(), "local", location.path)
    if location.scheme == "hdfs":
        has_native = importlib.util.find_spec("hdfs_native") is not None
        if config.client == "hdfs-native" and not has_native:
            raise InvalidInputError(f"location {location}: hdfs-native is not installed; {_INSTALL}")
        _knock(location, config.deadline_s)
        if config.client != "libhdfs" and has_native:
            return Client(_native(location, options), "hdfs-native", location.path)
        return Client(_libhdfs(location, options, config.deadline_s), "libhdfs", location.path)
    filesystem, top = _by_pyarrow(location, options, config.deadline_s)
    return Client(filesystem, "other", top)


def _check_numbers(location: RemoteLocation, options: Mapping[str, str]) -> None:
    for name in ("dfs.replication", "dfs.blocksize"):
        number = options.get(name, "1")
        if not (number.isascii() and number.isdigit() and int(number)):
            raise InvalidInputError(f"location {location}: {name} {number!r:.50}: give an integer from 1")


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

    Raises:
        RemoteUnreachableError: the host is not known, not reached, or refuses connections to that port.
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


def _native(location: RemoteLocation, options: Mapping[str, str]) -> fs.FileSystem:
    try:
        return hdfs_native.connect(location.authority, options)
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
