"""DRAM ring: a file in shared memory with captured frames, which survives its process (SPEC.md §7.6)."""

from asymcheck.storage.shm.orphaned_rings import (
    RingCapture,
    RingFile,
    left_rings,
    look_at,
    newer_than_stored,
    open_left,
    remove_unread,
    run_of,
    survey_rings,
    wait_for_left,
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
    "left_rings",
    "look_at",
    "newer_than_stored",
    "open_left",
    "remove_unread",
    "run_of",
    "survey_rings",
    "wait_for_left",
]
