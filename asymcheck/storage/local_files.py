"""File operations on local file systems: durable writes, direct I/O, advisory locks, and translated errors.

Tests replace :class:`Files` to lose unsynced bytes or to make a call fail. Therefore every change of a store on disk
goes through :class:`Files`. Only LMDB does its own I/O.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import ParamSpec, TypeVar

from asymcheck.errors import (
    LockTimeoutError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    StorageError,
    TooManyFilesError,
    UnsupportedFileSystemError,
)

_POLL_S = 0.005
_P = ParamSpec("_P")
_T = TypeVar("_T")
_CREATE_ATTEMPTS = 8
# Longer than another process holds the lock of a file that it only inspects.
_INSPECTION_S = 1.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
NO_SERVER = {
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN),
    *(errno.ENETUNREACH, errno.ENETRESET, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN),
}
"""Errors of a mounted file system without its server."""
FILE_MODE = 0o666
"""Mode of new files before the umask, which decides whether a group shares the store."""


class Files:
    """File operations that raise the errors of this package. Thread-safe."""

    def open_new(self, path: Path, mode: int = FILE_MODE) -> int:
        """Create ``path`` for reading and writing; return a descriptor. The file must not exist."""
        with translated("create", path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    def open_existing(self, path: Path) -> int:
        """Open ``path`` for reading and writing; return a descriptor. The path must not be a link."""
        return _open(path, "open", os.O_RDWR)

    def open_lock(self, path: Path) -> int:
        """Open the lock file ``path``, and create it if it is missing; return a descriptor. It must not be a link."""
        return _open(path, "open", os.O_RDWR | os.O_CREAT)

    def open_read(self, path: PurePath) -> int:
        """Open ``path`` for reading; return a descriptor. The path must not be a link.

        Raises:
            FileNotFoundError: there is no such file. Callers handle removed files.
        """
        return _open(path, "open for reading", os.O_RDONLY)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Write all of ``buffers``, one after another, at ``offset``."""
        remaining = [buffer for buffer in buffers if len(buffer)]
        with translated("write", path):
            while remaining:
                written = os.pwritev(descriptor, remaining, offset)
                if written == 0:
                    raise OutOfSpaceError(f"write {path}: the device accepted no bytes at offset {offset}; free space")
                offset += written
                _advance(remaining, written)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: PurePath) -> int:
        """Fill ``buffers`` in order from ``offset``; return the bytes read, fewer only at the end of the file."""
        remaining, start = [buffer for buffer in buffers if len(buffer)], offset
        with translated("read", path):
            while remaining:
                count = os.preadv(descriptor, remaining, offset)
                if count == 0:
                    break
                offset += count
                _advance(remaining, count)
            return offset - start

    def sync(self, descriptor: int, path: Path) -> None:
        """Make the content of a file durable. Abandon the file after a failure: a second sync may succeed wrongly."""
        with translated("sync", path):
            os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
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
        """Rename a file, replacing an existing target."""
        with translated("rename", source):
            source.rename(target)

    def link(self, source: Path, target: Path) -> bool:
        """Create a hard link; return False if ``target`` exists."""
        with translated("link", target):
            try:
                os.link(source, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise UnsupportedFileSystemError(
                    f"link {target}: {error.strerror}; a store needs a file system with hard links, such as ext4 or XFS"
                ) from error
            return True

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        with translated("remove", path):
            path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> bool:
        """Create a directory; return False if it exists, and is not a link. The caller syncs the parent."""
        with translated("create directory", path):
            try:
                path.mkdir()
            except FileExistsError:
                refuse_link(path)
                return False
            return True

    def remove_directory(self, path: Path) -> bool:
        """Remove an empty directory; return False if it is missing or not empty."""
        with translated("remove directory", path):
            try:
                path.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
            return True

    @contextlib.contextmanager
    def temporary(self, path: Path, data: bytes) -> Iterator[None]:
        """Create a file with durable ``data`` for the ``with`` block, then remove it.

        The file is locked, so that garbage collection does not take it for the leftover of a crash.
        """
        descriptor = create_locked(self, path)
        try:
            self.pwrite(descriptor, [memoryview(data)], 0, path)
            self.sync(descriptor, path)
            yield
        finally:
            try:
                self.unlink(path)
            finally:
                DESCRIPTORS.close(descriptor)

    def publish_record(self, path: Path, data: bytes) -> bool:
        """Create ``path`` with durable ``data``; return False if it exists. The caller syncs the directory.

        A hard link instead of a rename keeps the record of the first of two concurrent processes.
        """
        temporary = path.with_name(f"{os.urandom(8).hex()}.tmp")
        with self.temporary(temporary, data):
            return self.link(temporary, path)

    def replace_record(self, path: Path, data: bytes) -> None:
        """Replace the content of ``path`` durably and atomically."""
        temporary = path.with_name(f"{os.urandom(8).hex()}.tmp")
        with self.temporary(temporary, data):
            self.rename(temporary, path)
            self.sync_directory(path.parent)

    def reading_ahead(self, _paths: Iterable[PurePath], _limit: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager without effect, because drives read small files at once."""
        return contextlib.nullcontext()

    def read_small(self, path: PurePath, limit: int) -> bytes | None:
        """Return the content of a file, at most ``limit`` + 1 bytes; None if the file does not exist."""
        try:
            descriptor = self.open_read(path)
        except FileNotFoundError:
            return None
        try:
            with translated("read", path):
                size = min(os.fstat(descriptor).st_size, limit + 1)
            data = bytearray(size)
            count = self.pread(descriptor, [memoryview(data)], 0, path)
            return bytes(memoryview(data)[:count])
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Return the free bytes of the file system of ``path`` for this user."""
        with translated("access", path):
            return shutil.disk_usage(path).free

    def list(self, path: PurePath) -> list[str]:
        """Return the sorted names in a directory, not through a link; an empty list if it does not exist."""
        with translated("list", path):
            refuse_link(path)
            try:
                return sorted(os.listdir(path))
            except (FileNotFoundError, NotADirectoryError):
                return []


def _open(path: PurePath, action: str, flags: int) -> int:
    """Open a file or directory below a store. A copied store may have pipes, which block, and endless devices."""
    with translated(action, path):
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        os.close(descriptor)
        raise StorageError(f"{action} {path}: it is neither a file nor a directory; remove it")
    return descriptor


def _advance(buffers: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of ``buffers``."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


OPEN_SOURCE = "open source"
"""Action of opening a file outside of a store, to which links may lead."""
_ADVICE = {
    **dict.fromkeys(("open for reading", "read", "list", "access"), "this user has no permission to read it"),
    "create directory": "choose a directory where this user may write; to read a store, open it with read_only=True",
}


@contextlib.contextmanager
def translated(action: str, path: PurePath) -> Iterator[None]:
    """Translate an OSError into an error of this package that names the action and the file.

    FileNotFoundError passes unchanged, because only the caller knows whether a missing file is an error.
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
            advice = _ADVICE.get(action, "the store cannot be written here; to read it, open it with read_only=True")
            owner = "" if error.errno == errno.EROFS else _owner_of(Path(error.filename or path))
            raise ReadOnlyStoreError(f"{message}; {owner}{advice}") from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyFilesError(f"{message}; raise the limit of open files (ulimit -n)") from error
        if error.errno in NO_SERVER:
            raise RemoteUnreachableError(f"{message}; check the mount") from error
        if error.errno == errno.EFBIG:
            raise StorageError(f"{message}; raise the limit of file sizes (ulimit -f)") from error
        # Links to files outside of a store are followed. The path of such a file is a loop of links.
        if error.errno == errno.ELOOP and action != OPEN_SOURCE:
            refuse_link(path)
        raise StorageError(message) from error


def _owner_of(path: Path) -> str:
    """Name the owner of a file, or else of its folder, as the beginning of advice. Return "" for the user's own files.

    The permission of root has other reasons, such as an immutable file.
    """
    user = os.geteuid()
    for place in (path, path.parent) if user else ():
        with contextlib.suppress(OSError):
            if (owner := place.lstat().st_uid) != user:
                name = place.name or place
                return f"{name} belongs to user {owner}, not to user {user}: change the user or the owner (chown -R); "
    return ""


def refuse_link(path: PurePath) -> None:
    """Raise StorageError if ``path``, a file or directory below a store, is a symbolic link (SPEC.md §A3)."""
    if os.path.islink(path):
        raise StorageError(f"{path} is a symbolic link; a store has none: remove it, or replace it by its target")


def reserve(path: Path, size: int, limit: int) -> None:
    """Allocate disk blocks for a whole file before it is mapped. A new file gets ``size`` bytes.

    A process that touches a mapped page without a disk block is killed (SIGBUS).

    Raises:
        StorageError: the file has more than ``limit`` bytes. A sparse file in a copied store could fill the drive.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        status = os.fstat(descriptor)
        size = status.st_size or size
        if size > limit:
            raise StorageError(f"{path} has {size} bytes, but needs at most {limit}: remove it, if no process uses it")
        if status.st_blocks * 512 < size:
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError:
                # ext4 keeps the blocks that it could allocate on a full drive.
                os.ftruncate(descriptor, status.st_size)
                raise
    finally:
        os.close(descriptor)


def set_direct(descriptor: int) -> bool:
    """Switch a descriptor to O_DIRECT; return False if the file system does not support it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


class OpenFile:
    """Open file with direct I/O, if the file system supports it. Thread-safe. The owner manages the lock."""

    def __init__(self, files: Files, path: Path, descriptor: int) -> None:
        """Take over ``descriptor``, opened by :data:`DESCRIPTORS`. I/O is buffered until :meth:`use_direct`."""
        self.files = files
        self.path = path
        self.descriptor = descriptor
        self.is_direct = False
        """Whether reads and writes need aligned memory."""

    def use_direct(self) -> None:
        """Switch to direct I/O, if the file system supports it."""
        self.is_direct = set_direct(self.descriptor)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all of ``buffers``, one after another, at ``offset``."""
        self._transfer(self.files.pwrite, buffers, offset)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill ``buffers`` in order; return the bytes read, which are fewer only at the end of the file."""
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
            # Clear O_DIRECT first: a thread that sees is_direct cleared takes any refusal for an error.
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.is_direct = False
            return transfer(self.descriptor, buffers, offset, self.path)

    def sync(self) -> None:
        """Sync the content; see :meth:`Files.sync`."""
        self.files.sync(self.descriptor, self.path)

    def close(self) -> None:
        """Release the lock and close the file. Closing twice is allowed."""
        # Forget the descriptor first: a second close, or a late transfer, might hit a file that reuses the number.
        descriptor, self.descriptor = self.descriptor, -1
        DESCRIPTORS.close(descriptor)


def refuses_direct(error: StorageError) -> bool:
    """Tell whether buffered I/O may succeed where direct I/O failed.

    Some file systems accept O_DIRECT but refuse the first transfer (EINVAL). Memory that is mapped by a driver does not
    support direct I/O (EFAULT).
    """
    return getattr(error.__cause__, "errno", None) in (errno.EINVAL, errno.EFAULT)


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Take an advisory lock without waiting; return False if another holder has it.

    A file system without locks grants every shared lock, so that stores there can be read (SPEC.md §A12).
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if exclusive or error.errno not in _NO_LOCKS:
            raise
    return True


def wait_lock(descriptor: int, timeout_s: float, *, exclusive: bool) -> bool:
    """Take an advisory lock; return False after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor, exclusive=exclusive):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(descriptor: int) -> None:
    """Release an advisory lock."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_same_file(descriptor: int, path: Path) -> bool:
    """Tell whether ``path`` still names the file that is open as ``descriptor``, and is not a link to it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


class Descriptors:
    """Registry of open descriptors that hold locks. A forked child closes its copies.

    Otherwise the copies would keep the locks of a dead parent. A fork in Python waits until no descriptor is being
    opened or closed. A native fork runs no handler, but :meth:`close` releases the lock for every copy.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        # Reentrant: a signal handler may fork or close a file while the main thread opens a file.
        self._forking = threading.RLock()

    def open(self, opener: Callable[_P, int], *args: _P.args, **kwargs: _P.kwargs) -> int:
        """Call ``opener`` and register the descriptor before the process can fork."""
        with self._forking:
            descriptor = opener(*args, **kwargs)
            self._open.add(descriptor)
            return descriptor

    def close(self, descriptor: int) -> None:
        """Unlock and close a registered descriptor; ignore other numbers.

        A closed number may belong to another file. Callers that may close twice must forget the number first.
        """
        with self._forking:
            if descriptor in self._open:
                self._open.discard(descriptor)
                # Some file systems do not support locks.
                with contextlib.suppress(OSError):
                    unlock(descriptor)
                os.close(descriptor)

    def hold(self) -> None:
        """Block the opening and closing of descriptors before a fork."""
        self._forking.acquire()

    def release(self) -> None:
        """Allow the opening and closing of descriptors in the parent after a fork."""
        self._forking.release()

    def close_in_child(self) -> None:
        """Close all registered descriptors in a forked child. The parent keeps the locks."""
        self._forking = threading.RLock()
        for descriptor in tuple(self._open):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open.clear()


DESCRIPTORS = Descriptors()
os.register_at_fork(
    before=DESCRIPTORS.hold, after_in_parent=DESCRIPTORS.release, after_in_child=DESCRIPTORS.close_in_child
)


@contextlib.contextmanager
def locked(opener: Callable[[Path], int], path: Path, *, exclusive: bool = True) -> Iterator[int | None]:
    """Open a file or folder, and try to lock it for the ``with`` block; yield its descriptor.

    Yields None if another holder has the lock, or if ``path`` names another file by now.
    """
    descriptor = DESCRIPTORS.open(opener, path)
    try:
        with translated("lock", path):
            is_locked = try_lock(descriptor, exclusive=exclusive) and is_same_file(descriptor, path)
        yield descriptor if is_locked else None
    finally:
        DESCRIPTORS.close(descriptor)


def create_locked(files: Files, target: Path, mode: int = FILE_MODE) -> int:
    """Create and lock a file. Retry if another process removes the file before it is locked."""
    for _ in range(_CREATE_ATTEMPTS):
        descriptor = DESCRIPTORS.open(files.open_new, target, mode)
        if wait_lock(descriptor, _INSPECTION_S, exclusive=True) and is_same_file(descriptor, target):
            return descriptor
        DESCRIPTORS.close(descriptor)
        files.unlink(target)
    raise LockTimeoutError(
        f"cannot create {target}: {_CREATE_ATTEMPTS} times, another process held the lock of the new file, or removed "
        "it; try again"
    )
