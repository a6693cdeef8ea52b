"""Ring size: how large a ring is that nobody gave a size, and how finely a state is cut that has to go through it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

from asymcheck.config import StoreConfig
from asymcheck.format import registry
from asymcheck.tiers.available import available_bytes

ROOM_FOR_CAPTURES = 2
# Manifests, and what is lost between frames of different lengths.
_SLACK = 1.05
_SLACK_BYTES = 4 << 20
_LEAST_BYTES = 4 * registry.BLOCK_BYTES


def default_bytes(folder: Path, needed: int, freed: int = 0, processes: int = 1) -> int:
    """Return room for two captures, but no more than half of the memory that is available when ``freed`` is.

    Of that as large a part as that many ``processes`` can have that make one at the same time.
    """
    wanted = int(needed * _SLACK * ROOM_FOR_CAPTURES) + _SLACK_BYTES
    return max(min([wanted, *_limits(folder, freed, processes)]), _LEAST_BYTES)


def _limits(folder: Path, freed: int, processes: int) -> list[int]:
    limits = []
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        limits.append((status.f_bavail * status.f_frsize // processes + freed) * 9 // 10)
    available = available_bytes()
    if available is not None:
        limits.append((available // processes + freed) // 2)
    return limits


def cut_for_ring(config: StoreConfig, ring_bytes: int | None, folder: Path, processes: int) -> StoreConfig:
    """Return a configuration whose deferred partitions go through a ring, one being copied while another is written.

    ``ring_bytes`` is None for one that gets its size by itself. In powers of two: what is available differs from start
    to start, and whoever cuts as before writes less.
    """
    limits = _limits(folder, 0, processes) if ring_bytes is None else [ring_bytes]
    if not limits:
        return config
    half = max(min(limits) // 2 - registry.BLOCK_BYTES, _LEAST_BYTES)
    most = 1 << half.bit_length() - 1
    if most >= config.deferred_bytes_max:
        return config
    least = min(config.deferred_bytes_min, most // 4)
    return dataclasses.replace(config, deferred_bytes_max=most, deferred_bytes_min=least)
