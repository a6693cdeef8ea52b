"""Packing: frames into packs, each partition stored once, up to the moment when the packs are complete and durable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from asymcheck.config import WRITER
from asymcheck.errors import AsymcheckError
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.pack import PackHeader
from asymcheck.tiers.nvme import Catalog, NvmeTier, PackWriter
from asymcheck.types import Digest, Location, PackId


class KnownPartitions:
    """Which partitions the store holds already, believed only when the pack's own index says so too."""

    def __init__(self, tier: NvmeTier, catalog: Catalog) -> None:
        """Look digests up in ``catalog`` and check them against packs of ``tier``."""
        self._tier = tier
        self._catalog = catalog
        self._indexes: dict[PackId, dict[Digest, int]] = {}
        self._gone: set[PackId] = set()
        self._lock = threading.Lock()

    def find(self, name: Digest) -> Location | None:
        """Return where a partition lies; None when it must be written."""
        with self._catalog.read() as transaction:
            location = transaction.location(name)
        if location is None or location.pack_id in self._gone:
            return None
        return location if self._index(location.pack_id).get(name) == location.plain_length else None

    def forget(self, packs: Sequence[PackId]) -> None:
        """Never name these packs again: collection has taken them."""
        with self._lock:
            self._gone.update(packs)

    def _index(self, pack_id: PackId) -> dict[Digest, int]:
        with self._lock:
            if pack_id not in self._indexes:
                self._indexes[pack_id] = self._read_index(pack_id)
            return self._indexes[pack_id]

    def _read_index(self, pack_id: PackId) -> dict[Digest, int]:
        try:
            pack = self._tier.open_pack(pack_id)
        except AsymcheckError:
            # Missing, locked for removal, or damaged: whatever it is, the partition is written again.
            return {}
        try:
            if pack.damage is not None:
                return {}
            return dict(zip(pack.digests(), pack.entries["plain_length"].tolist(), strict=True))
        finally:
            pack.close()


class Packing:
    """The packs of one save. Threads may call :meth:`put` together; the rest is for one thread."""

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
        self.written: dict[Digest, Location] = {}
        """Partitions written by this save, once their packs are sealed."""
        self.reused: dict[Digest, Location] = {}
        """Partitions that the store held already."""
        self.packs: dict[PackId, PackHeader] = {}
        """Packs of this save, once they are sealed."""
        self.written_bytes = 0
        """Payload bytes of frames written."""

    def expect(self, frame_bytes: int) -> None:
        """Say how many bytes of frames are to come, at most: a freed pack of that size is looked for."""
        with self._lock:
            self._needed_bytes = frame_bytes

    def put(self, name: Digest, length: int, write: Callable[[PackWriter, FrameDescriptor], object]) -> None:
        """Store a partition of ``length`` bytes with ``write``, unless this save or the store has it already.

        Raises:
            StorageError: the device refused; :meth:`abandon` comes next.
        """
        if self.claim(name):
            write(self._writer(frame_length(length)), FrameDescriptor.identity(name, length))
            with self._lock:
                self.written_bytes += length

    def claim(self, name: Digest) -> bool:
        """Tell whether a partition must be written: the first time it is asked for, when the store lacks it."""
        with self._lock:
            if name in self._claimed:
                return False
            self._claimed.add(name)
        location = self._known.find(name)
        if location is not None:
            with self._lock:
                self.reused[name] = location
        return location is None

    def _writer(self, length: int) -> PackWriter:
        with self._lock:
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
        self._known.forget(packs)
        lost = [name for name, location in self.reused.items() if location.pack_id in set(packs)]
        for name in lost:
            del self.reused[name]
            self._claimed.discard(name)
        return lost

    def close(self) -> None:
        """Release the locks of the packs, which pins protect by now."""
        for writer in self._sealed:
            writer.close()
        self._sealed.clear()

    def abandon(self) -> None:
        """Remove what this save has written and not sealed; what is sealed waits for collection."""
        self.close()
        for writer in self._writers:
            try:
                writer.abandon()
            except AsymcheckError:
                # The first failure is the one to report; collection removes what is left.
                continue
        self._writers.clear()
        self._current = None
