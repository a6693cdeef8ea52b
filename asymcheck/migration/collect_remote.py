"""Collection in a remote location, where there are no locks: by age, and in two steps (SPEC.md §8.6)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from asymcheck.errors import AsymcheckError, FormatError, InconsistentCheckpointError, MissingPartitionError
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.migration.checkpoint_cache import CheckpointCache
from asymcheck.pipeline.collect import Collected
from asymcheck.policies.retention import Retention, Verdict, judge
from asymcheck.pruning import newest_consistent
from asymcheck.tiers.base_frames import bases_in
from asymcheck.tiers.pack_index import digests_of
from asymcheck.tiers.remote import RemoteTier
from asymcheck.tiers.remote.contract import Entry
from asymcheck.types import Checkpoint, CheckpointRef, Digest, PackId

_COLLECT_S = 3600.0
"""A collection reads all manifests there, and frees only what is older than a day: more of them would find nothing."""


def collect_remote(there: RemoteTier, *, dry_run: bool = False) -> Collected:
    """Remove packs that no checkpoint needs and files of interrupted uploads; safe beside uploads of others.

    What is younger than ``grace_s`` is left alone.

    Raises:
        InconsistentCheckpointError: a manifest, or the index of a pack, cannot be read, so that what they need is
            unknown; no pack was removed.
        RemoteUnreachableError: nobody answers.
    """
    return _Collection(there, dry_run=dry_run).carry_out()


class _Collection:
    def __init__(self, there: RemoteTier, *, dry_run: bool) -> None:
        self._there = there
        self._dry_run = dry_run
        self._before_ns = time.time_ns() - int(there.config.remote.grace_s * 1e9)
        self._named: set[Digest] = set()
        self._seen: set[tuple[str, CheckpointRef, str]] = set()
        self._digests: dict[PackId, list[Digest]] = {}
        self._bases: dict[Digest, set[Digest]] = {}
        self._partly_read: set[PackId] = set()
        self._live: set[Digest] = set()
        self._is_certain = True
        self._is_spared = False
        self._name = os.urandom(16)
        self._result = Collected()

    def carry_out(self) -> Collected:
        self._temporaries()
        # In this order: whoever relies on a pack of this listing, and commits after the manifests were read, looks for
        # it again then.
        packs = self._there.lasting_packs()
        self._look()
        for pack_id, entry in packs.items():
            if not entry.is_older(self._before_ns) or not self._is_garbage(pack_id):
                continue
            if self._dry_run:
                self._count(entry.size)
            elif self._there.doom(entry, pack_id, self._name):
                emit("remote.pack_doomed", entry.path.name)
        doomed = self._there.doomed_packs()
        if not self._dry_run:
            self._claim(doomed)
            doomed = self._there.doomed_packs()
            self._look()
        needed = [pack_id for pack_id in doomed if not self._is_garbage(pack_id)]
        for pack_id, entry in sorted(doomed.items()):
            if pack_id not in needed and (self._dry_run or self._is_own(pack_id, entry)):
                self._remove(pack_id, entry)
        if needed and not self._dry_run:
            self._there.reprieve(needed)
        if self._is_spared:
            raise InconsistentCheckpointError(self._uncertainty())
        self._result.kept_packs = len(packs.keys() | doomed.keys()) - self._result.freed_packs
        return self._result

    def _claim(self, doomed: Mapping[PackId, Entry]) -> None:
        """Take over what others have announced, for they may have been killed.

        What a living one has seen of it is not what holds then: it removes under its own names only, as this one does.
        """
        for pack_id, entry in doomed.items():
            if not self._is_own(pack_id, entry):
                self._there.doom(entry, pack_id, self._name)

    def _is_own(self, pack_id: PackId, entry: Entry) -> bool:
        return entry.path.name == layout.doomed_name(pack_id, self._name)

    def _temporaries(self) -> None:
        for entry in self._there.temporaries():
            if entry.is_older(self._before_ns):
                self._result.removed_temporaries += 1
                if not self._dry_run:
                    self._there.files.delete(entry.path)

    def _look(self) -> None:
        """Find out what is needed; what was read before is not read again.

        Manifests first: what they name, and what that is encoded against, lay there before them.
        """
        self._read_manifests()
        self._read_packs()
        self._live = self._with_bases()
        # What lies in no pack may lie where a pack could not be read, encoded against anything.
        self._is_certain = not self._partly_read or self._live <= set().union(*self._digests.values())

    def _read_manifests(self) -> None:
        manifests = self._there.manifests
        for run in manifests.runs():
            for listing in manifests.checkpoints(run):
                for name in listing.manifests:
                    key = (run, listing.ref, str(name))
                    if key in self._seen:
                        continue
                    try:
                        self._named.update(manifests.read(run, listing.ref, name).partitions())
                    except (FormatError, MissingPartitionError) as error:
                        if name not in manifests.listing(run, listing.ref).manifests:
                            continue  # Deleted since it was listed.
                        raise InconsistentCheckpointError(
                            f"nothing was removed from {self._there.location}, because what a damaged manifest needs "
                            f"is unknown: {error}; delete that checkpoint first"
                        ) from error
                    self._seen.add(key)

    def _read_packs(self) -> None:
        new = [pack_id for pack_id in self._there.pack_ids() if pack_id not in self._digests]
        for pack_id, index in self._there.read_indexes(new).items():
            if index is None or index.damage is not None:
                self._partly_read.add(pack_id)
            if index is None:
                continue
            # Also of a damaged one: what was found in it may be all that there is of a live partition.
            self._digests[pack_id] = digests_of(index.entries)
            for name, base in bases_in(index.entries).items():
                self._bases.setdefault(name, set()).add(base)

    def _with_bases(self) -> set[Digest]:
        needed, new = set(self._named), self._named & self._bases.keys()
        while new:
            bases = set().union(*(self._bases[name] for name in new))
            new = (bases - needed) & self._bases.keys()
            needed |= bases
        return needed

    def _is_garbage(self, pack_id: PackId) -> bool:
        # Nobody can tell what a pack with a damaged index holds.
        if pack_id in self._partly_read or pack_id not in self._digests:
            return False
        if not self._live.isdisjoint(self._digests[pack_id]):
            return False
        self._is_spared |= not self._is_certain
        return self._is_certain

    def _remove(self, pack_id: PackId, entry: Entry) -> None:
        if not self._dry_run:
            self._there.files.delete(entry.path)
            emit("remote.pack_removed", pack_id.hex())
        self._count(entry.size)

    def _count(self, nbytes: int) -> None:
        self._result.freed_packs += 1
        self._result.freed_bytes += nbytes

    def _uncertainty(self) -> str:
        names = ", ".join(layout.pack_name(pack_id) for pack_id in sorted(self._partly_read))
        where = self._there.location
        return (
            f"nothing was removed from {where}, because {names} is damaged, and what the checkpoints that need it are "
            f"encoded against is unknown; delete those first: asymcheck verify {where} names them"
        )


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
        """Delete what no rule keeps, and return it; now and then free what nothing needs.

        What was left unfinished before the newest that is whole goes, too, when nobody has gone on with it for long.

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
