"""Garbage collection and retention in a remote location: without locks, by age and in two steps (SPEC.md §8.6)."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

from asymcheck.errors import AsymcheckError, InconsistentCheckpointError
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.gc.collect import Collected, Sweep
from asymcheck.gc.retention_runner import newest_consistent
from asymcheck.policies.retention import Retention, Verdict, judge
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.storage.base_frames import bases_in
from asymcheck.storage.pack_index import digests_of
from asymcheck.storage.reachability import HeldFrames, Reachability
from asymcheck.storage.remote import RemoteTier
from asymcheck.storage.remote.client_interface import Entry
from asymcheck.types import Checkpoint, Digest, PackId

_COLLECT_S = 3600.0
"""A collection reads all manifests there, and frees only what is older than a day: more of them would find nothing."""


def collect_remote(there: RemoteTier, *, dry_run: bool = False) -> Collected:
    """Remove packs that no checkpoint needs and files of interrupted uploads; safe beside uploads of others.

    Files younger than ``grace_s`` stay.

    Raises:
        InconsistentCheckpointError: a manifest, or the index of a pack, cannot be read, so that what they need is
            unknown; no pack was removed.
        RemoteUnreachableError: nobody answers.
    """
    return RemoteSweep(there, dry_run=dry_run).carry_out()


class RemoteReachability(Reachability):
    """Reachable partitions of a remote location. A collection reads each fact once."""

    tier: RemoteTier

    def __init__(self, there: RemoteTier) -> None:
        super().__init__(there, f"nothing was removed from {there.location}")
        self._damaged: set[PackId] = set()
        self._scanned: set[Digest] = set()

    def _read_packs(self) -> None:
        new = [pack_id for pack_id in self.tier.pack_ids() if pack_id not in self._bases]
        for pack_id, index in self.tier.read_indexes(new).items():
            is_sound = index is not None and index.damage is None
            if not is_sound:
                self._damaged.add(pack_id)
            if index is not None:
                # Also of a damaged one: what was found in it may be all that there is of a live partition.
                self._bases[pack_id] = bases_in(index.entries)
                if pack_id in self._damaged:
                    self._scanned.update(digests_of(index.entries))
                else:
                    self.packs[pack_id] = HeldFrames(index.entries)
        # What lies in no pack may lie where a pack could not be read, encoded against anything.
        is_certain = not self._damaged or self.live() <= self._scanned.union(
            *(one.names for one in self.packs.values())
        )
        self.problem = None if is_certain else InconsistentCheckpointError(self._uncertainty())

    def _uncertainty(self) -> str:
        names = ", ".join(layout.pack_name(pack_id) for pack_id in sorted(self._damaged))
        return (
            f"{self._refusal}, because {names} is damaged, and what the checkpoints that need it are encoded against "
            f"is unknown; delete those first: asymcheck verify {self.tier.location} names them"
        )


class RemoteSweep(Sweep):
    """A collection in a remote location: packs are announced as garbage by another name, and are removed under it."""

    def __init__(self, there: RemoteTier, *, dry_run: bool) -> None:
        super().__init__(RemoteReachability(there), dry_run=dry_run)
        self._there = there
        self._before_ns = time.time_ns() - int(there.config.remote.grace_s * 1e9)
        self._name = os.urandom(16)
        self._spared: AsymcheckError | None = None

    def _remove_temporaries(self) -> None:
        for entry in self._there.temporaries():
            if entry.is_older(self._before_ns):
                self.result.removed_temporaries += 1
                if not self.dry_run:
                    self._there.files.delete(entry.path)

    def _mark(self) -> None:
        """Find what is old enough, and is garbage."""
        # In this order: whoever relies on a pack of this listing, and commits after the manifests were read, looks for
        # it again then.
        self.packs = self._there.lasting_packs()
        self.reachable.look()
        self.candidates = self._garbage([one for one, entry in self.packs.items() if entry.is_older(self._before_ns)])

    def _garbage(self, among: Collection[PackId]) -> set[PackId]:
        found = self.reachable.garbage().keys() & among
        if found and self.reachable.problem is not None:
            self._spared = self.reachable.problem
            return set()
        return found

    def _count(self) -> None:
        """Count the candidates, and what others have announced."""
        self.doomed = self._there.doomed_packs()
        for packs, garbage in ((self.packs, self.candidates), (self.doomed, self._garbage(self.doomed))):
            for pack_id in garbage:
                self._count_freed(packs[pack_id].size)

    def _free(self, *, insists: bool) -> bool:  # noqa: ARG002 - nothing that comes makes it begin again
        """Announce the candidates, look again, and remove them; take back what is needed by then."""
        for pack_id, entry in self.packs.items():
            if pack_id in self.candidates and self._there.doom(entry, pack_id, self._name):
                emit("remote.pack_doomed", entry.path.name)
        for pack_id, entry in self._there.doomed_packs().items():
            # What others have announced is taken over, for they may have been killed. What a living one has seen of it
            # is not what holds then: it removes under its own names only, as this one does.
            if not self._is_own(pack_id, entry):
                self._there.doom(entry, pack_id, self._name)
        self.doomed = self._there.doomed_packs()
        self.reachable.look()
        garbage = self._garbage(self.doomed)
        for pack_id in sorted(garbage):
            entry = self.doomed[pack_id]
            if self._is_own(pack_id, entry):
                self._there.files.delete(entry.path)
                emit("remote.pack_removed", pack_id.hex())
                self._count_freed(entry.size)
        needed = self.doomed.keys() - garbage
        if needed:
            self._there.reprieve(needed)
        return True

    def _is_own(self, pack_id: PackId, entry: Entry) -> bool:
        return entry.path.name == layout.doomed_name(pack_id, self._name)

    def _finish(self) -> None:
        """Count what stays.

        Raises:
            InconsistentCheckpointError: packs stay because it is unknown whether they are needed.
        """
        if self._spared is not None:
            raise self._spared
        self.result.kept_packs = len(self.packs.keys() | self.doomed.keys()) - self.result.freed_packs


class RemotePruner:
    """Prunes one run of a remote location, again and again. For one thread."""

    def __init__(self, there: RemoteTier, run: str, retention: Retention) -> None:
        """Keep of ``run`` what ``retention`` says."""
        self._there = there
        self._run = run
        self._retention = retention
        self._known = CheckpointCache(there, run, metrics=retention.keep_best is not None)
        self._collect_s = min(_COLLECT_S, there.config.remote.grace_s)
        self._collected_at: float | None = None
        self._has_garbage = True
        self.failure: AsymcheckError | None = None
        """Why nothing could be freed the last time; None when it could."""

    def prune(self, now_ns: int) -> list[Checkpoint]:
        """Delete the checkpoints that no rule keeps, and return them; collect garbage from time to time.

        Incomplete checkpoints older than the newest complete one go, too, if no upload has continued them for long.

        Raises:
            RemoteUnreachableError, StorageError: the location did not answer, or refused.
        """
        found = self._known.look()
        verdicts = judge(self._retention, found, now_ns)
        if not all(verdict.stays for verdict in verdicts):
            verdicts = judge(self._retention, found, now_ns, newest_consistent(self._there, found, self._known.listing))
        going = [verdict.checkpoint for verdict in verdicts if not verdict.stays]
        for one in going:
            self._there.manifests.remove(self._run, one.ref)
        left = self._remove_left(verdicts, now_ns)
        self._has_garbage |= bool(going) or left
        now = time.monotonic()
        if self._has_garbage and (self._collected_at is None or now - self._collected_at >= self._collect_s):
            # One that fails does so after it has read as much, and is no sooner begun again.
            self._collected_at = now
            self._collect(found_more=bool(going))
        return going

    def _remove_left(self, verdicts: Sequence[Verdict], now_ns: int) -> bool:
        """Remove parts of checkpoints whose other parts never came: machines were lost, or have deleted theirs."""
        newest = max((one.checkpoint.ref for one in verdicts if one.stays and one.checkpoint.on_line), default=None)
        before_ns = now_ns - int(self._there.config.remote.grace_s * 1e9)
        # What is newer may be on its way, or is all that a machine can come back from.
        old = [ref for ref in self._known.unfinished() if newest is not None and ref < newest]
        return bool([ref for ref in old if self._there.manifests.remove_left(self._run, ref, before_ns)])

    def _collect(self, *, found_more: bool) -> None:
        try:
            collected = collect_remote(self._there)
        except AsymcheckError as error:
            self.failure = error
        else:
            self.failure = None
            # What is too young goes with a later one.
            self._has_garbage = found_more or collected.freed_packs > 0
