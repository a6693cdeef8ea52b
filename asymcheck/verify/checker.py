"""The checks. Each names the invariant of SPEC.md §9 that it checks.

Two invariants have no check of their own. Where I5 was broken (a pack was freed that something names), I2 is broken
now: what the pack held lies nowhere. And I8 (the catalog agrees with the packs) costs no checkpoint: reads do not use
the catalog, and a save believes an entry only when the pack's own index says the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from asymcheck.codecs.chain import base_reader
from asymcheck.errors import UNKNOWING, AsymcheckError, BaseDamagedError, LockTimeoutError, MissingPartitionError
from asymcheck.format import layout
from asymcheck.format.manifest import Manifest
from asymcheck.format.tree import check as check_tree
from asymcheck.recovery.fetch import read_checked, read_frame
from asymcheck.recovery.locate import Copy
from asymcheck.tiers.base_frames import BaseFrames, bases_in
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import OpenPack, StoreTier
from asymcheck.tiers.slots import Slot
from asymcheck.types import Digest, PackId, Progress
from asymcheck.verify.findings import UNCHECKED, Finding, Severity
from asymcheck.verify.lines import check_line
from asymcheck.verify.wholes import Wholes

_TENSORS_SHOWN = 3
_ATTEMPTS = 3


@dataclasses.dataclass
class _Need:
    """Who needs a partition."""

    length: int
    """As manifests say it, who may be wrong; 0 where nobody does."""
    checkpoints: set[str]
    tensors: list[str]


class _Checker:
    def __init__(
        self, tier: StoreTier, run: str | None, step: int | None, progress: Progress | None, *, deep: bool
    ) -> None:
        self.tier = tier
        self.deep = deep
        self.run = run
        self.step = step
        self.progress = progress
        self.packs = set(tier.pack_ids())
        self.listed: list[CheckpointFiles] = []
        self.findings: list[Finding] = []
        self.needs: dict[Digest, _Need] = {}
        self.disputed: dict[tuple[Digest, int], _Need] = {}
        self.intact: set[Digest] = set()
        self.unlike: set[Digest] = set()
        self.busy: set[PackId] = set()
        self.damaged: dict[Digest, list[tuple[str, str]]] = {}
        self.bases: dict[Digest, set[Digest]] = {}
        self.named: set[Digest] = set()
        self.read_base = base_reader(BaseFrames(tier).copies_of)

    def check(self) -> list[Finding]:
        self._descriptor()
        for run in self.tier.manifests.runs():
            if self.run in (None, run):
                self.findings += check_line(self.tier, run)
                self._manifests(run)
        self._packs()
        self._partitions()
        if self.run is None and self.packs and not self.listed:
            what = "there is no checkpoint. When all were deleted, gc frees what is left of them; when"
            message = f"{what} {layout.MANIFESTS}/ is lost, put it back before anything else is done"
            self._add("no-checkpoint", Severity.HINT, "", layout.PACKS, message)
        if self.step is None:
            self._leftovers()
            self._foreign()
        return self.findings

    def _add(
        self, kind: str, severity: Severity, invariant: str, where: str, message: str, checkpoints: Iterable[str] = ()
    ) -> None:
        self.findings.append(Finding(kind, severity, invariant, where, message, tuple(checkpoints)))

    def _descriptor(self) -> None:
        """I7 was checked when the store was opened; I9: both copies are intact."""
        if self.tier.damaged_descriptor_copies:
            self._add(
                "damaged-copy",
                Severity.WARNING,
                "I9",
                layout.DESCRIPTOR_NAME,
                "one of two copies of the store descriptor is damaged",
            )

    def _checkpoints(self, run: str) -> Iterator[CheckpointFiles]:
        listings = self.tier.manifests.checkpoints(run)
        return (listing for listing in listings if self.step in (None, listing.ref.step))

    def has_changed(self) -> bool:
        """Tell whether packs or manifests have come or gone since they were listed."""
        runs = [run for run in self.tier.manifests.runs() if self.run in (None, run)]
        return self.packs != set(self.tier.pack_ids()) or self.listed != [
            listing for run in runs for listing in self._checkpoints(run)
        ]

    def _manifests(self, run: str) -> None:
        """I3 and I4; notes which partitions are needed."""
        for listing in self._checkpoints(run):
            self.listed.append(listing)
            name = f"{run} {listing.ref}"
            where = f"{layout.MANIFESTS}/{run}/{layout.checkpoint_name(listing.ref)}"
            if not listing.is_complete:
                self._add("incomplete-checkpoint", Severity.WARNING, "I4", where, _incomplete(listing), [name])
            wholes = Wholes() if listing.is_whole and listing.world_size > 1 else None
            for manifest_name in listing.manifests:
                try:
                    manifest = self.tier.manifests.read(run, listing.ref, manifest_name)
                    check_tree(manifest.header.tree, len(manifest), f"manifest {where}/{manifest_name}")
                except UNKNOWING:
                    raise
                except AsymcheckError as error:
                    wholes = None
                    if isinstance(error, MissingPartitionError) and self._is_deleted(listing, manifest_name):
                        continue  # Deleted since it was listed.
                    self._add("damaged-manifest", Severity.ERROR, "I3", f"{where}/{manifest_name}", str(error), [name])
                else:
                    self._note(manifest, name)
                    if wholes is not None:
                        wholes.add(manifest)
            if wholes is not None:
                self._lacking(wholes, where)

    def _is_deleted(self, listing: CheckpointFiles, name: layout.ManifestName) -> bool:
        return name not in self.tier.manifests.listing(listing.run, listing.ref).manifests

    def _lacking(self, wholes: Wholes, where: str) -> None:
        """No invariant: ranks like those that saved it get back what each had, but nobody else does (§10.5)."""
        found = dict(wholes.lacking())
        if found:
            first, lacks = next(iter(found.items()))
            more = f", nor do those of {len(found) - 1} more tensors" if len(found) > 1 else ""
            message = (
                f"the parts of tensor {first} do not make up the whole{more}: {lacks}; only as many ranks as saved it "
                "can restore it, each its own part"
            )
            tensors = tuple(found)[:_TENSORS_SHOWN]
            self.findings.append(Finding("partial-tensor", Severity.WARNING, "", where, message, (), tensors))

    def _note(self, manifest: Manifest, checkpoint: str) -> None:
        starts = manifest.extent_starts.tolist()
        for row, tensor in enumerate(manifest.names()):
            for extent in manifest.extents(row) if starts[row + 1] > starts[row] else ():
                name, length = extent.digest, extent.partition_length
                need = self.needs.setdefault(name, _Need(length, set(), []))
                if need.length != length:
                    # One of them is wrong; the packs say which.
                    need = self.disputed.setdefault((name, length), _Need(length, set(), []))
                need.checkpoints.add(checkpoint)
                if len(need.tensors) < _TENSORS_SHOWN and tensor not in need.tensors:
                    need.tensors.append(tensor)

    def _packs(self) -> None:
        """I1, and the content of every frame: of all packs, or of those that the chosen step needs.

        Unless it is deep, what a sound index names counts as intact; who needs what is found out all the same.
        """
        # Two passes, one pack open at a time: a store may have more packs than a process may have open files.
        sizes = dict.fromkeys(self.tier.pack_ids(), 0)
        for pack_id in sizes:
            with self._opened(pack_id, report=True) as pack:
                if pack is not None:
                    sizes[pack_id] = self._wanted_bytes(pack)
                    for name, base in bases_in(pack.entries).items():
                        self.bases.setdefault(name, set()).add(base)
                    if not self.deep:
                        self._found(pack, range(len(pack.entries)))
        if self.bases:
            self._need_bases()
        if not self.deep:
            return
        if self.bases:
            for pack_id in sizes:
                with self._opened(pack_id, report=False) as pack:
                    sizes[pack_id] = 0 if pack is None else self._wanted_bytes(pack)
        total, done = sum(sizes.values()), 0
        for pack_id, size in sizes.items():
            if size:
                with self._opened(pack_id, report=False) as pack:
                    if pack is not None:
                        self._read(pack, done, total)
            done += size

    def _found(self, pack: OpenPack, frames: Iterable[int]) -> None:
        """Note frames whose partitions can be had, by whoever names them with the length that they have."""
        names, lengths = pack.digests(), pack.entries["plain_length"].tolist()
        for frame in frames:
            name, length = names[frame], lengths[frame]
            need = self.needs.get(name)
            if need is None or need.length in (0, length):
                self.intact.add(name)
            else:
                self.unlike.add(name)
            self.disputed.pop((name, length), None)

    def _need_bases(self) -> None:
        """Who needs a partition needs its base too, and the base of that."""
        self.named = set(self.needs)
        new = self.needs.keys() & self.bases.keys()
        while new:
            found: set[Digest] = set()
            for name in new:
                need = self.needs[name]
                for base in self.bases[name]:
                    there = self.needs.get(base)
                    if there is None:
                        self.needs[base] = _Need(0, set(need.checkpoints), list(need.tensors))
                        found.add(base)
                    elif not need.checkpoints <= there.checkpoints:
                        there.checkpoints |= need.checkpoints
                        found.add(base)
            new = found & self.bases.keys()

    def _wanted_bytes(self, pack: OpenPack) -> int:
        return sum(int(pack.entries["stored_length"][i]) for i in self._wanted(pack))

    def _wanted(self, pack: OpenPack) -> list[int]:
        return [i for i, name in enumerate(pack.digests()) if self.step is None or name in self.needs]

    @contextlib.contextmanager
    def _opened(self, pack_id: PackId, *, report: bool) -> Iterator[OpenPack | None]:
        where = f"{layout.PACKS}/{layout.pack_name(pack_id)}"
        try:
            pack = self.tier.open_pack(pack_id)
        except UNKNOWING:
            raise
        except AsymcheckError as error:
            # Gone since it was listed, or held by a writer that has just sealed it; else damaged.
            busy = isinstance(error, (LockTimeoutError, MissingPartitionError))
            is_locked = isinstance(error, LockTimeoutError) and pack_id not in self.busy
            if report or is_locked:
                kind, severity = ("busy-pack", Severity.HINT) if busy else ("damaged-pack", Severity.WARNING)
                self._add(kind, severity, "I1", where, str(error))
            if is_locked:
                self.busy.add(pack_id)
            yield None
            return
        try:
            if report and pack.damage is not None:
                message = f"{pack.damage}; its frames are found by scanning"
                self._add("damaged-pack", Severity.WARNING, "I1", where, message)
            yield pack
        finally:
            pack.close()

    def _read(self, pack: OpenPack, done: int, total: int) -> None:
        names = pack.digests()
        slot = Slot(int(pack.entries["stored_length"].max()))
        wanted = self._wanted(pack)
        pack.expect(wanted)
        read: list[int] = []
        for sequence in wanted:
            name, copy = names[sequence], Copy(pack, sequence)
            try:
                if name in self.bases and name not in self.needs:
                    # No checkpoint needs it, so that its base may be gone.
                    read_frame(copy, slot)
                else:
                    read_checked(copy, name, slot, self.read_base)
            except UNKNOWING:
                raise
            except AsymcheckError as error:
                if self.busy and isinstance(error, BaseDamagedError):
                    continue  # The base may be stored in a locked pack.
                place = f"{layout.PACKS}/{pack.path.name} frame {sequence}"
                self.damaged.setdefault(name, []).append((place, str(error)))
            else:
                read.append(sequence)
            done += int(pack.entries["stored_length"][sequence])
            if self.progress is not None:
                self.progress(done, total)
        self._found(pack, read)

    def _partitions(self) -> None:
        """I2: every partition that a manifest names lies somewhere intact."""
        for name, places in self.damaged.items():
            need = self.needs.get(name)
            lost = need if name not in self.intact else None
            self.findings += [
                Finding(
                    "damaged-frame",
                    Severity.ERROR if lost else Severity.WARNING,
                    "I2",
                    where,
                    message if lost else f"{message}; no checkpoint depends on this copy",
                    tuple(sorted(lost.checkpoints)) if lost else (),
                    tuple(need.tensors) if need else (),
                )
                for where, message in places
            ]
        missed = [
            (name, need)
            for name, need in (*self.needs.items(), *((name, need) for (name, _), need in self.disputed.items()))
            if need is not self.needs[name]
            or (name not in self.intact and name not in self.damaged and self._is_missed(name))
        ]
        if self.busy and missed:
            self._unchecked(missed)
            return
        self.findings += [
            Finding(
                "missing-partition",
                Severity.ERROR,
                "I2",
                name.hex(),
                f"partition {name.hex()} {self._lack(name)}",
                tuple(sorted(need.checkpoints)),
                tuple(need.tensors),
            )
            for name, need in missed
        ]

    def _unchecked(self, missed: Sequence[tuple[Digest, _Need]]) -> None:
        """Report partitions that are in no pack that could be read: a locked pack may hold them, so none is lost."""
        message = (
            f"{len({name for name, _ in missed})} partitions could not be checked, because another process kept "
            f"{len(self.busy)} packs locked; run verify again when that process has ended"
        )
        checkpoints = sorted(set[str]().union(*(need.checkpoints for _, need in missed)))
        tensors = dict.fromkeys(tensor for _, need in missed for tensor in need.tensors)
        where, shown = f"{layout.PACKS}/", tuple(tensors)[:_TENSORS_SHOWN]
        self.findings.append(Finding(UNCHECKED, Severity.WARNING, "I2", where, message, tuple(checkpoints), shown))

    def _lack(self, name: Digest) -> str:
        is_there = name in self.intact or name in self.unlike
        return "has not the length that the manifest says" if is_there else "lies in no readable pack"

    def _is_missed(self, name: Digest) -> bool:
        """Tell whether a partition is needed for itself, or by one that lies nowhere else than on it."""
        if not self.bases or name in self.named:
            return True
        return any(name in bases and other not in self.intact for other, bases in self.bases.items())

    def _leftovers(self) -> None:
        """I10: files of unfinished packs whose writer is gone."""
        for where in self.tier.leftovers():
            self._add("stale-temporary", Severity.HINT, "I10", where, "a save was killed here; gc removes the file")

    def _foreign(self) -> None:
        """I10: files that are not the store's."""
        for name in self.tier.foreign():
            self._add("foreign-file", Severity.HINT, "I10", name, "not a file of the store; it is left alone")


def _incomplete(listing: CheckpointFiles) -> str:
    if not listing.world_size:
        return "manifests disagree on the world size"
    wanted = len(listing.manifests) + len(listing.missing_ranks)
    return f"{len(listing.manifests)} of {wanted} manifests are there: the save is unfinished"


def verify(
    tier: StoreTier,
    run: str | None = None,
    step: int | None = None,
    progress: Progress | None = None,
    *,
    deep: bool = True,
) -> list[Finding]:
    """Read and check a store, or what one step needs; change nothing. Unless ``deep``, no frame is read.

    Returns:
        Findings, none when all is well. What a concurrent save is writing is not reported as damage.
    """
    findings: list[Finding] = []
    for _ in range(_ATTEMPTS):
        checker = _Checker(tier, run, step, progress, deep=deep)
        findings = checker.check()
        # What is missing may have been copied into another pack meanwhile, or deleted with its checkpoint.
        if all(one.severity != Severity.ERROR for one in findings) or not checker.has_changed():
            break
    return findings
