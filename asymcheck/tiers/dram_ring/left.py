"""Rings that lie in a folder: those of a store, in use or left behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from asymcheck.format.layout import parse_ring_name
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.format.ring import CAPTURES_OFFSET
from asymcheck.tiers.files import DESCRIPTORS, is_same_file, translated, try_lock


def left_rings(folder: Path, store_id: bytes) -> list[Path]:
    """Return the rings of a store in ``folder`` that belong to this user, in use or not; none without such a folder.

    Everybody may write into ``/dev/shm``: what another user put there is neither ours to open nor to be trusted.
    """
    with translated("list", folder):
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        named = [folder / name for name in names if (parse_ring_name(name) or (b"", b""))[0] == store_id]
        return [path for path in named if _is_own_file(path)]


def _is_own_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def remove_unmade(path: Path) -> bool:
    """Remove what a process left that was killed while it made a ring; return False when captures may lie in it."""
    with translated("open", path):
        try:
            descriptor = DESCRIPTORS.add(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        except FileNotFoundError:
            return True
    try:
        # Who makes a ring locks it first, so that one whose lock is had is made no further.
        if try_lock(descriptor, exclusive=True):
            if any(os.pread(descriptor, BLOCK_BYTES, CAPTURES_OFFSET)):
                return False
            if is_same_file(descriptor, path):
                path.unlink(missing_ok=True)
    finally:
        DESCRIPTORS.close(descriptor)
    return True
