"""Opened store: its tier, its catalog, and the remote location to which it is pushed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from asymcheck.commit.encoder import Encoder
from asymcheck.errors import (
    CatalogError,
    InvalidInputError,
    ReadOnlyStoreError,
    RemoteCopyWarning,
    StoreNotFoundError,
    warn_user,
)
from asymcheck.format import layout
from asymcheck.fsck.rebuild_catalog import Rebuilt, rebuild, reconcile
from asymcheck.inspect.history import describe_loaded
from asymcheck.storage.fallback_tier import FallbackTier, OverlayTier, RemoteFallback
from asymcheck.storage.interfaces import ReadTier, StoreTier
from asymcheck.storage.nvme import Catalog, NvmeTier, Transaction
from asymcheck.storage.remote import RemoteLocation, RemoteTier
from asymcheck.storage.remote.tier import lost_location
from asymcheck.storage.shm.ring_reader import RingPack
from asymcheck.types import Restored, Usage
from asymcheck.validation import check_glob, check_which

if TYPE_CHECKING:
    from asymcheck.restore.load import Loaded

_T = TypeVar("_T")


class OpenedStore:
    """Resources that the services of one store share."""

    def __init__(self, tier: StoreTier, behind: RemoteLocation | None) -> None:
        """Wrap an opened tier. Missing or damaged data is read from the remote location ``behind`` it."""
        self.tier = tier
        """Tier of the store: a local drive or a remote location."""
        self.remote = None if behind is None else RemoteFallback(str(behind), partial(self._connect, behind))
        """Remote location to which the store is pushed, if any."""
        self.encoder = Encoder(tier.config.compression, "nvme")
        """Encoder of saves."""
        self.in_memory: list[RingPack] = []
        """Packs in memory that a killed process left, while they are being committed."""

    def _connect(self, location: RemoteLocation) -> RemoteTier:
        try:
            remote = RemoteTier(location, self.tier.config)
        except StoreNotFoundError as error:
            # A mount point without its file system looks empty.
            if error.is_empty and self.nvme.was_pushed_to(str(location)):
                raise lost_location(location) from error
            raise
        remote.refuse_lost_manifests()
        return remote

    @property
    def nvme(self) -> NvmeTier:
        """The tier, which must be on a local drive."""
        if not isinstance(self.tier, NvmeTier):
            raise InvalidInputError(
                f"{self.tier.root} is a remote location, but this operation needs a local store; pull it first: "
                f"asymcheck pull {self.tier.root} STORE"
            )
        return self.tier

    def writable(self) -> NvmeTier:
        """Return the tier for writing.

        Raises:
            ReadOnlyStoreError: the store was opened read-only, or is a remote location.
        """
        if not isinstance(self.tier, NvmeTier):
            raise ReadOnlyStoreError(
                f"store {self.tier.root} is remote, and can only be read; save on a local drive, and push from there"
            )
        self.tier.check_writable()
        return self.tier

    def catalog(self) -> Catalog:
        """Open the catalog; rebuild a missing one."""
        return self.nvme.open_catalog(partial(rebuild, self.nvme))

    def with_catalog(self, use: Callable[[Catalog, Rebuilt | None], _T], *, fresh: bool = False) -> _T:
        """Call ``use`` with the catalog. If the catalog is damaged, rebuild it, and call ``use`` again."""
        tier, made = self.writable(), list[Rebuilt]()

        def populate(transaction: Transaction) -> None:
            made[:] = [rebuild(tier, transaction)]

        catalog = tier.open_catalog(populate, rebuild=fresh)
        try:
            return use(catalog, made[0] if made else None)
        except CatalogError:
            catalog.renew(populate)
            return use(catalog, made[0] if made else None)

    @contextlib.contextmanager
    def source(self) -> Iterator[ReadTier]:
        """Yield the tier to read checkpoints from: memory, then the store, then its remote location.

        Warns:
            RemoteCopyWarning: data was read from the remote location.
        """
        if self.remote is None:
            yield self.with_memory(self.tier)
            return
        spanning = FallbackTier(self.nvme, self.remote)
        yield self.with_memory(spanning)
        # Shards of other machines are only at the remote location.
        if spanning.far_packs and not spanning.manifests.has_parts:
            near, far = self.tier.root, self.remote.name
            advice = f"To copy it into the store, run asymcheck pull {far} {near}"
            message = f"store {near} does not have the checkpoint, which was read from {far}. {advice}"
            if spanning.manifests.is_local():
                advice = f"repair the store with asymcheck verify {near} --repair --remote {far}"
                message = f"store {near}: missing or damaged data was read from {far}; {advice}"
            warn_user(message, RemoteCopyWarning)

    def read(self, load: Callable[[ReadTier], Loaded], *, is_newest: bool) -> Restored:
        """Call ``load`` with the tier to read from, and return its result with a description of the checkpoint.

        ``is_newest`` tells whether ``load`` reads the newest consistent checkpoint.
        """
        with self.source() as source:
            loaded = load(source)
            tier: ReadTier = self.tier
            if self.remote is not None and not tier.manifests.listing(loaded.run, loaded.ref).manifests:
                # The remote location has the checkpoint, and may have head records that the store lacks.
                tier = source
            return self.restored(loaded, tier, is_newest=is_newest)

    @staticmethod
    def restored(loaded: Loaded, tier: ReadTier, *, is_newest: bool) -> Restored:
        """Return a loaded state with a description of its checkpoint by ``tier``; see :meth:`read`."""
        return Restored(loaded.state, describe_loaded(tier, loaded, is_newest=is_newest), loaded.skipped)

    def with_memory(self, tier: ReadTier) -> ReadTier:
        """Return ``tier`` with the packs in memory in front of its own."""
        return OverlayTier(tier, self.in_memory) if self.in_memory else tier

    def checked(self, run: str, step: int | str | None, pattern: str = "*") -> int | str | None:
        """Validate the selection of a checkpoint and its tensors; return the step."""
        self.tier.check_usable()
        layout.check_run(run)
        check_glob(pattern)
        return None if step is None else check_which(step)

    def rebuild_catalog(self) -> Rebuilt:
        """Rebuild the catalog from packs and manifests, and keep the pins of living processes.

        If no other process has the catalog open, a new file replaces it; otherwise its entries are corrected.

        Raises:
            ReadOnlyStoreError: the store was opened read-only, or cannot be written.
            CatalogError: the catalog is damaged and in use by other processes; the message names them.
        """
        return self.with_catalog(lambda catalog, made: made or reconcile(self.nvme, catalog), fresh=True)

    def usage(self) -> Usage:
        """Return the total bytes of the store, by kind of file."""
        self.tier.check_usable()
        return Usage(self.tier.descriptor.store_id.hex(), *self.tier.usage())

    def close(self) -> None:
        """Close the tier and the remote location."""
        self.tier.close()
        if self.remote is not None:
            self.remote.close()
