"""Transfer statistics: what a push or a pull has moved, and what pushing beside a training has done."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Moved:
    """Result of a push or a pull."""

    location: str
    """The remote location."""
    committed: tuple[str, ...] = ()
    """Checkpoints that are there now and were not before, as ``<run> <checkpoint>``."""
    present: int = 0
    """Checkpoints that were there already."""
    packs: int = 0
    """Packs that were written."""
    moved_bytes: int = 0
    """Payload bytes of the frames in them."""
    moved_partitions: int = 0
    """How many frames that are."""
    reused_partitions: int = 0
    """Partitions that were there already."""
    plain_bytes: int = 0
    """Payload bytes that these frames had where they came from: more, where they were encoded on the way."""


@dataclasses.dataclass(frozen=True)
class PushStatistics:
    """Statistics of the background push so far."""

    pushed: int = 0
    """Checkpoints that it has committed there."""
    backlog: int = 0
    """Checkpoints that are durable here, are to be pushed, and are not known to be there."""
    damaged: int = 0
    """Those that are damaged here, so that they cannot be pushed until they are repaired."""
    sent_bytes: int = 0
    """Payload bytes of the frames that were sent."""
    failures: int = 0
    """How often a checkpoint could not be pushed; it is tried again, but seldom where it is damaged here."""
    problem: str = ""
    """Why the last attempt, or removal of old ones there, failed, or what is damaged; empty when all is well."""
    newest_step: int | None = None
    """The newest checkpoint on the line that is known to be there: what is left if this machine is lost now."""
