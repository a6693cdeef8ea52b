"""DRAM ring: a file in shared memory with captured frames, which survives its process (SPEC.md §B8)."""

from asymcheck.storage.shm.orphaned_rings import (
    RingCapture,
    RingFile,
    inspect_ring,
    list_rings,
    newer_than_stored,
    open_orphaned_ring,
    remove_unreadable_ring,
    restore_command,
    ring_run_and_store,
    survey_rings,
    wait_for_orphaned_ring,
)
from asymcheck.storage.shm.ring_reader import RingPack, RingReader
from asymcheck.storage.shm.ring_writer import Ring, RingSlot

__all__ = [
    "Ring",
    "RingCapture",
    "RingFile",
    "RingPack",
    "RingReader",
    "RingSlot",
    "inspect_ring",
    "list_rings",
    "newer_than_stored",
    "open_orphaned_ring",
    "remove_unreadable_ring",
    "restore_command",
    "ring_run_and_store",
    "survey_rings",
    "wait_for_orphaned_ring",
]
