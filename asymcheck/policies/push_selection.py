"""Push policy: select the checkpoints of a run that go to a remote location. Pure functions of both inventories."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from asymcheck.config import SECONDS, Limits, check_numbers, check_type
from asymcheck.errors import InvalidInputError
from asymcheck.policies.retention import Best, Retention, best_by, check_best, choose_kept
from asymcheck.types import Checkpoint

_NS = 1e9
_LIMITS: Limits = {"every": (1, math.inf), "every_s": SECONDS, "hold": (0, math.inf), "close_s": SECONDS}


@dataclasses.dataclass(frozen=True)
class Push:
    """Rules that select checkpoints for a remote location: each that any rule selects; without a rule, all.

    The rules apply to complete checkpoints on the line of training. The newest is pushed first.
    With ``save_on_exit`` or ``save_on_signal``, the last one of a training is pushed even if no rule selects it.
    """

    remote: str
    """URI of the remote location: ``hdfs://namenode:port/path``, ``s3://bucket/prefix``, ``file:///path``, …"""
    every: int | None = None
    """Select checkpoints whose step is a multiple of this.

    Choose a multiple of ``Checkpointer(every=…)``, because other steps are not saved. With ``every="auto"``, few saved
    steps are multiples: use ``every_s``.
    """
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

    def __post_init__(self) -> None:
        """Refuse invalid rules."""
        if type(self.remote) is not str:
            raise InvalidInputError(f"remote {self.remote!r:.100}: give a URI, such as hdfs://namenode:8020/runs")
        check_numbers(self, _LIMITS)
        if self.keep is not None:
            check_type("keep", self.keep, Retention)
        if self.best is not None:
            check_best("best", self.best)

    @property
    def asks_for_metrics(self) -> bool:
        """Whether a decision needs the metrics of checkpoints."""
        return self.best is not None or (self.keep is not None and self.keep.keep_best is not None)


def mismatch(push: Push, every: int | None) -> str | None:
    """Return a message if ``Push.every`` is the only rule, and selects few of the saved steps.

    ``every`` is the number of steps between two checkpoints; None if measurements decide.
    """
    if push.every in (None, 1) or (push.every_s, push.best) != (None, None):
        return None
    if every is None:
        return (
            f"Push(every={push.every}) selects checkpoints whose step is a multiple of {push.every}, and with "
            "every='auto' few saved steps are. Most checkpoints stay on this drive only. Pass Push(every_s=…), or a "
            "number of steps to Checkpointer(every=…)"
        )
    common = math.lcm(push.every, every)
    if common in (push.every, every):
        return None
    return (
        f"Push(every={push.every}) selects checkpoints whose step is a multiple of {push.every}, but with "
        f"every={every}, only multiples of {every} are saved. Only every {common}th step is pushed. Pass a multiple of "
        f"{every} to Push(every=…)"
    )


def due(push: Push, local: Sequence[Checkpoint], remote: Sequence[Checkpoint], now_ns: int) -> list[Checkpoint]:
    """Return the checkpoints to upload, in the order of ``CheckpointRef``; the last one is uploaded first.

    Args:
        push: the rules.
        local: the checkpoints of one run in the store.
        remote: its checkpoints that are or were at the remote location. Deleted ones are not uploaded again.
        now_ns: current time, nanoseconds since 1970-01-01 UTC.
    """
    sent = {checkpoint.save_id for checkpoint in remote}
    usable = (checkpoint for checkpoint in (*remote, *local) if checkpoint.complete and checkpoint.on_line is not False)
    ordered = sorted({checkpoint.save_id: checkpoint for checkpoint in usable}.values(), key=lambda row: row.ref)
    wanted = _wanted(push, ordered, sent)
    selected = [checkpoint for checkpoint in ordered if checkpoint.save_id in wanted]
    if push.keep is None:
        return selected
    # Checkpoints that the retention of the location would delete at once are not uploaded. After hours without a
    # connection, these are most of the backlog.
    present = [checkpoint for checkpoint in ordered if checkpoint.save_id in sent]
    verdicts = choose_kept(push.keep, [*present, *selected], now_ns)
    kept = {verdict.checkpoint.save_id for verdict in verdicts if verdict.stays}
    return [checkpoint for checkpoint in selected if checkpoint.save_id in kept]


def _wanted(push: Push, ordered: Sequence[Checkpoint], sent: set[str]) -> set[str]:
    best = set() if push.best is None else {checkpoint.save_id for checkpoint in _best(push.best, ordered)}
    has_rule = (push.every, push.every_s, push.best) != (None,) * 3
    wanted: set[str] = set()
    last_ns: int | None = None
    for checkpoint in ordered:
        is_wanted = not has_rule or checkpoint.save_id in best
        is_wanted = is_wanted or (push.every is not None and checkpoint.step % push.every == 0)
        if push.every_s is not None:
            # A negative difference means that a clock that was ahead has been set back.
            since_ns = None if last_ns is None else checkpoint.created_ns - last_ns
            is_wanted = is_wanted or since_ns is None or since_ns < 0 or since_ns >= push.every_s * _NS
        if checkpoint.save_id in sent or is_wanted:
            last_ns = checkpoint.created_ns
        if is_wanted and checkpoint.save_id not in sent:
            wanted.add(checkpoint.save_id)
    return wanted


def _best(best: Best, ordered: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
    if all(best[0] not in checkpoint.metrics for checkpoint in ordered):
        # The name is probably mistyped. Without any upload, everything would be lost with this machine.
        return ordered[-1:]
    return best_by(best, ordered)


def held(push: Push, waiting: Sequence[str], sending: str | None, begun: str | None = None) -> dict[str, str]:
    """Return the save ids that the retention of the store must keep, with the reasons.

    ``waiting`` has the save ids of the result of :func:`due`. If any, ``sending`` is being uploaded, and ``begun`` is
    the newest waiting checkpoint that another machine has begun to push.
    """
    reasons = dict.fromkeys(waiting[max(len(waiting) - push.hold, 0) :], "to be pushed")
    if begun is not None:
        reasons[begun] = "begun by another machine"
    return reasons if sending is None else {**reasons, sending: "being pushed"}
