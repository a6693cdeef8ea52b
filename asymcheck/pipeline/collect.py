"""Collection: frees the packs that no manifest and no pin names (SPEC.md §8.3)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from asymcheck.errors import StorageError
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.pipeline.needed import NamedCheckpoint, Needed, is_gone
from asymcheck.pipeline.repack import plan_repack, repack
from asymcheck.tiers.nvme import Catalog, NvmeTier, Transaction
from asymcheck.tiers.nvme.catalog import DeadPins
from asymcheck.types import PackId

_ATTEMPTS = 8
_PATIENT_ATTEMPTS = 4
"""So many leave it to the others; those after it read what has come while nobody can commit more."""
_PAUSE_S = 0.02
# Packs are freed a few at a time: their locks need descriptors, and the transaction stays short.
_BATCH = 64


@dataclasses.dataclass
class Collected:
    """What a collection did, or with ``dry_run`` would do."""

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


def collect(
    tier: NvmeTier,
    catalog: Catalog,
    *,
    dry_run: bool = False,
    without: Collection[NamedCheckpoint] = (),
    needed: Needed | None = None,
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
    result = Collected()
    if not dry_run:
        result.removed_temporaries = tier.remove_stale_temporaries()
        # First of all: on a full disk, what follows needs the room.
        _trim_pool(tier)
    known = needed or Needed(tier, without)
    for attempt in range(_ATTEMPTS):
        if attempt and known.problem is not None:
            # What was refused may be had in a moment.
            time.sleep(attempt * _PAUSE_S)
        plan = _Plan(tier, catalog, known)
        result.kept_packs = plan.kept
        if dry_run:
            plan.count(result)
            return result
        if plan.carry_out(result, insists=attempt >= _PATIENT_ATTEMPTS):
            _repack(tier, catalog, known, result)
            _remove_empty(tier, catalog)
            return result
    if known.problem is not None:
        raise StorageError(
            f"nothing was freed, because it is unknown what partitions in a pack are encoded against: {known.problem}; "
            "run gc again, or verify --repair if that does not help"
        ) from known.problem
    raise StorageError(
        f"store {tier.root}: packs or checkpoints came {_ATTEMPTS} times during one collection; run gc again"
    )


def _repack(tier: NvmeTier, catalog: Catalog, needed: Needed, result: Collected) -> None:
    def retire(packs: Sequence[PackId]) -> None:
        retire_packs(tier, catalog, packs, result)

    done = repack(tier, catalog, needed, retire)
    result.repacked_packs, result.copied_bytes = done.packs, done.copied_bytes
    result.busy_packs += done.busy
    result.kept_packs += done.new_packs - done.packs - done.busy


class _Plan:
    """What one attempt saw: §8.3 steps 1 to 3."""

    def __init__(self, tier: NvmeTier, catalog: Catalog, known: Needed) -> None:
        self.tier, self.catalog, self.known = tier, catalog, known
        # The order matters: an owner found dead here has committed by now, or never will, so the listing below sees
        # all it did.
        self.dead_pins = DeadPins.of(catalog)
        self._look()
        _, self.stale = known.since(catalog)

    def _look(self) -> None:
        self.known.look()
        self.manifests = self.known.manifests
        live = self.known.live()
        self.candidates = {
            pack_id: held.names for pack_id, held in self.known.packs.items() if live.isdisjoint(held.names)
        }
        self.kept = len(self.known.packs) - len(self.candidates) + self.known.unread

    def count(self, result: Collected) -> None:
        """Say what would be freed."""
        with self.catalog.read() as transaction:
            dead_pins = self.dead_pins.among(transaction)
            pinned = _pinned(transaction, dead_pins)
        room = self.tier.pool.room()
        for pack_id in self.candidates:
            with self.tier.locked(_path(self.tier, pack_id)) as held:
                if not held:
                    result.busy_packs += 1
                elif pack_id in pinned:
                    result.kept_packs += 1
                else:
                    room = self._count_freed(pack_id, room, result)
        result.removed_temporaries = len(self.tier.stale_temporaries())
        planned = plan_repack(self.tier, self.catalog, self.known, dead_pins)
        for pack_id in planned.victims:
            room = self._count_freed(pack_id, room, result)
        result.repacked_packs, result.copied_bytes = len(planned.victims), planned.copied_bytes
        result.busy_packs += planned.busy
        result.kept_packs += planned.new_packs - len(planned.victims) - planned.busy

    def _count_freed(self, pack_id: PackId, room: int, result: Collected) -> int:
        """Count a pack that would be freed; return what room the pool has then."""
        path = _path(self.tier, pack_id)
        result.freed_packs += 1
        result.freed_bytes += path.stat().st_size
        if not self.tier.pool.would_keep(path, room):
            return room
        result.pooled_packs += 1
        return room - path.stat().st_size

    def carry_out(self, result: Collected, *, insists: bool) -> bool:
        """Free the candidates batch by batch; return False when checkpoints or packs came meanwhile.

        If it ``insists``, it looks again while commits wait for it: no checkpoint comes then, but one may go.
        """
        candidates = list(self.candidates)
        for start in range(0, max(len(candidates), 1), _BATCH):
            batch = candidates[start : start + _BATCH]
            with contextlib.ExitStack() as stack:
                locked = [
                    pack_id for pack_id in batch if stack.enter_context(self.tier.locked(_path(self.tier, pack_id)))
                ]
                freed = self._mark_freed(locked, insists=insists)
                if freed is None:
                    return False
                result.busy_packs += len(batch) - len(locked)
                result.kept_packs += len(locked) - len(freed)
                retire_packs(self.tier, self.catalog, freed, result)
        return True

    def _mark_freed(self, locked: Sequence[PackId], *, insists: bool) -> list[PackId] | None:
        """§8.3 step 4, one transaction; None when there is a manifest or a pack that this attempt has not seen."""
        with self.catalog.write() as transaction:
            if insists and not self._has_seen_all(transaction):
                self._look()
            if not self._has_seen_all(transaction):
                return None
            # A pull may have brought one back, under the name that it had.
            if not all(is_gone(self.tier, key) for key in self.stale):
                return None
            for key in self.stale:
                transaction.delete_manifest(key)
            for key in self.dead_pins.among(transaction):
                transaction.delete_pin(key)
            pinned = _pinned(transaction, set())
            freed = [pack_id for pack_id in locked if pack_id in self.candidates and pack_id not in pinned]
            for pack_id in freed:
                for name in self.candidates[pack_id]:
                    transaction.forget_location(name, pack_id)
                transaction.put_pack(pack_id, registry.PACK_FREED, 0, 0)
        emit("gc.marked_freed", f"{len(freed)} packs")
        return freed

    def _has_seen_all(self, transaction: Transaction) -> bool:
        return not transaction.manifests() - self.manifests - self.stale and self.known.has_seen_all(transaction)


def retire_packs(tier: NvmeTier, catalog: Catalog, freed: Sequence[PackId], result: Collected) -> None:
    """§8.3 step 5: packs that are marked freed, and locked by the caller, go to the pool."""
    for pack_id in freed:
        path = _path(tier, pack_id)
        result.freed_packs += 1
        result.freed_bytes += path.stat().st_size
        result.pooled_packs += tier.pool.put(path)
        emit("gc.retired", path.name)
    if freed:
        tier.pool.sync()
        tier.files.sync_directory(tier.packs)
    present = set(tier.pack_ids())
    with catalog.write() as transaction:
        # Also those that an earlier collection marked and retired before it was killed.
        for pack_id in transaction.freed_packs():
            if pack_id not in present:
                transaction.delete_pack(pack_id)
    emit("gc.forgotten", f"{len(freed)} packs")


def _path(tier: NvmeTier, pack_id: PackId) -> Path:
    return tier.packs / layout.pack_name(pack_id)


def _pinned(transaction: Transaction, dead_pins: set[bytes]) -> set[PackId]:
    return {pack_id for key, (_, packs) in transaction.pins().items() if key not in dead_pins for pack_id in packs}


def _trim_pool(tier: NvmeTier) -> None:
    """Unlink freed packs that are too many, but for those that a writer takes at this moment."""
    for path in tier.pool.surplus():
        with tier.locked(path) as held:
            if held:
                tier.files.unlink(path)


def _remove_empty(tier: NvmeTier, catalog: Catalog) -> None:
    """Remove folders that a save left which was killed before its commit."""
    empty = [(run, ref) for run in tier.manifests.runs() for ref in tier.manifests.empty(run)]
    with catalog.read() as transaction:
        saving = {key[: registry.DIGEST_BYTES] for key in transaction.pins()}
    for run, ref in empty:
        if ref.save_id not in saving:
            tier.manifests.remove_empty(run, ref)
