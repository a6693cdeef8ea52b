"""Moves: what a policy decides, and an executor carries out, for every pair of tiers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from asymcheck.types import Digest

Tier = Literal["gpu", "dram", "nvme", "hdfs"]


@dataclasses.dataclass(frozen=True)
class Move:
    """Partitions that go from one tier to another."""

    digests: tuple[Digest, ...]
    """Which ones."""
    source: Tier
    """Where they are read."""
    target: Tier
    """Where they are to lie, too."""
    codec: int
    """Number of the codec in which they are stored there."""
    why: str
    """The reason for the codec, for people."""
