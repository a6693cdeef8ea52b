"""What killed exports leave beside their targets: names of drafts say whose they are, and the next export clears up.

::

    .model.4711-8815-0123456789abcdef-01234567.partial       a draft of `model`, or what it has replaced
    .model.4711-8815-0123456789abcdef-01234567.partial.old   the folder `model` itself, while a draft takes its place
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Final

from asymcheck.format.digest import sum8
from asymcheck.tiers.files import Files, translated
from asymcheck.tiers.owners import is_dead, this_process
from asymcheck.types import Owner

_FILES = Files()
_PARTIAL: Final = ".partial"
_OLD: Final = f"{_PARTIAL}.old"
_OWNED = re.compile(rf"([0-9]+)-([0-9]+)-([0-9a-f]+)-[0-9a-f]+({re.escape(_PARTIAL)}|{re.escape(_OLD)})", re.ASCII)


def draft_of(target: Path) -> Path:
    """Return the path of a new draft of ``target``, by which it is known to be this process's."""
    owner = this_process()
    mark = f"{owner.pid}-{owner.start_ticks}-{_place(owner)}-{os.urandom(4).hex()}"
    return target.with_name(f".{target.name}.{mark}{_PARTIAL}")


def aside(draft: Path) -> Path:
    """Return where the folder that is there lies while a draft takes its name."""
    return draft.with_name(draft.name.removesuffix(_PARTIAL) + _OLD)


def clear(target: Path) -> None:
    """Remove drafts of ``target`` whose processes were killed; give it back if one of them had set it aside.

    Those of living processes stay, and those of other machines and containers: of these nobody here can tell.
    """
    for name in _FILES.list(target.absolute().parent):
        kind = _kind_of(name, target.name)
        left = target.with_name(name)
        if kind == _OLD and not os.path.lexists(target):
            # Another process may have done so just now.
            with translated("rename", left), contextlib.suppress(FileNotFoundError):
                left.rename(target)
        elif kind is not None:
            remove(left)


def remove(path: Path) -> None:
    """Remove a file or a folder; what cannot be removed, and what is not there, stays as it is."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _kind_of(name: str, target: str) -> str | None:
    """Return the suffix of what a killed process left of ``target``; None for all else."""
    prefix, own = f".{target}.", this_process()
    found = _OWNED.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    if found is None or found[3] != _place(own):
        return None
    owner = Owner(int(found[1]), int(found[2]), own.boot_id, own.pid_namespace)
    return found[4] if is_dead(owner) else None


def _place(owner: Owner) -> str:
    """Return what the processes have in common that can be told dead from alive here: one boot, one PID namespace."""
    return sum8(f"{owner.boot_id} {owner.pid_namespace}".encode()).hex()
