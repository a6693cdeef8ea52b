"""Configuration: all tunable values with their defaults and reasons."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args

from asymcheck.errors import InvalidInputError
from asymcheck.format import registry

__version__ = "0.1.0"
WRITER = f"asymcheck {__version__}"
MIB = 1 << 20
DEFAULT_RUN = "default"
"""Default name of a run."""
PARTIAL_RUN = "partial"
"""Default name of the run for copies of some tensors."""


RING_FOLDER_VARIABLE = "ASYMCHECK_RING_FOLDER"
RING_FOLDER = "/dev/shm"
"""Default folder of rings, unless the environment variable or the program names another."""

Compression = Literal["auto", "smallest", "off"]
Proof = Literal["full", "sampled", "off"]
Schedule = Literal["immediate", "asymmetric", "symmetric", "eager"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)

CATALOG_READERS_MAX = 1 << 20
"""Maximum of :attr:`StoreConfig.catalog_readers`."""

_INDEX_ENTRY_BYTES = 64
"""Size of an entry of a pack index [B], as in SPEC.md §A7."""
# Half of the capacity of a pack index if every frame has one block.
_PACK_BYTES_MAX = registry.PACK_INDEX_BYTES_MAX // _INDEX_ENTRY_BYTES * registry.BLOCK_BYTES // 2

_T = TypeVar("_T")
Limits = Mapping[str, tuple[float, float]]
"""Minimum and maximum of the numbers of a configuration. A field whose minimum is an integer takes only integers."""
SECONDS = (0.0, threading.TIMEOUT_MAX)
"""Limits of a time that a thread can wait [s]."""
_STORE_LIMITS: Limits = {
    "partition_bytes": (registry.BLOCK_BYTES, registry.PARTITION_BYTES_MAX),
    "bundle_below_bytes": (0, registry.PARTITION_BYTES_MAX),
    "deferred_bytes_min": (registry.BLOCK_BYTES, registry.PARTITION_BYTES_MAX // 2),
    "deferred_bytes_max": (2 * registry.BLOCK_BYTES, registry.PARTITION_BYTES_MAX),
    "inline_bytes": (0, registry.INLINE_BYTES_MAX),
    "inline_total_bytes": (0, registry.MANIFEST_BYTES_MAX // 4),
    "slots": (1, 1024),
    "pack_bytes": (1, _PACK_BYTES_MAX),
    "pool_bytes": (0, math.inf),
    "repack_waste": (0.0, 1),
    "catalog_map_bytes": (MIB, 1 << 46),
    "catalog_readers": (1, CATALOG_READERS_MAX),
    "lock_timeout_s": SECONDS,
    "read_lock_timeout_s": (0.0, math.inf),
    "commit_attempts": (1, math.inf),
}
_REMOTE_LIMITS: Limits = {
    "attempts": (1, 1000),
    "pack_bytes": (1, 1 << 40),
    "encoded_bytes": (1, 1 << 40),
    "uploads": (1, 256),
    "reads": (1, 256),
    "piece_bytes": (registry.BLOCK_BYTES, 1 << 30),
    "gap_bytes": (0, 1 << 30),
    "deadline_s": (1e-3, threading.TIMEOUT_MAX),
    "grace_s": (0.0, 1e12),
    "retry_s": SECONDS,
    "lease_s": (0.1, 86_400),
    "bytes_per_s": (1, math.inf),
}
_CAPTURE_LIMITS: Limits = {
    "ring_bytes": (1, 1 << 46),  # at most the size of a file that a process can map
    "staging_bytes": (0, 1 << 46),
}


def check_number(name: str, value: object, least: float, most: float, *, or_none: bool = False) -> None:
    """Raise InvalidInputError for a number outside its limits. With an integer ``least``, a float is refused, too."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    if is_number and not (isinstance(value, float) and isinstance(least, int)):
        return
    kind = "an integer" if isinstance(least, int) else "a number"
    limits = f"from {least} to {most}" if math.isfinite(most) else f"of at least {least}"
    raise InvalidInputError(f"{name} {value!r:.100}: give {kind} {limits}{', or None' if or_none else ''}")


def check_numbers(options: object, limits: Limits) -> None:
    """Check the numbers of a configuration. A field may be None if its annotation says so."""
    annotations = inspect.get_annotations(type(options))
    for name, (least, most) in limits.items():
        value, or_none = getattr(options, name), "None" in str(annotations[name])
        if value is not None or not or_none:
            check_number(name, value, least, most, or_none=or_none)


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return one of ``choices``, or raise InvalidInputError."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInputError(f"{name} {value!r:.100}: give {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")
    return value


def check_type(name: str, value: object, kind: type[_T]) -> _T:
    """Return a value of the public type ``kind``, or raise InvalidInputError."""
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name}={value!r:.100}: give asymcheck.{kind.__name__}(…)")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """Configuration of a remote location: HDFS, an object store, a shared file system, or a file system of pyarrow."""

    client: Literal["hdfs-native", "libhdfs"] | None = None
    """Client for ``hdfs://``; None selects hdfs-native if it is installed, else libhdfs."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Client settings, for instance ``{"dfs.replication": "2"}``. Settings in the query of the URI override them."""
    deadline_s: float = 60.0
    """Timeout of one operation [s]; for a read, of all its attempts together.

    A write or read operation transfers at most ``piece_bytes``.
    """
    attempts: int = 3
    """Attempts to upload a file, each under a new temporary name, and attempts of a read."""
    retry_s: float = 1.0
    """Pause before the second attempt [s]; it doubles for each further attempt.

    The NameNode assigns a dead DataNode to new files until it detects the failure. All attempts of a read must end
    within ``deadline_s``; each attempt except the last may take half of the remaining time.
    """
    pack_bytes: int = 256 * MIB
    """Approximate size at which a pack is closed: HDFS works best with few large files.

    In an object store, a pack has at most 48 MiB.
    """
    compression: Compression = "auto"
    """Lossless compression of plain partitions during a push.

    ``auto`` encodes a partition if that makes the transfer faster, by the measured throughput of the location.
    ``smallest`` encodes each partition that becomes smaller. ``off`` sends partitions as they are stored.
    """
    encoded_bytes: int = 512 * MIB
    """Memory for encoded partitions that wait to be sent. If it is full, packs are closed early."""
    uploads: int = 4
    """Packs that are uploaded at the same time. As many more may wait until HDFS has completed them.

    Measured with one DataNode and packs of 100 MiB: 4 uploads reach 0.72 to 0.87 of the client's own throughput, 2
    uploads 0.5 to 0.73.
    """
    reads: int = 6
    """Pieces that are prefetched at the same time."""
    piece_bytes: int = 8 * MIB + (64 << 10)
    """Maximum size of a read of neighbouring frames, and size of a write.

    Two full partitions with their frame headers. With 16 MiB, a push took 25 % more processor time.
    """
    gap_bytes: int = MIB
    """Maximum size of unneeded frames that are read along between needed ones."""
    bytes_per_s: int | None = None
    """Limit of the upload rate [B/s]; None for no limit."""
    read_back: bool = False
    """Whether an uploaded pack is read back completely before its rename; otherwise length, header and index are."""
    grace_s: float = 86_400.0
    """Minimum age of garbage that is collected [s]: younger files may belong to an upload in progress."""
    lease_s: float = 30.0
    """Time after which a silent training on another machine counts as dead [s]; give all machines the same.

    ``Checkpointer(push=…)`` holds a lease of its run at the location, and renews it three times as often. A training
    that finds the lease of another one waits for up to this time at its start.
    """

    def __post_init__(self) -> None:
        """Raise InvalidInputError, naming the field, if a remote location cannot work with a value."""
        options: object = self.options
        words = [word for item in options.items() for word in item] if isinstance(options, Mapping) else [options]
        if not all(isinstance(word, str) for word in words):
            raise InvalidInputError(f"options {self.options!r:.100}: give a mapping of strings to strings")
        check_numbers(self, _REMOTE_LIMITS)
        check_choice("compression", self.compression, COMPRESSIONS)
        if self.client is not None:
            check_choice("client", self.client, ("hdfs-native", "libhdfs"))


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """Configuration of one open store. The defaults suit a local NVMe drive."""

    partition_bytes: int = 4 * MIB
    """Maximum size of a partition in a synchronous save; background saves use ``deferred_bytes_max``.

    Measured: 4 MiB writes 4 % faster than 8 to 32 MiB, because frames in flight stay in the cache. Smaller partitions
    deduplicate better.
    """
    bundle_below_bytes: int = MIB
    """Tensors smaller than this share a partition, so that each background copy handles about 1 MiB or more."""
    deferred_bytes_min: int = MIB
    """Minimum size of a partition of a large deferred tensor.

    Measured: during copies of 64 KiB, an iteration of 1 ms took 503 ms; during copies of some MiB it took 1 ms.
    """
    deferred_bytes_max: int = 32 * MIB
    """Maximum size of a deferred partition, for windows of any length. Buffers have this size.

    A copy cannot be interrupted, and the fence may have to wait for the last one: 32 MiB take 1.3 ms at 25 GB/s. That
    is a hundred times the fixed cost of a copy, so larger partitions would gain nothing.
    """
    inline_bytes: int = 1024
    """Maximum size of a tensor that is stored in the manifest."""
    inline_total_bytes: int = 256 * 1024
    """Maximum total size of such tensors in one manifest; further ones are bundled into partitions."""
    compression: Compression = "auto"
    """Lossless compression of partitions before they are written.

    ``auto`` encodes a partition if that makes the save faster, by measured throughput; on a local NVMe drive that is
    rare. ``smallest`` encodes each partition that becomes smaller: weights and optimizer state shrink by a sixth to a
    third, at about 1 GB/s per core.
    """
    slots: int = 8
    """Maximum number of frames in flight between memory and drive.

    Measured: 8 of 4 MiB write 8 % faster than 4. Larger ones are fewer: together at most 128 MiB, or two.
    """
    pack_bytes: int = 1024 * MIB
    """Size at which a pack is closed; the next frame starts a new pack."""
    pool_bytes: int | None = None
    """Maximum size of the pool of freed packs, which later saves overwrite; further ones are deleted.

    None for the size of one checkpoint: the mean size of the checkpoints in the store, and a quarter more.
    """
    repack_waste: float = 0.5
    """Share of garbage above which garbage collection repacks a pack; 1 disables repacking.

    With one half, repacking never copies more than it frees.
    """
    catalog_map_bytes: int = 256 << 30
    """Address space of the LMDB map. The file is sparse, so unused space is free."""
    catalog_readers: int = 1024
    """LMDB reader slots; a process needs several."""
    lock_timeout_s: float = 60.0
    """Time to wait for a lock of another process [s]; the error then names the process."""
    read_lock_timeout_s: float = 10.0
    """Time that a reader waits for a pack locked by garbage collection or a writer [s]."""
    commit_attempts: int = 8
    """Attempts of a save to rewrite partitions that a concurrent garbage collection removed."""
    remote: RemoteConfig = RemoteConfig()
    """Configuration of remote locations for push, pull and reads."""

    def __post_init__(self) -> None:
        """Raise InvalidInputError, naming the field, if a store cannot work with a value."""
        check_numbers(self, _STORE_LIMITS)
        check_choice("compression", self.compression, COMPRESSIONS)
        for name in ("partition_bytes", "deferred_bytes_min", "deferred_bytes_max"):
            if getattr(self, name) % registry.BLOCK_BYTES:
                raise InvalidInputError(f"{name} {getattr(self, name)}: give a multiple of {registry.BLOCK_BYTES}")
        if self.deferred_bytes_max < 2 * self.deferred_bytes_min:
            # Otherwise a size could be too large for one partition and too small for two.
            raise InvalidInputError(
                f"deferred_bytes_max {self.deferred_bytes_max}: give at least twice deferred_bytes_min, "
                f"{self.deferred_bytes_min}"
            )
        if self.bundle_below_bytes > self.partition_bytes:
            raise InvalidInputError(
                f"bundle_below_bytes {self.bundle_below_bytes}: give at most partition_bytes, {self.partition_bytes}"
            )
        if not isinstance(self.remote, RemoteConfig):
            raise InvalidInputError(
                f"remote {self.remote!r:.100}: give asymcheck.RemoteConfig(…); pass a URI as Store.open(…, remote=…)"
            )


def ring_folder_of(given: str | os.PathLike[str] | None) -> Path:
    """Return the folder of rings: ``given``, else the value of ``ASYMCHECK_RING_FOLDER``, else ``/dev/shm``."""
    return Path(given if given is not None else os.environ.get(RING_FOLDER_VARIABLE) or RING_FOLDER)


@dataclasses.dataclass(frozen=True)
class CaptureConfig:
    """Configuration of background captures."""

    ring_bytes: int | None = None
    """Memory for captured states [B]; None for twice the state, but at most half of the available memory.

    If the state grows, for instance by the first optimizer step, a new ring is created once all earlier captures are
    durable. With space for two states, the newest complete state stays in memory while the next one is captured.
    """
    ring_folder: str = dataclasses.field(default_factory=lambda: str(ring_folder_of(None)))
    """Folder of the ring, in a file system in memory; ``ASYMCHECK_RING_FOLDER`` in the environment sets the default."""
    proof: Proof = "sampled"
    """How much of the source is digested in ``step()`` and compared with the captured bytes, to detect torn captures.

    ``sampled`` digests all bytes of the first two captures, and a sixteenth in later ones. A device computes checksums
    instead. Version counters and addresses of all tensors are compared, too. Tensors that have changed are copied
    inside ``step()`` from then on. ``full`` digests everything in each capture. ``off`` compares nothing.
    """
    schedule: Schedule = "immediate"
    """When to copy the tensors that only an optimizer changes.

    ``immediate`` begins all copies when ``step()`` returns. ``asymmetric`` (AsymCheck) spreads them over the forward
    and backward passes of the next iteration, in proportion to the measured times of the modules, and ``symmetric``
    evenly.
    ``eager`` copies inside ``step()``.
    """
    deferred: tuple[str, ...] = ()
    """Globs for names of tensors that no optimizer owns, but that may be copied in the background nevertheless.

    Name tensors that never change, or only between an optimizer step and the next call of ``step()``: averaged
    weights, frozen weights, or 16-bit weights that are rounded from float32 ones. For instance ``("average.*",)``.
    If the optimizer step may be skipped, as by a gradient scaler, call ``fence()`` before the change.
    """
    staging_bytes: int = 256 * MIB
    """Size of the staging buffer on each GPU [B], for eager tensors and late copies.

    If the staging buffer is full, tensors are copied before ``step()`` returns, or the next optimizer step waits.
    """

    def __post_init__(self) -> None:
        """Raise InvalidInputError, naming the field, if a value is invalid."""
        check_numbers(self, _CAPTURE_LIMITS)
        check_choice("proof", self.proof, get_args(Proof))
        check_choice("schedule", self.schedule, get_args(Schedule))
        if type(self.deferred) is not tuple or not all(isinstance(pattern, str) for pattern in self.deferred):
            raise InvalidInputError(f'deferred={self.deferred!r:.100}: give a tuple of globs such as ("average.*",)')
        if not isinstance(self.ring_folder, (str, Path)):
            raise InvalidInputError(f"ring_folder {self.ring_folder!r:.100}: give the path of a directory")


@dataclasses.dataclass(frozen=True)
class Grace:
    """Grace period before a kill, and the signals or notices that announce the kill: for ``save_on_signal``."""

    seconds: float = 30.0
    """Time between the signal and the kill [s], as configured in the scheduler."""
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
    """Signals that announce the kill. Signals that the process ignores stay ignored."""
    notice: Callable[[], float | None] | None = None
    """Function that returns the seconds until the kill, or None while none is announced; for spot machines.

    A background thread calls the function. An exception is logged once, and counts as None.
    """
    poll_s: float = 5.0
    """Time between two calls of ``notice`` [s]."""

    def __post_init__(self) -> None:
        """Raise InvalidInputError, naming the field, if a value is invalid."""
        check_numbers(self, {"seconds": (1e-3, threading.TIMEOUT_MAX), "poll_s": (1e-3, threading.TIMEOUT_MAX)})
        possible = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        if type(self.signals) is not tuple or not set(self.signals) <= possible:
            raise InvalidInputError(f"signals={self.signals!r:.100}: give a tuple such as (signal.SIGTERM,)")
        if self.notice is not None and not callable(self.notice):
            raise InvalidInputError(f"notice={self.notice!r:.100}: give a function without arguments, or None")
