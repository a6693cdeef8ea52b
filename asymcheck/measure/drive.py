"""The drive of a store: how fast it takes bytes, how long it takes until they are durable, how fast it gives them."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np

from asymcheck.errors import OutOfSpaceError
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.policies.advice import DriveFacts
from asymcheck.tiers.nvme import NvmeTier, Scratch, Slot, scratch, seal_scratch_pack, work_off

_ROOM_FACTOR = 4
_FLUSHED_BYTES = 4 << 20
"""Payload of a pack that is made durable: its frame is a partition of usual size."""
_FLUSHED_PACK_BYTES = _FLUSHED_BYTES + 3 * BLOCK_BYTES
"""All of it: header, frame header, payload, index."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much measuring a drive may write and take."""

    file_bytes: int
    """Size of the file that is written and read."""
    pass_s: float
    """Seconds for one pass over it; a slow drive is measured on less."""
    latency_rounds: int
    """Durable writes of one block."""
    flush_rounds: int
    """Packs of one partition made durable."""


FULL = Effort(256 << 20, 1.2, 60, 12)
QUICK = Effort(32 << 20, 0.3, 12, 3)


def planned_bytes(*, quick: bool) -> int:
    """Return how many bytes measuring writes at most; half of that lies on the drive at a time."""
    effort = QUICK if quick else FULL
    return 2 * effort.file_bytes + effort.flush_rounds * _FLUSHED_PACK_BYTES


def measure_drive(tier: NvmeTier, effort: Effort) -> tuple[DriveFacts, int]:
    """Measure in a file inside a writable store, which is removed; return the facts and how many bytes were written.

    Raises:
        OutOfSpaceError: there is too little room to measure in.
        StorageError: the device refused.
    """
    free = tier.files.free_bytes(tier.packs)
    if free < _ROOM_FACTOR * effort.file_bytes:
        raise OutOfSpaceError(
            f"store {tier.root} has {free} bytes free; measuring writes {effort.file_bytes} at a time, and wants "
            f"{_ROOM_FACTOR} times that: free space, or measure with --quick"
        )
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(scratch(tier))
        lane = _Lanes(tier, file, effort)
        new_s = lane.passed(file.write, sync=True)[1]
        length = lane.length
        raw_s, durable_s = lane.passed(file.write, sync=True)
        read_s = lane.passed(file.read, sync=False)[0]
        latencies = _latencies(file, length, effort)
        written = 2 * length + len(latencies) * BLOCK_BYTES
    # What a pack takes besides its bytes: not only to seal it, but that the drive idles at its beginning and end.
    bytes_s = _FLUSHED_BYTES * durable_s / length
    flushes = [taken - bytes_s for taken in _flushes(tier, effort.flush_rounds)]
    facts = DriveFacts(
        write_bytes_per_s=length / raw_s,
        durable_write_bytes_per_s=length / durable_s,
        durable_new_bytes_per_s=length / new_s,
        read_bytes_per_s=length / read_s,
        write_latency_median_s=statistics.median(latencies),
        write_latency_p95_s=float(np.percentile(latencies, 95)),
        # Nothing durable takes less than a block does, however the measured times vary.
        flush_latency_s=max(statistics.median(flushes), statistics.median(latencies)),
    )
    return facts, written + _FLUSHED_PACK_BYTES * effort.flush_rounds


class _Lanes:
    """Passes over one file by as many threads as saves have frames in flight, a partition at a time."""

    def __init__(self, tier: NvmeTier, file: Scratch, effort: Effort) -> None:
        self._tier, self._file, self._effort = tier, file, effort
        self._piece = tier.config.partition_bytes
        self._noise = np.random.default_rng(0).integers(0, 256, self._piece, dtype=np.uint8)
        self.length = 0

    def passed(self, transfer: Callable[[memoryview, int], None], *, sync: bool) -> tuple[float, float]:
        """Transfer the file, or as much as there is time for; return seconds until done, and until synced.

        The first pass says how long the file is; the others transfer all of it, however long that takes.
        """
        deadline = time.perf_counter() + self._effort.pass_s
        is_first = not self.length
        count = max(1, (self.length or self._effort.file_bytes) // self._piece)
        done: list[int] = []
        filled: set[int] = set()

        def work(number: int, slot: Slot) -> None:
            # A slow drive gets a shorter file; its start has no holes, since numbers are handed out in order.
            if is_first and done and time.perf_counter() > deadline:
                return
            piece = slot.payload(self._piece)
            if id(slot) not in filled:
                # Once for each slot: a copy before each write would be measured, too.
                filled.add(id(slot))
                piece[:] = self._noise.data
            transfer(piece, number * self._piece)
            done.append(number)

        began = time.perf_counter()
        work_off(
            range(count),
            work,
            slots=self._tier.slots,
            payload_bytes=self._piece,
            threads=self._tier.config.slots,
            name="measure",
        )
        transferred_s = time.perf_counter() - began
        if sync:
            self._file.sync()
        self.length = self.length or len(done) * self._piece
        return transferred_s, time.perf_counter() - began


def _latencies(file: Scratch, length: int, effort: Effort) -> list[float]:
    """Write single blocks, each synced, here and there in the file."""
    block = Slot(BLOCK_BYTES).memory[:BLOCK_BYTES]
    taken: list[float] = []
    began = time.perf_counter()
    for number in range(effort.latency_rounds):
        start = time.perf_counter()
        block[:8] = number.to_bytes(8, "little")
        file.write(block, number * 7919 * BLOCK_BYTES % max(length, BLOCK_BYTES))
        file.sync()
        taken.append(time.perf_counter() - start)
        if time.perf_counter() - began > effort.pass_s:
            break
    return taken


def _flushes(tier: NvmeTier, rounds: int) -> list[float]:
    """Make packs durable, one after the other; return how long each took."""
    slot = Slot(_FLUSHED_BYTES)
    payload = slot.payload(_FLUSHED_BYTES)
    payload[:] = np.random.default_rng(1).integers(0, 256, _FLUSHED_BYTES, dtype=np.uint8).data
    descriptor = FrameDescriptor.identity(digest(payload), _FLUSHED_BYTES)
    return [seal_scratch_pack(tier, slot, descriptor) for _ in range(rounds)]
