"""Collect rings: what killed processes left in memory, and nobody needs any more (SPEC.md §8.5)."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from asymcheck.pipeline.ring_store import is_gone as is_store_gone
from asymcheck.pipeline.ring_store import is_of_a_copy
from asymcheck.tiers.dram_ring import RingFile, left_rings, look_at, open_left, remove_unread
from asymcheck.tiers.nvme import NvmeTier
from asymcheck.types import CheckpointRef


@dataclasses.dataclass(frozen=True)
class CollectedRing:
    """A ring of a killed process, and what became of it."""

    ring: RingFile
    """The ring, as it was found; its frames were not checked."""
    is_store_gone: bool
    """Whether its store is not where it was any more."""
    unsaved: int
    """Captures in it that are complete and not durable."""
    is_removed: bool
    """Whether it was removed, or would be."""


def collect_rings(tier: NvmeTier, folder: Path, *, discard: bool, dry_run: bool) -> list[CollectedRing]:
    """Remove rings of killed processes: of this store, and of stores that are gone.

    With ``discard`` also those with captures that are not durable.

    Raises:
        StorageError: one could not be read or removed.
    """
    collected = []
    store_id = tier.descriptor.store_id.hex()
    for path in left_rings(folder, None):
        ring = look_at(path, partial(_is_stored, tier), check=False)
        if ring is None or ring.is_alive:
            continue
        is_gone = ring.store_id != store_id
        if not is_gone and is_of_a_copy(tier, ring.store):
            continue
        if is_gone and not is_store_gone(tier, ring.store, bytes.fromhex(ring.store_id)):
            continue
        unsaved = sum(not capture.is_durable for capture in ring.captures)
        is_needless = ring.is_unmade or not (unsaved or ring.problem)
        is_removed = (is_needless or discard) and (dry_run or _remove(ring))
        collected.append(CollectedRing(ring, is_gone, unsaved, is_removed))
    return collected


def _is_stored(tier: NvmeTier, run: str, ref: CheckpointRef, rank: int) -> bool:
    return tier.manifests.listing(run, ref).has(rank)


def _remove(ring: RingFile) -> bool:
    """Remove a ring that nobody uses; return whether it is gone."""
    if ring.problem:
        return remove_unread(ring.path, damaged=not ring.is_unmade) != "used"
    try:
        reader = open_left(ring.path)
    except FileNotFoundError:
        return True
    if reader is None:
        return False
    with reader:
        reader.unlink()
    return True
