"""Capture and flush in one go: the partitions of a state copied, digested and written while the caller waits."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial

from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.partition.leaves import Leaf
from asymcheck.partition.plan import Partition
from asymcheck.pipeline.packing import Packing
from asymcheck.tiers.nvme import NvmeTier, PackWriter, Slot, work_off
from asymcheck.types import Digest


class Flusher:
    """Writes partitions of one state, several in flight."""

    def __init__(self, tier: NvmeTier, packing: Packing, leaves: Sequence[Leaf]) -> None:
        """Put partitions of ``leaves`` into the packs of ``packing``."""
        self._tier = tier
        self._packing = packing
        self._leaves = leaves
        self._lock = threading.Lock()
        # Copies that run at once take memory bandwidth from each other and from the device; half of the cores are
        # enough to keep it busy.
        self._copying = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0)) // 2))

    def write(self, partitions: Sequence[Partition]) -> list[Digest]:
        """Digest all partitions and write those that the store lacks; return their digests in order.

        Raises:
            StorageError: the device refused; every pack of this save has been abandoned.
        """
        digests: list[Digest | None] = [None] * len(partitions)
        self._packing.expect(sum(frame_length(partition.length) for partition in partitions))
        left = Counter(piece.row for partition in partitions for piece in partition.pieces)

        def store(number: int, slot: Slot) -> None:
            digests[number] = self._store(partitions[number], slot)
            for piece in partitions[number].pieces:
                with self._lock:
                    left[piece.row] -= 1
                if not left[piece.row]:
                    self._leaves[piece.row].release()

        try:
            work_off(
                range(len(partitions)),
                store,
                slots=self._tier.slots,
                payload_bytes=max((partition.length for partition in partitions), default=0),
                threads=self._tier.config.slots,
                name="flush",
            )
        except BaseException:
            self._packing.abandon()
            raise
        return [name for name in digests if name is not None]

    def _store(self, partition: Partition, slot: Slot) -> Digest:
        payload = slot.payload(partition.length)
        with self._copying:
            copy_partition(partition, self._leaves, payload)
            # At once, while it is in this core's cache.
            name = digest(payload)
        self._packing.put(name, partition.length, partial(_write, slot))
        return name


def copy_partition(partition: Partition, leaves: Sequence[Leaf], payload: memoryview) -> None:
    """Copy the bytes of a partition from its tensors into ``payload``, which has its length."""
    position = 0
    for piece in partition.pieces:
        leaves[piece.row].copy_bytes(piece.start, payload[position : position + piece.length])
        position += piece.length


def _write(slot: Slot, writer: PackWriter, descriptor: FrameDescriptor) -> None:
    writer.write(slot, descriptor)
