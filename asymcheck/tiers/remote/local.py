"""A location in a folder: pyarrow writes there, but makes nothing durable, and takes no name only if that is free."""

from __future__ import annotations

import errno
import os
from pathlib import PurePath

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOTSUP)
"""What says that a directory above a location cannot be opened, or not be synced, by anybody like us."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""What a file system says that has no hard links."""


def sync(path: PurePath) -> None:
    """Make a file's content durable, or the names in a directory."""
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


def rename(source: PurePath, target: PurePath) -> bool:
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
