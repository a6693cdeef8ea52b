"""The line of training of one run, as its head records tell it."""

from __future__ import annotations

from collections.abc import Iterator

from asymcheck.errors import UNKNOWING, AsymcheckError
from asymcheck.format import layout
from asymcheck.tiers.manifests import generations
from asymcheck.tiers.reading import ReadTier
from asymcheck.verify.findings import Finding, Severity


def check_line(tier: ReadTier, run: str) -> Iterator[Finding]:
    """Check I6 and I9. A head record that the line does not lead through is a loss, but not of the newest checkpoint.

    Raises:
        RemoteUnreachableError, TooManyFilesError: nothing is known.
    """
    numbers = tier.manifests.heads(run)
    listed = [listing.ref.generation for listing in tier.manifests.checkpoints(run)]
    if numbers and not listed:
        # No invariant: there need not have been any, or they were deleted.
        lost = f"{layout.MANIFESTS}/{run} is lost"
        message = f"run {run!r} was begun, and has no checkpoint: none was saved, all were deleted, or {lost}"
        yield Finding("no-checkpoint", Severity.HINT, "", f"{layout.HEADS}/{run}", message)
    parents: dict[int, int] = {}
    problems: dict[int, tuple[str, str]] = {}
    for generation in generations([*numbers, *listed]):
        try:
            found = tier.manifests.read_head(run, generation)
        except UNKNOWING:
            raise
        except AsymcheckError as error:
            problems[generation] = ("damaged-head", str(error))
            continue
        if found is None and generation > 1:
            problems[generation] = ("missing-head", f"generation {generation} has no head record")
        elif found is not None:
            head, damaged = found
            parents[generation] = head.parent.generation if head.parent is not None else 0
            if damaged:
                message = "one of two copies of the head record is damaged"
                yield Finding("damaged-copy", Severity.WARNING, "I9", _path(run, generation), message)
    line = {max([1, *numbers, *listed])}
    while parents.get(min(line), 0):
        line.add(parents[min(line)])
    if min(line) > 1 and min(line) not in {*parents, *problems}:
        problems[min(line)] = ("missing-head", f"generation {min(line)} has no head record")
    for generation, (kind, message) in problems.items():
        severity = Severity.ERROR if generation in line else Severity.WARNING
        yield Finding(kind, severity, "I6", _path(run, generation), message)


def _path(run: str, generation: int) -> str:
    return f"{layout.HEADS}/{run}/{layout.head_name(generation)}"
