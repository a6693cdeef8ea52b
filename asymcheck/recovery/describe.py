"""Describe: a checkpoint as a value, from what its manifests say about it."""

from __future__ import annotations

from collections.abc import Sequence

from asymcheck.format.manifest import Manifest
from asymcheck.recovery.line import Line
from asymcheck.tiers.nvme import CheckpointFiles
from asymcheck.types import Checkpoint


def describe(listing: CheckpointFiles, manifests: Sequence[Manifest] | None, line: Line) -> Checkpoint:
    """Return a checkpoint as a value; ``manifests`` is None when they are not all there, or one cannot be read."""
    metrics: dict[str, float] = {}
    for manifest in manifests or ():
        metrics.update(manifest.header.metrics)
    return Checkpoint(
        run=listing.run,
        step=listing.ref.step,
        generation=listing.ref.generation,
        save_id=listing.ref.save_id.hex(),
        world_size=listing.world_size,
        complete=manifests is not None,
        on_line=listing.ref in line,
        created_ns=int.from_bytes(listing.ref.save_id[:8], "big"),
        state_bytes=sum(manifest.total_bytes for manifest in manifests or ()),
        metrics=metrics,
    )
