"""Rings as they are seen: what processes have in memory, and what killed ones left there, told without taking it up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asymcheck.tiers.dram_ring import RingCapture, RingFile, left_rings, look_at
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import CheckpointRef


def survey_rings(tier: ReadTier, folder: Path, run: str | None, *, check: bool) -> list[RingFile]:
    """Return the rings of a store, of one run or of all; a ring whose header cannot be read may be of any run."""

    def is_stored(run: str, ref: CheckpointRef, rank: int) -> bool:
        return tier.manifests.listing(run, ref).has(rank)

    looked = [look_at(path, is_stored, check=check) for path in left_rings(folder, tier.descriptor.store_id)]
    return [ring for ring in looked if ring is not None and (run is None or ring.run in (None, run))]


def newer_than_stored(tier: ReadTier, rings: Sequence[RingFile]) -> list[RingCapture]:
    """Return of each run the newest capture of dead processes, if it is newer than each checkpoint of the store.

    Of several ranks, one that all of them have that save into this store.
    """
    ranks: dict[tuple[str, CheckpointRef], set[int | None]] = {}
    captures: dict[tuple[str, CheckpointRef], RingCapture] = {}
    for ring in rings:
        for capture in () if ring.is_alive else ring.captures:
            if capture.ref is not None:
                ranks.setdefault((capture.run, capture.ref), set()).add(ring.rank)
                captures[capture.run, capture.ref] = capture
    newest = {run: ref for run, ref in sorted(captures) if len(ranks[run, ref]) == captures[run, ref].store_size}
    found = []
    for run, ref in newest.items():
        stored = [listing.ref for listing in tier.manifests.checkpoints(run)]
        if not captures[run, ref].is_durable and all(ref > other for other in stored):
            found.append(captures[run, ref])
    return found
