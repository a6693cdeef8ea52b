"""Describe: what is known of checkpoints without reading a tensor."""

from __future__ import annotations

import dataclasses
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
    found = Checkpoint.of(
        listing.run,
        listing.ref,
        listing.world_size,
        *_sums(manifests or ()),
        complete=manifests is not None,
        on_line=None if line is None else listing.ref in line,
    )
    return found if listing.is_whole else dataclasses.replace(found, store_ranks=listing.store_ranks)


def _sums(manifests: Sequence[Manifest]) -> tuple[dict[str, float], int]:
    """Return the metrics that ranks have saved, and the bytes of their tensors."""
    metrics: dict[str, float] = {}
    for manifest in manifests:
        metrics.update(manifest.header.metrics)
    return metrics, sum(manifest.total_bytes for manifest in manifests)


def describe_loaded(tier: ReadTier, loaded: Loaded, *, is_newest: bool) -> Checkpoint:
    """Describe a checkpoint that was read; the newest one lies on the line."""
    on_line = is_newest or is_on_line(tier, loaded.run, loaded.ref)
    sums = _sums([loaded.manifest, *loaded.others])
    return Checkpoint.of(loaded.run, loaded.ref, loaded.manifest.header.world_size, *sums, on_line=on_line)
