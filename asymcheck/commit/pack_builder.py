"""Write the frames of one save into packs, and store each partition once.

The catalog locates stored partitions, and the index of the pack confirms each location.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Sequence

from asymcheck.config import WRITER
from asymcheck.errors import AsymcheckError, StorageError, UnsupportedFormatError
from asymcheck.format import registry
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.pack import PackHeader, location_of
from asymcheck.storage import damaged_frames
from asymcheck.storage.nvme import Catalog, NvmeTier, PackWriter
from asymcheck.types import Digest, Location, PackId


def _deltas(chain: Sequence[Location]) -> int:
    return sum(location.kind == registry.KIND_DELTA for location in chain)


class PackBuilder:
    """Packs of one save.

    Several threads may call :meth:`claim` and :meth:`write` at the same time. One thread calls the other methods.
    """

    def __init__(self, tier: NvmeTier, catalog: Catalog) -> None:
        """Write packs to ``tier``, and reuse partitions that ``catalog`` locates."""
        self._tier, self._catalog = tier, catalog
        # Packs that garbage collection has freed, or that could not be read.
        self._gone: set[PackId] = set()
        self.unread: AsymcheckError | None = None
        """Last error of a pack that may be intact but could not be read; its partitions are treated as missing."""
        self._lock = threading.Lock()
        self._needed_bytes = 0
        # Unsealed packs; partitions are written to the last one.
        self._writers: list[PackWriter] = []
        self._sealed: list[PackWriter] = []
        self._claimed: set[Digest] = set()
        # Partitions that this save writes: all, derived partitions, and the bases of derived partitions.
        self._new: set[Digest] = set()
        self._derived: set[Digest] = set()
        self._derived_bases: set[Digest] = set()
        self._is_abandoned = False
        self.written: dict[Digest, Location] = {}
        """Partitions that this save wrote; filled when their packs are sealed."""
        self.reused: dict[Digest, Location] = {}
        """Partitions that the store already had."""
        self.relied: dict[Digest, list[Location]] = {}
        """Chains of bases, in packs of other saves, that partitions of this save need for decoding."""
        self.packs: dict[PackId, PackHeader] = {}
        """Sealed packs of this save."""
        self.written_bytes = 0
        """Payload bytes of frames written."""
        self.new_bytes = 0
        """Bytes of the written partitions before encoding."""

    def expect(self, frame_bytes: int) -> None:
        """Announce the maximum number of frame bytes, so that a freed pack of that size is reused."""
        with self._lock:
            self._needed_bytes = frame_bytes

    def write(self, descriptor: FrameDescriptor, write: Callable[[PackWriter, FrameDescriptor], object]) -> None:
        """Store a claimed partition: call ``write`` with a pack writer and ``descriptor``.

        Raises:
            StorageError: the write failed, or the save is abandoned. After a failed write, call :meth:`abandon`.
        """
        write(self._writer(descriptor.frame_length), descriptor)
        with self._lock:
            self.written_bytes += descriptor.stored_length
            self.new_bytes += descriptor.plain_length

    def claim(self, name: Digest) -> bool:
        """Return True if the caller must write a partition: first claim in this save, and not in the store."""
        with self._lock:
            if name in self._claimed:
                return False
            self._claimed.add(name)
        chain = self._chain(name)
        with self._lock:
            if chain:
                self.reused[name] = chain[0]
                self.relied[name] = chain[1:]
            else:
                self._new.add(name)
        return not chain

    def _chain(self, name: Digest) -> list[Location]:
        """Return the locations of a partition and its bases, down to a base that is stored whole.

        Return an empty list if the partition or one of its bases must be written.
        """
        chain: list[Location] = []
        with self._catalog.read() as transaction:
            # The longest chain is a derived partition, the maximum number of deltas, and a whole partition.
            while len(chain) < registry.DELTA_DEPTH_MAX + 2:
                location = transaction.location(name)
                if location is None or not self._is_stored(name, location):
                    return []
                if chain and location.kind == registry.KIND_DERIVED:
                    # Another tensor with the same bytes was stored as a derived partition, which cannot be a base.
                    return []
                chain.append(location)
                if location.kind == registry.KIND_FULL:
                    # While the partition was garbage, its base may have been stored again with a longer chain.
                    return chain if _deltas(chain) <= registry.DELTA_DEPTH_MAX else []
                name = Digest(location.base_digest)
        return []

    def _is_stored(self, name: Digest, location: Location) -> bool:
        if location.pack_id in self._gone or damaged_frames.is_damaged(location.pack_id, location.offset):
            return False
        try:
            index = self._tier.index_of(location.pack_id)
        except AsymcheckError as error:
            # The pack is missing, locked for removal, or damaged. A second attempt would wait for the lock again.
            self._gone.add(location.pack_id)
            if isinstance(error, (StorageError, UnsupportedFormatError)):
                self.unread = error
            return False
        row = bisect.bisect_left(index.entries["offset"], location.offset)
        if index.damage is not None or row == len(index.entries):
            return False
        is_same = location_of(location.pack_id, index.entries, row) == location
        return is_same and index.entries["digest"][row].tobytes() == name

    def rely(self, name: Digest, base: Digest, codec: int) -> bool:
        """Register a base for a claimed partition; return False if the base cannot be used.

        A base cannot be used if its chain is incomplete or too long, or if the base is a derived partition.
        """
        is_delta = codec == registry.CODEC_DELTA
        with self._lock:
            if base in self._new:
                # This save keeps its own partitions, but the chain length of a delta on them may not be known yet.
                return not is_delta and self._derive(name, base)
        chain = self._chain(base)
        if not chain or chain[0].kind == registry.KIND_DERIVED or _deltas(chain) + is_delta > registry.DELTA_DEPTH_MAX:
            return False
        with self._lock:
            if not is_delta and not self._derive(name, base):
                return False
            self.relied[name] = chain
        return True

    def _derive(self, name: Digest, base: Digest) -> bool:
        """Register a derived partition; return False if it is a base itself, or if its base is derived."""
        if base in self._derived or name in self._derived_bases:
            return False
        self._derived.add(name)
        self._derived_bases.add(base)
        return True

    def _writer(self, length: int) -> PackWriter:
        with self._lock:
            if self._is_abandoned:
                # A pack started now would never be sealed or removed.
                raise StorageError("cannot write a partition: its save was abandoned; save the step again")
            if not self._writers or self._writers[-1].length + length > self._tier.config.pack_bytes:
                room = min(self._needed_bytes, self._tier.config.pack_bytes)
                self._writers.append(self._tier.start_pack(room))
            self._needed_bytes -= length
            return self._writers[-1]

    def seal(self) -> None:
        """Complete and sync every pack of this save. The packs stay locked until :meth:`close`."""
        try:
            while self._writers:
                writer = self._writers[-1]
                header, locations = writer.seal(time.time_ns(), WRITER)
                self._sealed.append(self._writers.pop())
                self.packs[writer.pack_id] = header
                self.written.update(locations)
        except BaseException:
            self.abandon()
            raise

    def take_back(self, packs: Sequence[PackId]) -> list[Digest]:
        """Forget reused partitions in packs that garbage collection has freed; return the digests to write again."""
        # The catalog may list the packs of this save by now. A lookup there would wait for a lock that this save holds.
        self._gone.update(packs, self.packs)
        freed = set(packs)
        lost = {name for name, location in self.reused.items() if location.pack_id in freed}
        lost |= {name for name, chain in self.relied.items() if any(location.pack_id in freed for location in chain)}
        for name in lost:
            self.reused.pop(name, None)
            self.relied.pop(name, None)
            self._claimed.discard(name)
        return sorted(lost)

    def needed_packs(self) -> set[PackId]:
        """Return the packs of other saves that hold reused partitions or bases of this save."""
        chains = (location for chain in self.relied.values() for location in chain)
        return {location.pack_id for location in (*self.reused.values(), *chains)}

    def close(self) -> None:
        """Release the locks of the sealed packs, which pins protect from now on."""
        for writer in self._sealed:
            writer.close()
        self._sealed.clear()

    def abandon(self) -> None:
        """Remove the unsealed packs of this save. Garbage collection frees the sealed packs."""
        with self._lock:
            self._is_abandoned = True
        self.close()
        for writer in self._writers:
            try:
                writer.abandon()
            except AsymcheckError:
                # The caller reports the first failure. Garbage collection removes the pack later.
                continue
        self._writers.clear()
