"""The only access of the tiers on local file systems to the operating system.

Tests replace :class:`Files`, to lose unsynced bytes or to make a call fail. Therefore every change of the store on disk
goes through it, except those of LMDB, which has its own I/O.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import ParamSpec, TypeVar

from asymcheck.errors import OutOfSpaceError, ReadOnlyStoreError, StorageError, TooManyFilesError

_POLL_S = 0.005
_P = ParamSpec("_P")
_T = TypeVar("_T")
_REPLACE_ATTEMPTS = 8


class Files:
    """File operations with the store's error types; one instance serves all threads."""

    def open_new(self, path: Path) -> int:
        """Create ``path``, which must not exist, for reading and writing; return a descriptor."""
        with translated("create", path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def open_existing(self, path: Path) -> int:
        """Open ``path``, which must not be a link, for reading and writing; return a descriptor."""
        with translated("open", path):
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_read(self, path: PurePath) -> int:
        """Open ``path`` for reading; return a descriptor. A pipe in a store that came from elsewhere is just empty.

        Raises:
            FileNotFoundError: left as it is, because callers treat a vanished file as an answer.
        """
        with translated("open for reading", path):
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Write all of ``buffers``, one after another, at ``offset``."""
        left = [buffer for buffer in buffers if len(buffer)]
        with translated("write", path):
            while left:
                written = os.pwritev(descriptor, left, offset)
                if written == 0:
                    raise OutOfSpaceError(f"write {path}: the device took no more bytes at offset {offset}")
                offset += written
                _advance(left, written)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: PurePath) -> int:
        """Fill ``buffers``, one after another, from ``offset``; return the bytes read, fewer only at the file's end."""
        left, start = [buffer for buffer in buffers if len(buffer)], offset
        with translated("read", path):
            while left:
                count = os.preadv(descriptor, left, offset)
                if count == 0:
                    break
                offset += count
                _advance(left, count)
            return offset - start

    def sync(self, descriptor: int, path: Path) -> None:
        """Make the file's content durable. After a failure the file must be abandoned: a second sync may lie."""
        with translated("sync", path):
            os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with translated("sync directory", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def truncate(self, descriptor: int, length: int, path: Path) -> None:
        """Cut or extend a file to ``length`` bytes."""
        with translated("truncate", path):
            os.ftruncate(descriptor, length)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what has that name."""
        with translated("rename", source):
            source.rename(target)

    def link(self, source: Path, target: Path) -> bool:
        """Give a file a second name; return False when ``target`` exists already."""
        with translated("link", target):
            try:
                os.link(source, target)
            except FileExistsError:
                return False
            return True

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is no error."""
        with translated("remove", path):
            path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> bool:
        """Create a directory; return False when it exists already. The caller syncs the parent."""
        with translated("create directory", path):
            try:
                path.mkdir()
            except FileExistsError:
                return False
            return True

    def remove_directory(self, path: Path) -> bool:
        """Remove an empty directory; return False when it is gone or not empty."""
        with translated("remove directory", path):
            try:
                path.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
            return True

    def write_small(self, path: Path, data: bytes) -> None:
        """Create ``path`` with ``data`` and make its content (not its name) durable."""
        descriptor = self.open_new(path)
        try:
            self.pwrite(descriptor, [memoryview(data)], 0, path)
            self.sync(descriptor, path)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def temporary(self, path: Path, data: bytes) -> Iterator[None]:
        """Give a file with durable ``data`` the name ``path`` for the ``with`` block.

        It is locked, so that collection, which removes what a crash left, leaves it alone.
        """
        descriptor = DESCRIPTORS.open(self.open_new, path)
        try:
            try_lock(descriptor, exclusive=True)
            self.pwrite(descriptor, [memoryview(data)], 0, path)
            self.sync(descriptor, path)
            yield
        finally:
            try:
                self.unlink(path)
            finally:
                DESCRIPTORS.close(descriptor)

    def publish_record(self, path: Path, data: bytes) -> bool:
        """Give a file with durable ``data`` the name ``path``; return False when it is taken. The caller syncs it.

        Not by a rename: of two processes that publish one record, the second takes what the first wrote.
        """
        temporary = path.with_name(f"{os.urandom(8).hex()}.tmp")
        with self.temporary(temporary, data):
            try:
                return self.link(temporary, path)
            except FileNotFoundError:
                # Collection saw the file before it was locked, and removed it.
                return False

    def replace_record(self, path: Path, data: bytes) -> None:
        """Give ``path`` other content, durably; at every instant it has the old or the new."""
        for _ in range(_REPLACE_ATTEMPTS):
            temporary = path.with_name(f"{os.urandom(8).hex()}.tmp")
            with contextlib.suppress(FileNotFoundError), self.temporary(temporary, data):
                self.rename(temporary, path)
                self.sync_directory(path.parent)
                return
        # Collection saw the file before it was locked, each time.
        raise StorageError(f"replace {path}: the temporary file was removed {_REPLACE_ATTEMPTS} times; try again")

    def read_small(self, path: PurePath, limit: int) -> bytes | None:
        """Return a file's content, at most ``limit`` + 1 bytes of it; None when there is no such file."""
        try:
            descriptor = self.open_read(path)
        except FileNotFoundError:
            return None
        try:
            with translated("read", path):
                size = min(os.fstat(descriptor).st_size, limit + 1)
            data = bytearray(size)
            count = self.pread(descriptor, [memoryview(data)], 0, path)
            return bytes(data[:count])
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes the file system of ``path`` has left for this user."""
        with translated("look at", path):
            return shutil.disk_usage(path).free

    def list(self, path: PurePath) -> list[str]:
        """Return the names in a directory, sorted; none when there is no such directory."""
        with translated("list", path):
            try:
                return sorted(os.listdir(path))
            except (FileNotFoundError, NotADirectoryError):
                return []


def _advance(buffers: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of ``buffers``."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


_LOOKS = "this user may not look there"
_REFUSALS = {
    **dict.fromkeys(("open for reading", "read", "list", "look at", "look for"), _LOOKS),
    "create directory": "choose a place where this user may write; to read a store, open it with read_only=True",
}


@contextlib.contextmanager
def translated(action: str, path: PurePath) -> Iterator[None]:
    """Turn an operating system error into one of the package's, naming what was done to which file.

    FileNotFoundError passes: whether a missing file is an error depends on the caller.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        message = f"{action} {path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpaceError(f"{message}; free space, or delete checkpoints and run gc") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            advice = _REFUSALS.get(action, "the store cannot be written here; to read it, open it with read_only=True")
            raise ReadOnlyStoreError(f"{message}; {advice}") from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyFilesError(f"{message}; raise the limit of open files (ulimit -n)") from error
        raise StorageError(message) from error


def reserve(path: Path, size: int) -> None:
    """Make sure that a file, of ``size`` bytes when it is new, has room on the disk for all its bytes.

    A page of a mapped file for which there is none kills the process that touches it (SIGBUS).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        status = os.fstat(descriptor)
        size = status.st_size or size
        if status.st_blocks * 512 < size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def set_direct(descriptor: int) -> bool:
    """Switch a descriptor to O_DIRECT; return False where the file system has none."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def clear_direct(descriptor: int) -> None:
    """Switch a descriptor back to buffered I/O."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


class OpenFile:
    """An open file, with direct I/O where the file system has it. Threads may share it; its lock is its owner's."""

    def __init__(self, files: Files, path: Path, descriptor: int) -> None:
        """Take over ``descriptor``, which was opened by :data:`DESCRIPTORS`; I/O is buffered at first."""
        self.files = files
        self.path = path
        self.descriptor = descriptor
        self.is_direct = False
        """Whether reads and writes need aligned memory."""

    def use_direct(self) -> None:
        """Switch to direct I/O, if the file system has it."""
        self.is_direct = set_direct(self.descriptor)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all of ``buffers``, one after another, at ``offset``."""
        self._transfer(self.files.pwrite, buffers, offset)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill ``buffers``, one after another; return the bytes read, fewer only at the end of the file."""
        return self._transfer(self.files.pread, buffers, offset)

    def read_range(self, offset: int, length: int) -> tuple[memoryview, int]:
        """Return ``length`` bytes from ``offset``, fewer at the end of the file, and the size of the file."""
        data = memoryview(bytearray(length))
        count = self.files.pread(self.descriptor, [data], offset, self.path)
        return data[:count], os.fstat(self.descriptor).st_size

    def _transfer(self, transfer: Callable[..., _T], buffers: Sequence[memoryview], offset: int) -> _T:
        was_direct = self.is_direct
        try:
            return transfer(self.descriptor, buffers, offset, self.path)
        except StorageError as error:
            if not (was_direct and refuses_direct(error)):
                raise
            # In this order: a thread that sees the flag cleared transfers without it, and takes any refusal for an
            # error.
            clear_direct(self.descriptor)
            self.is_direct = False
            return transfer(self.descriptor, buffers, offset, self.path)

    def sync(self) -> None:
        """Make the content durable; see :meth:`Files.sync`."""
        self.files.sync(self.descriptor, self.path)

    def close(self) -> None:
        """Release the lock and close the file. Closing twice is no error."""
        # Taken out first: by a second close, or a late transfer, the number may be that of another thread's file.
        descriptor, self.descriptor = self.descriptor, -1
        DESCRIPTORS.close(descriptor)


def refuses_direct(error: StorageError) -> bool:
    """Tell whether buffered I/O may succeed where direct I/O failed.

    Some file systems accept the flag and refuse the first direct transfer (EINVAL). Direct I/O is impossible with
    memory that a driver maps (EFAULT).
    """
    return getattr(error.__cause__, "errno", None) in (errno.EINVAL, errno.EFAULT)


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Take an advisory lock without waiting; return False when another holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_lock(descriptor: int, timeout_s: float, *, exclusive: bool) -> bool:
    """Take an advisory lock; return False when it could not be had in ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor, exclusive=exclusive):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(descriptor: int) -> None:
    """Give an advisory lock back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_same_file(descriptor: int, path: Path) -> bool:
    """Tell whether ``path`` still names the file that is open as ``descriptor``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class Descriptors:
    """Open descriptors that hold locks. A forked child closes its copies, which would keep the locks of a dead parent.

    A fork of Python waits until no descriptor is being opened or closed, so that the child knows all of them. A native
    fork runs no handler: its child keeps copies, but :meth:`close` gives the lock back for every copy.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        # Reentrant: a signal handler may fork, or close a file, while the main thread opens another one.
        self._forking = threading.RLock()

    def open(self, opener: Callable[_P, int], *args: _P.args, **kwargs: _P.kwargs) -> int:
        """Return the descriptor that ``opener`` opens, remembered before the process can fork."""
        with self._forking:
            descriptor = opener(*args, **kwargs)
            self._open.add(descriptor)
            return descriptor

    def close(self, descriptor: int) -> None:
        """Unlock and close a descriptor that was opened here, and no other.

        A number that was closed may be that of another file by now: who may close twice keeps it no longer than once.
        """
        with self._forking:
            if descriptor in self._open:
                self._open.discard(descriptor)
                # Some file systems have no locks.
                with contextlib.suppress(OSError):
                    unlock(descriptor)
                os.close(descriptor)

    def hold(self) -> None:
        """Let no descriptor be opened or closed, before a fork."""
        self._forking.acquire()

    def release(self) -> None:
        """Let descriptors be opened again, in the parent."""
        self._forking.release()

    def close_in_child(self) -> None:
        """Close all of them, in a forked child. The locks stay: they are the parent's."""
        self._forking = threading.RLock()
        for descriptor in tuple(self._open):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open.clear()


DESCRIPTORS = Descriptors()
os.register_at_fork(
    before=DESCRIPTORS.hold, after_in_parent=DESCRIPTORS.release, after_in_child=DESCRIPTORS.close_in_child
)
