"""Describe checkpoints, and the generations of a run, from manifests and head records without reading tensors."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asymcheck.errors import AsymcheckError, HeadRecordError, result_or_error
from asymcheck.format.manifest import Manifest
from asymcheck.restore.lineage import Heads, Lineage, check_generations, read_line
from asymcheck.restore.resolve import check_run_exists, metrics_of, read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.types import Checkpoint, CheckpointRef

if TYPE_CHECKING:
    from asymcheck.restore.load import Loaded


def known_line(tier: ReadTier, run: str, known: Heads | None = None) -> Lineage | None:
    """Return the line of a run, or None if a head record is lost; see :func:`read_line` for ``known``."""
    try:
        line = read_line(tier, run, known=known)
        later = [ref for ref in tier.manifests.refs(run) if ref.generation > line.generation]
        listings = [tier.manifests.listing(run, ref) for ref in later]
        check_generations(tier, [listing for listing in listings if listing.manifests], line)
    except HeadRecordError:
        return None
    return line


def is_on_line(tier: ReadTier, run: str, ref: CheckpointRef) -> bool | None:
    """Tell whether a checkpoint is on the line; None if a head record is lost."""
    line = known_line(tier, run)
    return None if line is None else ref in line


def describe(tier: ReadTier, listing: CheckpointFiles, line: Lineage | None) -> Checkpoint:
    """Describe a checkpoint from its name and its manifests."""
    manifests = result_or_error(read_manifests, tier, listing)
    return describe_by(listing, None if isinstance(manifests, AsymcheckError) else manifests, line)


def describe_by(listing: CheckpointFiles, manifests: Sequence[Manifest] | None, line: Lineage | None) -> Checkpoint:
    """Describe a checkpoint; ``manifests`` is None if a manifest is missing or unreadable."""
    checkpoint = Checkpoint.of(
        listing.run,
        listing.ref,
        listing.world_size,
        *_sums(manifests or ()),
        complete=manifests is not None,
        on_line=None if line is None else listing.ref in line,
    )
    return checkpoint if listing.is_whole else dataclasses.replace(checkpoint, store_ranks=listing.store_ranks)


def _sums(manifests: Sequence[Manifest]) -> tuple[dict[str, float], int]:
    return metrics_of(manifests), sum(manifest.total_bytes for manifest in manifests)


def describe_loaded(tier: ReadTier, loaded: Loaded, *, is_newest: bool) -> Checkpoint:
    """Describe a loaded checkpoint. The newest checkpoint is always on the line."""
    on_line = is_newest or is_on_line(tier, loaded.run, loaded.ref)
    world_size = loaded.manifests[0].header.world_size
    return Checkpoint.of(loaded.run, loaded.ref, world_size, *_sums(loaded.manifests), on_line=on_line)


@dataclasses.dataclass(frozen=True)
class HistoryEntry:
    """A checkpoint in the history of a run."""

    checkpoint: Checkpoint
    """The checkpoint. Metrics and bytes of an incomplete checkpoint are unknown."""
    writer: str
    """Name and version of the program that saved it; empty if no manifest is readable."""
    step_before: int | None
    """Step of the previous complete checkpoint; None for the first checkpoint, or if unknown."""
    since_before_ns: int | None
    """Nanoseconds since the save of the previous checkpoint; negative if the clock was set back."""
    problem: str
    """Reason why the checkpoint is incomplete; empty if it is complete."""


@dataclasses.dataclass(frozen=True)
class GenerationStart:
    """The start of a generation of a run."""

    generation: int
    on_line: bool
    """Whether the generation is on the line."""
    opened_ns: int | None = None
    """Start time, nanoseconds since 1970-01-01 UTC; None if the head record is unreadable."""
    writer: str = ""
    """Name and version of the program that started it; empty if the head record is unreadable."""
    parent_step: int | None = None
    """Step of the checkpoint from which training continued; None if there was none, or if unknown."""
    parent_generation: int | None = None
    parent_save_id: str | None = None
    """Save id of that checkpoint, 32 hexadecimal digits."""
    abandoned: int | None = None
    """Number of existing checkpoints that this generation abandoned; None if unknown."""
    problem: str = ""
    """Reason why the head record is unreadable; empty if it is readable."""


@dataclasses.dataclass(frozen=True)
class History:
    """The history of one run, newest first."""

    run: str
    generation: int | None
    """The present generation; None if a head record is lost."""
    entries: tuple[HistoryEntry, ...]
    """The checkpoints, newest first."""
    openings: tuple[GenerationStart, ...]
    """The starts of generations. A generation starts before its checkpoints."""
    hidden_abandoned: int
    """Number of omitted abandoned checkpoints."""
    hidden_incomplete: int
    """Number of omitted checkpoints on the line that are incomplete or damaged."""
    line_problem: str
    """Reason why the line is unknown; empty if it is known."""


Known = dict[CheckpointRef, tuple[CheckpointFiles, HistoryEntry]]
"""Complete checkpoints that were read before. Their manifests never change."""


def read_history(tier: ReadTier, run: str, *, everything: bool = False, known: Known | None = None) -> History:
    """Return the history of a run. With ``everything``, include abandoned, incomplete and damaged checkpoints.

    Checkpoints in ``known`` are not read again. Complete checkpoints are added to it, and deleted ones are removed.

    Raises:
        CheckpointNotFoundError: the store has other runs, but not this one.
        HeadRecordError: the line is unknown. With ``everything``, the result reports this instead.
    """
    runs = tier.manifests.runs()
    if runs:
        check_run_exists(tier.root, run, runs)
    return _HistoryReader(tier, run, {} if known is None else known).read(everything=everything)


class _HistoryReader:
    def __init__(self, tier: ReadTier, run: str, known: Known) -> None:
        self.tier, self.run, self.known = tier, run, known
        self.listings = tier.manifests.checkpoints(run) if not known else self._listings()
        # A page may follow a training for weeks.
        for deleted in known.keys() - {listing.ref for listing in self.listings}:
            del known[deleted]
        groups = itertools.groupby((listing.ref for listing in self.listings), lambda ref: ref.generation)
        self._refs_of = {generation: [*refs] for generation, refs in groups}
        self.line: Lineage | None = None
        self.line_problem = ""
        self.complete: list[CheckpointRef] = []
        self.heads: Heads = {}
        # Neighbours are asked for one after the other, and each line names all generations before it.
        self._line_of = functools.lru_cache(maxsize=2)(self._read_line)

    def read(self, *, everything: bool) -> History:
        try:
            self.line = read_line(self.tier, self.run, known=self.heads)
            check_generations(self.tier, self.listings, self.line)
        except HeadRecordError as error:
            if not everything:
                raise HeadRecordError(f"{error}, or list all checkpoints (asymcheck log --all)") from error
            self.line, self.line_problem = None, str(error)
        unread = [listing for listing in self.listings if listing.ref not in self.known]
        new = {listing.ref: self._read_manifests(listing) for listing in self.tier.manifests.each(unread)}
        read = [self._read(listing, new) for listing in self.listings]
        self.complete = [entry.checkpoint.ref for entry in read if entry.checkpoint.complete]
        shown = [
            self._with_previous(entry)
            for entry in read
            if everything or (entry.checkpoint.complete and entry.checkpoint.on_line)
        ]
        hidden = [] if everything else [entry.checkpoint for entry in read]
        return History(
            run=self.run,
            generation=None if self.line is None else self.line.generation,
            entries=tuple(reversed(shown)),
            openings=tuple(self._generation_starts(everything=everything)),
            hidden_abandoned=sum(checkpoint.on_line is False for checkpoint in hidden),
            hidden_incomplete=sum(bool(checkpoint.on_line) and not checkpoint.complete for checkpoint in hidden),
            line_problem=self.line_problem,
        )

    def _listings(self) -> list[CheckpointFiles]:
        """List only the checkpoints that are not known."""
        manifests, run, known = self.tier.manifests, self.run, self.known
        listings = [known[ref][0] if ref in known else manifests.listing(run, ref) for ref in manifests.refs(run)]
        return [listing for listing in listings if listing.manifests]

    def _read(self, listing: CheckpointFiles, new: Mapping[CheckpointRef, HistoryEntry]) -> HistoryEntry:
        if listing.ref not in self.known:
            entry = new[listing.ref]
            if not entry.checkpoint.complete:
                return entry
            self.known[listing.ref] = listing, entry
        entry = self.known[listing.ref][1]
        # A new generation may have abandoned the checkpoint.
        on_line = None if self.line is None else listing.ref in self.line
        if entry.checkpoint.on_line is on_line:
            return entry
        return dataclasses.replace(entry, checkpoint=dataclasses.replace(entry.checkpoint, on_line=on_line))

    def _read_manifests(self, listing: CheckpointFiles) -> HistoryEntry:
        manifests = result_or_error(read_manifests, self.tier, listing)
        if isinstance(manifests, AsymcheckError):
            return HistoryEntry(describe_by(listing, None, self.line), "", None, None, str(manifests))
        writers = dict.fromkeys(manifest.header.writer for manifest in manifests)
        return HistoryEntry(describe_by(listing, manifests, self.line), ", ".join(writers), None, None, "")

    def _with_previous(self, entry: HistoryEntry) -> HistoryEntry:
        ref = entry.checkpoint.ref
        line = self._line_of(ref.generation)
        earlier = reversed(self.complete[: bisect.bisect_left(self.complete, ref)])
        previous = next((other for other in earlier if line is not None and other in line), None)
        if previous is None:
            return entry
        since = entry.checkpoint.created_ns - int.from_bytes(previous.save_id[:8], "big")
        return dataclasses.replace(entry, step_before=previous.step, since_before_ns=since)

    def _read_line(self, generation: int) -> Lineage | None:
        """Return the line with ``generation`` as the present generation, or None if a head record is lost."""
        try:
            return read_line(self.tier, self.run, generation, known=self.heads)
        except HeadRecordError:
            return None

    def _generation_starts(self, *, everything: bool) -> list[GenerationStart]:
        numbers = self.tier.manifests.heads(self.run)
        return [
            self._generation_start(generation, max(numbers[:index], default=1))
            for index, generation in reversed(list(enumerate(numbers)))
            if everything or (self.line is not None and generation in self.line.limits)
        ]

    def _generation_start(self, generation: int, before: int) -> GenerationStart:
        on_line = self.line is not None and generation in self.line.limits
        record = result_or_error(self.tier.manifests.read_head, self.run, generation)
        if record is None or isinstance(record, AsymcheckError):
            problem = "the head record is missing" if record is None else str(record)
            return GenerationStart(generation, on_line, problem=problem)
        head, parent = record[0], record[0].parent
        step, number, save_id = (parent.step, parent.generation, parent.save_id.hex()) if parent else (None, None, None)
        abandoned = self._abandoned_by(generation, before)
        return GenerationStart(generation, on_line, head.created_ns, head.writer, step, number, save_id, abandoned)

    def _abandoned_by(self, generation: int, before: int) -> int | None:
        """Count the checkpoints on the line of generation ``before`` that are not on the line of ``generation``.

        Checkpoints that a process of the older generation saved later count, too.
        """
        if generation == 1:
            return 0
        old, new = self._line_of(before), self._line_of(generation)
        if old is None or new is None:
            return None
        # Most generations are the same in both lines, and a run may have thousands.
        other = {number for number, limit in old.limits.items() if new.limits.get(number, old) != limit}
        return sum(ref in old and ref not in new for number in other for ref in self._refs_of.get(number, ()))
