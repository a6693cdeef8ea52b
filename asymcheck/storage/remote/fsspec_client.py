"""Client of the file systems of fsspec that rename files, such as SFTP, SMB and WebDAV."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from asymcheck.errors import AsymcheckError, InvalidInputError, ReadOnlyStoreError, RemoteUnreachableError
from asymcheck.storage.remote.client_interface import Entry, FileSystem, Readable
from asymcheck.storage.remote.deadline import within
from asymcheck.storage.remote.location import FSSPEC, RemoteLocation, refuse_credentials

_T = TypeVar("_T")
_SFTP = (f"{FSSPEC}ssh", f"{FSSPEC}sftp")
_ANSWERS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors that show that the connection works."""


class _FsspecClient(FileSystem):
    """Client with one connection, which is opened again after an error.

    File systems of fsspec may cache listings, and may be used by one thread at a time unless they are asynchronous.
    """

    kind = "other"

    def __init__(self, location: RemoteLocation, options: Mapping[str, str]) -> None:
        refuse_credentials(str(location), options)
        if location.scheme == f"{FSSPEC}ftp":
            raise InvalidInputError(
                f"location {location}: fsspec takes files for missing when an FTP server does not answer; use SFTP, as "
                f"in {FSSPEC}ssh://{location.authority}{location.path}"
            )
        self._fsspec: Any = importlib.import_module("fsspec")
        self._name = str(location)
        # fsspec does not decode percent-encoded characters.
        self._uri = f"{location.scheme.removeprefix(FSSPEC)}://{location.authority}{location.path}"
        self._options = {**options, "skip_instance_cache": True}
        self._lock: contextlib.AbstractContextManager[object] = threading.RLock()
        self._system: tuple[Any, str] | None = None
        try:
            system, top = self._connected()
        except (ValueError, ImportError, TypeError) as error:
            # fsspec itself recommends another library for SFTP.
            is_sftp = isinstance(error, ImportError) and location.scheme in _SFTP
            reason = "sshfs is not installed; install asymcheck[sftp]" if is_sftp else f"fsspec cannot open it: {error}"
            raise InvalidInputError(f"location {location}: {reason}") from error
        if "://" in top:
            raise InvalidInputError(f"location {location}: paths of this protocol are URLs, which asymcheck cannot use")
        if not f"/{top}".endswith(location.path):
            raise InvalidInputError(f"location {location}: fsspec takes the path for {top!r}; choose another name")
        self.top = top.rstrip("/")
        if system.async_impl:
            self._lock = contextlib.nullcontext()

    def _connected(self) -> tuple[Any, str]:
        found = self._system
        if found is None:
            found = self._system = self._fsspec.url_to_fs(self._uri, **self._options)
        found[0].invalidate_cache()
        return found

    def _do(self, call: Callable[[Any], _T], *, again: bool = False) -> _T:
        """Call ``call`` with the file system. ``again``: once more if a connection that was open before fails."""
        with self._lock:
            was_open = self._system is not None
            try:
                return call(self._connected()[0])
            except (*_ANSWERS, ReadOnlyStoreError):
                raise
            except Exception:
                self._system = None
                if not (again and was_open):
                    raise
            return call(self._connected()[0])

    def stat(self, path: str) -> Entry | None:
        try:
            return self._do(lambda system: self._entry(system.info(path)), again=True)
        except FileNotFoundError:
            return None

    def children(self, path: str) -> list[Entry]:
        def listed(system: Any) -> list[Entry]:  # noqa: ANN401 - fsspec has no types
            # isdir() would say "no" where the server does not answer.
            if system.info(path)["type"] != "directory":
                return []
            return [self._entry(info) for info in system.ls(path, detail=True)]

        return self._do(listed, again=True)

    def _entry(self, info: Mapping[str, Any]) -> Entry:
        path = PurePosixPath(PurePosixPath(self.top).root, info["name"])
        is_file = info["type"] == "file"
        return Entry(path, is_file, info["size"] or 0 if is_file else 0, _mtime_ns(info))

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Readable]:
        with self._lock:
            entry = self._do(lambda system: self._entry(system.info(path)), again=True)
            with self._do(lambda system: system.open(path, "rb")) as file:
                yield _File(file, entry.size, self._do)

    def create(self, path: str) -> _Writer:
        def opened(system: Any) -> Any:  # noqa: ANN401 - fsspec has no types
            if type(system).mv is self._fsspec.AbstractFileSystem.mv and not hasattr(system, "_mv"):
                raise ReadOnlyStoreError(
                    f"{self._name}: fsspec copies a file here instead of renaming it, so that readers could see a part "
                    "of it; such a location can only be read"
                )
            return system.open(path, "wb")

        return _Writer(self._do(opened), self._do)

    def make_directory(self, path: str) -> None:
        self._do(lambda system: system.makedirs(path, exist_ok=True), again=True)

    def rename(self, source: str, target: str) -> None:
        self._do(lambda system: system.mv(source, target))

    def delete(self, path: str) -> None:
        self._do(lambda system: system.rm_file(path))


class _File:
    """Open file for reads by position."""

    def __init__(self, file: Any, size: int, do: Callable[[Callable[[Any], int]], int]) -> None:  # noqa: ANN401 - fsspec has no types
        self._file, self.size, self._do = file, size, do

    def read_into(self, memory: memoryview, offset: int) -> int:

        def read(_: object) -> int:
            self._file.seek(offset)
            data = self._file.read(len(memory))
            memory[: len(data)] = data
            return len(data)

        return self._do(read)


class _Writer:
    """File that is being written."""

    def __init__(self, file: Any, do: Callable[[Callable[[Any], object]], object]) -> None:  # noqa: ANN401 - fsspec has no types
        self._file, self._do = file, do

    def write(self, data: bytes | memoryview) -> None:
        self._do(lambda _: self._file.write(data))

    def close(self) -> None:
        """Complete the file, after a sync if the file system offers it."""

        def closed(_: object) -> None:
            if hasattr(self._file, "fsync"):
                self._file.fsync()
            self._file.close()

        self._do(closed)


def _mtime_ns(info: Mapping[str, Any]) -> int:
    """Return the time of the last change; 0 if it is unknown, or has no time zone."""
    value = info.get("mtime", info.get("modified"))
    if isinstance(value, dt.datetime):
        value = value.timestamp() if value.tzinfo else 0
    return int(value * 1_000_000_000) if isinstance(value, (int, float)) else 0


def connect(location: RemoteLocation, options: Mapping[str, str], deadline_s: float) -> FileSystem:
    """Return the client for a location.

    Raises:
        InvalidInputError: fsspec has no such protocol, its library is not installed, or there is a password.
        RemoteUnreachableError: the server does not answer, or refuses.
    """
    action = f"connect to {location}"
    try:
        return within(deadline_s, action, lambda: _FsspecClient(location, options))
    except AsymcheckError:
        raise
    except Exception as error:
        raise RemoteUnreachableError(f"{action}: {error}; check the server, and the credentials for it") from error
