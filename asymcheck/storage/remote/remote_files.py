"""File operations at a remote location, with deadlines, retries and translated errors.

Paths are absolute paths in the file system of the location. Three assumptions are made about clients: a closed file has
all or a prefix of the written bytes, a renamed file keeps its bytes, and a put object has all of its bytes.

Clients do not raise specific error classes: hdfs-native raises OSError and RuntimeError, and libhdfs passes on Java
messages. Errors are therefore classified by their text. Any other error is "unreachable", and never taken for damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeVar, cast

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
from asymcheck.storage.local_files import NO_SERVER
from asymcheck.storage.nvme.drives import NETWORK, file_system_type
from asymcheck.storage.remote.client_interface import Entry, FileSystem, ObjectStore, OpenedFile, Writable
from asymcheck.storage.remote.clients import connect
from asymcheck.storage.remote.deadline import OverdueCalls, tried, within
from asymcheck.storage.remote.location import RemoteLocation
from asymcheck.storage.remote.object_stores import short_text
from asymcheck.storage.remote.readers import Readers, result_of
from asymcheck.storage.slots import SlotPool
from asymcheck.storage.throughput import Throughput

_T = TypeVar("_T")

Content = tuple[Iterable[bytes | memoryview], Callable[[], None] | None]
"""Pieces of a file, and a function that a file system calls after the last write, before the file is complete."""

_FULL = ("quotaexceeded", "quota of", "quota is exceeded", "no space left", "not enough space")
_DENIED = ("permission denied", "accesscontrol", "access denied", "unauthorized", "forbidden")
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal")
"""Addresses of the service that gives credentials to cloud machines. Clients ask there last."""
_EXPIRED = ("expiredtoken", "tokenexpired", "token has expired")
_SKEWED = ("requesttimetooskewed",)
_SAFE_MODE = ("safemode", "safe mode")
_DAMAGED = ("checksum",)
_SHOWN = 500
"""Maximum length of a reason. Object stores repeat the path, and have the code of the error at the end."""
_SLOW_BYTES_PER_S = 1e6
"""Throughput of a slow link: the deadline of a put grows by the time of its bytes."""
_READS = ("access ", "list ", "read ")
_UNREACHABLE = NO_SERVER.union(
    (errno.EPIPE, errno.ENOLINK, errno.ECOMM, errno.ENODEV, errno.ENXIO, errno.EAGAIN, errno.ENOMEM)
)
"""Errors of a mounted file system without its server, of a network failure, or of missing memory."""


_overdue: dict[str, OverdueCalls] = {}
"""Calls without an answer, by location. A location may be opened again and again."""


class RemoteFiles:
    """File operations at a remote location. Thread-safe.

    All operations raise RemoteUnreachableError after the deadline, and StorageError if the location refuses them.
    Uploads are attempted up to ``attempts`` times.
    """

    def __init__(self, location: RemoteLocation, config: RemoteConfig) -> None:
        """Connect to ``location``.

        Raises:
            InvalidInputError: no client supports the location.
        """
        self.location = location
        self.config = config
        self._client = client = connect(location, config)
        self._objects = client if isinstance(client, ObjectStore) else None
        self.renames = self._objects is None
        """Whether the location is a file system, which can rename files; object stores cannot."""
        # Object stores have none of its operations, which only their own callers use.
        self._files = cast("FileSystem", client)
        self.kind: str = self._client.kind
        self.top = PurePosixPath(self._client.top)
        """Path of the location in the file system."""
        self.pace = Throughput()
        self.readers = Readers(config.reads)
        """Threads for reads ahead."""
        self._ahead: dict[PurePath, Future[bytes | None]] = {}
        self._overdue = _overdue.setdefault(str(location), OverdueCalls())

    def url(self, path: PurePath) -> str:
        """Return the URI of a file for messages."""
        return self.location.below(path.relative_to(self.top))

    def _do(
        self,
        action: str,
        path: PurePath,
        call: Callable[[], _T],
        seconds: float | None = None,
        progress: Sized = (),
    ) -> _T:
        """Run one operation with a deadline, and translate its errors; see :func:`within`.

        FileNotFoundError and FileExistsError pass unchanged, because only the caller knows whether they are errors.
        """
        described = f"{action} {self.url(path)}"
        try:
            return within(seconds or self.config.deadline_s, described, call, self._overdue, progress)
        except (FileNotFoundError, FileExistsError, AsymcheckError):
            raise
        except Exception as error:
            is_local = self.kind == "local"
            refused = refusal(described, error, is_local=is_local)
            if is_local and getattr(error, "errno", None) == errno.EIO and self._is_mounted():
                refused = RemoteUnreachableError(f"{refused}; check the mount")
            if self.renames:
                raise refused from error
            # The text of an error of an object store may have credentials.
            raise refused from None
        except BaseException as error:
            # A panic in a Rust client raises this class, which cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise StorageError(f"{described}: the client failed: {error}; try again") from error

    def _is_mounted(self) -> bool:
        """Tell whether the location is a mount of a server, where an outage may look like a bad sector."""

        def mounted_type() -> str:
            os.stat(self.top)
            return file_system_type(Path(self.top))

        try:
            kind = within(self.config.deadline_s, f"access {self.location}", mounted_type, self._overdue)
        except (OSError, RemoteUnreachableError):
            return True
        return kind in NETWORK or kind.partition(".")[0] == "fuse"

    def stat(self, path: PurePath) -> Entry | None:
        """Return the entry at ``path``; None if there is none."""
        return self._do("access", path, partial(self._client.stat, str(path)))

    def walk(self, path: PurePath, *, prefix: str = "", recursive: bool = False) -> list[Entry]:
        """Return the sorted entries in a directory, with ``recursive`` also below it; empty if it is missing.

        With ``prefix``, return only the entries in the directory whose names begin with it. The deadline begins again
        with each answer, because a location may have a million files.
        """
        found: list[Entry] = []

        def list_entries() -> None:
            if prefix:
                self._client.beginning(str(path), prefix, found)
            elif recursive:
                self._client.walk(str(path), found)
            else:
                found.extend(self._client.children(str(path)))

        try:
            self._do("list", path, list_entries, None, found)
        except FileNotFoundError:
            return []
        # Comparing the paths themselves takes several times longer, and a location may have thousands of packs.
        return sorted(found, key=lambda entry: entry.path.parts)

    def list(self, path: PurePath) -> list[str]:
        """Return the sorted names in a directory; an empty list if the directory does not exist."""
        return [entry.path.name for entry in self.walk(path)]

    @contextlib.contextmanager
    def reading_ahead(self, paths: Iterable[PurePath], limit: int) -> Iterator[None]:
        """Read small files in parallel, for calls of :meth:`read_small` inside the ``with`` block."""
        new = [path for path in paths if path not in self._ahead]
        begun = {path: self.readers.submit(self._read_small, path, limit) for path in new}
        self._ahead.update(begun)
        try:
            yield
        finally:
            for path, reading in begun.items():
                self._ahead.pop(path, None)
                reading.cancel()

    def read_small(self, path: PurePath, limit: int) -> bytes | None:
        """Return the content of a file, at most ``limit`` + 1 bytes; None if the file does not exist."""
        return result_of(self._ahead.pop(path, None), partial(self._read_small, path, limit))

    def _read_small(self, path: PurePath, limit: int) -> bytes | None:
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
        memory: SlotPool | None = None,
    ) -> tuple[memoryview, int]:
        """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file.

        All reads of one file share ``kept``, a cache of the open file. ``memory`` is a pool of buffers for large reads.
        An object store needs neither.

        Raises:
            FileNotFoundError: there is no such file.
            RemoteUnreachableError: the read failed ``attempts`` times, or until the deadline.
        """
        action = f"read {length} bytes from {offset} of"
        keeps = OpenedFile() if kept is None else kept
        if self._objects is None:
            read = partial(self._files.read_range, str(path), offset, length, keeps, memory)
        else:
            read = partial(self._objects.read, str(path), offset, length)

        def attempt(seconds: float) -> tuple[memoryview, int]:
            try:
                return self._do(action, path, read, seconds)
            except RemoteUnreachableError:
                # Make the next attempt reopen the file.
                keeps.file = None
                raise

        # hdfs-native tries each DataNode that has a block only once.
        return tried(self.config, attempt)

    def make_directory(self, path: PurePath) -> None:
        """Create a directory and its parents, if they do not exist.

        Raises:
            StorageError: the location refuses, or a file has the name of a directory.
        """
        if not self.renames:
            return
        try:
            self._do("create directory", path, partial(self._files.make_directory, str(path)))
        except (FileNotFoundError, FileExistsError) as error:
            message = f"{self.url(path)}: cannot create this directory ({error}); choose another location"
            raise StorageError(message) from error

    def delete(self, path: PurePath) -> bool:
        """Remove a file; return False if it does not exist."""
        return self._unless_gone("remove", path, partial(self._client.delete, str(path)))

    def delete_empty(self, path: PurePath) -> None:
        """Remove a directory if it is empty and the client can ensure this atomically."""
        if self.renames:
            self._unless_gone("remove directory", path, partial(self._files.delete_empty, str(path)))

    def _unless_gone(self, action: str, path: PurePath, call: Callable[[], object]) -> bool:
        """Run an operation on ``path``; return False if ``path`` does not exist."""
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
        """Write and close a temporary file; return the number of bytes.

        Call ``written`` after the last write, before the file is closed. After a failure the file may have any length,
        and must never be renamed.
        """
        file = self._do("create", path, partial(self._files.create, str(path)))
        try:
            count = 0
            for piece in pieces:
                with self.pace.writing.measure(len(piece)):
                    self._do("write to", path, partial(file.write, piece))
                count += len(piece)
                emit("remote.piece_sent", path.name, len(piece))
            if written is not None:
                written()
            began = time.perf_counter()
            self._do("close", path, file.close)
            self.pace.closed(time.perf_counter() - began)
        except BaseException:
            # Close on another thread. Otherwise Python's garbage collection would close the file and might block.
            begin(partial(_abandon, file), "abandon")
            raise
        return count

    def publish(self, source: PurePath, target: PurePath) -> bool:
        """Rename a complete file to its final name. If the name is taken, remove the file and return False.

        libhdfs, most pyarrow file systems, and folders without hard links replace an existing file silently. Their
        clients check for the target first. If two programs do this at once, the later one wins.
        """
        try:
            if self._do("rename", target, partial(self._files.publish, str(source), str(target))):
                return True
        except FileExistsError:
            pass
        self.delete(source)
        return False

    def rename(self, source: PurePath, target: PurePath) -> bool:
        """Rename a file within its directory to an unused name; return False if the file does not exist."""
        return self._unless_gone("rename", source, partial(self._files.rename, str(source), str(target)))

    def put(
        self,
        path: PurePosixPath,
        content: Callable[[PurePosixPath], contextlib.AbstractContextManager[Content]],
        check: Callable[[PurePosixPath, int], object],
    ) -> bool:
        """Put a whole file create-only; return False if the name is taken. Retry transient failures.

        A file system writes a temporary file, checks it, and renames it. An object store has this operation. Its
        objects are only checked with ``read_back``, and an object that has the same bytes already is no conflict.

        Args:
            path: name of the file.
            content: called in each attempt, with the name under which the bytes are written.
            check: called in each attempt with a readable copy of the file and its size in bytes.
        """

        def upload(temporary: PurePosixPath) -> bool:
            if self._objects is None:
                with content(temporary) as (pieces, written):
                    count = self.write(temporary, pieces, written)
                check(temporary, count)
                return self.publish(temporary, path)
            with content(path) as (made, _):
                pieces = list(made)
                count = sum(len(piece) for piece in pieces)
                # A large object may take longer than other operations.
                seconds = self.config.deadline_s + count / _SLOW_BYTES_PER_S
                with self.pace.writing.measure(count):
                    is_new = self._do("put", path, partial(self._objects.put, str(path), pieces), seconds)
            if is_new and self.config.read_back:
                check(path, count)
            return is_new

        return self._attempt(path, upload)

    def put_small(self, path: PurePosixPath, data: bytes, *, event: str = "remote.small_closed") -> bool:
        """Put a small file create-only, and read it back in a file system; return False if the name is taken."""
        return self.put(path, partial(self._small, path, data), partial(self._check_small, path, data, event))

    @contextlib.contextmanager
    def _small(self, path: PurePosixPath, data: bytes, _: PurePosixPath) -> Iterator[Content]:
        # Repeat before each attempt, because an aborted upload may have removed the empty directory.
        self.make_directory(path.parent)
        yield [data], None

    def _check_small(self, path: PurePosixPath, data: bytes, event: str, stored: PurePosixPath, count: int) -> None:
        emit(event, path.name, count)
        if self.read_small(stored, len(data)) != data:
            raise StorageError(f"{self.url(stored)}: the content read back differs from the content written")

    def _attempt(self, path: PurePosixPath, upload: Callable[[PurePosixPath], bool]) -> bool:
        """Upload a file under a random temporary name. Retry under another name after a transient failure."""
        number = 1
        while True:
            temporary = path.with_name(f"{os.urandom(16).hex()}{layout.TEMPORARY}")
            try:
                return upload(temporary)
            except BaseException as error:
                if self.renames:
                    with contextlib.suppress(AsymcheckError):
                        self.delete(temporary)
                if not isinstance(error, (StorageError, FileNotFoundError)):
                    raise
                if isinstance(error, (ReadOnlyStoreError, OutOfSpaceError)) or number >= self.config.attempts:
                    upload_attempt = f"upload of {self.url(path)}, attempt {number} of {self.config.attempts}"
                    kind = type(error) if isinstance(error, StorageError) else StorageError
                    raise kind(f"{upload_attempt}: {error}") from error
                if isinstance(error, RemoteUnreachableError):
                    time.sleep(self.config.retry_s * 2 ** (number - 1))
            number += 1


def _abandon(file: Writable) -> None:
    with contextlib.suppress(Exception):
        file.close()


def refusal(action: str, error: Exception, *, is_local: bool) -> StorageError:
    """Translate an exception of a client into an error of this package."""
    # Do not search the text of an OSError, which contains the file name.
    text = _short((is_local and getattr(error, "strerror", None)) or str(error))
    number = getattr(error, "errno", None)

    def says(*signs: str) -> bool:
        return any(sign in text.lower() for sign in signs)

    kind: type[StorageError] = RemoteUnreachableError
    advice = ""
    if says(*_SAFE_MODE):
        advice = "; HDFS is in safe mode: try again after safe mode has ended"
    elif number in (errno.ENOSPC, errno.EDQUOT) or says(*_FULL):
        kind, advice = OutOfSpaceError, "; free space or raise the quota there, or delete checkpoints and run gc there"
    elif says(*_NO_CREDENTIALS):
        advice = "; no credentials were found: set the environment variables of the provider"
    elif says(*_EXPIRED):
        advice = "; renew the credentials in the environment, and start the program again"
    elif says(*_SKEWED):
        advice = "; set the clock of this machine"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS) or says(*_DENIED):
        if action.startswith(_READS):
            # Without permission to read, the content of the location is unknown.
            advice = "; this user has no permission to read it"
        else:
            kind, advice = ReadOnlyStoreError, "; this user has no permission to do this"
    elif number in (errno.EMFILE, errno.ENFILE):
        kind, advice = TooManyFilesError, "; raise the limit of open files (ulimit -n)"
    elif number == errno.ENOTDIR:
        kind, advice = StorageError, "; a file has the name of a directory: choose another location"
    elif number not in _UNREACHABLE and ((is_local and isinstance(error, OSError)) or says(*_DAMAGED)):
        kind = StorageError
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
    return kind(f"{action}: {shown}{advice}")


def _short(text: str) -> str:
    """Return the message without the Java stack trace or debugging output."""
    text = short_text(text)
    for sign in ("\\n\\tat ", "\n\tat "):
        text = text.split(sign, 1)[0]
    return " ".join(text.replace("\\n", " ").split()) or "no reason given"
