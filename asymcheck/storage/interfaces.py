"""Interfaces of tiers that hold packs and manifests, for reads."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from asymcheck.config import StoreConfig
from asymcheck.errors import ClosedStoreError, ForkedStoreError
from asymcheck.format.record import Descriptor
from asymcheck.storage.manifests import ManifestReader
from asymcheck.storage.pack_index import PackIndex, digests_of
from asymcheck.storage.slots import Slot, SlotPool
from asymcheck.types import Digest, PackId


class OpenPack(abc.ABC):
    """A complete pack open for reading, wherever its frames lie."""

    def __init__(self, index: PackIndex, path: PurePath) -> None:
        """Read the frames of ``index`` from the file at ``path``."""
        self.header = index.header
        """Its header, or what a scan makes of it."""
        self.entries = index.entries
        """One for each frame."""
        self.damage = index.damage
        """Damage of the header or the index, if the frames were found by scanning; else None."""
        self.path = path
        """Where it lies."""

    def digests(self) -> list[Digest]:
        """Return the digests of all frames, in order."""
        return digests_of(self.entries)

    def expect(self, frames: Sequence[int]) -> None:  # noqa: B027 - where frames are at hand, nothing is to be done
        """Say which frames will be read, about in this order, so that neighbours can be fetched together."""

    def stamped(self, sequence: int) -> int:
        """Return what the header of a frame says of its place: its number, in most packs."""
        return sequence

    @abc.abstractmethod
    def read_frame(self, sequence: int, slot: Slot) -> memoryview:
        """Read frame ``sequence`` as it lies there, unchecked, and return it, in ``slot`` as a rule. Thread-safe.

        Raises:
            TruncatedError: the file ends before the frame does.
        """

    def direct_shift(self, sequence: int) -> int | None:  # noqa: ARG002 - for packs that can
        """Return which memory :meth:`read_payload` can fill with frame ``sequence``: its address modulo a block.

        None if there is no such memory.
        """
        return None

    def read_payload(
        self,
        sequence: int,  # noqa: ARG002 - for packs that can
        payload: memoryview,  # noqa: ARG002 - as above
        slot: Slot,  # noqa: ARG002 - as above
    ) -> tuple[memoryview, memoryview, memoryview] | None:
        """Read frame ``sequence`` with its payload directly into ``payload``, unchecked. Thread-safe.

        Args:
            sequence: number of a frame that has a :meth:`direct_shift`.
            payload: memory of the payload's length at such an address.
            slot: memory for the rest.

        Returns:
            The frame in three parts: header and padding, ``payload``, and padding. None if the device refuses to
            read into this memory, or a read through a slot is faster.

        Raises:
            TruncatedError: the file ends before the frame does.
        """
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is held for it."""


class ReadTier(abc.ABC):
    """Packs and manifests to read checkpoints from."""

    root: PurePath | str
    """The place, as errors name it."""
    config: StoreConfig
    """The knobs."""
    manifests: ManifestReader
    """Its manifests and head records."""
    slots: SlotPool
    """Memory for frames."""

    @abc.abstractmethod
    def pack_ids(self) -> list[PackId]:
        """Return the ids of all complete packs."""

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:
        """Return those packs to look into first, of which a manifest says that they held its partitions."""
        return pack_ids

    @abc.abstractmethod
    def open_pack(self, pack_id: PackId) -> OpenPack:
        """Open a complete pack for reading, and check its header and index.

        Raises:
            MissingPartitionError: there is no such pack.
            FormatError: header or index are damaged and no frame was found, or they need a newer program.
        """


class StoreTier(ReadTier):
    """A whole store or remote location, opened. Threads may share it; a forked child must open its own."""

    descriptor: Descriptor
    """Descriptor of the store."""
    damaged_descriptor_copies: int
    """How many copies of that are damaged."""

    def __init__(self) -> None:
        """Belong to this process."""
        self._pid = os.getpid()
        self._closed = False

    @abc.abstractmethod
    def usage(self) -> tuple[int, int, int, int]:
        """Return the number and bytes of packs in use, then of packs kept to be overwritten."""

    @abc.abstractmethod
    def leftovers(self) -> list[str]:
        """Return what killed writers left, by its place in the store."""

    @abc.abstractmethod
    def foreign(self) -> list[str]:
        """Return what is not the store's, by its place in it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is held; closing twice is no error."""

    def check_usable(self) -> None:
        """Refuse use after close, or in a forked child.

        Raises:
            ClosedStoreError, ForkedStoreError
        """
        if os.getpid() != self._pid:
            raise ForkedStoreError(
                f"store {self.root} was opened by process {self._pid}; open it again in this forked process"
            )
        if self._closed:
            raise ClosedStoreError(f"store {self.root} is closed")
