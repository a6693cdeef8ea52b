"""Folders in the temporary directory that do not outlive their process for long: the next one removes what is left."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

from asymcheck.tiers.owners import is_dead, this_process
from asymcheck.types import Owner

_BETWEEN = "_"


def make_folder(kind: str) -> Path:
    """Return a new folder, which is the caller's; remove those of this ``kind`` whose processes were killed.

    Raises:
        OSError: none can be made.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{kind}{_BETWEEN}*"):
        owner = _owner_of(left.name)
        if owner is not None and is_dead(owner):
            # Of another user it stays.
            shutil.rmtree(left, ignore_errors=True)
    named = map(str, (kind, *dataclasses.astuple(this_process()), ""))
    return Path(tempfile.mkdtemp(prefix=_BETWEEN.join(named)))


def _owner_of(name: str) -> Owner | None:
    """Return whose folder it is; None when its name does not say so."""
    try:
        _kind, pid, start_ticks, boot_id, pid_namespace, _random = name.split(_BETWEEN, 5)
        return Owner(int(pid), int(start_ticks), boot_id, pid_namespace)
    except ValueError:
        return None
