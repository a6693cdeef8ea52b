"""Retention: decide which checkpoints to keep, and why. Pure functions of an inventory and the time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Literal

from asymcheck.config import check_numbers
from asymcheck.errors import InvalidInputError
from asymcheck.types import Checkpoint

Best = tuple[str, int] | tuple[str, int, Literal["min", "max"]]
"""Name of a metric, number of checkpoints, and direction; ``"min"`` by default."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """Rules that keep checkpoints of a run. A checkpoint stays if any rule keeps it; at least one rule is required.

    The rules apply to checkpoints on the line of training. The newest consistent checkpoint and newer incomplete ones
    always stay. A checkpoint that is being read stays until the reader has finished.
    """

    keep_last: int | None = None
    """Keep this many of the newest checkpoints."""
    keep_every: int | None = None
    """Keep checkpoints whose step is a multiple of this.

    Choose a multiple of ``Checkpointer(every=…)``, because other steps are not saved.
    """
    keep_best: Best | None = None
    """Keep the best checkpoints by a metric, for instance ``("loss", 3)`` or ``("accuracy", 1, "max")``.

    If two are equal, the older is better. A checkpoint without the metric, or with NaN, is not among the best.
    If no checkpoint has the metric, all stay, because the name may be mistyped.
    """
    keep_for: timedelta | None = None
    """Keep checkpoints whose save began within this time."""
    keep_abandoned: bool = True
    """Keep all checkpoints that are not on the line of training; if False, only ``keep_for`` keeps them.

    By default they stay, because a return to an older step may be a mistake. Each return leaves at most the checkpoints
    that the rules had kept until then.
    """

    def __post_init__(self) -> None:
        """Refuse invalid rules."""
        check_numbers(self, {"keep_last": (1, math.inf), "keep_every": (1, math.inf)})
        if self.keep_best is not None:
            check_best("keep_best", self.keep_best)
        span: object = self.keep_for
        if span is not None and (not isinstance(span, timedelta) or span < timedelta()):
            raise InvalidInputError(f"keep_for={span!r:.100}: give a timedelta that is not negative")
        if type(self.keep_abandoned) is not bool:
            raise InvalidInputError(f"keep_abandoned={self.keep_abandoned!r:.100}: give True or False")
        if (self.keep_last, self.keep_every, self.keep_best, self.keep_for) == (None,) * 4:
            raise InvalidInputError(
                "Retention() has no rule: give keep_last, keep_every, keep_best or keep_for. To keep everything, pass "
                "keep=None"
            )


def check_best(field: str, best: object) -> None:
    """Refuse anything but a metric, a number and a direction."""
    fields = (*best, "min")[:3] if isinstance(best, tuple) and len(best) in (2, 3) else ("", 0, "")
    name, count, direction = fields
    if type(name) is not str or not name or type(count) is not int or count < 1 or direction not in ("min", "max"):
        raise InvalidInputError(
            f"{field}={best!r:.100}: give a metric and a number, such as ('loss', 3), or ('accuracy', 1, 'max')"
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Decision of retention about one checkpoint."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]
    """Reasons to keep the checkpoint; empty if it is to be deleted."""

    @property
    def stays(self) -> bool:
        """Whether the checkpoint is kept."""
        return bool(self.reasons)


def choose_kept(
    retention: Retention, checkpoints: Sequence[Checkpoint], now_ns: int, held: Mapping[str, str] = MappingProxyType({})
) -> list[Verdict]:
    """Return a verdict on each checkpoint of one run, in the order of ``CheckpointRef``.

    Args:
        retention: the rules.
        checkpoints: all checkpoints of the run.
        now_ns: current time, nanoseconds since 1970-01-01 UTC.
        held: save ids that stay regardless of the rules, with the reasons; the newest consistent one among them.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.ref)
    # Incomplete checkpoints do not count, because otherwise the rules might keep nothing else.
    complete = [checkpoint for checkpoint in ordered if checkpoint.on_line and checkpoint.complete]
    last = retention.keep_last or 0
    newest = {checkpoint.save_id for checkpoint in complete[max(len(complete) - last, 0) :]}
    best = {} if retention.keep_best is None else _best(retention.keep_best, complete)
    # Integers, because floats of nanoseconds since 1970 are off by hundreds.
    keep_for_ns = None if retention.keep_for is None else retention.keep_for // timedelta(microseconds=1) * 1000

    def reasons(checkpoint: Checkpoint) -> Iterator[str]:
        if checkpoint.save_id in held:
            yield held[checkpoint.save_id]
        yield from _fixed_reasons(retention, checkpoint, complete)
        if checkpoint.save_id in newest:
            yield f"keep last {last}"
        if retention.keep_every is not None and checkpoint.on_line and checkpoint.step % retention.keep_every == 0:
            yield f"keep every {retention.keep_every}"
        if checkpoint.save_id in best:
            yield best[checkpoint.save_id]
        if keep_for_ns is not None and checkpoint.created_ns >= now_ns - keep_for_ns:
            yield f"keep for {retention.keep_for}"

    return [Verdict(checkpoint, tuple(reasons(checkpoint))) for checkpoint in ordered]


def _fixed_reasons(retention: Retention, checkpoint: Checkpoint, complete: Sequence[Checkpoint]) -> list[str]:
    if checkpoint.on_line is None:
        return ["line of training unknown"]
    if not checkpoint.on_line:
        return ["abandoned"] if retention.keep_abandoned else []
    if complete and checkpoint.save_id == complete[-1].save_id:
        return ["newest"]
    if not checkpoint.complete and (not complete or complete[-1].ref < checkpoint.ref):
        # Other ranks may still be saving it.
        return ["incomplete, and newer than the newest complete one"]
    return []


def _best(best: Best, complete: Sequence[Checkpoint]) -> dict[str, str]:
    """Return the reasons to keep the best checkpoints, by save id."""
    name, count = best[:2]
    if all(name not in checkpoint.metrics for checkpoint in complete):
        # The name is probably mistyped, and deleting everything would lose the checkpoints that were meant.
        return {checkpoint.save_id: f"no checkpoint has the metric {name}" for checkpoint in complete}
    return {
        checkpoint.save_id: f"keep best {count} by {name}: {checkpoint.metrics[name]:g}, number {place}"
        for place, checkpoint in enumerate(best_by(best, complete), 1)
    }


def best_by(best: Best, ordered: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the best of ``ordered``, which is sorted from oldest to newest, by a metric; the best one first."""
    name, count, direction = (*best, "min")[:3]
    sign = 1 if direction == "min" else -1
    measured = [checkpoint for checkpoint in ordered if not math.isnan(checkpoint.metrics.get(name, math.nan))]
    return sorted(measured, key=lambda checkpoint: sign * checkpoint.metrics[name])[:count]
