"""Line of training: the checkpoints that lead to the current state, without abandoned ones (SPEC.md §A11.1)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable

from asymcheck.config import WRITER
from asymcheck.errors import (
    INCONCLUSIVE,
    ChecksumError,
    FormatError,
    HeadRecordError,
    StorageError,
    StructureError,
    TruncatedError,
)
from asymcheck.format import registry
from asymcheck.format.record import HeadRecord
from asymcheck.storage.clock import now_ns
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import CheckpointRef


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Line of training of one run."""

    generation: int
    limits: dict[int, CheckpointRef | None]  # last checkpoint of each generation on the line; None for the open one

    def __contains__(self, ref: CheckpointRef) -> bool:
        if ref.generation not in self.limits:
            return False
        limit = self.limits[ref.generation]
        return limit is None or ref <= limit


_FETCH = "fetch the record from a location (asymcheck verify STORE --repair --remote LOCATION)"
_NAME_A_STEP = f"{_FETCH}, or name the step to restore (step=… or --step)"
_NAME_ANOTHER = f"{_FETCH}, or name one of the saves of this step (save:DIGITS, see asymcheck log --all)"


Heads = dict[int, HeadRecord]
"""Head records of a run that were read before, by generation. They never change."""


def read_line(
    tier: ReadTier, run: str, generation: int | None = None, *, step: int | None = None, known: Heads | None = None
) -> Lineage:
    """Follow the head records of a run back from the current generation, or from ``generation``.

    With ``step``, errors suggest how to restore that step. Records in ``known`` are not read again, and records that
    are read are added to it.

    Raises:
        HeadRecordError: a required record is missing or damaged.
    """
    known = {} if known is None else known
    numbers = tier.manifests.heads(run) if generation is None else []
    present = max(numbers, default=1) if generation is None else generation
    limits: dict[int, CheckpointRef | None] = {}
    generation, limit = present, None
    with tier.manifests.reading_heads(run, [number for number in numbers if number < present and number not in known]):
        while True:
            limits[generation] = limit
            head = known.get(generation) or _read_head(tier, run, generation, step)
            if head is None:
                return Lineage(present, limits)
            known[generation] = head
            if head.parent is None:
                return Lineage(present, limits)
            generation, limit = head.parent.generation, head.parent


def _read_head(tier: ReadTier, run: str, generation: int, step: int | None) -> HeadRecord | None:
    try:
        head = tier.manifests.read_head(run, generation)
    except INCONCLUSIVE:
        raise
    except (FormatError, StorageError) as error:
        raise _unknown(tier, run, step, str(error)) from error
    if head is None:
        if generation > 1:
            raise _unknown(tier, run, step, _no_head(generation))
        return None
    return head[0]


def intact_heads(tier: ReadTier, run: str, generations: Iterable[int]) -> list[HeadRecord]:
    """Return the head records of these generations, without damaged and missing ones."""
    heads = []
    for generation in generations:
        with contextlib.suppress(ChecksumError, StructureError, TruncatedError):
            heads.append(tier.manifests.read_head(run, generation))
    return [head[0] for head in heads if head is not None]


def check_generations(tier: ReadTier, listings: list[CheckpointFiles], line: Lineage, step: int | None = None) -> None:
    """Raise if a checkpoint has a later generation than all head records, because a record was lost then."""
    for listing in listings:
        if listing.ref.generation > line.generation:
            raise _unknown(tier, listing.run, step, _no_head(listing.ref.generation))


def _unknown(tier: ReadTier, run: str, step: int | None, problem: str) -> HeadRecordError:
    which, remedy = ("is newest", _NAME_A_STEP) if step is None else (f"of step {step} is meant", _NAME_ANOTHER)
    return HeadRecordError(f"store {tier.root}: cannot tell which checkpoint of run {run} {which}: {problem}; {remedy}")


def _no_head(generation: int) -> str:
    return f"generation {generation} has no head record"


def begin_generation(tier: NvmeTier, run: str, parent: CheckpointRef | None) -> int:
    """Begin a new generation after ``parent`` durably, and return its number.

    Raises:
        HeadRecordError: all generation numbers are used.
    """
    while True:
        heads = tier.manifests.heads(run)
        # Directories without manifests count, because their generations were begun.
        listed = [ref.generation for ref in tier.manifests.refs(run)]
        generation = max([0, *heads, *listed, *([parent.generation] if parent else [])]) + 1
        if generation > registry.GENERATION_MAX:
            raise HeadRecordError(f"run {run} has generation {generation - 1}, the maximum; use another run name")
        head = HeadRecord(run, generation, parent, now_ns(), WRITER)
        if tier.manifests.publish_head(head):
            return generation
