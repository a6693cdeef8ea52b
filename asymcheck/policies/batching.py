"""Batched flush: how many bytes to make durable at once.

Each durable write costs a latency, so few large ones are better; but nothing is written before the first batch is
full, so small ones are better. With V bytes, L seconds of latency, chunks of s bytes that take Tc seconds each
to produce, and a drive that takes W bytes per second, batches of B bytes need

    T(B) = (V / B) · L + (B / s) · Tc + V / W,

which is least at B* = sqrt(V · L · s / Tc). All of it is measured: to adapt is to ask again with newer facts.
"""

from __future__ import annotations

import dataclasses
import math

_BLOCK_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class FlushFacts:
    """Bytes to be written, and costs of writing."""

    volume_bytes: int
    """V: bytes to write, encoded."""
    latency_s: float
    """L: what one durable write costs, however small."""
    chunk_bytes: int
    """s: bytes of one chunk, encoded."""
    chunk_s: float
    """Tc: time to produce one."""
    write_bytes_per_s: float
    """W: what the drive takes."""


def batch_bytes(facts: FlushFacts, limit_bytes: int) -> int:
    """Return the best size of a batch: a multiple of 4 KiB, at least one chunk, at most about ``limit_bytes``.

    A volume that is no larger goes in one batch of its own size. A chunk is never divided, also where it is larger
    than ``limit_bytes``.
    """
    chunk = _whole_blocks(max(facts.chunk_bytes, 1))
    most = min(limit_bytes // _BLOCK_BYTES * _BLOCK_BYTES, _whole_blocks(facts.volume_bytes))
    best = _optimum(facts)
    return max(chunk, round(best / _BLOCK_BYTES) * _BLOCK_BYTES if best < most else most)


def stream_batch_bytes(facts: FlushFacts, streams: int, least_bytes: int, limit_bytes: int) -> int:
    """Return the best size of a batch where several streams write their share, each batch a file of its own.

    Each stream writes batches of one size, so that all end together; none is smaller than ``least_bytes`` for the sake
    of that, or larger than about ``limit_bytes``.
    """
    share = math.ceil(facts.volume_bytes / streams)
    best = batch_bytes(dataclasses.replace(facts, volume_bytes=share), limit_bytes)
    best = min(max(best, least_bytes), limit_bytes)
    even = math.ceil(share / max(1, math.ceil(share / best)))
    # Rounded up by a chunk: batches are cut where a chunk ends.
    return min(even + facts.chunk_bytes, best) if even >= least_bytes else best


def flush_s(facts: FlushFacts, batch: float) -> float:
    """Return T(B): how long it takes until all is durable in batches of ``batch`` bytes."""
    # A batch is no larger than what there is.
    batch = min(batch, max(facts.volume_bytes, 1))
    waiting = batch / max(facts.chunk_bytes, 1) * facts.chunk_s
    return facts.volume_bytes / batch * facts.latency_s + waiting + facts.volume_bytes / facts.write_bytes_per_s


def _optimum(facts: FlushFacts) -> float:
    if facts.chunk_s <= 0:
        # Chunks that cost nothing to produce are all there at once.
        return math.inf
    # Two roots: the quotient of all of it may be more than a float can hold.
    return math.sqrt(facts.volume_bytes * facts.latency_s) * math.sqrt(facts.chunk_bytes / facts.chunk_s)


def _whole_blocks(count: int) -> int:
    return -(-count // _BLOCK_BYTES) * _BLOCK_BYTES
