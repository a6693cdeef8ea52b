"""Collect garbage: free packs that no manifest or pin needs (SPEC.md §B5), and remove rings of killed processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from asymcheck.commit.orphan_recovery import is_of_a_copy, is_store_missing
from asymcheck.errors import StorageError
from asymcheck.events import emit
from asymcheck.format import registry
from asymcheck.gc.repack import Repacked, plan_repack, repack
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.reachability import NamedCheckpoint, StoreReachability, pinned_packs
from asymcheck.storage.shm.orphaned_rings import RingFile, inspect_ring, list_rings, open_orphaned_ring, unreadable_ring
from asymcheck.types import PackId

_ATTEMPTS = 8
_PATIENT_ATTEMPTS = 4
"""Attempts during which other processes may commit. Later attempts read new manifests in the write transaction."""
_REFRESHES = 10
"""Maximum number of times that a later attempt reads new manifests and packs."""
_PAUSE_S = 0.02
_POOL_SHARE = 1.25
"""Maximum size of the pool, relative to the mean size of a checkpoint."""
_POOL_BYTES = 4 << 30
"""Maximum size of the pool of a store without checkpoints."""
# Free a few packs at a time: each lock needs a file descriptor, and the transaction must be short.
_BATCH = 64


@dataclasses.dataclass
class Collected:
    """Result of a collection, or the expected result of a dry run."""

    freed_packs: int = 0
    """Number of packs freed."""
    freed_bytes: int = 0
    """Bytes of the files of freed packs."""
    pooled_packs: int = 0
    """Number of freed packs moved to the pool. The other freed packs were unlinked."""
    returned_bytes: int = 0
    """Bytes of deleted files, which the file system can use again: freed packs, and packs that exceed the pool."""
    pool_bytes: int = dataclasses.field(default=0, compare=False)
    """Bytes in the pool after the collection, which later saves overwrite. A dry run ignores repacks."""
    removed_temporaries: int = 0
    """Number of unfinished packs of dead writers that were removed."""
    busy_packs: int = 0
    """Number of packs that could be freed, but are locked by a reader or a writer."""
    kept_packs: int = 0
    """Number of packs that a manifest or a pin needs."""
    repacked_packs: int = 0
    """Number of freed packs whose live frames were copied into new packs first."""
    copied_bytes: int = 0
    """Bytes of the copied frames."""

    def count_freed(self, nbytes: int) -> None:
        """Count a freed pack."""
        self.freed_packs += 1
        self.freed_bytes += nbytes


def collect(
    tier: NvmeTier,
    catalog: Catalog,
    *,
    dry_run: bool = False,
    without: Collection[NamedCheckpoint] = (),
    needed: StoreReachability | None = None,
) -> Collected:
    """Free all garbage packs, and packs that are mostly garbage after copying their live frames.

    With ``dry_run``, only count, and treat the checkpoints ``without`` as deleted. ``needed`` is the reachability from
    an earlier collection, to avoid reading manifests and indexes again.

    Raises:
        InconsistentCheckpointError: a manifest is unreadable, so its partitions are unknown. Nothing was freed.
        StructureError: the manifests are gone, although no process deleted them. Nothing was freed.
    """
    return StoreSweep(tier, catalog, needed or StoreReachability(tier, without), dry_run=dry_run).carry_out()


class StoreSweep:
    """A mark-and-sweep collection in a store, where the catalog announces garbage packs to all writers first.

    A garbage pack moves to the pool, or is unlinked, only after manifests and packs were read again.
    """

    def __init__(self, tier: NvmeTier, catalog: Catalog, reachable: StoreReachability, *, dry_run: bool) -> None:
        self.reachable, self.dry_run, self.result = reachable, dry_run, Collected()
        self._tier, self._catalog = tier, catalog

    def carry_out(self) -> Collected:
        """Collect. Retry while other processes add packs or checkpoints."""
        self._remove_temporaries()
        for attempt in range(_ATTEMPTS):
            if attempt and self.reachable.problem is not None:
                # The problem may be transient, such as a lock.
                time.sleep(attempt * _PAUSE_S)
            self._find_garbage()
            if self.dry_run:
                self._count()
            elif not self._free(blocks_commits=attempt >= _PATIENT_ATTEMPTS):
                continue
            self._finish()
            return self.result
        problem = self.reachable.problem
        if problem is not None:
            raise StorageError(
                f"cannot free any pack: the bases of partitions in a pack are unknown: {problem}; "
                "run gc again, or verify --repair if that does not help"
            ) from problem
        raise StorageError(
            f"cannot collect store {self._tier.root}: other processes added packs or checkpoints during all "
            f"{_ATTEMPTS} attempts; run gc again"
        )

    def _remove_temporaries(self) -> None:
        """Remove unfinished packs and trim the pool first, because the next steps need space on a full disk."""
        if self.dry_run:
            self.result.removed_temporaries = len(self._tier.leftovers())
        else:
            self._tier.make_pool()
            self.result.removed_temporaries = self._tier.remove_stale_temporaries()
            self._trim_pool()

    def _trim_pool(self) -> None:
        for path, size in self._tier.pool.surplus().items():
            # A locked file is being taken from the pool by a writer.
            with self._tier.locked(path) as held:
                if held:
                    self.result.returned_bytes += size
                    if not self.dry_run:
                        self._tier.files.unlink(path)

    def _pool_capacity(self) -> float:
        """Return the maximum size of the pool in bytes."""
        if (limit := self._tier.config.pool_bytes) is not None:
            return limit
        live = sum(self._tier.pack_bytes(pack_id) for pack_id in self.reachable.packs.keys() - self.candidates.keys())
        count = self.reachable.checkpoints()
        return _POOL_SHARE * live / count if count else _POOL_BYTES

    def _find_garbage(self) -> None:
        """Do steps 1 to 3 of SPEC.md §B5."""
        # Find dead owners before listing manifests: a dead owner cannot commit any more, so the listing is complete.
        self.dead_pins = self._catalog.dead_pins()
        self._refresh()
        self.result.kept_packs = len(self.reachable.packs) - len(self.candidates) + self.reachable.unread
        self._tier.pool.capacity_bytes = self._pool_capacity()
        self._trim_pool()

    def _refresh(self) -> None:
        self.reachable.refresh()
        _, self.stale = self.reachable.since(self._catalog)
        self.candidates = self.reachable.garbage()

    def _count(self) -> None:
        """Count the packs that :meth:`_free` and a repack would free."""
        with self._catalog.read() as transaction:
            dead_pins = self._catalog.still_dead(self.dead_pins)
            pinned = pinned_packs(transaction, dead_pins)
        trimmed = self.result.returned_bytes
        room = space = self._tier.pool.room() + trimmed
        for pack_id in self.candidates:
            with self._tier.locked(self._tier.pack_path(pack_id)) as held:
                if not held:
                    self.result.busy_packs += 1
                elif pack_id in pinned:
                    self.result.kept_packs += 1
                else:
                    space = self._count_pooled(pack_id, space)
        plan = plan_repack(self._tier, self._catalog, self.reachable, dead_pins)
        for pack_id in itertools.chain(*plan.batches):
            # Another collection may have freed the pack since the plan.
            with contextlib.suppress(FileNotFoundError):
                space = self._count_pooled(pack_id, space)
        self._count_repacked(plan.expected)
        self.result.pool_bytes = self._tier.pool.nbytes() - trimmed + int(room - space)

    def _count_pooled(self, pack_id: PackId, space: float) -> float:
        """Count a pack that would be freed. Return the space left in the pool."""
        path = self._tier.pack_path(pack_id)
        self.result.count_freed(path.stat().st_size)
        if not self._tier.pool.would_keep(path, space):
            self.result.returned_bytes += path.stat().st_size
            return space
        self.result.pooled_packs += 1
        return space - path.stat().st_size

    def _count_repacked(self, done: Repacked) -> None:
        self.result.repacked_packs, self.result.copied_bytes = done.packs, done.copied_bytes
        self.result.busy_packs += done.busy
        self.result.kept_packs += done.new_packs - done.packs - done.busy

    def _free(self, *, blocks_commits: bool) -> bool:
        """Free the candidates in batches. Return False if another process added checkpoints or packs.

        With ``blocks_commits``, read manifests and packs again while commits wait, so that no checkpoint is added.
        """
        candidates = list(self.candidates)
        for start in range(0, max(len(candidates), 1), _BATCH):
            batch = candidates[start : start + _BATCH]
            with contextlib.ExitStack() as stack:
                locked = [
                    pack_id
                    for pack_id in batch
                    if stack.enter_context(self._tier.locked(self._tier.pack_path(pack_id)))
                ]
                freed = self._announce_freed(locked, blocks_commits=blocks_commits)
                if freed is None:
                    return False
                self.result.busy_packs += len(batch) - len(locked)
                self.result.kept_packs += len(locked) - len(freed)
                self._retire(freed)
        return True

    def _announce_freed(self, locked: Sequence[PackId], *, blocks_commits: bool) -> list[PackId] | None:
        """Do step 4 of SPEC.md §B5. Return None if a manifest or a pack is new since the mark."""
        with self._catalog.write(gives_way=True) as transaction:
            refreshes = _REFRESHES if blocks_commits else 0
            while not self.reachable.is_current(transaction, self.stale):
                if not refreshes:
                    return None
                # Commits wait, so each writer can only complete the pack or the deletion that it has begun.
                refreshes -= 1
                self._refresh()
            for key in self.stale:
                transaction.delete("manifests", key)
            dead = self._catalog.still_dead(self.dead_pins)
            if dead:
                # Another collection may have listed the manifests before these saves were committed.
                self.reachable.enter_manifests(transaction)
            for key in dead:
                transaction.delete("pins", key)
            pinned = pinned_packs(transaction)
            freed = [pack_id for pack_id in locked if pack_id in self.candidates and pack_id not in pinned]
            for pack_id in freed:
                transaction.leave_pack(pack_id, self.candidates[pack_id], {})
                transaction.put_pack(pack_id, registry.PACK_FREED, 0, 0)
        emit("gc.marked_freed", f"{len(freed)} packs")
        return freed

    def _retire(self, freed: Sequence[PackId]) -> None:
        """Do step 5 of SPEC.md §B5: move freed packs, which the caller has locked, to the pool."""
        for pack_id in freed:
            path = self._tier.pack_path(pack_id)
            size = path.stat().st_size
            self.result.count_freed(size)
            is_pooled = self._tier.pool.put(path)
            self.result.pooled_packs += is_pooled
            self.result.returned_bytes += 0 if is_pooled else size
            emit("gc.retired", path.name)
        if freed:
            self._tier.pool.sync(self._tier.packs)
        present = set(self._tier.pack_ids())
        with self._catalog.write(gives_way=True) as transaction:
            # Include packs that an earlier collection retired before it was killed.
            for pack_id in transaction.freed_packs():
                if pack_id not in present:
                    transaction.delete("packs", pack_id)
        emit("gc.forgotten", f"{len(freed)} packs")

    def _finish(self) -> None:
        """Repack, and remove the files of saves that were killed before the commit (SPEC.md §B5, step 6)."""
        if self.dry_run:
            return
        self._count_repacked(repack(self._tier, self._catalog, self.reachable, self._retire))
        self.result.pool_bytes = self._tier.pool.nbytes()
        manifests = self._tier.manifests
        unfinished = manifests.unfinished(self.reachable.unsettled)
        with self._catalog.read() as transaction:
            saving = {key[: registry.DIGEST_BYTES] for key in transaction.pins()}
        for run, ref, names in unfinished:
            if ref.save_id not in saving:
                manifests.remove_files(run, ref, names)


@dataclasses.dataclass(frozen=True)
class CollectedRing:
    """A ring of a killed process, and whether it was removed."""

    ring: RingFile
    """The ring before removal. Its frames were not checked."""
    is_store_missing: bool
    """Whether the store of the ring no longer exists at its path."""
    unsaved: int
    """Number of captures that are complete and not durable."""
    is_removed: bool
    """Whether the ring was removed, or a dry run would remove it."""


def collect_rings(tier: NvmeTier, folder: Path, *, discard: bool, dry_run: bool) -> list[CollectedRing]:
    """Remove rings of killed processes that belong to this store, or to stores that no longer exist.

    Rings with captures that are not durable are removed only with ``discard``.

    Raises:
        StorageError: a ring cannot be read or removed.
    """
    collected = []
    store_id = tier.descriptor.store_id.hex()
    for path in list_rings(folder, None):
        ring = inspect_ring(path, tier.manifests, check=False)
        if ring is None or ring.is_alive:
            continue
        is_of_other_store = ring.store_id != store_id
        if not is_of_other_store and is_of_a_copy(tier, ring.store):
            continue
        if is_of_other_store and not is_store_missing(tier, ring.store, bytes.fromhex(ring.store_id)):
            continue
        unsaved = sum(not capture.is_durable for capture in ring.captures)
        is_obsolete = ring.is_unmade or not (unsaved or ring.problem)
        is_removed = (is_obsolete or discard) and (dry_run or _remove(ring))
        collected.append(CollectedRing(ring, is_of_other_store, unsaved, is_removed))
    return collected


def _remove(ring: RingFile) -> bool:
    if ring.problem:
        return unreadable_ring(ring.path, remove=("unmade",) if ring.is_unmade else ("unmade", "damaged")) != "used"
    with contextlib.suppress(FileNotFoundError):
        reader = open_orphaned_ring(ring.path)
        if reader is None:
            return False
        with reader:
            reader.unlink()
    return True
