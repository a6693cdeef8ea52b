"""Resolve: find the newest consistent checkpoint, and say why any newer one was passed over (SPEC.md §10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import PurePath

from asymcheck.errors import (
    UNKNOWING,
    CheckpointNotFoundError,
    FormatError,
    InconsistentCheckpointError,
    InvalidInputError,
    LockTimeoutError,
    MissingPartitionError,
    RecoveryError,
    StorageError,
    UnsupportedFormatError,
)
from asymcheck.events import Detail, timed
from asymcheck.format.manifest import Manifest
from asymcheck.format.spans import named_spans
from asymcheck.restore.lineage import check_generations, read_line
from asymcheck.restore.partition_locator import PartitionLocator, PartitionSet
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.types import CheckpointRef, PackId

_SHOWN = 3
_STEPS_SHOWN = 8
_SAVES_SHOWN = 4


@dataclasses.dataclass
class Resolved:
    """A consistent checkpoint, with the packs that hold its partitions open."""

    run: str
    ref: CheckpointRef
    manifests: list[Manifest]
    sources: PartitionLocator
    """Where its partitions lie; the caller closes it."""


def candidates(tier: ReadTier, run: str, step: int | str | None) -> list[CheckpointFiles]:
    """Return the checkpoints that may be restored, the one to try first in front.

    Without ``step``: those on the line, newest first. With ``step``: the attempts to save it on the line, newest
    first; if the step is on no line, those of the newest generation that has it. With
    ``save:DIGITS``: that save.

    Raises:
        CheckpointNotFoundError: there is none.
        HeadRecordError: which one is newest cannot be known.
        InvalidInputError: several checkpoints have these digits.
    """
    if isinstance(step, str):
        return [by_save_id(tier, run, step.removeprefix("save:"))]
    listings = tier.manifests.checkpoints(run)
    newest_first = sorted(listings, key=lambda listing: listing.ref, reverse=True)
    if step is None:
        line = read_line(tier, run)
        check_generations(listings, line)
        found = [listing for listing in newest_first if listing.ref in line]
    else:
        found = [listing for listing in newest_first if listing.ref.step == step]
        if len(found) > 1:
            # Only now does the line matter; a lost head record must not stop the restore of a step that is there once.
            line = read_line(tier, run, step=step)
            check_generations(listings, line, step)
            found = [listing for listing in found if listing.ref in line] or [
                listing for listing in found if listing.ref.generation == found[0].ref.generation
            ]
    if not found and listings and step is None:
        last = max(listing.ref.step for listing in listings)
        raise CheckpointNotFoundError(
            f"store {tier.root}: all {len(listings)} checkpoints of run {run!r}, up to step {last}, are abandoned: "
            f"training began anew without them. Name one to read it (step={last})"
        )
    if not found:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointNotFoundError(
            f"store {tier.root} has {what} of run {run!r}{what_is_there(tier, run, listings)}"
        )
    return found


def by_save_id(tier: ReadTier, run: str, digits: str) -> CheckpointFiles:
    """Return the checkpoint of a run whose save id begins with these hexadecimal digits.

    Raises:
        CheckpointNotFoundError: there is none.
        InvalidInputError: there are several.
    """
    found = [listing for listing in tier.manifests.checkpoints(run) if listing.ref.save_id.hex().startswith(digits)]
    if not found:
        raise CheckpointNotFoundError(f"store {tier.root} has no checkpoint of run {run!r} whose save id is {digits}…")
    if len(found) > 1:
        listed = "".join(f"\n  step {one.ref.step}: save:{one.ref.save_id.hex()}" for one in found[:_SAVES_SHOWN])
        more = f"\n  … and {len(found) - _SAVES_SHOWN} more" if len(found) > _SAVES_SHOWN else ""
        raise InvalidInputError(
            f"save:{digits} could be {len(found)} checkpoints of run {run!r}; give more digits:{listed}{more}"
        )
    return found[0]


def what_is_there(tier: ReadTier, run: str, listings: list[CheckpointFiles]) -> str:
    """Say for an error what could be asked for instead."""
    return alternatives({listing.ref.step for listing in listings}, set(tier.manifests.runs()) - {run})


def alternatives(steps: Collection[int], runs: Collection[str]) -> str:
    """Say for an error what could be asked for instead: one of these steps, or else one of these runs."""
    if steps:
        last = ", ".join(map(str, sorted(steps)[-_STEPS_SHOWN:]))
        return (
            f"; it has steps {last}" if len(steps) <= _STEPS_SHOWN else f"; it has {len(steps)} steps, the last {last}"
        )
    return f"; it has runs {', '.join(sorted(runs))}" if runs else "; it is empty"


def check_run_exists(root: PurePath | str, run: str, runs: Collection[str]) -> None:
    """Refuse a run that is none of a store's."""
    if run not in runs:
        raise CheckpointNotFoundError(f"store {root} has no run {run!r}{alternatives((), runs)}")


def resolve_each(
    tier: ReadTier, listings: list[CheckpointFiles], skipped: list[str], *, whole: bool = True
) -> Iterator[Resolved]:
    """Yield the consistent ones among ``listings`` in order; append to ``skipped`` why others were passed over.

    The consumer closes the ``sources`` of each. Unless ``whole``, what the ranks of this store saved is enough.

    Raises:
        UnsupportedFormatError: a checkpoint needs a newer program.
        LockTimeoutError: another process has locked a pack for too long.
        TooManyFilesError: a checkpoint needs more packs than this process may open.
    """
    skips = SkippedCheckpoints(skipped)
    for listing in listings:
        try:
            with timed("find", 0, partial(_named, listing)):
                resolved = resolve_one(tier, listing, whole=whole)
            yield resolved
        except (UnsupportedFormatError, LockTimeoutError, *UNKNOWING):
            # Not damage: the checkpoint is sound, and an older one in its place would be a silent loss of training.
            raise
        except (FormatError, RecoveryError, StorageError) as error:
            skips.add(listing.ref, str(error))


class SkippedCheckpoints:
    """Appends to a list why checkpoints were passed over; neighbours with one reason are one entry."""

    def __init__(self, skipped: list[str]) -> None:
        """Append to ``skipped``, to which others append as well."""
        self._skipped = skipped
        self._first: CheckpointRef | None = None
        self._reason = self._entry = ""
        self._older = 0

    def add(self, ref: CheckpointRef, reason: str) -> None:
        """Say why one was passed over."""
        if self._skipped and self._skipped[-1] == self._entry and reason == self._reason:
            self._older += 1
            self._skipped.pop()
            noun = "one" if self._older == 1 else "ones"
            self._entry = f"{self._first} and {self._older} older {noun}: {reason}"
        else:
            self._first, self._reason, self._older = ref, reason, 0
            self._entry = f"{ref}: {reason}"
        self._skipped.append(self._entry)


def _named(listing: CheckpointFiles) -> Detail:
    return {"run": listing.run, "step": listing.ref.step}


def resolve_one(tier: ReadTier, listing: CheckpointFiles, *, whole: bool = False) -> Resolved:
    """Check that one checkpoint is consistent and open the packs that it needs.

    Unless ``whole``, that of the ranks that save into this store is enough.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, FormatError, StorageError: it is not, and why.
    """
    if whole and listing.is_complete and not listing.is_whole:
        raise InconsistentCheckpointError(_is_elsewhere(listing))
    manifests = read_manifests(tier, listing)
    return resolve_manifests(tier, listing, manifests)


def resolve_manifests(tier: ReadTier, listing: CheckpointFiles, manifests: list[Manifest]) -> Resolved:
    """Open the packs that some manifests of a checkpoint need.

    Raises:
        MissingPartitionError, StorageError: some of it is not there.
    """
    hints: dict[PackId, None] = {}
    for manifest in manifests:
        hints.update(dict.fromkeys(manifest.header.packs))
    try:
        sources = PartitionLocator(tier, PartitionSet.of_manifests(manifests), hints)
    except MissingPartitionError as error:
        again = tier.manifests.listing(listing.run, listing.ref)
        if not again.manifests:
            raise MissingPartitionError(f"it was deleted while it was being read ({error})") from error
        raise MissingPartitionError(f"{error}; {needed_by(manifests, listing.ref, error.digest)}") from error
    return Resolved(listing.run, listing.ref, manifests, sources)


def needed_by(manifests: Sequence[Manifest], ref: CheckpointRef, digest: bytes | None) -> str:
    """Say for an error which tensors need a partition, and what to do."""
    names = [
        row.name + (f" of rank {manifest.header.rank}" if len(manifests) > 1 else "")
        for manifest in manifests
        for row in manifest.rows(range(len(manifest)))
        if any(extent.digest == digest for extent in row.extents)
    ]
    return f"needed by tensor {', '.join(names[:_SHOWN])}, {ref}; run asymcheck verify"


def _is_elsewhere(listing: CheckpointFiles) -> str:
    spans = named_spans(listing.store_ranks or ())
    return (
        f"this store has what {spans} of {listing.world_size} saved; the others' parts lie in theirs, and in the "
        "location to which all push, when they have: give that as remote"
    )


def read_manifests(tier: ReadTier, listing: CheckpointFiles) -> list[Manifest]:
    """Read the manifests of all ranks that save into this store.

    Raises:
        InconsistentCheckpointError: ranks are missing, or there are two of one.
        FormatError, StorageError: one is damaged, or cannot be read.
    """
    if not listing.is_complete:
        _check_readable(tier, listing)
        raise InconsistentCheckpointError(what_is_missing(listing))
    return tier.manifests.read_all(listing)


def _check_readable(tier: ReadTier, listing: CheckpointFiles) -> None:
    """Read a manifest of a checkpoint that seems to lack some: they alone can say which of them belong here.

    Raises:
        FormatError, StorageError: none can be read; that is not that others are missing.
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
    """Say why a checkpoint is not complete."""
    if not listing.world_size:
        return "its manifests disagree on the world size"
    missing = listing.missing_ranks
    what = "one rank has two manifests"
    if missing:
        who = ", ".join(map(str, missing[:8]))
        what = f"manifests of ranks {who} are missing" if len(missing) > 1 else f"the manifest of rank {who} is missing"
    return f"{what} (world size {listing.world_size})"
