"""Repair: what is damaged is made whole from what is intact (SPEC.md §8.4). No checkpoint is deleted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from asymcheck.errors import FormatError, LockTimeoutError, MissingPartitionError, StorageError
from asymcheck.events import emit
from asymcheck.format import layout
from asymcheck.recovery.rebuild import Rebuilt, reconcile
from asymcheck.recovery.replace import Elsewhere, Replacement
from asymcheck.recovery.resolve import what_is_missing
from asymcheck.recovery.survey import PackContent, Survey, survey
from asymcheck.tiers.manifests import generations
from asymcheck.tiers.nvme import Catalog, CheckpointFiles, NvmeTier
from asymcheck.types import Digest, Location, PackId, Progress


@dataclasses.dataclass(frozen=True)
class Repair:
    """One thing that was repaired."""

    kind: str
    """Stable code: ``temporaries``, ``record``, ``catalog``, ``pack`` or ``remote``."""
    where: str
    """The file, below the store; or the remote location."""
    found: str
    """What was wrong with it."""
    done: str
    """What was done about it."""


@dataclasses.dataclass(frozen=True)
class Unrepaired:
    """One thing that is wrong and was not repaired."""

    kind: str
    """Stable code: ``lost-partitions``, ``damaged-manifest``, ``incomplete-checkpoint``, ``damaged-head``,
    ``missing-head``, ``busy-pack`` or ``unreadable-pack``."""
    where: str
    """The file or the checkpoint."""
    message: str
    """What is wrong."""
    remedy: str
    """What the user can do."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoints that cannot be restored because of it, as ``<run> <checkpoint>``."""


@dataclasses.dataclass(frozen=True)
class Repaired:
    """What a repair did; a second one in a row does nothing."""

    done: tuple[Repair, ...]
    """What was repaired, in order."""
    left: tuple[Unrepaired, ...]
    """What is still wrong."""
    copied_partitions: int
    """Partitions copied from damaged packs into new ones."""
    copied_bytes: int
    """Their bytes."""


_AGAIN = "run the repair again when no other process uses it"
_DELETE = "delete that step, or restore another with step=…"
_INCOMPLETE = f"nothing, while other ranks may be saving it; else {_DELETE}"
_HEAL = f"save a state with the same bytes, which writes them again; or {_DELETE}"
_NAME_STEP = "restore a step (step=…), or one of several saves of it (save:DIGITS); training goes on from there"


def repair(tier: NvmeTier, catalog: Catalog, progress: Progress | None = None, made: Rebuilt | None = None) -> Repaired:
    """Repair a store; safe beside saves, loads and collections of other processes.

    Args:
        tier: the store.
        catalog: its catalog.
        progress: called with bytes read so far and bytes to read in all.
        made: what was entered when the catalog was opened, if it had to be made anew.

    Raises:
        StorageError: the device refused, or is full; nothing is lost, and the next repair goes on.
        CatalogError: the catalog must be set aside, which the next start does.
    """
    repairer = _Repairer(tier, catalog)
    if made is not None:
        repairer.note_catalog(made)
    return repairer.repair(progress)


class _Repairer:
    def __init__(self, tier: NvmeTier, catalog: Catalog) -> None:
        self._tier = tier
        self._catalog = catalog
        self._done: list[Repair] = []
        self._left: list[Unrepaired] = []
        self._copied: dict[Digest, Location] = {}
        self._checkpoints: list[CheckpointFiles] = []

    def note_catalog(self, made: Rebuilt) -> None:
        """Say that the catalog was made anew when it was opened."""
        what = f"made anew: {made.packs} packs, {made.partitions} partitions and {made.manifests} manifests"
        self._done.append(Repair("catalog", layout.CATALOG, "it was missing, or could not be trusted", what))

    def repair(self, progress: Progress | None) -> Repaired:
        """Do all of it."""
        # First of all: on a full disk, what follows needs the room.
        self._temporaries()
        self._descriptor()
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

    def _descriptor(self) -> None:
        if self._tier.repair_descriptor():
            self._record(layout.DESCRIPTOR_NAME)

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
            for name in listing.manifests:
                try:
                    manifest = self._tier.manifests.read(run, listing.ref, name)
                except MissingPartitionError:
                    continue  # Deleted since it was listed.
                except (FormatError, StorageError) as error:
                    where = f"{layout.MANIFESTS}/{run}/{layout.checkpoint_name(listing.ref)}/{name}"
                    left = Unrepaired("damaged-manifest", where, str(error), _DELETE, (checkpoint,))
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
        elsewhere = Elsewhere()
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
            self._left.append(
                Unrepaired("busy-pack" if busy else "unreadable-pack", _where(pack_id), str(error), remedy)
            )
        return have

    def _replace(self, pack_id: PackId, pack: PackContent, elsewhere: Elsewhere) -> None:
        where = _where(pack_id)
        found = pack.damage or f"{len(pack.wrong)} of {len(pack.names)} frames are damaged: {_first(pack.wrong)}"
        replaced = Replacement(self._tier, self._catalog, pack, elsewhere).carry_out()
        if replaced.busy:
            self._left.append(Unrepaired("busy-pack", where, f"{found}; {replaced.busy}", _AGAIN))
            return
        for (name, _), location in replaced.copied.items():
            elsewhere.add(name, location)
            self._copied[name] = location
        if replaced.changed:
            copied, kept = len(replaced.copied), len(pack.intact()) - len(replaced.copied)
            done = [f"{copied} partition{'s' if copied > 1 else ''} copied into a new pack"] if copied else []
            done += [f"{kept} lie elsewhere"] if kept else []
            done += [f"{len(pack.lost())} lost here"] if pack.lost() else []
            done += ["the damaged pack removed"] if replaced.removed else []
            self._done.append(Repair("pack", where, found, ", ".join(done)))
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


def _where(pack_id: PackId) -> str:
    return f"{layout.PACKS}/{layout.pack_name(pack_id)}"


def _first(wrong: Mapping[int, str]) -> str:
    return next(iter(wrong.values()))
