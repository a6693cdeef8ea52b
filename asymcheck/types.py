"""Value types that all layers share: names of things and where they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NewType, Protocol, TypeGuard, runtime_checkable

Digest = NewType("Digest", bytes)
"""16 bytes: the xxh3-128 of a partition's plain bytes (SPEC.md §5)."""

PackId = NewType("PackId", bytes)
"""16 random bytes: one life of a pack file."""

SaveId = NewType("SaveId", bytes)
"""16 bytes, sorting by time: one attempt to save one step."""

Progress = Callable[[int, int], None]
"""Called from time to time with bytes done and total bytes."""


# As the command line shows them: a save id that tells saves apart, and a few of the metrics.
_SAVE_SHOWN = 12
_METRICS_SHOWN = 3
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def readable_size(count: int) -> str:
    """Return bytes for people, for instance ``1.5 GiB``."""
    number = float(count)
    for unit in _UNITS[:-1]:
        if abs(number) < _STEP:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= _STEP
    return f"{number:.1f} {_UNITS[-1]}"


@runtime_checkable
class Stateful(Protocol):
    """An object that takes part in a state through its own ``state_dict``."""

    def state_dict(self) -> dict[str, object]:
        """Return what is to be stored."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Take back what :meth:`state_dict` returned."""
        ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Tell whether an object takes part in a state. As ``isinstance()`` would, which takes ten times as long."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


@dataclasses.dataclass(frozen=True, order=True)
class CheckpointRef:
    """Identity of one checkpoint of a run; sorts by age within a line (SPEC.md §10.1)."""

    generation: int
    """The line of training, from 1."""
    step: int
    """The training step."""
    save_id: SaveId
    """The attempt that saved it."""

    def __str__(self) -> str:
        """Name it as errors and the command line do."""
        return f"step {self.step} (generation {self.generation}, save {self.save_id.hex()[:12]})"


@dataclasses.dataclass(frozen=True)
class Location:
    """Where one frame lies and how it is encoded."""

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
    """Digest of the base partition; zero when there is none."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process, identified so that a later process with the same pid is not taken for it."""

    pid: int
    """Process id in its own PID namespace."""
    start_ticks: int
    """Start time of the process in clock ticks since boot."""
    boot_id: str
    """The kernel's random boot id."""
    pid_namespace: str
    """Name of the PID namespace."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a store."""

    run: str
    """The run."""
    step: int
    """The training step."""
    generation: int
    """The line of training, raised by every restore for further training."""
    save_id: str
    """The attempt that saved it: 32 hexadecimal digits, sorting by time."""
    world_size: int
    """How many ranks it has."""
    complete: bool
    """Whether the manifests of all ranks are there that save into this store."""
    on_line: bool | None
    """Whether it leads to the present; False for an abandoned branch of training, None when a head record is lost."""
    created_ns: int
    """When the save began, nanoseconds since 1970-01-01 UTC."""
    state_bytes: int = 0
    """Bytes of all tensors; 0 when the manifest was not read."""
    written_bytes: int | None = None
    """Bytes that its save had to write; None but for the one who saved."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Named numbers given at the save."""
    store_ranks: tuple[tuple[int, int], ...] | None = None
    """Where machines have a store each: first and last of each stretch of ranks whose parts belong into this one."""

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
        """Return what tells it from others, and what is odd about it; all fields are for programs."""
        save = self.save_id[:_SAVE_SHOWN]
        words = [f"{self.run!r} step {self.step}", f"generation {self.generation}", f"save {save}"]
        words += [self.ranks if self.store_ranks else f"{self.world_size} ranks"] if self.world_size > 1 else []
        words += [readable_size(self.state_bytes)] if self.complete else ["incomplete or damaged"]
        words += [] if self.on_line else ["line unknown" if self.on_line is None else "abandoned"]
        words += [f"{name} {value:.6g}" for name, value in list(self.metrics.items())[:_METRICS_SHOWN]]
        return f"<Checkpoint {', '.join(words)}{', …' if len(self.metrics) > _METRICS_SHOWN else ''}>"

    @property
    def ranks(self) -> str:
        """For people: how many ranks it has, or which of them have their part here: ``0-3 of 8``."""
        spans = [str(first) if first == last else f"{first}-{last}" for first, last in self.store_ranks or ()]
        return f"{', '.join(spans)} of {self.world_size}" if spans else str(self.world_size)

    @property
    def ref(self) -> CheckpointRef:
        """The identity of the checkpoint within its run."""
        return CheckpointRef(self.generation, self.step, SaveId(bytes.fromhex(self.save_id)))


@dataclasses.dataclass(frozen=True)
class Part:
    """Which part of one checkpoint a save is, when several ranks save it together.

    Each rank saves its own part, under one save id; the checkpoint is complete when all are there.
    """

    rank: int
    """This rank, from 0."""
    world_size: int
    """How many ranks save."""
    save_id: str
    """The attempt, the same for all ranks: 32 hexadecimal digits, 16 of nanoseconds since 1970 and 16 random ones."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Disk usage of a store."""

    store_id: str
    """The store's id, 32 hexadecimal digits."""
    packs: int
    """Number of packs in use."""
    pack_bytes: int
    """Bytes of their files."""
    pooled_packs: int
    """Number of freed packs kept to be overwritten."""
    pooled_bytes: int
    """Bytes of their files."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored state, with where it comes from."""

    state: object
    """The state."""
    checkpoint: Checkpoint
    """The checkpoint that was read."""
    skipped: tuple[str, ...]
    """Newer checkpoints that were passed over, with the reasons."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some bytes of tensors of one role and dtype, to measure on."""

    role: str
    """A role of the format."""
    dtype: str
    """Name of the dtype."""
    plain: bytes
    """The bytes."""
    older: bytes | None = None
    """As many bytes of the same places one checkpoint earlier; None where there is none."""
