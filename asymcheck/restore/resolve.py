"""Resolve: find the newest consistent checkpoint, and the reasons why newer ones were skipped (SPEC.md §A11)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import PurePath
from typing import TypeVar

from asymcheck.errors import (
    INCONCLUSIVE,
    CheckpointNotFoundError,
    FormatError,
    InconsistentCheckpointError,
    InvalidInputError,
    LockTimeoutError,
    MissingPartitionError,
    RecoveryError,
    SkippedCheckpointWarning,
    StorageError,
    UnsupportedFormatError,
    listed,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format.manifest import Manifest
from asymcheck.format.spans import named_spans
from asymcheck.restore.lineage import check_generations, read_line
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.types import CheckpointRef
from asymcheck.validation import metric_and_sign

_T = TypeVar("_T")

LISTINGS_MAX = 8
"""Maximum number of listings of a reader that a training overtakes."""
_SHOWN = 3
_STEPS_SHOWN = 8
_SAVES_SHOWN = 4


@dataclasses.dataclass
class Resolved:
    """A consistent checkpoint with its open packs."""

    run: str
    ref: CheckpointRef
    manifests: list[Manifest]
    sources: PartitionLocator  # locator of the partitions; the caller closes it


def candidates(tier: ReadTier, run: str, step: int | str | None) -> list[CheckpointFiles]:
    """Return the candidates for a restore, in the order to try them.

    Without ``step``: all checkpoints on the line of training, newest first. With ``step``: the saves of this step on
    the line, newest first, or else those of the newest generation that has the step. With ``save:DIGITS`` or
    ``best:METRIC``: that checkpoint; see :func:`named_checkpoint`.

    Raises:
        CheckpointNotFoundError: no checkpoint matches.
        HeadRecordError: the newest checkpoint is unknown, because a head record is damaged or lost.
        InvalidInputError: several checkpoints match the digits.
    """
    if isinstance(step, str):
        return [named_checkpoint(tier, run, step)]
    listings = tier.manifests.checkpoints(run)
    newest_first = sorted(listings, key=lambda listing: listing.ref, reverse=True)
    if step is None:
        line = read_line(tier, run)
        check_generations(tier, listings, line)
        matching = [listing for listing in newest_first if listing.ref in line]
    else:
        matching = [listing for listing in newest_first if listing.ref.step == step]
        if len(matching) > 1:
            # The line is read only here, so that a step with one save can be restored without head records.
            line = read_line(tier, run, step=step)
            check_generations(tier, listings, line, step)
            matching = [listing for listing in matching if listing.ref in line] or [
                listing for listing in matching if listing.ref.generation == matching[0].ref.generation
            ]
    if not matching and listings and step is None:
        last = max(listing.ref.step for listing in listings)
        raise CheckpointNotFoundError(
            f"store {tier.root}: all {len(listings)} checkpoints of run {run!r}, up to step {last}, are abandoned: "
            f"a later training began from scratch. Name a step to read it (step={last})"
        )
    if not matching:
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointNotFoundError(f"store {tier.root} has {wanted} of run {run!r}{available(tier, run, listings)}")
    return matching


def has_newer(tier: ReadTier, run: str, step: int | str | None, seen: Collection[CheckpointFiles]) -> bool:
    """Tell whether there is a candidate that an earlier listing lacks.

    A training may delete the checkpoints of a listing and save others, or complete the newest one (SPEC.md §A12).
    """
    with contextlib.suppress(CheckpointNotFoundError):
        return any(listing not in seen for listing in candidates(tier, run, step))
    return False


def find_readable(tier: ReadTier, run: str, step: int | str | None) -> tuple[CheckpointFiles, list[Manifest]]:
    """Return the first candidate for a restore whose manifests are readable, and these manifests.

    Raises:
        CheckpointNotFoundError, HeadRecordError, InvalidInputError: as for :func:`candidates`.
        InconsistentCheckpointError: the manifests of no candidate are readable.
        UnsupportedFormatError: a checkpoint requires a newer version of asymcheck.

    Warns:
        SkippedCheckpointWarning: a newer checkpoint is unfinished or damaged.
    """
    return first(tier, run, step, lambda listing: (listing, read_manifests(tier, listing)), "read")


def first(tier: ReadTier, run: str, step: int | str | None, read: Callable[[CheckpointFiles], _T], action: str) -> _T:
    """Return the result of ``read`` for the first candidate for which it does not raise; see :func:`find_readable`.

    The error, if there is no such candidate, says that none can be ``action``, such as ``copied``.
    """
    left = LISTINGS_MAX
    while True:
        listings, skipped = candidates(tier, run, step), list[str]()
        found = next(_each(listings, skipped, read), None)
        left -= 1
        # List again before an older checkpoint is taken.
        if not (skipped and left and has_newer(tier, run, step, frozenset(listings))):
            break
    if found is None:
        raise inconsistent(tier, run, step, skipped, action)
    warn_of_skipped(tier.root, run, skipped)
    return found


def warn_of_skipped(store: object, run: str, reasons: Iterable[str]) -> None:
    """Warn of newer checkpoints of a run that were skipped; ``store`` is the location of the store."""
    for reason in reasons:
        warn_user(f"store {store}, run {run!r}: skipped {reason}", SkippedCheckpointWarning)


def inconsistent(
    tier: ReadTier, run: str, step: int | str | None, skipped: Sequence[str], action: str
) -> InconsistentCheckpointError:
    """Return the error for ``skipped`` candidates, none of which allows an action, such as ``restored``."""
    problem = f"no checkpoint of run {run!r} can be {action}"
    if step is not None:
        name = step if isinstance(step, str) else f"step {step}"
        problem = f"{name} of run {run!r} cannot be {action}; other steps may be intact"
    message = f"store {tier.root}: {problem}; run asymcheck verify for a complete list of damage:"
    return InconsistentCheckpointError(message, skipped)


def named_checkpoint(tier: ReadTier, run: str, name: str) -> CheckpointFiles:
    """Return the checkpoint of a run that ``save:DIGITS`` or ``best:METRIC`` names.

    Raises:
        CheckpointNotFoundError: no checkpoint matches.
        HeadRecordError: the line, on which the best is sought, is unknown.
        InvalidInputError: several checkpoints match the digits.

    Warns:
        SkippedCheckpointWarning: the metrics of a checkpoint are unreadable.
    """
    best = metric_and_sign(name)
    return _by_save_id(tier, run, name.removeprefix("save:")) if best is None else best_checkpoint(tier, run, *best)


def best_checkpoint(
    tier: ReadTier,
    run: str,
    metric: str,
    sign: int,
    may_be: Callable[[CheckpointFiles], bool] = attrgetter("is_complete"),
) -> CheckpointFiles:
    """Return the checkpoint on the line with the lowest ``sign`` times a metric; of equal ones, the oldest.

    ``may_be`` tells which checkpoints count, by default complete ones.

    Raises:
        CheckpointNotFoundError: no such checkpoint has the metric.
        HeadRecordError: the line is unknown.
    """
    listings = tier.manifests.checkpoints(run)
    line = read_line(tier, run)
    check_generations(tier, listings, line)
    skipped: list[str] = []
    on_line = [listing for listing in listings if may_be(listing) and listing.ref in line]
    found = list(_each(on_line, skipped, lambda listing: (listing, metrics_of(tier.manifests.read_all(listing)))))
    warn_of_skipped(tier.root, run, skipped)
    measured = {listing: metrics[metric] for listing, metrics in found if not math.isnan(metrics.get(metric, math.nan))}
    if not measured:
        names = sorted({name for _, metrics in found for name in metrics})
        hint = f"; it has {', '.join(names)}" if names else available(tier, run, listings)
        raise CheckpointNotFoundError(
            f"store {tier.root}: no checkpoint of run {run!r} has the metric {metric!r}{hint}"
        )
    return min(measured, key=lambda listing: (sign * measured[listing], listing.ref))


def metrics_of(manifests: Iterable[Manifest]) -> dict[str, float]:
    """Return the metrics of all ranks; if two have the same name, that of the last rank."""
    return {name: value for manifest in manifests for name, value in manifest.header.metrics.items()}


def _by_save_id(tier: ReadTier, run: str, digits: str) -> CheckpointFiles:
    matching = [listing for listing in tier.manifests.checkpoints(run) if listing.ref.save_id.hex().startswith(digits)]
    if not matching:
        raise CheckpointNotFoundError(f"store {tier.root} has no checkpoint of run {run!r} whose save id is {digits}…")
    if len(matching) > 1:
        refs = [listing.ref for listing in matching[:_SAVES_SHOWN]]
        listed = "".join(f"\n  step {ref.step}: save:{ref.save_id.hex()}" for ref in refs)
        more = f"\n  … and {len(matching) - _SAVES_SHOWN} more" if len(matching) > _SAVES_SHOWN else ""
        raise InvalidInputError(
            f"save:{digits} matches {len(matching)} checkpoints of run {run!r}; give more digits:{listed}{more}"
        )
    return matching[0]


def available(tier: ReadTier, run: str, listings: list[CheckpointFiles]) -> str:
    """Return a hint for an error: available steps or runs."""
    return alternatives({listing.ref.step for listing in listings}, set(tier.manifests.runs()) - {run})


def alternatives(steps: Collection[int], runs: Collection[str]) -> str:
    """Return a hint for an error: these steps, or else these runs."""
    if steps:
        last = ", ".join(map(str, sorted(steps)[-_STEPS_SHOWN:]))
        return (
            f"; it has steps {last}" if len(steps) <= _STEPS_SHOWN else f"; it has {len(steps)} steps, the last {last}"
        )
    return f"; it has runs {', '.join(sorted(runs))}. Choose one with run= or --run" if runs else "; it is empty"


def check_run_exists(root: PurePath | str, run: str, runs: Collection[str]) -> None:
    """Raise CheckpointNotFoundError if a store does not have a run."""
    if run not in runs:
        raise CheckpointNotFoundError(f"store {root} has no run {run!r}{alternatives((), runs)}")


def resolve_each(tier: ReadTier, listings: list[CheckpointFiles], skipped: list[str]) -> Iterator[Resolved]:
    """Yield the consistent checkpoints of ``listings`` in order; append reasons for the others to ``skipped``.

    The consumer closes the ``sources`` of each.

    Raises:
        UnsupportedFormatError: a checkpoint requires a newer version of asymcheck.
        LockTimeoutError: another process has locked a pack for too long.
        TooManyFilesError: this process has reached its limit of open files.
    """

    def resolve(listing: CheckpointFiles) -> Resolved:
        with timed("find", 0, lambda: {"run": listing.run, "step": listing.ref.step}):
            return resolve_one(tier, listing, whole=True)

    return _each(listings, skipped, resolve)


def _each(listings: list[CheckpointFiles], skipped: list[str], read: Callable[[CheckpointFiles], _T]) -> Iterator[_T]:
    """Yield the results of ``read`` for checkpoints in order; append the reasons for damaged ones to ``skipped``."""
    skips = SkippedCheckpoints(skipped)
    for listing in listings:
        try:
            yield read(listing)
        except (UnsupportedFormatError, LockTimeoutError, *INCONCLUSIVE):
            # The checkpoint is intact, so using an older one would silently lose training.
            raise
        except (FormatError, RecoveryError, StorageError) as error:
            skips.add(listing.ref, str(error))


class SkippedCheckpoints:
    """Appends reasons for skipped checkpoints to a list. Consecutive checkpoints with one reason are one entry."""

    def __init__(self, skipped: list[str]) -> None:
        """Append to ``skipped``, which other code may append to as well."""
        self._skipped = skipped
        self._first: CheckpointRef | None = None
        self._reason = self._entry = ""
        self._older = 0

    def add(self, ref: CheckpointRef, reason: str) -> None:
        """Add the reason why a checkpoint was skipped."""
        if self._skipped and self._skipped[-1] == self._entry and reason == self._reason:
            self._older += 1
            self._skipped.pop()
            noun = "one" if self._older == 1 else "ones"
            self._entry = f"{self._first} and {self._older} older {noun}: {reason}"
        else:
            self._first, self._reason, self._older = ref, reason, 0
            self._entry = f"{ref}: {reason}"
        self._skipped.append(self._entry)


def resolve_one(tier: ReadTier, listing: CheckpointFiles, *, whole: bool = False) -> Resolved:
    """Check that a checkpoint is consistent, and open its packs.

    Without ``whole``, the shards of the ranks that save into this store suffice.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, FormatError, StorageError: the checkpoint is inconsistent.
    """
    if whole and listing.is_complete and not listing.is_whole:
        raise InconsistentCheckpointError(
            f"this store has only the shards of {named_spans(listing.store_ranks or ())} of {listing.world_size}. The "
            "others are in other stores; pass the location to which all stores push as remote=<URI>"
        )
    return resolve_manifests(tier, listing, read_manifests(tier, listing))


def resolve_manifests(tier: ReadTier, listing: CheckpointFiles, manifests: list[Manifest]) -> Resolved:
    """Open the packs that manifests of a checkpoint need.

    Raises:
        MissingPartitionError, StorageError: a partition is missing or unreadable.
    """
    try:
        sources = PartitionLocator.of_manifests(tier, manifests)
    except MissingPartitionError as error:
        again = tier.manifests.listing(listing.run, listing.ref)
        if not again.manifests:
            raise MissingPartitionError(f"it was deleted while it was being read ({error})") from error
        raise MissingPartitionError(f"{error}; {needed_by(manifests, error.digest)}") from error
    return Resolved(listing.run, listing.ref, manifests, sources)


def needed_by(manifests: Sequence[Manifest], digest: bytes | None) -> str:
    """Return the end of an error message: the tensors that need a partition, and the remedy."""
    names = [
        row.name + (f" of rank {manifest.header.rank}" if len(manifests) > 1 else "")
        for manifest in manifests
        for row in manifest.rows()
        if any(extent.digest == digest for extent in row.extents)
    ]
    ref = manifests[0].header.ref
    shown = listed(names, _SHOWN)
    needed = f"tensor {shown} of {ref}" if len(names) == 1 else f"{len(names):,} tensors of {ref}: {shown}"
    return f"needed by {needed}; run asymcheck verify"


def read_manifests(tier: ReadTier, listing: CheckpointFiles) -> list[Manifest]:
    """Read the manifests of all ranks that save into this store.

    Raises:
        InconsistentCheckpointError: a rank has no manifest, or two.
        FormatError, StorageError: a manifest is damaged or unreadable.
    """
    if not listing.is_complete:
        _check_readable(tier, listing)
        raise InconsistentCheckpointError(what_is_missing(listing))
    return tier.manifests.read_all(listing)


def _check_readable(tier: ReadTier, listing: CheckpointFiles) -> None:
    """Read one manifest of an incomplete checkpoint, which names the ranks that save into this store.

    Raises:
        FormatError, StorageError: no manifest is readable.
    """
    problem: FormatError | StorageError | None = None
    for name in () if listing.store_ranks is not None else listing.manifests:
        try:
            tier.manifests.read(listing.run, listing.ref, name)
        except MissingPartitionError:
            continue
        except (FormatError, StorageError) as error:
            problem = problem or error
        else:
            return
    if problem is not None:
        raise problem


def what_is_missing(listing: CheckpointFiles) -> str:
    """Return the reason why a checkpoint is incomplete."""
    if not listing.world_size:
        return "its manifests disagree on the world size"
    missing = listing.missing_ranks
    problem = "one rank has two manifests"
    if missing:
        many = len(missing) > 1
        ranks = listed(missing)
        problem = f"manifests of ranks {ranks} are missing" if many else f"the manifest of rank {ranks} is missing"
    return f"{problem} (world size {listing.world_size})"
