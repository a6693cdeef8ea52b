"""The checks. Each names the invariant of SPEC.md §9 that it checks.

Two invariants are not checked by themselves. Where I5 was broken (a pack was freed that something names), I2 is broken
now: what the pack held lies nowhere. And I8 (the catalog agrees with the packs) costs no checkpoint: reads do not use
the catalog, and a save believes an entry only when the pack's own index says the same.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    BaseDamagedError,
    LimitError,
    LockTimeoutError,
    MissingPartitionError,
)
from asymcheck.format import layout
from asymcheck.format.manifest import SCHEMA, Manifest
from asymcheck.format.tree import check as check_tree
from asymcheck.fsck.frame_scanner import FrameScanner, each_manifest, each_pack
from asymcheck.state.boxes import Box, tile
from asymcheck.storage.base_frames import bases_in
from asymcheck.storage.interfaces import OpenPack, ReadTier, StoreTier
from asymcheck.storage.manifests import CheckpointFiles, generations
from asymcheck.types import Digest, PackId, Progress

_COLUMNS = ("name", "aliases", "dtype", "global_shape", "offset", "shape")
_Key = tuple[str, str, tuple[int, ...]]
"""What parts of one tensor agree in: a name, the dtype, and the shape of the whole."""


class TensorCoverage:
    """Parts of each tensor that the ranks of one checkpoint have."""

    def __init__(self) -> None:
        """Begin with no rank."""
        self._whole: set[_Key] = set()
        # Of many ranks there are many parts: offset and shape of each, as bytes.
        self._parts: dict[_Key, bytearray] = {}
        self._aliases: dict[_Key, set[str]] = {}
        self._twice: set[str] = set()

    def add(self, manifest: Manifest) -> None:
        """Take what one rank has."""
        here: set[str] = set()
        columns = (manifest.columns[SCHEMA.get_field_index(name)].to_pylist() for name in _COLUMNS)
        for name, aliases, dtype, whole, offset, shape in zip(*columns, strict=True):
            names = dict.fromkeys([name, *aliases])
            self._twice |= here.intersection(names)
            here.update(names)
            keys = [(one, dtype, tuple(whole)) for one in names]
            if shape == whole:
                self._whole.update(keys)
                continue
            part = np.array([*offset, *shape], dtype=np.int64).tobytes()
            for key in keys:
                self._parts.setdefault(key, bytearray()).extend(part)
            self._aliases.setdefault(keys[0], set()).update(aliases)

    def lacking(self) -> Iterator[tuple[str, str]]:
        """Yield each tensor that cannot be put together, with what it lacks.

        Names that stand for several tensors of one rank say nothing about those of others.
        """
        for key, aliases in self._aliases.items():
            name, dtype, whole = key
            names = {name, *aliases}
            keys = [(one, dtype, whole) for one in names]
            if self._whole.isdisjoint(keys) and self._twice.isdisjoint(names):
                try:
                    missing = tile(Box.of_whole(whole), self._boxes(keys)).missing
                except LimitError as error:
                    yield name, str(error)
                else:
                    if missing is not None:
                        yield name, f"{missing} is in none of the parts that were saved"

    def _boxes(self, keys: list[_Key]) -> list[Box]:
        whole = keys[0][2]
        dims = len(whole)
        found = np.frombuffer(b"".join(self._parts[key] for key in keys), dtype=np.int64).reshape(-1, 2 * dims)
        parts: list[list[int]] = np.unique(found, axis=0).tolist()
        return [Box(whole, tuple(part[:dims]), tuple(part[dims:])) for part in parts]


_TENSORS_SHOWN = 3
_ATTEMPTS = 3


class Severity(str, enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    """A checkpoint cannot be restored, or the newest cannot be known."""
    WARNING = "warning"
    """Something is damaged, or could not be checked, but no checkpoint is known to be lost."""
    HINT = "hint"
    """Something that collection will clear away, or that only who trains can judge."""


UNCHECKED = "unchecked-partitions"
"""Kind of the finding that names checkpoints whose partitions may be stored in packs that were locked."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not as SPEC.md §9 says."""

    kind: str
    """Stable code, for instance ``damaged-frame``."""
    severity: Severity
    invariant: str
    """Number of the broken invariant in SPEC.md §9; empty when none is broken."""
    where: str
    """The file, and the place in it."""
    message: str
    checkpoints: tuple[str, ...] = ()
    """Checkpoints that cannot be restored because of it, or could not be checked, as ``<run> <checkpoint>``."""
    tensors: tuple[str, ...] = ()
    """Some of the tensors concerned."""


@dataclasses.dataclass
class _Need:
    """User of a partition."""

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
        self.scanner = FrameScanner(tier)

    def check(self) -> list[Finding]:
        # I7 was checked when the store was opened; I9: both copies are intact.
        if self.tier.damaged_descriptor_copies:
            message = "one of two copies of the store descriptor is damaged"
            self._add("damaged-copy", Severity.WARNING, "I9", layout.DESCRIPTOR_NAME, message)
        for run in self.tier.manifests.runs():
            if self.run in (None, run):
                self.findings += _check_line(self.tier, run)
                self._manifests(run)
        self._packs()
        self._partitions()
        if self.run is None and self.packs and not self.listed:
            what = "there is no checkpoint. When all were deleted, gc frees what is left of them; when"
            message = f"{what} {layout.MANIFESTS}/ is lost, put it back before anything else is done"
            self._add("no-checkpoint", Severity.HINT, "", layout.PACKS, message)
        if self.step is None:
            # I10: files of unfinished packs whose writer is gone, and files that are not the store's.
            for where in self.tier.leftovers():
                self._add("stale-temporary", Severity.HINT, "I10", where, "a save was killed here; gc removes the file")
            for where in self.tier.foreign():
                self._add("foreign-file", Severity.HINT, "I10", where, "not a file of the store; it is left alone")
        return self.findings

    def _add(
        self,
        kind: str,
        severity: Severity,
        invariant: str,
        where: str,
        message: str,
        checkpoints: Iterable[str] = (),
        tensors: Iterable[str] = (),
    ) -> None:
        self.findings.append(Finding(kind, severity, invariant, where, message, tuple(checkpoints), tuple(tensors)))

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
            wholes = TensorCoverage() if listing.is_whole and listing.world_size > 1 else None
            sound = 0
            for manifest_name, manifest in each_manifest(self.tier, listing):
                try:
                    if isinstance(manifest, AsymcheckError):
                        raise manifest
                    check_tree(manifest.header.tree, len(manifest), f"manifest {where}/{manifest_name}")
                except AsymcheckError as error:
                    self._add("damaged-manifest", Severity.ERROR, "I3", f"{where}/{manifest_name}", str(error), [name])
                else:
                    sound += 1
                    self._note(manifest, name)
                    if wholes is not None:
                        wholes.add(manifest)
            # When one was deleted since it was listed, the others alone make up no whole.
            if wholes is not None and sound == len(listing.manifests):
                self._lacking(wholes, where)

    def _lacking(self, wholes: TensorCoverage, where: str) -> None:
        """No invariant: ranks like those that saved it get back what each had, but nobody else does (§10.5)."""
        found = dict(wholes.lacking())
        if found:
            first, lacks = next(iter(found.items()))
            more = f", nor do those of {len(found) - 1} more tensors" if len(found) > 1 else ""
            message = (
                f"the parts of tensor {first} do not make up the whole{more}: {lacks}; only as many ranks as saved it "
                "can restore it, each its own part"
            )
            self._add("partial-tensor", Severity.WARNING, "", where, message, (), list(found)[:_TENSORS_SHOWN])

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

        A shallow check takes all frames that a sound index names for intact. It still finds the users of partitions.
        """
        pack_ids, sizes = self.tier.pack_ids(), {}
        for pack_id, pack in self._each_pack(pack_ids, report=True):
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
            sizes = {pack_id: self._wanted_bytes(pack) for pack_id, pack in self._each_pack(pack_ids, report=False)}
        # Nothing needs these, so that what they are encoded against may be gone.
        garbage = self.bases.keys() - self.needs.keys()
        total, done = sum(sizes.values()), 0
        for pack_id, pack in self._each_pack([pack_id for pack_id, size in sizes.items() if size], report=False):
            self._read(pack, garbage, done, total)
            done += sizes[pack_id]

    def _each_pack(self, pack_ids: Iterable[PackId], *, report: bool) -> Iterator[tuple[PackId, OpenPack]]:
        """Open packs one at a time; report those that are locked, and with ``report`` what is wrong with the others."""
        for pack_id, pack in each_pack(pack_ids, self.tier.open_pack):
            where = f"{layout.PACKS}/{layout.pack_name(pack_id)}"
            if isinstance(pack, OpenPack):
                if report and pack.damage is not None:
                    message = f"{pack.damage}; its frames are found by scanning"
                    self._add("damaged-pack", Severity.WARNING, "I1", where, message)
                yield pack_id, pack
                continue
            # Gone since it was listed, or held by a writer that has just sealed it; else damaged.
            is_locked = isinstance(pack, LockTimeoutError)
            if report or (is_locked and pack_id not in self.busy):
                busy = is_locked or isinstance(pack, MissingPartitionError)
                kind, severity = ("busy-pack", Severity.HINT) if busy else ("damaged-pack", Severity.WARNING)
                self._add(kind, severity, "I1", where, str(pack))
            if is_locked:
                self.busy.add(pack_id)

    def _found(self, pack: OpenPack, frames: Iterable[int]) -> None:
        """Note frames whose partitions are readable, for users that name them with their actual length."""
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
        """Note that the user of a partition needs its base too, and the base of that."""
        self.named = set(self.needs)
        new = self.needs.keys() & self.bases.keys()
        while new:
            found: set[Digest] = set()
            for name, base in ((user, base) for user in new for base in self.bases[user]):
                need = self.needs[name]
                of_base = self.needs.setdefault(base, _Need(0, set(), list(need.tensors)))
                if not need.checkpoints <= of_base.checkpoints:
                    of_base.checkpoints |= need.checkpoints
                    found.add(base)
            new = found & self.bases.keys()

    def _wanted_bytes(self, pack: OpenPack) -> int:
        return sum(int(pack.entries["stored_length"][i]) for i in self._wanted(pack))

    def _wanted(self, pack: OpenPack) -> list[int]:
        return [i for i, name in enumerate(pack.digests()) if self.step is None or name in self.needs]

    def _read(self, pack: OpenPack, garbage: set[Digest], done: int, total: int) -> None:
        read: list[int] = []
        for sequence, name, problem, _ in self.scanner.frames(pack, self._wanted(pack), garbage):
            if problem is None:
                read.append(sequence)
            elif not (self.busy and isinstance(problem, BaseDamagedError)):  # Its base may be stored in a locked pack.
                place = f"{layout.PACKS}/{pack.path.name} frame {sequence}"
                self.damaged.setdefault(name, []).append((place, str(problem)))
            done += int(pack.entries["stored_length"][sequence])
            if self.progress is not None:
                self.progress(done, total)
        self._found(pack, read)

    def _partitions(self) -> None:
        """I2: every partition that a manifest names lies somewhere intact."""
        for name, places in self.damaged.items():
            need = self.needs.get(name)
            tensors = need.tensors if need else ()
            for where, message in places:
                if need is not None and name not in self.intact:
                    self._add("damaged-frame", Severity.ERROR, "I2", where, message, sorted(need.checkpoints), tensors)
                else:
                    unneeded = f"{message}; no checkpoint depends on this copy"
                    self._add("damaged-frame", Severity.WARNING, "I2", where, unneeded, (), tensors)
        missed = [
            (name, need)
            for name, need in (*self.needs.items(), *((name, need) for (name, _), need in self.disputed.items()))
            if need is not self.needs[name]
            or (name not in self.intact and name not in self.damaged and self._is_missed(name))
        ]
        if self.busy and missed:
            self._unchecked(missed)
            return
        for name, need in missed:
            is_there = name in self.intact or name in self.unlike
            lack = "has not the length that the manifest says" if is_there else "lies in no readable pack"
            message = f"partition {name.hex()} {lack}"
            checkpoints = sorted(need.checkpoints)
            self._add("missing-partition", Severity.ERROR, "I2", name.hex(), message, checkpoints, need.tensors)

    def _unchecked(self, missed: Sequence[tuple[Digest, _Need]]) -> None:
        """Report partitions that are in no readable pack: a locked pack may hold them, so none is lost."""
        message = (
            f"{len({name for name, _ in missed})} partitions could not be checked, because another process kept "
            f"{len(self.busy)} packs locked; run verify again when that process has ended"
        )
        checkpoints = sorted(set[str]().union(*(need.checkpoints for _, need in missed)))
        tensors = dict.fromkeys(tensor for _, need in missed for tensor in need.tensors)
        shown = list(tensors)[:_TENSORS_SHOWN]
        self._add(UNCHECKED, Severity.WARNING, "I2", f"{layout.PACKS}/", message, checkpoints, shown)

    def _is_missed(self, name: Digest) -> bool:
        """Tell whether a partition is needed for itself, or by one that lies nowhere else than on it."""
        if not self.bases or name in self.named:
            return True
        return any(name in bases and other not in self.intact for other, bases in self.bases.items())


def _incomplete(listing: CheckpointFiles) -> str:
    if not listing.world_size:
        return "manifests disagree on the world size"
    wanted = len(listing.manifests) + len(listing.missing_ranks)
    return f"{len(listing.manifests)} of {wanted} manifests are there: the save is unfinished"


def _check_line(tier: ReadTier, run: str) -> Iterator[Finding]:
    """Check I6 and I9. A head record off the line is a loss, but not of the newest checkpoint."""
    numbers = tier.manifests.heads(run)
    listed = [listing.ref.generation for listing in tier.manifests.checkpoints(run)]
    if numbers and not listed:
        # No invariant: there need not have been any, or they were deleted.
        lost = f"{layout.MANIFESTS}/{run} is lost"
        message = f"run {run!r} was begun, and has no checkpoint: none was saved, all were deleted, or {lost}"
        yield Finding("no-checkpoint", Severity.HINT, "", f"{layout.HEADS}/{run}", message)
    parents: dict[int, int] = {}
    problems: dict[int, tuple[str, str]] = {}
    for generation in generations([*numbers, *listed]):
        try:
            found = tier.manifests.read_head(run, generation)
        except UNKNOWING:
            raise
        except AsymcheckError as error:
            problems[generation] = ("damaged-head", str(error))
            continue
        if found is None and generation > 1:
            problems[generation] = ("missing-head", f"generation {generation} has no head record")
        elif found is not None:
            head, damaged = found
            parents[generation] = head.parent.generation if head.parent is not None else 0
            if damaged:
                message = "one of two copies of the head record is damaged"
                yield Finding("damaged-copy", Severity.WARNING, "I9", _path(run, generation), message)
    line = {max([1, *numbers, *listed])}
    while parents.get(min(line), 0):
        line.add(parents[min(line)])
    if min(line) > 1 and min(line) not in {*parents, *problems}:
        problems[min(line)] = ("missing-head", f"generation {min(line)} has no head record")
    for generation, (kind, message) in problems.items():
        severity = Severity.ERROR if generation in line else Severity.WARNING
        yield Finding(kind, severity, "I6", _path(run, generation), message)


def _path(run: str, generation: int) -> str:
    return f"{layout.HEADS}/{run}/{layout.head_name(generation)}"


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
        Findings, none if the store is sound. Files that a concurrent save is writing are not reported as damage.
    """
    findings: list[Finding] = []
    for _ in range(_ATTEMPTS):
        checker = _Checker(tier, run, step, progress, deep=deep)
        findings = checker.check()
        # What is missing may have been copied into another pack meanwhile, or deleted with its checkpoint.
        if all(one.severity != Severity.ERROR for one in findings) or not checker.has_changed():
            break
    return findings
