"""Selective compression: whether a partition is encoded on its way to a slower tier. Lossless, and by measured facts.

AsymCheck compresses what is large by constants; here the rule is: encode only what is then stored sooner,
``T_encode + stored / W + overhead < plain / W``, with the speed and ratio of a sample, and W as measured by use. Both
speeds are those of one thread, which encodes a partition and then writes it, beside others that do the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from asymcheck.config import COMPRESSIONS, Compression
from asymcheck.errors import InvalidInputError
from asymcheck.format.registry import CODEC_DELTA, CODEC_DERIVED, CODEC_IDENTITY

WORTH_RATIO = 1.02
"""Least ratio of plain to stored bytes. A partition that would shrink by less than 2 % is stored as it is."""
_OVERHEAD = 0.05
"""Part of the time that the bookkeeping of an encoded partition takes."""


@dataclasses.dataclass(frozen=True)
class EncodingSample:
    """Results of encoding partitions of one kind."""

    ratio: float
    """Plain bytes over stored bytes."""
    bytes_per_s: float
    """Plain bytes that one thread encodes in a second."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A codec, and why."""

    codec: int
    why: str
    """One sentence without a full stop."""


def choose(mode: Compression, sampled: Mapping[int, EncodingSample], link_bytes_per_s: float | None) -> Choice:
    """Choose the codec for partitions of a kind.

    Args:
        mode: ``off`` encodes nothing, ``smallest`` whatever becomes smaller, ``auto`` what is stored sooner so.
        sampled: ratio and speed of the codecs that can be had, by number.
        link_bytes_per_s: what one thread writes to the target; None while that is not known.
    """
    if mode not in COMPRESSIONS:
        raise InvalidInputError(f"compression {mode!r}: give {', '.join(map(repr, COMPRESSIONS))}")
    if mode == "off":
        return Choice(CODEC_IDENTITY, "compression is off")
    if mode == "auto" and link_bytes_per_s is None:
        return Choice(CODEC_IDENTITY, "the speed of the target is not known yet")
    sampled = {codec: found for codec, found in sampled.items() if found.ratio >= WORTH_RATIO}
    if not sampled:
        return Choice(CODEC_IDENTITY, "a sample did not become smaller")
    link = math.inf if link_bytes_per_s is None else link_bytes_per_s
    if mode == "smallest":
        # What needs a base on reading has to be smaller by more than a little.
        best = max(sampled, key=lambda codec: sampled[codec].ratio / (WORTH_RATIO if codec == CODEC_DELTA else 1))
        if best == CODEC_DERIVED:
            return Choice(best, "another tensor rounds to it")
        return Choice(best, f"a sample became {sampled[best].ratio:.2f} times smaller")
    best = min(sampled, key=lambda codec: _seconds(sampled[codec], link))
    found = sampled[best]
    size = "another tensor rounds to it," if best == CODEC_DERIVED else f"{found.ratio:.2f} times smaller"
    facts = f"{size} at {found.bytes_per_s / 1e9:.2f} GB/s"
    if _seconds(found, link) < 1 / link:
        return Choice(best, f"{facts}, while the target takes {link / 1e9:.2f} GB/s")
    return Choice(CODEC_IDENTITY, f"the target takes {link / 1e9:.2f} GB/s, sooner than {facts}")


def _seconds(sampled: EncodingSample, link_bytes_per_s: float) -> float:
    """Seconds for a byte."""
    return (1 / sampled.bytes_per_s + 1 / (sampled.ratio * link_bytes_per_s)) * (1 + _OVERHEAD)
