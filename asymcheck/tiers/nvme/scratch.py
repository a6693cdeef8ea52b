"""Room in a store for measuring: files that look like unfinished packs, so that collection removes what a kill left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

from asymcheck.config import WRITER
from asymcheck.format import layout
from asymcheck.format.frame import FrameDescriptor
from asymcheck.tiers.files import DESCRIPTORS, Files, set_direct
from asymcheck.tiers.nvme.packs import PackWriter, create_locked
from asymcheck.tiers.nvme.tier import NvmeTier
from asymcheck.tiers.slots import Slot
from asymcheck.types import PackId


@dataclasses.dataclass(frozen=True)
class Scratch:
    """An empty file of one's own, opened for direct I/O where the file system has it."""

    files: Files
    descriptor: int
    path: Path
    is_direct: bool

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data``, whole blocks at a multiple of a block."""
        self.files.pwrite(self.descriptor, [data], offset, self.path)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``."""
        self.files.pread(self.descriptor, [buffer], offset, self.path)

    def sync(self) -> None:
        """Make what was written durable."""
        self.files.sync(self.descriptor, self.path)


@contextlib.contextmanager
def scratch(tier: NvmeTier) -> Iterator[Scratch]:
    """Lend a file among the packs of a writable store; it is removed at the end, and by collection after a kill."""
    path = tier.packs / layout.pack_temporary_name(PackId(os.urandom(16)))
    descriptor = create_locked(tier.files, path)
    try:
        yield Scratch(tier.files, descriptor, path, set_direct(descriptor))
    finally:
        try:
            tier.files.unlink(path)
        finally:
            DESCRIPTORS.close(descriptor)


def seal_scratch_pack(tier: NvmeTier, slot: Slot, descriptor: FrameDescriptor) -> float:
    """Write a pack of the one frame in ``slot``, make it durable, remove it; return how long the first two took.

    One that a kill leaves is named by no checkpoint, and collection frees it.
    """
    pack_id = PackId(os.urandom(16))
    began = time.perf_counter()
    target = tier.packs / layout.pack_temporary_name(pack_id)
    writer = PackWriter(tier.files, tier.packs, pack_id, create_locked(tier.files, target), recycled=False)
    try:
        writer.write(slot, descriptor)
        writer.seal(time.time_ns(), WRITER)
        took = time.perf_counter() - began
        tier.files.unlink(tier.packs / layout.pack_name(pack_id))
    finally:
        writer.abandon()
    return took
