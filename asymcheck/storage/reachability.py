"""Reachability: which partitions the checkpoints of a store or a remote location need, and which packs hold them."""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Collection, Iterator
from pathlib import PurePath

import numpy as np
import numpy.typing as npt

from asymcheck.errors import (
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
from asymcheck.storage.nvme import Catalog, NvmeTier, Transaction, bases_in
from asymcheck.storage.pack_index import digests_of
from asymcheck.types import CheckpointRef, Digest, PackId

_ATTEMPTS = 8
_PAUSE_S = 0.02

NamedCheckpoint = tuple[str, CheckpointRef]
"""A run and a checkpoint of it."""


class HeldFrames:
    """The index of one sound pack."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        """The rows of the index."""
        self.names = digests_of(entries)
        """Digests of the frames, in order."""
        self.lengths: npt.NDArray[np.int64] = frame_lengths(entries).astype(np.int64)
        """Bytes of each frame, with header and padding."""


class Reachability(abc.ABC):
    """The partitions that manifests name, and the frames that packs hold: the mark of a collection. For one thread."""

    _UNREADABLE: tuple[type[AsymcheckError], ...] = (FormatError, MissingPartitionError)
    """Errors of a manifest that are no errors of the place where it is stored."""

    def __init__(self, tier: ReadTier, refusal: str, without: Collection[NamedCheckpoint] = ()) -> None:
        """Begin with nothing read; the checkpoints in ``without`` count as deleted. Errors begin with ``refusal``."""
        self.tier = tier
        """The place."""
        self._refusal = refusal
        self._without = frozenset(without)
        self._digests: dict[bytes, bytes] = {}
        self._users: dict[Digest, int] = {}
        self._bases: dict[PackId, dict[Digest, Digest]] = {}
        self.packs: dict[PackId, HeldFrames] = {}
        """The packs that could be read and are sound."""
        self.problem: AsymcheckError | None = None
        """Why it is unknown what some partitions are encoded against, so that packs that seem to be garbage stay."""

    def look(self) -> None:
        """Read what is new: manifests first, for what they name, and its bases, was stored before them; then packs.

        Raises:
            InconsistentCheckpointError: a manifest cannot be read, so that what it needs is unknown.
        """
        self._look_at_manifests()
        self._look_at_packs()

    def _look_at_manifests(self) -> set[bytes]:
        """Read the manifests that have come; return the keys of all that are there."""
        found = set()
        manifests = self.tier.manifests
        for run in manifests.runs():
            for listing in manifests.checkpoints(run):
                if (run, listing.ref) in self._without:
                    continue
                for name in listing.manifests:
                    key = manifest_key(run, listing.ref, name)
                    found.add(key)
                    if key in self._digests:
                        continue
                    try:
                        manifest = manifests.read(run, listing.ref, name)
                    except self._UNREADABLE as error:
                        if name not in manifests.listing(run, listing.ref).manifests:
                            # Deleted since it was listed.
                            continue
                        raise InconsistentCheckpointError(
                            f"{self._refusal}, because what a damaged manifest needs is unknown: {error}; "
                            "delete that checkpoint first"
                        ) from error
                    self._digests[key] = b"".join(manifest.partitions())
                    self._count(self._digests[key], 1)
        return found

    def _count(self, digests: bytes, change: int) -> None:
        for name in _each(digests):
            users = self._users.get(name, 0) + change
            if users:
                self._users[name] = users
            else:
                del self._users[name]

    @abc.abstractmethod
    def _look_at_packs(self) -> None:
        """Read the indexes of the packs that have come."""

    def live(self) -> set[Digest]:
        """Return the digests that manifests name, what these are encoded against, and so on."""
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
        """Return the sound packs that hold nothing live, with what they hold."""
        live = self.live()
        return {pack_id: held.names for pack_id, held in self.packs.items() if live.isdisjoint(held.names)}


class StoreReachability(Reachability):
    """Reachable partitions of a store on a local drive, kept from one collection to the next."""

    _UNREADABLE = (FormatError, MissingPartitionError, StorageError)
    tier: NvmeTier

    def __init__(self, tier: NvmeTier, without: Collection[NamedCheckpoint] = ()) -> None:
        """Begin with nothing read; the checkpoints in ``without`` count as deleted."""
        super().__init__(tier, "nothing was freed", without)
        self.unread = 0
        """How many could not be read: held by a writer that has just sealed them, or damaged."""
        self.unmovable: set[PackId] = set()
        """Packs in which a needed frame was found to be damaged, so that not all that is needed can be copied."""

    def _look_at_manifests(self) -> set[bytes]:
        """Read what has come, and forget what has gone.

        Raises:
            StructureError: the folder of manifests is gone.
        """
        found = super()._look_at_manifests()
        for key in self._digests.keys() - found:
            self._count(self._digests.pop(key), -1)
        # After it was read: it may have been moved away meanwhile, and the store have been opened long before.
        self.tier.refuse_lost_manifests()
        return found

    def since(self, catalog: Catalog) -> tuple[set[bytes], set[bytes]]:
        """Return which of the manifests that the catalog names have come since the last look, and which are deleted.

        Raises:
            StructureError: they were not deleted, but all of them are gone.
        """
        for attempt in range(_ATTEMPTS):
            # Several deletions that are under way at once look like that, too, for a moment.
            time.sleep(attempt * _PAUSE_S)
            with catalog.read() as transaction:
                named = transaction.manifests()
            unseen = named - self._digests.keys()
            gone = {key for key in unseen if is_gone(self.tier, key)}
            if gone != named or not self._are_lost(gone):
                return unseen - gone, gone
        raise StructureError(
            f"store {self.tier.root}: all manifests that its catalog names are gone, and nothing was freed: put the "
            f"folder {layout.MANIFESTS} back, from where it was moved to or from a copy; only if they were removed on "
            f"purpose, run asymcheck rebuild-catalog {self.tier.root}"
        )

    def _are_lost(self, gone: Collection[bytes]) -> bool:
        """Tell whether manifests that are gone are so many that no deletion was.

        A deletion takes the catalog's entries with it. One that was killed in between leaves those of one checkpoint,
        and the folder of the run, which no deletion removes.
        """
        checkpoints = {path.parent for path in map(_path_of, gone) if path is not None}
        return len(checkpoints) > 1 or not all((self.tier.root / path.parent).is_dir() for path in checkpoints)

    def _look_at_packs(self) -> None:
        present = self.tier.pack_ids()
        there = set(present)
        self.packs = {pack_id: held for pack_id, held in self.packs.items() if pack_id in there}
        self._bases = {pack_id: bases for pack_id, bases in self._bases.items() if pack_id in there}
        self.unmovable &= there
        self.unread, self.problem = 0, None
        for pack_id in present:
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
            # Whoever sealed it, or frees another one for it, holds it. What it has does not change any more.
            self._scan(pack_id)
            raise
        pack.close()
        if pack.damage is not None:
            self._scan(pack_id)
            raise pack.damage
        self._bases[pack_id] = bases_in(pack.entries)
        self.packs[pack_id] = HeldFrames(pack.entries)

    def _scan(self, pack_id: PackId) -> None:
        """Find the bases of all that can be found in a pack, which may be all that there is of a live partition."""
        if pack_id not in self._bases:
            try:
                self._bases[pack_id] = bases_in(self.tier.peek(pack_id).entries)
            except UnsupportedFormatError:
                raise
            except FormatError:
                # Nothing in it can be found, by nobody.
                self._bases[pack_id] = {}

    def is_current(self, transaction: Transaction, gone: Collection[bytes], but: Collection[PackId] = ()) -> bool:
        """Return whether packs may be freed by the last look. Call it in the transaction that frees them.

        A manifest that came since then may need them. A frame in a pack of a later save or of another collection may
        need them, too, because it may be encoded against partitions that seem to be garbage.

        Args:
            transaction: names the manifests.
            gone: the manifests that were found to be deleted. A pull may have brought one back under its name.
            but: the caller's own packs.
        """
        if transaction.manifests() - self._digests.keys() - {*gone} or not all(is_gone(self.tier, key) for key in gone):
            return False
        unseen = set(self.tier.pack_ids()) - self._bases.keys() - {*but}
        return not any(
            transaction.pack_state(pack_id) != registry.PACK_FREED and self._is_file(pack_id) for pack_id in unseen
        )

    def _is_file(self, pack_id: PackId) -> bool:
        """Tell whether a pack is a file, and not a folder of its name, or a link that leads nowhere."""
        path = self.tier.packs / layout.pack_name(pack_id)
        with translated("look at", path):
            return path.is_file()


def pinned_packs(transaction: Transaction, but: Collection[bytes] = ()) -> set[PackId]:
    """Return the packs that saves under way need; the pins with the keys ``but`` do not count."""
    return {pack_id for key, (_, packs) in transaction.pins().items() if key not in but for pack_id in packs}


def _each(digests: bytes) -> Iterator[Digest]:
    size = registry.DIGEST_BYTES
    return (Digest(digests[start : start + size]) for start in range(0, len(digests), size))


def is_gone(tier: NvmeTier, key: bytes) -> bool:
    """Tell whether a manifest that the catalog names has been deleted, or could never be the name of one."""
    path = _path_of(key)
    if path is None:
        return True
    with translated("look for", tier.root / path):
        return not (tier.root / path).exists()


def _path_of(key: bytes) -> PurePath | None:
    """Return where in a store the manifest of a key lies; None when that could never be the name of one."""
    run, folder, name = [*os.fsdecode(key).split("/", 2), "", ""][:3]
    if not layout.is_run(run) or layout.parse_checkpoint_name(folder) is None or not layout.parse_manifest_name(name):
        return None
    return PurePath(layout.MANIFESTS, run, folder, name)
