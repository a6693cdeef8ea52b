"""A ring that was left, read as if it were a pack: its frames are found and checked in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asymcheck.format.pack import Entries, PackHeader
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.tiers.dram_ring.reader import RingReader
from asymcheck.tiers.pack_index import digests_of
from asymcheck.tiers.slots import Slot
from asymcheck.types import Digest, PackId


class RingPack:
    """An :class:`asymcheck.tiers.reading.OpenPack` whose frames lie in memory; the reader stays its owner's."""

    damage = None

    def __init__(self, reader: RingReader) -> None:
        """Read the frames of ``reader``, which is kept open meanwhile."""
        header = reader.header
        self.entries: Entries = reader.entries
        self.header = PackHeader(
            PackId(header.ring_id), len(self.entries), header.data_bytes, header.created_ns, header.writer
        )
        self._reader = reader

    @property
    def path(self) -> Path:
        """The ring."""
        return self._reader.path

    def digests(self) -> list[Digest]:
        """Return the digests of all frames, in order."""
        return digests_of(self.entries)

    def expect(self, frames: Sequence[int]) -> None:
        """Say which frames will be read; memory needs no warning."""

    def stamped(self, sequence: int) -> int:
        """Return what the header of a frame says of its place: in a ring, the number of its block."""
        return int(self.entries["offset"][sequence]) // BLOCK_BYTES

    def read_frame(self, sequence: int, slot: Slot) -> memoryview:  # noqa: ARG002 - as another tier takes it
        """Return frame ``sequence`` where it lies, unchecked."""
        entry = self.entries[sequence]
        return self._reader.frame(int(entry["offset"]), int(entry["stored_length"]))

    def close(self) -> None:
        """Do nothing: it is read again by the next attempt."""
