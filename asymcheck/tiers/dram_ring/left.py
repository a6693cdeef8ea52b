"""Rings that lie in a folder: those of a store, in use or left behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from asymcheck.format.layout import parse_ring_name
from asymcheck.tiers.files import translated


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
