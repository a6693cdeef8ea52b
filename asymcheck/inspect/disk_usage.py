"""Accounting: which checkpoint and which role needs how many bytes, and what collection would free.

Reads manifests and the indexes of packs, never a tensor and never the catalog. Partitions are counted as numbers in
arrays, so that a million of them are a matter of seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asymcheck.errors import AsymcheckError, MissingPartitionError
from asymcheck.format import layout, registry
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.manifest import Manifest
from asymcheck.format.pack import frame_lengths
from asymcheck.fsck.frame_scanner import Opened, each_manifest, each_pack
from asymcheck.restore.lineage import Lineage
from asymcheck.restore.resolve import check_run_exists
from asymcheck.storage.nvme import NvmeTier

_Ints = npt.NDArray[np.int64]
_STAT_BLOCK = 512
_ROLES = {role: number for number, role in enumerate(registry.ROLES)}


@dataclasses.dataclass(frozen=True)
class CheckpointBytes:
    """Disk usage of one checkpoint. Stored bytes are those of whole frames: header, payload and padding."""

    run: str
    step: int
    generation: int
    save_id: str
    """The attempt that saved it, 32 hexadecimal digits."""
    complete: bool
    """Whether the manifests of all ranks are there and can be read."""
    on_line: bool
    """Whether it leads to the present."""
    state_bytes: int
    stored_bytes: int
    """Stored bytes of the partitions that it refers to, each counted once."""
    own_bytes: int
    """Those that no other checkpoint of any run refers to: what deleting it makes garbage."""
    shared_bytes: int
    """The rest of ``stored_bytes``."""
    manifest_bytes: int
    """Bytes of its manifests, which deleting it gives back at once."""
    missing_partitions: int
    """Partitions of the checkpoint that are in no readable pack."""


@dataclasses.dataclass(frozen=True)
class RoleBytes:
    """Disk usage of the tensors of one role, in all listed checkpoints together."""

    role: str
    state_bytes: int
    stored_bytes: int
    """Stored bytes of their partitions, each counted once; of one with several roles, a share by their bytes in it."""


@dataclasses.dataclass(frozen=True)
class DiskUsage:
    """Disk usage of a store, by purpose.

    ``pack_bytes`` is the sum of ``live_bytes``, ``locked_bytes``, ``freeable_bytes``, ``overhead_bytes`` and
    ``unreadable_bytes``. Uncommitted bytes of a save in progress look like garbage.
    """

    store_id: str
    """The store's id, 32 hexadecimal digits."""
    checkpoints: tuple[CheckpointBytes, ...]
    """The checkpoints, or those of one run, oldest first."""
    roles: tuple[RoleBytes, ...]
    packs: int
    pack_bytes: int
    live_bytes: int
    """Bytes of frames that a checkpoint of any run refers to, further copies of a partition included."""
    locked_bytes: int
    """Bytes of frames that none refers to, in packs that collection keeps: for the sake of other frames of them, or
    because their index is damaged. While a manifest is unreadable, it keeps all packs."""
    freeable_packs: int
    """Number of packs that collection would free: they hold no live frame."""
    freeable_bytes: int
    overhead_bytes: int
    """Headers and indexes of the other packs, and what is left in their files of an earlier life."""
    damaged_packs: int
    """Number of packs whose header or index is damaged; collection keeps them."""
    unreadable_bytes: int
    """Bytes of files of packs of which nothing can be read."""
    pooled_packs: int
    """Number of freed packs kept to be overwritten."""
    pooled_bytes: int
    unfinished_bytes: int
    """Bytes of packs that are being written, or were when a process was killed."""
    manifests: int
    manifest_bytes: int
    unreadable_manifests: int
    """Number of manifests that cannot be read. Their partitions look like garbage; collection frees nothing."""
    catalog_bytes: int


def account(tier: NvmeTier, run: str | None = None) -> DiskUsage:
    """Count the bytes of a store; list the checkpoints of one run, or of all.

    Raises:
        CheckpointNotFoundError: the store has other runs, but not this one.
    """
    runs = tier.manifests.runs()
    if run is not None and runs:
        check_run_exists(tier.root, run, runs)
    needs, frames = _Needs(), _Frames()
    # In this order a checkpoint that is committed meanwhile is left out; in the other its partitions would seem lost.
    for name in runs:
        needs.add_run(tier, name)
    for pack_id, pack in each_pack(tier.pack_ids(), tier.open_pack):
        frames.add(tier.packs / layout.pack_name(pack_id), pack)
    return _Sums(tier, needs, frames).result(run)


class _Needs:
    """What all checkpoints refer to: one reference an extent, in columns."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointBytes] = []
        """Checkpoints by their manifests alone: the sums over frames are 0."""
        self.manifests = 0
        self.unreadable = 0
        self.digests: list[bytes] = []
        self.users: list[_Ints] = []
        self.roles: list[_Ints] = []
        self.lengths: list[_Ints] = []
        self.state_by_role: list[_Ints] = []

    def add_run(self, tier: NvmeTier, run: str) -> None:
        line = Lineage.read_or_empty(tier, run)
        for listing in tier.manifests.checkpoints(run):
            by_role = np.zeros(len(_ROLES), dtype=np.int64)
            manifest_bytes = read = 0
            for name in listing.manifests:
                path = tier.manifests.directory(run, listing.ref) / str(name)
                with contextlib.suppress(OSError):  # deleted since it was listed
                    manifest_bytes += path.stat().st_size
            for _, manifest in each_manifest(tier, listing):
                if isinstance(manifest, AsymcheckError):
                    self.unreadable += 1
                else:
                    self._add(manifest, by_role)
                    read += 1
            checkpoint = CheckpointBytes(
                run=run,
                step=listing.ref.step,
                generation=listing.ref.generation,
                save_id=listing.ref.save_id.hex(),
                complete=listing.is_complete and read == len(listing.manifests),
                on_line=listing.ref in line,
                state_bytes=int(by_role.sum()),
                stored_bytes=0,
                own_bytes=0,
                shared_bytes=0,
                manifest_bytes=manifest_bytes,
                missing_partitions=0,
            )
            self.checkpoints.append(checkpoint)
            self.manifests += len(listing.manifests)
            self.state_by_role.append(by_role)

    def _add(self, manifest: Manifest, by_role: _Ints) -> None:
        roles = np.array([_ROLES[role] for role in manifest.roles()], dtype=np.int64)
        np.add.at(by_role, roles, manifest.nbytes)
        self.digests.append(manifest.extent_digests.tobytes())
        self.roles.append(np.repeat(roles, np.diff(manifest.extent_starts)))
        self.lengths.append(manifest.extent_lengths)
        self.users.append(np.full(len(manifest.extent_digests), len(self.checkpoints), dtype=np.int64))


class _Frames:
    """What all packs hold: one entry a frame, in columns."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.based: list[bytes] = []
        self.bases: list[bytes] = []
        self.lengths: list[_Ints] = []
        self.packs: list[_Ints] = []
        self.file_bytes: list[int] = []
        self.is_damaged: list[bool] = []
        self.unreadable = 0
        self.unreadable_bytes = 0

    def add(self, path: Path, pack: Opened) -> None:
        if isinstance(pack, MissingPartitionError):
            return  # recycled since it was listed
        if isinstance(pack, AsymcheckError):
            with contextlib.suppress(OSError):  # as above
                self.unreadable_bytes += path.stat().st_size
                self.unreadable += 1
            return
        # While it is open it is locked, so the file is there and is still this pack.
        self.file_bytes.append(path.stat().st_size)
        self.is_damaged.append(pack.damage is not None)
        self.digests.append(pack.entries["digest"].tobytes())
        based = pack.entries[pack.entries["kind"] != registry.KIND_FULL]
        self.based.append(based["digest"].tobytes())
        self.bases.append(based["base_digest"].tobytes())
        self.lengths.append(frame_lengths(pack.entries).astype(np.int64))
        self.packs.append(np.full(len(pack.entries), len(self.file_bytes) - 1, dtype=np.int64))


class _Sums:
    """The sums, over partitions that are numbered from 0."""

    def __init__(self, tier: NvmeTier, needs: _Needs, frames: _Frames) -> None:
        self.tier, self.needs, self.frames = tier, needs, frames
        users, self.roles, self.role_bytes = _joined(needs.users), _joined(needs.roles), _joined(needs.lengths)
        digests = b"".join(needs.digests + frames.digests + frames.based + frames.bases)
        column = np.frombuffer(digests, dtype=f"V{registry.DIGEST_BYTES}")
        known = DigestSet(column)
        numbers, self.count = known.numbers(column), len(known)
        stored = sum(map(len, frames.digests)) // registry.DIGEST_BYTES
        self.needed, self.stored, based = np.split(numbers, [len(users), len(users) + stored])
        self.users = users
        self.lengths, self.packs = _joined(frames.lengths), _joined(frames.packs)
        self.bytes_of = _summed(self.stored, self.lengths, self.count)
        pairs = np.unique(users * max(self.count, 1) + self.needed)
        pairs = _with_bases(pairs, max(self.count, 1), *np.split(based, 2))
        self.pair_users, self.pair_needs = np.divmod(pairs, max(self.count, 1))
        self.users_of = np.bincount(self.pair_needs, minlength=self.count)

    def result(self, run: str | None) -> DiskUsage:
        tier, needs, frames = self.tier, self.needs, self.frames
        chosen = np.array([run in (None, item.run) for item in needs.checkpoints], dtype=bool)
        live = self.users_of[self.stored] > 0
        held = _summed(self.packs, live.astype(np.int64), len(frames.file_bytes)) > 0
        # Collection leaves a pack alone whose index it cannot trust, and all packs when it cannot know what is needed.
        kept = held | np.array(frames.is_damaged, dtype=bool) | (needs.unreadable > 0)
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
            manifests=needs.manifests,
            manifest_bytes=sum(item.manifest_bytes for item in needs.checkpoints),
            unreadable_manifests=needs.unreadable,
            # In blocks: the size of a sparse file says nothing.
            catalog_bytes=_bytes_in(tier, tier.root / layout.CATALOG, "st_blocks") * _STAT_BLOCK,
        )

    def _checkpoints(self, chosen: npt.NDArray[np.bool_]) -> tuple[CheckpointBytes, ...]:
        items = self.needs.checkpoints
        bytes_of, alone = self.bytes_of[self.pair_needs], self.users_of[self.pair_needs] == 1
        stored = _summed(self.pair_users, bytes_of, len(items)).tolist()
        own = _summed(self.pair_users, bytes_of * alone, len(items)).tolist()
        # A frame is never empty, so a partition of no bytes lies nowhere.
        missing = _summed(self.pair_users, (bytes_of == 0).astype(np.int64), len(items)).tolist()
        return tuple(
            dataclasses.replace(
                item,
                stored_bytes=stored[number],
                own_bytes=own[number],
                shared_bytes=stored[number] - own[number],
                missing_partitions=missing[number],
            )
            for number, item in enumerate(items)
            if chosen[number]
        )

    def _by_role(self, chosen: npt.NDArray[np.bool_]) -> tuple[RoleBytes, ...]:
        state = sum(
            (by_role for by_role, wanted in zip(self.needs.state_by_role, chosen, strict=True) if wanted),
            np.zeros(len(_ROLES), dtype=np.int64),
        )
        counted = chosen[self.users] if len(self.users) else np.zeros(0, dtype=bool)
        keys = self.needed[counted] * len(_ROLES) + self.roles[counted]
        stored = _shared_out(keys, self.role_bytes[counted], self.bytes_of)
        return tuple(
            RoleBytes(role, int(state[number]), int(stored[number]))
            for role, number in _ROLES.items()
            if state[number] or stored[number]
        )


def _joined(columns: list[_Ints]) -> _Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *columns])


def _summed(keys: _Ints, values: _Ints, count: int) -> _Ints:
    """Return the sum of the values of each key from 0 to ``count`` - 1, in integers."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, keys, values)
    return sums


def _shared_out(keys: _Ints, weights: _Ints, bytes_of: _Ints) -> _Ints:
    """Return the bytes of each role, when each partition's are shared out among the roles by weight.

    A key is the number of a partition times the number of roles, plus that of a role. The shares of a partition are
    whole numbers that add up to its bytes.
    """
    pairs, place = np.unique(keys, return_inverse=True)
    partitions, roles = np.divmod(pairs, len(_ROLES))
    sums = np.cumsum(_summed(place, weights, len(pairs)))
    # The pairs of a partition are neighbours: a share is what lies between two marks on its bytes.
    is_first = np.diff(partitions, prepend=-1) > 0
    is_last = np.append(is_first[1:], True)[: len(pairs)]
    group = np.cumsum(is_first) - 1
    before = np.concatenate([np.zeros(1, dtype=np.int64), sums])[:-1]
    low, high = before[is_first][group], sums[is_last][group]
    spans = np.maximum(high - low, 1)
    ends = np.floor(bytes_of[partitions] * ((sums - low) / spans)).astype(np.int64)
    starts = np.floor(bytes_of[partitions] * ((before - low) / spans)).astype(np.int64)
    return _summed(roles, ends - starts, len(_ROLES))


def _bytes_in(tier: NvmeTier, folder: Path, field: str, wanted: Callable[[str], bool] = bool) -> int:
    total = 0
    for name in filter(wanted, tier.files.list(folder)):
        with contextlib.suppress(OSError):  # finished, removed or set aside since it was listed
            total += getattr((folder / name).stat(), field)
    return total


def _with_bases(pairs: _Ints, count: int, based: _Ints, bases: _Ints) -> _Ints:
    """Who needs a partition needs what it is encoded against, too: add these pairs of user and partition."""
    order = np.argsort(based, kind="stable")
    based, bases = based[order], bases[order]
    while len(based):
        users, needs = np.divmod(pairs, count)
        first, behind = np.searchsorted(based, needs), np.searchsorted(based, needs, side="right")
        times = behind - first
        within = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
        more = np.repeat(users, times) * count + bases[np.repeat(first, times) + within]
        together: _Ints = np.unique(np.concatenate([pairs, more]))
        if len(together) == len(pairs):
            break
        pairs = together
    return pairs
