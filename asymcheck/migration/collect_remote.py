"""Collection in a remote location, where there are no locks: by age, and in two steps (SPEC.md §8.6)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import PurePosixPath

from asymcheck.errors import FormatError, InconsistentCheckpointError, MissingPartitionError
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.pipeline.collect import Collected
from asymcheck.tiers.base_frames import bases_in
from asymcheck.tiers.pack_index import digests_of
from asymcheck.tiers.remote import RemoteTier
from asymcheck.types import CheckpointRef, Digest, PackId


def collect_remote(there: RemoteTier, *, dry_run: bool = False) -> Collected:
    """Remove packs that no checkpoint needs and files of interrupted uploads; safe beside uploads of others.

    What is younger than ``grace_s`` is left alone.

    Raises:
        InconsistentCheckpointError: a manifest cannot be read, so that what it needs is unknown; nothing was removed.
        RemoteUnreachableError: nobody answers.
    """
    return _Collection(there, dry_run=dry_run).carry_out()


class _Collection:
    def __init__(self, there: RemoteTier, *, dry_run: bool) -> None:
        self._there = there
        self._dry_run = dry_run
        self._before = time.time_ns() - int(there.config.remote.grace_s * 1e9)
        self._live: set[Digest] = set()
        self._seen: set[tuple[str, CheckpointRef, str]] = set()
        self._bases: dict[Digest, set[Digest]] = {}
        self._result = Collected()

    def carry_out(self) -> Collected:
        self._temporaries()
        # In this order: whoever relies on a pack of this listing, and commits after the manifests were read, looks for
        # it again then.
        files = {entry.path: entry for entry in self._there.pack_files()}
        packs = {entry.path: layout.parse_pack_name(entry.path.name) for entry in files.values()}
        self._read_manifests()
        digests = self._digests([pack_id for pack_id in packs.values() if pack_id is not None])
        live = self._with_bases()
        doomed: dict[PackId, PurePosixPath] = {}
        for path, pack_id in packs.items():
            if pack_id is None:
                continue
            names = digests.get(pack_id)
            # Nobody can tell what a pack with a damaged index holds.
            if names is None or not live.isdisjoint(names) or files[path].mtime_ns > self._before:
                self._result.kept_packs += 1
                continue
            self._result.freed_packs += 1
            self._result.freed_bytes += files[path].size
            if not self._dry_run and self._there.doom(pack_id):
                doomed[pack_id] = path
                emit("remote.pack_doomed", path.name)
        if not self._dry_run:
            self._remove({*doomed, *self._there.doomed_packs()}, digests)
        return self._result

    def _temporaries(self) -> None:
        for entry in self._there.temporaries():
            if entry.mtime_ns <= self._before:
                self._result.removed_temporaries += 1
                if not self._dry_run:
                    self._there.files.delete(entry.path)

    def _read_manifests(self) -> None:
        manifests = self._there.manifests
        for run in manifests.runs():
            for listing in manifests.checkpoints(run):
                for name in listing.manifests:
                    key = (run, listing.ref, str(name))
                    if key in self._seen:
                        continue
                    try:
                        self._live.update(manifests.read(run, listing.ref, name).partitions())
                    except (FormatError, MissingPartitionError) as error:
                        if name not in manifests.listing(run, listing.ref).manifests:
                            continue  # Deleted since it was listed.
                        raise InconsistentCheckpointError(
                            f"nothing was removed from {self._there.location}, because what a damaged manifest needs "
                            f"is unknown: {error}; delete that checkpoint first"
                        ) from error
                    self._seen.add(key)

    def _digests(self, pack_ids: Iterable[PackId]) -> dict[PackId, list[Digest]]:
        found = {}
        for pack_id, index in self._there.read_indexes(pack_ids).items():
            found[pack_id] = digests_of(index.entries)
            for name, base in bases_in(index.entries).items():
                self._bases.setdefault(name, set()).add(base)
        return found

    def _with_bases(self) -> set[Digest]:
        needed, new = set(self._live), self._live & self._bases.keys()
        while new:
            bases = set().union(*(self._bases[name] for name in new))
            new = (bases - needed) & self._bases.keys()
            needed |= bases
        return needed

    def _remove(self, doomed: set[PackId], digests: dict[PackId, list[Digest]]) -> None:
        """Remove doomed packs, but for those that a checkpoint needs which was committed meanwhile."""
        digests |= self._digests(doomed - digests.keys())
        self._read_manifests()
        live = self._with_bases()
        for pack_id in sorted(doomed):
            names = digests.get(pack_id)
            if names is None or not live.isdisjoint(names):
                if self._there.reprieve(pack_id):
                    self._result.kept_packs += 1
                    self._result.freed_packs -= 1
            else:
                self._there.files.delete(self._there.packs / layout.doomed_name(pack_id))
                emit("remote.pack_removed", pack_id.hex())
