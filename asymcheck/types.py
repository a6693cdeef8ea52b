"""Value types that all layers share: ids, references, locations and results."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import NewType, Protocol, TypeGuard, runtime_checkable

Digest = NewType("Digest", bytes)
"""16 bytes: XXH3-128 of the plain bytes of a partition (SPEC.md §A4)."""

PackId = NewType("PackId", bytes)
"""16 random bytes that identify a pack; a recycled file gets a new id."""

SaveId = NewType("SaveId", bytes)
"""16 bytes that identify a save, sortable by time."""

Progress = Callable[[int, int], None]
"""Callback with the bytes done and the total bytes."""


class ProgressMeter:
    """Counter of bytes for a progress bar. Thread-safe."""

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        """Report to ``progress``. Bytes that are counted before ``total`` is set are ignored."""
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self.total = total

    def add(self, count: int) -> None:
        """Count and report more bytes."""
        if self._progress is not None and self.total:
            with self._lock:
                self._done += count
                self._progress(min(self._done, self.total), self.total)


# Limits of the text form: digits of the save id, and number of metrics.
_SAVE_SHOWN = 12
_METRICS_SHOWN = 3
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def readable_size(count: int) -> str:
    """Format a number of bytes, for instance ``1.5 GiB``."""
    number = float(count)
    for unit in _UNITS[:-1]:
        if abs(number) < _STEP:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= _STEP
    return f"{number:.1f} {_UNITS[-1]}"


def counted(number: int, noun: str) -> str:
    """Format a number of things, for instance ``1 checkpoint`` or ``2 checkpoints``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@runtime_checkable
class Stateful(Protocol):
    """Object whose ``state_dict()`` is stored in its place."""

    def state_dict(self) -> dict[str, object]:
        """Return the state to store."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Restore a state from :meth:`state_dict`."""
        ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Tell whether a value is a :class:`Stateful`.

    Ten times as fast as ``isinstance()``, which from Python 3.12 on also misses methods of a ``__getattr__``.
    """
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


@dataclasses.dataclass(frozen=True, order=True)
class CheckpointRef:
    """Identity of a checkpoint in its run; sorts by age within a line of training (SPEC.md §A11.1)."""

    generation: int
    """Generation, from 1."""
    step: int
    """The training step."""
    save_id: SaveId
    """Id of the save."""

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation}, save {self.save_id.hex()[:12]})"


@dataclasses.dataclass(frozen=True)
class Location:
    """Location and encoding of a frame."""

    pack_id: PackId
    """The pack."""
    offset: int
    """Bytes from the start of the pack file to the frame."""
    stored_length: int
    """Bytes of payload."""
    plain_length: int
    """Bytes of the partition before encoding."""
    kind: int = 0
    """Frame kind number."""
    codec: int = 0
    """Codec number."""
    digest_algorithm: int = 1
    """Digest number."""
    base_digest: bytes = bytes(16)
    """Digest of the base; zero without a base."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """Identity of a process that a later process with the same pid does not have."""

    pid: int
    """Process id in its PID namespace."""
    start_ticks: int
    """Start time of the process in clock ticks since boot."""
    boot_id: str
    """Random boot id of the kernel."""
    pid_namespace: str
    """Name of the PID namespace."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a store."""

    run: str
    """The run."""
    step: int
    """The training step."""
    generation: int
    """Generation of the run, which every restore for further training increments."""
    save_id: str
    """Id of the save: 32 hexadecimal digits, sortable by time."""
    world_size: int
    """Number of ranks."""
    complete: bool
    """Whether the store has the manifests of all ranks that save into it."""
    on_line: bool | None
    """Whether the checkpoint is on the line of training: False if abandoned, None if a head record is lost."""
    created_ns: int
    """Start of the save, nanoseconds since 1970-01-01 UTC."""
    state_bytes: int = 0
    """Bytes of all tensors; 0 if the manifest was not read."""
    written_bytes: int | None = None
    """Bytes that the save wrote; only known to the saving process."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the save."""
    store_ranks: tuple[tuple[int, int], ...] | None = None
    """With several stores: ranges of ranks that save into this one, as pairs of first and last rank."""

    @classmethod
    def of(
        cls,
        run: str,
        ref: CheckpointRef,
        world_size: int,
        metrics: Mapping[str, float],
        state_bytes: int,
        *,
        written_bytes: int | None = None,
        complete: bool = True,
        on_line: bool | None = True,
    ) -> Checkpoint:
        """Return the checkpoint of a run with this identity."""
        created_ns = int.from_bytes(ref.save_id[:8], "big")
        identity = (run, ref.step, ref.generation, ref.save_id.hex(), world_size)
        return cls(*identity, complete, on_line, created_ns, state_bytes, written_bytes, metrics)

    def __repr__(self) -> str:
        """Return a short description with anything unusual."""
        save = self.save_id[:_SAVE_SHOWN]
        words = [f"{self.run!r} step {self.step}", f"generation {self.generation}", f"save {save}"]
        words += [self.ranks if self.store_ranks else f"{self.world_size} ranks"] if self.world_size > 1 else []
        words += [readable_size(self.state_bytes)] if self.complete else ["incomplete or damaged"]
        words += [] if self.on_line else ["line unknown" if self.on_line is None else "abandoned"]
        words += [f"{name} {value:.6g}" for name, value in list(self.metrics.items())[:_METRICS_SHOWN]]
        return f"<Checkpoint {', '.join(words)}{', …' if len(self.metrics) > _METRICS_SHOWN else ''}>"

    @property
    def ranks(self) -> str:
        """Format the ranks, or those with shards in this store: ``0-3 of 8``."""
        spans = [str(first) if first == last else f"{first}-{last}" for first, last in self.store_ranks or ()]
        return f"{', '.join(spans)} of {self.world_size}" if spans else str(self.world_size)

    @property
    def ref(self) -> CheckpointRef:
        """Identity of the checkpoint within its run."""
        return CheckpointRef(self.generation, self.step, SaveId(bytes.fromhex(self.save_id)))


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of one rank in a checkpoint that several ranks save together.

    All ranks use the same save id. The checkpoint is complete when all ranks have saved.
    """

    rank: int
    """This rank, from 0."""
    world_size: int
    """Number of ranks that save."""
    save_id: str
    """Save id, equal on all ranks: 32 hexadecimal digits, 16 for nanoseconds since 1970 and 16 random ones."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Disk usage of a store."""

    store_id: str
    """Id of the store, 32 hexadecimal digits."""
    packs: int
    """Number of packs in use."""
    pack_bytes: int
    """Bytes of their files."""
    pooled_packs: int
    """Number of freed packs that will be overwritten."""
    pooled_bytes: int
    """Bytes of their files."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """Restored state with its source."""

    state: object
    """The state."""
    checkpoint: Checkpoint
    """Checkpoint that was read."""
    skipped: tuple[str, ...]
    """Newer checkpoints that were skipped, with the reasons."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Sample of tensors of one role and dtype, for measurements."""

    role: str
    """Role of the tensors."""
    dtype: str
    """Name of the dtype."""
    plain: bytes
    """The bytes."""
    older: bytes | None = None
    """The same bytes in the previous checkpoint; None without one."""
