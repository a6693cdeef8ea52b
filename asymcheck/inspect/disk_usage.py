"""Compute disk usage per checkpoint and tensor role, and the bytes that garbage collection would free.

Reads manifests and pack indexes, but neither tensors nor the catalog. Partitions are integer ids in arrays, so that a
million partitions take seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asymcheck.errors import AsymcheckError, LockTimeoutError, MissingPartitionError, result_or_error
from asymcheck.format import layout, registry
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.pack import frame_lengths
from asymcheck.fsck.frame_scanner import Opened, each_manifest, every_pack
from asymcheck.inspect.history import known_line
from asymcheck.restore.lineage import Lineage
from asymcheck.restore.resolve import check_run_exists
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.pack_index import PackIndex

_Ints = npt.NDArray[np.int64]
_STAT_BLOCK = 512
_ROLES = {role: number for number, role in enumerate(registry.ROLES)}
_Table = npt.NDArray[np.void]
_DIGEST = f"V{registry.DIGEST_BYTES}"
_EXTENTS = np.dtype([("digest", _DIGEST), ("length", np.int64), ("role", np.int64), ("checkpoint", np.int64)])
_FRAMES = np.dtype([("digest", _DIGEST), ("base", _DIGEST), ("kind", "u1"), ("length", np.int64), ("pack", np.int64)])


@dataclasses.dataclass(frozen=True)
class CheckpointBytes:
    """Disk usage of one checkpoint. Stored bytes include headers, payloads and padding of frames."""

    run: str
    step: int
    generation: int
    save_id: str
    """Save id, 32 hexadecimal digits."""
    complete: bool
    """Whether the manifests of all ranks exist and are readable."""
    on_line: bool | None
    """Whether the checkpoint is on the line; None if a head record is lost."""
    state_bytes: int
    stored_bytes: int = 0
    """Stored bytes of the partitions of the checkpoint, each counted once."""
    own_bytes: int = 0
    """Stored bytes that only this checkpoint needs, which become garbage if it is deleted."""
    shared_bytes: int = 0
    """Stored bytes that other checkpoints need, too."""
    new_bytes: int = 0
    """Stored bytes that no earlier checkpoint of the store needs. Their sum over all checkpoints is the total."""
    manifest_bytes: int = 0
    """Bytes of the manifests, which a deletion frees immediately."""
    missing_partitions: int = 0
    """Number of partitions in no readable pack."""


@dataclasses.dataclass(frozen=True)
class RoleBytes:
    """Disk usage of the tensors of one role in all listed checkpoints."""

    role: str
    state_bytes: int
    stored_bytes: int
    """Stored bytes of the partitions, each counted once. A partition of several roles is divided by their bytes."""


@dataclasses.dataclass(frozen=True)
class DiskUsage:
    """Disk usage of a store.

    ``pack_bytes`` is the sum of ``live_bytes``, ``locked_bytes``, ``freeable_bytes``, ``overhead_bytes`` and
    ``unreadable_bytes``. Uncommitted bytes of a save in progress count as garbage.
    """

    store_id: str
    """Store id, 32 hexadecimal digits."""
    checkpoints: tuple[CheckpointBytes, ...]
    """The checkpoints of the store or of one run, oldest first."""
    roles: tuple[RoleBytes, ...]
    packs: int
    pack_bytes: int
    live_bytes: int
    """Bytes of frames that a checkpoint needs, including further copies of a partition."""
    locked_bytes: int
    """Bytes of garbage in packs that collection keeps: packs with live frames or a damaged index. While a manifest is
    unreadable, collection keeps all packs."""
    freeable_packs: int
    """Number of packs without live frames, which collection would free."""
    freeable_bytes: int
    overhead_bytes: int
    """Bytes of headers, indexes, and remains of recycled files in the other packs."""
    damaged_packs: int
    """Number of packs with a damaged header or index. Collection keeps them."""
    unreadable_bytes: int
    """File bytes of completely unreadable packs."""
    pooled_packs: int
    """Number of freed packs in the pool."""
    pooled_bytes: int
    unfinished_bytes: int
    """Bytes of packs that are being written, or were abandoned by a killed process."""
    manifests: int
    manifest_bytes: int
    unreadable_manifests: int
    """Number of unreadable manifests. Their partitions count as garbage, but collection frees nothing."""
    catalog_bytes: int


def account(tier: NvmeTier, run: str | None = None) -> DiskUsage:
    """Compute the disk usage of a store, with the checkpoints of one run or of all runs.

    Raises:
        CheckpointNotFoundError: the store has other runs, but not this one.
    """
    runs = tier.manifests.runs()
    if run is not None and runs:
        check_run_exists(tier.root, run, runs)
    # Read manifests before packs, so that a concurrent commit is omitted. Otherwise its partitions would seem lost.
    needs: list[_Needs] = []
    for name in runs:
        line = known_line(tier, name)
        needs += [_needs_of(tier, listing, line) for listing in tier.manifests.checkpoints(name)]
    frames = _FrameTable(tier)
    totals = _Totals(tier, needs, frames)
    # A training may have deleted checkpoints meanwhile. Their partitions are not lost, because manifests are deleted
    # before packs are freed.
    kept = [
        need
        for need, missing in zip(needs, totals.missing_partitions(), strict=True)
        if (need.item.complete and not missing) or not tier.manifests.is_deleted(need.listing)
    ]
    if len(kept) < len(needs):
        totals = _Totals(tier, kept, frames)
    return totals.result(run)


@dataclasses.dataclass(frozen=True)
class _Needs:
    """A checkpoint, and its references to partitions."""

    item: CheckpointBytes  # facts from manifests; sums over frames are 0
    listing: CheckpointFiles
    unreadable: int  # number of unreadable manifests
    state_by_role: _Ints
    extents: _Table  # one row per extent; the column ``checkpoint`` is not set


def _needs_of(tier: NvmeTier, listing: CheckpointFiles, line: Lineage | None) -> _Needs:
    state_by_role = np.zeros(len(_ROLES), dtype=np.int64)
    unreadable, tables = 0, list[_Table]()
    for _, manifest in each_manifest(tier, listing):
        if isinstance(manifest, AsymcheckError):
            unreadable += 1
            continue
        roles = np.array([_ROLES[role] for role in manifest.roles()], dtype=np.int64)
        np.add.at(state_by_role, roles, manifest.nbytes)
        extents = np.empty(len(manifest.extent_digests), dtype=_EXTENTS)
        extents["digest"], extents["length"] = manifest.extent_digests, manifest.extent_lengths
        extents["role"] = np.repeat(roles, np.diff(manifest.extent_starts))
        tables.append(extents)
    checkpoint = CheckpointBytes(
        run=listing.run,
        step=listing.ref.step,
        generation=listing.ref.generation,
        save_id=listing.ref.save_id.hex(),
        complete=listing.is_complete and len(tables) == len(listing.manifests),
        on_line=None if line is None else listing.ref in line,
        state_bytes=int(state_by_role.sum()),
        manifest_bytes=sum(tier.manifests.sizes(listing).values()),
    )
    all_extents = np.concatenate([np.empty(0, dtype=_EXTENTS), *tables])
    return _Needs(checkpoint, listing, unreadable, state_by_role, all_extents)


class _FrameTable:
    """Frames of all packs, one row per frame."""

    def __init__(self, tier: NvmeTier) -> None:
        self.frames: list[_Table] = []
        self.file_bytes: list[int] = []
        self.is_damaged: list[bool] = []
        self.unreadable = 0
        self.unreadable_bytes = 0
        for pack_id, pack in every_pack(tier, tier.open_pack):
            # The content of a pack that a save or a collection has locked does not change under its name.
            found = result_or_error(tier.peek, pack_id) if isinstance(pack, LockTimeoutError) else pack
            self._add(tier.pack_path(pack_id), found)

    def _add(self, path: Path, pack: Opened | PackIndex) -> None:
        if isinstance(pack, MissingPartitionError):
            return  # recycled since the listing
        try:
            nbytes = path.stat().st_size
        except OSError:
            return  # deleted since the listing
        if isinstance(pack, AsymcheckError):
            self.unreadable_bytes += nbytes
            self.unreadable += 1
            return
        frames = np.empty(len(pack.entries), dtype=_FRAMES)
        frames["digest"], frames["base"] = pack.entries["digest"], pack.entries["base_digest"]
        frames["kind"], frames["length"] = pack.entries["kind"], frame_lengths(pack.entries)
        frames["pack"] = len(self.file_bytes)
        self.frames.append(frames)
        self.file_bytes.append(nbytes)
        self.is_damaged.append(pack.damage is not None)


class _Totals:
    """Sums over partitions, with dense integer ids."""

    def __init__(self, tier: NvmeTier, needs: Sequence[_Needs], frames: _FrameTable) -> None:
        self.tier, self.needs, self.frames = tier, needs, frames
        self.extents = np.concatenate([np.empty(0, dtype=_EXTENTS), *(need.extents for need in needs)])
        self.extents["checkpoint"] = np.repeat(np.arange(len(needs)), [len(need.extents) for need in needs])
        stored = np.concatenate([np.empty(0, dtype=_FRAMES), *frames.frames])
        based = stored[stored["kind"] != registry.KIND_FULL]
        digests = np.concatenate([self.extents["digest"], stored["digest"], based["digest"], based["base"]])
        digest_set = DigestSet(digests)
        numbers, self.count = digest_set.numbers(digests), len(digest_set)
        ends = np.cumsum([len(self.extents), len(stored), len(based)])
        self.needed, self.stored, with_base, bases = np.split(numbers, ends)
        self.lengths, self.packs = stored["length"], stored["pack"]
        self.bytes_of = _sum_by_key(self.stored, self.lengths, self.count)
        width = max(self.count, 1)
        direct = np.unique(self.extents["checkpoint"] * width + self.needed)
        # Garbage collection keeps the bases of all frames of a needed partition.
        self.pair_users, self.pair_needs = np.divmod(_with_bases(direct, width, with_base, bases), width)
        full = self.stored[stored["kind"] == registry.KIND_FULL]
        is_lost = ~_decodable(full, with_base, bases, self.count)[with_base]
        self.required = np.divmod(_with_bases(direct, width, with_base[is_lost], bases[is_lost]), width)
        self.users_of = np.bincount(self.pair_needs, minlength=self.count)

    def result(self, run: str | None) -> DiskUsage:
        tier, needs, frames = self.tier, self.needs, self.frames
        chosen = np.array([run in (None, need.item.run) for need in needs], dtype=bool)
        unreadable = sum(need.unreadable for need in needs)
        live = self.users_of[self.stored] > 0
        has_live = _sum_by_key(self.packs, live.astype(np.int64), len(frames.file_bytes)) > 0
        # Collection keeps packs with a damaged index, and all packs while a manifest is unreadable.
        kept = has_live | np.array(frames.is_damaged, dtype=bool) | (unreadable > 0)
        file_bytes = np.array(frames.file_bytes, dtype=np.int64)
        live_bytes = int(self.lengths[live].sum())
        locked_bytes = int(self.lengths[~live & kept[self.packs]].sum())
        pooled = tier.pool.sizes().values()
        return DiskUsage(
            store_id=tier.descriptor.store_id.hex(),
            checkpoints=self._checkpoints(chosen),
            roles=self._by_role(chosen),
            packs=len(file_bytes) + frames.unreadable,
            pack_bytes=int(file_bytes.sum()) + frames.unreadable_bytes,
            live_bytes=live_bytes,
            locked_bytes=locked_bytes,
            freeable_packs=int((~kept).sum()),
            freeable_bytes=int(file_bytes[~kept].sum()),
            overhead_bytes=int(file_bytes[kept].sum()) - live_bytes - locked_bytes,
            damaged_packs=sum(frames.is_damaged) + frames.unreadable,
            unreadable_bytes=frames.unreadable_bytes,
            pooled_packs=len(pooled),
            pooled_bytes=sum(pooled),
            unfinished_bytes=_bytes_in(tier, tier.packs, "st_size", layout.is_pack_temporary),
            manifests=sum(len(need.listing.manifests) for need in needs),
            manifest_bytes=sum(need.item.manifest_bytes for need in needs),
            unreadable_manifests=unreadable,
            # Count allocated blocks, because the catalog is a sparse file.
            catalog_bytes=_bytes_in(tier, tier.root / layout.CATALOG, "st_blocks") * _STAT_BLOCK,
        )

    def missing_partitions(self) -> list[int]:
        """Return the number of partitions of each checkpoint that are in no readable pack."""
        users, required = self.required
        # Frames are never empty, so a partition of 0 bytes is in no pack.
        is_missing = (self.bytes_of[required] == 0).astype(np.int64)
        missing: list[int] = _sum_by_key(users, is_missing, len(self.needs)).tolist()
        return missing

    def _checkpoints(self, chosen: npt.NDArray[np.bool_]) -> tuple[CheckpointBytes, ...]:
        items = [need.item for need in self.needs]
        bytes_of, is_own = self.bytes_of[self.pair_needs], self.users_of[self.pair_needs] == 1
        stored = _sum_by_key(self.pair_users, bytes_of, len(items)).tolist()
        own = _sum_by_key(self.pair_users, bytes_of * is_own, len(items)).tolist()
        new = _sum_by_key(self.pair_users, bytes_of * self._is_first_user(), len(items)).tolist()
        missing = self.missing_partitions()
        return tuple(
            dataclasses.replace(
                item,
                stored_bytes=stored[number],
                own_bytes=own[number],
                shared_bytes=stored[number] - own[number],
                new_bytes=new[number],
                missing_partitions=missing[number],
            )
            for number, item in enumerate(items)
            if chosen[number]
        )

    def _is_first_user(self) -> npt.NDArray[np.bool_]:
        """Tell for each pair of checkpoint and partition whether no earlier save needs the partition."""
        items = [need.item for need in self.needs]
        age = np.empty(len(items), dtype=np.int64)
        age[sorted(range(len(items)), key=lambda number: items[number].save_id)] = np.arange(len(items))
        ages = age[self.pair_users]
        first = np.full(self.count, len(items), dtype=np.int64)
        np.minimum.at(first, self.pair_needs, ages)
        is_first: npt.NDArray[np.bool_] = ages == first[self.pair_needs]
        return is_first

    def _by_role(self, chosen: npt.NDArray[np.bool_]) -> tuple[RoleBytes, ...]:
        state = np.zeros(len(_ROLES), dtype=np.int64)
        for need in itertools.compress(self.needs, chosen):
            state += need.state_by_role
        is_counted = chosen[self.extents["checkpoint"]]
        extents = self.extents[is_counted]
        stored = _divide_by_role(self.needed[is_counted], extents["role"], extents["length"], self.bytes_of)
        return tuple(
            RoleBytes(role, int(state[number]), int(stored[number]))
            for role, number in _ROLES.items()
            if state[number] or stored[number]
        )


def _sum_by_key(keys: _Ints, values: _Ints, count: int) -> _Ints:
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, keys, values)
    return sums


def _divide_by_role(partitions: _Ints, roles: _Ints, weights: _Ints, bytes_of: _Ints) -> _Ints:
    """Divide the bytes of each partition among roles by weight. Return the bytes of each role, which add up."""
    total = _sum_by_key(partitions, weights, len(bytes_of))
    shares = bytes_of[partitions] * (weights / np.maximum(total[partitions], 1))
    by_role = np.bincount(roles, weights=shares, minlength=len(_ROLES))
    ends: _Ints = np.rint(np.cumsum(by_role)).astype(np.int64)
    return ends - np.append(np.zeros(1, dtype=np.int64), ends[:-1])


def _bytes_in(tier: NvmeTier, folder: Path, field: str, wanted: Callable[[str], bool] = bool) -> int:
    total = 0
    for name in filter(wanted, tier.files.list(folder)):
        with contextlib.suppress(OSError):  # renamed or removed since the listing
            total += getattr((folder / name).stat(), field)
    return total


def _decodable(full: _Ints, based: _Ints, bases: _Ints, count: int) -> npt.NDArray[np.bool_]:
    """Tell for each partition whether it is stored in full, or on a base that is decodable."""
    decodable = np.zeros(count, dtype=bool)
    new = full
    while len(new):
        decodable[new] = True
        new = based[decodable[bases] & ~decodable[based]]
    return decodable


def _with_bases(pairs: _Ints, count: int, based: _Ints, bases: _Ints) -> _Ints:
    """Add the bases of needed partitions, transitively, to pairs of user and partition."""
    order = np.argsort(based, kind="stable")
    based, bases = based[order], bases[order]
    while len(based):
        users, needs = np.divmod(pairs, count)
        starts, ends = np.searchsorted(based, needs), np.searchsorted(based, needs, side="right")
        counts = ends - starts
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        added = np.repeat(users, counts) * count + bases[np.repeat(starts, counts) + within]
        merged: _Ints = np.unique(np.concatenate([pairs, added]))
        if len(merged) == len(pairs):
            break
        pairs = merged
    return pairs
