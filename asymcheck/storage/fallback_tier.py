"""Tiers that read from several places: a local store with a remote fallback, and a tier with an overlay of packs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from asymcheck.errors import (
    AsymcheckError,
    FormatError,
    MissingPartitionError,
    RemoteUnreachableError,
    StorageError,
    StoreNotFoundError,
    TooManyFilesError,
    UnreachableRemoteWarning,
    UnsupportedFormatError,
    result_or_error,
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

# Each request to an unreachable location may take a whole deadline, so do not retry at once.
_BACKOFF_S = 60.0


class RemoteFallback:
    """Remote location that is opened on first use. Thread-safe."""

    def __init__(self, name: str, connect: Callable[[], RemoteTier]) -> None:
        """Open the location ``name`` by calling ``connect`` on first use."""
        self.name = name
        self._connect = connect
        self._tier: RemoteTier | None = None
        self._refused: tuple[float, RemoteUnreachableError] | None = None
        self._lock = threading.Lock()

    def tier(self) -> RemoteTier | None:
        """Return the remote tier; None if the location is empty.

        Raises:
            RemoteUnreachableError: the location does not answer, cannot be opened, or failed less than a minute ago.
            InvalidInputError: no client supports the location.
        """
        with self._lock:
            if self._refused is not None and time.monotonic() < self._refused[0]:
                raise self._refused[1]
            if self._tier is None:
                with self._failures_remembered():
                    try:
                        self._tier = self._connect()
                    except StoreNotFoundError as error:
                        if not error.is_empty:
                            raise RemoteUnreachableError(f"the pushed checkpoints are not known: {error}") from error
                    except FormatError as error:
                        raise self._unknown_content(error) from error
            return self._tier

    def _unknown_content(self, error: Exception) -> RemoteUnreachableError:
        return RemoteUnreachableError(f"the content of {self.name} is not known: {error}")

    def ask(self, question: Callable[[RemoteTier], _T]) -> _T | None:
        """Return the answer to ``question`` about the remote tier; None if the location is empty.

        Raises:
            RemoteUnreachableError: the location does not answer; see :meth:`tier`.
        """
        tier = self.tier()
        if tier is None:
            return None
        with self._failures_remembered():
            return question(tier)

    @contextlib.contextmanager
    def _failures_remembered(self) -> Iterator[None]:
        """Raise RemoteUnreachableError for any refusal of the location, and raise it again during the backoff."""
        try:
            yield
        except TooManyFilesError:
            raise
        except RemoteUnreachableError as error:
            self._refused = (time.monotonic() + _BACKOFF_S, error)
            raise
        except StorageError as error:
            unreachable = self._unknown_content(error)
            self._refused = (time.monotonic() + _BACKOFF_S, unreachable)
            raise unreachable from error

    def close(self) -> None:
        """Close the remote tier, if it is open."""
        with self._lock:
            if self._tier is not None:
                self._tier.close()


class FallbackManifests(ManifestReader):
    """Manifests and head records of a local store. Lost ones are read from its remote location."""

    def __init__(self, near: NvmeTier, far: RemoteFallback) -> None:
        """Read ``near``, the local store, first."""
        super().__init__(near.files, near.root)
        self._near = near.manifests
        self._far = far
        self.has_parts = False
        """Whether any listed checkpoint is distributed over the stores of several nodes."""
        self._read: set[tuple[str, CheckpointRef]] = set()

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        return sorted({*self._near.runs(), *(self._far.ask(lambda far: far.manifests.runs()) or ())})

    def checkpoints(self, run: str) -> list[CheckpointFiles]:
        """Return all checkpoints that have a manifest in the local store or at the remote location.

        Raises:
            RemoteUnreachableError: the local store has no checkpoint, and the remote location does not answer.

        Warns:
            UnreachableRemoteWarning: only local checkpoints are listed.
        """
        listings = {listing.ref: self._joined(listing) for listing in self._near.checkpoints(run)}
        try:
            for listing in self._far.ask(lambda far: far.manifests.checkpoints(run)) or ():
                near = listings.get(listing.ref)
                listings[listing.ref] = listing if near is None else self._joined(near, listing)
        except RemoteUnreachableError as error:
            if not listings:
                raise
            warn_user(f"only checkpoints in the local store are known: {error}", UnreachableRemoteWarning)
        return [listings[ref] for ref in sorted(listings)]

    def refs(self, run: str) -> list[CheckpointRef]:
        """Return all checkpoints of a run; see :meth:`checkpoints`."""
        return [listing.ref for listing in self.checkpoints(run)]

    def listing(self, run: str, ref: CheckpointRef) -> CheckpointFiles:
        """Return the manifests of one checkpoint."""
        return self._joined(self._near.listing(run, ref), self._ask(lambda far: far.manifests.listing(run, ref)))

    def _ask(self, question: Callable[[RemoteTier], _T]) -> _T | None:
        """Ask the remote location; return None if it is empty or does not answer."""
        with contextlib.suppress(RemoteUnreachableError):
            return self._far.ask(question)
        return None

    def _joined(self, near: CheckpointFiles, far: CheckpointFiles | None = None) -> CheckpointFiles:
        """Return the union of the manifests of two listings of one checkpoint, which should have all ranks."""
        self.has_parts |= near.store_ranks is not None
        theirs = () if far is None else far.manifests
        names = sorted({*near.manifests, *theirs}, key=lambda name: (name.rank, name.digest))
        return CheckpointFiles(near.run, near.ref, tuple(names))

    def read_bytes(self, run: str, ref: CheckpointRef, name: ManifestName) -> bytes:
        """Return the content of a manifest, from the remote location if the local copy is missing or damaged."""
        found = result_or_error(self._near.read_bytes, run, ref, name)
        if isinstance(found, AsymcheckError) and (far := self._far.tier()) is not None:
            copy = result_or_error(far.manifests.read_bytes, run, ref, name)
            found = found if isinstance(copy, AsymcheckError) else copy
        if isinstance(found, AsymcheckError):
            raise found
        return found

    def read_all(self, listing: CheckpointFiles) -> list[Manifest]:
        """Read the manifests of all ranks, and read those that the local store lacks ahead."""
        run, ref = listing.run, listing.ref
        self._read.add((run, ref))
        missing = {*listing.manifests} - {*self._near.listing(run, ref).manifests}
        absent = dataclasses.replace(listing, manifests=tuple(sorted(missing, key=str)))
        far = self._far.tier() if missing else None
        with contextlib.nullcontext() if far is None else far.manifests.reading([absent]):
            return super().read_all(listing)

    def is_local(self) -> bool:
        """Tell whether the local store has manifests of any checkpoint that was read."""
        return any(self._near.listing(run, ref).manifests for run, ref in self._read)

    def heads(self, run: str) -> list[int]:
        """Return the generations that have a head record in either place."""
        return sorted({*self._near.heads(run), *(self._ask(lambda far: far.manifests.heads(run)) or ())})

    def reading_heads(self, run: str, generations: Iterable[int]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the head records that the local store lacks are read ahead."""
        missing = sorted({*generations} - {*self._near.heads(run)})
        ahead = self._ask(lambda far: far.manifests.reading_heads(run, missing)) if missing else None
        return ahead or contextlib.nullcontext()

    def read_head(self, run: str, generation: int) -> tuple[HeadRecord, int] | None:
        """Return a head record, from the remote location if the local copy is missing or damaged."""
        head = result_or_error(self._near.read_head, run, generation)
        if head is None or (isinstance(head, AsymcheckError) and not isinstance(head, UnsupportedFormatError)):
            head = self._ask(lambda far: far.manifests.read_head(run, generation)) or head
        if isinstance(head, AsymcheckError):
            raise head
        return head


class FallbackTier(ReadTier):
    """Local store with a remote location as fallback."""

    def __init__(self, near: NvmeTier, far: RemoteFallback) -> None:
        """Read ``near`` first. Read missing or damaged data from ``far``."""
        self.root = f"{near.root} (and {far.name})"
        self.config, self.slots = near.config, near.slots
        self.manifests: FallbackManifests = FallbackManifests(near, far)
        self._near = near
        self._far = far
        self.far_packs: set[PackId] = set()
        """Packs of the remote location that were opened."""
        self._far_ids: frozenset[PackId] = frozenset()

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all packs, local ones first.

        Raises:
            RemoteUnreachableError: the remote location does not answer.
        """
        far = self._far.ask(lambda far: far.pack_ids()) or []
        self._far_ids = frozenset(far)
        return [*self._near.pack_ids(), *far]

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:
        """Yield the local packs, those that a manifest hints at first.

        The remote location is read only for partitions that are missing in the local store.
        """
        seen: set[PackId] = set()
        new = [pack_id for pack_id in pack_ids if self._near.pack_bytes(pack_id)]
        while True:
            yield from new
            seen.update(new)
            # List again, because a repair may have replaced a listed pack with a new one.
            new = [pack_id for pack_id in self._near.pack_ids() if pack_id not in seen]
            if not new:
                return

    def with_prefixes(self, prefixes: Collection[bytes]) -> list[PackId]:
        """Return packs of the remote location. Raise RemoteUnreachableError if it does not answer."""
        far = self._far.ask(lambda far: far.with_prefixes(prefixes)) or []
        self._far_ids |= frozenset(far)
        return far

    def expect(self, pack_ids: Sequence[PackId]) -> None:
        """Begin to read the indexes of packs of the remote location."""
        far_ids = [pack_id for pack_id in pack_ids if pack_id in self._far_ids and not self._near.pack_bytes(pack_id)]
        far = self._far.tier() if far_ids else None
        if far is not None:
            far.expect(far_ids)

    def open_pack(self, pack_id: PackId) -> OpenPack:
        """Open a complete pack of the local store or of the remote location."""
        try:
            return self._near.open_pack(pack_id)
        except MissingPartitionError:
            # A local pack that was removed after the listing may never have been at the remote location.
            far = self._far.tier() if pack_id in self._far_ids else None
            if far is None:
                raise
            pack = far.open_pack(pack_id)
            self.far_packs.add(pack_id)
            return pack


class OverlayTier(ReadTier):
    """Tier that reads some open packs before those of another tier. Manifests are those of the other tier."""

    def __init__(self, tier: ReadTier, packs: Sequence[OpenPack]) -> None:
        """Read ``packs`` before those of ``tier``. The caller closes both."""
        self.root, self.config, self.manifests, self.slots = tier.root, tier.config, tier.manifests, tier.slots
        self._tier = tier
        self._packs = {pack.header.pack_id: pack for pack in packs}

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all packs, those of the overlay first."""
        return [*self._packs, *self._tier.pack_ids()]

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:
        """Return the packs of the overlay, then those that the tier reads first."""
        return [*self._packs, *self._tier.hinted(pack_ids)]

    def with_prefixes(self, prefixes: Collection[bytes]) -> list[PackId]:
        """Return the packs of the tier whose ids begin with one of the prefixes."""
        return self._tier.with_prefixes(prefixes)

    def expect(self, pack_ids: Sequence[PackId]) -> None:
        """Announce the packs of the tier that will be opened next."""
        self._tier.expect([pack_id for pack_id in pack_ids if pack_id not in self._packs])

    def open_pack(self, pack_id: PackId) -> OpenPack:
        """Return a pack of the overlay, or open a pack of the tier."""
        return self._packs.get(pack_id) or self._tier.open_pack(pack_id)
