"""Reachability for garbage collection: partitions that checkpoints need, and the packs that hold them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import time
from collections.abc import Collection
from pathlib import PurePath

import numpy as np
import numpy.typing as npt

from asymcheck.errors import (
    INCONCLUSIVE,
    AsymcheckError,
    FormatError,
    InconsistentCheckpointError,
    LockTimeoutError,
    MissingPartitionError,
    StorageError,
    StructureError,
    UnsupportedFormatError,
)
from asymcheck.format import layout, registry
from asymcheck.format.catalog_records import manifest_key
from asymcheck.format.pack import Entries, frame_lengths
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.local_files import translated
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import Catalog, NvmeTier, Transaction
from asymcheck.storage.pack_index import bases_in, digests_of
from asymcheck.types import CheckpointRef, Digest, PackId

_ATTEMPTS = 8
_PAUSE_S = 0.02

NamedCheckpoint = tuple[str, CheckpointRef]
"""Name of a run and one of its checkpoints."""


class HeldFrames:
    """Frames of one intact pack."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.names = digests_of(entries)
        self.lengths: npt.NDArray[np.int64] = frame_lengths(entries).astype(np.int64)
        """Bytes of each frame, including header and padding."""


class Reachability(abc.ABC):
    """Mark phase of a collection: partitions that manifests name, and frames in packs. Not thread-safe."""

    _UNREADABLE: tuple[type[AsymcheckError], ...] = (FormatError, MissingPartitionError)
    """Errors that are caused by a manifest and not by its storage."""

    def __init__(self, tier: ReadTier, refusal: str, without: Collection[NamedCheckpoint] = ()) -> None:
        """Treat the checkpoints in ``without`` as deleted. Errors begin with ``refusal``."""
        self.tier = tier
        """Store or remote location to collect."""
        self._refusal = refusal
        self._without = frozenset(without)
        self._digests: dict[bytes, bytes] = {}
        self._users: dict[Digest, int] = {}
        self._bases: dict[PackId, dict[Digest, Digest]] = {}
        self.packs: dict[PackId, HeldFrames] = {}
        """Intact packs that could be read."""
        self.problem: AsymcheckError | None = None
        """Reason why the bases of some partitions are unknown, so that no pack may be freed."""

    def refresh(self) -> None:
        """Read new manifests, then new packs. Partitions and bases are stored before the manifest that needs them.

        Raises:
            InconsistentCheckpointError: a manifest cannot be read, so its partitions are unknown.
        """
        self._read_manifests()
        self._read_packs()

    def _read_manifests(self) -> set[bytes]:
        """Read new manifests; return the keys of all manifests."""
        keys = set()
        manifests = self.tier.manifests
        for run in manifests.runs():
            listings = [one for one in manifests.checkpoints(run) if (run, one.ref) not in self._without]
            keys |= {manifest_key(run, listing.ref, name) for listing in listings for name in listing.manifests}
            for listing in manifests.each(map(self._unread, listings)):
                for name in manifests.each_name(listing):
                    key = manifest_key(run, listing.ref, name)
                    try:
                        manifest = manifests.read(run, listing.ref, name)
                    except INCONCLUSIVE:
                        raise
                    except self._UNREADABLE as error:
                        if name not in manifests.listing(run, listing.ref).manifests:
                            # The manifest was deleted after the listing.
                            continue
                        raise InconsistentCheckpointError(
                            f"{self._refusal}, because the partitions of a damaged manifest are unknown: {error}; "
                            f"delete that checkpoint first: {listing.deletion}"
                        ) from error
                    self._digests[key] = b"".join(manifest.partitions())
                    self._count(self._digests[key], 1)
        return keys

    def _unread(self, listing: CheckpointFiles) -> CheckpointFiles:
        """Return the manifests of a checkpoint that were not read yet."""
        new = [name for name in listing.manifests if manifest_key(listing.run, listing.ref, name) not in self._digests]
        return dataclasses.replace(listing, manifests=tuple(new))

    def checkpoints(self) -> int:
        """Return the number of checkpoints whose manifests were read."""
        return len({key.rpartition(b"/")[0] for key in self._digests})

    def _count(self, digests: bytes, change: int) -> None:
        for name in np.frombuffer(digests, dtype=f"V{registry.DIGEST_BYTES}").tolist():
            users = self._users.get(name, 0) + change
            if users:
                self._users[name] = users
            else:
                del self._users[name]

    @abc.abstractmethod
    def _read_packs(self) -> None:
        """Read the indexes of new packs."""

    def live(self) -> set[Digest]:
        """Return the digests that manifests name, with all direct and indirect bases."""
        bases: dict[Digest, set[Digest]] = {}
        for based in self._bases.values():
            for name, base in based.items():
                bases.setdefault(name, set()).add(base)
        needed = set(self._users)
        new = needed & bases.keys()
        while new:
            further = set().union(*(bases[name] for name in new))
            new = (further - needed) & bases.keys()
            needed |= further
        return needed

    def garbage(self) -> dict[PackId, list[Digest]]:
        """Return the intact packs without a live partition, with the digests of their frames."""
        live = self.live()
        return {pack_id: held.names for pack_id, held in self.packs.items() if live.isdisjoint(held.names)}


class StoreReachability(Reachability):
    """Reachable partitions of a local store, updated incrementally from collection to collection."""

    _UNREADABLE = (FormatError, MissingPartitionError, StorageError)
    tier: NvmeTier

    def __init__(self, tier: NvmeTier, without: Collection[NamedCheckpoint] = ()) -> None:
        """Treat the checkpoints in ``without`` as deleted."""
        super().__init__(tier, "nothing was freed", without)
        self.unread = 0
        """Number of packs that could not be read: locked by a writer, or damaged."""
        self.unmovable: set[PackId] = set()
        """Packs with a damaged live frame, which cannot be repacked."""
        self.unsettled: Collection[NamedCheckpoint] = ()
        """Checkpoints without all manifests, or with temporary files."""

    def _read_manifests(self) -> set[bytes]:
        """Read new manifests and forget deleted ones; return the keys of all manifests.

        Raises:
            StructureError: the folder of manifests is missing.
        """
        keys = super()._read_manifests()
        # A manifest must not return after a power loss, once its packs are freed.
        self.unsettled = self.tier.manifests.sync_deletions()
        for key in self._digests.keys() - keys:
            self._count(self._digests.pop(key), -1)
        # Check after reading: the folder may have been moved away since the store was opened.
        self.tier.refuse_lost_manifests()
        return keys

    def since(self, catalog: Catalog) -> tuple[set[bytes], set[bytes]]:
        """Return the manifests in the catalog that are new since the last :meth:`refresh`, and those that were deleted.

        Raises:
            StructureError: all manifests are missing, and not because they were deleted.
        """
        for attempt in range(_ATTEMPTS):
            # Several concurrent deletions look the same for a moment.
            time.sleep(attempt * _PAUSE_S)
            with catalog.read() as transaction:
                named = transaction.manifests()
            unseen = named - self._digests.keys()
            gone = {key for key in unseen if is_manifest_deleted(self.tier, key)}
            if gone != named or not self._are_lost(gone):
                return unseen - gone, gone
        raise StructureError(
            f"store {self.tier.root}: all manifests that its catalog names are missing, so nothing was freed. "
            f"Restore the folder {layout.MANIFESTS} from its new location or from a copy. "
            f"Only if the manifests were removed on purpose, run asymcheck rebuild-catalog {self.tier.root}"
        )

    def _are_lost(self, gone: Collection[bytes]) -> bool:
        """Tell whether more manifests are missing than deletions explain.

        A deletion also removes the catalog entries. A killed deletion leaves the entries of one checkpoint, and the
        folder of the run, which no deletion removes.
        """
        checkpoints = {path.parent for path in map(_path_of, gone) if path is not None}
        return len(checkpoints) > 1 or not all((self.tier.root / path.parent).is_dir() for path in checkpoints)

    def _read_packs(self) -> None:
        listed = self.tier.pack_ids()
        present = set(listed)
        self.packs = {pack_id: held for pack_id, held in self.packs.items() if pack_id in present}
        self._bases = {pack_id: bases for pack_id, bases in self._bases.items() if pack_id in present}
        self.unmovable &= present
        self.unread, self.problem = 0, None
        for pack_id in listed:
            if pack_id not in self.packs:
                try:
                    self._read_pack(pack_id)
                except MissingPartitionError:
                    continue
                except (UnsupportedFormatError, StorageError) as error:
                    self.unread += 1
                    if pack_id not in self._bases and self._is_file(pack_id):
                        self.problem = error
                except FormatError:
                    self.unread += 1

    def _read_pack(self, pack_id: PackId) -> None:
        try:
            pack = self.tier.open_pack(pack_id, wait=False)
        except (FormatError, LockTimeoutError):
            # A writer or another collection holds the lock. The content of the pack no longer changes.
            self._scan(pack_id)
            raise
        pack.close()
        if pack.damage is not None:
            self._scan(pack_id)
            raise pack.damage
        self._bases[pack_id] = bases_in(pack.entries)
        self.packs[pack_id] = HeldFrames(pack.entries)

    def _scan(self, pack_id: PackId) -> None:
        """Find the bases of all frames of a pack, which may contain the only copy of a live partition."""
        if pack_id not in self._bases:
            try:
                self._bases[pack_id] = bases_in(self.tier.peek(pack_id).entries)
            except UnsupportedFormatError:
                raise
            except FormatError:
                # No reader can find a frame in this pack.
                self._bases[pack_id] = {}

    def is_current(self, transaction: Transaction, gone: Collection[bytes], but: Collection[PackId] = ()) -> bool:
        """Tell whether the last :meth:`refresh` is still valid. Call it in the transaction that frees packs.

        A newer manifest may need the packs. A frame in a newer pack may be encoded against partitions that seem to be
        garbage. A pull may have restored one of the deleted manifests ``gone`` under its old name. The packs of the
        caller, ``but``, are ignored.
        """
        unknown = transaction.manifests() - self._digests.keys() - {*gone}
        if unknown or not all(is_manifest_deleted(self.tier, key) for key in gone):
            return False
        unseen = set(self.tier.pack_ids()) - self._bases.keys() - {*but}
        return not any(
            transaction.pack_state(pack_id) != registry.PACK_FREED and self._is_file(pack_id) for pack_id in unseen
        )

    def enter_manifests(self, transaction: Transaction) -> None:
        """Enter the manifests that the last :meth:`refresh` found and the catalog lacks: their writers were killed."""
        for key in self._digests.keys() - transaction.manifests():
            path = _path_of(key)
            # A deletion removes the file first, and the entry later.
            with contextlib.suppress(FileNotFoundError):
                if path is not None:
                    transaction.put_manifest(key, (self.tier.root / path).stat().st_size)

    def _is_file(self, pack_id: PackId) -> bool:
        """Tell whether a pack is a file, and not a folder or a dangling link."""
        path = self.tier.pack_path(pack_id)
        with translated("access", path):
            return path.is_file()


def pinned_packs(transaction: Transaction, but: Collection[bytes] = ()) -> set[PackId]:
    """Return the packs pinned by saves in progress, except by the pins with the keys ``but``."""
    return {pack_id for key, (_, packs) in transaction.pins().items() if key not in but for pack_id in packs}


def is_manifest_deleted(tier: NvmeTier, key: bytes) -> bool:
    """Tell whether a manifest in the catalog was deleted, or its key is not a valid name of a manifest."""
    path = _path_of(key)
    if path is None:
        return True
    with translated("access", tier.root / path):
        return not (tier.root / path).exists()


def _path_of(key: bytes) -> PurePath | None:
    """Return the path of a manifest, relative to the store; None if the key is not a valid name."""
    run, folder, name = [*os.fsdecode(key).split("/", 2), "", ""][:3]
    if not layout.is_run(run) or layout.parse_checkpoint_name(folder) is None or not layout.parse_manifest_name(name):
        return None
    return PurePath(layout.MANIFESTS, run, folder, name)
