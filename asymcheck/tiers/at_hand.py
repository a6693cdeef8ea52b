"""A tier, and before it packs that somebody holds open: what lies in memory need not come from a drive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from asymcheck.config import StoreConfig
from asymcheck.tiers.reading import Manifests, OpenPack, ReadTier
from asymcheck.tiers.slots import SlotPool
from asymcheck.types import PackId


class AtHand:
    """A :class:`ReadTier` that looks into some packs first; which checkpoints there are, the tier says alone."""

    def __init__(self, tier: ReadTier, packs: Sequence[OpenPack]) -> None:
        """Read ``packs`` before those of ``tier``; both stay their owners'."""
        self._tier = tier
        self._packs = {pack.header.pack_id: pack for pack in packs}

    @property
    def root(self) -> PurePath | str:
        """The place, as errors name it."""
        return self._tier.root

    @property
    def config(self) -> StoreConfig:
        """The knobs."""
        return self._tier.config

    @property
    def manifests(self) -> Manifests:
        """Manifests and head records of the tier."""
        return self._tier.manifests

    @property
    def slots(self) -> SlotPool:
        """Memory for frames."""
        return self._tier.slots

    def pack_ids(self) -> list[PackId]:
        """Return the ids of all packs, those at hand first."""
        return [*self._packs, *self._tier.pack_ids()]

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:
        """Return the packs to look into first: those at hand, whatever a manifest says."""
        return [*self._packs, *self._tier.hinted(pack_ids)]

    def open_pack(self, pack_id: PackId) -> OpenPack:
        """Return a pack at hand, or open one of the tier."""
        return self._packs.get(pack_id) or self._tier.open_pack(pack_id)
