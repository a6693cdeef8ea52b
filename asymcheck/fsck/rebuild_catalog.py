"""The catalog made to agree with packs and manifests, which alone are the truth (SPEC.md §10.4).

Safe beside saves and collections of other processes that have the catalog open: what they have done meanwhile is seen
inside the one write transaction that makes the changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from functools import partial

from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.catalog_records import manifest_key
from asymcheck.fsck.frame_scanner import PackContent, Survey, read_indexes
from asymcheck.storage.nvme import Catalog, NvmeTier, Transaction
from asymcheck.types import Digest, Location, Owner, PackId


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """Contents of a catalog after it was made to agree with packs and manifests."""

    packs: int
    partitions: int
    manifests: int
    left_out: tuple[str, ...]
    """Packs that were not entered, with the reasons."""
    changed: int
    """Entries that were missing, wrong or damaged before."""
    kept_pins: int
    """Pins of living processes, which a rebuild keeps."""


def rebuild(tier: NvmeTier, transaction: Transaction) -> Rebuilt:
    """Enter every complete pack with its partitions, and every manifest, into an empty catalog.

    A pack that cannot be read is left out: what it holds is written again by the next save that needs it.
    """
    return _Changes(tier, {}, read_indexes(tier), _manifests(tier), transaction).apply()


def reconcile(tier: NvmeTier, catalog: Catalog, survey: Survey | None = None) -> Rebuilt:
    """Make a catalog agree with the packs and the manifests; other processes may have it open.

    ``survey`` is what the packs hold, if every frame was read; else their indexes are believed.

    Raises:
        CatalogError: it is damaged so that it must be set aside, which the next start does.
    """
    # Read before a transaction begins, in which nothing slow may happen.
    changes = partial(_Changes, tier, catalog.dead_pins(), survey or read_indexes(tier), _manifests(tier))
    with catalog.read() as transaction:
        # A look first: as a rule there is nothing to do, and a writer would keep saves waiting.
        found = changes(transaction)
    if found.count():
        with catalog.write() as transaction:
            return changes(transaction).apply()
    return found.result()


def _manifests(tier: NvmeTier) -> dict[bytes, int]:
    found = {}
    for run in tier.manifests.runs():
        for listing in tier.manifests.checkpoints(run):
            for name in listing.manifests:
                path = tier.manifests.directory(run, listing.ref) / str(name)
                with contextlib.suppress(OSError):  # deleted since it was listed, or a link that leads nowhere
                    found[manifest_key(run, listing.ref, name)] = path.stat().st_size
    return found


class _Changes:
    """Differences between a catalog and the files, found inside one transaction.

    Garbage collection marks a pack freed, in another transaction, before it removes the pack. Therefore a pack that
    exists and is not marked stays until this transaction ends.
    """

    def __init__(
        self,
        tier: NvmeTier,
        dead_pins: Mapping[bytes, Owner],
        survey: Survey,
        manifests: Mapping[bytes, int],
        transaction: Transaction,
    ) -> None:
        """Compare with a survey and with the sizes of the manifests by catalog key."""
        self._tier = tier
        self._survey = survey
        self._transaction = transaction
        self._present = set(tier.pack_ids())
        # Packs that the catalog should know; those held by a writer or collection are theirs to enter, or to forget.
        self._live: dict[PackId, PackContent] = {}
        self._held: set[PackId] = set()
        self._put_packs: list[PackId] = []
        self._compare_packs(transaction.pack_states())
        # Partitions that the catalog knows and that lie where it says.
        self._known: set[Digest] = set()
        self._put_locations: dict[Digest, Location] = {}
        self._delete_locations: list[Digest] = []
        self._compare_locations(transaction)
        self._compare_manifests(manifests, transaction.manifests())
        self._delete_pins = sorted(transaction.still_dead(dead_pins))
        self._kept_pins = len(transaction.pins()) - len(self._delete_pins)

    def _compare_packs(self, states: Mapping[PackId, int | None]) -> None:
        self._delete_packs = [pack_id for pack_id in states if pack_id not in self._present]
        for pack_id, pack in self._survey.packs.items():
            if pack_id not in self._present or pack.damage:
                continue
            if states.get(pack_id) != registry.PACK_LIVE:
                # Collection holds what it has marked and not taken away yet; a writer, what it has not entered yet. A
                # lock that can be had says that neither is about it, and in this transaction neither begins.
                with self._tier.locked(self._tier.packs / layout.pack_name(pack_id), exclusive=False) as free:
                    if not free:
                        self._held.add(pack_id)
                        continue
                self._put_packs.append(pack_id)
            self._live[pack_id] = pack

    def _compare_locations(self, transaction: Transaction) -> None:
        places = {
            pack_id: {pack.names[sequence]: sequence for sequence in reversed(pack.promised())}
            for pack_id, pack in self._live.items()
        }
        for name, location in transaction.locations():
            if location is not None and self._is_right(location, places.get(location.pack_id, {}).get(name)):
                self._known.add(name)
            else:
                self._delete_locations.append(name)
        for pack_id, pack in self._live.items():
            for name, sequence in places[pack_id].items():
                if name not in self._known and name not in self._put_locations:
                    self._put_locations[name] = pack.location(sequence)

    def _is_right(self, location: Location, sequence: int | None) -> bool:
        """Tell whether a location is that of frame ``sequence`` of its pack, which the partition has there."""
        pack = self._live.get(location.pack_id)
        if pack is None:
            # A pack that was not read is new, or held; whoever entered it knew what it holds.
            return location.pack_id in self._present and location.pack_id not in self._survey.packs
        if sequence is None:
            return False
        entry = pack.entries[sequence]
        return (location.offset, location.plain_length) == (int(entry["offset"]), int(entry["plain_length"]))

    def _compare_manifests(self, seen: Mapping[bytes, int], entered: set[bytes]) -> None:
        # Those that were committed since the listing stay: collection relies on them. Those deleted since go.
        root = self._tier.root / layout.MANIFESTS
        known = entered | seen.keys()
        gone = {key for key in known if not os.path.lexists(os.path.normpath(root / os.fsdecode(key)))}
        self._put_manifests = {key: size for key, size in seen.items() if key not in entered and key not in gone}
        self._delete_manifests = sorted(entered & gone)
        self._manifests = known - gone

    def count(self) -> int:
        """Return how many entries differ."""
        # What is replaced is in two of these.
        locations = self._put_locations.keys() | set(self._delete_locations)
        manifests = self._put_manifests.keys() | set(self._delete_manifests)
        return sum(map(len, (self._put_packs, self._delete_packs, locations, manifests, self._delete_pins)))

    def apply(self) -> Rebuilt:
        """Make the changes, and say what the catalog knows then."""
        transaction = self._transaction
        # Whoever gave a pack its name may have been killed before this; from now on saves rely on it.
        self._tier.files.sync_directory(self._tier.packs)
        for name in self._delete_locations:
            transaction.delete_location(name)
        for pack_id in self._delete_packs:
            transaction.delete_pack(pack_id)
        for key in self._delete_manifests:
            transaction.delete_manifest(key)
        for key in self._delete_pins:
            transaction.delete_pin(key)
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
        """Say what the catalog knows with the changes."""
        left_out = {pack_id: str(error) for pack_id, error in self._survey.left_out.items()}
        left_out |= {pack_id: pack.damage for pack_id, pack in self._survey.packs.items() if pack.damage}
        held = "is held by a writer or by collection"
        left_out |= {pack_id: f"pack {layout.pack_name(pack_id)} {held}" for pack_id in self._held}
        return Rebuilt(
            packs=len(self._live),
            partitions=len(self._known | self._put_locations.keys()),
            manifests=len(self._manifests),
            left_out=tuple(left_out[pack_id] for pack_id in sorted(left_out)),
            changed=self.count(),
            kept_pins=self._kept_pins,
        )
