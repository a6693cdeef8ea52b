"""Every tunable constant in one place, with its reason."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

__version__ = "0.1.0"
WRITER = f"asymcheck {__version__}"
MIB = 1 << 20
DEFAULT_RUN = "default"
"""The run that is meant when none is named."""


RING_FOLDER_VARIABLE = "ASYMCHECK_RING_FOLDER"
RING_FOLDER = "/dev/shm"
"""Where rings are stored unless that variable of the environment, or the program, names another folder."""

Compression = Literal["auto", "smallest", "off"]
COMPRESSIONS: tuple[Compression, ...] = ("auto", "smallest", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """Knobs of a remote location: HDFS, a shared file system, or what else pyarrow has a file system for."""

    client: Literal["hdfs-native", "libhdfs"] | None = None
    """Client for ``hdfs://``; None takes hdfs-native if it is installed, else libhdfs."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Settings of that client, for instance ``{"dfs.replication": "2"}``; those in the location's query come later."""
    deadline_s: float = 60.0
    """How long one operation may take, a read in all its attempts.

    One of writing or reading moves at most ``piece_bytes``.
    """
    attempts: int = 3
    """How often the upload of a file is begun, each time under a new temporary name; how often a read is tried."""
    retry_s: float = 1.0
    """Pause before the second attempt when there was no answer; before each later one twice as long.

    A DataNode that has died is given out for new files until the NameNode has noticed. All attempts of a read end in
    ``deadline_s``; each but the last has half of what is left of it.
    """
    pack_bytes: int = 256 * MIB
    """A pack is closed when it has grown to about this size: few large files are what HDFS likes."""
    compression: Compression = "auto"
    """Whether what lies plain in the store is encoded, without loss, on its way there.

    ``auto`` encodes what is then there sooner, by what the location takes as measured by use; ``smallest`` whatever
    becomes smaller; ``off`` sends everything as it lies.
    """
    encoded_bytes: int = 512 * MIB
    """Memory for what was encoded and is not sent yet; packs are cut smaller where it asks for that."""
    uploads: int = 4
    """Packs that are written at the same time; as many more may wait for HDFS to complete them, up to half a second.

    Measured on one DataNode, packs of 100 MiB, when none was completed beside others yet: 4 send at 0.72 to 0.87 of
    the client's own speed, 2 at 0.5 to 0.73.
    """
    reads: int = 6
    """Pieces that are read ahead at the same time."""
    piece_bytes: int = 8 * MIB + (64 << 10)
    """Neighbouring frames are read together up to this size, and written in pieces of it.

    Two full partitions with what frames add. With 16 MiB a push took a quarter more processor time.
    """
    gap_bytes: int = MIB
    """Frames that are not wanted are read over when they are no longer than this."""
    bytes_per_s: int | None = None
    """Most bytes that a push sends in a second; None for as many as go."""
    read_back: bool = False
    """Whether all of a pack is read again before it gets its name; else length, header and index."""
    grace_s: float = 86_400.0
    """Collection leaves alone what is younger: it may belong to an upload that is under way."""


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """Knobs of one opened store; the defaults suit a local NVMe drive."""

    partition_bytes: int = 4 * MIB
    """Largest piece of a tensor stored as one partition; what is copied beside a training has ``deferred_bytes_max``.

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
    compression: Compression = "auto"
    """Whether partitions are encoded, without loss, before they are written.

    ``auto`` encodes what is then stored sooner, by measured speeds; on a local NVMe drive that is seldom anything.
    ``smallest`` encodes whatever becomes smaller: weights and optimizer state by a sixth to a third, at about 1 GB/s
    a core.
    """
    slots: int = 4
    """Frames in flight between memory and the device; two saturate one NVMe drive, four hide a slow one."""
    pack_bytes: int = 1024 * MIB
    """A pack is closed when it has grown to this size; the next frame starts a new one."""
    pool_bytes: int = 4096 * MIB
    """Freed packs kept to be overwritten; more are unlinked."""
    repack_waste: float = 0.5
    """Collection copies what is still needed of a pack of which more than this part is garbage; 1 for never.

    At a half, what it copies is never more than what it frees.
    """
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
    remote: RemoteConfig = RemoteConfig()
    """Knobs of the remote locations that the store is pushed to, pulled from, or read in."""


def ring_folder_of(given: str | os.PathLike[str] | None) -> Path:
    """Return the folder of rings: ``given``, or what ``ASYMCHECK_RING_FOLDER`` names now, or ``/dev/shm``."""
    return Path(given if given is not None else os.environ.get(RING_FOLDER_VARIABLE) or RING_FOLDER)


@dataclasses.dataclass(frozen=True)
class CaptureConfig:
    """Knobs of capture in the background."""

    ring_bytes: int | None = None
    """Memory for captured states, in bytes; None for twice the state, but at most half of what is available.

    A state that has grown, as by the first step of its optimizers, gets a new ring, when all before it is durable.
    With room for two, the newest complete state stays in memory while the next one is captured.
    """
    ring_folder: str = dataclasses.field(default_factory=lambda: str(ring_folder_of(None)))
    """Where the ring lies: a file system in memory; ``ASYMCHECK_RING_FOLDER`` in the environment names another."""
    proof: Literal["full", "sampled", "off"] = "sampled"
    """How much is digested in ``step()`` and compared with the captured bytes.

    ``sampled`` digests all bytes of the first two captures. Later captures digest a sixteenth of the tensors in host
    memory, and samples of 64 KiB of the tensors on devices. Version counters and addresses of all tensors are compared,
    too. Tensors that have changed are copied inside ``step()`` from then on. ``full`` digests everything in each
    capture. ``off`` compares nothing.
    """
    schedule: Literal["asymmetric", "symmetric", "eager"] = "asymmetric"
    """How deferred tensors are cut and released: in proportion to the gaps, evenly, or all at once in ``step()``."""
    staging_bytes: int = 256 * MIB
    """Memory taken on each GPU for tensors that may change before they are copied, and for copies that come late.

    If the memory is full, tensors are copied before ``step()`` returns, or the next optimizer step waits.
    """
