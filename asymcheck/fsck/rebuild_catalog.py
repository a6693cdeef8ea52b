"""Rebuild or correct the catalog from packs and manifests, which are authoritative (SPEC.md §B3.3).

Other processes may save and collect at the same time. One write transaction compares and changes the catalog, so that
it includes their changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import partial

from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.catalog_records import manifest_key
from asymcheck.fsck.frame_scanner import PackContent, ScanResult, read_indexes
from asymcheck.storage.nvme import Catalog, NvmeTier, Transaction
from asymcheck.storage.reachability import is_manifest_deleted
from asymcheck.types import Digest, Location, PackId


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """Contents of a rebuilt or corrected catalog."""

    packs: int
    partitions: int
    manifests: int
    left_out: tuple[str, ...]
    """Packs without catalog entries, with the reasons."""
    changed: int
    """Number of entries that were missing, wrong or damaged."""
    kept_pins: int
    """Number of pins of living processes, which were kept."""


def rebuild(tier: NvmeTier, transaction: Transaction) -> Rebuilt:
    """Enter all complete packs, their partitions, and all manifests into an empty catalog.

    Unreadable packs are skipped. Saves write the partitions of skipped packs again when they need them.
    """
    return _Changes(tier, set, read_indexes(tier), _manifest_sizes(tier), transaction).apply()


def reconcile(tier: NvmeTier, catalog: Catalog, scan: ScanResult | None = None) -> Rebuilt:
    """Correct a catalog from the packs and the manifests. Other processes may have the catalog open.

    ``scan`` is a scan of all frames. Without ``scan``, the pack indexes are trusted.

    Raises:
        CatalogError: the catalog is too damaged to correct. The next start replaces it.
    """
    # Read packs and manifests before the transaction, which must be short.
    dead_pins = partial(catalog.still_dead, catalog.dead_pins())
    changes = partial(_Changes, tier, dead_pins, scan or read_indexes(tier), _manifest_sizes(tier))
    with catalog.read() as transaction:
        # Compare in a read transaction first: usually nothing differs, and a write transaction blocks saves.
        difference = changes(transaction)
    if difference.count():
        with catalog.write() as transaction:
            return changes(transaction).apply()
    return difference.result()


def _manifest_sizes(tier: NvmeTier) -> dict[bytes, int]:
    sizes = {}
    for run in tier.manifests.runs():
        for listing in tier.manifests.checkpoints(run):
            for name, size in tier.manifests.sizes(listing).items():
                sizes[manifest_key(run, listing.ref, name)] = size
    return sizes


class _Changes:
    """Differences between a catalog and the files, computed in one transaction.

    Garbage collection marks a pack freed in another transaction before it removes the file. A pack that exists and is
    not marked freed therefore exists until this transaction ends.
    """

    def __init__(
        self,
        tier: NvmeTier,
        dead_pins: Callable[[], set[bytes]],
        scan: ScanResult,
        manifests: Mapping[bytes, int],
        transaction: Transaction,
    ) -> None:
        self._tier, self._scan, self._transaction = tier, scan, transaction
        self._pack_ids = set(tier.pack_ids())
        # Keys to delete from each database of the catalog.
        self._deleted: dict[str, Collection[bytes]] = {"partitions": (), "packs": (), "manifests": (), "pins": ()}
        # Packs that belong in the catalog. Writers and collections enter or remove the packs that they hold.
        self._live: dict[PackId, PackContent] = {}
        self._locked: set[PackId] = set()
        self._put_packs: list[PackId] = []
        self._compare_packs(transaction.pack_states())
        # Partitions with a correct location in the catalog.
        self._correct: set[Digest] = set()
        self._put_locations: dict[Digest, Location] = {}
        self._compare_locations()
        self._compare_manifests(manifests, transaction.manifests())
        self._deleted["pins"] = sorted(dead_pins())
        self._kept_pins = len(transaction.pins()) - len(self._deleted["pins"])

    def _compare_packs(self, states: Mapping[PackId, int | None]) -> None:
        self._deleted["packs"] = [pack_id for pack_id in states if pack_id not in self._pack_ids]
        for pack_id, pack in self._scan.packs.items():
            if pack_id not in self._pack_ids or pack.damage:
                continue
            if states.get(pack_id) != registry.PACK_LIVE:
                # A collection locks packs that it has marked and not removed yet, and a writer locks packs that it has
                # not entered yet. If the lock is free, neither holds the pack, and neither can begin to during this
                # transaction.
                with self._tier.locked(self._tier.pack_path(pack_id), exclusive=False) as free:
                    if not free:
                        self._locked.add(pack_id)
                        continue
            self._live[pack_id] = pack
            if not self._transaction.has_pack(pack_id, pack.header.frame_count, pack.header.pack_length):
                self._put_packs.append(pack_id)

    def _compare_locations(self) -> None:
        sequences = {
            pack_id: {pack.digests[sequence]: sequence for sequence in reversed(pack.reusable())}
            for pack_id, pack in self._live.items()
        }
        wrong: list[Digest] = []
        for name, location in self._transaction.locations():
            if location is not None and self._is_correct(location, sequences.get(location.pack_id, {}).get(name)):
                self._correct.add(name)
            else:
                wrong.append(name)
        self._deleted["partitions"] = wrong
        for pack_id, pack in self._live.items():
            for name, sequence in sequences[pack_id].items():
                if name not in self._correct and name not in self._put_locations:
                    self._put_locations[name] = pack.location(sequence)

    def _is_correct(self, location: Location, sequence: int | None) -> bool:
        """Tell whether a location matches frame ``sequence``, where its pack stores the partition."""
        pack = self._live.get(location.pack_id)
        if pack is None:
            # An unscanned pack is new or locked. The process that entered it knew its frames.
            return location.pack_id in self._pack_ids and location.pack_id not in self._scan.packs
        return sequence is not None and location == pack.location(sequence)

    def _compare_manifests(self, listed: Mapping[bytes, int], entered: set[bytes]) -> None:
        # Keep manifests committed since the listing, because collection relies on them. Remove deleted manifests.
        keys = entered | listed.keys()
        gone = {key for key in keys if is_manifest_deleted(self._tier, key)}
        self._put_manifests = {
            key: size
            for key, size in listed.items()
            if key not in gone and not self._transaction.has_manifest(key, size)
        }
        self._deleted["manifests"] = sorted(entered & gone)
        self._manifests = keys - gone

    def count(self) -> int:
        """Return the number of different entries."""
        # A replaced entry is both deleted and put, and counts once.
        locations = {*self._put_locations, *self._deleted["partitions"]}
        manifests = {*self._put_manifests, *self._deleted["manifests"]}
        return sum(map(len, (self._put_packs, self._deleted["packs"], locations, manifests, self._deleted["pins"])))

    def apply(self) -> Rebuilt:
        """Apply the changes to the catalog."""
        transaction = self._transaction
        # Saves rely on entered packs, but a process may have been killed between the rename of a pack and the sync.
        self._tier.files.sync_directory(self._tier.packs)
        for database, keys in self._deleted.items():
            for key in keys:
                transaction.delete(database, key)
        for pack_id in self._put_packs:
            header = self._live[pack_id].header
            transaction.put_pack(pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
        for name, location in self._put_locations.items():
            transaction.put_location(name, location)
        for key, size in self._put_manifests.items():
            transaction.put_manifest(key, size)
        emit("catalog.reconciled", str(self._tier.root))
        return self.result()

    def result(self) -> Rebuilt:
        """Return the contents of the catalog after the changes."""
        left_out = {pack_id: str(error) for pack_id, error in self._scan.skipped.items()}
        left_out |= {pack_id: pack.damage for pack_id, pack in self._scan.packs.items() if pack.damage}
        locked = "is locked by a save or a garbage collection"
        left_out |= {pack_id: f"pack {layout.pack_name(pack_id)} {locked}" for pack_id in self._locked}
        return Rebuilt(
            packs=len(self._live),
            partitions=len(self._correct | self._put_locations.keys()),
            manifests=len(self._manifests),
            left_out=tuple(left_out[pack_id] for pack_id in sorted(left_out)),
            changed=self.count(),
            kept_pins=self._kept_pins,
        )
