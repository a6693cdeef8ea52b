"""A location in a folder: what pyarrow has no way to do there: to make things durable, and to take free names alone."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import PurePath

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)
"""What says that a directory above a location cannot be opened, or not be synced, by anybody like us."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""What a file system says that has no hard links."""


class LastingFile:
    """A file being written. What was written is durable: the cache of the kernel would take any amount at once.

    Then nobody would know how fast the location is, and the last byte would have to wait for all of them.
    """

    def __init__(self, path: str) -> None:
        """Create it, or empty it."""
        self._file = io.FileIO(path, "w")
        # Who has waited long enough for a write closes the file meanwhile; its number may then be another one's.
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        """Write all of it."""
        left = memoryview(data)
        with self._lock:
            while left:
                left = left[self._file.write(left) :]
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            self._file.close()


def sync(path: PurePath) -> None:
    """Make a directory durable: the names in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_upwards(path: PurePath) -> None:
    """Make a directory durable, and what leads to it."""
    # Also what was there already: whoever made it may have been killed before this.
    for above in (path, *path.parents):
        try:
            sync(above)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise


def publish(source: PurePath, target: PurePath) -> bool:
    """Rename a file, durably, unless the target exists; return False then."""
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
    # Also when it was taken: an attempt of ours may have done that, and have failed here.
    sync(target.parent)
    return is_free
