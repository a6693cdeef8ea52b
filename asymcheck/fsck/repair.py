"""Repair a store: rebuild damaged data from intact data (SPEC.md §B7). A repair deletes no checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from asymcheck.errors import AsymcheckError, BaseDamagedError, DigestMismatchError, FormatError, LockTimeoutError
from asymcheck.events import emit
from asymcheck.format import layout, registry
from asymcheck.format.digest import ZERO_DIGEST
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import PackHeader, frame_lengths
from asymcheck.fsck.frame_scanner import FrameScanner, PackContent, ScanResult, each_manifest, scan_packs
from asymcheck.fsck.rebuild_catalog import Rebuilt, reconcile
from asymcheck.restore.resolve import what_is_missing
from asymcheck.storage.manifests import generations
from asymcheck.storage.nvme import Catalog, CheckpointFiles, NvmeTier, Slot, Transaction
from asymcheck.storage.reachability import pinned_packs
from asymcheck.types import Digest, Location, PackId, Progress, counted


@dataclasses.dataclass(frozen=True)
class Repair:
    """A repaired problem."""

    kind: str
    """Stable code: ``temporaries``, ``record``, ``catalog``, ``pack`` or ``remote``."""
    where: str
    """Path of the file below the store, or the remote location."""
    found: str
    """Description of the damage."""
    done: str
    """Description of the repair."""


@dataclasses.dataclass(frozen=True)
class Unrepaired:
    """A problem that could not be repaired."""

    kind: str
    """Stable code: ``lost-partitions``, ``damaged-manifest``, ``incomplete-checkpoint``, ``damaged-head``,
    ``missing-head``, ``busy-pack`` or ``unreadable-pack``."""
    where: str
    """The file or the checkpoint."""
    message: str
    remedy: str
    """Advice to the user."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoints that this problem makes unrestorable, as ``run NAME, step N (generation G, save ID)``."""


@dataclasses.dataclass(frozen=True)
class Repaired:
    """Result of a repair. An immediate second repair changes nothing."""

    done: tuple[Repair, ...]
    left: tuple[Unrepaired, ...]
    copied_partitions: int
    """Partitions copied from damaged packs into new ones."""
    copied_bytes: int


_RETRY = "run the repair again when no other process uses it"
_NAME_STEP = "restore a named step (step=…) or save (save:DIGITS); training continues from there"


def repair(tier: NvmeTier, catalog: Catalog, progress: Progress | None = None, made: Rebuilt | None = None) -> Repaired:
    """Repair a store. Other processes may save, load and collect at the same time.

    ``made`` is the result of a catalog rebuild when the store was opened, if one was necessary.

    Raises:
        StorageError: the device failed or is full. Nothing is lost; the next repair continues.
        CatalogError: the catalog is too damaged to correct. The next start replaces it.
    """
    return _Repairer(tier, catalog).repair(progress, made)


class _Repairer:
    def __init__(self, tier: NvmeTier, catalog: Catalog) -> None:
        self._tier, self._catalog = tier, catalog
        self._done: list[Repair] = []
        self._left: list[Unrepaired] = []
        self._copied: dict[Digest, Location] = {}
        self._checkpoints: list[CheckpointFiles] = []

    def repair(self, progress: Progress | None, made: Rebuilt | None) -> Repaired:
        if made is not None:
            contents = f"{made.packs} packs, {made.partitions} partitions and {made.manifests} manifests"
            damage = "the catalog was missing, or could not be trusted"
            self._done.append(Repair("catalog", layout.CATALOG, damage, f"rebuilt: {contents}"))
        # Remove temporaries first: on a full disk, the other steps need the space.
        self._remove_temporaries()
        if self._tier.repair_descriptor():
            self._note_record(layout.DESCRIPTOR_NAME)
        # List checkpoints before the scan, so that the scan finds the packs of all these checkpoints.
        for run in self._tier.manifests.runs():
            self._repair_heads(run)
            self._check_manifests(run)
        scan = scan_packs(self._tier, progress)
        self._correct_catalog(scan)
        readable = self._repair_packs(scan)
        self._report_lost(readable, scan)
        copied_bytes = sum(location.plain_length for location in self._copied.values())
        return Repaired(tuple(self._done), tuple(self._left), len(self._copied), copied_bytes)

    def _remove_temporaries(self) -> None:
        stale = self._tier.leftovers()
        removed = self._tier.remove_stale_temporaries()
        if removed:
            damage = "temporary files of a killed process, or a replaced damaged catalog"
            self._done.append(Repair("temporaries", ", ".join(stale) or layout.CATALOG, damage, f"{removed} removed"))

    def _note_record(self, where: str) -> None:
        emit("repair.record_rewritten", where)
        self._done.append(
            Repair("record", where, "one of two copies of the record was damaged", "both copies rewritten")
        )

    def _repair_heads(self, run: str) -> None:
        numbers = self._tier.manifests.heads(run)
        listed = [listing.ref.generation for listing in self._tier.manifests.checkpoints(run)]
        for generation in generations([*numbers, *listed]):
            where = layout.head_path(run, generation)
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
                    self._note_record(where)

    def _check_manifests(self, run: str) -> None:
        for listing in self._tier.manifests.checkpoints(run):
            checkpoint, where = f"run {run}, {listing.ref}", layout.checkpoint_path(run, listing.ref)
            remedy, lost = _without(listing), (checkpoint,)
            self._checkpoints.append(listing)
            if not listing.is_complete:
                advice = f"wait if other ranks may still be saving it; otherwise {remedy}"
                self._left.append(Unrepaired("incomplete-checkpoint", where, what_is_missing(listing), advice, lost))
            for name, manifest in each_manifest(self._tier, listing):
                if isinstance(manifest, AsymcheckError):
                    path = f"{where}/{name}"
                    self._left.append(Unrepaired("damaged-manifest", path, str(manifest), remedy, lost))

    def _correct_catalog(self, scan: ScanResult) -> None:
        changed = reconcile(self._tier, self._catalog, scan).changed
        if changed:
            entries = "1 entry was" if changed == 1 else f"{changed} entries were"
            damage = f"{entries} missing, wrong, damaged or unused"
            self._done.append(Repair("catalog", layout.CATALOG, damage, "corrected from packs and manifests"))

    def _repair_packs(self, scan: ScanResult) -> set[Digest]:
        """Replace the damaged packs. Return all partitions that are readable afterwards."""
        intact_frames = _IntactFrames()
        readable: set[Digest] = set()
        for pack in scan.packs.values():
            for sequence in pack.reusable() if pack.is_sound else ():
                intact_frames.add(pack.digests[sequence], pack.location(sequence))
                readable.add(pack.digests[sequence])
        for pack_id, pack in scan.packs.items():
            if not pack.is_sound:
                readable.update(pack.digests[sequence] for sequence in pack.readable())
                self._replace_pack(pack_id, pack, intact_frames)
        for pack_id, error in scan.skipped.items():
            busy = isinstance(error, LockTimeoutError)
            remedy = _RETRY if busy else "fix the reported problem and run the repair again; the pack was not changed"
            kind = "busy-pack" if busy else "unreadable-pack"
            self._left.append(Unrepaired(kind, layout.pack_path(pack_id), str(error), remedy))
        return readable

    def _replace_pack(self, pack_id: PackId, pack: PackContent, intact_frames: _IntactFrames) -> None:
        where = layout.pack_path(pack_id)
        reason = next(iter(pack.damaged.values()), "")
        damage = pack.damage or f"{len(pack.damaged)} of {len(pack.digests)} frames are damaged: {reason}"
        replacement = Replacement(self._tier, self._catalog, pack, intact_frames)
        obstacle = replacement.carry_out()
        if obstacle:
            self._left.append(Unrepaired("busy-pack", where, f"{damage}; {obstacle}", _RETRY))
            return
        for (name, _), location in replacement.copied.items():
            intact_frames.add(name, location)
            self._copied[name] = location
        if replacement.changed:
            copied, lost = len(replacement.copied), len(pack.damaged) - len(pack.salvageable)
            stored = len(pack.readable()) - copied
            done = (
                copied and f"{counted(copied, 'partition')} copied into a new pack",
                stored and f"{counted(stored, 'partition')} already stored in other packs",
                lost and f"{counted(lost, 'frame')} beyond repair",
                replacement.removed and "damaged pack removed",
            )
            self._done.append(Repair("pack", where, damage, ", ".join(part for part in done if part)))
        if not replacement.removed:
            unread = len(pack.unreadable)
            unreadable = f"the device cannot read {unread} frames ({reason})" if unread else ""
            baseless = f"the bases of {len(pack.without_base)} frames are lost" if pack.without_base else ""
            message = f"{' and '.join(filter(None, (unreadable, baseless)))}; all other frames are in other packs"
            # A save of the same bytes stores a lost base again.
            remedy = f"{'replace the device; ' if unread else ''}remove the file when no checkpoint needs it any more"
            self._left.append(Unrepaired("unreadable-pack", where, message, remedy))

    def _report_lost(self, readable: set[Digest], scan: ScanResult) -> None:
        unless = ", unless a pack that could not be read stores it" if scan.skipped else ""
        for listing in sorted(self._checkpoints, key=lambda listing: (listing.run, listing.ref)):
            # A checkpoint that was deleted during the scan has no manifests any more.
            found = (manifest for _, manifest in each_manifest(self._tier, listing))
            digests = (digest for item in found if isinstance(item, Manifest) for digest in item.partitions())
            lost = list(dict.fromkeys(digest.hex() for digest in digests if digest not in readable))
            if lost:
                checkpoint, message = f"run {listing.run}, {listing.ref}", f"partition {lost[0]} is lost{unless}"
                if len(lost) > 1:
                    message = f"{len(lost)} partitions are lost{unless}; the first is {lost[0]}"
                remedy = f"save a state with the same bytes again, {_without(listing)}"
                self._left.append(Unrepaired("lost-partitions", checkpoint, message, remedy, (checkpoint,)))


def _without(listing: CheckpointFiles) -> str:
    return f"delete that checkpoint ({listing.deletion}), or restore another step (step=…)"


_Copy = tuple[Digest, bytes]
"""Digest of a partition, and digest of the base of one of its frames (zero for a full frame)."""

_HELD = "another process reads or writes it"


class _IntactFrames:
    """Intact frames in sound packs.

    A full frame replaces any frame of its digest. Any other frame replaces only a frame with the same base. Otherwise
    a chain of deltas could become too long, or a cycle.
    """

    def __init__(self) -> None:
        self._locations: dict[Digest, dict[bytes, Location]] = {}

    def add(self, name: Digest, location: Location) -> None:
        self._locations.setdefault(name, {})[location.base_digest] = location

    def can_replace(self, copy: _Copy) -> bool:
        name, base = copy
        return not {ZERO_DIGEST, base}.isdisjoint(self._locations.get(name, {}))

    def location(self, name: Digest) -> Location | None:
        """Return the location of a frame of a partition, preferably a full frame."""
        locations = self._locations.get(name, {})
        return locations.get(ZERO_DIGEST) or next(iter(locations.values()), None)


class Replacement:
    """The replacement of one damaged pack.

    Every intact partition is in a complete pack at every instant: the new pack is renamed before the damaged pack is
    removed. The new pack needs no pin, because manifests name its partitions. A save that reuses a partition of the
    damaged pack notices that the pack is freed when it pins the pack, and writes the partition again.
    """

    def __init__(self, tier: NvmeTier, catalog: Catalog, content: PackContent, intact_frames: _IntactFrames) -> None:
        self._tier, self._catalog = tier, catalog
        self._content, self._pack_id = content, content.header.pack_id
        self._path = tier.pack_path(self._pack_id)
        readable = {content.copy(sequence): sequence for sequence in content.readable()}
        self._copies = {
            (name, base): sequence
            for (name, base), sequence in readable.items()
            if not intact_frames.can_replace((name, base))
            and (base == ZERO_DIGEST or (name, ZERO_DIGEST) not in readable)
        }
        others = {*content.digests} - {name for name, _ in self._copies}
        self._replacements = {name: found for name in others if (found := intact_frames.location(name)) is not None}
        # Unreadable frames may become readable again, and a lost base may be stored again.
        self._keep = bool(content.unreadable or content.without_base)
        self._entered = False
        self.copied: dict[_Copy, Location] = {}
        """Frames that were copied into the new pack."""
        self.removed = self.changed = False

    def carry_out(self) -> str:
        """Copy the frames, update the catalog, remove the damaged pack. Return the obstacle, or an empty string.

        Raises:
            StorageError: the device failed or is full. Nothing is lost.
        """
        with self._tier.locked(self._path) as held, self._catalog.read() as transaction:
            obstacle = self._find_obstacle(transaction) if held else _HELD
            entered_digests = self._catalog_digests(transaction)
        if obstacle or (self._keep and not self._copies and not entered_digests):
            return obstacle
        nbytes = int(frame_lengths(self._content.entries[list(self._copies.values())]).sum())
        new_pack = self._tier.provisional_pack(nbytes, self._salvaged(), lambda: self._entered)
        try:
            with new_pack as (header, locations), self._tier.locked(self._path) as held:
                obstacle = self._enter(header, locations) if held else _HELD
                if not obstacle and not self._keep:
                    # Do not recycle the file: its blocks may be bad.
                    self._tier.files.unlink(self._path)
                    emit("repair.removed", self._path.name)
                    self._tier.files.sync_directory(self._tier.packs)
        except (DigestMismatchError, BaseDamagedError) as error:
            return f"repeated reads differ ({error})"
        if obstacle:
            return obstacle
        self.copied, self.changed, self.removed = locations, True, not self._keep
        if self.removed:
            with self._catalog.write() as transaction:
                transaction.delete("packs", self._pack_id)
            emit("repair.forgotten", self._path.name)
        return ""

    def _find_obstacle(self, transaction: Transaction) -> str:
        if self._pack_id in pinned_packs(transaction):
            return "a save in progress reuses partitions of it"
        # Collection or another repair may have freed the packs of replacement frames.
        pack_ids = {location.pack_id for location in self._replacements.values()}
        is_gone = any(transaction.pack_state(pack_id) != registry.PACK_LIVE for pack_id in pack_ids)
        return "the store changed during the repair" if is_gone else ""

    def _catalog_digests(self, transaction: Transaction) -> list[Digest]:
        """Return the partitions that the catalog locates in the pack. Only the catalog names those of lost frames."""
        return [
            name
            for name, location in transaction.locations()
            if location is not None and location.pack_id == self._pack_id
        ]

    def _salvaged(self) -> Iterator[tuple[Slot, FrameDescriptor]]:
        """Read the frames to copy from the damaged pack."""
        with contextlib.closing(self._tier.open_pack_to_repair(self._pack_id)) as pack:
            slot = Slot(int(self._content.entries["stored_length"].max()))
            scanner = FrameScanner(self._tier, self._tier.open_pack_to_repair)
            for (name, _), sequence in self._copies.items():
                descriptor = scanner.salvage(pack, sequence, name, slot) if sequence < len(pack.entries) else None
                if descriptor is None:
                    raise DigestMismatchError(f"digest mismatch in frame {sequence} of pack {self._pack_id.hex()}")
                yield slot, descriptor

    def _enter(self, header: PackHeader | None, locations: Mapping[_Copy, Location]) -> str:
        """Update the catalog in one transaction. Return the obstacle, or an empty string."""
        with self._catalog.read() as transaction:
            entered_digests = self._catalog_digests(transaction)
        with self._catalog.write() as transaction:
            obstacle = self._find_obstacle(transaction)
            if obstacle:
                return obstacle
            transaction.leave_pack(self._pack_id, {*entered_digests, *self._content.digests}, self._replacements)
            for (name, _), location in locations.items():
                transaction.put_location(name, location)
            if header is not None:
                transaction.put_pack(header.pack_id, registry.PACK_LIVE, header.frame_count, header.pack_length)
            if not self._keep:
                transaction.put_pack(self._pack_id, registry.PACK_FREED, 0, 0)
        # From now on the new pack must not be removed, although the damaged pack still exists.
        self._entered = True
        emit("repair.entered", self._path.name)
        return ""
