"""Checkpoint cache: the checkpoints of a run at one place, each read once, and which of a location's are whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    FormatError,
    HeadRecordError,
    MissingPartitionError,
    UnsupportedFormatError,
)
from asymcheck.format import registry
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import ENTRY_DTYPE, Entries
from asymcheck.inspect.history import describe_by
from asymcheck.restore.lineage import Lineage, read_line
from asymcheck.restore.partition_locator import PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Checkpoint, CheckpointRef, PackId

_FIRST_PACKS = 16
"""So many are looked into first: the newest packs serve the newest checkpoint."""


class CheckpointCache:
    """The complete checkpoints of a run at one place, for decisions that are made again and again. For one thread."""

    def __init__(self, tier: ReadTier, run: str, *, metrics: bool) -> None:
        """Look into ``tier``; without ``metrics`` no manifest is read: names say the rest."""
        self._tier = tier
        self._run = run
        self._metrics = metrics
        self._listings: dict[CheckpointRef, CheckpointFiles] = {}
        self._described: dict[CheckpointRef, Checkpoint] = {}
        self._is_first = True
        self._heads: list[int] | None = None
        self._line: Lineage | None = None
        self._present: Lineage | None = None

    def look(self) -> list[Checkpoint]:
        """Return what is complete now, oldest first.

        After the first time it takes one listing, and one for each checkpoint that is new or was not complete.
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

    def _present_line(self, refs: list[CheckpointRef]) -> Lineage | None:
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


class RemotePresence:
    """Current content of a location. Each index is read at most once, and only if it is needed. For one thread."""

    def __init__(self, there: RemoteTier) -> None:
        self._there = there
        self._unread: list[PackId] | None = None
        self._read = 0
        self._entries: Entries = np.empty(0, dtype=ENTRY_DTYPE)
        self._readable = self._entries
        self._digests = DigestSet(self._readable["digest"])

    def has(self, listing: CheckpointFiles) -> bool:
        """Tell whether a checkpoint is whole: its manifests are intact, and all that they name is in sound packs.

        A pack that a collection is about to remove does not count: a user of the pack has to reprieve it first.

        Raises:
            UnsupportedFormatError: it needs a newer program.
        """
        try:
            needs = PartitionSet.of_manifests(read_manifests(self._there, listing))
        except UnsupportedFormatError:
            raise
        except (FormatError, MissingPartitionError):
            return False
        while not self._holds(needs):
            if not self._read_more():
                return False
        return True

    def _holds(self, needs: PartitionSet) -> bool:
        numbers = self._digests.numbers(needs.digests.column)
        if (numbers < 0).any():
            return False
        lengths = self._readable["plain_length"][self._digests.first[numbers]]
        return bool(np.array_equal(lengths.astype(np.int64), needs.lengths))

    def _read_more(self) -> bool:
        """Look into as many packs as before once more; return False when all were looked into."""
        if self._unread is None:
            self._unread = list(self._there.lasting_packs())
        count = max(self._read, _FIRST_PACKS)
        some, self._unread = self._unread[:count], self._unread[count:]
        if not some:
            return False
        self._read += len(some)
        found = self._there.read_indexes(some).values()
        new = [index.entries for index in found if index is not None and index.damage is None]
        self._entries = np.concatenate([self._entries, *new])
        self._readable = _readable(self._entries)
        self._digests = DigestSet(self._readable["digest"])
        return True


def _readable(entries: Entries) -> Entries:
    """Return the frames that can be decoded from these alone (SPEC.md §12.5)."""
    bases = entries[entries["kind"] == registry.KIND_FULL]
    deltas = entries[entries["kind"] == registry.KIND_DELTA]
    for _ in range(registry.DELTA_DEPTH_MAX):
        has_base = _have_bases(deltas, bases)
        if not has_base.any():
            break
        bases, deltas = np.concatenate([bases, deltas[has_base]]), deltas[~has_base]
    derived = entries[entries["kind"] == registry.KIND_DERIVED]
    return np.concatenate([bases, derived[_have_bases(derived, bases)]])


def _have_bases(entries: Entries, bases: Entries) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = DigestSet(bases["digest"]).numbers(entries["base_digest"]) >= 0
    return found
