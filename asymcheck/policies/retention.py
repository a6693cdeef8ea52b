"""Retention: which checkpoints are kept, and why. A pure function of what is known of them and of the time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Literal

from asymcheck.errors import InvalidInputError
from asymcheck.types import Checkpoint

Best = tuple[str, int] | tuple[str, int, Literal["min", "max"]]
"""Name of a metric, how many, and whether small or great is good; small, if not said."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run are kept: those that any of these rules keeps. At least one is given.

    The rules are about the line of training. Whatever they say, the newest consistent checkpoint stays, and with it
    what is newer and incomplete; what somebody reads stays until the reading is done.
    """

    keep_last: int | None = None
    """The newest so many."""
    keep_every: int | None = None
    """Those whose step is a multiple of this."""
    keep_best: Best | None = None
    """The best so many by a metric, for instance ``("loss", 3)`` or ``("accuracy", 1, "max")``.

    If two are equal, the older is better. A checkpoint that lacks the metric, or has NaN for it, is not among the best.
    If no checkpoint has the metric, all stay: its name may be mistyped.
    """
    keep_for: timedelta | None = None
    """Those whose save began no longer ago than this."""
    keep_abandoned: bool = True
    """Whether all that is not on the line is kept; if not, only ``keep_for`` keeps it."""

    def __post_init__(self) -> None:
        """Refuse rules that mean nothing."""
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInputError(f"{name}={value!r:.100}: give an integer, 1 or more")
        if self.keep_best is not None:
            check_best("keep_best", self.keep_best)
        span: object = self.keep_for
        if span is not None and (not isinstance(span, timedelta) or span < timedelta()):
            raise InvalidInputError(f"keep_for={span!r:.100}: give a timedelta, not below zero")
        if type(self.keep_abandoned) is not bool:
            raise InvalidInputError(f"keep_abandoned={self.keep_abandoned!r:.100}: give True or False")
        if (self.keep_last, self.keep_every, self.keep_best, self.keep_for) == (None,) * 4:
            raise InvalidInputError(
                "a retention without a rule: give keep_last, keep_every, keep_best or keep_for; to keep everything, "
                "give no retention"
            )


def check_best(field: str, best: object) -> None:
    """Refuse what does not say which metric, how many, and in which direction."""
    fields = (*best, "min")[:3] if isinstance(best, tuple) and len(best) in (2, 3) else ("", 0, "")
    name, count, direction = fields
    if type(name) is not str or not name or type(count) is not int or count < 1 or direction not in ("min", "max"):
        raise InvalidInputError(
            f"{field}={best!r:.100}: give a metric and how many, such as ('loss', 3), or ('accuracy', 1, 'max')"
        )


def check_retention(keep: object) -> Retention:
    """Return a retention, or refuse what is none."""
    if not isinstance(keep, Retention):
        raise InvalidInputError(f"keep={keep!r:.100}: give asymcheck.Retention(keep_last=…), or None")
    return keep


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Decision of retention about one checkpoint."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]
    """Why it stays; empty for one that goes."""

    @property
    def stays(self) -> bool:
        """Whether it stays."""
        return bool(self.reasons)


def judge(
    retention: Retention, checkpoints: Sequence[Checkpoint], now_ns: int, held: Mapping[str, str] = MappingProxyType({})
) -> list[Verdict]:
    """Say of each checkpoint of one run whether it stays, and why; in the order of ``CheckpointRef``.

    Args:
        retention: the rules.
        checkpoints: all that the run has.
        now_ns: the present, nanoseconds since 1970-01-01 UTC.
        held: save ids that stay whatever the rules say, with the reason: the newest consistent one among them.
    """
    ordered = sorted(checkpoints, key=lambda one: one.ref)
    # What is incomplete counts for nothing: it might be all that was kept.
    whole = [one for one in ordered if one.on_line and one.complete]
    last = retention.keep_last or 0
    newest = {one.save_id for one in whole[max(len(whole) - last, 0) :]}
    best = {} if retention.keep_best is None else _best(retention.keep_best, whole)

    def reasons(one: Checkpoint) -> Iterator[str]:
        if one.save_id in held:
            yield held[one.save_id]
        yield from _beyond_the_rules(retention, one, whole)
        if one.save_id in newest:
            yield f"keep last {last}"
        if retention.keep_every is not None and one.on_line and one.step % retention.keep_every == 0:
            yield f"keep every {retention.keep_every}"
        if one.save_id in best:
            yield best[one.save_id]
        if retention.keep_for is not None and one.created_ns >= now_ns - _nanoseconds(retention.keep_for):
            yield f"keep for {retention.keep_for}"

    return [Verdict(one, tuple(reasons(one))) for one in ordered]


def _nanoseconds(span: timedelta) -> int:
    """Return a span in integers: a float of nanoseconds since 1970 is off by hundreds of them."""
    return span // timedelta(microseconds=1) * 1000


def _beyond_the_rules(retention: Retention, one: Checkpoint, whole: Sequence[Checkpoint]) -> list[str]:
    if one.on_line is None:
        return ["whether it is on the line cannot be known"]
    if not one.on_line:
        return ["abandoned"] if retention.keep_abandoned else []
    if whole and one.save_id == whole[-1].save_id:
        return ["newest"]
    if not one.complete and (not whole or whole[-1].ref < one.ref):
        # Other ranks may be saving it.
        return ["incomplete, and newer than the newest that is complete"]
    return []


def _best(best: Best, whole: Sequence[Checkpoint]) -> dict[str, str]:
    """Return why the best are kept, by save id."""
    name, count = best[:2]
    if all(name not in one.metrics for one in whole):
        # A name that was mistyped, as a rule: to keep nothing for it would delete what was meant to stay.
        return {one.save_id: f"no checkpoint has the metric {name}" for one in whole}
    return {
        one.save_id: f"keep best {count} by {name}: {one.metrics[name]:g}, number {place}"
        for place, one in enumerate(best_by(best, whole), 1)
    }


def best_by(best: Best, ordered: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the best by a metric among those in ``ordered``, oldest first; the best one in front."""
    name, count, direction = (*best, "min")[:3]
    sign = 1 if direction == "min" else -1
    having = [one for one in ordered if not math.isnan(one.metrics.get(name, math.nan))]
    return sorted(having, key=lambda one: sign * one.metrics[name])[:count]
