"""Describe: what is known of checkpoints without reading a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asymcheck.errors import UNKNOWING, AsymcheckError, HeadRecordError
from asymcheck.format.manifest import Manifest
from asymcheck.recovery.line import Line, check_generations, read_line
from asymcheck.recovery.resolve import read_manifests
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier
from asymcheck.types import Checkpoint, CheckpointRef

if TYPE_CHECKING:
    from asymcheck.recovery.load import Loaded


def known_line(tier: ReadTier, run: str) -> Line | None:
    """Return the line of a run; None when a head record is lost, for then nobody knows."""
    try:
        line = read_line(tier, run)
        check_generations(tier.manifests.checkpoints(run), line)
    except HeadRecordError:
        return None
    return line


def is_on_line(tier: ReadTier, run: str, ref: CheckpointRef) -> bool | None:
    """Tell whether a checkpoint leads to the present; None when nobody knows."""
    line = known_line(tier, run)
    return None if line is None else ref in line


def describe(tier: ReadTier, listing: CheckpointFiles, line: Line | None) -> Checkpoint:
    """Describe a checkpoint by its name and its manifests."""
    try:
        return describe_by(listing, read_manifests(tier, listing), line)
    except UNKNOWING:
        raise
    except AsymcheckError:
        return describe_by(listing, None, line)


def describe_by(listing: CheckpointFiles, manifests: Sequence[Manifest] | None, line: Line | None) -> Checkpoint:
    """Describe a checkpoint; ``manifests`` is None when they are not all there, or one cannot be read."""
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
        on_line=None if line is None else listing.ref in line,
        created_ns=int.from_bytes(listing.ref.save_id[:8], "big"),
        state_bytes=sum(manifest.total_bytes for manifest in manifests or ()),
        metrics=metrics,
        store_ranks=None if listing.is_whole else listing.store_ranks,
    )


def describe_loaded(tier: ReadTier, loaded: Loaded, *, is_newest: bool) -> Checkpoint:
    """Describe a checkpoint that was read; the newest one lies on the line."""
    header = loaded.manifest.header
    metrics = dict(header.metrics)
    for manifest in loaded.others:
        metrics.update(manifest.header.metrics)
    return Checkpoint(
        run=loaded.run,
        step=loaded.ref.step,
        generation=loaded.ref.generation,
        save_id=loaded.ref.save_id.hex(),
        world_size=header.world_size,
        complete=True,
        on_line=is_newest or is_on_line(tier, loaded.run, loaded.ref),
        created_ns=int.from_bytes(loaded.ref.save_id[:8], "big"),
        state_bytes=sum(manifest.total_bytes for manifest in (loaded.manifest, *loaded.others)),
        metrics=metrics,
    )
