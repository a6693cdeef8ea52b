"""A damaged pack replaced by a new one that holds what is intact of it (SPEC.md §8.4)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping

from asymcheck.codecs.chain import base_reader
from asymcheck.config import WRITER
from asymcheck.errors import AsymcheckError, BaseDamagedError, DigestMismatchError
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.digest import ZERO_DIGEST
from asymcheck.format.pack import PackHeader, entry_length
from asymcheck.recovery.survey import PackContent, read_payload
from asymcheck.tiers.nvme import BaseFrames, Catalog, NvmeTier, PackWriter, Slot, Transaction
from asymcheck.types import Digest, Location

_Copy = tuple[Digest, bytes]
"""A partition and the base that a frame of it is encoded against; zero for a full frame."""

_CHANGED = "the store changed while it was being repaired"
_HELD = "another process reads or writes it"
_PINNED = "a save that is under way has reused partitions of it"


@dataclasses.dataclass
class Replaced:
    """What became of a damaged pack."""

    copied: dict[_Copy, Location] = dataclasses.field(default_factory=dict)
    """Frames that now lie in a new pack."""
    removed: bool = False
    """Whether the damaged pack is gone."""
    changed: bool = False
    """Whether anything was done."""
    busy: str = ""
    """Why nothing could be done; empty when all was done."""


class Elsewhere:
    """Frames that lie intact in sound packs.

    A full frame can stand for any other; one with a base only for its like: else a chain of deltas could grow too long,
    or lead back to itself.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._full: dict[Digest, Location] = {}
        self._based: dict[Digest, dict[bytes, Location]] = {}

    def add(self, name: Digest, location: Location) -> None:
        """Know of one more."""
        if location.base_digest == ZERO_DIGEST:
            self._full[name] = location
        else:
            self._based.setdefault(name, {})[location.base_digest] = location

    def stands(self, copy: _Copy) -> bool:
        """Tell whether there is a frame that can stand for this one."""
        name, base = copy
        return name in self._full or base in self._based.get(name, {})

    def of(self, name: Digest) -> Location | None:
        """Return where a partition lies, in full if it does."""
        return self._full.get(name) or next(iter(self._based.get(name, {}).values()), None)


class Replacement:
    """The replacement of one damaged pack.

    At every instant each intact partition lies in a complete pack: the new one gets its name before the damaged one
    loses its own. The new pack needs no pin. Whoever means to reuse a partition of the damaged one finds at its own pin
    that this pack is freed, and writes it again; what a manifest names keeps the new pack alive.
    """

    def __init__(
        self,
        tier: NvmeTier,
        catalog: Catalog,
        content: PackContent,
        elsewhere: Elsewhere,
    ) -> None:
        """Replace the pack with this ``content``; a frame for which one ``elsewhere`` stands needs no copy."""
        self._tier = tier
        self._catalog = catalog
        self._content = content
        self._pack_id = content.header.pack_id
        self._path = tier.packs / layout.pack_name(self._pack_id)
        intact = {content.copy(sequence): sequence for sequence in content.intact()}
        self._copies = {
            (name, base): sequence
            for (name, base), sequence in intact.items()
            if not elsewhere.stands((name, base)) and (base == ZERO_DIGEST or (name, ZERO_DIGEST) not in intact)
        }
        others = {*content.names} - {name for name, _ in self._copies}
        self._elsewhere = {name: place for name in others if (place := elsewhere.of(name)) is not None}
        # What the device did not give may be there another day.
        self._keep = bool(content.unread or content.baseless)
        self._entered = False

    def carry_out(self) -> Replaced:
        """Copy, enter, remove.

        Raises:
            StorageError: the device refused, or is full; nothing is lost.
        """
        with self._tier.locked(self._path) as held, self._catalog.read() as transaction:
            reason = self._obstacle(transaction) if held else _HELD
            pointing = self._pointing(transaction)
        if reason:
            return Replaced(busy=reason)
        if self._keep and not self._copies and not pointing:
            return Replaced()
        try:
            with self._new_pack() as (header, locations), self._tier.locked(self._path) as held:
                reason = self._enter(header, locations) if held else _HELD
                if not reason and not self._keep:
                    self._remove()
        except (DigestMismatchError, BaseDamagedError) as error:
            return Replaced(busy=f"it reads differently each time ({error})")
        if reason:
            return Replaced(busy=reason)
        if not self._keep:
            self._forget()
        return Replaced(locations, removed=not self._keep, changed=True)

    def _obstacle(self, transaction: Transaction) -> str:
        if any(self._pack_id in packs for _, packs in transaction.pins().values()):
            return _PINNED
        # What lies elsewhere is relied upon: not in a pack that collection, or another repair, has taken meanwhile.
        relied = {location.pack_id for location in self._elsewhere.values()}
        if any(transaction.pack_state(pack_id) != registry.PACK_LIVE for pack_id in relied):
            return _CHANGED
        return ""

    def _pointing(self, transaction: Transaction) -> list[Digest]:
        """Return the partitions that the catalog says lie in the pack; those of lost frames have no other name."""
        return [
            name
            for name, location in transaction.locations()
            if location is not None and location.pack_id == self._pack_id
        ]

    @contextlib.contextmanager
    def _new_pack(self) -> Iterator[tuple[PackHeader | None, dict[_Copy, Location]]]:
        """Write the intact partitions into a complete pack, locked for the ``with`` block.

        Unless it was entered by the end of the block, it is removed again.
        """
        if not self._copies:
            yield None, {}
            return
        entries = self._content.entries[list(self._copies.values())]
        writer = self._tier.start_pack(sum(map(entry_length, entries)))
        try:
            try:
                self._copy(writer, int(entries["stored_length"].max()))
                header, locations = writer.seal(time.time_ns(), WRITER)
            except BaseException:
                writer.abandon()
                raise
            yield header, {(name, location.base_digest): location for name, location in locations}
        finally:
            if not self._entered:
                # Nobody else could open it yet. Were it to stay, it would be no harm but a second copy.
                with contextlib.suppress(AsymcheckError):
                    self._tier.files.unlink(self._tier.packs / layout.pack_name(writer.pack_id))
            writer.close()

    def _copy(self, writer: PackWriter, longest: int) -> None:
        with contextlib.closing(self._tier.open_pack_to_repair(self._pack_id)) as pack:
            slot = Slot(longest)
            read_base = base_reader(BaseFrames(self._tier).copies_of)
            for (name, _), sequence in self._copies.items():
                found = None
                if sequence < len(pack.entries):
                    found = read_payload(pack, sequence, name, slot, read_base)
                if found is None:
                    raise DigestMismatchError(f"digest mismatch in frame {sequence} of pack {self._pack_id.hex()}")
                writer.write(slot, found)

    def _enter(self, header: PackHeader | None, locations: Mapping[_Copy, Location]) -> str:
        """Say in the catalog where the partitions lie now, in one transaction, or return why not."""
        with self._catalog.read() as transaction:
            pointing = self._pointing(transaction)
        with self._catalog.write() as transaction:
            reason = self._obstacle(transaction)
            if reason:
                return reason
            for name in {*pointing, *self._content.names}:
                transaction.forget_location(name, self._pack_id)
            for name, location in self._elsewhere.items():
                if transaction.location(name) is None:
                    transaction.put_location(name, location)
            for (name, _), location in locations.items():
                transaction.put_location(name, location)
            if header is not None:
                transaction.put_pack(header.pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
            if not self._keep:
                transaction.put_pack(self._pack_id, registry.PACK_FREED, 0, 0)
        # Before the damaged pack goes: from here on the new one must not be removed.
        self._entered = True
        emit("repair.entered", self._path.name)
        return ""

    def _remove(self) -> None:
        # Not into the pool: its blocks may be bad.
        self._tier.files.unlink(self._path)
        emit("repair.removed", self._path.name)
        self._tier.files.sync_directory(self._tier.packs)

    def _forget(self) -> None:
        with self._catalog.write() as transaction:
            transaction.delete_pack(self._pack_id)
        emit("repair.forgotten", self._path.name)
