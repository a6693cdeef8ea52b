"""The DRAM ring: captured frames in a file in memory, which outlives the process that wrote them (SPEC.md §7.6)."""

from asymcheck.tiers.dram_ring.left import left_rings, remove_unmade
from asymcheck.tiers.dram_ring.reader import RingReader
from asymcheck.tiers.dram_ring.ring import Ring, RingSlot

__all__ = ["Ring", "RingReader", "RingSlot", "left_rings", "remove_unmade"]
