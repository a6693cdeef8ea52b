"""Marks: a file for each process that has a catalog open, locked for as long as it lives (SPEC.md §7.5).

A process that was killed leaves its mark, and the lock on it is gone: so it is found to be dead also from another PID
namespace, as when a container is started again on the same node. A mark is durable before the first transaction of its
process, because transactions are not: after a power loss the mark tells that the catalog cannot be trusted.
"""

from __future__ import annotations

import os
from pathlib import Path

from asymcheck.errors import LockTimeoutError, StorageError
from asymcheck.tiers import owners
from asymcheck.tiers.files import DESCRIPTORS, Files, try_lock
from asymcheck.types import Owner


class Marks:
    """The folder ``open`` of a catalog."""

    def __init__(self, files: Files, folder: Path) -> None:
        """Create the folder if it is missing; its parent is the catalog's folder."""
        self._files = files
        self._folder = folder
        self._own: tuple[Path, int] | None = None
        files.make_directory(folder.parent)
        files.make_directory(folder)

    def put(self) -> None:
        """Mark durably that this process uses the catalog. The caller holds the catalog's lock, as readers of marks do.

        Raises:
            LockTimeoutError: this process has one there already, by another path to it.
        """
        path = self._path(owners.this_process())
        try:
            descriptor = DESCRIPTORS.open(self._files.open_new, path)
        except StorageError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            descriptor = DESCRIPTORS.open(self._files.open_existing, path)
        if not try_lock(descriptor, exclusive=True):
            DESCRIPTORS.close(descriptor)
            raise LockTimeoutError(f"{path} is locked: this process has the store open by another path, too")
        self._own = path, descriptor
        # Every directory entry that leads to the mark, also those that a process created which was killed then.
        for folder in (self._folder, self._folder.parent, self._folder.parent.parent):
            self._files.sync_directory(folder)

    def take_back(self) -> None:
        """Unmark. A mark that cannot be removed is left without its lock, as that of a process that was killed."""
        if self._own is not None:
            path, descriptor = self._own
            self._own = None
            try:
                self._files.unlink(path)
            finally:
                DESCRIPTORS.close(descriptor)

    def of_others(self) -> tuple[list[Path], dict[Path, Owner]]:
        """Return the marks of the dead, and those of living processes, but not this one's."""
        dead: list[Path] = []
        alive: dict[Path, Owner] = {}
        own = self._path(owners.this_process())
        for mark in self._folder.iterdir():
            pid, ticks, rest = [*mark.name.split("-", 2), "", ""][:3]
            boot_id, _, namespace = rest.rpartition("-")
            if not (pid.isdecimal() and ticks.isdecimal()):
                continue
            owner = Owner(int(pid), int(ticks), boot_id, namespace)
            if self.is_dead(owner):
                dead.append(mark)
            elif mark != own:
                alive[mark] = owner
        return dead, alive

    def is_dead(self, owner: Owner) -> bool:
        """Tell whether a process is certainly dead, or uses the catalog no more."""
        if owners.is_dead(owner):
            return True
        if owners.is_near(owner):
            return False
        try:
            descriptor = DESCRIPTORS.open(os.open, self._path(owner), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            return try_lock(descriptor, exclusive=False)
        finally:
            DESCRIPTORS.close(descriptor)

    def _path(self, owner: Owner) -> Path:
        namespace = owner.pid_namespace.replace("/", "_")
        return self._folder / f"{owner.pid}-{owner.start_ticks}-{owner.boot_id}-{namespace}"
