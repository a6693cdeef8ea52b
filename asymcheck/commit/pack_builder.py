"""Packing: frames into packs, each partition stored once, up to the moment when the packs are complete and durable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from asymcheck.config import WRITER
from asymcheck.errors import AsymcheckError, StorageError, UnsupportedFormatError
from asymcheck.format import registry
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.pack import Entries, PackHeader
from asymcheck.storage.nvme import Catalog, NvmeTier, PackWriter
from asymcheck.types import Digest, Location, PackId


class KnownPartitions:
    """Which partitions the store holds already, believed only when the pack's own index says so too."""

    def __init__(self, tier: NvmeTier, catalog: Catalog) -> None:
        """Look digests up in ``catalog`` and check them against packs of ``tier``."""
        self._tier = tier
        self._catalog = catalog
        self._indexes: dict[PackId, tuple[npt.NDArray[np.uint64], Entries] | None] = {}
        self._gone: set[PackId] = set()
        self.unread: AsymcheckError | None = None
        """Why a pack could not be read that may well have what it is said to have: the last one of these."""
        self._lock = threading.Lock()

    def chain(self, name: Digest) -> list[Location]:
        """Return where a partition lies, and below it what it is decoded from, down to one that is stored whole.

        Nothing when it, or one of those, must be written.
        """
        found: list[Location] = []
        with self._catalog.read() as transaction:
            # A derived one may lie on as many deltas as there can be, and these on a whole one.
            while len(found) < registry.DELTA_DEPTH_MAX + 2:
                location = transaction.location(name)
                if location is None or not self._is_there(name, location):
                    return []
                if found and location.kind == registry.KIND_DERIVED:
                    # Equal bytes have one name: what is a base here was stored so for another tensor.
                    return []
                found.append(location)
                if location.kind == registry.KIND_FULL:
                    # Of what was garbage for a while, the base may have been stored anew, and deeper, since then.
                    return found if _deltas(found) <= registry.DELTA_DEPTH_MAX else []
                name = Digest(location.base_digest)
        return []

    def _is_there(self, name: Digest, location: Location) -> bool:
        index = None if location.pack_id in self._gone else self._index(location.pack_id)
        if index is None:
            return False
        offsets, entries = index
        row = int(np.searchsorted(offsets, np.uint64(location.offset)))
        if row == len(offsets) or offsets[row] != location.offset:
            return False
        found, base, _, _, length, kind, *_ = entries[row].item()
        return (found, length, kind, base) == (name, location.plain_length, location.kind, location.base_digest)

    def forget(self, packs: Sequence[PackId]) -> None:
        """Never name these packs again: collection has taken them."""
        with self._lock:
            self._gone.update(packs)

    def _index(self, pack_id: PackId) -> tuple[npt.NDArray[np.uint64], Entries] | None:
        """Return the offsets and the rows of a pack's index; None when its partitions must be written again."""
        with self._lock:
            if pack_id not in self._indexes:
                self._indexes[pack_id] = self._read_index(pack_id)
            return self._indexes[pack_id]

    def _read_index(self, pack_id: PackId) -> tuple[npt.NDArray[np.uint64], Entries] | None:
        try:
            index = self._tier.index_of(pack_id)
        except AsymcheckError as error:
            # Missing, locked for removal, or damaged.
            if isinstance(error, (StorageError, UnsupportedFormatError)):
                self.unread = error
            return None
        return (index.entries["offset"].copy(), index.entries) if index.damage is None else None


def _deltas(chain: Sequence[Location]) -> int:
    return sum(location.kind == registry.KIND_DELTA for location in chain)


class PackBuilder:
    """The packs of one save. Threads may call :meth:`claim` and :meth:`write` together; the rest is for one thread."""

    def __init__(self, tier: NvmeTier, catalog: Catalog) -> None:
        """Write packs of ``tier``, and reuse what ``catalog`` knows."""
        self._tier = tier
        self._known = KnownPartitions(tier, catalog)
        self._lock = threading.Lock()
        self._current: PackWriter | None = None
        self._needed_bytes = 0
        self._writers: list[PackWriter] = []
        self._sealed: list[PackWriter] = []
        self._claimed: set[Digest] = set()
        # Of what this save writes: all, what is stored derived, and what others are derived from.
        self._ours: set[Digest] = set()
        self._derived: set[Digest] = set()
        self._originals: set[Digest] = set()
        self._is_given_up = False
        self.written: dict[Digest, Location] = {}
        """Partitions written by this save, once their packs are sealed."""
        self.reused: dict[Digest, Location] = {}
        """Partitions that the store held already."""
        self.relied: dict[Digest, list[Location]] = {}
        """Chains of bases, in packs of other saves, from which partitions of this save are decoded."""
        self.packs: dict[PackId, PackHeader] = {}
        """Packs of this save, once they are sealed."""
        self.written_bytes = 0
        """Payload bytes of frames written."""
        self.new_bytes = 0
        """Bytes of the partitions that these are, before encoding."""

    def expect(self, frame_bytes: int) -> None:
        """Say how many bytes of frames are to come, at most: a freed pack of that size is looked for."""
        with self._lock:
            self._needed_bytes = frame_bytes

    def write(self, descriptor: FrameDescriptor, write: Callable[[PackWriter, FrameDescriptor], object]) -> None:
        """Store a partition that was claimed, as ``descriptor`` says, with ``write``.

        Raises:
            StorageError: the device refused, and :meth:`abandon` comes next; or that came already.
        """
        write(self._writer(descriptor.frame_length), descriptor)
        with self._lock:
            self.written_bytes += descriptor.stored_length
            self.new_bytes += descriptor.plain_length

    def claim(self, name: Digest) -> bool:
        """Tell whether a partition must be written: the first time it is asked for, when the store lacks it."""
        with self._lock:
            if name in self._claimed:
                return False
            self._claimed.add(name)
        chain = self._known.chain(name)
        with self._lock:
            if chain:
                self.reused[name] = chain[0]
                self.relied[name] = chain[1:]
            else:
                self._ours.add(name)
        return not chain

    def rely(self, name: Digest, base: Digest, codec: int) -> bool:
        """Rely on a base for a partition that was claimed; return whether that can be done.

        It cannot when the base, or what that is decoded from, is not in the store, when the chain would be too long, or
        when a derived partition would be a base.
        """
        is_delta = codec == registry.CODEC_DELTA
        with self._lock:
            if base in self._ours:
                # What this save writes it keeps; but how deep a delta on it would lie may not be known yet.
                return not is_delta and self._derive(name, base)
        chain = self._known.chain(base)
        if not chain or chain[0].kind == registry.KIND_DERIVED or _deltas(chain) + is_delta > registry.DELTA_DEPTH_MAX:
            return False
        with self._lock:
            if not is_delta and not self._derive(name, base):
                return False
            self.relied[name] = chain
        return True

    def _derive(self, name: Digest, base: Digest) -> bool:
        """Note that a partition is derived from another one, unless either is what the other must not be."""
        if base in self._derived or name in self._originals:
            return False
        self._derived.add(name)
        self._originals.add(base)
        return True

    def _writer(self, length: int) -> PackWriter:
        with self._lock:
            if self._is_given_up:
                # Nobody would seal or remove a pack that is begun now.
                raise StorageError("this save was given up: nothing is written for it any more")
            if self._current is None or self._current.length + length > self._tier.config.pack_bytes:
                room = min(self._needed_bytes, self._tier.config.pack_bytes)
                self._current = self._tier.start_pack(room)
                self._writers.append(self._current)
            self._needed_bytes -= length
            return self._current

    def seal(self) -> None:
        """Make every pack of this save complete and durable. Their locks stay until :meth:`close`."""
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
        self._current = None

    def take_back(self, packs: Sequence[PackId]) -> list[Digest]:
        """Forget reused partitions whose packs collection has taken; return their digests, to be written again."""
        # Its own, too, which the catalog may know by now: to look into one is to wait for its lock, which is ours.
        self._known.forget([*packs, *self.packs])
        gone = set(packs)
        lost = {name for name, location in self.reused.items() if location.pack_id in gone}
        lost |= {name for name, chain in self.relied.items() if any(location.pack_id in gone for location in chain)}
        for name in lost:
            self.reused.pop(name, None)
            self.relied.pop(name, None)
            self._claimed.discard(name)
        return sorted(lost)

    @property
    def unread(self) -> AsymcheckError | None:
        """Why it may not be known what the store holds."""
        return self._known.unread

    def needed_packs(self) -> set[PackId]:
        """Return the packs of others that this save needs: of what it reuses, and of bases."""
        chains = (location for chain in self.relied.values() for location in chain)
        return {location.pack_id for location in (*self.reused.values(), *chains)}

    def close(self) -> None:
        """Release the locks of the packs, which pins protect by now."""
        for writer in self._sealed:
            writer.close()
        self._sealed.clear()

    def abandon(self) -> None:
        """Remove what this save has written and not sealed; what is sealed waits for collection."""
        with self._lock:
            self._is_given_up = True
        self.close()
        for writer in self._writers:
            try:
                writer.abandon()
            except AsymcheckError:
                # The first failure is the one to report; collection removes what is left.
                continue
        self._writers.clear()
        self._current = None
