"""Which checkpoints of a store a push or a pull moves."""

from __future__ import annotations

from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import CheckpointNotFoundError, InconsistentCheckpointError, SkippedCheckpointWarning, warn_user
from asymcheck.recovery.describe import known_line
from asymcheck.recovery.resolve import candidates, check_run_exists, resolve_each
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier


def selected(tier: ReadTier, run: str | None, step: int | str | None, *, everything: bool) -> list[CheckpointFiles]:
    """Return the newest consistent checkpoint, that of ``step``, or all complete ones on the line, oldest first.

    Raises:
        CheckpointNotFoundError: there is none.
        InconsistentCheckpointError: none is consistent.
        HeadRecordError: which one is newest cannot be known.

    Warns:
        SkippedCheckpointWarning: a newer checkpoint was passed over.
    """
    if everything:
        return _all(tier, run)
    listings = candidates(tier, run or DEFAULT_RUN, step)
    skipped: list[str] = []
    for resolved in resolve_each(tier, listings, skipped, whole=False):
        resolved.sources.close()
        for reason in skipped:
            warn_user(f"run {resolved.run!r}: passed over {reason}", SkippedCheckpointWarning)
        return [listing for listing in listings if listing.ref == resolved.ref]
    raise InconsistentCheckpointError(f"store {tier.root}: no checkpoint can be copied:", skipped)


def _all(tier: ReadTier, run: str | None) -> list[CheckpointFiles]:
    runs = tier.manifests.runs()
    if run is not None:
        check_run_exists(tier.root, run, runs)
        runs = [run]
    found: list[CheckpointFiles] = []
    for name in runs:
        line = known_line(tier, name)
        listings = tier.manifests.checkpoints(name)
        found += [one for one in listings if one.is_complete and (line is None or one.ref in line)]
    if not found:
        raise CheckpointNotFoundError(f"store {tier.root} has no complete checkpoint to copy")
    return found
