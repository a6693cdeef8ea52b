"""Repair: what is damaged is made whole from what is intact (SPEC.md §8.4). No checkpoint is deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping

from asymcheck.config import WRITER
from asymcheck.errors import AsymcheckError, BaseDamagedError, DigestMismatchError, FormatError, LockTimeoutError
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.digest import ZERO_DIGEST
from asymcheck.format.pack import PackHeader, entry_length
from asymcheck.fsck.frame_scanner import FrameScanner, PackContent, Survey, each_manifest, survey
from asymcheck.fsck.rebuild_catalog import Rebuilt, reconcile
from asymcheck.restore.resolve import what_is_missing
from asymcheck.storage.manifests import generations
from asymcheck.storage.nvme import Catalog, CheckpointFiles, NvmeTier, PackWriter, Slot, Transaction
from asymcheck.types import Digest, Location, PackId, Progress


@dataclasses.dataclass(frozen=True)
class Repair:
    """One thing that was repaired."""

    kind: str
    """Stable code: ``temporaries``, ``record``, ``catalog``, ``pack`` or ``remote``."""
    where: str
    """The file, below the store; or the remote location."""
    found: str
    """Description of the damage."""
    done: str


@dataclasses.dataclass(frozen=True)
class Unrepaired:
    """One thing that is wrong and was not repaired."""

    kind: str
    """Stable code: ``lost-partitions``, ``damaged-manifest``, ``incomplete-checkpoint``, ``damaged-head``,
    ``missing-head``, ``busy-pack`` or ``unreadable-pack``."""
    where: str
    """The file or the checkpoint."""
    message: str
    remedy: str
    """Advice to the user."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoints that cannot be restored because of it, as ``<run> <checkpoint>``."""


@dataclasses.dataclass(frozen=True)
class Repaired:
    """Result of a repair; a second repair in a row changes nothing."""

    done: tuple[Repair, ...]
    left: tuple[Unrepaired, ...]
    copied_partitions: int
    """Partitions copied from damaged packs into new ones."""
    copied_bytes: int


_AGAIN = "run the repair again when no other process uses it"
_DELETE = "delete that step, or restore another with step=…"
_INCOMPLETE = f"nothing, while other ranks may be saving it; else {_DELETE}"
_HEAL = f"save a state with the same bytes, which writes them again; or {_DELETE}"
_NAME_STEP = "restore a step (step=…), or one of several saves of it (save:DIGITS); training goes on from there"


def repair(tier: NvmeTier, catalog: Catalog, progress: Progress | None = None, made: Rebuilt | None = None) -> Repaired:
    """Repair a store; safe beside saves, loads and collections of other processes.

    ``progress`` is called with bytes read so far and the total; ``made`` is the result of rebuilding the catalog
    when it was opened, if that was necessary.

    Raises:
        StorageError: the device refused, or is full; nothing is lost, and the next repair goes on.
        CatalogError: the catalog must be set aside, which the next start does.
    """
    return _Repairer(tier, catalog).repair(progress, made)


class _Repairer:
    def __init__(self, tier: NvmeTier, catalog: Catalog) -> None:
        self._tier = tier
        self._catalog = catalog
        self._done: list[Repair] = []
        self._left: list[Unrepaired] = []
        self._copied: dict[Digest, Location] = {}
        self._checkpoints: list[CheckpointFiles] = []

    def repair(self, progress: Progress | None, made: Rebuilt | None) -> Repaired:
        if made is not None:
            what = f"made anew: {made.packs} packs, {made.partitions} partitions and {made.manifests} manifests"
            self._done.append(Repair("catalog", layout.CATALOG, "it was missing, or could not be trusted", what))
        # First of all: on a full disk, what follows needs the room.
        self._temporaries()
        if self._tier.repair_descriptor():
            self._record(layout.DESCRIPTOR_NAME)
        # Before the survey: the packs of these manifests are complete by then, and so are seen.
        needs: dict[Digest, set[int]] = {}
        for run in self._tier.manifests.runs():
            self._heads(run)
            self._manifests(run, needs)
        found = survey(self._tier, progress)
        self._reconcile(found)
        have = self._packs(found)
        self._lost(needs, have, found)
        copied_bytes = sum(location.plain_length for location in self._copied.values())
        return Repaired(tuple(self._done), tuple(self._left), len(self._copied), copied_bytes)

    def _temporaries(self) -> None:
        stale = [str(path.relative_to(self._tier.root)) for path in self._tier.stale_temporaries()]
        removed = self._tier.remove_stale_temporaries()
        if removed:
            what = "files that a killed process left, or a damaged catalog that was set aside"
            self._done.append(Repair("temporaries", ", ".join(stale) or layout.CATALOG, what, f"{removed} removed"))

    def _record(self, where: str) -> None:
        emit("repair.record_rewritten", where)
        what = "one of two copies of the record was damaged"
        self._done.append(Repair("record", where, what, "written again with both copies"))

    def _heads(self, run: str) -> None:
        numbers = self._tier.manifests.heads(run)
        listed = [listing.ref.generation for listing in self._tier.manifests.checkpoints(run)]
        for generation in generations([*numbers, *listed]):
            where = f"{layout.HEADS}/{run}/{layout.head_name(generation)}"
            if generation not in numbers:
                if generation > 1:
                    message = f"generation {generation} has no head record"
                    self._left.append(Unrepaired("missing-head", where, message, _NAME_STEP))
                continue
            try:
                rewritten = self._tier.manifests.repair_head(run, generation)
            except FormatError as error:
                self._left.append(Unrepaired("damaged-head", where, str(error), _NAME_STEP))
            else:
                if rewritten:
                    self._record(where)

    def _manifests(self, run: str, needs: dict[Digest, set[int]]) -> None:
        for listing in self._tier.manifests.checkpoints(run):
            checkpoint = f"{run} {listing.ref}"
            # By number: a listing of many ranks takes long to hash, and each of them has thousands of partitions.
            number = len(self._checkpoints)
            self._checkpoints.append(listing)
            if not listing.is_complete:
                where = f"{layout.MANIFESTS}/{run}/{layout.checkpoint_name(listing.ref)}"
                left = Unrepaired("incomplete-checkpoint", where, what_is_missing(listing), _INCOMPLETE, (checkpoint,))
                self._left.append(left)
            for name, manifest in each_manifest(self._tier, listing):
                if isinstance(manifest, AsymcheckError):
                    where = f"{layout.MANIFESTS}/{run}/{layout.checkpoint_name(listing.ref)}/{name}"
                    left = Unrepaired("damaged-manifest", where, str(manifest), _DELETE, (checkpoint,))
                    self._left.append(left)
                else:
                    for digest in manifest.partitions():
                        needs.setdefault(digest, set()).add(number)

    def _reconcile(self, found: Survey) -> None:
        changed = reconcile(self._tier, self._catalog, found).changed
        if changed:
            entries = "1 entry was" if changed == 1 else f"{changed} entries were"
            what = f"{entries} missing, wrong, damaged or without use"
            self._done.append(Repair("catalog", layout.CATALOG, what, "corrected from packs and manifests"))

    def _packs(self, found: Survey) -> set[Digest]:
        """Replace the damaged packs; return all partitions that can be had afterwards."""
        elsewhere = _Elsewhere()
        have: set[Digest] = set()
        for pack in found.packs.values():
            for sequence in pack.promised() if pack.is_sound else ():
                elsewhere.add(pack.names[sequence], pack.location(sequence))
                have.add(pack.names[sequence])
        for pack_id, pack in found.packs.items():
            if not pack.is_sound:
                have.update(pack.names[sequence] for sequence in pack.intact())
                self._replace(pack_id, pack, elsewhere)
        for pack_id, error in found.left_out.items():
            busy = isinstance(error, LockTimeoutError)
            remedy = _AGAIN if busy else "see to what the message says; until then the file is left as it is"
            kind = "busy-pack" if busy else "unreadable-pack"
            self._left.append(Unrepaired(kind, _where(pack_id), str(error), remedy))
        return have

    def _replace(self, pack_id: PackId, pack: PackContent, elsewhere: _Elsewhere) -> None:
        where = _where(pack_id)
        found = pack.damage or f"{len(pack.wrong)} of {len(pack.names)} frames are damaged: {_first(pack.wrong)}"
        replaced = Replacement(self._tier, self._catalog, pack, elsewhere)
        busy = replaced.carry_out()
        if busy:
            self._left.append(Unrepaired("busy-pack", where, f"{found}; {busy}", _AGAIN))
            return
        for (name, _), location in replaced.copied.items():
            elsewhere.add(name, location)
            self._copied[name] = location
        if replaced.changed:
            copied, lost = len(replaced.copied), len(pack.wrong) - len(pack.rescued)
            kept = len(pack.intact()) - copied
            done = (
                copied and f"{copied} partition{'s' if copied > 1 else ''} copied into a new pack",
                kept and f"{kept} lie elsewhere",
                lost and f"{lost} lost here",
                replaced.removed and "the damaged pack removed",
            )
            self._done.append(Repair("pack", where, found, ", ".join(part for part in done if part)))
        if not replaced.removed:
            refused = f"the device did not give {len(pack.unread)} frames ({_first(pack.wrong)})" if pack.unread else ""
            baseless = f"the bases of {len(pack.baseless)} frames are lost" if pack.baseless else ""
            message = f"{' and '.join(filter(None, (refused, baseless)))}; all others lie elsewhere"
            # A base comes back with a save of the same bytes.
            remedy = f"{'replace the device; ' if refused else ''}remove the file when nothing on it is needed any more"
            self._left.append(Unrepaired("unreadable-pack", where, message, remedy))

    def _lost(self, needs: Mapping[Digest, set[int]], have: set[Digest], found: Survey) -> None:
        numbers: dict[int, list[Digest]] = {}
        for digest, users in needs.items():
            if digest not in have:
                for number in users:
                    numbers.setdefault(number, []).append(digest)
        lost: dict[str, list[Digest]] = {}
        for number, digests in numbers.items():
            listing = self._checkpoints[number]
            # It may have been deleted during the survey, and its packs collected.
            if self._tier.manifests.listing(listing.run, listing.ref).manifests:
                lost.setdefault(f"{listing.run} {listing.ref}", []).extend(digests)
        unless = ", unless they lie in a pack that could not be looked into" if found.left_out else ""
        for checkpoint, digests in sorted(lost.items()):
            first = digests[0].hex()
            message = f"partition {first} that it needs is lost{unless}"
            if len(digests) > 1:
                message = f"{len(digests)} partitions that it needs are lost{unless}; the first is {first}"
            self._left.append(Unrepaired("lost-partitions", checkpoint, message, _HEAL, (checkpoint,)))


_Copy = tuple[Digest, bytes]
"""A partition and the base that a frame of it is encoded against; zero for a full frame."""

_CHANGED = "the store changed while it was being repaired"
_HELD = "another process reads or writes it"
_PINNED = "a save that is under way has reused partitions of it"


class _Elsewhere:
    """Frames that lie intact in sound packs.

    A full frame can stand for any other; one with a base only for its like: else a chain of deltas could grow too long,
    or lead back to itself.
    """

    def __init__(self) -> None:
        self._places: dict[Digest, dict[bytes, Location]] = {}

    def add(self, name: Digest, location: Location) -> None:
        self._places.setdefault(name, {})[location.base_digest] = location

    def stands(self, copy: _Copy) -> bool:
        """Tell whether there is a frame that can stand for this one."""
        name, base = copy
        return not {ZERO_DIGEST, base}.isdisjoint(self._places.get(name, {}))

    def of(self, name: Digest) -> Location | None:
        """Return where a partition lies, in full if it does."""
        places = self._places.get(name, {})
        return places.get(ZERO_DIGEST) or next(iter(places.values()), None)


class Replacement:
    """The replacement of one damaged pack.

    At every instant each intact partition lies in a complete pack: the new one gets its name before the damaged one
    loses its own. The new pack needs no pin. A save that reuses a partition of the damaged pack finds, when it pins the
    pack, that it is freed, and writes the partition again. Manifests keep the new pack alive.
    """

    def __init__(self, tier: NvmeTier, catalog: Catalog, content: PackContent, elsewhere: _Elsewhere) -> None:
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
        self.copied: dict[_Copy, Location] = {}
        """Frames that are now in a new pack."""
        self.removed = self.changed = False

    def carry_out(self) -> str:
        """Copy, enter, remove; return why nothing could be done, or nothing.

        Raises:
            StorageError: the device refused, or is full; nothing is lost.
        """
        with self._tier.locked(self._path) as held, self._catalog.read() as transaction:
            busy = self._obstacle(transaction) if held else _HELD
            pointing = self._pointing(transaction)
        if busy or (self._keep and not self._copies and not pointing):
            return busy
        try:
            with self._new_pack() as (header, locations), self._tier.locked(self._path) as held:
                busy = self._enter(header, locations) if held else _HELD
                if not busy and not self._keep:
                    # Not into the pool: its blocks may be bad.
                    self._tier.files.unlink(self._path)
                    emit("repair.removed", self._path.name)
                    self._tier.files.sync_directory(self._tier.packs)
        except (DigestMismatchError, BaseDamagedError) as error:
            return f"it reads differently each time ({error})"
        if busy:
            return busy
        self.copied, self.changed, self.removed = locations, True, not self._keep
        if self.removed:
            with self._catalog.write() as transaction:
                transaction.delete_pack(self._pack_id)
            emit("repair.forgotten", self._path.name)
        return ""

    def _obstacle(self, transaction: Transaction) -> str:
        if any(self._pack_id in packs for _, packs in transaction.pins().values()):
            return _PINNED
        # What lies elsewhere is relied upon: not in a pack that collection, or another repair, has taken meanwhile.
        relied = {location.pack_id for location in self._elsewhere.values()}
        if any(transaction.pack_state(pack_id) != registry.PACK_LIVE for pack_id in relied):
            return _CHANGED
        return ""

    def _pointing(self, transaction: Transaction) -> list[Digest]:
        """Return the partitions of the pack by the catalog, which alone names those of lost frames."""
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
            slot, scanner = Slot(longest), FrameScanner(self._tier)
            for (name, _), sequence in self._copies.items():
                found = scanner.rescue(pack, sequence, name, slot) if sequence < len(pack.entries) else None
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


def _where(pack_id: PackId) -> str:
    return f"{layout.PACKS}/{layout.pack_name(pack_id)}"


def _first(wrong: Mapping[int, str]) -> str:
    return next(iter(wrong.values()))
