"""Every tunable constant in one place, with its reason."""

from __future__ import annotations

import dataclasses
from typing import Literal

__version__ = "0.1.0"
WRITER = f"asymcheck {__version__}"
MIB = 1 << 20
DEFAULT_RUN = "default"
"""The run that is meant when none is named."""


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """Knobs of one opened store; the defaults suit a local NVMe drive."""

    partition_bytes: int = 4 * MIB
    """Largest piece of a tensor stored as one partition.

    Measured: 4 MiB writes 4 % faster than 8 to 32 MiB, because frames in flight stay in the cache; smaller dedupes
    better.
    """
    bundle_below_bytes: int = MIB
    """Tensors smaller than this share partitions, so that no background call handles less than about 1 MiB."""
    deferred_bytes_min: int = MIB
    """Least bytes that a plan cuts a large deferred tensor into, for one window.

    Measured: beside calls on 64 KiB an iteration of 1 ms took 503 ms, beside calls of some MiB it took 1 ms.
    """
    deferred_bytes_max: int = 32 * MIB
    """Most bytes of a deferred partition, however long the window is.

    A copy cannot be broken off, and the fence may have to wait for the last: 32 MiB take 1.3 ms at 25 GB/s. That is a
    hundred times the fixed cost of a copy, so larger ones would gain nothing; buffers have this size.
    """
    inline_bytes: int = 1024
    """Tensors of at most this many bytes stay in the manifest …"""
    inline_total_bytes: int = 256 * 1024
    """… up to this many bytes in one manifest; further ones are bundled."""
    slots: int = 4
    """Frames in flight between memory and the device; two saturate one NVMe drive, four hide a slow one."""
    pack_bytes: int = 1024 * MIB
    """A pack is closed when it has grown to this size; the next frame starts a new one."""
    pool_bytes: int = 4096 * MIB
    """Freed packs kept to be overwritten; more are unlinked."""
    catalog_map_bytes: int = 256 << 30
    """Address space of the LMDB map; sparse, so it costs nothing until used."""
    catalog_readers: int = 1024
    """LMDB reader slots: several per process, many processes."""
    lock_timeout_s: float = 60.0
    """How long to wait for another process's lock before giving up with its name."""
    read_lock_timeout_s: float = 10.0
    """How long a reader waits for a pack that collection or a writer holds."""
    commit_attempts: int = 8
    """How often a save writes partitions again that a concurrent collection took away."""


@dataclasses.dataclass(frozen=True)
class CaptureConfig:
    """Knobs of capture in the background."""

    ring_bytes: int | None = None
    """Memory for captured states, in bytes; None for twice the first state, but at most half of what is available.

    With room for two, the newest complete state stays in memory while the next one is captured.
    """
    ring_folder: str = "/dev/shm"
    """Where the ring lies: a file system in memory."""
    proof: Literal["full", "sampled", "off"] = "sampled"
    """How much is digested in ``step()`` and compared with what was captured.

    4 KiB of each of 16 partitions cost some 0.2 ms: they find what changes everything at once, and what changes one
    tensor in every step sooner or later. ``full`` finds each change at once and costs as much as a copy.
    """
    schedule: Literal["asymmetric", "symmetric", "eager"] = "asymmetric"
    """How deferred tensors are cut and released: in proportion to the gaps, evenly, or all at once in ``step()``."""
