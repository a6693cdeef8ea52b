"""Repacking: what is needed of a pack that is mostly garbage is copied, so that the pack can go (SPEC.md §8.3)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from asymcheck.config import WRITER
from asymcheck.errors import (
    AsymcheckError,
    DigestMismatchError,
    FormatError,
    MissingPartitionError,
    OutOfSpaceError,
    StorageError,
)
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.digest import ZERO_DIGEST, digest
from asymcheck.format.frame import FrameDescriptor, check_frame
from asymcheck.format.pack import PackHeader, location_of
from asymcheck.storage.nvme import Catalog, NvmeTier, PackWriter, Slot, Transaction
from asymcheck.storage.reachability import HeldFrames, StoreReachability, pinned_packs
from asymcheck.types import Digest, Location, PackId

_ATTEMPTS = 8
# As in a collection: locks need descriptors.
_BATCH = 64

_Copy = tuple[Digest, bytes]
"""A partition and the base that it is encoded against; zero for a full frame.

A full frame can stand for any other; one with a base only for its like: else a chain of deltas could grow too long.
"""


class BaseLocations:
    """Frames in packs that stay, each read before another one is given up for it."""

    def __init__(self, tier: NvmeTier) -> None:
        """Begin without any."""
        self._tier = tier
        self._places: dict[_Copy, Location] = {}
        self._sound: dict[Location, bool] = {}

    def add(self, places: Iterable[tuple[_Copy, Location]]) -> None:
        """Know of more."""
        self._places.update(places)

    def of(self, copy: _Copy) -> Location | None:
        """Return where a frame lies that can stand for this one, and is sound."""
        for place in map(self._places.get, _standing(copy)):
            if place is not None and self._is_sound(place):
                return place
        return None

    def _is_sound(self, place: Location) -> bool:
        if place not in self._sound:
            self._sound[place] = False
            with contextlib.suppress(FormatError, StorageError, MissingPartitionError), contextlib.ExitStack() as stack:
                pack = stack.enter_context(contextlib.closing(self._tier.open_pack(place.pack_id)))
                slot = stack.enter_context(self._tier.slots.slot(place.stored_length))
                # None when its index was damaged since it was looked at.
                for number in np.flatnonzero(pack.entries["offset"] == place.offset).tolist():
                    where = f"frame {number} of pack {layout.pack_name(place.pack_id)}"
                    _checked(pack.read_frame(number, slot), place.pack_id, number, where)
                    self._sound[place] = True
        return self._sound[place]


@dataclasses.dataclass
class Repacked:
    """The result of a repack, or the result to expect of one."""

    packs: int = 0
    """Packs marked freed, and retired."""
    copied_bytes: int = 0
    """Bytes of the frames copied."""
    new_packs: int = 0
    """Packs that the copied frames are stored in."""
    busy: int = 0
    """Packs that should go but are in use."""


@dataclasses.dataclass
class RepackPlan:
    """Which packs are to go, and what is copied before."""

    homes: BaseLocations
    """Where partitions lie that need no copy, in packs that stay."""
    batches: list[dict[PackId, list[int]]] = dataclasses.field(default_factory=list)
    """For each new pack, the packs to free, and the frames of each that are copied into it, by number."""
    expected: Repacked = dataclasses.field(default_factory=Repacked)
    """The result, if no pack comes into use meanwhile."""


def plan_repack(
    tier: NvmeTier, catalog: Catalog, needed: StoreReachability, dead_pins: Collection[bytes] = frozenset()
) -> RepackPlan:
    """Choose the packs that are worth it, by what ``needed`` has seen; ``dead_pins`` protect nothing."""
    live = needed.live()
    with catalog.read() as transaction:
        states = transaction.pack_states()
        pinned = pinned_packs(transaction, dead_pins)
    # Of the others all is needed, and of entirely dead ones nothing.
    in_part = {
        pack_id: held
        for pack_id, held in needed.packs.items()
        if pack_id not in pinned
        and pack_id not in needed.unmovable
        and not live.isdisjoint(held.names)
        and (states.get(pack_id) != registry.PACK_LIVE or not live.issuperset(held.names))
    }
    wanted = live.intersection(name for held in in_part.values() for name in held.names)
    plan = RepackPlan(BaseLocations(tier))
    expected = plan.expected
    for pack_id, held in needed.packs.items():
        if pack_id not in in_part and states.get(pack_id) == registry.PACK_LIVE:
            plan.homes.add(_places(pack_id, held, wanted))
    claimed: set[_Copy] = set()
    batch_bytes = 0
    # Packs that the catalog does not know come last: most are copies that a killed collection left of the others.
    for pack_id, held in sorted(in_part.items(), key=lambda item: states.get(item[0]) != registry.PACK_LIVE):
        own = [number for number, name in enumerate(held.names) if name in live]
        own = [number for number in own if not _stands(_copy_of(held, number), claimed, plan.homes)]
        own_bytes, total = int(held.lengths[own].sum()), int(held.lengths.sum())
        if own and total - own_bytes <= tier.config.repack_waste * total:
            if states.get(pack_id) == registry.PACK_LIVE:
                plan.homes.add(_places(pack_id, held, wanted))
            continue
        with tier.locked(tier.packs / layout.pack_name(pack_id)) as free:
            if not free:
                expected.busy += 1
                continue
        if not plan.batches or len(plan.batches[-1]) == _BATCH or batch_bytes + own_bytes > tier.config.pack_bytes:
            plan.batches.append({})
            batch_bytes = 0
        expected.new_packs += bool(own) and not batch_bytes
        batch_bytes += own_bytes
        plan.batches[-1][pack_id] = own
        expected.packs += 1
        expected.copied_bytes += own_bytes
        claimed.update(_copy_of(held, number) for number in own)
    return plan


def _copy_of(held: HeldFrames, number: int) -> _Copy:
    return held.names[number], held.entries["base_digest"][number].tobytes()


def _stands(copy: _Copy, claimed: set[_Copy], homes: BaseLocations) -> bool:
    return not claimed.isdisjoint(_standing(copy)) or homes.of(copy) is not None


def _standing(copy: _Copy) -> tuple[_Copy, _Copy]:
    """Return the copies that can stand for one."""
    return copy, (copy[0], ZERO_DIGEST)


def _places(pack_id: PackId, held: HeldFrames, wanted: set[Digest]) -> Iterator[tuple[_Copy, Location]]:
    if wanted.isdisjoint(held.names):
        return
    for number, name in enumerate(held.names):
        if name in wanted:
            yield _copy_of(held, number), location_of(pack_id, held.entries, number)


def repack(
    tier: NvmeTier, catalog: Catalog, needed: StoreReachability, retire: Callable[[Sequence[PackId]], object]
) -> Repacked:
    """Copy what is needed of packs that are mostly garbage, and free these; safe beside saves and reads.

    ``retire`` takes the packs that are marked freed and locked. On a disk without room for a copy nothing is done.

    Raises:
        StorageError: the device refused; nothing is lost.
    """
    plan = plan_repack(tier, catalog, needed)
    done = Repacked(busy=plan.expected.busy)
    for frames in plan.batches:
        try:
            _Batch(tier, catalog, needed, plan.homes, frames).carry_out(retire, done)
        except OutOfSpaceError:
            break
    return done


class _Batch:
    """Some packs whose needed frames go into one new pack.

    At every instant each of these partitions lies in a complete pack: the new one gets its name before the old ones
    are marked freed, in the transaction that enters it. Until then nothing relies on it.
    """

    def __init__(
        self,
        tier: NvmeTier,
        catalog: Catalog,
        needed: StoreReachability,
        homes: BaseLocations,
        frames: Mapping[PackId, Sequence[int]],
    ) -> None:
        self._tier, self._catalog, self._needed, self._homes, self._frames = tier, catalog, needed, homes, frames
        self._held = {pack_id: needed.packs[pack_id] for pack_id in frames}
        self._places: dict[_Copy, Location] = {}
        self._entered = False

    def carry_out(self, retire: Callable[[Sequence[PackId]], object], done: Repacked) -> None:
        """Copy, enter, retire."""
        with self._new_pack() as header, contextlib.ExitStack() as locks:
            # What came while frames were copied: before the locks, for which readers wait.
            self._needed.look()
            free = [
                pack_id
                for pack_id in self._held
                if locks.enter_context(self._tier.locked(self._tier.packs / layout.pack_name(pack_id)))
            ]
            done.busy += len(self._held) - len(free)
            freed = self._enter(header, free)
            if freed and header is not None:
                done.new_packs += 1
                done.copied_bytes += header.index_offset - registry.BLOCK_BYTES
            if freed:
                retire(freed)
                done.packs += len(freed)
        self._homes.add(self._places.items() if self._entered else ())

    @contextlib.contextmanager
    def _new_pack(self) -> Iterator[PackHeader | None]:
        """Copy into a complete pack, locked for the ``with`` block; it is removed again unless it was entered."""
        expected = sum(int(self._held[pack_id].lengths[numbers].sum()) for pack_id, numbers in self._frames.items())
        if not expected:
            yield None
            return
        writer = self._tier.start_pack(expected)
        try:
            try:
                header, locations = self._written(writer)
            except BaseException:
                writer.abandon()
                raise
            if header is None:
                writer.abandon()
            self._places = {(name, location.base_digest): location for name, location in locations}
            yield header
        finally:
            if not self._entered:
                # Nobody else could open it yet. Were it to stay, it would be no harm but a second copy.
                with contextlib.suppress(AsymcheckError):
                    self._tier.files.unlink(self._tier.packs / layout.pack_name(writer.pack_id))
            writer.close()

    def _written(self, writer: PackWriter) -> tuple[PackHeader | None, list[tuple[Digest, Location]]]:
        for pack_id, numbers in self._frames.items():
            for slot, descriptor in self._read(pack_id, numbers):
                writer.write(slot, descriptor)
        if writer.length == registry.BLOCK_BYTES:
            return None, []
        return writer.seal(time.time_ns(), WRITER)

    def _read(self, pack_id: PackId, numbers: Sequence[int]) -> Iterator[tuple[Slot, FrameDescriptor]]:
        """Yield frames as they are stored, each checked; stop at the first damaged frame of a pack.

        The pack of a frame that cannot be read stays, for a repair.
        """
        if not numbers:
            return
        held, where = self._held[pack_id], f"pack {layout.pack_name(pack_id)}"
        longest = int(held.entries["stored_length"][numbers].max())
        with contextlib.ExitStack() as stack:
            try:
                pack = stack.enter_context(contextlib.closing(self._tier.open_pack(pack_id)))
                slot = stack.enter_context(self._tier.slots.slot(longest))
                for number in numbers:
                    yield slot, _checked(pack.read_frame(number, slot), pack_id, number, f"frame {number} of {where}")
            except FormatError:
                # It will be as damaged at the next collection.
                self._needed.unmovable.add(pack_id)
            except (StorageError, MissingPartitionError):
                return

    def _enter(self, header: PackHeader | None, free: Sequence[PackId]) -> list[PackId]:
        """Mark packs freed in the transaction that enters the new one; return which."""
        own = [] if header is None else [header.pack_id]
        for _ in range(_ATTEMPTS):
            came, gone = self._needed.since(self._catalog)
            if came:
                # Committed while frames were copied: it may need what was not.
                self._needed.look()
            live = self._needed.live()
            moved = {pack_id: self._moved(pack_id, live) for pack_id in free}
            with self._catalog.write() as transaction:
                is_current = self._needed.is_current(transaction, gone, own)
                freed = self._mark_freed(transaction, header, moved) if is_current else []
            if is_current:
                self._entered = bool(freed)
                emit("gc.repacked", f"{len(freed)} packs")
                return freed
            self._needed.look()
        return []

    def _moved(self, pack_id: PackId, live: set[Digest]) -> dict[Digest, Location] | None:
        """Return where else each needed partition of a pack lies; None when one of them lies nowhere else."""
        held, found = self._held[pack_id], {}
        for number, name in enumerate(held.names):
            if name in live:
                copy = _copy_of(held, number)
                own = (self._places[one] for one in _standing(copy) if one in self._places)
                place = next(own, None) or self._homes.of(copy)
                if place is None:
                    return None
                found[name] = place
        return found

    def _mark_freed(
        self,
        transaction: Transaction,
        header: PackHeader | None,
        moved: Mapping[PackId, Mapping[Digest, Location] | None],
    ) -> list[PackId]:
        pinned = pinned_packs(transaction)
        freed = []
        for pack_id, places in moved.items():
            if places is None or pack_id in pinned:
                continue
            relied = {location.pack_id for location in places.values()} - {header.pack_id if header else None}
            if any(transaction.pack_state(one) != registry.PACK_LIVE for one in relied):
                continue
            for name in self._held[pack_id].names:
                transaction.forget_location(name, pack_id)
            for name, location in places.items():
                if transaction.location(name) is None:
                    transaction.put_location(name, location)
            transaction.put_pack(pack_id, registry.PACK_FREED, 0, 0)
            freed.append(pack_id)
        if freed and header is not None:
            transaction.put_pack(header.pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
        return freed


def _checked(frame: memoryview, pack_id: PackId, number: int, where: str) -> FrameDescriptor:
    """Check a frame as far as that needs no base and no decoding, and return its descriptor.

    Raises:
        FormatError
    """
    descriptor, payload = check_frame(frame, pack_id, number, where)
    if descriptor.codec == registry.CODEC_IDENTITY and digest(payload) != descriptor.digest:
        raise DigestMismatchError(f"digest mismatch in {where}")
    return descriptor
