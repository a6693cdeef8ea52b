"""Several places read as one tier: a store and a remote location behind it, or packs that are open and a tier."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from asymcheck.errors import (
    UNKNOWING,
    FormatError,
    MissingPartitionError,
    RemoteUnreachableError,
    StorageError,
    StoreNotFoundError,
    TooManyFilesError,
    UnreachableRemoteWarning,
    UnsupportedFormatError,
    warn_user,
)
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.format.record import HeadRecord
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import CheckpointRef, PackId

_T = TypeVar("_T")

# A location that did not answer is not asked again at once: each question may cost a deadline.
_SULK_S = 60.0


class RemoteFallback:
    """A remote location that is opened when it is needed. Threads may share it."""

    def __init__(self, name: str, connect: Callable[[], RemoteTier]) -> None:
        """Open what is called ``name`` by ``connect``."""
        self.name = name
        self._connect = connect
        self._tier: RemoteTier | None = None
        self._refused: tuple[float, RemoteUnreachableError] | None = None
        self._lock = threading.Lock()

    def tier(self) -> RemoteTier | None:
        """Return it; None when nothing at all is there yet.

        Raises:
            RemoteUnreachableError: it does not answer, cannot be opened, or could not a moment ago.
            InvalidInputError: there is no client for it.
        """
        with self._lock:
            if self._refused is not None and time.monotonic() < self._refused[0]:
                raise self._refused[1]
            if self._tier is None:
                with self._known():
                    self._tier = self._opened()
            return self._tier

    def _opened(self) -> RemoteTier | None:
        try:
            return self._connect()
        except StoreNotFoundError as error:
            if error.is_empty:
                return None
            raise RemoteUnreachableError(f"what was pushed is not known: {error}") from error
        except FormatError as error:
            raise RemoteUnreachableError(f"what lies in {self.name} is not known: {error}") from error

    def ask(self, question: Callable[[RemoteTier], Iterable[_T]]) -> list[_T]:
        """Return what it answers about the names that lie there; nothing when nothing at all is there yet.

        Raises:
            RemoteUnreachableError: nobody knows; see :meth:`tier`.
        """
        tier = self.tier()
        if tier is None:
            return []
        with self._known():
            return list(question(tier))

    @contextlib.contextmanager
    def _known(self) -> Iterator[None]:
        """Turn whatever it refuses into the error for what nobody knows, and remember that."""
        try:
            yield
        except TooManyFilesError:
            raise
        except RemoteUnreachableError as error:
            self._refused = (time.monotonic() + _SULK_S, error)
            raise
        except StorageError as error:
            found = RemoteUnreachableError(f"what lies in {self.name} is not known: {error}")
            self._refused = (time.monotonic() + _SULK_S, found)
            raise found from error

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            if self._tier is not None:
                self._tier.close()


class FallbackManifests(ManifestReader):
    """The manifests and head records of both. A manifest's bytes and its folder are those that lie near."""

    def __init__(self, near: NvmeTier, far: RemoteFallback) -> None:
        """Read ``near`` first."""
        super().__init__(near.files, near.root)
        self._near = near.manifests
        self._far = far
        self.has_parts = False
        """Whether checkpoints were looked at of which machines have a part each in their stores."""

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        return sorted({*self._near.runs(), *self._far.ask(lambda far: far.manifests.runs())})

    def checkpoints(self, run: str) -> list[CheckpointFiles]:
        """Return all checkpoints that have a manifest in one of them.

        Raises:
            RemoteUnreachableError: nothing lies near, and whether something lies far nobody knows.

        Warns:
            UnreachableRemoteWarning: only what lies near is known.
        """
        found = {listing.ref: listing for listing in self._near.checkpoints(run)}
        try:
            for listing in self._far.ask(lambda far: far.manifests.checkpoints(run)):
                known = found.get(listing.ref)
                found[listing.ref] = listing if known is None else self._joined(known, listing)
        except RemoteUnreachableError as error:
            if not found:
                raise
            warn_user(f"only what lies on this machine is known: {error}", UnreachableRemoteWarning)
        return [found[ref] for ref in sorted(found)]

    def refs(self, run: str) -> list[CheckpointRef]:
        """Return all checkpoints that have a folder in one of them."""
        return [listing.ref for listing in self.checkpoints(run)]

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return the manifests of one checkpoint."""
        near = self._near.listing(run, ref)
        with contextlib.suppress(RemoteUnreachableError):
            for there in self._far.ask(lambda far: [far.manifests.listing(run, ref)]):
                return self._joined(near, there)
        return near

    def _joined(self, near: CheckpointFiles, far: CheckpointFiles) -> CheckpointFiles:
        """Return a checkpoint of which each may have some manifests."""
        self.has_parts |= near.store_ranks is not None
        names = sorted({*near.manifests, *far.manifests}, key=lambda name: (name.rank, name.digest))
        return CheckpointFiles(near.run, near.ref, tuple(names))

    def read(self, run: str, ref: CheckpointRef, name: ManifestName) -> Manifest:
        """Read one manifest, from afar when it is missing or damaged here."""
        try:
            return self._near.read(run, ref, name)
        except (UnsupportedFormatError, *UNKNOWING):
            raise
        except (FormatError, MissingPartitionError, StorageError) as error:
            far = self._far.tier()
            if far is None or name not in self._far.ask(lambda far: far.manifests.listing(run, ref).manifests):
                raise
            try:
                return far.manifests.read(run, ref, name)
            except UNKNOWING:
                raise
            except (FormatError, MissingPartitionError, StorageError):
                raise error from None

    def read_all(self, listing: CheckpointFiles) -> list[Manifest]:
        """Read the manifests of all ranks, from afar those that are missing or damaged here."""
        try:
            return self._near.read_all(listing)
        except (UnsupportedFormatError, *UNKNOWING):
            raise
        except (FormatError, MissingPartitionError, StorageError):
            return [self.read(listing.run, listing.ref, name) for name in listing.manifests]

    def heads(self, run: str) -> list[int]:
        """Return the generations that have a head record in one of them."""
        near = self._near.heads(run)
        with contextlib.suppress(RemoteUnreachableError):
            return sorted({*near, *self._far.ask(lambda far: far.manifests.heads(run))})
        return near

    def read_head(self, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        """Return a head record, from afar when it is missing or damaged here."""
        problem: FormatError | None = None
        try:
            found = self._near.read_head(run, generation)
            if found is not None:
                return found
        except UnsupportedFormatError:
            raise
        except FormatError as error:
            problem = error
        with contextlib.suppress(RemoteUnreachableError):
            for there in self._far.ask(lambda far: [far.manifests.read_head(run, generation)]):
                if there is not None:
                    return there
        if problem is not None:
            raise problem
        return None


class FallbackTier(ReadTier):
    """A store on a local drive, and a remote location behind it."""

    def __init__(self, near: NvmeTier, far: RemoteFallback) -> None:
        """Read ``near`` first, and ``far`` for what is missing or damaged there."""
        self.root = f"{near.root} (and {far.name})"
        self.config, self.slots = near.config, near.slots
        self.manifests: FallbackManifests = FallbackManifests(near, far)
        self._near = near
        self._far = far
        self.far_packs: set[PackId] = set()
        """Packs of the remote location that were opened because of that."""
        self._far_ids: frozenset[PackId] = frozenset()

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all packs, near ones first.

        Raises:
            RemoteUnreachableError: something is missing or damaged near, and nobody knows what lies far.
        """
        far = self._far.ask(lambda far: far.pack_ids())
        self._far_ids = frozenset(far)
        return [*self._near.pack_ids(), *far]

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:
        """Return the packs to look into first: all near ones, before them those that a manifest hints at.

        The remote location is asked only for partitions that are missing here.
        """
        seen: set[PackId] = set()
        new = [pack_id for pack_id in pack_ids if self._near.pack_bytes(pack_id)]
        while True:
            yield from new
            seen.update(new)
            # Again while there are new ones: a repair may have put a pack in the place of one that was listed.
            more = [pack_id for pack_id in self._near.pack_ids() if pack_id not in seen]
            if not more:
                return
            new = more

    def open_pack(self, pack_id: PackId) -> OpenPack:
        """Open a complete pack, where it lies."""
        try:
            return self._near.open_pack(pack_id)
        except MissingPartitionError:
            # One that was near, and is gone since it was listed, was never there.
            far = self._far.tier() if pack_id in self._far_ids else None
            if far is None:
                raise
            pack = far.open_pack(pack_id)
            self.far_packs.add(pack_id)
            return pack


class OverlayTier(ReadTier):
    """A :class:`ReadTier` that looks into some packs first; which checkpoints there are, the tier says alone."""

    def __init__(self, tier: ReadTier, packs: Sequence[OpenPack]) -> None:
        """Read ``packs`` before those of ``tier``; both stay their owners'."""
        self.root, self.config, self.manifests, self.slots = tier.root, tier.config, tier.manifests, tier.slots
        self._tier = tier
        self._packs = {pack.header.pack_id: pack for pack in packs}

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all packs, those at hand first."""
        return [*self._packs, *self._tier.pack_ids()]

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:
        """Return the packs to look into first: those at hand, whatever a manifest says."""
        return [*self._packs, *self._tier.hinted(pack_ids)]

    def open_pack(self, pack_id: PackId) -> OpenPack:
        """Return a pack at hand, or open one of the tier."""
        return self._packs.get(pack_id) or self._tier.open_pack(pack_id)
