"""Garbage collection: frees packs that no manifest and no pin names (SPEC.md §8.3), and rings of killed processes."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from asymcheck.commit.orphan_recovery import is_gone as is_store_gone
from asymcheck.commit.orphan_recovery import is_of_a_copy
from asymcheck.errors import StorageError
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.gc.repack import Repacked, plan_repack, repack
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.reachability import NamedCheckpoint, Reachability, StoreReachability, pinned_packs
from asymcheck.storage.shm import RingFile, inspect_ring, list_rings, open_orphaned_ring, remove_unreadable_ring
from asymcheck.types import PackId

_ATTEMPTS = 8
_PATIENT_ATTEMPTS = 4
"""Attempts during which others may commit. Later attempts read the new manifests while nobody can commit."""
_PAUSE_S = 0.02
# Packs are freed a few at a time: their locks need descriptors, and the transaction stays short.
_BATCH = 64


@dataclasses.dataclass
class Collected:
    """Result of a collection, or with ``dry_run`` its plan."""

    freed_packs: int = 0
    """Packs taken out of use."""
    freed_bytes: int = 0
    """Bytes of their files."""
    pooled_packs: int = 0
    """Those of them kept to be overwritten; the rest was unlinked."""
    removed_temporaries: int = 0
    """Unfinished packs of dead writers that were removed."""
    busy_packs: int = 0
    """Packs that could be freed but are locked by a reader or a writer."""
    kept_packs: int = 0
    """Packs that a manifest or a pin needs."""
    repacked_packs: int = 0
    """Those of the freed ones that held something needed, which was copied into new packs first."""
    copied_bytes: int = 0
    """Bytes of the frames copied."""


class Sweep(abc.ABC):
    """One collection. A subclass knows how packs are stored.

    A pack that nothing needs is first announced as garbage, where every writer looks, and is removed only when another
    look at manifests and packs has confirmed it.
    """

    def __init__(self, reachable: Reachability, *, dry_run: bool) -> None:
        self.reachable, self.dry_run, self.result = reachable, dry_run, Collected()

    def carry_out(self) -> Collected:
        """Collect, again while packs or checkpoints come meanwhile."""
        self._remove_temporaries()
        for attempt in range(_ATTEMPTS):
            if attempt and self.reachable.problem is not None:
                # What was refused may be had in a moment.
                time.sleep(attempt * _PAUSE_S)
            self._mark()
            if self.dry_run:
                self._count()
            elif not self._free(insists=attempt >= _PATIENT_ATTEMPTS):
                continue
            self._finish()
            return self.result
        problem = self.reachable.problem
        if problem is not None:
            raise StorageError(
                f"nothing was freed, because it is unknown what partitions in a pack are encoded against: {problem}; "
                "run gc again, or verify --repair if that does not help"
            ) from problem
        raise StorageError(
            f"store {self.reachable.tier.root}: packs or checkpoints came {_ATTEMPTS} times during one collection; "
            "run gc again"
        )

    @abc.abstractmethod
    def _remove_temporaries(self) -> None:
        """Remove, or count, what killed writers have left unfinished."""

    @abc.abstractmethod
    def _mark(self) -> None:
        """Look at manifests and packs, and find the packs that nothing needs."""

    @abc.abstractmethod
    def _count(self) -> None:
        """Count the packs that would be freed."""

    @abc.abstractmethod
    def _free(self, *, insists: bool) -> bool:
        """Announce and remove the packs; return False when it has to begin again.

        If it ``insists``, it looks again while commits wait for it: no checkpoint comes then, but one may go.
        """

    @abc.abstractmethod
    def _finish(self) -> None:
        """Complete the result, and what goes with it unless it is a dry run."""

    def _count_freed(self, nbytes: int) -> None:
        self.result.freed_packs += 1
        self.result.freed_bytes += nbytes


def collect(
    tier: NvmeTier,
    catalog: Catalog,
    *,
    dry_run: bool = False,
    without: Collection[NamedCheckpoint] = (),
    needed: StoreReachability | None = None,
) -> Collected:
    """Free every pack that nothing names, and those of which little is needed, when that is copied.

    Args:
        tier: the store.
        catalog: its catalog.
        dry_run: only count.
        without: with ``dry_run``: checkpoints that count as deleted.
        needed: what an earlier collection has read, so that it is not read again.

    Raises:
        InconsistentCheckpointError: a manifest cannot be read, so that what it needs is unknown; nothing was freed.
        StructureError: the manifests are gone, though nobody deleted them here; nothing was freed.
    """
    return StoreSweep(tier, catalog, needed or StoreReachability(tier, without), dry_run=dry_run).carry_out()


class StoreSweep(Sweep):
    """A collection in a store: packs are announced as garbage in the catalog, and go to the pool or are unlinked."""

    reachable: StoreReachability

    def __init__(self, tier: NvmeTier, catalog: Catalog, reachable: StoreReachability, *, dry_run: bool) -> None:
        super().__init__(reachable, dry_run=dry_run)
        self._tier, self._catalog = tier, catalog

    def _remove_temporaries(self) -> None:
        """Remove unfinished packs, and trim the pool: on a full disk, what follows needs the room."""
        if self.dry_run:
            self.result.removed_temporaries = len(self._tier.stale_temporaries())
            return
        self.result.removed_temporaries = self._tier.remove_stale_temporaries()
        for path in self._tier.pool.surplus():
            # But for packs that a writer takes at this moment.
            with self._tier.locked(path) as held:
                if held:
                    self._tier.files.unlink(path)

    def _mark(self) -> None:
        """Do steps 1 to 3 of §8.3."""
        # The order matters: an owner found dead here has committed by now, or never will, so the listing below sees
        # all it did.
        self.dead_pins = self._catalog.dead_pins()
        self._look()
        _, self.stale = self.reachable.since(self._catalog)
        self.result.kept_packs = len(self.reachable.packs) - len(self.candidates) + self.reachable.unread

    def _look(self) -> None:
        self.reachable.look()
        self.candidates = self.reachable.garbage()

    def _count(self) -> None:
        """Count what ``_free`` and a repack would free."""
        with self._catalog.read() as transaction:
            dead_pins = transaction.still_dead(self.dead_pins)
            pinned = pinned_packs(transaction, dead_pins)
        room = self._tier.pool.room()
        for pack_id in self.candidates:
            with self._tier.locked(_path(self._tier, pack_id)) as held:
                if not held:
                    self.result.busy_packs += 1
                elif pack_id in pinned:
                    self.result.kept_packs += 1
                else:
                    room = self._count_pooled(pack_id, room)
        plan = plan_repack(self._tier, self._catalog, self.reachable, dead_pins)
        for pack_id in itertools.chain(*plan.batches):
            room = self._count_pooled(pack_id, room)
        self._count_repacked(plan.expected)

    def _count_pooled(self, pack_id: PackId, room: int) -> int:
        """Count a pack that would be freed; return what room the pool has then."""
        path = _path(self._tier, pack_id)
        self._count_freed(path.stat().st_size)
        if not self._tier.pool.would_keep(path, room):
            return room
        self.result.pooled_packs += 1
        return room - path.stat().st_size

    def _count_repacked(self, done: Repacked) -> None:
        self.result.repacked_packs, self.result.copied_bytes = done.packs, done.copied_bytes
        self.result.busy_packs += done.busy
        self.result.kept_packs += done.new_packs - done.packs - done.busy

    def _free(self, *, insists: bool) -> bool:
        """Free the candidates batch by batch; return False when checkpoints or packs came meanwhile."""
        candidates = list(self.candidates)
        for start in range(0, max(len(candidates), 1), _BATCH):
            batch = candidates[start : start + _BATCH]
            with contextlib.ExitStack() as stack:
                locked = [
                    pack_id for pack_id in batch if stack.enter_context(self._tier.locked(_path(self._tier, pack_id)))
                ]
                freed = self._mark_freed(locked, insists=insists)
                if freed is None:
                    return False
                self.result.busy_packs += len(batch) - len(locked)
                self.result.kept_packs += len(locked) - len(freed)
                self._retire(freed)
        return True

    def _mark_freed(self, locked: Sequence[PackId], *, insists: bool) -> list[PackId] | None:
        """§8.3 step 4, one transaction; None when there is a manifest or a pack that this attempt has not seen."""
        with self._catalog.write() as transaction:
            if insists and not self.reachable.is_current(transaction, self.stale):
                self._look()
            if not self.reachable.is_current(transaction, self.stale):
                return None
            for key in self.stale:
                transaction.delete_manifest(key)
            for key in transaction.still_dead(self.dead_pins):
                transaction.delete_pin(key)
            pinned = pinned_packs(transaction)
            freed = [pack_id for pack_id in locked if pack_id in self.candidates and pack_id not in pinned]
            for pack_id in freed:
                for name in self.candidates[pack_id]:
                    transaction.forget_location(name, pack_id)
                transaction.put_pack(pack_id, registry.PACK_FREED, 0, 0)
        emit("gc.marked_freed", f"{len(freed)} packs")
        return freed

    def _retire(self, freed: Sequence[PackId]) -> None:
        """§8.3 step 5: packs that are marked freed, and locked by the caller, go to the pool."""
        for pack_id in freed:
            path = _path(self._tier, pack_id)
            self._count_freed(path.stat().st_size)
            self.result.pooled_packs += self._tier.pool.put(path)
            emit("gc.retired", path.name)
        if freed:
            self._tier.pool.sync()
            self._tier.files.sync_directory(self._tier.packs)
        present = set(self._tier.pack_ids())
        with self._catalog.write() as transaction:
            # Also those that an earlier collection marked and retired before it was killed.
            for pack_id in transaction.freed_packs():
                if pack_id not in present:
                    transaction.delete_pack(pack_id)
        emit("gc.forgotten", f"{len(freed)} packs")

    def _finish(self) -> None:
        """Repack, and remove folders that a save left which was killed before its commit."""
        if self.dry_run:
            return
        self._count_repacked(repack(self._tier, self._catalog, self.reachable, self._retire))
        manifests = self._tier.manifests
        empty = [(run, ref) for run in manifests.runs() for ref in manifests.empty(run)]
        with self._catalog.read() as transaction:
            saving = {key[: registry.DIGEST_BYTES] for key in transaction.pins()}
        for run, ref in empty:
            if ref.save_id not in saving:
                manifests.remove_empty(run, ref)


def _path(tier: NvmeTier, pack_id: PackId) -> Path:
    return tier.packs / layout.pack_name(pack_id)


@dataclasses.dataclass(frozen=True)
class CollectedRing:
    """A ring of a killed process, and what became of it."""

    ring: RingFile
    """The ring, as it was found; its frames were not checked."""
    is_store_gone: bool
    """Whether its store is not where it was any more."""
    unsaved: int
    """Captures in it that are complete and not durable."""
    is_removed: bool
    """Whether it was removed, or would be."""


def collect_rings(tier: NvmeTier, folder: Path, *, discard: bool, dry_run: bool) -> list[CollectedRing]:
    """Remove rings of killed processes: of this store, and of stores that are gone.

    With ``discard`` also those with captures that are not durable.

    Raises:
        StorageError: one could not be read or removed.
    """
    collected = []
    store_id = tier.descriptor.store_id.hex()
    for path in list_rings(folder, None):
        ring = inspect_ring(path, tier.manifests, check=False)
        if ring is None or ring.is_alive:
            continue
        is_gone = ring.store_id != store_id
        if not is_gone and is_of_a_copy(tier, ring.store):
            continue
        if is_gone and not is_store_gone(tier, ring.store, bytes.fromhex(ring.store_id)):
            continue
        unsaved = sum(not capture.is_durable for capture in ring.captures)
        is_needless = ring.is_unmade or not (unsaved or ring.problem)
        is_removed = (is_needless or discard) and (dry_run or _remove(ring))
        collected.append(CollectedRing(ring, is_gone, unsaved, is_removed))
    return collected


def _remove(ring: RingFile) -> bool:
    """Remove a ring that nobody uses; return whether it is gone."""
    if ring.problem:
        return remove_unreadable_ring(ring.path, damaged=not ring.is_unmade) != "used"
    try:
        reader = open_orphaned_ring(ring.path)
    except FileNotFoundError:
        return True
    if reader is None:
        return False
    with reader:
        reader.unlink()
    return True
