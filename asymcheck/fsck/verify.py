"""Verify a store: check the invariants of SPEC.md §B11 without changing anything.

Two invariants have no check. If I5 was broken (a needed pack was freed), the check of I2 finds the lost partitions. I8
(the catalog agrees with the packs) loses no checkpoint: reads do not use the catalog, and a save trusts an entry only
if the index of the pack agrees.

Shards of the check may run in any order on any machines. Each shard reads all manifests and pack indexes, which are a
small part of the bytes. Each checkpoint, each pack, and each partition with all its copies belongs to one shard, which
alone checks and reports it. The findings of all shards together are those of the whole check.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from asymcheck.config import DEFAULT_RUN, __version__
from asymcheck.errors import (
    AsymcheckError,
    BaseDamagedError,
    LimitError,
    LockTimeoutError,
    MissingPartitionError,
    result_or_error,
)
from asymcheck.format import layout
from asymcheck.format.digest import digest
from asymcheck.format.manifest import SCHEMA, Manifest
from asymcheck.format.pack import Entries
from asymcheck.format.registry import KIND_FULL
from asymcheck.format.tree import check as check_tree
from asymcheck.fsck.frame_scanner import FrameScanner, each_manifest, each_pack
from asymcheck.restore.resolve import candidates, check_run_exists, what_is_missing
from asymcheck.state.boxes import Box, tile
from asymcheck.storage.interfaces import OpenPack, ReadTier, StoreTier
from asymcheck.storage.manifests import CheckpointFiles, generations
from asymcheck.storage.pack_index import bases_in, digests_of
from asymcheck.types import Digest, PackId, Progress, ProgressMeter
from asymcheck.validation import check_step

_COLUMNS = ("name", "aliases", "dtype", "global_shape", "offset", "shape")
_Key = tuple[str, str, tuple[int, ...]]
"""Identity of a tensor across ranks: name, dtype, and shape of the whole tensor."""


class TensorCoverage:
    """The parts of each tensor that the ranks of one checkpoint saved."""

    def __init__(self) -> None:
        self._whole: set[_Key] = set()
        # Offset and shape of each part, packed into bytes because many ranks have many parts.
        self._parts: dict[_Key, bytearray] = {}
        self._aliases: dict[_Key, set[str]] = {}
        self._ambiguous: set[str] = set()

    def add(self, manifest: Manifest) -> None:
        """Add the parts of one rank."""
        names_of_rank: set[str] = set()
        columns = (manifest.columns[SCHEMA.get_field_index(name)].to_pylist() for name in _COLUMNS)
        for name, aliases, dtype, whole, offset, shape in zip(*columns, strict=True):
            names = dict.fromkeys([name, *aliases])
            self._ambiguous |= names_of_rank.intersection(names)
            names_of_rank.update(names)
            keys = [(alias, dtype, tuple(whole)) for alias in names]
            if shape == whole:
                self._whole.update(keys)
                continue
            part = np.array([*offset, *shape], dtype=np.int64).tobytes()
            for key in keys:
                self._parts.setdefault(key, bytearray()).extend(part)
            self._aliases.setdefault(keys[0], set()).update(aliases)

    def incomplete(self) -> Iterator[tuple[str, str]]:
        """Yield each tensor whose parts do not cover it, with the missing elements.

        Names of several tensors of one rank are skipped, because they do not identify a tensor across ranks.
        """
        for key, aliases in self._aliases.items():
            name, dtype, whole = key
            names = {name, *aliases}
            keys = [(alias, dtype, whole) for alias in names]
            if self._whole.isdisjoint(keys) and self._ambiguous.isdisjoint(names):
                try:
                    missing = tile(Box.of_whole(whole), self._boxes(keys)).missing
                except LimitError as error:
                    yield name, str(error)
                else:
                    if missing is not None:
                        yield name, f"no saved part has {missing}"

    def _boxes(self, keys: list[_Key]) -> list[Box]:
        whole = keys[0][2]
        dims = len(whole)
        rows = np.frombuffer(b"".join(self._parts[key] for key in keys), dtype=np.int64).reshape(-1, 2 * dims)
        parts: list[list[int]] = np.unique(rows, axis=0).tolist()
        return [Box(whole, tuple(part[:dims]), tuple(part[dims:])) for part in parts]


_TENSORS_SHOWN = 3
_ATTEMPTS = 3
_PACKS_AHEAD = 64
_STRETCH_BYTES = 64 << 20  # of a pack, which one shard reads in a row; the maximum of a remote pack


class Severity(str, enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    """A checkpoint cannot be restored, or the newest checkpoint is unknown."""
    WARNING = "warning"
    """Data is damaged or could not be checked, but no checkpoint is known to be lost."""
    HINT = "hint"
    """Garbage that collection will remove, or a state that only the user can resolve."""


UNCHECKED = "unchecked-partitions"
"""Kind of the finding for checkpoints whose partitions may be in locked packs."""


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A violation of an invariant of SPEC.md §B11, or a hint."""

    kind: str
    """Stable code, for example ``damaged-frame``."""
    severity: Severity
    invariant: str
    """Number of the broken invariant in SPEC.md §B11; empty if no invariant is broken."""
    where: str
    """The file, and the position in the file."""
    message: str
    checkpoints: tuple[str, ...] = ()
    """Checkpoints that are lost or could not be checked, as ``run NAME, step N (generation G, save ID)``."""
    tensors: tuple[str, ...] = ()
    """Some of the affected tensors."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part ``index``, from 0, of ``count`` independent parts of a check. The default is the whole check."""

    index: int = 0
    count: int = 1

    def owner(self, name: bytes) -> int:
        """Return the shard that checks a checkpoint, a pack or a partition with this id."""
        return int.from_bytes(name[-8:], "big") % self.count

    def has(self, name: bytes) -> bool:
        """Tell whether this shard checks a checkpoint, a pack or a partition with this id."""
        return self.owner(name) == self.index


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return distinct findings, for example those of all shards, in the order of reports: errors first."""
    return sorted(set(findings), key=lambda item: (list(Severity).index(item.severity), item))


@dataclasses.dataclass
class _Need:
    """Checkpoints and tensors that need a partition."""

    length: int
    """Plain length in the manifests, which may be wrong; 0 for a base that no manifest names."""
    checkpoints: set[str]
    tensors: list[str]


class _Checker:
    def __init__(
        self, tier: StoreTier, run: str | None, step: int | None, progress: Progress | None, shard: Shard, *, deep: bool
    ) -> None:
        self.tier, self.run, self.step, self.progress, self.shard, self.deep = tier, run, step, progress, shard, deep
        self.packs = set(tier.pack_ids())
        self.listings: list[CheckpointFiles] = []
        self.findings: list[Finding] = []
        self.needs: dict[Digest, _Need] = {}
        self.disputed: dict[tuple[Digest, int], _Need] = {}
        self.intact: set[Digest] = set()
        self.wrong_length: set[Digest] = set()
        self.busy: set[PackId] = set()
        self.damaged: dict[Digest, list[tuple[str, str]]] = {}
        self.bases: dict[Digest, set[Digest]] = {}
        self.undecodable: set[Digest] = set()
        self.named: set[Digest] = set()
        self.owners: dict[Digest, int] = {}
        self.indexes: dict[PackId, bytes] = {}
        self.scanner = FrameScanner(tier)

    def check(self) -> list[Finding]:
        for run in self._runs():
            self._check_manifests(run)
        self._check_packs()
        self._check_partitions()
        if self.shard.index == 0:
            self._check_records()
        return in_order(self.findings)

    def content(self) -> str:
        """Return a digest of everything that decides which shard checks what."""
        parts = [pack_id + index for pack_id, index in sorted(self.indexes.items())]
        listed = repr((__version__, self.listings)).encode()
        return digest(b"".join([listed, *sorted(self.needs), *parts])).hex()

    def _check_records(self) -> None:
        """Check I6, I9 and I10: records and stray files."""
        # I7 was checked when the store was opened; I9: both copies are intact.
        if self.tier.damaged_descriptor_copies:
            message = "one of two copies of the store descriptor is damaged"
            self._add("damaged-copy", Severity.WARNING, "I9", layout.DESCRIPTOR_NAME, message)
        for run in self._runs():
            self.findings += _check_line(self.tier, run)
        if self.run is None and self.packs and not self.listings:
            message = (
                "the store has packs and no checkpoint. If all checkpoints were deleted, run gc. If the directory "
                f"{layout.MANIFESTS}/ was lost, put it back first"
            )
            self._add("no-checkpoint", Severity.HINT, "", layout.PACKS, message)
        if self.step is None:
            # I10: temporary files without a living writer, and foreign files.
            for where in self.tier.leftovers():
                self._add("stale-temporary", Severity.HINT, "I10", where, "temporary file of a killed save: run gc")
            for where in self.tier.foreign():
                self._add("foreign-file", Severity.HINT, "I10", where, "not a file of the store; no command changes it")

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

    def _runs(self) -> list[str]:
        return [run for run in self.tier.manifests.runs() if self.run in (None, run)]

    def _listings(self, run: str) -> Iterator[CheckpointFiles]:
        listings = self.tier.manifests.checkpoints(run)
        return (listing for listing in listings if self.step in (None, listing.ref.step))

    def has_changed(self) -> bool:
        """Tell whether packs or manifests were added or removed since the listing."""
        listings = [listing for run in self._runs() for listing in self._listings(run)]
        return self.packs != set(self.tier.pack_ids()) or self.listings != listings

    def without_deleted(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return findings without deleted checkpoints. Findings about these alone are left out."""
        present = {f"run {run}, {listing.ref}" for run in self._runs() for listing in self._listings(run)}
        left: list[Finding] = []
        for finding in findings:
            names = tuple(name for name in finding.checkpoints if name in present)
            if names or not finding.checkpoints:
                left.append(dataclasses.replace(finding, checkpoints=names))
        return in_order(left)

    def _check_manifests(self, run: str) -> None:
        """Check I3 and I4. Record the needed partitions."""
        refs = self.tier.manifests.refs(run) if self.step is None else []
        listings = list(self._listings(run))
        for ref in filter(lambda ref: self.shard.has(ref.save_id), set(refs) - {listing.ref for listing in listings}):
            # I10: a directory without a manifest. Readers ignore it.
            where = layout.checkpoint_path(run, ref)
            message = (
                "no manifest: a save or a deletion was killed, and gc removes the directory; or manifests were lost"
            )
            self._add("empty-checkpoint", Severity.HINT, "I10", where, message)
        for listing in self.tier.manifests.each(listings):
            self.listings.append(listing)
            name = f"run {run}, {listing.ref}"
            where = layout.checkpoint_path(run, listing.ref)
            is_own = self.shard.has(listing.ref.save_id)
            if is_own and not listing.is_complete:
                self._add("incomplete-checkpoint", Severity.WARNING, "I4", where, what_is_missing(listing), [name])
            coverage = TensorCoverage() if is_own and listing.is_whole and listing.world_size > 1 else None
            intact = 0
            for manifest_name, manifest in each_manifest(self.tier, listing):
                if isinstance(manifest, Manifest):
                    self._record_needs(manifest, name)
                if not is_own:
                    continue
                try:
                    if isinstance(manifest, AsymcheckError):
                        raise manifest
                    check_tree(manifest.header.tree, len(manifest), f"manifest {where}/{manifest_name}")
                except AsymcheckError as error:
                    self._add("damaged-manifest", Severity.ERROR, "I3", f"{where}/{manifest_name}", str(error), [name])
                else:
                    intact += 1
                    if coverage is not None:
                        coverage.add(manifest)
            # Parts are incomplete if a manifest was deleted since the listing.
            if coverage is not None and intact == len(listing.manifests):
                self._check_coverage(coverage, where)

    def _check_coverage(self, coverage: TensorCoverage, where: str) -> None:
        """Check that parts cover their tensors (§A11.4). No invariant: as many ranks can restore their parts."""
        incomplete = dict(coverage.incomplete())
        if incomplete:
            first, problem = next(iter(incomplete.items()))
            more = f" ({len(incomplete) - 1} more tensors are incomplete)" if len(incomplete) > 1 else ""
            message = f"the saved parts of tensor {first} do not cover it: {problem}{more}; restore with as many ranks"
            self._add("partial-tensor", Severity.WARNING, "", where, message, (), list(incomplete)[:_TENSORS_SHOWN])

    def _record_needs(self, manifest: Manifest, checkpoint: str) -> None:
        starts = manifest.extent_starts.tolist()
        for row, tensor in enumerate(manifest.names()):
            for extent in manifest.extents(row) if starts[row + 1] > starts[row] else ():
                name, length = extent.digest, extent.partition_length
                need = self.needs.setdefault(name, _Need(length, set(), []))
                if need.length != length:
                    # Manifests disagree on the length. The packs decide which one is wrong.
                    need = self.disputed.setdefault((name, length), _Need(length, set(), []))
                need.checkpoints.add(checkpoint)
                if len(need.tensors) < _TENSORS_SHOWN and tensor not in need.tensors:
                    need.tensors.append(tensor)

    def _check_packs(self) -> None:
        """Check I1, and the frames of all packs, or the frames that the chosen step needs.

        A shallow check trusts intact indexes and reads no frames.
        """
        indexes: dict[PackId, Entries] = {}
        listed = sorted(self.tier.pack_ids())
        for pack_id, pack in self._each_pack(listed, report=True):
            self._assign(pack_id, pack)
            indexes[pack_id] = pack.entries
            for name, base in bases_in(pack.entries).items():
                self.bases.setdefault(name, set()).add(base)
            if not self.deep:
                self._record_intact(pack, range(len(pack.entries)))
        if self.bases:
            full = set[Digest]()
            for entries in indexes.values():
                full.update(self.bases.keys() & digests_of(entries[entries["kind"] == KIND_FULL]))
            self._add_bases(full)
            self._find_undecodable(indexes.values(), full)
        sizes = {pack_id: self._bytes_to_check(pack_id, entries) for pack_id, entries in indexes.items()}
        if not self.deep:
            return
        # Unneeded partitions are not decoded, because their bases may have been collected.
        garbage = self.bases.keys() - self.needs.keys()
        meter = ProgressMeter(self.progress, sum(sizes.values()))
        for _, pack in self._each_pack([pack_id for pack_id, size in sizes.items() if size], report=False):
            self._check_frames(pack, self._frames_to_check(pack.entries), garbage, meter)
        self._check_moved({*listed}, garbage, meter)

    def _check_moved(self, listed: set[PackId], garbage: set[Digest], meter: ProgressMeter) -> None:
        """Check needed partitions that a collection has moved into packs that were not listed."""
        while lost := {name for name in self.needs if self._is_unread(name)}:
            new = sorted({*self.tier.pack_ids()} - listed)
            if not new:
                return
            listed.update(new)
            for _, pack in self._each_pack(new, report=False):
                frames = [number for number, name in enumerate(pack.digests()) if name in lost]
                if frames:
                    self._check_frames(pack, frames, garbage, meter)

    def _is_unread(self, name: Digest) -> bool:
        """Tell whether this shard has to check a partition, and has found no frame of it."""
        return name not in self.intact and name not in self.damaged and self._is_own(name)

    def _assign(self, pack_id: PackId, pack: OpenPack) -> None:
        """Assign the partitions of a pack to shards in long stretches. The first pack of a partition decides."""
        if self.shard.count > 1:
            stretches = pack.entries["offset"] // _STRETCH_BYTES
            owners = (stretches.astype(np.int64) + self.shard.owner(pack_id)) % self.shard.count
            for name, owner in zip(pack.digests(), owners.tolist(), strict=True):
                self.owners.setdefault(name, owner)

    def _is_own(self, name: Digest) -> bool:
        """Tell whether this shard checks a partition. Partitions in no pack are assigned by their digest."""
        owner = self.owners.get(name, -1)
        return self.shard.count == 1 or (self.shard.has(name) if owner < 0 else owner == self.shard.index)

    def _find_undecodable(self, indexes: Iterable[Entries], full: set[Digest]) -> None:
        """Find the partitions that cannot be decoded, because a base is in no pack."""
        absent = set[Digest]().union(*self.bases.values())
        for entries in indexes:
            absent.difference_update(digests_of(entries))
        broken = absent
        while broken:
            based = {name for name, bases in self.bases.items() if bases <= absent | self.undecodable}
            broken = based - full - self.undecodable
            self.undecodable |= broken
        self.undecodable &= self.needs.keys()

    def _each_pack(self, pack_ids: Sequence[PackId], *, report: bool) -> Iterator[tuple[PackId, OpenPack]]:
        """Open packs one at a time. Report locked packs, and with ``report`` also damaged packs."""
        for pack_id, pack in each_pack(self._expected(pack_ids), self.tier.open_pack):
            where = layout.pack_path(pack_id)
            if isinstance(pack, OpenPack):
                if report and pack.damage is not None and self.shard.has(pack_id):
                    message = f"{pack.damage}; its frames are found by scanning"
                    self._add("damaged-pack", Severity.WARNING, "I1", where, message)
                yield pack_id, pack
                continue
            # The pack was removed since the listing, is locked by its writer, or is damaged.
            is_locked = isinstance(pack, LockTimeoutError)
            if (report and self.shard.has(pack_id)) or (not report and is_locked and pack_id not in self.busy):
                busy = is_locked or isinstance(pack, MissingPartitionError)
                kind, severity = ("busy-pack", Severity.HINT) if busy else ("damaged-pack", Severity.WARNING)
                self._add(kind, severity, "I1", where, str(pack))
            if is_locked:
                self.busy.add(pack_id)

    def _expected(self, pack_ids: Sequence[PackId]) -> Iterator[PackId]:
        """Yield packs that are opened one after the other, and announce the next ones."""
        for start in range(0, len(pack_ids), _PACKS_AHEAD):
            self.tier.expect(pack_ids[start : start + _PACKS_AHEAD])
            yield from pack_ids[start : start + _PACKS_AHEAD]

    def _record_intact(self, pack: OpenPack, frames: Iterable[int]) -> None:
        """Record the partitions of readable frames, where the manifests have the actual length."""
        digests, lengths = pack.digests(), pack.entries["plain_length"].tolist()
        for frame in frames:
            name, length = digests[frame], lengths[frame]
            need = self.needs.get(name)
            if need is None or need.length in (0, length):
                self.intact.add(name)
            else:
                self.wrong_length.add(name)
            self.disputed.pop((name, length), None)

    def _add_bases(self, full: set[Digest]) -> None:
        """Add the bases of needed partitions. A partition that is also stored in full needs no base."""
        self.named = set(self.needs)
        based = self.bases.keys() - full
        new = self.needs.keys() & based
        while new:
            changed: set[Digest] = set()
            for name, base in ((user, base) for user in new for base in self.bases[user]):
                need = self.needs[name]
                base_need = self.needs.setdefault(base, _Need(0, set(), list(need.tensors)))
                if not need.checkpoints <= base_need.checkpoints:
                    base_need.checkpoints |= need.checkpoints
                    changed.add(base)
            new = changed & based

    def _bytes_to_check(self, pack_id: PackId, entries: Entries) -> int:
        """Return the bytes of the frames to check. Note the index for :meth:`content` if any shard checks a frame."""
        if self.step is None or not self.needs.keys().isdisjoint(digests_of(entries)):
            self.indexes[pack_id] = digest(entries.tobytes())
        return int(entries["stored_length"][self._frames_to_check(entries)].sum())

    def _frames_to_check(self, entries: Entries) -> list[int]:
        chosen = None if self.step is None else self.needs.keys()
        names = enumerate(digests_of(entries))
        return [i for i, name in names if (chosen is None or name in chosen) and self._is_own(name)]

    def _check_frames(self, pack: OpenPack, frames: Sequence[int], garbage: set[Digest], meter: ProgressMeter) -> None:
        read: list[int] = []
        for sequence, name, problem, _ in self.scanner.frames(pack, frames, garbage):
            if problem is None:
                read.append(sequence)
            elif not (self.busy and isinstance(problem, BaseDamagedError)):  # A locked pack may store the base.
                place = f"{layout.PACKS}/{pack.path.name} frame {sequence}"
                self.damaged.setdefault(name, []).append((place, str(problem)))
            meter.add(int(pack.entries["stored_length"][sequence]))
        self._record_intact(pack, read)

    def _check_partitions(self) -> None:
        """Check I2: every partition that a manifest names is stored intact."""
        for name, copies in self.damaged.items():
            need = self.needs.get(name)
            tensors = need.tensors if need else ()
            for where, message in copies:
                if need is not None and name not in self.intact:
                    self._add("damaged-frame", Severity.ERROR, "I2", where, message, sorted(need.checkpoints), tensors)
                else:
                    unneeded = f"{message}; no checkpoint needs this copy"
                    self._add("damaged-frame", Severity.WARNING, "I2", where, unneeded, (), tensors)
        missing = [
            (name, need) for name, need in self.needs.items() if self._is_unread(name) and self._is_missing(name)
        ]
        missing += [(name, need) for (name, _), need in self.disputed.items() if self._is_own(name)]
        if self.busy and missing:
            self._report_unchecked(missing)
            return
        for name, need in missing:
            is_stored = name in self.intact or name in self.wrong_length
            problem = "has another length than the manifest says" if is_stored else "is in no readable pack"
            message = f"partition {name.hex()} {problem}"
            checkpoints = sorted(need.checkpoints)
            self._add("missing-partition", Severity.ERROR, "I2", name.hex(), message, checkpoints, need.tensors)

    def _report_unchecked(self, missing: Sequence[tuple[Digest, _Need]]) -> None:
        """Report partitions in no readable pack. They are not lost, because a locked pack may store them."""
        message = (
            f"some partitions are in no readable pack, but {len(self.busy)} packs are locked and were not checked; "
            "run verify again when the process that locks them has ended"
        )
        for checkpoint in set[str]().union(*(need.checkpoints for _, need in missing)):
            self._add(UNCHECKED, Severity.WARNING, "I2", f"{layout.PACKS}/", message, [checkpoint])

    def _is_missing(self, name: Digest) -> bool:
        """Tell whether a manifest names the partition, or a needed partition cannot be decoded without it."""
        return not self.bases or name in self.named or any(name in self.bases[other] for other in self.undecodable)


def _check_line(tier: ReadTier, run: str) -> Iterator[Finding]:
    """Check I6 and I9. The loss of a head record off the line does not affect the newest checkpoint."""
    numbers = tier.manifests.heads(run)
    listed = [listing.ref.generation for listing in tier.manifests.checkpoints(run)]
    if numbers and not listed:
        message = (
            f"run {run!r} has no checkpoint: none was saved, all were deleted, or the directory "
            f"{layout.MANIFESTS}/{run} was lost"
        )
        yield Finding("no-checkpoint", Severity.HINT, "", f"{layout.HEADS}/{run}", message)
    parents: dict[int, int] = {}
    problems: dict[int, tuple[str, str]] = {}
    for generation in generations([*numbers, *listed]):
        record = result_or_error(tier.manifests.read_head, run, generation)
        if isinstance(record, AsymcheckError):
            problems[generation] = ("damaged-head", str(record))
        elif record is None:
            if generation > 1:
                problems[generation] = ("missing-head", f"generation {generation} has no head record")
        else:
            head, damaged = record
            parents[generation] = head.parent.generation if head.parent is not None else 0
            if damaged:
                message = "one of two copies of the head record is damaged"
                yield Finding("damaged-copy", Severity.WARNING, "I9", layout.head_path(run, generation), message)
    line = {max([1, *numbers, *listed])}
    while parents.get(min(line), 0):
        line.add(parents[min(line)])
    if min(line) > 1 and min(line) not in {*parents, *problems}:
        problems[min(line)] = ("missing-head", f"generation {min(line)} has no head record")
    for generation, (kind, message) in problems.items():
        severity = Severity.ERROR if generation in line else Severity.WARNING
        yield Finding(kind, severity, "I6", layout.head_path(run, generation), message)


def verify(
    tier: StoreTier,
    run: str | None = None,
    step: int | None = None,
    progress: Progress | None = None,
    *,
    deep: bool = True,
    shard: Shard | None = None,
) -> tuple[list[Finding], str]:
    """Check a store, the data of one step, or a shard of either. Change nothing. Without ``deep``, read no frames.

    Returns:
        The findings; none if the store is sound. Files of a concurrent save are not reported as damage. Also a digest
        of the checked manifests and pack indexes, which is equal for all shards if the store did not change.
    """
    if step is not None:
        run, step = DEFAULT_RUN if run is None else layout.check_run(run), check_step(step)
        candidates(tier, run, step)
    elif run is not None:
        check_run_exists(tier.root, layout.check_run(run), tier.manifests.runs())
    findings, content = list[Finding](), ""
    for _ in range(_ATTEMPTS):
        checker = _Checker(tier, run, step, progress, shard or Shard(), deep=deep)
        findings, content = checker.check(), checker.content()
        if not _have_error(findings) or not checker.has_changed():
            break
        # Missing data may have been deleted with its checkpoint during the check, or moved to another pack. A training
        # may delete a checkpoint during each attempt.
        findings = checker.without_deleted(findings)
        if not _have_error(findings):
            break
    return findings, content


def _have_error(findings: Sequence[Finding]) -> bool:
    return any(finding.severity is Severity.ERROR for finding in findings)
