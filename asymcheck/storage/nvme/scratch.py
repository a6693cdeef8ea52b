"""Room in a store for measuring: files that look like unfinished packs, so that collection removes what a kill left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from asymcheck.config import WRITER
from asymcheck.format import layout
from asymcheck.format.frame import FrameDescriptor
from asymcheck.storage.local_files import OpenFile
from asymcheck.storage.nvme.pack_writer import PackWriter, create_locked
from asymcheck.storage.nvme.tier import NvmeTier
from asymcheck.storage.slots import Slot
from asymcheck.types import PackId


@contextlib.contextmanager
def scratch(tier: NvmeTier) -> Iterator[OpenFile]:
    """Lend a file among the packs of a writable store; it is removed at the end, and by collection after a kill."""
    path = tier.packs / layout.pack_temporary_name(PackId(os.urandom(16)))
    with contextlib.closing(OpenFile(tier.files, path, create_locked(tier.files, path))) as file:
        try:
            file.use_direct()
            yield file
        finally:
            tier.files.unlink(path)


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
