"""Slow, failing and full file operations, for background saves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from asymcheck import Store
from asymcheck.errors import OutOfSpaceError
from asymcheck.format import layout
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier
from tests.checkpointer.loops import CONFIG


class Disk(Files):
    """A disk with settings for delays and faults."""

    def __init__(self) -> None:
        """Begin without delays and faults."""
        self.delay_s = 0.0
        """Duration of each write."""
        self.full: str | None = None
        """Writes to paths that contain this text fail."""
        self.opened = threading.Event()
        """Writes to packs wait until this event is set."""
        self.opened.set()
        self.read: list[Path] = []
        """Paths that were opened for reading, or read."""

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Write after the delay, or raise the configured error."""
        if "/packs/" in str(path):
            self.opened.wait(60)
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.full is not None and self.full in str(path):
            raise OutOfSpaceError(f"no room for {path.name}")
        super().pwrite(descriptor, buffers, offset, path)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
        """Record the path and read."""
        self.read.append(path)
        return super().pread(descriptor, buffers, offset, path)


class SmallDrive(Files):
    """A drive with space for two packs of 600 kB and not for three."""

    def __init__(self) -> None:
        self.has_failed = False

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Write, or raise that the drive is full."""
        packs = [*path.parent.glob("*.pack"), *path.parent.with_name("pool").glob("*.pack")]
        if path.parent.name == "packs" and sum(pack.stat().st_size for pack in packs) > 1_000_000:
            raise OutOfSpaceError(f"no space for {path.name}")
        super().pwrite(descriptor, buffers, offset, path)

    def temporary(self, path: Path, data: bytes) -> contextlib.AbstractContextManager[None]:
        """Write; the second manifest is the first file for which there is no space."""
        is_manifest = path.parents[2].name == layout.MANIFESTS
        if is_manifest and len([*path.parents[1].iterdir()]) == 2 and not self.has_failed:
            self.has_failed = True
            raise OutOfSpaceError(f"no space for {path.name}")
        return super().temporary(path, data)


def open_on(disk: Files, path: Path) -> Store:
    """Open a store on this disk."""
    return Store(NvmeTier(path, CONFIG, files=disk))
