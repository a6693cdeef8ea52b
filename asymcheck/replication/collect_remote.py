"""Garbage collection and retention at a remote location, without locks: by age, in two steps (SPEC.md §C3)."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import PurePath

from asymcheck.errors import AsymcheckError, InconsistentCheckpointError, RemoteUnreachableError, StorageError
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.gc.collect import Collected
from asymcheck.gc.retention_runner import newest_consistent
from asymcheck.policies.retention import Retention, Verdict, choose_kept
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.storage.pack_index import bases_in, digests_of
from asymcheck.storage.reachability import HeldFrames, Reachability
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Checkpoint, Digest, PackId

_COLLECT_S = 3600.0
"""Minimum seconds between two collections. Each reads all manifests, and frees only files older than a day."""


class RemoteReachability(Reachability):
    """Reachable partitions of a remote location."""

    tier: RemoteTier

    def __init__(self, remote: RemoteTier) -> None:
        super().__init__(remote, f"nothing was removed from {remote.location}")
        self._damaged: set[PackId] = set()
        self._scanned: set[Digest] = set()

    def _read_packs(self) -> None:
        # Afterwards, because the manifests may be moved while they are read.
        self.tier.refuse_lost_location()
        new = [pack_id for pack_id in self.tier.pack_ids() if pack_id not in self._bases]
        for pack_id, index in self.tier.read_indexes(new).items():
            is_sound = index is not None and index.damage is None
            if not is_sound:
                self._damaged.add(pack_id)
            if index is not None:
                # A damaged pack may hold the only copy of a live partition.
                self._bases[pack_id] = bases_in(index.entries)
                if pack_id in self._damaged:
                    self._scanned.update(digests_of(index.entries))
                else:
                    self.packs[pack_id] = HeldFrames(index.entries)
        self.problem = None
        # A live partition in no pack may be in the unreadable part of a damaged pack, with any partition as its base.
        if self._damaged and self.live().difference(self._scanned, *(frames.names for frames in self.packs.values())):
            names = ", ".join(layout.pack_name(pack_id) for pack_id in sorted(self._damaged))
            self.problem = InconsistentCheckpointError(
                f"{self._refusal}, because {names} is damaged, so the bases that its checkpoints need are unknown. "
                f"Delete these checkpoints first; asymcheck verify {self.tier.location} lists them"
            )


class RemoteSweep:
    """Collection at a remote location: garbage is renamed to announce its removal, and removed under this name."""

    def __init__(self, remote: RemoteTier, *, dry_run: bool = False) -> None:
        self.reachable, self.dry_run, self.result = RemoteReachability(remote), dry_run, Collected()
        self._remote = remote
        self._before_ns = time.time_ns() - int(remote.config.remote.grace_s * 1e9)
        self._name = os.urandom(16)
        self._spared: AsymcheckError | None = None
        self.has_more = False
        """Whether a later collection may remove garbage that is too young, or whose removal was announced."""

    def carry_out(self) -> Collected:
        """Remove unreachable packs, and files of interrupted uploads; safe while other machines upload.

        Files younger than ``grace_s`` stay.

        Raises:
            InconsistentCheckpointError: a manifest or an index is unreadable, so reachability is unknown; no pack was
                removed.
            RemoteUnreachableError: the location does not respond, or its manifests are missing.
        """
        self._remove_temporaries()
        self._find_garbage()
        if self.dry_run:
            self._count()
        elif self._remote.files.renames:
            self._free()
        else:
            self._announce()
            self._free_announced()
        if self._spared is not None:
            raise self._spared
        self.result.kept_packs = len(self.packs.keys() | self.doomed.keys()) - self.result.freed_packs
        self.result.returned_bytes = self.result.freed_bytes
        return self.result

    def _remove_temporaries(self) -> None:
        temporaries, folders = self._remote.unfinished()
        old = [entry for entry in temporaries if entry.is_older(self._before_ns)]
        self.result.removed_temporaries = len(old)
        if self.dry_run:
            return
        for entry in old:
            self._remote.files.delete(entry.path)
        for folder in folders:
            if folder.is_older(self._before_ns):
                self._remote.files.delete_empty(folder.path)

    def _find_garbage(self) -> None:
        # Packs are listed before manifests: an upload that commits later checks its packs again.
        self.packs, self.doomed, self._announced = self._remote.list_packs()
        self.reachable.refresh()
        garbage = self._garbage(self.packs)
        self.candidates = {pack_id for pack_id in garbage if self.packs[pack_id].is_older(self._before_ns)}
        self.has_more = garbage > self.candidates

    def _garbage(self, packs: Collection[PackId]) -> set[PackId]:
        garbage = self.reachable.garbage().keys() & packs
        if garbage and self.reachable.problem is not None:
            self._spared = self.reachable.problem
            return set()
        return garbage

    def _count(self) -> None:
        """Count the candidates, and the packs that other collections have announced."""
        for packs, garbage in ((self.packs, self.candidates), (self.doomed, self._garbage(self.doomed))):
            for pack_id in garbage:
                self.result.count_freed(packs[pack_id].size)

    def _announce(self) -> set[PackId]:
        """Announce the candidates; return those that were still there."""
        own = set()
        for pack_id, entry in self.packs.items():
            if pack_id in self.candidates and self._remote.doom(entry, pack_id, self._name):
                emit("remote.pack_doomed", entry.path.name)
                own.add(pack_id)
        return own

    def _free(self) -> None:
        """Announce the candidates, check reachability again, remove garbage, and reprieve packs in use."""
        own = self._announce()
        for pack_id, entry in self.doomed.items():
            # Another collection that announced a pack may have been killed, so the pack is renamed. A running
            # collection only removes packs under its own name, so it skips the renamed pack.
            if self._remote.doom(entry, pack_id, self._name):
                own.add(pack_id)
        self.reachable.refresh()
        garbage = self._garbage(own)
        for pack_id in sorted(garbage):
            entry = self.packs.get(pack_id) or self.doomed[pack_id]
            self._remove(pack_id, entry.path.with_name(layout.doomed_name(pack_id, self._name)), entry.size)
        if own > garbage:
            self._remote.reprieve(own - garbage)

    def _remove(self, pack_id: PackId, path: PurePath, size: int) -> None:
        # A push may have renamed the pack back.
        if self._remote.files.delete(path):
            emit("remote.pack_removed", pack_id.hex())
            self.result.count_freed(size)

    def _free_announced(self) -> None:
        """Remove garbage that was announced before all running uploads began; reprieve packs in use.

        An object store has no rename that a push could undo. Pushes therefore rely on no announced pack, and an
        announcement becomes effective in a later collection, after the longest upload.
        """
        self.has_more |= bool(self.candidates)
        garbage = self._garbage(self.doomed)
        if self._spared is not None:
            return
        for pack_id, announced in self._announced.items():
            is_effective = min(entry.mtime_ns for entry in announced) <= self._before_ns
            if pack_id in garbage and is_effective:
                self._remove(pack_id, self.doomed[pack_id].path, self.doomed[pack_id].size)
            # A pack that was in no listing was removed by another collection, or is only being announced.
            self.has_more |= not is_effective
            if is_effective or (pack_id in self.doomed and pack_id not in garbage):
                for entry in announced:
                    self._remote.files.delete(entry.path)


class RemotePruner:
    """Applies the retention of one run at a remote location. For one thread."""

    def __init__(
        self, remote: RemoteTier, run: str, retention: Retention, known: CheckpointCache | None = None
    ) -> None:
        """Prune ``run`` by ``retention``; ``known`` caches its checkpoints, with their metrics if a rule needs them."""
        self._remote = remote
        self._run = run
        self._retention = retention
        self._known = known or CheckpointCache(remote, run, metrics=retention.keep_best is not None)
        self._collect_s = min(_COLLECT_S, remote.config.remote.grace_s)
        self._collected_at: float | None = None
        self._has_garbage = True
        self.failure: AsymcheckError | None = None
        """Error of the last collection; None if it succeeded."""

    def prune(self, now_ns: int) -> list[Checkpoint]:
        """Delete and return the checkpoints that no rule keeps; sometimes collect garbage.

        Incomplete checkpoints older than the newest complete one are deleted, too, after their grace period.

        Raises:
            RemoteUnreachableError: the location does not answer.
            StorageError: the location refused to delete a checkpoint. The others were deleted.
        """
        checkpoints = self._known.refresh()
        verdicts = choose_kept(self._retention, checkpoints, now_ns, self._known.unread)
        if not all(verdict.stays for verdict in verdicts):
            held = {**self._known.unread, **newest_consistent(self._remote, checkpoints, self._known.listing)}
            verdicts = choose_kept(self._retention, checkpoints, now_ns, held)
        deleted: list[Checkpoint] = []
        refused: StorageError | None = None
        for checkpoint in [verdict.checkpoint for verdict in verdicts if not verdict.stays]:
            try:
                self._remote.manifests.remove(self._run, checkpoint.ref)
                deleted.append(checkpoint)
            except RemoteUnreachableError:
                raise
            except StorageError as error:
                # Perhaps another user has pushed it. All newer ones would stay for ever.
                refused = refused or error
        self._has_garbage |= bool(deleted)
        try:
            self._has_garbage |= self._remove_unfinished(verdicts, now_ns)
        except RemoteUnreachableError:
            raise
        except StorageError as error:
            refused = refused or error
        now = time.monotonic()
        if self._has_garbage and (self._collected_at is None or now - self._collected_at >= self._collect_s):
            # A failed collection is as expensive, so the next one waits as long.
            self._collected_at = now
            self._collect(found_more=bool(deleted))
        if refused is not None:
            raise refused
        return deleted

    def _remove_unfinished(self, verdicts: Sequence[Verdict], now_ns: int) -> bool:
        """Remove old checkpoints of which other machines never pushed their parts; return whether any was removed."""
        newest = max(
            (verdict.checkpoint.ref for verdict in verdicts if verdict.stays and verdict.checkpoint.on_line),
            default=None,
        )
        before_ns = now_ns - int(self._remote.config.remote.grace_s * 1e9)
        # A newer checkpoint may still be completed.
        old = [ref for ref in self._known.unfinished() if newest is not None and ref < newest]
        return bool([ref for ref in old if self._remote.manifests.remove_left(self._run, ref, before_ns)])

    def _collect(self, *, found_more: bool) -> None:
        try:
            sweep = RemoteSweep(self._remote)
            collected = sweep.carry_out()
        except AsymcheckError as error:
            self.failure = error
        else:
            self.failure = None
            # Younger garbage needs a later collection.
            self._has_garbage = found_more or collected.freed_packs > 0 or sweep.has_more
