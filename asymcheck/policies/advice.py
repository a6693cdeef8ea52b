"""Recommend sizes, interval and codecs for a store from measurements, each with a reason in one sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from asymcheck.policies.batching import FlushFacts, batch_bytes, flush_s
from asymcheck.policies.interval import span, young_s

IDENTITY = "identity"
_CAPTURES_IN_RING = 2
# Overhead of a ring: headers, padding, manifests.
_RING_SLACK = 1.02
# Python overhead of encoding a partition.
_ENCODE_OVERHEAD_S = 2e-4


@dataclasses.dataclass(frozen=True)
class CodecFacts:
    """Measurements of one codec on tensors of one role and dtype, on one thread."""

    role: str  # a role of the format, for instance ``weights``
    dtype: str
    codec: str
    sample_bytes: int  # plain bytes of the sample
    ratio: float  # plain bytes divided by payload bytes; more is better
    encode_bytes_per_s: float  # plain bytes encoded per second
    decode_bytes_per_s: float  # plain bytes decoded per second


@dataclasses.dataclass(frozen=True)
class DriveFacts:
    """Measurements of a store's drive, with direct I/O if the file system supports it."""

    write_bytes_per_s: float  # overwriting an existing file, without sync
    durable_write_bytes_per_s: float  # overwriting an existing file, with sync: the limit for recycled packs
    durable_new_bytes_per_s: float  # writing a new file, with sync: the limit for new packs
    read_bytes_per_s: float  # reading a file
    write_latency_median_s: float  # median time to write and sync one block
    write_latency_p95_s: float  # 95th percentile of that time
    flush_latency_s: float
    """Time to make one pack durable without its bytes: file, index, header, sync, rename, and idle time."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Measurements of a machine and a store."""

    cores: int  # number of processors available to this process
    ring_room_bytes: int
    """Memory for a ring: most of the free space in its folder, and at most half of the available memory."""
    copy_bytes_per_s: float  # speed of a copy in memory, one thread
    digest_bytes_per_s: float  # speed of digests, one thread
    drive: DriveFacts
    codecs: tuple[CodecFacts, ...]  # measurements of encoding, by role, dtype and codec
    sample: str  # data that the codecs were measured on
    state_bytes: int | None  # tensor bytes of the newest checkpoint; None without a checkpoint
    device: str | None  # accelerator whose copies were measured; None without an accelerator
    device_copy_bytes_per_s: float | None
    """Speed of copies from the accelerator to pinned memory; None without an accelerator."""
    written_bytes: int  # bytes that the measurement wrote to the drive, and removed
    took_s: float  # duration of the measurement


@dataclasses.dataclass(frozen=True)
class Situation:
    """Requirements of the training, in addition to the measurements."""

    state_bytes: int  # tensor bytes of one checkpoint
    mtbf_s: float  # mean time between failures
    partition_bytes: int  # maximum size of a partition
    pack_bytes: int  # configured maximum size of a pack
    pack_limit_bytes: int  # largest possible value of this setting


@dataclasses.dataclass(frozen=True)
class BatchAdvice:
    """Recommended size of packs."""

    pack_bytes: int  # for ``StoreConfig(pack_bytes=...)``
    flush_s: float  # predicted time until a checkpoint is durable with this size
    present_flush_s: float  # predicted time with the configured size
    reason: str


@dataclasses.dataclass(frozen=True)
class StallAdvice:
    """Predicted stall of the training per checkpoint."""

    stall_s: float  # upper bound, if no copy overlaps with forward and backward
    reason: str


@dataclasses.dataclass(frozen=True)
class IntervalAdvice:
    """Recommended checkpoint interval."""

    interval_s: float  # seconds from one checkpoint to the next
    mtbf_s: float  # assumed mean time between failures
    lost_share: float  # fraction of the training time lost to stalls and repeated work, without restarts
    reason: str


@dataclasses.dataclass(frozen=True)
class RingAdvice:
    """Recommended size of the ring."""

    ring_bytes: int  # for ``CaptureConfig(ring_bytes=...)``; limited by the available memory
    wanted_bytes: int  # size of two states: the newest complete one stays while the next is captured
    room_bytes: int  # memory available for a ring
    reason: str


@dataclasses.dataclass(frozen=True)
class CodecAdvice:
    """Recommended codec for one role and dtype."""

    role: str
    dtype: str
    codec: str  # name of the codec; ``identity`` if encoding does not pay
    gain: float  # time to write plain bytes divided by time to encode and write; 1 for ``identity``
    reason: str


@dataclasses.dataclass(frozen=True)
class Advice:
    """Recommended configuration."""

    situation: Situation
    batch: BatchAdvice
    stall: StallAdvice
    interval: IntervalAdvice
    ring: RingAdvice
    codecs: tuple[CodecAdvice, ...]  # recommended codecs, by role and dtype


def advise(facts: Facts, situation: Situation) -> Advice:
    """Return recommendations for the measurements."""
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
    """Return the parameters of batching for a save that copies, hashes and writes partition by partition."""
    chunk = min(situation.partition_bytes, max(situation.state_bytes, 1))
    # Copies use half of the cores; with more, memory bandwidth is the limit.
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
    reason = f"copies {source} run at {rate(speed)}; those that overlap with forward and backward do not stall training"
    return StallAdvice(situation.state_bytes / speed, reason)


def _interval(situation: Situation, stall_s: float, durable_s: float) -> IntervalAdvice:
    best = young_s(stall_s, situation.mtbf_s)
    interval = max(best, durable_s)
    lost = stall_s / interval + (interval / 2 + durable_s) / situation.mtbf_s
    if best >= durable_s:
        reason = "the loss is least if stalls take as much time as repeated work (Young)"
    else:
        reason = "stalls would permit a shorter interval, but the drive needs this time to write a checkpoint"
    return IntervalAdvice(interval, situation.mtbf_s, lost, reason)


def _ring(facts: Facts, situation: Situation) -> RingAdvice:
    capture_bytes = math.ceil(situation.state_bytes * _RING_SLACK)
    wanted, room = _CAPTURES_IN_RING * capture_bytes, facts.ring_room_bytes
    if room >= wanted:
        reason = "memory suffices for two states: the newest complete one stays while the next is captured"
    elif room >= capture_bytes:
        reason = "memory suffices for one state only: during a capture, memory holds no complete state"
    else:
        reason = "memory is too small for one state: checkpoints are streamed, and none can be recovered from memory"
    return RingAdvice(min(wanted, room), wanted, room, reason)


def _codecs(facts: Facts, situation: Situation) -> tuple[CodecAdvice, ...]:
    kinds: dict[tuple[str, str], list[CodecFacts]] = {}
    for codec in facts.codecs:
        kinds.setdefault((codec.role, codec.dtype), []).append(codec)
    return tuple(_codec(facts, codecs, situation.partition_bytes) for codecs in kinds.values())


def _codec(facts: Facts, codecs: Sequence[CodecFacts], length: int) -> CodecAdvice:
    speed = facts.drive.durable_write_bytes_per_s
    plain_s = length / speed
    times = {codec.codec: encoded_s(codec, length, speed, _threads(facts)) for codec in codecs}
    best = min(codecs, key=lambda codec: times[codec.codec])
    gain = plain_s / times[best.codec]
    encode = (
        f"{best.codec} makes it {best.ratio:.2f} times smaller at {rate(best.encode_bytes_per_s * _threads(facts))}"
    )
    if gain <= 1:
        reason = f"{encode}, the drive takes plain bytes at {rate(speed)}: encoding would only delay it"
        return CodecAdvice(best.role, best.dtype, IDENTITY, 1.0, reason)
    reason = f"{encode}, the drive takes {rate(speed)}: encoded it is durable in {100 / gain:.0f} % of the time"
    return CodecAdvice(best.role, best.dtype, best.codec, gain, reason)


def encoded_s(codec: CodecFacts, length: int, write_bytes_per_s: float, threads: int) -> float:
    """Return the seconds to encode and write ``length`` plain bytes. Both overlap, so the slower one counts."""
    encode_s = length / (codec.encode_bytes_per_s * threads)
    return max(encode_s, length / codec.ratio / write_bytes_per_s) + _ENCODE_OVERHEAD_S / threads


def _threads(facts: Facts) -> int:
    return max(1, facts.cores // 2)


def rate(bytes_per_s: float) -> str:
    """Format a speed, for instance ``1.5 GB/s``."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"
