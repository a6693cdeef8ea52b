"""Collect rings: what killed processes left in memory, and nobody needs any more (SPEC.md §8.5)."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from asymcheck.errors import FormatError, StorageError
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.format.record import RECORD_BYTES, decode_descriptor
from asymcheck.tiers.dram_ring import RingFile, left_rings, look_at, open_left, remove_unmade, remove_unread
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
        if is_gone and not _is_gone(tier, ring):
            continue
        unsaved = sum(not capture.is_durable for capture in ring.captures)
        is_needless = ring.is_unmade or not (unsaved or ring.problem)
        is_removed = (is_needless or discard) and (dry_run or _remove(ring))
        collected.append(CollectedRing(ring, is_gone, unsaved, is_removed))
    return collected


def _is_stored(tier: NvmeTier, run: str, ref: CheckpointRef, rank: int) -> bool:
    return tier.manifests.listing(run, ref).has(rank)


def _is_gone(tier: NvmeTier, ring: RingFile) -> bool:
    """Tell whether the store of a ring is certainly not where it was."""
    if ring.store is None or not Path(ring.store).is_absolute() or "\0" in ring.store:
        # Where it was, nobody can tell from that.
        return False
    path = Path(ring.store) / DESCRIPTOR_NAME
    try:
        data = tier.files.read_small(path, RECORD_BYTES)
        return data is None or decode_descriptor(data, str(path))[0].store_id.hex() != ring.store_id
    except (StorageError, FormatError):
        # Damaged, or not for this user to see; but there.
        return False


def _remove(ring: RingFile) -> bool:
    """Remove a ring that nobody uses; return whether it is gone."""
    if ring.problem:
        return remove_unmade(ring.path) if ring.is_unmade else remove_unread(ring.path)
    try:
        reader = open_left(ring.path)
    except FileNotFoundError:
        return True
    if reader is None:
        return False
    with reader:
        reader.unlink()
    return True
