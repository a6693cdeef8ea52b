"""The catalog made to agree with packs and manifests, which alone are the truth (SPEC.md §10.4).

Safe beside saves and collections of other processes that have the catalog open: what they have done meanwhile is seen
inside the one write transaction that makes the changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping

from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.catalog import manifest_key
from asymcheck.recovery.scan import PackContent, Survey, read_indexes
from asymcheck.tiers.nvme import Catalog, NvmeTier, Transaction
from asymcheck.tiers.nvme.catalog import DeadPins
from asymcheck.types import Digest, Location, PackId


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """What a catalog knows after it was made to agree with packs and manifests."""

    packs: int
    partitions: int
    manifests: int
    left_out: tuple[str, ...]
    """Packs that were not entered, with the reasons."""
    changed: int
    """Entries that were missing, wrong or damaged before."""
    kept_pins: int
    """Pins of living processes, which a rebuild keeps."""


@dataclasses.dataclass
class _Changes:
    """What separates a catalog from what it should say."""

    live: dict[PackId, PackContent] = dataclasses.field(default_factory=dict)
    """Packs that it should know."""
    known: set[Digest] = dataclasses.field(default_factory=set)
    """Partitions that it knows and that lie where it says."""
    manifests: set[bytes] = dataclasses.field(default_factory=set)
    """Manifests that it should know."""
    put_packs: list[PackId] = dataclasses.field(default_factory=list)
    delete_packs: list[PackId] = dataclasses.field(default_factory=list)
    put_locations: dict[Digest, Location] = dataclasses.field(default_factory=dict)
    delete_locations: list[Digest] = dataclasses.field(default_factory=list)
    put_manifests: dict[bytes, int] = dataclasses.field(default_factory=dict)
    delete_manifests: list[bytes] = dataclasses.field(default_factory=list)
    delete_pins: list[bytes] = dataclasses.field(default_factory=list)
    kept_pins: int = 0
    held: set[PackId] = dataclasses.field(default_factory=set)
    """Packs that a writer or collection holds: theirs to enter, or to forget."""

    def count(self) -> int:
        """Return how many entries differ."""
        # What is replaced is in two of these.
        locations = self.put_locations.keys() | set(self.delete_locations)
        manifests = self.put_manifests.keys() | set(self.delete_manifests)
        return sum(map(len, (self.put_packs, self.delete_packs, locations, manifests, self.delete_pins)))

    def apply(self, transaction: Transaction) -> None:
        """Make the changes."""
        for name in self.delete_locations:
            transaction.delete_location(name)
        for pack_id in self.delete_packs:
            transaction.delete_pack(pack_id)
        for key in self.delete_manifests:
            transaction.delete_manifest(key)
        for key in self.delete_pins:
            transaction.delete_pin(key)
        for pack_id in self.put_packs:
            header = self.live[pack_id].header
            transaction.put_pack(pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
        for name, location in self.put_locations.items():
            transaction.put_location(name, location)
        for key, size in self.put_manifests.items():
            transaction.put_manifest(key, size)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was read before the transaction begins, in which nothing slow may happen."""

    survey: Survey
    manifests: Mapping[bytes, int]
    """The manifests, by catalog key, with their sizes in bytes."""
    dead_pins: DeadPins
    """Pins that protect nothing more."""


def rebuild(tier: NvmeTier, transaction: Transaction) -> Rebuilt:
    """Enter every complete pack with its partitions, and every manifest, into an empty catalog.

    A pack that cannot be read is left out: what it holds is written again by the next save that needs it.
    """
    return _reconcile(tier, transaction, Seen(read_indexes(tier), _manifests(tier), DeadPins({})))


def reconcile(tier: NvmeTier, catalog: Catalog, survey: Survey | None = None) -> Rebuilt:
    """Make a catalog agree with the packs and the manifests; other processes may have it open.

    Args:
        tier: the store.
        catalog: its catalog.
        survey: what the packs hold, if every frame was read; else their indexes are believed.

    Raises:
        CatalogError: it is damaged so that it must be set aside, which the next start does.
    """
    dead = DeadPins.of(catalog)
    seen = Seen(survey or read_indexes(tier), _manifests(tier), dead)
    with catalog.read() as transaction:
        # A look first: as a rule there is nothing to do, and a writer would keep saves waiting.
        changes = _compare(tier, transaction, seen)
    if changes.count():
        with catalog.write() as transaction:
            return _reconcile(tier, transaction, seen)
    return _result(changes, seen)


def _reconcile(tier: NvmeTier, transaction: Transaction, seen: Seen) -> Rebuilt:
    # Whoever gave a pack its name may have been killed before this; from now on saves rely on it.
    tier.files.sync_directory(tier.packs)
    changes = _compare(tier, transaction, seen)
    changes.apply(transaction)
    emit("catalog.reconciled", str(tier.root))
    return _result(changes, seen)


def _result(changes: _Changes, seen: Seen) -> Rebuilt:
    left_out = {pack_id: str(error) for pack_id, error in seen.survey.left_out.items()}
    left_out |= {pack_id: pack.damage for pack_id, pack in seen.survey.packs.items() if pack.damage}
    left_out |= {
        pack_id: f"pack {layout.pack_name(pack_id)} is held by a writer or by collection" for pack_id in changes.held
    }
    return Rebuilt(
        packs=len(changes.live),
        partitions=len(changes.known | changes.put_locations.keys()),
        manifests=len(changes.manifests),
        left_out=tuple(left_out[pack_id] for pack_id in sorted(left_out)),
        changed=changes.count(),
        kept_pins=changes.kept_pins,
    )


def _compare(tier: NvmeTier, transaction: Transaction, seen: Seen) -> _Changes:
    changes = _Changes()
    # Inside the transaction: collection marks a pack freed, in a transaction of its own, before it takes it away. So
    # what is here and not marked stays until this one ends.
    present = set(tier.pack_ids())
    _compare_packs(tier, transaction, seen, present, changes)
    _compare_locations(transaction, seen, present, changes)
    _compare_manifests(tier, transaction, seen, changes)
    changes.delete_pins = sorted(seen.dead_pins.among(transaction))
    changes.kept_pins = len(transaction.pins()) - len(changes.delete_pins)
    return changes


def _compare_packs(
    tier: NvmeTier, transaction: Transaction, seen: Seen, present: set[PackId], changes: _Changes
) -> None:
    states = transaction.pack_states()
    changes.delete_packs = [pack_id for pack_id in states if pack_id not in present]
    for pack_id, pack in seen.survey.packs.items():
        if pack_id not in present or pack.damage:
            continue
        if states.get(pack_id) != registry.PACK_LIVE:
            # Collection holds what it has marked and not taken away yet; a writer, what it has not entered yet. A lock
            # that can be had says that neither is about it, and in this transaction neither begins.
            with tier.locked(tier.packs / layout.pack_name(pack_id), exclusive=False) as free:
                if not free:
                    changes.held.add(pack_id)
                    continue
            changes.put_packs.append(pack_id)
        changes.live[pack_id] = pack


def _compare_locations(transaction: Transaction, seen: Seen, present: set[PackId], changes: _Changes) -> None:
    places = {pack_id: _places(pack) for pack_id, pack in changes.live.items()}
    for name, location in transaction.locations():
        if location is not None and _is_right(name, location, seen, present, changes, places):
            changes.known.add(name)
        else:
            changes.delete_locations.append(name)
    for pack_id, pack in changes.live.items():
        for name, sequence in places[pack_id].items():
            if name not in changes.known and name not in changes.put_locations:
                changes.put_locations[name] = pack.location(sequence)


def _is_right(
    name: Digest,
    location: Location,
    seen: Seen,
    present: set[PackId],
    changes: _Changes,
    places: Mapping[PackId, Mapping[Digest, int]],
) -> bool:
    pack_id = location.pack_id
    if pack_id in changes.live:
        sequence = places[pack_id].get(name)
        if sequence is None:
            return False
        entry = changes.live[pack_id].entries[sequence]
        return (location.offset, location.plain_length) == (int(entry["offset"]), int(entry["plain_length"]))
    # A pack that was not read is new, or held; whoever entered it knew what it holds.
    return pack_id in present and pack_id not in seen.survey.packs


def _places(pack: PackContent) -> dict[Digest, int]:
    return {pack.names[sequence]: sequence for sequence in reversed(pack.promised())}


def _manifests(tier: NvmeTier) -> dict[bytes, int]:
    found = {}
    for run in tier.manifests.runs():
        for listing in tier.manifests.checkpoints(run):
            for name in listing.manifests:
                path = tier.manifests.directory(run, listing.ref) / str(name)
                with contextlib.suppress(OSError):  # deleted since it was listed, or a link that leads nowhere
                    found[manifest_key(run, listing.ref, name)] = path.stat().st_size
    return found


def _compare_manifests(tier: NvmeTier, transaction: Transaction, seen: Seen, changes: _Changes) -> None:
    entered = transaction.manifests()
    # Those that were committed since the listing stay: collection relies on them. Those deleted since go.
    gone = {key for key in entered | seen.manifests.keys() if not _is_there(tier, key)}
    changes.put_manifests = {
        key: size for key, size in seen.manifests.items() if key not in entered and key not in gone
    }
    changes.delete_manifests = sorted(entered & gone)
    changes.manifests = (entered | changes.put_manifests.keys()) - gone


def _is_there(tier: NvmeTier, key: bytes) -> bool:
    path = os.path.normpath(tier.root / layout.MANIFESTS / os.fsdecode(key))
    return os.path.lexists(path)
