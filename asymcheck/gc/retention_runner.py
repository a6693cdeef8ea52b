"""Run retention: delete the checkpoints that no rule keeps, then collect garbage."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from asymcheck.commit.transaction import remove
from asymcheck.errors import (
    AsymcheckError,
    FormatError,
    LockTimeoutError,
    RecoveryError,
    StorageError,
    UnsupportedFormatError,
)
from asymcheck.format import layout
from asymcheck.gc.collect import Collected, collect
from asymcheck.inspect.history import describe_by, known_line
from asymcheck.policies.retention import Retention, Verdict, choose_kept
from asymcheck.restore.lineage import Heads, Lineage
from asymcheck.restore.resolve import read_manifests, resolve_one
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme import Catalog, CheckpointFiles, NvmeTier
from asymcheck.storage.reachability import StoreReachability
from asymcheck.types import Checkpoint, CheckpointRef, PackId

Held = Callable[[], Mapping[str, str]]
"""Returns the save ids of checkpoints that must be kept regardless of the rules, with the reasons."""


@dataclasses.dataclass(frozen=True)
class Pruned:
    """Result of pruning, or the plan of a dry run."""

    run: str
    verdicts: tuple[Verdict, ...]
    """All checkpoints of the run, oldest first, with the reasons to keep them. Those without reasons were deleted."""
    collected: Collected
    """Result of the garbage collection."""

    @property
    def removed(self) -> list[Checkpoint]:
        """The deleted checkpoints."""
        return [verdict.checkpoint for verdict in self.verdicts if not verdict.stays]


class _CheckpointFacts(NamedTuple):
    """A checkpoint with the packs and the names of its manifests, which never change."""

    checkpoint: Checkpoint
    packs: frozenset[PackId]
    names: tuple[layout.ManifestName, ...]


def newest_consistent(
    tier: ReadTier, checkpoints: Sequence[Checkpoint], listing_of: Callable[[Checkpoint], CheckpointFiles | None]
) -> dict[str, str]:
    """Return the save id of the newest consistent checkpoint, or of all checkpoints if none is consistent.

    Each save id comes with the reason to keep the checkpoint.

    Raises:
        UnsupportedFormatError, TooManyFilesError, RemoteUnreachableError: consistency cannot be determined.
    """
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.ref, reverse=True):
        listing = listing_of(checkpoint) if checkpoint.on_line and checkpoint.complete else None
        if listing is not None:
            try:
                resolve_one(tier, listing).sources.close()
            except UnsupportedFormatError:
                raise
            except (FormatError, RecoveryError):
                continue
            return {checkpoint.save_id: "newest consistent"}
    return {checkpoint.save_id: "none on the line is consistent" for checkpoint in checkpoints}


class Pruner:
    """Prunes one run repeatedly, and reads only new checkpoints each time. Not thread-safe."""

    def __init__(
        self, tier: NvmeTier, catalog: Catalog, run: str, retention: Retention, held: Held = dict[str, str]
    ) -> None:
        """Prune ``run`` by ``retention``; ``held`` returns checkpoints that must be kept."""
        self._tier, self._catalog, self._run, self._retention, self._held = tier, catalog, run, retention, held
        self._needed = StoreReachability(tier)
        self._heads: Heads = {}
        self._checkpoints: dict[CheckpointRef, _CheckpointFacts] = {}
        self._synced: set[CheckpointRef] = set()
        self._is_unfinished = True

    def prune(self, now_ns: int, *, dry_run: bool = False, always_collect: bool = False) -> Pruned:
        """Delete the checkpoints that no rule keeps, and collect garbage.

        Args:
            now_ns: the current time, nanoseconds since 1970-01-01 UTC.
            dry_run: return the plan and change nothing.
            always_collect: collect even if no checkpoint was deleted.

        Raises:
            StorageError: the device failed, or refused to delete a checkpoint. The others were deleted, except
                unreadable ones.
            UnsupportedFormatError: a checkpoint needs a newer program. Nothing was deleted.
            InconsistentCheckpointError: a manifest is damaged. Checkpoints were deleted, but no pack was freed.
        """
        line, listings = known_line(self._tier, self._run, self._heads), self._listings()
        verdicts = self._judge(line, listings, now_ns)
        to_delete = [verdict.checkpoint.ref for verdict in verdicts if not verdict.stays]
        if dry_run:
            without = [(self._run, ref) for ref in to_delete]
            return Pruned(self._run, tuple(verdicts), collect(self._tier, self._catalog, dry_run=True, without=without))
        collected = Collected()
        if to_delete and known_line(self._tier, self._run, self._heads) != line:
            # Training went back to an earlier checkpoint meanwhile, perhaps to one of these.
            return self.prune(now_ns, always_collect=always_collect)
        if to_delete:
            # Another process may have been killed between its commit and the sync.
            kept = {verdict.checkpoint.ref for verdict in verdicts if verdict.stays}
            self._tier.manifests.sync_checkpoints(self._run, kept - self._synced)
            self._synced = kept
        refused: StorageError | None = None
        for ref in to_delete:
            try:
                remove(self._tier, self._catalog, listings[ref])
            except LockTimeoutError:
                raise
            except StorageError as error:
                # Perhaps another user has saved it. Otherwise, all newer ones would fill the drive.
                refused = refused or error
        if to_delete or always_collect or self._is_unfinished:
            self._is_unfinished = True
            collected = collect(self._tier, self._catalog, needed=self._needed)
            self._is_unfinished = collected.busy_packs > 0
        if refused is not None:
            raise refused
        return Pruned(self._run, tuple(verdicts), collected)

    def _listings(self) -> dict[CheckpointRef, CheckpointFiles]:
        listings = {listing.ref: listing for listing in self._tier.manifests.checkpoints(self._run)}
        checkpoints = {}
        for ref, listing in listings.items():
            entry = self._checkpoints.get(ref)
            # An incomplete checkpoint may become complete.
            is_known = entry is not None and entry.checkpoint.complete and entry.names == listing.manifests
            checkpoints[ref] = entry if entry is not None and is_known else self._read(listing)
        self._checkpoints = checkpoints
        return listings

    def _read(self, listing: CheckpointFiles) -> _CheckpointFacts:
        try:
            manifests = read_manifests(self._tier, listing)
        except (UnsupportedFormatError, StorageError):
            # The checkpoint may be intact: it must not count as incomplete, and be deleted for that reason.
            raise
        except AsymcheckError:
            return _CheckpointFacts(describe_by(listing, None, None), frozenset(), listing.manifests)
        packs = frozenset(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        return _CheckpointFacts(describe_by(listing, manifests, None), packs, listing.manifests)

    def _judge(
        self, line: Lineage | None, listings: Mapping[CheckpointRef, CheckpointFiles], now_ns: int
    ) -> list[Verdict]:
        checkpoints = [
            dataclasses.replace(entry.checkpoint, on_line=None if line is None else ref in line)
            for ref, entry in self._checkpoints.items()
        ]
        verdicts = choose_kept(self._retention, checkpoints, now_ns)
        if all(verdict.stays for verdict in verdicts):
            return verdicts
        held = {
            **self._held(),
            **newest_consistent(self._tier, checkpoints, lambda checkpoint: listings[checkpoint.ref]),
        }
        verdicts = choose_kept(self._retention, checkpoints, now_ns, held)
        return choose_kept(self._retention, checkpoints, now_ns, {**self._being_read(verdicts), **held})

    def _being_read(self, verdicts: Sequence[Verdict]) -> dict[str, str]:
        """Return checkpoints to delete that are being read: a pack that only they need is locked."""
        packs = {verdict.checkpoint.save_id: self._checkpoints[verdict.checkpoint.ref].packs for verdict in verdicts}
        kept = frozenset().union(*(packs[verdict.checkpoint.save_id] for verdict in verdicts if verdict.stays))
        to_delete = {verdict.checkpoint.save_id for verdict in verdicts if not verdict.stays}
        unshared = frozenset().union(*(packs[save_id] for save_id in to_delete)) - kept
        locked = {pack_id for pack_id in unshared if self._is_locked(pack_id)}
        return {save_id: "being read" for save_id in to_delete if packs[save_id] & locked}

    def _is_locked(self, pack_id: PackId) -> bool:
        path = self._tier.pack_path(pack_id)
        with self._tier.locked(path) as held:
            # A repacked pack no longer exists.
            return not held and path.exists()


class MaintenanceThread:
    """Prunes after each commit and on a full drive, and keeps the last failure for the training loop."""

    def __init__(self, make: Callable[[], Pruner]) -> None:
        """Prune with the result of ``make``, which is called after the first commit."""
        self._make = make
        self._pruner: Pruner | None = None
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._reported = ""

    def after_commit(self, *, is_full: bool = False) -> None:
        """Prune; never raises.

        With ``is_full``, a save has failed on a full drive. Free its packs, and retry an earlier pruning that failed or
        had to keep checkpoints. Otherwise no save might ever succeed again.
        """
        with self._lock:
            try:
                if self._pruner is None:
                    self._pruner = self._make()
                self._pruner.prune(time.time_ns(), always_collect=is_full)
            except Exception as error:  # noqa: BLE001 - the checkpoint is committed; the training loop reports the failure
                self._failure = error
                # The cached state may have caused the failure.
                self._pruner = None
            else:
                self._failure, self._reported = None, ""

    def still(self) -> contextlib.AbstractContextManager[object]:
        """Wait for a running prune, and block pruning in the ``with`` block."""
        return self._lock

    def new_failure(self) -> Exception | None:
        """Return the failure of the last pruning, once for each message."""
        failure = self._failure
        if failure is None or str(failure) == self._reported:
            return None
        self._reported = str(failure)
        return failure
