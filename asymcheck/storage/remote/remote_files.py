"""File operations at a remote location, the only door to it: each has a deadline, and the package's errors.

Paths are those of the file system, below that of the location. Nothing here trusts a client further than this: a file
that was written and closed has the bytes that were written or fewer, and a file that is renamed keeps them.

Clients have no error classes worth the name: hdfs-native gives OSError and RuntimeError, libhdfs prints Java's
messages. Therefore the text decides. Any other refusal means "unreachable": an error that stops, and is never taken for
damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import PurePath, PurePosixPath
from typing import TypeVar

from asymcheck.config import RemoteConfig
from asymcheck.errors import (
    AsymcheckError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    StorageError,
    TooManyFilesError,
)
from asymcheck.events import emit
from asymcheck.executor import begin
from asymcheck.format import layout
from asymcheck.storage.remote.client_interface import Entry, Writable
from asymcheck.storage.remote.clients import connect
from asymcheck.storage.remote.deadline import tried, within
from asymcheck.storage.remote.location import RemoteLocation
from asymcheck.storage.remote.ranges import OpenedFile, RangeMemory, read_range
from asymcheck.storage.remote.throughput import Throughput

_T = TypeVar("_T")

_FULL = ("quotaexceeded", "quota of", "quota is exceeded", "no space left", "not enough space")
_DENIED = ("permission denied", "accesscontrol", "access denied", "unauthorized", "forbidden")
_SAFE_MODE = ("safemode", "safe mode")
_DAMAGED = ("checksum",)
_READS = ("look at ", "list ", "read ")
_AWAY = {
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN),
    *(errno.ENETUNREACH, errno.ENETRESET, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN),
    *(errno.EPIPE, errno.ENOLINK, errno.ECOMM, errno.ENODEV, errno.ENXIO, errno.EAGAIN, errno.ENOMEM),
}
"""Errors of a mounted file system whose server is away, of a network that is down, or of missing memory."""


class RemoteFiles:
    """File operations at a remote location; one instance serves all threads of one process.

    All raise RemoteUnreachableError when nobody answers in time, and StorageError when the location refuses. A file is
    uploaded up to ``attempts`` times.
    """

    def __init__(self, location: RemoteLocation, config: RemoteConfig) -> None:
        """Serve ``location``.

        Raises:
            InvalidInputError: there is no client for it.
        """
        self.location = location
        self.config = config
        self._client = connect(location, config)
        self.kind: str = self._client.kind
        """Which client serves it."""
        self.top = PurePosixPath(self._client.top)
        """The path of the location in the file system."""
        self.pace = Throughput()
        """The measured throughput."""

    def url(self, path: PurePath) -> str:
        """Return what errors call a file."""
        return self.location.below(path.relative_to(self.top))

    def _do(self, action: str, path: PurePath, call: Callable[[], _T], seconds: float | None = None) -> _T:
        """Carry out one operation, in time or in so many seconds, with the package's errors.

        FileNotFoundError and FileExistsError pass: whether they are errors depends on the caller.
        """
        what = f"{action} {self.url(path)}"
        try:
            return within(seconds or self.config.deadline_s, what, call)
        except (FileNotFoundError, FileExistsError, AsymcheckError):
            raise
        except Exception as error:
            raise refusal(what, error, is_local=self.kind == "local") from error
        except BaseException as error:
            # A client in Rust panics with this, and nobody could catch it by another name.
            if type(error).__name__ != "PanicException":
                raise
            raise StorageError(f"{what}: the client failed: {error}") from error

    def stat(self, path: PurePath) -> Entry | None:
        """Return the entry at ``path``; None if there is none."""
        return self._do("look at", path, partial(self._client.look, str(path)))

    def walk(self, path: PurePath, *, recursive: bool = False) -> list[Entry]:
        """Return the content of a directory, by name, or with ``recursive`` all below; empty when it is missing."""
        walk = self._client.walk if recursive else self._client.children
        try:
            found = self._do("list", path, partial(walk, str(path)))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda entry: entry.path)

    def list(self, path: PurePath) -> list[str]:
        """Return the names in a directory, sorted; none when there is no such directory."""
        return [entry.path.name for entry in self.walk(path)]

    def read_small(self, path: PurePath, limit: int) -> bytes | None:
        """Return a file's content, at most ``limit`` + 1 bytes of it; None when there is no such file."""
        try:
            data, _ = self.read_range(path, 0, limit + 1)
        except FileNotFoundError:
            return None
        return bytes(data)

    def read_range(
        self,
        path: PurePath,
        offset: int,
        length: int,
        kept: OpenedFile | None = None,
        memory: RangeMemory | None = None,
    ) -> tuple[memoryview, int]:
        """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file.

        Args:
            path: the file.
            offset: first byte.
            length: number of bytes.
            kept: pass the same for all reads of one file, so that the client can keep the file open.
            memory: lends reusable memory for large reads.

        Raises:
            FileNotFoundError: there is no such file.
            RemoteUnreachableError: it failed ``attempts`` times, or until the deadline.
        """
        what = f"read {length} bytes from {offset} of"
        keeps = OpenedFile() if kept is None else kept
        read = partial(read_range, self._client, str(path), offset, length, keeps, memory)

        def attempt(seconds: float) -> tuple[memoryview, int]:
            try:
                return self._do(what, path, read, seconds)
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
            self._do("create directory", path, partial(self._client.make_directory, str(path)))
        except (FileNotFoundError, FileExistsError) as error:
            message = f"{self.url(path)}: no directory can be created here ({error}); name another location"
            raise StorageError(message) from error

    def delete(self, path: PurePath) -> None:
        """Remove a file; one that is gone already is no error."""
        self._unless_gone("remove", path, partial(self._client.delete, str(path)))

    def delete_empty(self, path: PurePath) -> None:
        """Remove a directory if it is empty, and the client can promise that: another program may write into it."""
        self._unless_gone("remove directory", path, partial(self._client.delete_empty, str(path)))

    def _unless_gone(self, action: str, path: PurePath, call: Callable[[], object]) -> bool:
        """Do what needs something at ``path``; return False when nothing is there."""
        try:
            self._do(action, path, call)
        except FileNotFoundError:
            return False
        except StorageError:
            # libhdfs reports a missing file as "input/output error".
            if self.kind != "libhdfs" or self.stat(path) is not None:
                raise
            return False
        return True

    def write(
        self, path: PurePath, pieces: Iterable[bytes | memoryview], written: Callable[[], None] | None = None
    ) -> int:
        """Create ``path``, a temporary name, with these bytes; return their number when the file is closed.

        ``written`` is called when the last of them was written, before the servers are asked to complete the file.
        After a failure the file may have any length: it must never be renamed.
        """
        file = self._do("create", path, partial(self._client.create, str(path)))
        try:
            count = 0
            for piece in pieces:
                began = time.perf_counter()
                self._do("write to", path, partial(file.write, piece))
                self.pace.writing.note(len(piece), time.perf_counter() - began)
                count += len(piece)
                emit("remote.piece_sent", path.name, len(piece))
            if written is not None:
                written()
            began = time.perf_counter()
            self._do("close", path, file.close)
            self.pace.closed(time.perf_counter() - began)
        except BaseException:
            # Garbage collection would close the file, and wait for servers that may never answer.
            begin(partial(_abandon, file), "abandon")
            raise
        return count

    def publish(self, source: PurePath, target: PurePath) -> bool:
        """Give a complete file its name; when that is taken, remove the file and return False.

        libhdfs, most others behind pyarrow, and a folder without hard links, replace a file in silence: there it is
        looked for first, and of two programs that do this at once the later one wins.
        """
        try:
            if self._do("rename", target, partial(self._client.publish, str(source), str(target))):
                return True
        except FileExistsError:
            pass
        self.delete(source)
        return False

    def rename(self, source: PurePath, target: PurePath) -> bool:
        """Give a file another name that is free, in the same directory; return False when it is gone."""
        return self._unless_gone("rename", source, partial(self._client.rename, str(source), str(target)))

    def put_small(self, path: PurePosixPath, data: bytes) -> bool:
        """Publish a small file: temporary name, write, close, read back, rename; False when its name is taken."""
        return self.attempt(path, lambda temporary: self.publish(self._write_small(temporary, path, data), path))

    def stage_small(self, path: PurePosixPath, data: bytes) -> PurePosixPath:
        """Do all that :meth:`put_small` does before the rename; return the temporary name."""
        return self.attempt(path, lambda temporary: self._write_small(temporary, path, data))

    def _write_small(self, temporary: PurePosixPath, path: PurePosixPath, data: bytes) -> PurePosixPath:
        # Before each attempt: another upload that was taken back may have removed the empty directory.
        self.make_directory(path.parent)
        self.write(temporary, [data])
        emit("remote.small_closed", path.name, len(data))
        if self.read_small(temporary, len(data)) != data:
            raise StorageError(f"{self.url(temporary)}: what was read back is not what was written")
        return temporary

    def attempt(self, path: PurePosixPath, upload: Callable[[PurePosixPath], _T], random_bytes: int = 8) -> _T:
        """Upload a file under a temporary, random name, and begin anew under another one when that may help."""
        number = 1
        while True:
            temporary = path.with_name(f"{os.urandom(random_bytes).hex()}{layout.TEMPORARY}")
            try:
                return upload(temporary)
            except BaseException as error:
                with contextlib.suppress(AsymcheckError):
                    self.delete(temporary)
                if not isinstance(error, (StorageError, FileNotFoundError)):
                    raise
                if isinstance(error, (ReadOnlyStoreError, OutOfSpaceError)) or number >= self.config.attempts:
                    which = f"upload of {self.url(path)}, attempt {number} of {self.config.attempts}"
                    kind = type(error) if isinstance(error, StorageError) else StorageError
                    raise kind(f"{which}: {error}") from error
                if isinstance(error, RemoteUnreachableError):
                    time.sleep(self.config.retry_s * 2 ** (number - 1))
            number += 1


def _abandon(file: Writable) -> None:
    with contextlib.suppress(Exception):
        file.close()


def refusal(what: str, error: Exception, *, is_local: bool) -> StorageError:
    """Return the error for what a client raised when it was to do ``what``."""
    # An error of the operating system names the file again, and the name may have any word in it.
    text = _short((is_local and getattr(error, "strerror", None)) or str(error))
    number = getattr(error, "errno", None)

    def says(*signs: str) -> bool:
        return any(sign in text.lower() for sign in signs)

    kind: type[StorageError] = RemoteUnreachableError
    advice = ""
    if says(*_SAFE_MODE):
        advice = "; HDFS is in safe mode: try again when it has left it"
    elif number in (errno.ENOSPC, errno.EDQUOT) or says(*_FULL):
        kind, advice = OutOfSpaceError, "; free space or raise the quota there, or delete checkpoints and run gc on it"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS) or says(*_DENIED):
        if what.startswith(_READS):
            # A user who may not look does not know what the location holds.
            advice = "; this user may not look there"
        else:
            kind, advice = ReadOnlyStoreError, "; this user may not do that there"
    elif number in (errno.EMFILE, errno.ENFILE):
        kind, advice = TooManyFilesError, "; raise the limit of open files (ulimit -n)"
    elif number == errno.ENOTDIR:
        kind, advice = StorageError, "; a file is where a directory is meant: name another location"
    elif number not in _AWAY and ((is_local and isinstance(error, OSError)) or says(*_DAMAGED)):
        kind = StorageError
    return kind(f"{what}: {text}{advice}")


def _short(text: str) -> str:
    """Return what comes before the stack: Java adds where it was when it failed, and that has any word in it."""
    for sign in ("\\n\\tat ", "\n\tat "):
        text = text.split(sign, 1)[0]
    return " ".join(text.replace("\\n", " ").split())[:500] or "it gave no reason"
