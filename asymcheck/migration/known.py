"""Known: the checkpoints of one run at one place, each read once, for decisions that are made again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from asymcheck.errors import UNKNOWING, AsymcheckError, HeadRecordError
from asymcheck.format.manifest import Manifest
from asymcheck.recovery.describe import describe_by
from asymcheck.recovery.line import Line, read_line
from asymcheck.recovery.resolve import read_manifests
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import Checkpoint, CheckpointRef


class Known:
    """What is complete of a run at one place. For one thread at a time."""

    def __init__(self, tier: ReadTier, run: str, *, metrics: bool) -> None:
        """Look into ``tier``; without ``metrics`` no manifest is read: names say the rest."""
        self._tier = tier
        self._run = run
        self._metrics = metrics
        self._listings: dict[CheckpointRef, CheckpointFiles] = {}
        self._described: dict[CheckpointRef, Checkpoint] = {}
        self._is_first = True
        self._heads: list[int] | None = None
        self._line: Line | None = None
        self._present: Line | None = None

    def look(self) -> list[Checkpoint]:
        """Return what is complete now, oldest first.

        After the first time it takes one listing, and one for each checkpoint that is new or was not complete.

        Raises:
            RemoteUnreachableError, StorageError: nobody knows.
        """
        manifests = self._tier.manifests
        if self._is_first:
            self._listings = {listing.ref: listing for listing in manifests.checkpoints(self._run)}
            refs = sorted(self._listings)
            self._is_first = False
        else:
            refs = manifests.refs(self._run)
            before = self._listings
            self._listings = {
                ref: before[ref] if ref in before and before[ref].is_complete else manifests.listing(self._run, ref)
                for ref in refs
            }
        line = self._present = self._present_line(refs)
        self._described = {ref: self._describe(ref) for ref in refs if self._listings[ref].is_complete}
        return [
            dataclasses.replace(one, on_line=None if line is None else ref in line)
            for ref, one in self._described.items()
        ]

    @property
    def generation(self) -> int:
        """The newest one that the last look has seen, by its head record or a checkpoint."""
        return max([*(self._heads or ()), *(ref.generation for ref in self._listings)], default=1)

    def placed(self, others: Iterable[Checkpoint], generation: int) -> list[Checkpoint]:
        """Return checkpoints that lie elsewhere, where ``generation`` is the newest, by the line of the last look.

        As they are when that is not known, or is older than what is known elsewhere.
        """
        line = self._present
        if line is None or line.generation < generation:
            return list(others)
        return [dataclasses.replace(one, on_line=one.ref in line) for one in others]

    def listing(self, one: Checkpoint) -> CheckpointFiles | None:
        """Return the manifests of a checkpoint; None when the last look has not found it."""
        return self._listings.get(one.ref)

    def unfinished(self) -> list[CheckpointRef]:
        """Return those of which the last look has found some manifests, and not all."""
        return [ref for ref, listing in self._listings.items() if listing.manifests and not listing.is_complete]

    def _describe(self, ref: CheckpointRef) -> Checkpoint:
        known = self._described.get(ref)
        if known is not None:
            return known
        listing = self._listings[ref]
        manifests: list[Manifest] = []
        if self._metrics:
            try:
                manifests = read_manifests(self._tier, listing)
            except UNKNOWING:
                raise
            except AsymcheckError:
                # Damaged, or deleted a moment ago: whoever copies it will say so.
                manifests = []
        return describe_by(listing, manifests, None)

    def _present_line(self, refs: list[CheckpointRef]) -> Line | None:
        heads = self._tier.manifests.heads(self._run)
        if heads != self._heads:
            try:
                self._line = read_line(self._tier, self._run)
            except HeadRecordError:
                self._line = None
            self._heads = heads
        if self._line is not None and any(ref.generation > self._line.generation for ref in refs):
            return None
        return self._line
