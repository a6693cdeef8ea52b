"""Collection: frees the packs that no manifest and no pin names (SPEC.md §8.3)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from asymcheck.errors import FormatError, InconsistentCheckpointError, MissingPartitionError, StorageError
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.catalog import manifest_key
from asymcheck.tiers.files import translated
from asymcheck.tiers.nvme import Catalog, NvmeTier, Transaction
from asymcheck.tiers.owners import is_given_up
from asymcheck.types import Digest, PackId

_ATTEMPTS = 8
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


def collect(tier: NvmeTier, catalog: Catalog, *, dry_run: bool = False) -> Collected:
    """Free every pack that nothing names.

    Raises:
        InconsistentCheckpointError: a manifest cannot be read, so that what it needs is unknown; nothing was freed.
    """
    result = Collected()
    if not dry_run:
        result.removed_temporaries = tier.remove_stale_temporaries()
        # First of all: on a full disk, what follows needs the room.
        _trim_pool(tier)
    known = _Known()
    for _ in range(_ATTEMPTS):
        plan = _Plan(tier, catalog, known)
        result.kept_packs = plan.kept
        if dry_run:
            plan.count(result)
            return result
        if plan.carry_out(result):
            _remove_empty(tier, catalog)
            return result
    raise StorageError(
        f"store {tier.root}: checkpoints were committed {_ATTEMPTS} times during one collection; run gc again"
    )


@dataclasses.dataclass
class _Known:
    """What earlier attempts of one collection have read: manifests and packs never change, so it is not read again."""

    live: set[Digest] = dataclasses.field(default_factory=set)
    manifests: set[bytes] = dataclasses.field(default_factory=set)
    packs: dict[PackId, list[Digest]] = dataclasses.field(default_factory=dict)


class _Plan:
    """What one attempt saw: §8.3 steps 1 to 3."""

    def __init__(self, tier: NvmeTier, catalog: Catalog, known: _Known) -> None:
        self.tier, self.catalog, self.known = tier, catalog, known
        self.kept = 0
        # The order matters: an owner found dead here has committed by now, or never will, so the listing below sees
        # all it did.
        with catalog.read() as transaction:
            self.dead_pins = {key for key, (owner, _) in transaction.pins().items() if is_given_up(key, owner)}
        self.manifests = known.manifests
        self.candidates = self._candidates(self._live())
        with catalog.read() as transaction:
            unseen = transaction.manifests() - self.manifests
        self.stale = {key for key in unseen if _is_gone(tier, key)}

    def _live(self) -> set[Digest]:
        for run in self.tier.manifests.runs():
            for listing in self.tier.manifests.checkpoints(run):
                for name in listing.manifests:
                    key = manifest_key(run, listing.ref, name)
                    if key in self.manifests:
                        continue
                    try:
                        manifest = self.tier.manifests.read(run, listing.ref, name)
                    except (FormatError, MissingPartitionError, StorageError) as error:
                        if name not in self.tier.manifests.listing(run, listing.ref).manifests:
                            # Deleted since it was listed.
                            continue
                        raise InconsistentCheckpointError(
                            f"nothing was freed, because what a damaged manifest needs is unknown: {error}; "
                            "delete that checkpoint first"
                        ) from error
                    self.known.live.update(manifest.partitions())
                    self.manifests.add(key)
        return self.known.live

    def _candidates(self, live: set[Digest]) -> dict[PackId, list[Digest]]:
        """Return the packs of which no digest is live, by their own indexes, with their digests."""
        found = {}
        for pack_id in self.tier.pack_ids():
            try:
                digests = self._digests(pack_id)
            except MissingPartitionError:
                continue
            except (StorageError, FormatError):
                # Held by a writer that has just sealed it; or its index is damaged, and nobody can tell what it held.
                self.kept += 1
                continue
            if live.isdisjoint(digests):
                found[pack_id] = digests
            else:
                self.kept += 1
        return found

    def _digests(self, pack_id: PackId) -> list[Digest]:
        if pack_id not in self.known.packs:
            pack = self.tier.open_pack(pack_id, wait=False)
            digests = pack.digests()
            pack.close()
            if pack.damage is not None:
                raise pack.damage
            self.known.packs[pack_id] = digests
        return self.known.packs[pack_id]

    def count(self, result: Collected) -> None:
        """Say what would be freed."""
        with self.catalog.read() as transaction:
            pinned = _pinned(transaction, self.dead_pins)
        room = self.tier.pool.room()
        for pack_id in self.candidates:
            with self.tier.locked(_path(self.tier, pack_id)) as held:
                if not held:
                    result.busy_packs += 1
                elif pack_id in pinned:
                    result.kept_packs += 1
                else:
                    path = _path(self.tier, pack_id)
                    result.freed_packs += 1
                    result.freed_bytes += path.stat().st_size
                    if self.tier.pool.would_keep(path, room):
                        result.pooled_packs += 1
                        room -= path.stat().st_size
        result.removed_temporaries = len(self.tier.stale_temporaries())

    def carry_out(self, result: Collected) -> bool:
        """Free the candidates batch by batch; return False when a checkpoint was committed meanwhile."""
        candidates = list(self.candidates)
        for start in range(0, max(len(candidates), 1), _BATCH):
            batch = candidates[start : start + _BATCH]
            with contextlib.ExitStack() as stack:
                locked = [
                    pack_id for pack_id in batch if stack.enter_context(self.tier.locked(_path(self.tier, pack_id)))
                ]
                freed = self._mark_freed(locked)
                if freed is None:
                    return False
                result.busy_packs += len(batch) - len(locked)
                result.kept_packs += len(locked) - len(freed)
                self._retire(freed, result)
        return True

    def _mark_freed(self, locked: Sequence[PackId]) -> list[PackId] | None:
        """§8.3 step 4, one transaction; None when the catalog names a manifest that this attempt has not seen."""
        with self.catalog.write() as transaction:
            if transaction.manifests() - self.manifests - self.stale:
                return None
            for key in self.stale:
                transaction.delete_manifest(key)
            for key in self.dead_pins:
                transaction.delete_pin(key)
            pinned = _pinned(transaction, set())
            freed = [pack_id for pack_id in locked if pack_id not in pinned]
            for pack_id in freed:
                for name in self.candidates[pack_id]:
                    transaction.forget_location(name, pack_id)
                transaction.put_pack(pack_id, registry.PACK_FREED, 0, 0)
        emit("gc.marked_freed", f"{len(freed)} packs")
        return freed

    def _retire(self, freed: Sequence[PackId], result: Collected) -> None:
        """§8.3 step 5."""
        for pack_id in freed:
            path = _path(self.tier, pack_id)
            result.freed_packs += 1
            result.freed_bytes += path.stat().st_size
            result.pooled_packs += self.tier.pool.put(path)
            emit("gc.retired", path.name)
        if freed:
            self.tier.pool.sync()
            self.tier.files.sync_directory(self.tier.packs)
        present = set(self.tier.pack_ids())
        with self.catalog.write() as transaction:
            # Also those that an earlier collection marked and retired before it was killed.
            for pack_id in transaction.freed_packs():
                if pack_id not in present:
                    transaction.delete_pack(pack_id)
        emit("gc.forgotten", f"{len(freed)} packs")


def _is_gone(tier: NvmeTier, key: bytes) -> bool:
    """Tell whether a manifest that the catalog names has been deleted, or could never be the name of one."""
    run, folder, name = [*os.fsdecode(key).split("/", 2), "", ""][:3]
    if not layout.is_run(run) or layout.parse_checkpoint_name(folder) is None or not layout.parse_manifest_name(name):
        return True
    with translated("look for", tier.root / layout.MANIFESTS / run / folder / name):
        return not (tier.root / layout.MANIFESTS / run / folder / name).exists()


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
