"""Rings that lie in a folder: those of a store, in use or left behind."""

from __future__ import annotations

import os
from pathlib import Path

from asymcheck.format.layout import parse_ring_name
from asymcheck.tiers.files import translated


def left_rings(folder: Path, store_id: bytes) -> list[Path]:
    """Return the rings of a store in ``folder``, in use or not; none when there is no such folder."""
    with translated("list", folder):
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
    return [folder / name for name in names if (parse_ring_name(name) or (b"", b""))[0] == store_id]
