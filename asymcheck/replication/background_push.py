"""Background push: upload checkpoints to a remote location while training runs, once they are durable."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asymcheck.config import StoreConfig
from asymcheck.errors import (
    INCONCLUSIVE,
    AsymcheckError,
    ClosedStoreError,
    ForkedStoreError,
    GivenUpError,
    HeadRecordError,
    InvalidInputError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    RunInUseError,
    UnreachableRemoteWarning,
    warn_user,
)
from asymcheck.gc.retention_runner import MaintenanceThread
from asymcheck.policies.push_selection import Push, check_push, check_seconds, due, held
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.replication.run_lease import LeaseClaim, LeaseStatus
from asymcheck.replication.transfer_stats import PushStatistics
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme.run_lock import Trainer
from asymcheck.types import Checkpoint

if TYPE_CHECKING:
    from asymcheck.distributed import Ranks

BLOCKING_ERRORS = (
    *(*INCONCLUSIVE, OutOfSpaceError, ReadOnlyStoreError, ClosedStoreError, ForkedStoreError),
    *(GivenUpError, HeadRecordError, InvalidInputError, RunInUseError),
)
"""Errors that every other checkpoint would raise as well. InvalidInputError: another training has the run name."""

_logger = logging.getLogger(__name__)
_WAIT_S = 0.5

_DAMAGED_RETRY_S = 600.0
"""Seconds until a damaged checkpoint is tried again, because a repair is not announced."""

Damaged = dict[str, tuple[str, float]]
"""Damaged local checkpoints by save id: the reason, and the time of the next attempt on the monotonic clock."""


def add_damaged(damaged: Damaged, checkpoint: Checkpoint, error: Exception) -> None:
    """Note why a checkpoint cannot be pushed. Attempts before a repair would fail, too."""
    damaged[checkpoint.save_id] = f"{checkpoint.ref}: {error}", time.monotonic() + _DAMAGED_RETRY_S


class Backlog(NamedTuple):
    """State of the upload queue at one point in time."""

    remote: Sequence[Checkpoint]
    """Checkpoints that are or were at the remote location."""
    due: list[Checkpoint]
    """Checkpoints to upload, newest last, without damaged ones."""
    damaged: list[str]
    """Reasons why checkpoints cannot be uploaded."""


class UploadQueue:
    """Checkpoints to upload. Thread-safe; hold ``lock`` while the queue must not change."""

    def __init__(self, local: ReadTier, run: str, rules: Push) -> None:
        """Select checkpoints of ``local``. The content of the remote location is unknown until ``sent`` is filled."""
        self._rules = rules
        self.known = CheckpointCache(local, run, metrics=rules.asks_for_metrics)
        """Checkpoints of the store."""
        self.sent: dict[str, Checkpoint] = {}
        """Checkpoints that are or were at the remote location, by save id."""
        self.generation = 0
        """Newest generation at the remote location when it was listed."""
        self.damaged: Damaged = {}
        self.lock = threading.RLock()

    def backlog(self) -> Backlog:
        """List the store, and return the checkpoints to upload."""
        with self.lock:
            local = self.known.refresh()
            remote = self._remote(local)
            selected = due(self._rules, local, remote, time.time_ns())
            now = time.monotonic()
            reasons = [self.damaged[row.save_id][0] for row in selected if row.save_id in self.damaged]
            ready = [row for row in selected if row.save_id not in self.damaged or self.damaged[row.save_id][1] <= now]
            return Backlog(remote, ready, reasons)

    def _remote(self, local: list[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints at the remote location. The store decides whether each is on the line of training."""
        by_id = {checkpoint.save_id: checkpoint for checkpoint in local}
        remote_only = [checkpoint for save_id, checkpoint in self.sent.items() if save_id not in by_id]
        present = [by_id[save_id] for save_id in self.sent if save_id in by_id]
        return [*self.known.placed(remote_only, self.generation), *present]


@dataclasses.dataclass(frozen=True)
class PushJob:
    """Parameters of a background push."""

    store: str
    """Path or URI of the store."""
    config: StoreConfig
    rules: Push
    run: str
    poll_s: float
    """Seconds between two listings of the store."""
    prunes: bool
    """Whether to apply the retention of the remote location."""
    claim: LeaseClaim | None = None
    """Claim to the lease of the run, if a training has made one."""


class PushWorker(abc.ABC):
    """Upload the checkpoints of a run that a :class:`Push` selects. Close it, or use it in a ``with`` block.

    The training never waits for an upload: if the remote location does not respond, only the backlog grows. The newest
    checkpoint goes first. A checkpoint that was deleted before its upload is not pushed.
    """

    def __init__(self, local: ReadTier, job: PushJob) -> None:
        """Push from ``local`` as ``job`` says. The subclass starts the thread."""
        self.rules = job.rules
        self.queue = UploadQueue(local, job.run, job.rules)
        """Checkpoints to upload."""
        self.sending: str | None = None
        """Save id of the checkpoint that is being uploaded."""
        self.lease = LeaseStatus()
        """Lease of the run at the remote location. While another training has it, nothing is pushed."""
        self._run, self._job = job.run, job
        self._failure: Exception | None = None
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="asymcheck-pushing", daemon=True)

    @abc.abstractmethod
    def statistics(self) -> PushStatistics:
        """Return the statistics so far."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Count the backlog at once, and upload it soon. Call it after a commit. Never raises."""

    def held(self) -> Mapping[str, str]:
        """Return the save ids that the retention of the store must keep, with the reasons. Uses no network."""
        return held(self.rules, self._due(), self.sending)

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until all checkpoints that are due now are at the remote location.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: an attempt that began after the call failed.
            InconsistentCheckpointError: some checkpoints of the store are damaged; the others were uploaded.
        """

    @abc.abstractmethod
    def claim(self, claim: LeaseClaim) -> None:
        """Begin to take the lease of the run; :attr:`lease` has the outcome."""

    def await_lease(self) -> None:
        """Wait until a claim is decided, at most ``deadline_s`` without an answer of the location."""
        deadline_s = self._job.config.remote.deadline_s
        limit, is_logged = time.monotonic() + deadline_s, False
        with self._turn:
            while not self.lease.is_decided and self._thread.is_alive() and (now := time.monotonic()) < limit:
                if self.lease.until and not is_logged:
                    limit, is_logged = self.lease.until + deadline_s, True
                    holder = f"run {self._run} at {self.rules.remote} may be in use by {self.lease.other}"
                    _logger.info("%s; waiting up to %.0f s for a sign of life", holder, self.lease.until - now)
                self._turn.wait(_WAIT_S)
            problem = self.lease.problem if self.lease.is_decided else "no answer in time"
        if problem:
            _logger.warning("run %s is not guarded against other machines: %s", self._run, problem)

    def check_lease(self) -> None:
        """Raise if another training has the lease of the run.

        Raises:
            RunInUseError: another training trains the run, or has taken it over.
        """
        lease = self.lease
        if lease.is_taken:
            trainer = f"{lease.other or 'another process'}, which pushes to {self.rules.remote}"
            raise RunInUseError(self._run, trainer, lease.last_step, taken_over=lease.phase == "lost")

    def close(self, timeout_s: float | None = None) -> PushStatistics:
        """Push the remaining checkpoints once, end, and return the statistics. Closing twice is no error.

        Args:
            timeout_s: seconds until giving up; None for ``close_s`` of the rules. The next push of this store to the
                location sends the rest, and sends no partition again.

        Raises:
            InvalidInputError: ``timeout_s`` is out of range; the push goes on.

        Warns:
            UnreachableRemoteWarning: checkpoints were not uploaded, or another problem exists.
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
            elif now.problem and self.lease.phase != "refused":
                warn_user(f"run {self._run!r}, pushed to {self.rules.remote}: {now.problem}", UnreachableRemoteWarning)
        return self.statistics()

    @abc.abstractmethod
    def _end(self, limit_s: float | None) -> bool:
        """Push the remaining checkpoints and end, within ``limit_s``; return whether this is the first call."""

    @abc.abstractmethod
    def _work(self) -> None:
        """Push until the end, on the worker's own thread."""

    def _due(self) -> list[Checkpoint]:
        return self.queue.backlog().due

    def __enter__(self) -> PushWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the worker. After an exception in the block, no warning of the push hides the exception."""
        with contextlib.suppress(UnreachableRemoteWarning) if error is not None else contextlib.nullcontext():
            self.close()


class BackgroundPush:
    """Background push of one Checkpointer, which may have none. For the training thread, except where noted."""

    def __init__(self, make: Callable[..., PushWorker], push: Push | None, ranks: Ranks | None) -> None:
        """Start pushing, unless ``push`` is None. Checkpoints that an earlier training left go first.

        With several ranks, the rendezvous decides which ranks push; these call :meth:`start`. Only rank 0 applies the
        retention of the remote location.
        """
        self._make, self._push = make, None if push is None else check_push(push)
        self._prunes = ranks is None or ranks.rank == 0
        self._open: PushWorker | None = None
        # Kept after close() for its statistics.
        self._worker: PushWorker | None = None
        self._warned: set[str] = set()
        if ranks is None:
            self.start()

    @property
    def pushes(self) -> bool:
        """Whether this rank, or another rank of this store, pushes."""
        return self._push is not None

    def start(self) -> None:
        """Start, or continue after :meth:`close`."""
        if self._push is not None and self._open is None:
            self._open = self._worker = self._make(self._push, prunes=self._prunes)

    def guard(self, store_id: str, *, takeover: bool) -> None:
        """Take the lease of the run at the remote location, on rank 0. Call it with the lock of the run in the store.

        Args:
            store_id: id of the store, in hexadecimal digits.
            takeover: take the run over from a living training on another machine.

        Raises:
            RunInUseError: another training has the lease.
        """
        if self._push is None or not self._prunes:
            return
        self.start()
        worker = self._open
        if worker is not None and (worker.lease.phase == "none" or worker.lease.is_taken):
            worker.claim(LeaseClaim(Trainer.this(), store_id, os.urandom(16).hex(), takeover))
            worker.await_lease()
        self.check()

    def check(self) -> None:
        """Raise if another training has the lease of the run.

        Raises:
            RunInUseError: another training trains the run, or has taken it over.
        """
        if self._open is not None:
            self._open.check_lease()

    def after_commit(self, upkeep: MaintenanceThread | None) -> None:
        """Prune, then count the backlog. Runs on its own thread; never raises."""
        if upkeep is not None:
            upkeep.after_commit()
        if self._open is not None:
            self._open.refresh()

    def held(self) -> Mapping[str, str]:
        """Return the save ids that no retention may delete before their upload, with the reasons."""
        worker = self._open
        return {} if worker is None else worker.held()

    def statistics(self) -> PushStatistics:
        """Count the backlog, and return the statistics so far."""
        if self._worker is None:
            return PushStatistics()
        if self._open is not None:
            self._open.refresh()
        return self._worker.statistics()

    def wait(self, *, raises: bool) -> None:
        """Wait until all due checkpoints are uploaded; on failure raise, or warn.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: the reason of the failure.
        """
        if self._open is None:
            return
        try:
            self._open.wait()
        except AsymcheckError:
            if raises:
                raise
            self.warn()

    def warn(self) -> None:
        """Warn of a problem, once per kind of problem until the push works again."""
        # The next step reports a lost lease.
        if self._worker is None or self._worker.lease.is_taken:
            return
        now = self._worker.statistics()
        if not now.problem:
            self._warned.clear()
            return
        # Damaged checkpoints can stay for long, and must not hide other problems.
        kind = now.problem.split(":", 1)[0]
        if kind not in self._warned:
            self._warned.add(kind)
            waits = f"{now.backlog} checkpoint{' waits' if now.backlog == 1 else 's wait'} to be pushed, "
            warn_user(
                f"{self._worker.rules.remote}: {waits if now.backlog else ''}training goes on: {now.problem}",
                UnreachableRemoteWarning,
            )

    def close(self) -> None:
        """End within a bounded time.

        Warns:
            UnreachableRemoteWarning: checkpoints were not uploaded.
        """
        worker, self._open = self._open, None
        if worker is not None:
            worker.close()
