"""Repack: copy the live frames of packs that are mostly garbage, then free those packs (SPEC.md §B6)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from asymcheck.errors import FormatError, MissingPartitionError, OutOfSpaceError, StorageError
from asymcheck.events import emit
from asymcheck.format import registry
from asymcheck.format.digest import ZERO_DIGEST
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.pack import PackHeader, location_of
from asymcheck.restore.frame_reader import read_stored
from asymcheck.restore.partition_locator import PartitionCopy
from asymcheck.storage.nvme import Catalog, NvmeTier, Slot, Transaction
from asymcheck.storage.reachability import HeldFrames, StoreReachability, pinned_packs
from asymcheck.types import Digest, Location, PackId

_ATTEMPTS = 8
# Each lock needs a file descriptor.
_BATCH = 64

_Copy = tuple[Digest, bytes]
"""Digest of a partition, and digest of the base of one of its frames (zero for a full frame).

A full frame replaces any frame of its digest. Any other frame replaces only a frame with the same base. Otherwise a
chain of deltas could become too long.
"""


class BaseLocations:
    """Locations of frames in packs that are kept. Each frame is read and checked before it replaces another frame."""

    def __init__(self, tier: NvmeTier) -> None:
        self._tier = tier
        self._locations: dict[_Copy, Location] = {}
        self._sound: dict[Location, bool] = {}

    def add(self, locations: Iterable[tuple[_Copy, Location]]) -> None:
        """Add frames of packs that are kept."""
        self._locations.update(locations)

    def of(self, copy: _Copy) -> Location | None:
        """Return the location of a sound frame that can replace this one, or None."""
        for location in map(self._locations.get, _replacements_of(copy)):
            if location is not None and self._is_sound(location):
                return location
        return None

    def _is_sound(self, location: Location) -> bool:
        if location not in self._sound:
            self._sound[location] = False
            with contextlib.suppress(FormatError, StorageError, MissingPartitionError), contextlib.ExitStack() as stack:
                pack = stack.enter_context(contextlib.closing(self._tier.open_pack(location.pack_id)))
                slot = stack.enter_context(self._tier.slots.slot(location.stored_length))
                # No match if the index was damaged since the mark.
                for number in np.flatnonzero(pack.entries["offset"] == location.offset).tolist():
                    read_stored(PartitionCopy(pack, number), slot)
                    self._sound[location] = True
        return self._sound[location]


@dataclasses.dataclass
class Repacked:
    """Result of a repack, or its expected result."""

    packs: int = 0
    """Number of packs freed."""
    copied_bytes: int = 0
    """Bytes of the copied frames."""
    new_packs: int = 0
    """Number of new packs with the copied frames."""
    busy: int = 0
    """Number of packs that should be freed but are in use."""


@dataclasses.dataclass
class RepackPlan:
    """The packs to free, and the frames to copy first."""

    kept: BaseLocations
    """Frames in packs that are kept. Their partitions need no copy."""
    batches: list[dict[PackId, list[int]]] = dataclasses.field(default_factory=list)
    """For each new pack, the packs to free, with the numbers of the frames to copy."""
    expected: Repacked = dataclasses.field(default_factory=Repacked)
    """The result if no other process locks a pack meanwhile."""


def plan_repack(
    tier: NvmeTier, catalog: Catalog, needed: StoreReachability, dead_pins: Collection[bytes] = frozenset()
) -> RepackPlan:
    """Choose the packs to free, by the manifests and packs that ``needed`` has read. Ignore ``dead_pins``."""
    live = needed.live()
    with catalog.read() as transaction:
        states = transaction.pack_states()
        pinned = pinned_packs(transaction, dead_pins)
    # Packs with live and dead frames. Other packs are entirely live or entirely dead.
    partly_live = {
        pack_id: held
        for pack_id, held in needed.packs.items()
        if pack_id not in pinned
        and pack_id not in needed.unmovable
        and not live.isdisjoint(held.names)
        and (states.get(pack_id) != registry.PACK_LIVE or not live.issuperset(held.names))
    }
    wanted = live.intersection(name for held in partly_live.values() for name in held.names)
    plan = RepackPlan(BaseLocations(tier))
    expected = plan.expected
    for pack_id, held in needed.packs.items():
        if pack_id not in partly_live and states.get(pack_id) == registry.PACK_LIVE:
            plan.kept.add(_locations(pack_id, held, wanted))
    claimed: set[_Copy] = set()
    batch_bytes = 0
    # Packs that the catalog does not list come last: most are copies from a killed collection.
    for pack_id, held in sorted(partly_live.items(), key=lambda item: states.get(item[0]) != registry.PACK_LIVE):
        to_copy = [number for number, name in enumerate(held.names) if name in live]
        to_copy = [number for number in to_copy if not _has_replacement(_copy_of(held, number), claimed, plan.kept)]
        copy_bytes, total = int(held.lengths[to_copy].sum()), int(held.lengths.sum())
        if to_copy and total - copy_bytes <= tier.config.repack_waste * total:
            if states.get(pack_id) == registry.PACK_LIVE:
                plan.kept.add(_locations(pack_id, held, wanted))
            continue
        with tier.locked(tier.pack_path(pack_id)) as free:
            if not free:
                expected.busy += 1
                continue
        if not plan.batches or len(plan.batches[-1]) == _BATCH or batch_bytes + copy_bytes > tier.config.pack_bytes:
            plan.batches.append({})
            batch_bytes = 0
        expected.new_packs += bool(to_copy) and not batch_bytes
        batch_bytes += copy_bytes
        plan.batches[-1][pack_id] = to_copy
        expected.packs += 1
        expected.copied_bytes += copy_bytes
        claimed.update(_copy_of(held, number) for number in to_copy)
    return plan


def _copy_of(held: HeldFrames, number: int) -> _Copy:
    return held.names[number], held.entries["base_digest"][number].tobytes()


def _has_replacement(copy: _Copy, claimed: set[_Copy], kept: BaseLocations) -> bool:
    return not claimed.isdisjoint(_replacements_of(copy)) or kept.of(copy) is not None


def _replacements_of(copy: _Copy) -> tuple[_Copy, _Copy]:
    return copy, (copy[0], ZERO_DIGEST)


def _locations(pack_id: PackId, held: HeldFrames, wanted: set[Digest]) -> Iterator[tuple[_Copy, Location]]:
    if wanted.isdisjoint(held.names):
        return
    for number, name in enumerate(held.names):
        if name in wanted:
            yield _copy_of(held, number), location_of(pack_id, held.entries, number)


def repack(
    tier: NvmeTier, catalog: Catalog, needed: StoreReachability, retire: Callable[[Sequence[PackId]], object]
) -> Repacked:
    """Copy live frames of packs that are mostly garbage, and free these packs.

    Other processes may save and read at the same time. ``retire`` removes packs that are marked freed and locked. If
    the disk is full, the repack stops.

    Raises:
        StorageError: the device failed. Nothing is lost.
    """
    plan = plan_repack(tier, catalog, needed)
    done = Repacked(busy=plan.expected.busy)
    for frames in plan.batches:
        try:
            _Batch(tier, catalog, needed, plan.kept, frames).carry_out(retire, done)
        except OutOfSpaceError:
            break
    return done


class _Batch:
    """Packs whose live frames are copied into one new pack.

    Every live partition is in a complete pack at every instant. One transaction enters the new pack and marks the old
    packs freed. The new pack has its final name before.
    """

    def __init__(
        self,
        tier: NvmeTier,
        catalog: Catalog,
        needed: StoreReachability,
        kept: BaseLocations,
        frames: Mapping[PackId, Sequence[int]],
    ) -> None:
        self._tier, self._catalog, self._needed, self._kept = tier, catalog, needed, kept
        # Another collection may have freed packs since the plan.
        self._held = {pack_id: needed.packs[pack_id] for pack_id in frames if pack_id in needed.packs}
        self._frames = {pack_id: frames[pack_id] for pack_id in self._held}
        self._copied: dict[_Copy, Location] = {}
        self._entered = False

    def carry_out(self, retire: Callable[[Sequence[PackId]], object], done: Repacked) -> None:
        """Copy, enter, retire."""
        expected = sum(int(self._held[pack_id].lengths[numbers].sum()) for pack_id, numbers in self._frames.items())
        frames = itertools.chain.from_iterable(itertools.starmap(self._read, self._frames.items()))
        new_pack = self._tier.provisional_pack(expected, frames, lambda: self._entered)
        with new_pack as (header, self._copied), contextlib.ExitStack() as locks:
            # Read manifests committed during the copy now, before taking the locks that block readers.
            self._needed.refresh()
            free = [
                pack_id
                for pack_id in self._held
                if locks.enter_context(self._tier.locked(self._tier.pack_path(pack_id)))
            ]
            done.busy += len(self._held) - len(free)
            freed = self._enter(header, free)
            if freed and header is not None:
                done.new_packs += 1
                done.copied_bytes += header.index_offset - registry.BLOCK_BYTES
            if freed:
                retire(freed)
                done.packs += len(freed)
        self._kept.add(self._copied.items() if self._entered else ())

    def _read(self, pack_id: PackId, numbers: Sequence[int]) -> Iterator[tuple[Slot, FrameDescriptor]]:
        """Yield checked frames in their stored encoding. Stop at the first damaged frame, so that the pack is kept."""
        if not numbers:
            return
        longest = int(self._held[pack_id].entries["stored_length"][numbers].max())
        with contextlib.ExitStack() as stack:
            try:
                pack = stack.enter_context(contextlib.closing(self._tier.open_pack(pack_id)))
                slot = stack.enter_context(self._tier.slots.slot(longest))
                for number in numbers:
                    yield slot, read_stored(PartitionCopy(pack, number), slot)[0]
            except FormatError:
                # The next collection must not try to copy this pack again.
                self._needed.unmovable.add(pack_id)
            except (StorageError, MissingPartitionError):
                return

    def _enter(self, header: PackHeader | None, free: Sequence[PackId]) -> list[PackId]:
        """Enter the new pack and mark the old packs freed in one transaction. Return the freed packs."""
        own = [] if header is None else [header.pack_id]
        for _ in range(_ATTEMPTS):
            new, gone = self._needed.since(self._catalog)
            if new:
                # A manifest committed during the copy may need frames that were not copied.
                self._needed.refresh()
            live = self._needed.live()
            moved = {pack_id: self._new_locations(pack_id, live) for pack_id in free}
            with self._catalog.write(gives_way=True) as transaction:
                is_current = self._needed.is_current(transaction, gone, own)
                freed = self._mark_freed(transaction, header, moved) if is_current else []
            if is_current:
                self._entered = bool(freed)
                emit("gc.repacked", f"{len(freed)} packs")
                return freed
            self._needed.refresh()
        return []

    def _new_locations(self, pack_id: PackId, live: set[Digest]) -> dict[Digest, Location] | None:
        """Return other locations of the live partitions of a pack, or None if a partition has no other location."""
        held, locations = self._held[pack_id], {}
        for number, name in enumerate(held.names):
            if name in live:
                copy = _copy_of(held, number)
                copied = (self._copied[other] for other in _replacements_of(copy) if other in self._copied)
                location = next(copied, None) or self._kept.of(copy)
                if location is None:
                    return None
                locations[name] = location
        return locations

    def _mark_freed(
        self,
        transaction: Transaction,
        header: PackHeader | None,
        moved: Mapping[PackId, Mapping[Digest, Location] | None],
    ) -> list[PackId]:
        pinned = pinned_packs(transaction)
        freed = []
        for pack_id, locations in moved.items():
            if locations is None or pack_id in pinned:
                continue
            targets = {location.pack_id for location in locations.values()} - {header.pack_id if header else None}
            if any(transaction.pack_state(target) != registry.PACK_LIVE for target in targets):
                continue
            transaction.leave_pack(pack_id, self._held[pack_id].names, locations)
            transaction.put_pack(pack_id, registry.PACK_FREED, 0, 0)
            freed.append(pack_id)
        if freed and header is not None:
            transaction.put_pack(header.pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
        return freed
