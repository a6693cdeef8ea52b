"""Records that identify a save: request, position in the lineage, and the round that all ranks share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from asymcheck.format.spans import Spans
from asymcheck.policies.interval import TrainingPace
from asymcheck.storage.clock import now_ns
from asymcheck.types import CheckpointRef, SaveId

_NS_MAX = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class LineagePosition:
    """Generation and parent of a new checkpoint."""

    generation: int
    parent: CheckpointRef | None
    """Previous checkpoint on the line; None for the first checkpoint."""


def new_save_id(after: SaveId | None = None) -> SaveId:
    """Return a new save id: the time in nanoseconds, then 8 random bytes (SPEC.md §A3). It sorts after ``after``."""
    after_ns = 0 if after is None else int.from_bytes(after[:8], "big")
    return SaveId(max(now_ns(), min(after_ns + 1, _NS_MAX)).to_bytes(8, "big") + os.urandom(8))


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """Run, step, rank and save id of one save."""

    run: str
    step: int
    metrics: Mapping[str, float]
    rank: int = 0
    world_size: int = 1
    save_id: SaveId = dataclasses.field(default_factory=new_save_id)
    """Save id, equal on all ranks."""
    store_ranks: Spans | None = None
    """Ranks that save into the same store; None if all ranks do."""
    merged: Mapping[str, object] | None = None
    """Method and sources of a merged checkpoint."""
    pace: TrainingPace | None = None
    """Measurements of this rank for an automatic save interval; None for a fixed interval."""


@dataclasses.dataclass(frozen=True)
class SaveRound:
    """One save of all ranks, as announced by rank 0."""

    number: int
    """Number of the round in the session."""
    step: int
    save_id: SaveId
    generation: int | None
    """Generation of the checkpoint; None if the commit opens a new generation."""
    plan: object
    """Record of the partition plan that all ranks use."""
    reassigns: bool
    """Whether the ranks compare their replicas again in this round."""
    head: Mapping[str, object] | None = None
    """Head record of the generation; set if every node has its own store."""
