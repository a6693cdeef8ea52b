"""Background push: checkpoints go to a remote location beside the training, as they become durable."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asymcheck.config import StoreConfig
from asymcheck.errors import (
    UNKNOWING,
    AsymcheckError,
    ClosedStoreError,
    ForkedStoreError,
    GivenUpError,
    HeadRecordError,
    InvalidInputError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    UnreachableRemoteWarning,
    warn_user,
)
from asymcheck.gc.retention_runner import MaintenanceThread
from asymcheck.policies.push_selection import Push, check_push, check_seconds, due, held
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.replication.transfer_stats import PushStatistics
from asymcheck.storage.interfaces import ReadTier
from asymcheck.types import Checkpoint

SO_IS_ALL = (
    *(*UNKNOWING, OutOfSpaceError, ReadOnlyStoreError, ClosedStoreError, ForkedStoreError),
    *(GivenUpError, HeadRecordError, InvalidInputError),
)
"""Errors that every checkpoint would have. The last: another training has this name there, until somebody mends it."""

_AGAIN_S = 600.0
"""After so long a checkpoint that is damaged is tried again: nobody says when it has been repaired."""

Damaged = dict[str, tuple[str, float]]
"""Checkpoints that are damaged here, by save id: the reason, and when they are tried again, on the monotonic clock."""


def add_damaged(damaged: Damaged, checkpoint: Checkpoint, error: Exception) -> None:
    """Note why a checkpoint cannot be pushed: another attempt changes nothing until somebody has repaired it."""
    damaged[checkpoint.save_id] = f"{checkpoint.ref}: {error}", time.monotonic() + _AGAIN_S


class Backlog(NamedTuple):
    """The state of the queue at one look."""

    there: Sequence[Checkpoint]
    """Checkpoints that are known to be at the location, or were."""
    due: list[Checkpoint]
    """Checkpoints to be sent, the newest last; without those that cannot be."""
    damaged: list[str]
    """Why the others cannot be sent."""


class UploadQueue:
    """Decides what is to be pushed. Threads may share it: each takes ``lock`` for as long as it must not change."""

    def __init__(self, here: ReadTier, run: str, rules: Push) -> None:
        """Look into ``here``; nothing is known of the location yet."""
        self._rules = rules
        self.known = CheckpointCache(here, run, metrics=rules.asks_for_metrics)
        """The checkpoints of the store."""
        self.sent: dict[str, Checkpoint] = {}
        """The checkpoints that are at the location, or were, by save id."""
        self.generation = 0
        """The newest that was known there when it was looked for."""
        self.damaged: Damaged = {}
        """The checkpoints that are damaged here."""
        self.lock = threading.RLock()

    def look(self) -> Backlog:
        """Look what is here now, and what of it is to be sent."""
        with self.lock:
            here = self.known.look()
            there = self._there_by(here)
            found = due(self._rules, here, there, time.time_ns())
            now = time.monotonic()
            reasons = [self.damaged[one.save_id][0] for one in found if one.save_id in self.damaged]
            return Backlog(there, [one for one in found if self._is_due(one, now)], reasons)

    def _is_due(self, one: Checkpoint, now: float) -> bool:
        return one.save_id not in self.damaged or self.damaged[one.save_id][1] <= now

    def _there_by(self, here: list[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints at the location; the store decides whether each is on the line."""
        own = {one.save_id: one for one in here}
        away = [one for save_id, one in self.sent.items() if save_id not in own]
        present = [own[save_id] for save_id in self.sent if save_id in own]
        return [*self.known.placed(away, self.generation), *present]


if TYPE_CHECKING:
    from asymcheck.distributed import Ranks


class PushJob(NamedTuple):
    """Subject of a push: the store, the location and the rules."""

    store: str
    """The path or URI of the store."""
    config: StoreConfig
    rules: Push
    run: str
    poll_s: float
    """Seconds between two looks."""
    prunes: bool
    """Whether what is not kept at the location is removed."""


class PushWorker(abc.ABC):
    """Pushes what a :class:`Push` chooses of a run. Close it, or use it in a ``with`` block.

    It never keeps the training waiting: a location that does not answer makes the backlog grow, and nothing else. The
    newest checkpoint goes first. One that is deleted here before its turn is not pushed.
    """

    def __init__(self, here: ReadTier, order: PushJob) -> None:
        """Push from ``here`` as ``order`` says. The subclass starts the thread."""
        self.rules = order.rules
        self.queue = UploadQueue(here, order.run, order.rules)
        """Checkpoints that are still to be sent."""
        self.sending: str | None = None
        """The save id of the checkpoint that is being sent."""
        self._run, self._order = order.run, order
        self._failure: Exception | None = None
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="asymcheck-pushing", daemon=True)

    @abc.abstractmethod
    def statistics(self) -> PushStatistics:
        """Return what it has done so far."""

    @abc.abstractmethod
    def look(self) -> None:
        """Count what waits, and send it soon. Called after a commit it makes the backlog true at once; never raises."""

    def held(self) -> Mapping[str, str]:
        """Return the save ids that the retention of the store leaves alone, with the reasons. Speaks to nobody."""
        return held(self.rules, self._due(), self.sending)

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until all that is to be pushed now lies there.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: an attempt that began after the call has failed.
            InconsistentCheckpointError: some are damaged here; the others lie there.
        """

    def close(self, timeout_s: float | None = None) -> PushStatistics:
        """Push the remaining checkpoints once, and end; return the statistics. Closing twice is no error.

        Args:
            timeout_s: give up after so many seconds; None for ``close_s`` of the rules. The next push of this
                store to the location sends the rest, but no bytes that were sent already.

        Raises:
            InvalidInputError: no thread can wait for so long; nothing was ended.

        Warns:
            UnreachableRemoteWarning: checkpoints are left that are not there, or something else is wrong.
        """
        if self._end(self.rules.close_s if timeout_s is None else check_seconds("timeout_s", timeout_s)):
            now = self.statistics()
            if now.backlog:
                warn_user(
                    f"run {self._run!r}: {now.backlog} checkpoints were not pushed to {self.rules.remote} "
                    f"({now.problem or 'no time was left'}); the next training that pushes there sends them, or "
                    "asymcheck push --all does",
                    UnreachableRemoteWarning,
                )
            elif now.problem:
                warn_user(f"run {self._run!r}, pushed to {self.rules.remote}: {now.problem}", UnreachableRemoteWarning)
        return self.statistics()

    @abc.abstractmethod
    def _end(self, limit_s: float | None) -> bool:
        """Push what is left and end, in so many seconds; return whether this is the first time."""

    @abc.abstractmethod
    def _work(self) -> None:
        """Push until it is to end, on the thread of its own."""

    def _due(self) -> list[Checkpoint]:
        return self.queue.look().due

    def __enter__(self) -> PushWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close it; when the block failed, a warning must not hide why."""
        with contextlib.suppress(UnreachableRemoteWarning) if error is not None else contextlib.nullcontext():
            self.close()


class BackgroundPush:
    """The pushing of one Checkpointer, or nothing. For the training thread, where nothing else is said."""

    def __init__(self, make: Callable[..., PushWorker], push: Push | None, ranks: Ranks | None) -> None:
        """Push as ``push`` says, if it does, with what ``make`` returns: what the last training has left goes first.

        With several ranks, those that push are known after the rendezvous, and call :meth:`start`. Rank 0 alone
        removes checkpoints at the location that are not kept.
        """
        self._make, self._push = make, None if push is None else check_push(push)
        self._prunes = ranks is None or ranks.rank == 0
        self._open: PushWorker | None = None
        # The last one, for what it has done.
        self._pushing: PushWorker | None = None
        self._told: set[str] = set()
        if ranks is None:
            self.start()

    @property
    def pushes(self) -> bool:
        """Whether anything is pushed, here or by another rank of this store."""
        return self._push is not None

    def start(self) -> None:
        """Begin, or go on after :meth:`close`."""
        if self._push is not None and self._open is None:
            self._open = self._pushing = self._make(self._push, prunes=self._prunes)

    def after_commit(self, upkeep: MaintenanceThread | None) -> None:
        """Prune, then look what is to be sent; called on a thread of its own; never raises."""
        if upkeep is not None:
            upkeep.after_commit()
        if self._open is not None:
            self._open.look()

    def held(self) -> Mapping[str, str]:
        """Return the save ids that are still to be pushed, which no pruner removes, with the reasons."""
        pushing = self._open
        return {} if pushing is None else pushing.held()

    def statistics(self) -> PushStatistics:
        """Return what was done so far, and count what waits now."""
        if self._pushing is None:
            return PushStatistics()
        if self._open is not None:
            self._open.look()
        return self._pushing.statistics()

    def wait(self, *, raises: bool) -> None:
        """Wait until all that is to be pushed now lies there; where that fails, raise, or warn.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: why it does not.
        """
        if self._open is None:
            return
        try:
            self._open.wait()
        except AsymcheckError:
            if raises:
                raise
            self.tell()

    def tell(self) -> None:
        """Warn of what is wrong with pushing: once for each kind of it, until all is well again."""
        if self._pushing is None:
            return
        now = self._pushing.statistics()
        if not now.problem:
            self._told.clear()
            return
        # What is damaged here may be so for long, and must not keep quiet what comes on top of it.
        kind = now.problem.split(":", 1)[0]
        if kind not in self._told:
            self._told.add(kind)
            waits = f"{now.backlog} checkpoint{' waits' if now.backlog == 1 else 's wait'} to be pushed, "
            warn_user(
                f"{self._pushing.rules.remote}: {waits if now.backlog else ''}training goes on: {now.problem}",
                UnreachableRemoteWarning,
            )

    def close(self) -> None:
        """End it, in bounded time.

        Warns:
            UnreachableRemoteWarning: checkpoints are left that are not there.
        """
        pushing, self._open = self._open, None
        if pushing is not None:
            pushing.close()
