"""Save requests: what a checkpoint is called, its place on the line of training, and the save that ranks share."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping

from asymcheck.format.spans import Spans
from asymcheck.policies.interval import TrainingPace
from asymcheck.types import CheckpointRef, SaveId


@dataclasses.dataclass(frozen=True)
class LineagePosition:
    """A place on the line of training."""

    generation: int
    """The generation."""
    parent: CheckpointRef | None
    """The checkpoint before it."""


def new_save_id() -> SaveId:
    """Return a save id: the time, then random bytes (SPEC.md §4)."""
    return SaveId(time.time_ns().to_bytes(8, "big") + os.urandom(8))


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """Names of a save: run, step, rank and attempt."""

    run: str
    """The run."""
    step: int
    """The training step."""
    metrics: Mapping[str, float]
    """Named numbers of the training loop."""
    rank: int = 0
    """This rank."""
    world_size: int = 1
    """How many ranks save."""
    save_id: SaveId = dataclasses.field(default_factory=new_save_id)
    """The attempt, the same for all ranks."""
    store_ranks: Spans | None = None
    """The ranks that save into the same store; None when all do."""
    pace: TrainingPace | None = None
    """Measurements of this rank, if the interval is chosen by them."""


@dataclasses.dataclass(frozen=True)
class SaveRound:
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
    """Head record of the generation, if every machine has its own store."""
