"""Naming: which checkpoint a user means by a step, or by the first digits of a save id."""

from __future__ import annotations

import dataclasses
import re

from asymcheck.errors import InvalidInputError
from asymcheck.format import layout
from asymcheck.recovery.resolve import by_save_id, candidates
from asymcheck.tiers.manifests import CheckpointFiles
from asymcheck.tiers.reading import ReadTier

_STEP = re.compile(r"[0-9]{1,12}\Z", re.ASCII)
_SAVE = re.compile(r"save:([0-9a-f]{1,32})\Z")


@dataclasses.dataclass(frozen=True)
class Named:
    """The checkpoint that a name stands for."""

    listing: CheckpointFiles
    """The checkpoint."""
    others: tuple[CheckpointFiles, ...]
    """Further checkpoints of the same step, newest first; a save id would name them."""


def find_checkpoint(tier: ReadTier, name: int | str, run: str) -> Named:
    """Return the checkpoint of a name: ``STEP``, ``save:DIGITS``, or either after ``RUN@``.

    A step that was saved several times means the checkpoint that a restore would take: the newest attempt on the line,
    or else of the newest generation. ``DIGITS`` are the first hexadecimal digits of a save id; one checkpoint must
    have them.

    Args:
        tier: where to look.
        name: the name; an integer is a step.
        run: the run of a name without ``RUN@``.

    Raises:
        InvalidInputError: it is no such name, or several checkpoints have these digits.
        CheckpointNotFoundError: no checkpoint has this name.
        HeadRecordError: the step was saved several times, and the line cannot be followed.
    """
    text = str(name)
    if "@" in text:
        run, text = text.split("@", 1)
    layout.check_run(run)
    if _STEP.match(text):
        return _by_step(tier, run, int(text))
    digits = _SAVE.match(text)
    if digits is None:
        raise InvalidInputError(
            f"{str(name)!r} names no checkpoint: give STEP or save:DIGITS (the first hexadecimal digits of a save id), "
            "or RUN@ and one of the two"
        )
    return Named(by_save_id(tier, run, digits[1]), ())


def _by_step(tier: ReadTier, run: str, step: int) -> Named:
    chosen = candidates(tier, run, step)[0]
    same = [listing for listing in tier.manifests.checkpoints(run) if listing.ref.step == step]
    others = [listing for listing in reversed(same) if listing.ref != chosen.ref]
    return Named(chosen, tuple(others))
