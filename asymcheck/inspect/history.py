"""History: checkpoints described without reading a tensor, and where training went on from an earlier one.

Reads manifests and head records only.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asymcheck.errors import UNKNOWING, AsymcheckError, HeadRecordError
from asymcheck.format.manifest import Manifest
from asymcheck.restore.lineage import Lineage, check_generations, read_line
from asymcheck.restore.resolve import check_run_exists, read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.types import Checkpoint, CheckpointRef

if TYPE_CHECKING:
    from asymcheck.restore.load import Loaded


def known_line(tier: ReadTier, run: str) -> Lineage | None:
    """Return the line of a run; None when a head record is lost, for then nobody knows."""
    try:
        line = read_line(tier, run)
        check_generations(tier.manifests.checkpoints(run), line)
    except HeadRecordError:
        return None
    return line


def is_on_line(tier: ReadTier, run: str, ref: CheckpointRef) -> bool | None:
    """Tell whether a checkpoint leads to the present; None when nobody knows."""
    line = known_line(tier, run)
    return None if line is None else ref in line


def describe(tier: ReadTier, listing: CheckpointFiles, line: Lineage | None) -> Checkpoint:
    """Describe a checkpoint by its name and its manifests."""
    try:
        return describe_by(listing, read_manifests(tier, listing), line)
    except UNKNOWING:
        raise
    except AsymcheckError:
        return describe_by(listing, None, line)


def describe_by(listing: CheckpointFiles, manifests: Sequence[Manifest] | None, line: Lineage | None) -> Checkpoint:
    """Describe a checkpoint; ``manifests`` is None when they are not all there, or one cannot be read."""
    found = Checkpoint.of(
        listing.run,
        listing.ref,
        listing.world_size,
        *_sums(manifests or ()),
        complete=manifests is not None,
        on_line=None if line is None else listing.ref in line,
    )
    return found if listing.is_whole else dataclasses.replace(found, store_ranks=listing.store_ranks)


def _sums(manifests: Sequence[Manifest]) -> tuple[dict[str, float], int]:
    """Return the metrics that ranks have saved, and the bytes of their tensors."""
    metrics: dict[str, float] = {}
    for manifest in manifests:
        metrics.update(manifest.header.metrics)
    return metrics, sum(manifest.total_bytes for manifest in manifests)


def describe_loaded(tier: ReadTier, loaded: Loaded, *, is_newest: bool) -> Checkpoint:
    """Describe a checkpoint that was read; the newest one is on the line."""
    on_line = is_newest or is_on_line(tier, loaded.run, loaded.ref)
    world_size = loaded.manifests[0].header.world_size
    return Checkpoint.of(loaded.run, loaded.ref, world_size, *_sums(loaded.manifests), on_line=on_line)


@dataclasses.dataclass(frozen=True)
class HistoryEntry:
    """One checkpoint in the history of a run."""

    checkpoint: Checkpoint
    """The checkpoint; of one that is not complete, metrics and bytes are unknown."""
    writer: str
    """Name and version of the program that saved it; empty when no manifest of it can be read."""
    step_before: int | None
    """Step of the complete checkpoint before it, from which training came; None for the first, or when unknown."""
    since_before_ns: int | None
    """Nanoseconds from the save of that checkpoint to this one; negative when the clock was set back."""
    problem: str
    """Why it is not complete; empty when it is."""


@dataclasses.dataclass(frozen=True)
class GenerationStart:
    """Where a generation of a run was opened."""

    generation: int
    on_line: bool
    """Whether the line of training leads through it."""
    opened_ns: int | None = None
    """When, nanoseconds since 1970-01-01 UTC; None when its head record cannot be read."""
    writer: str = ""
    """Name and version of the program that opened it; empty when its head record cannot be read."""
    parent_step: int | None = None
    """Step of the checkpoint that training went on from; None when it began from nothing, or when unknown."""
    parent_generation: int | None = None
    parent_save_id: str | None = None
    """Its save id, 32 hexadecimal digits."""
    abandoned: int | None = None
    """How many checkpoints of the line as it was before are still there and no longer on it; None when unknown."""
    problem: str = ""
    """Why the head record cannot be read; empty when it can."""


@dataclasses.dataclass(frozen=True)
class History:
    """The history of one run, newest first."""

    run: str
    generation: int | None
    """The present generation; None when a head record is lost."""
    entries: tuple[HistoryEntry, ...]
    """The checkpoints; on the line, older ones come later."""
    openings: tuple[GenerationStart, ...]
    """The generations that were opened. An opening is older than the checkpoints of its generation."""
    hidden_abandoned: int
    """How many checkpoints were left out because training abandoned them."""
    hidden_incomplete: int
    """How many checkpoints of the line were left out because they are incomplete or damaged."""
    line_problem: str
    """Why it cannot be known which checkpoints are on the line; empty when it is known."""


def read_history(tier: ReadTier, run: str, *, everything: bool = False) -> History:
    """Return the history of a run; with ``everything`` also what is abandoned, incomplete or damaged.

    Raises:
        CheckpointNotFoundError: the store has other runs, but not this one.
        HeadRecordError: the line cannot be followed; with ``everything`` the result says so instead.
    """
    runs = tier.manifests.runs()
    if runs:
        check_run_exists(tier.root, run, runs)
    return _Historian(tier, run).write(everything=everything)


class _Historian:
    def __init__(self, tier: ReadTier, run: str) -> None:
        self.tier, self.run = tier, run
        self.listings = tier.manifests.checkpoints(run)
        self.line: Lineage | None = None
        self.line_problem = ""
        self.complete: list[CheckpointRef] = []
        self.lines: dict[int, Lineage | None] = {}

    def write(self, *, everything: bool) -> History:
        try:
            self.line = read_line(self.tier, self.run)
            check_generations(self.listings, self.line)
        except HeadRecordError as error:
            if not everything:
                raise
            self.line, self.line_problem = None, str(error)
        read = [self._read(listing) for listing in self.listings]
        self.complete = [entry.checkpoint.ref for entry in read if entry.checkpoint.complete]
        shown = [
            self._after(entry)
            for entry in read
            if everything or (entry.checkpoint.complete and entry.checkpoint.on_line)
        ]
        hidden = [] if everything else [entry.checkpoint for entry in read]
        return History(
            run=self.run,
            generation=None if self.line is None else self.line.generation,
            entries=tuple(reversed(shown)),
            openings=tuple(self._openings(everything=everything)),
            hidden_abandoned=sum(checkpoint.on_line is False for checkpoint in hidden),
            hidden_incomplete=sum(bool(checkpoint.on_line) and not checkpoint.complete for checkpoint in hidden),
            line_problem=self.line_problem,
        )

    def _read(self, listing: CheckpointFiles) -> HistoryEntry:
        try:
            manifests = read_manifests(self.tier, listing)
        except UNKNOWING:
            raise
        except AsymcheckError as error:
            return HistoryEntry(describe_by(listing, None, self.line), "", None, None, str(error))
        writers = dict.fromkeys(manifest.header.writer for manifest in manifests)
        return HistoryEntry(describe_by(listing, manifests, self.line), ", ".join(writers), None, None, "")

    def _after(self, entry: HistoryEntry) -> HistoryEntry:
        """Add which checkpoint came before."""
        ref = entry.checkpoint.ref
        line = self._line_of(ref.generation)
        earlier = reversed(self.complete[: bisect.bisect_left(self.complete, ref)])
        before = next((one for one in earlier if line is not None and one in line), None)
        if before is None:
            return entry
        since = entry.checkpoint.created_ns - int.from_bytes(before.save_id[:8], "big")
        return dataclasses.replace(entry, step_before=before.step, since_before_ns=since)

    def _line_of(self, generation: int) -> Lineage | None:
        """Return the line as it is when ``generation`` is the present one; None when a head record is lost."""
        if generation not in self.lines:
            try:
                self.lines[generation] = read_line(self.tier, self.run, generation)
            except HeadRecordError:
                self.lines[generation] = None
        return self.lines[generation]

    def _openings(self, *, everything: bool) -> list[GenerationStart]:
        """Return the openings, newest first."""
        numbers = self.tier.manifests.heads(self.run)
        return [
            self._opening(generation, max(numbers[:place], default=1))
            for place, generation in reversed(list(enumerate(numbers)))
            if everything or (self.line is not None and generation in self.line.limits)
        ]

    def _opening(self, generation: int, before: int) -> GenerationStart:
        on_line = self.line is not None and generation in self.line.limits
        try:
            found = self.tier.manifests.read_head(self.run, generation)
        except UNKNOWING:
            raise
        except AsymcheckError as error:
            return GenerationStart(generation, on_line, problem=str(error))
        if found is None:
            return GenerationStart(generation, on_line, problem="it is gone")
        head, parent = found[0], found[0].parent
        step, number, save_id = (parent.step, parent.generation, parent.save_id.hex()) if parent else (None, None, None)
        abandoned = self._left_by(generation, before)
        return GenerationStart(generation, on_line, head.created_ns, head.writer, step, number, save_id, abandoned)

    def _left_by(self, generation: int, before: int) -> int | None:
        """Count the checkpoints that were on the line of generation ``before`` and are not on that of ``generation``.

        Checkpoints that a process of the older generation saved after the opening count, too.
        """
        if generation == 1:
            return 0
        old, new = self._line_of(before), self._line_of(generation)
        if old is None or new is None:
            return None
        return sum(listing.ref in old and listing.ref not in new for listing in self.listings)
