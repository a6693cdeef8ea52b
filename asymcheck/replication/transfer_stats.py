"""Statistics of pushes and pulls."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Moved:
    """Result of a push or a pull."""

    location: str
    """The remote location."""
    committed: tuple[str, ...] = ()
    """Newly committed checkpoints, as ``run NAME, step N (generation G, save ID)``."""
    present: int = 0
    """Number of checkpoints that the target already had."""
    packs: int = 0
    """Number of packs written."""
    moved_bytes: int = 0
    """Payload bytes of the frames in these packs."""
    moved_partitions: int = 0
    """Number of frames in these packs."""
    reused_partitions: int = 0
    """Number of partitions that the target already had."""
    plain_bytes: int = 0
    """Payload bytes of these frames at the source: more than ``moved_bytes`` if the copy re-encoded some."""

    def add(self, other: Moved) -> None:
        """Add the result of another copy to or from the same location."""
        for name in [field.name for field in dataclasses.fields(self) if field.name != "location"]:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclasses.dataclass(frozen=True)
class PushStatistics:
    """Statistics of the background push so far."""

    pushed: int = 0
    """Checkpoints committed at the remote location."""
    backlog: int = 0
    """Durable checkpoints that wait for their upload."""
    damaged: int = 0
    """Due checkpoints that are damaged in the store, and must be repaired first."""
    missed: int = 0
    """Due checkpoints that were deleted from the store before their upload."""
    sent_bytes: int = 0
    """Payload bytes sent."""
    failures: int = 0
    """Failed attempts. Failed checkpoints are retried; damaged ones less often."""
    problem: str = ""
    """Error of the last upload or remote prune, or a damaged checkpoint; empty if everything works."""
    newest_step: int | None = None
    """Newest step at the remote location: the step from which another machine can resume."""
    sending_step: int | None = None
    """Step that is being uploaded; None if no upload runs."""
    done_bytes: int = 0
    """Payload bytes of that step that were sent so far."""
    total_bytes: int = 0
    """Payload bytes of that step to send."""
    bytes_per_s: float = 0.0
    """Mean speed of that upload [B/s]."""

    def between_uploads(self) -> PushStatistics:
        """Return the statistics without those of an upload."""
        return dataclasses.replace(self, sending_step=None, done_bytes=0, total_bytes=0, bytes_per_s=0.0)
