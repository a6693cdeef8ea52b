"""Batched flush: choose how many bytes to make durable at once.

Each durable write has a latency, which favours few large batches. The drive idles until the first batch is full, which
favours small ones. V bytes are written in batches of B bytes to a drive with L seconds of latency and W bytes per
second. Chunks of s bytes take Tc seconds each to produce. The flush takes

    T(B) = (V / B) · L + (B / s) · Tc + V / W,

with a minimum at B* = sqrt(V · L · s / Tc). All parameters are measured.
"""

from __future__ import annotations

import dataclasses
import math

_BLOCK_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class FlushFacts:
    """Bytes to write, and costs of writing."""

    volume_bytes: int  # V: bytes to write, encoded
    latency_s: float  # L: time of a durable write without its bytes
    chunk_bytes: int  # s: bytes of one chunk, encoded
    chunk_s: float  # Tc: time to produce one chunk
    write_bytes_per_s: float  # W: write speed of the drive


def batch_bytes(facts: FlushFacts, limit_bytes: int) -> int:
    """Return the best size of a batch: a multiple of 4 KiB, at least one chunk, at most about ``limit_bytes``.

    A smaller volume is one batch. A chunk is never divided, even if it is larger than ``limit_bytes``.
    """
    chunk = _whole_blocks(max(facts.chunk_bytes, 1))
    largest = min(limit_bytes // _BLOCK_BYTES * _BLOCK_BYTES, _whole_blocks(facts.volume_bytes))
    best = _optimum(facts)
    return max(chunk, round(best / _BLOCK_BYTES) * _BLOCK_BYTES if best < largest else largest)


def stream_batch_bytes(facts: FlushFacts, streams: int, least_bytes: int, limit_bytes: int) -> int:
    """Return the best batch size for several streams, each of which writes its share in files of one batch.

    All batches have one size, so that the streams end together. The size is at least ``least_bytes``, unless the volume
    is smaller, and at most about ``limit_bytes``.
    """
    share = math.ceil(facts.volume_bytes / streams)
    best = batch_bytes(dataclasses.replace(facts, volume_bytes=share), limit_bytes)
    best = min(max(best, least_bytes), limit_bytes)
    even = math.ceil(share / max(1, math.ceil(share / best)))
    # One chunk more, because batches end at chunk boundaries.
    return min(even + facts.chunk_bytes, best) if even >= least_bytes else best


def flush_s(facts: FlushFacts, batch: float) -> float:
    """Return T(B), the seconds until everything is durable in batches of ``batch`` bytes."""
    batch = min(batch, max(facts.volume_bytes, 1))
    waiting = batch / max(facts.chunk_bytes, 1) * facts.chunk_s
    return facts.volume_bytes / batch * facts.latency_s + waiting + facts.volume_bytes / facts.write_bytes_per_s


def _optimum(facts: FlushFacts) -> float:
    if facts.chunk_s <= 0:
        # All chunks are available at once.
        return math.inf
    # Two square roots, because the whole quotient may overflow a float.
    return math.sqrt(facts.volume_bytes * facts.latency_s) * math.sqrt(facts.chunk_bytes / facts.chunk_s)


def _whole_blocks(count: int) -> int:
    return -(-count // _BLOCK_BYTES) * _BLOCK_BYTES
