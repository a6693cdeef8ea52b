"""One save of all ranks, as rank 0 has begun it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from asymcheck.types import SaveId


@dataclasses.dataclass(frozen=True)
class Turn:
    """One save of all ranks, as rank 0 has begun it."""

    number: int
    """Its number in the session."""
    step: int
    """The training step."""
    save_id: SaveId
    """The attempt."""
    generation: int | None
    """The line of training; None when the commit will open it."""
    plan: object
    """The record of the plan that all cut by."""
    shares_anew: bool
    """Whether the ranks look anew at what they have in common."""
    head: Mapping[str, object] | None = None
    """The head record of the generation, where machines have stores of their own."""
