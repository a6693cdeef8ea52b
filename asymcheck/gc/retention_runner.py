"""Pruning: delete the checkpoints that retention does not keep, then free the packs that nothing needs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from asymcheck.commit.transaction import remove
from asymcheck.errors import AsymcheckError, FormatError, RecoveryError, StorageError, UnsupportedFormatError
from asymcheck.format import layout
from asymcheck.gc.collect import Collected, collect
from asymcheck.inspect.history import describe_by, known_line
from asymcheck.policies.retention import Retention, Verdict, judge
from asymcheck.restore.lineage import Lineage
from asymcheck.restore.resolve import read_manifests, resolve_one
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme import Catalog, CheckpointFiles, NvmeTier
from asymcheck.storage.reachability import StoreReachability
from asymcheck.types import Checkpoint, CheckpointRef, PackId

Held = Callable[[], Mapping[str, str]]
"""Asked before anything is deleted: the save ids of what stays whatever the rules say, with the reasons."""


@dataclasses.dataclass(frozen=True)
class Pruned:
    """Result of pruning, or with ``dry_run`` its plan."""

    run: str
    verdicts: tuple[Verdict, ...]
    """Every checkpoint of the run, oldest first, with the reasons for which it stays; those without went."""
    collected: Collected
    """Result of the garbage collection."""

    @property
    def removed(self) -> list[Checkpoint]:
        """The checkpoints that went."""
        return [verdict.checkpoint for verdict in self.verdicts if not verdict.stays]


class _Known(NamedTuple):
    """Facts about a checkpoint from its manifests, which never change."""

    checkpoint: Checkpoint
    packs: frozenset[PackId]
    names: tuple[layout.ManifestName, ...]


def newest_consistent(
    tier: ReadTier, found: Sequence[Checkpoint], listing_of: Callable[[Checkpoint], CheckpointFiles | None]
) -> dict[str, str]:
    """Return the save id of the one to restore now, with that reason; all there are, while none can be restored.

    Raises:
        UnsupportedFormatError, TooManyFilesError, RemoteUnreachableError: that cannot be told.
    """
    for one in sorted(found, key=lambda one: one.ref, reverse=True):
        listing = listing_of(one) if one.on_line and one.complete else None
        if listing is not None:
            try:
                resolve_one(tier, listing).sources.close()
            except UnsupportedFormatError:
                raise
            except (FormatError, RecoveryError):
                continue
            return {one.save_id: "newest consistent"}
    return {one.save_id: "none on the line is consistent" for one in found}


class Pruner:
    """Prunes one run, again and again: it reads only what is new since the last time. For one thread at a time."""

    def __init__(
        self, tier: NvmeTier, catalog: Catalog, run: str, retention: Retention, held: Held = dict[str, str]
    ) -> None:
        """Keep of ``run`` what ``retention`` says, and what is ``held``."""
        self._tier, self._catalog, self._run, self._retention, self._held = tier, catalog, run, retention, held
        self._needed = StoreReachability(tier)
        self._present: dict[CheckpointRef, _Known] = {}
        self._is_unfinished = True

    def prune(self, now_ns: int, *, dry_run: bool = False, always_collect: bool = False) -> Pruned:
        """Delete what no rule keeps, and free what it alone needed.

        Args:
            now_ns: the present, nanoseconds since 1970-01-01 UTC.
            dry_run: only say.
            always_collect: also when nothing was deleted; without, not before something was.

        Raises:
            StorageError: the device refused; what could not be read was not deleted.
            UnsupportedFormatError: a checkpoint needs a newer program; nothing was deleted.
            InconsistentCheckpointError: a manifest is damaged, so that nothing can be freed; what goes was deleted.
        """
        line, listings = known_line(self._tier, self._run), self._listings()
        verdicts = self._judge(line, listings, now_ns)
        going = [verdict.checkpoint.ref for verdict in verdicts if not verdict.stays]
        if dry_run:
            without = [(self._run, ref) for ref in going]
            return Pruned(self._run, tuple(verdicts), collect(self._tier, self._catalog, dry_run=True, without=without))
        collected = Collected()
        if going and known_line(self._tier, self._run) != line:
            # Training went back meanwhile, perhaps to one of these.
            return self.prune(now_ns, always_collect=always_collect)
        for ref in going:
            remove(self._tier, self._catalog, listings[ref])
        if going or always_collect or self._is_unfinished:
            self._is_unfinished = True
            collected = collect(self._tier, self._catalog, needed=self._needed)
            self._is_unfinished = collected.busy_packs > 0
        return Pruned(self._run, tuple(verdicts), collected)

    def _listings(self) -> dict[CheckpointRef, CheckpointFiles]:
        listings = {listing.ref: listing for listing in self._tier.manifests.checkpoints(self._run)}
        present = {}
        for ref, listing in listings.items():
            entry = self._present.get(ref)
            # What is not whole may be tomorrow.
            is_known = entry is not None and entry.checkpoint.complete and entry.names == listing.manifests
            present[ref] = entry if entry is not None and is_known else self._read(listing)
        self._present = present
        return listings

    def _read(self, listing: CheckpointFiles) -> _Known:
        try:
            manifests = read_manifests(self._tier, listing)
        except (UnsupportedFormatError, StorageError):
            # Nothing is known to be wrong with it: it must not count as incomplete, and go for that.
            raise
        except AsymcheckError:
            return _Known(describe_by(listing, None, None), frozenset(), listing.manifests)
        packs = frozenset(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        return _Known(describe_by(listing, manifests, None), packs, listing.manifests)

    def _judge(
        self, line: Lineage | None, listings: Mapping[CheckpointRef, CheckpointFiles], now_ns: int
    ) -> list[Verdict]:
        found = [
            dataclasses.replace(entry.checkpoint, on_line=None if line is None else ref in line)
            for ref, entry in self._present.items()
        ]
        verdicts = judge(self._retention, found, now_ns)
        if all(verdict.stays for verdict in verdicts):
            return verdicts
        held = {**self._held(), **newest_consistent(self._tier, found, lambda one: listings[one.ref])}
        verdicts = judge(self._retention, found, now_ns, held)
        return judge(self._retention, found, now_ns, {**self._being_read(verdicts), **held})

    def _being_read(self, verdicts: Sequence[Verdict]) -> dict[str, str]:
        """Return those that would go and that somebody reads: a pack that they alone need is locked."""
        packs = {verdict.checkpoint.save_id: self._present[verdict.checkpoint.ref].packs for verdict in verdicts}
        staying = frozenset().union(*(packs[one.checkpoint.save_id] for one in verdicts if one.stays))
        going = {one.checkpoint.save_id for one in verdicts if not one.stays}
        alone = frozenset().union(*(packs[save_id] for save_id in going)) - staying
        locked = {pack_id for pack_id in alone if self._is_locked(pack_id)}
        return {save_id: "being read" for save_id in going if packs[save_id] & locked}

    def _is_locked(self, pack_id: PackId) -> bool:
        path = self._tier.packs / layout.pack_name(pack_id)
        with self._tier.locked(path) as held:
            # One that was repacked is there no more.
            return not held and path.exists()


class MaintenanceThread:
    """Prunes after each commit; what fails is kept for the training loop."""

    def __init__(self, make: Callable[[], Pruner]) -> None:
        """Prune with what ``make`` returns when the first checkpoint has been committed."""
        self._make = make
        self._pruner: Pruner | None = None
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._told = ""

    def after_commit(self) -> None:
        """Prune; never raises."""
        with self._lock:
            try:
                if self._pruner is None:
                    self._pruner = self._make()
                self._pruner.prune(time.time_ns())
            except Exception as error:  # noqa: BLE001 - the checkpoint is committed; the loop is told of the rest
                self._failure = error
                # What it knows may be what is wrong.
                self._pruner = None
            else:
                self._failure, self._told = None, ""

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Wait until nothing is being pruned, and let nothing be inside the ``with`` block."""
        with self._lock:
            yield

    def new_failure(self) -> Exception | None:
        """Return why the last pruning failed, once for each reason."""
        failure = self._failure
        if failure is None or str(failure) == self._told:
            return None
        self._told = str(failure)
        return failure
