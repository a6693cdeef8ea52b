"""Measure memory, codecs and the drive of a store for the policies, in about ten seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from asymcheck.codecs.container import segment_of
from asymcheck.codecs.decode import decode
from asymcheck.codecs.encode import Encoded, encode_delta, encode_planes, encode_zstd
from asymcheck.errors import DigestMismatchError, OutOfSpaceError
from asymcheck.format import registry
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.policies.advice import CodecFacts, DriveFacts, Facts
from asymcheck.storage.available_memory import available_bytes
from asymcheck.storage.nvme import NvmeTier, OpenFile, Slot, run_with_slots, scratch, seal_scratch_pack
from asymcheck.types import Sample, readable_size


def measure(
    tier: NvmeTier,
    samples: Sequence[Sample],
    described: str,
    state_bytes: int | None,
    ring_folder: Path,
    *,
    quick: bool,
) -> Facts:
    """Measure memory, codecs on ``samples``, and the drive of a writable store.

    All files are removed; garbage collection removes files of a killed measurement. ``described`` is the source of the
    samples, empty without samples. ``state_bytes`` is the size of the newest checkpoint, if any.

    Raises:
        OutOfSpaceError: the drive has too little space.
        StorageError: the drive failed.
    """
    began = time.perf_counter()
    budget_s = 0.03 if quick else 0.2
    # The drive comes first, because it may fail.
    drive_facts, written = measure_drive(tier, QUICK if quick else FULL)
    device, partition = device_copy(budget_s), np.ones(_DIGEST_BYTES, dtype=np.uint8).data
    return Facts(
        cores=len(os.sched_getaffinity(0)),
        ring_room_bytes=min(ring_limits(ring_folder), default=0),
        copy_bytes_per_s=copy_bytes_per_s(budget_s),
        # A partition that was just copied is in the cache.
        digest_bytes_per_s=len(partition) / seconds_of(partial(digest, partition), budget_s),
        drive=drive_facts,
        codecs=tuple(
            _measure(sample, codec, encode, budget_s / 2) for sample in samples for codec, encode in _encoders(sample)
        ),
        sample=described,
        state_bytes=state_bytes,
        device=device[0] if device else None,
        device_copy_bytes_per_s=device[1] if device else None,
        written_bytes=written,
        took_s=time.perf_counter() - began,
    )


_COPY_BYTES = 64 << 20
_DIGEST_BYTES = 4 << 20


def copy_bytes_per_s(budget_s: float) -> float:
    """Return the copy speed of one thread in bytes per second, with more data than caches hold."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    return _COPY_BYTES / seconds_of(lambda: np.copyto(target, source), budget_s)


def device_copy(budget_s: float) -> tuple[str, float] | None:
    """Return the accelerator and its copy speed to pinned memory in bytes per second; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return torch.cuda.get_device_name(device), _COPY_BYTES / seconds_of(copy, budget_s)


def ring_limits(folder: Path, freed: int = 0, processes: int = 1) -> list[int]:
    """Return upper limits in bytes for a ring in ``folder``: nine tenths of the folder, and half of the memory.

    A ring of ``freed`` bytes will be removed. Several ``processes`` may create a ring at the same time.
    """
    limits = []
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        # A tmpfs without a limit (size=0) reports no blocks.
        if status.f_blocks:
            limits.append((status.f_bavail * status.f_frsize // processes + freed) * 9 // 10)
    available = available_bytes()
    if available is not None:
        limits.append((available // processes + freed) // 2)
    return limits


def _measure(sample: Sample, codec: int, encode: Callable[[], Encoded], budget_s: float) -> CodecFacts:
    """Encode and decode a sample on one thread.

    Raises:
        DigestMismatchError: the codec returned other bytes, which is a defect.
    """
    encoded = encode()
    payload = memoryview(encoded.payload())
    base = None if sample.older is None else memoryview(sample.older)
    if digest(decode(encoded.descriptor, payload, base)) != encoded.descriptor.digest:
        raise DigestMismatchError(f"codec {registry.CODECS[codec]} changes {sample.dtype} of {sample.role}")
    encode_s = seconds_of(encode, budget_s)
    decode_s = seconds_of(lambda: decode(encoded.descriptor, payload, base), budget_s)
    size = len(sample.plain)
    return CodecFacts(
        role=sample.role,
        dtype=sample.dtype,
        codec=registry.CODECS[codec],
        sample_bytes=size,
        ratio=size / len(payload),
        encode_bytes_per_s=size / encode_s,
        decode_bytes_per_s=size / decode_s,
    )


def _encoders(sample: Sample) -> Iterator[tuple[int, Callable[[], Encoded]]]:
    plain, name = memoryview(sample.plain), digest(sample.plain)
    segments = [segment_of(sample.dtype, len(plain))]
    yield registry.CODEC_ZSTD, lambda: encode_zstd(name, plain)
    yield registry.CODEC_BYTE_PLANES, lambda: encode_planes(name, plain, segments)
    if sample.older is not None and sample.older != sample.plain:
        base, older = memoryview(sample.older), digest(sample.older)
        yield registry.CODEC_DELTA, lambda: encode_delta(name, plain, segments, older, base)


_ROUNDS_MIN, _ROUNDS_MAX = 3, 100


def seconds_of(work: Callable[[], object], budget_s: float) -> float:
    """Return the median time of at least three calls of ``work`` within a time budget, after a warm-up call."""
    work()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < _ROUNDS_MAX and (len(taken) < _ROUNDS_MIN or time.perf_counter() - began < budget_s):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    # A clock has steps.
    return max(statistics.median(taken), 1e-9)


_ROOM_FACTOR = 4
_FLUSHED_BYTES = 4 << 20
"""Payload of a measured pack: a partition of usual size."""
_FLUSHED_PACK_BYTES = _FLUSHED_BYTES + 3 * BLOCK_BYTES
"""Bytes of the pack: header, frame header, payload, index."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """Limits of a drive measurement."""

    file_bytes: int
    """Size of the file."""
    pass_s: float
    """Seconds for one pass over the file; a slow drive gets a smaller file."""
    latency_rounds: int
    """Number of durable writes of one block."""
    flush_rounds: int
    """Number of durable packs of one partition."""


FULL = Effort(256 << 20, 1.2, 60, 12)
QUICK = Effort(32 << 20, 0.3, 12, 3)


def planned_bytes(*, quick: bool) -> int:
    """Return the maximum bytes that a measurement writes. Half of them use space at the same time."""
    effort = QUICK if quick else FULL
    return 2 * effort.file_bytes + effort.flush_rounds * _FLUSHED_PACK_BYTES


def measure_drive(tier: NvmeTier, effort: Effort) -> tuple[DriveFacts, int]:
    """Measure with a temporary file in a writable store; return the results and the bytes written.

    Raises:
        OutOfSpaceError: the drive has too little space.
        StorageError: the drive failed.
    """
    free = tier.files.free_bytes(tier.packs)
    if free < _ROOM_FACTOR * effort.file_bytes:
        raise OutOfSpaceError(
            f"store {tier.root} has {readable_size(free)} free, but a measurement needs "
            f"{readable_size(_ROOM_FACTOR * effort.file_bytes)}; free disk space, or measure with --quick"
        )
    with scratch(tier) as file:
        lane = _Lanes(tier, file, effort)
        new_s = lane.passed(file.write, sync=True)[1]
        length = lane.length
        raw_s, durable_s = lane.passed(file.write, sync=True)
        read_s = lane.passed(file.read, sync=False)[0]
        latencies = _latencies(file, length, effort)
        written = 2 * length + len(latencies) * BLOCK_BYTES
    # Time of a pack without its bytes: sealing, and idle time of the drive at its start and end.
    bytes_s = _FLUSHED_BYTES * durable_s / length
    flushes = [taken - bytes_s for taken in _flushes(tier, effort.flush_rounds)]
    facts = DriveFacts(
        write_bytes_per_s=length / raw_s,
        durable_write_bytes_per_s=length / durable_s,
        durable_new_bytes_per_s=length / new_s,
        read_bytes_per_s=length / read_s,
        write_latency_median_s=statistics.median(latencies),
        write_latency_p95_s=float(np.percentile(latencies, 95)),
        # At least the time of a block, because measured times vary.
        flush_latency_s=max(statistics.median(flushes), statistics.median(latencies)),
    )
    return facts, written + _FLUSHED_PACK_BYTES * effort.flush_rounds


class _Lanes:
    """Passes over a file, partition by partition, with as many threads as saves use."""

    def __init__(self, tier: NvmeTier, file: OpenFile, effort: Effort) -> None:
        self._tier, self._file, self._effort = tier, file, effort
        self._piece = tier.config.partition_bytes
        self._noise = np.random.default_rng(0).integers(0, 256, self._piece, dtype=np.uint8)
        self.length = 0

    def passed(self, transfer: Callable[[Sequence[memoryview], int], object], *, sync: bool) -> tuple[float, float]:
        """Transfer the file; return the seconds until done and until synced.

        The first pass is limited in time, and so determines the size of the file. Others transfer the whole file.
        """
        deadline = time.perf_counter() + self._effort.pass_s
        is_first = not self.length
        count = max(1, (self.length or self._effort.file_bytes) // self._piece)
        done: list[int] = []
        filled: set[int] = set()

        def work(number: int, slot: Slot) -> None:
            # A slow drive gets a smaller file. It has no holes, because numbers are assigned in order.
            if is_first and done and time.perf_counter() > deadline:
                return
            piece = slot.payload(self._piece)
            if id(slot) not in filled:
                # Filled once per slot, because a copy before each write would be measured as well.
                filled.add(id(slot))
                piece[:] = self._noise.data
            transfer([piece], number * self._piece)
            done.append(number)

        began = time.perf_counter()
        run_with_slots(
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


def _latencies(file: OpenFile, length: int, effort: Effort) -> list[float]:
    """Write single blocks at several positions, and sync each."""
    block = Slot(BLOCK_BYTES).memory[:BLOCK_BYTES]
    taken: list[float] = []
    began = time.perf_counter()
    for number in range(effort.latency_rounds):
        start = time.perf_counter()
        block[:8] = number.to_bytes(8, "little")
        file.write([block], number * 7919 * BLOCK_BYTES % max(length, BLOCK_BYTES))
        file.sync()
        taken.append(time.perf_counter() - start)
        if time.perf_counter() - began > effort.pass_s:
            break
    return taken


def _flushes(tier: NvmeTier, rounds: int) -> list[float]:
    """Make packs durable one after the other; return the seconds of each."""
    slot = Slot(_FLUSHED_BYTES)
    payload = slot.payload(_FLUSHED_BYTES)
    payload[:] = np.random.default_rng(1).integers(0, 256, _FLUSHED_BYTES, dtype=np.uint8).data
    descriptor = FrameDescriptor.identity(digest(payload), _FLUSHED_BYTES)
    return [seal_scratch_pack(tier, slot, descriptor) for _ in range(rounds)]
