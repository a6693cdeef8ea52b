"""Advice for a store: sizes, interval and codecs that fit measured facts, each with its reason in one sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from asymcheck.policies.batching import FlushFacts, batch_bytes, flush_s
from asymcheck.policies.interval import span, young_s

IDENTITY = "identity"
_CAPTURES_IN_RING = 2
# What a ring needs beside the bytes of the tensors: headers, padding, manifests.
_RING_SLACK = 1.02
# Per partition: the calls around an encoder and its tables, in Python.
_ENCODE_OVERHEAD_S = 2e-4


@dataclasses.dataclass(frozen=True)
class CodecFacts:
    """How one codec does on tensors of one role and dtype, on one thread."""

    role: str
    """A role of the format, for instance ``weights``."""
    dtype: str
    codec: str
    sample_bytes: int
    """Plain bytes that it was measured on."""
    ratio: float
    """Plain bytes by payload bytes; more is better."""
    encode_bytes_per_s: float
    """Plain bytes encoded in a second."""
    decode_bytes_per_s: float
    """Plain bytes decoded in a second."""


@dataclasses.dataclass(frozen=True)
class DriveFacts:
    """Measurements of a store's drive, by direct I/O where the file system has it."""

    write_bytes_per_s: float
    """Writing over a file that is there, not yet synced."""
    durable_write_bytes_per_s: float
    """The same until it is synced: what recycled packs can reach."""
    durable_new_bytes_per_s: float
    """Writing a new file until it is synced: what new packs can reach."""
    read_bytes_per_s: float
    """Reading it back."""
    write_latency_median_s: float
    """One block written and synced."""
    write_latency_p95_s: float
    """The same: 95 of 100 take no longer."""
    flush_latency_s: float
    """What making one pack durable takes besides its bytes: file, index, header, sync, its name, idling meanwhile."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """A machine and the store on it, as measured at one time."""

    cores: int
    """Processors that this process may use."""
    ring_room_bytes: int
    """Memory that a ring may take: most of what is free in its folder, at most half of what is available."""
    copy_bytes_per_s: float
    """Copying in memory, one thread."""
    digest_bytes_per_s: float
    """Speed of digests of data in memory, one thread."""
    drive: DriveFacts
    """The drive of the store."""
    codecs: tuple[CodecFacts, ...]
    """Measurements of encoding, by role, dtype and codec."""
    sample: str
    """Data that the codecs were measured on."""
    state_bytes: int | None
    """Bytes of the tensors of the newest checkpoint; None when there is none."""
    device: str | None
    """The accelerator that copies were measured from; None where there is none."""
    device_copy_bytes_per_s: float | None
    """Copying from it into pinned memory; None where there is none."""
    written_bytes: int
    """How much measuring wrote to the drive; nothing of it is left."""
    took_s: float
    """How long measuring took."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """Requirements of the training, beside the measurements."""

    state_bytes: int
    """Bytes of the tensors of one checkpoint."""
    mtbf_s: float
    """Mean time between failures that end the training."""
    partition_bytes: int
    """Largest piece that is encoded and written as one."""
    pack_bytes: int
    """Largest pack, as the store is configured."""
    pack_limit_bytes: int
    """Largest pack that could be configured."""


@dataclasses.dataclass(frozen=True)
class BatchAdvice:
    """How much to make durable at once."""

    pack_bytes: int
    """For ``StoreConfig(pack_bytes=...)``."""
    flush_s: float
    """Predicted time until one checkpoint is durable, with this size."""
    present_flush_s: float
    """The same with the size that the store is configured to."""
    reason: str


@dataclasses.dataclass(frozen=True)
class StallAdvice:
    """How long a checkpoint can hold the training."""

    stall_s: float
    """At most, when nothing of the copy runs beside forward and backward."""
    reason: str


@dataclasses.dataclass(frozen=True)
class IntervalAdvice:
    """How often to checkpoint."""

    interval_s: float
    """Seconds from one checkpoint to the next."""
    mtbf_s: float
    """For this mean time between failures."""
    lost_share: float
    """Share of the training time that stalls and work done twice then take, restarts apart."""
    reason: str


@dataclasses.dataclass(frozen=True)
class RingAdvice:
    """How much memory captures need."""

    ring_bytes: int
    """For ``CaptureConfig(ring_bytes=...)``; as much as there is room for."""
    wanted_bytes: int
    """Room for two states: the newest complete one stays while the next is captured."""
    room_bytes: int
    """Space that a ring may use."""
    reason: str


@dataclasses.dataclass(frozen=True)
class CodecAdvice:
    """Whether encoding pays on the way to this drive."""

    role: str
    dtype: str
    codec: str
    """Name of the codec, ``identity`` where none pays."""
    gain: float
    """Time to write it plain by time to encode and write it; 1 for ``identity``."""
    reason: str


@dataclasses.dataclass(frozen=True)
class Advice:
    """Recommended configuration."""

    situation: Situation
    batch: BatchAdvice
    """How much to make durable at once."""
    stall: StallAdvice
    """How long a checkpoint can hold the training."""
    interval: IntervalAdvice
    """How often to checkpoint."""
    ring: RingAdvice
    """How much memory captures need."""
    codecs: tuple[CodecAdvice, ...]
    """Recommended codecs, by role and dtype."""


def advise(facts: Facts, situation: Situation) -> Advice:
    """Return what fits the facts."""
    batch, stall = _batch(facts, situation), _stall(facts, situation)
    return Advice(
        situation,
        batch,
        stall,
        _interval(situation, stall.stall_s, batch.flush_s),
        _ring(facts, situation),
        _codecs(facts, situation),
    )


def flush_facts(facts: Facts, situation: Situation) -> FlushFacts:
    """Return what batching needs to know of a save that copies, digests and writes one partition after the other."""
    chunk = min(situation.partition_bytes, max(situation.state_bytes, 1))
    # Copies run on half of the cores: more would take memory bandwidth from each other.
    chunk_s = chunk * (1 / facts.copy_bytes_per_s + 1 / facts.digest_bytes_per_s) / _threads(facts)
    drive = facts.drive
    return FlushFacts(situation.state_bytes, drive.flush_latency_s, chunk, chunk_s, drive.durable_write_bytes_per_s)


def _batch(facts: Facts, situation: Situation) -> BatchAdvice:
    flush = flush_facts(facts, situation)
    size = batch_bytes(flush, situation.pack_limit_bytes)
    count = max(1, math.ceil(situation.state_bytes / size))
    reason = (
        f"a durable pack costs {span(flush.latency_s)} besides its bytes, and the drive waits "
        f"{span(flush.chunk_s)} for each partition: least in {count} pack{'s' if count > 1 else ''}"
    )
    return BatchAdvice(size, flush_s(flush, size), flush_s(flush, situation.pack_bytes), reason)


def _stall(facts: Facts, situation: Situation) -> StallAdvice:
    device = facts.device_copy_bytes_per_s
    speed = facts.copy_bytes_per_s if device is None else device
    source = "in memory" if device is None else f"from {facts.device}"
    reason = (
        f"copies {source} run at {_rate(speed)}; what of them fits into forward and backward does not hold the training"
    )
    return StallAdvice(situation.state_bytes / speed, reason)


def _interval(situation: Situation, stall_s: float, durable_s: float) -> IntervalAdvice:
    best = young_s(stall_s, situation.mtbf_s)
    interval = max(best, durable_s)
    lost = stall_s / interval + (interval / 2 + durable_s) / situation.mtbf_s
    if best >= durable_s:
        reason = "least time is lost where stalls take as much of it as work done twice (Young)"
    else:
        reason = "stalls alone would allow more of them, but the drive has not written one before that time"
    return IntervalAdvice(interval, situation.mtbf_s, lost, reason)


def _ring(facts: Facts, situation: Situation) -> RingAdvice:
    one = math.ceil(situation.state_bytes * _RING_SLACK)
    wanted, room = _CAPTURES_IN_RING * one, facts.ring_room_bytes
    if room >= wanted:
        reason = "there is room for two states: the newest complete one stays in memory while the next is captured"
    elif room >= one:
        reason = "there is room for one state only: while the next is captured, no complete one stays in memory"
    else:
        reason = "there is no room for a whole state: checkpoints stream through, and none can be resumed from memory"
    return RingAdvice(min(wanted, room), wanted, room, reason)


def _codecs(facts: Facts, situation: Situation) -> tuple[CodecAdvice, ...]:
    kinds: dict[tuple[str, str], list[CodecFacts]] = {}
    for one in facts.codecs:
        kinds.setdefault((one.role, one.dtype), []).append(one)
    return tuple(_codec(facts, found, situation.partition_bytes) for found in kinds.values())


def _codec(facts: Facts, found: Sequence[CodecFacts], length: int) -> CodecAdvice:
    speed = facts.drive.durable_write_bytes_per_s
    plain_s = length / speed
    times = {one.codec: encoded_s(one, length, speed, _threads(facts)) for one in found}
    best = min(found, key=lambda one: times[one.codec])
    gain = plain_s / times[best.codec]
    encode = (
        f"{best.codec} makes it {best.ratio:.2f} times smaller at {_rate(best.encode_bytes_per_s * _threads(facts))}"
    )
    if gain <= 1:
        reason = f"{encode}, the drive takes plain bytes at {_rate(speed)}: encoding would only delay it"
        return CodecAdvice(best.role, best.dtype, IDENTITY, 1.0, reason)
    reason = f"{encode}, the drive takes {_rate(speed)}: encoded it is durable in {100 / gain:.0f} % of the time"
    return CodecAdvice(best.role, best.dtype, best.codec, gain, reason)


def encoded_s(codec: CodecFacts, length: int, write_bytes_per_s: float, threads: int) -> float:
    """Return how long ``length`` plain bytes take encoded: encoding and writing overlap, the slower one counts."""
    encode_s = length / (codec.encode_bytes_per_s * threads)
    return max(encode_s, length / codec.ratio / write_bytes_per_s) + _ENCODE_OVERHEAD_S / threads


def _threads(facts: Facts) -> int:
    return max(1, facts.cores // 2)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
