"""The only door to a remote location: a small contract over pyarrow's file systems, every operation with a deadline.

Paths are those of the file system, below that of the location. Nothing here trusts a client further than this: a file
that was written and closed has the bytes that were written or fewer, and a file that is renamed keeps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import PurePath, PurePosixPath
from typing import TypeVar

from pyarrow import fs

from asymcheck.config import RemoteConfig
from asymcheck.errors import (
    AsymcheckError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    StorageError,
)
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.threads import begin
from asymcheck.tiers.remote import local
from asymcheck.tiers.remote.clients import Writable, connect
from asymcheck.tiers.remote.deadline import tried, within
from asymcheck.tiers.remote.location import RemoteLocation
from asymcheck.tiers.remote.pace import Pace
from asymcheck.tiers.remote.ranges import Kept, Memory, read_range
from asymcheck.tiers.remote.refusals import refusal

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file or directory there."""

    path: PurePosixPath
    """Where it lies."""
    is_file: bool
    """Whether it is a file."""
    size: int
    """Bytes of a file; 0 for a directory."""
    mtime_ns: int
    """When it was last changed, nanoseconds since 1970-01-01 UTC by the clock there; 0 when nobody knows."""

    def is_older(self, moment_ns: int) -> bool:
        """Tell whether it was last changed by a moment, as far as anybody knows."""
        return 0 < self.mtime_ns <= moment_ns


class RemoteFiles:
    """File operations at a remote location; one instance serves all threads of one process."""

    def __init__(self, location: RemoteLocation, config: RemoteConfig) -> None:
        """Serve ``location``.

        Raises:
            InvalidInputError: there is no client for it.
        """
        self.location = location
        self.config = config
        self._client = connect(location, config)
        self.top = PurePosixPath(self._client.top)
        """What the file system calls the location."""
        self.pace = Pace()
        """What the location takes."""

    @property
    def kind(self) -> str:
        """Which client serves it."""
        return self._client.kind

    def url(self, path: PurePath) -> str:
        """Return what errors call a file."""
        return self.location.below(path.relative_to(self.top))

    def _do(self, action: str, path: PurePath, call: Callable[[fs.FileSystem], _T], seconds: float | None = None) -> _T:
        """Carry out one operation, in time or in so many seconds, with the package's errors.

        FileNotFoundError and FileExistsError pass: whether they are errors depends on the caller.
        """
        what = f"{action} {self.url(path)}"
        try:
            return within(seconds or self.config.deadline_s, what, lambda: call(self._client.filesystem))
        except (FileNotFoundError, FileExistsError, AsymcheckError):
            raise
        except Exception as error:
            raise refusal(what, error, is_local=self._client.kind == "local") from error
        except BaseException as error:
            # A client in Rust panics with this, and nobody could catch it by another name.
            if type(error).__name__ != "PanicException":
                raise
            raise StorageError(f"{what}: the client failed: {error}") from error

    def stat(self, path: PurePath) -> Entry | None:
        """Return what lies at ``path``; None when nothing does.

        Raises:
            RemoteUnreachableError: nobody knows.
        """
        info = self._do("look at", path, lambda filesystem: filesystem.get_file_info(str(path)))
        if info.type == fs.FileType.NotFound:
            self._trust_nothing(path)
            return None
        return self._entry(info)

    def _trust_nothing(self, path: PurePath) -> None:
        """Make sure that nothing was found because nothing is there."""
        if not self._client.is_frank:
            top = self.top.parts[0]
            found = self._do("look at", path, lambda filesystem: filesystem.get_file_info(top))
            if found.type == fs.FileType.NotFound:
                raise RemoteUnreachableError(f"look at {self.url(path)}: not even the root was found; is it reachable?")

    def walk(self, path: PurePath, *, recursive: bool = False) -> list[Entry]:
        """Return what lies in a directory, by name; with ``recursive`` also what lies below. Nothing if it is missing.

        Raises:
            RemoteUnreachableError: nobody knows.
        """
        selector = fs.FileSelector(str(path), recursive=recursive, allow_not_found=True)
        try:
            found = self._do("list", path, partial(_listed, selector))
        except FileNotFoundError:
            found = []
        if not found:
            self._trust_nothing(path)
        return sorted(map(self._entry, found), key=lambda entry: entry.path)

    def _entry(self, info: fs.FileInfo) -> Entry:
        # libhdfs leaves out what stands before a path; others have none that begins with a slash.
        path = PurePosixPath(self.top.root, info.path)
        is_file = info.type == fs.FileType.File
        return Entry(path, is_file, info.size or 0 if is_file else 0, info.mtime_ns or 0)

    def list(self, path: PurePath) -> list[str]:
        """Return the names in a directory, sorted; none when there is no such directory."""
        return [entry.path.name for entry in self.walk(path)]

    def read_small(self, path: PurePath, limit: int) -> bytes | None:
        """Return a file's content, at most ``limit`` + 1 bytes of it; None when there is no such file."""
        try:
            data, _ = self.read_range(path, 0, limit + 1)
        except FileNotFoundError:
            self._trust_nothing(path)
            return None
        return bytes(data)

    def read_range(
        self, path: PurePath, offset: int, length: int, kept: Kept | None = None, memory: Memory | None = None
    ) -> tuple[memoryview, int]:
        """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file.

        Who reads more of one file gives the same ``kept`` each time, so that it need not be opened each time; and who
        reads large pieces of it ``memory``, which is taken up again.

        Raises:
            FileNotFoundError: there is no such file, or nobody answered that knows.
            RemoteUnreachableError: it failed ``attempts`` times, or until the deadline.
        """
        what = f"read {length} bytes from {offset} of"
        keeps = Kept() if kept is None else kept

        def attempt(seconds: float) -> tuple[memoryview, int]:
            read = partial(read_range, self._client, str(path), offset, length, keeps, memory)
            try:
                return self._do(what, path, lambda _: read(), seconds)
            except RemoteUnreachableError:
                # The next one opens it anew.
                keeps.file = None
                raise

        # hdfs-native asks each DataNode that has a block once.
        return tried(self.config, attempt)

    def make_directory(self, path: PurePath) -> None:
        """Create a directory and what leads to it; one that is there is no error.

        Raises:
            StorageError: there can be none: the location refuses, or a file is in the way.
        """
        try:
            self._do("create directory", path, partial(_make_directory, path, is_local=self._client.kind == "local"))
        except (FileNotFoundError, FileExistsError) as error:
            message = f"{self.url(path)}: no directory can be created here ({error}); name another location"
            raise StorageError(message) from error

    def delete(self, path: PurePath) -> None:
        """Remove a file; one that is gone already is no error."""
        self._unless_gone("remove", path, lambda filesystem: filesystem.delete_file(str(path)))

    def _unless_gone(self, action: str, path: PurePath, call: Callable[[fs.FileSystem], object]) -> bool:
        """Do what needs something at ``path``; return False when nothing is there."""
        try:
            self._do(action, path, call)
        except FileNotFoundError:
            return False
        except StorageError:
            # Of this it says "input/output error", and no more.
            if self._client.kind != "libhdfs" or self.stat(path) is not None:
                raise
            return False
        return True

    def delete_empty(self, path: PurePath) -> None:
        """Remove a directory if it is empty: another program may be putting something into it.

        Of the clients that can only remove it with all that is in it, it stays.
        """
        if self._client.removes_empty and not self.walk(path):
            self._unless_gone("remove directory", path, lambda _: self._client.remove_empty(str(path)))

    def write(
        self, path: PurePath, pieces: Iterable[bytes | memoryview], written: Callable[[], None] | None = None
    ) -> int:
        """Create ``path``, a temporary name, with these bytes; return their number when the file is closed.

        ``written`` is called when the last of them was written, before the servers are asked to complete the file.
        What a failure leaves is a file of any length: it must never be renamed.
        """
        file = self._do("create", path, lambda _: self._client.create(str(path)))
        try:
            count = 0
            for piece in pieces:
                began = time.perf_counter()
                self._do("write to", path, partial(_write, file, piece))
                self.pace.wrote(len(piece), time.perf_counter() - began)
                count += len(piece)
                emit("remote.piece_sent", path.name, len(piece))
            if written is not None:
                written()
            began = time.perf_counter()
            self._do("close", path, partial(_close, file))
            self.pace.closed(time.perf_counter() - began)
        except BaseException:
            # Whoever collected it as garbage would close it, and wait with that for servers that may never answer.
            begin(partial(_abandon, file), "abandon")
            raise
        return count

    def publish(self, source: PurePath, target: PurePath) -> bool:
        """Give a complete file its name; return False when that is taken.

        libhdfs, most others behind pyarrow, and a folder without hard links, replace a file in silence: there it is
        looked for first, and of two programs that do this at once the later one wins.
        """
        try:
            if self._client.kind == "local":
                return self._do("rename", target, lambda _: local.publish(source, target))
            if self._client.kind != "hdfs-native" and self.stat(target) is not None:
                return False
            self._do("rename", target, lambda filesystem: filesystem.move(str(source), str(target)))
        except FileExistsError:
            return False
        return True

    def rename(self, source: PurePath, target: PurePath) -> bool:
        """Give a file another name that is free, in the same directory; return False when it is gone."""

        def move(filesystem: fs.FileSystem) -> None:
            filesystem.move(str(source), str(target))
            if self._client.kind == "local":
                local.sync(target.parent)

        return self._unless_gone("rename", source, move)

    def put_small(self, path: PurePosixPath, data: bytes) -> bool:
        """Publish a small file: temporary name, write, close, read back, rename; False when its name is taken.

        Raises:
            StorageError: it failed ``attempts`` times.
        """

        def attempt(temporary: PurePosixPath) -> bool:
            self._write_small(temporary, path, data)
            if self.publish(temporary, path):
                return True
            self.delete(temporary)
            return False

        return self.attempt(path, lambda: _temporary(path), attempt)

    def stage_small(self, path: PurePosixPath, data: bytes) -> PurePosixPath:
        """Do all that :meth:`put_small` does before the rename; return the temporary name.

        Raises:
            StorageError: it failed ``attempts`` times.
        """

        def attempt(temporary: PurePosixPath) -> PurePosixPath:
            self._write_small(temporary, path, data)
            return temporary

        return self.attempt(path, lambda: _temporary(path), attempt)

    def _write_small(self, temporary: PurePosixPath, path: PurePosixPath, data: bytes) -> None:
        # With each attempt: whoever takes back what came to nothing may have removed it, when it was empty.
        self.make_directory(path.parent)
        self.write(temporary, [data])
        emit("remote.small_closed", path.name, len(data))
        if self.read_small(temporary, len(data)) != data:
            raise StorageError(f"{self.url(temporary)}: what was read back is not what was written")

    def attempt(
        self, path: PurePath, temporary_name: Callable[[], PurePosixPath], upload: Callable[[PurePosixPath], _T]
    ) -> _T:
        """Upload a file under a temporary name, and begin anew under another one when that fails.

        Raises:
            StorageError: it failed ``attempts`` times, or in a way that another attempt would not change.
        """
        for number in range(1, self.config.attempts + 1):
            temporary = temporary_name()
            try:
                return upload(temporary)
            except (StorageError, FileNotFoundError) as error:
                with contextlib.suppress(AsymcheckError):
                    self.delete(temporary)
                final = isinstance(error, (ReadOnlyStoreError, OutOfSpaceError)) or number == self.config.attempts
                if final:
                    which = f"upload of {self.url(path)}, attempt {number} of {self.config.attempts}"
                    kind = type(error) if isinstance(error, StorageError) else StorageError
                    raise kind(f"{which}: {error}") from error
                if isinstance(error, RemoteUnreachableError):
                    time.sleep(self.config.retry_s * 2 ** (number - 1))
            except BaseException:
                with contextlib.suppress(AsymcheckError):
                    self.delete(temporary)
                raise
        raise StorageError(f"upload of {self.url(path)}: no attempt is allowed; RemoteConfig.attempts is too small")


def _temporary(path: PurePosixPath) -> PurePosixPath:
    return path.with_name(f"{os.urandom(8).hex()}{layout.TEMPORARY}")


def _write(file: Writable, piece: bytes | memoryview, _: fs.FileSystem) -> None:
    file.write(piece)


def _close(file: Writable, _: fs.FileSystem) -> None:
    file.close()


def _abandon(file: Writable) -> None:
    with contextlib.suppress(Exception):
        file.close()


def _listed(selector: fs.FileSelector, filesystem: fs.FileSystem) -> list[fs.FileInfo]:
    try:
        return list(filesystem.get_file_info(selector))
    except NotADirectoryError:
        return []


def _make_directory(path: PurePath, filesystem: fs.FileSystem, *, is_local: bool) -> None:
    filesystem.create_dir(str(path), recursive=True)
    if is_local:
        local.sync_upwards(path)
