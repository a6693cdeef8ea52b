"""Selective compression: decide by measurements whether to encode a partition for a slower tier. Lossless.

AsymCheck compresses large tensors by fixed constants. Here, a partition is encoded only if it is stored sooner:
``T_encode + stored / W + overhead < plain / W``, with speed and ratio of a sample, and the measured write speed W. Both
speeds are those of one of several threads, each of which encodes a partition and then writes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from asymcheck.config import Compression
from asymcheck.format.registry import CODEC_DELTA, CODEC_DERIVED, CODEC_IDENTITY

WORTH_RATIO = 1.02
"""Minimum ratio of plain to stored bytes. A partition that would shrink by less than 2 % is stored plain."""
_OVERHEAD = 0.05
"""Fraction of time for the bookkeeping of an encoded partition."""


@dataclasses.dataclass(frozen=True)
class EncodingSample:
    """Results of encoding partitions of one kind."""

    ratio: float  # plain bytes over stored bytes
    bytes_per_s: float  # plain bytes that one thread encodes per second


@dataclasses.dataclass(frozen=True)
class Choice:
    """A codec and the reason for it."""

    codec: int
    why: str  # one sentence without a full stop


def choose_codec(mode: Compression, sampled: Mapping[int, EncodingSample], link_bytes_per_s: float | None) -> Choice:
    """Choose the codec for partitions of a kind.

    Args:
        mode: ``off`` encodes nothing, ``smallest`` encodes if it saves bytes, ``auto`` if it saves time.
        sampled: ratio and speed of the available codecs, by number.
        link_bytes_per_s: write speed of one thread to the target; None if unknown.
    """
    if mode == "off":
        return Choice(CODEC_IDENTITY, "compression is off")
    if mode == "auto" and link_bytes_per_s is None:
        return Choice(CODEC_IDENTITY, "the speed of the target is not known yet")
    sampled = {codec: sample for codec, sample in sampled.items() if sample.ratio >= WORTH_RATIO}
    if not sampled:
        return Choice(CODEC_IDENTITY, "a sample did not become smaller")
    link = math.inf if link_bytes_per_s is None else link_bytes_per_s
    if mode == "smallest":
        # A delta also costs reading its base, so it must save more.
        best = max(sampled, key=lambda codec: sampled[codec].ratio / (WORTH_RATIO if codec == CODEC_DELTA else 1))
        if best == CODEC_DERIVED:
            return Choice(best, "another tensor rounds to it")
        return Choice(best, f"a sample became {sampled[best].ratio:.2f} times smaller")
    best = min(sampled, key=lambda codec: _seconds(sampled[codec], link))
    sample = sampled[best]
    size = "another tensor rounds to it," if best == CODEC_DERIVED else f"{sample.ratio:.2f} times smaller"
    facts = f"{size} at {sample.bytes_per_s / 1e9:.2f} GB/s"
    if _seconds(sample, link) < 1 / link:
        return Choice(best, f"{facts}, while the target takes {link / 1e9:.2f} GB/s")
    return Choice(CODEC_IDENTITY, f"the target takes {link / 1e9:.2f} GB/s, sooner than {facts}")


def _seconds(sampled: EncodingSample, link_bytes_per_s: float) -> float:
    """Return the seconds per plain byte."""
    return (1 / sampled.bytes_per_s + 1 / (sampled.ratio * link_bytes_per_s)) * (1 + _OVERHEAD)
