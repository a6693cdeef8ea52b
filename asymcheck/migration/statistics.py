"""What pushing beside a training has done so far."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PushStatistics:
    """What pushing beside a training has done so far."""

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
