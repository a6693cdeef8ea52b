"""What a repair says it did, and what it could not do."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Repair:
    """One thing that was repaired."""

    kind: str
    """Stable code: ``temporaries``, ``record``, ``catalog``, ``pack`` or ``remote``."""
    where: str
    """The file, below the store; or the remote location."""
    found: str
    """What was wrong with it."""
    done: str
    """What was done about it."""


@dataclasses.dataclass(frozen=True)
class Unrepaired:
    """One thing that is wrong and was not repaired."""

    kind: str
    """Stable code: ``lost-partitions``, ``damaged-manifest``, ``incomplete-checkpoint``, ``damaged-head``,
    ``missing-head``, ``busy-pack`` or ``unreadable-pack``."""
    where: str
    """The file or the checkpoint."""
    message: str
    """What is wrong."""
    remedy: str
    """What the user can do."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoints that cannot be restored because of it, as ``<run> <checkpoint>``."""


@dataclasses.dataclass(frozen=True)
class Repaired:
    """What a repair did; a second one in a row does nothing."""

    done: tuple[Repair, ...]
    """What was repaired, in order."""
    left: tuple[Unrepaired, ...]
    """What is still wrong."""
    copied_partitions: int
    """Partitions copied from damaged packs into new ones."""
    copied_bytes: int
    """Their bytes."""
