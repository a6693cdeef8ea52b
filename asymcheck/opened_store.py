"""An opened store: its tier, the catalog, and the location behind it, for everything that works on the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from asymcheck.commit.encoder import Encoder
from asymcheck.errors import CatalogError, InvalidInputError, ReadOnlyStoreError, RemoteCopyWarning, warn_user
from asymcheck.fsck.rebuild_catalog import Rebuilt, rebuild
from asymcheck.storage.fallback_tier import FallbackTier, OverlayTier, RemoteFallback
from asymcheck.storage.interfaces import ReadTier, StoreTier
from asymcheck.storage.nvme import Catalog, NvmeTier, Transaction
from asymcheck.storage.remote import RemoteLocation, RemoteTier
from asymcheck.storage.shm import RingPack

_T = TypeVar("_T")


class OpenedStore:
    """Facts and services that the parts of one opened store share."""

    def __init__(self, tier: StoreTier, behind: RemoteLocation | None) -> None:
        """Wrap an opened tier; what is missing or damaged there is read from the location ``behind`` it."""
        self.tier = tier
        """The store's tier: on a local drive, or in a remote location."""
        self.far = None if behind is None else RemoteFallback(str(behind), lambda: RemoteTier(behind, tier.config))
        """The location behind the store, if any."""
        self.encoder = Encoder(tier.config.compression, "nvme")
        """Encodes what is saved."""
        self.in_memory: list[RingPack] = []
        """Packs that a killed process left in memory, while they are being committed."""

    @property
    def nvme(self) -> NvmeTier:
        """The tier, for what only a store on a local drive can do."""
        if not isinstance(self.tier, NvmeTier):
            raise InvalidInputError(f"store {self.tier.root}: only a store on a local drive can do that; pull it first")
        return self.tier

    def writable(self) -> NvmeTier:
        """Return the tier, to be written to.

        Raises:
            ReadOnlyStoreError: the store was opened read-only, or is a remote location.
        """
        if not isinstance(self.tier, NvmeTier):
            raise ReadOnlyStoreError(
                f"store {self.tier.root} can only be read there; save on a local drive, and push from that"
            )
        self.tier.check_writable()
        return self.tier

    def catalog(self) -> Catalog:
        """Return the catalog, opened; rebuild one that is missing."""
        return self.nvme.open_catalog(self._populate)

    def _populate(self, transaction: Transaction) -> None:
        rebuild(self.nvme, transaction)

    def with_catalog(self, use: Callable[[Catalog, Rebuilt | None], _T], *, anew: bool = False) -> _T:
        """Open the catalog and use it; once more when it turns out damaged, for to open it again sets it aside."""
        tier, made = self.writable(), list[Rebuilt]()

        def populate(transaction: Transaction) -> None:
            made[:] = [rebuild(tier, transaction)]

        try:
            return use(tier.open_catalog(populate, anew=anew), made[0] if made else None)
        except CatalogError:
            tier.leave_catalog()
            return use(tier.open_catalog(populate, anew=anew), made[0] if made else None)

    @contextlib.contextmanager
    def source(self) -> Iterator[ReadTier]:
        """Yield what checkpoints are read from: memory, the store, and the location that stands behind it.

        Warns:
            RemoteCopyWarning: something was read from there.
        """
        if self.far is None:
            yield self.with_memory(self.tier)
            return
        spanning = FallbackTier(self.nvme, self.far)
        yield self.with_memory(spanning)
        # That parts of other machines lie there is as it should be.
        if spanning.far_packs and not spanning.manifests.has_parts:
            warn_user(
                f"store {self.tier.root}: some of it is missing or damaged and was read from {self.far.name}; "
                f"asymcheck verify {self.tier.root} --repair --remote {self.far.name} brings it back",
                RemoteCopyWarning,
            )

    def with_memory(self, tier: ReadTier) -> ReadTier:
        """Return ``tier`` with the packs in memory before its own."""
        return OverlayTier(tier, self.in_memory) if self.in_memory else tier

    def close(self) -> None:
        """Close the tier and the location behind it."""
        self.tier.close()
        if self.far is not None:
            self.far.close()
