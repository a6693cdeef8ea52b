"""The line of training: which checkpoints lead to the present, and which were abandoned (SPEC.md §10.1)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable

from asymcheck.config import WRITER
from asymcheck.errors import (
    UNKNOWING,
    ChecksumError,
    FormatError,
    HeadRecordError,
    StorageError,
    StructureError,
    TruncatedError,
)
from asymcheck.format import registry
from asymcheck.format.record import HeadRecord
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import CheckpointRef


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The line of one run."""

    generation: int
    limits: dict[int, CheckpointRef | None]
    """For each generation on the line, the last checkpoint that belongs to it; None for the present one: it is open."""

    @classmethod
    def read_or_empty(cls, tier: ReadTier, run: str) -> Lineage:
        """Return the line of a run; an empty line when a head record is lost."""
        try:
            return read_line(tier, run)
        except HeadRecordError:
            return cls(0, {})

    def __contains__(self, ref: CheckpointRef) -> bool:
        if ref.generation not in self.limits:
            return False
        limit = self.limits[ref.generation]
        return limit is None or ref <= limit


_NAME_A_STEP = "name the step to restore (step=…)"
_NAME_ANOTHER = "it was saved more than once: name one of the saves (save:DIGITS, see asymcheck inspect)"


def read_line(tier: ReadTier, run: str, generation: int | None = None, *, step: int | None = None) -> Lineage:
    """Follow the head records of a run from the present, or from another generation as if it were the present one.

    With ``step`` an error says what to do when it is that step that is asked for.

    Raises:
        HeadRecordError: one that is needed is missing or damaged.
    """
    present = max(tier.manifests.heads(run), default=1) if generation is None else generation
    limits: dict[int, CheckpointRef | None] = {}
    generation, limit = present, None
    while True:
        limits[generation] = limit
        head = _read_head(tier, run, generation, step)
        if head is None or head.parent is None:
            return Lineage(present, limits)
        generation, limit = head.parent.generation, head.parent


def _read_head(tier: ReadTier, run: str, generation: int, step: int | None) -> HeadRecord | None:
    try:
        found = tier.manifests.read_head(run, generation)
    except UNKNOWING:
        raise
    except (FormatError, StorageError) as error:
        raise _unknown(run, step, str(error)) from error
    if found is None:
        if generation > 1:
            raise _unknown(run, step, f"generation {generation} has no head record")
        return None
    return found[0]


def intact_heads(tier: ReadTier, run: str, generations: Iterable[int]) -> list[HeadRecord]:
    """Return the head records of these generations, but for those that are damaged or not there."""
    found = []
    for generation in generations:
        with contextlib.suppress(ChecksumError, StructureError, TruncatedError):
            found.append(tier.manifests.read_head(run, generation))
    return [one[0] for one in found if one is not None]


def check_generations(listings: list[CheckpointFiles], line: Lineage, step: int | None = None) -> None:
    """Refuse checkpoints of a generation later than any head record: a head record has been lost."""
    for listing in listings:
        if listing.ref.generation > line.generation:
            problem = (
                f"it has a checkpoint of generation {listing.ref.generation}, but the newest head record is of "
                f"generation {line.generation}: a head record was lost"
            )
            raise _unknown(listing.run, step, problem)


def _unknown(run: str, step: int | None, problem: str) -> HeadRecordError:
    which, remedy = ("is newest", _NAME_A_STEP) if step is None else (f"of step {step} is meant", _NAME_ANOTHER)
    return HeadRecordError(f"which checkpoint of run {run} {which} cannot be known: {problem}; {remedy}")


def begin_generation(tier: NvmeTier, run: str, parent: CheckpointRef | None) -> int:
    """Open a new generation that continues from ``parent``, durably, and return its number.

    Raises:
        HeadRecordError: there is no number left, for what would be saved under it could not be found again.
    """
    while True:
        heads = tier.manifests.heads(run)
        listed = [listing.ref.generation for listing in tier.manifests.checkpoints(run)]
        generation = max([0, *heads, *listed, *([parent.generation] if parent else [])]) + 1
        if generation > registry.GENERATION_MAX:
            raise HeadRecordError(f"run {run} has generation {generation - 1}, the last there can be; use another run")
        head = HeadRecord(run, generation, parent, time.time_ns(), WRITER)
        if tier.manifests.publish_head(head):
            return generation
