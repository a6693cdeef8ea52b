"""Push policy: select the checkpoints of a run that go to a remote location. Pure functions of both inventories."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

from asymcheck.errors import InvalidInputError
from asymcheck.policies.retention import Best, Retention, best_by, check_best, judge
from asymcheck.types import Checkpoint

_NS = 1e9


@dataclasses.dataclass(frozen=True)
class Push:
    """Rules that select checkpoints for a remote location: each that any rule selects; without a rule, all.

    The rules apply to complete checkpoints on the line of training. The newest is pushed first.
    """

    remote: str
    """``hdfs://namenode:port/path``, ``file:///path``, or another URI that pyarrow knows."""
    every: int | None = None
    """Select checkpoints whose step is a multiple of this."""
    every_s: float | None = None
    """Select a checkpoint that began at least this many seconds after the last one pushed or selected."""
    best: Best | None = None
    """Select the best by a metric, as ``Retention.keep_best``: ``("loss", 1)``, ``("accuracy", 3, "max")``.

    While no checkpoint has the metric, the newest is pushed instead: the name may be mistyped.
    """
    keep: Retention | None = None
    """Retention at the remote location; None keeps all."""
    hold: int = 4
    """Number of checkpoints waiting to be pushed, newest first, that the retention of the store keeps."""
    close_s: float | None = 60.0
    """Time that ``close()`` waits for pending uploads [s]; None for no limit."""
    own_process: bool = True
    """Push in a separate process, so that uploads do not take the GIL of the training; otherwise in a thread."""

    def __post_init__(self) -> None:
        """Refuse invalid rules."""
        if type(self.remote) is not str:
            raise InvalidInputError(f"remote {self.remote!r:.100}: give a URI, such as hdfs://namenode:8020/runs")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise InvalidInputError(
                f"every={self.every!r:.100}: give the number of steps between two pushes, 1 or more"
            )
        if self.every_s is not None:
            check_seconds("every_s", self.every_s)
        if self.close_s is not None:
            check_seconds("close_s", self.close_s)
        if type(self.hold) is not int or self.hold < 0:
            raise InvalidInputError(f"hold={self.hold!r:.100}: give how many checkpoints may be held, 0 or more")
        if self.keep is not None and not isinstance(self.keep, Retention):
            raise InvalidInputError(f"keep={self.keep!r:.100}: give asymcheck.Retention(keep_last=…), or None")
        if type(self.own_process) is not bool:
            raise InvalidInputError(f"own_process={self.own_process!r:.100}: give True or False")
        if self.best is not None:
            check_best("best", self.best)

    @property
    def asks_for_metrics(self) -> bool:
        """Whether a decision needs the metrics of checkpoints."""
        return self.best is not None or (self.keep is not None and self.keep.keep_best is not None)


def check_seconds(name: str, seconds: object) -> float:
    """Return seconds for which a thread can wait, or refuse what is no such number."""
    if type(seconds) not in (int, float) or not 0 <= seconds <= threading.TIMEOUT_MAX:  # type: ignore[operator]  # a number
        raise InvalidInputError(f"{name}={seconds!r:.100}: give seconds, from 0 to {threading.TIMEOUT_MAX:.0f}")
    return float(seconds)  # type: ignore[arg-type]  # as above


def check_push(push: object) -> Push:
    """Return the rules of a push, or refuse what is none."""
    if not isinstance(push, Push):
        raise InvalidInputError(f"push={push!r:.100}: give asymcheck.Push('hdfs://…', every=…), or None")
    return push


def due(push: Push, here: Sequence[Checkpoint], there: Sequence[Checkpoint], now_ns: int) -> list[Checkpoint]:
    """Return what is to be sent, in the order of ``CheckpointRef``: what comes last goes first.

    Args:
        push: the rules.
        here: the checkpoints of one run that the store has.
        there: those that the location has, or had: what is deleted there is not sent again.
        now_ns: the present, nanoseconds since 1970-01-01 UTC.
    """
    sent = {one.save_id for one in there}
    known = {one.save_id: one for one in (*there, *here) if one.complete and one.on_line is not False}
    ordered = sorted(known.values(), key=lambda one: one.ref)
    wanted = _wanted(push, ordered, sent)
    going = [one for one in ordered if one.save_id in wanted]
    if push.keep is None:
        return going
    # What would be deleted there at once is not sent: after hours without an answer that is most of the backlog.
    stays = {
        verdict.checkpoint.save_id
        for verdict in judge(push.keep, [*(one for one in ordered if one.save_id in sent), *going], now_ns)
        if verdict.stays
    }
    return [one for one in going if one.save_id in stays]


def _wanted(push: Push, ordered: Sequence[Checkpoint], sent: set[str]) -> set[str]:
    best = push.best
    best_ones = set() if best is None else {one.save_id for one in _best(best, ordered)}
    has_rule = (push.every, push.every_s, push.best) != (None,) * 3
    wanted: set[str] = set()
    last_ns: int | None = None
    for one in ordered:
        is_wanted = not has_rule or one.save_id in best_ones
        is_wanted = is_wanted or (push.every is not None and one.step % push.every == 0)
        if push.every_s is not None:
            # What began before the one before it did was stamped after a clock that ran ahead had been set right.
            since_ns = None if last_ns is None else one.created_ns - last_ns
            is_wanted = is_wanted or since_ns is None or since_ns < 0 or since_ns >= push.every_s * _NS
        if one.save_id in sent or is_wanted:
            last_ns = one.created_ns
        if is_wanted and one.save_id not in sent:
            wanted.add(one.save_id)
    return wanted


def _best(best: Best, ordered: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    if all(best[0] not in one.metrics for one in ordered):
        # A name that was mistyped, as a rule: to push nothing for it would leave nothing when this machine is lost.
        return ordered[-1:]
    return best_by(best, ordered)


def held(push: Push, waiting: Sequence[Checkpoint], sending: str | None) -> dict[str, str]:
    """Return the save ids that the retention of the store leaves alone, with the reason.

    Args:
        push: how many.
        waiting: what is to be sent, as :func:`due` returned it.
        sending: what is being sent, if anything.
    """
    found = {one.save_id: "to be pushed" for one in waiting[max(len(waiting) - push.hold, 0) :]}
    return found if sending is None else {**found, sending: "being pushed"}
