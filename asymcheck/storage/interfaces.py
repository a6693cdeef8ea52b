"""Abstract interfaces of storage tiers: open packs, tiers to read from, and whole stores."""

from __future__ import annotations

import abc
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePath

from asymcheck.config import StoreConfig
from asymcheck.errors import ClosedStoreError, ForkedStoreError
from asymcheck.format.digest_set import DigestSet
from asymcheck.format.record import Descriptor
from asymcheck.storage.manifests import ManifestReader
from asymcheck.storage.pack_index import PackIndex, digests_of
from asymcheck.storage.slots import Slot, SlotPool
from asymcheck.types import Digest, PackId

FrameParts = tuple[memoryview, memoryview, memoryview]
"""Frame in three parts: header and padding, payload, and padding."""


class OpenPack(abc.ABC):
    """Complete pack that is open for reading, on any tier."""

    def __init__(self, index: PackIndex, path: PurePath) -> None:
        """Read the frames of ``index`` from the file at ``path``."""
        self.header = index.header
        """Header of the pack, or a header rebuilt by a scan."""
        self.entries = index.entries
        self.damage = index.damage
        """Damage of the header or the index, if the frames were found by scanning; else None."""
        self._stamped = index.stamped
        self.path = path

    def digests(self) -> list[Digest]:
        """Return the digests of all frames, in order."""
        return digests_of(self.entries)

    def expect(self, frames: Sequence[int]) -> None:  # noqa: B027 - optional
        """Announce the frames to be read, about in this order, so that adjacent frames can be prefetched together."""

    def stamped(self, sequence: int) -> int:
        """Return the sequence number in the header of a frame, which is ``sequence`` in most packs."""
        return self._stamped[sequence] if self._stamped else sequence

    @abc.abstractmethod
    def read_frame(self, sequence: int, slot: Slot) -> memoryview:
        """Return frame ``sequence`` as stored, without checks, usually in the memory of ``slot``. Thread-safe.

        Raises:
            TruncatedError: the file ends before the frame does.
        """

    def direct_shift(self, sequence: int) -> int | None:  # noqa: ARG002 - used by packs on a drive
        """Return the address modulo a block that :meth:`read_payload` requires of its memory.

        None if the payload of frame ``sequence`` cannot be read directly.
        """
        return None

    def read_payload(self, sequence: int, payload: memoryview, slot: Slot) -> FrameParts | None:  # noqa: ARG002 - used by packs on a drive
        """Read frame ``sequence``, with its payload directly in ``payload``, without checks. Thread-safe.

        Args:
            sequence: number of a frame that has a :meth:`direct_shift`.
            payload: memory of the payload's length, at an address congruent to the shift.
            slot: memory for the header and the padding.

        Returns:
            The frame, with ``payload`` as its payload. None if the device cannot read into this memory, or a read
            through a slot is faster.

        Raises:
            TruncatedError: the file ends before the frame does.
        """
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Release the resources of the pack."""


class ReadTier(abc.ABC):
    """Source of packs and manifests for reads."""

    root: PurePath | str
    """Path or URI, as shown in errors."""
    config: StoreConfig
    manifests: ManifestReader
    slots: SlotPool

    @abc.abstractmethod
    def pack_ids(self) -> list[PackId]:
        """Return the ids of all complete packs."""

    def hinted(self, pack_ids: Iterable[PackId]) -> Iterable[PackId]:
        """Return the packs to search first, given the packs that a manifest names as hints."""
        return pack_ids

    def with_prefixes(self, prefixes: Collection[bytes]) -> list[PackId]:  # noqa: ARG002 - used by remote tiers
        """Return the packs at a remote location whose ids begin with one of the prefixes, newest first."""
        return []

    def may_hold(self, pack_ids: list[PackId], digests: DigestSet) -> list[PackId]:  # noqa: ARG002 - used by remote tiers
        """Return the packs without those that are known to hold none of these partitions."""
        return pack_ids

    def expect(self, pack_ids: Sequence[PackId]) -> None:  # noqa: B027 - optional
        """Announce the packs that will be opened next, so that their indexes can be read ahead."""

    @abc.abstractmethod
    def open_pack(self, pack_id: PackId) -> OpenPack:
        """Open a complete pack for reading, and check its header and index.

        Raises:
            MissingPartitionError: there is no such pack.
            FormatError: header or index is damaged and no frame was found, or the pack needs a newer program.
        """


class StoreTier(ReadTier):
    """Open store or remote location. Thread-safe. A forked child must open its own."""

    descriptor: Descriptor
    damaged_descriptor_copies: int
    """Number of damaged copies of the descriptor."""

    def __init__(self, config: StoreConfig) -> None:
        """Bind the tier to this process."""
        self.config = config
        self.slots = SlotPool(config.slots, config.partition_bytes)
        self._pid = os.getpid()
        self._closed = False

    @abc.abstractmethod
    def usage(self) -> tuple[int, int, int, int]:
        """Return number and bytes of the packs in use, then number and bytes of the pooled packs."""

    @abc.abstractmethod
    def leftovers(self) -> list[str]:
        """Return the paths, relative to the store, of files that killed writers left behind."""

    @abc.abstractmethod
    def foreign(self) -> list[str]:
        """Return the paths, relative to the store, of files that do not belong to the store."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources. Closing twice is allowed."""

    def check_usable(self) -> None:
        """Check that the tier is open and belongs to this process.

        Raises:
            ClosedStoreError: the tier was closed.
            ForkedStoreError: the tier was opened before this process was forked.
        """
        if os.getpid() != self._pid:
            raise ForkedStoreError(
                f"store {self.root} was opened by process {self._pid}; open it again in this forked process"
            )
        if self._closed:
            raise ClosedStoreError(f"store {self.root} is closed; open it again")
