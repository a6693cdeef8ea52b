"""Background push on a thread of the training process."""

from __future__ import annotations

import contextlib
import threading
import time

from asymcheck.commit.encoder import Encoder
from asymcheck.errors import (
    AsymcheckError,
    ClosedStoreError,
    FormatError,
    GivenUpError,
    HeadRecordError,
    InconsistentCheckpointError,
    RecoveryError,
)
from asymcheck.events import Detail, timed
from asymcheck.executor import stand_back
from asymcheck.replication.background_push import BLOCKING_ERRORS, PushJob, PushWorker, add_damaged
from asymcheck.replication.checkpoint_cache import CheckpointCache, RemotePresence
from asymcheck.replication.collect_remote import RemotePruner
from asymcheck.replication.cross_node_dedup import SentParts, begun_first
from asymcheck.replication.push import encoder_for, publish_heads, push
from asymcheck.replication.run_lease import LeaseClaim, LeaseStatus, RunLease
from asymcheck.replication.transfer_stats import Moved, PushStatistics
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.types import Checkpoint, CheckpointRef

RETRY_S = 15.0
"""Seconds between a failure and the next attempt."""
GIVE_UP_S = 2.0
"""Seconds that a cancelled upload has to end."""
_WAIT_S = 0.5
_VERIFIED_MANIFESTS = 64
"""Approximate number of manifests, newest first, that are verified at the start: a killed push may have left one."""


class PushThread(PushWorker):
    """Push worker on a thread of this process."""

    def __init__(self, local: ReadTier, job: PushJob) -> None:
        super().__init__(local, job)
        self._local = local
        self._remote: RemoteTier | None = None
        self._encoder: Encoder | None = None
        self._pruner: RemotePruner | None = None
        # Listed at the remote location, but not verified yet.
        self._unverified: dict[str, CheckpointFiles] = {}
        self._heads: list[int] | None = None
        # Reasons why due checkpoints cannot be pushed.
        self._damaged: list[str] = []
        self.is_well = False
        """Whether the last round did everything without a failure."""
        self._newest: CheckpointRef | None = None
        self._parts = SentParts(job.run)
        self._now = PushStatistics()
        # Commits take this lock, too, so it is never held during an upload.
        self._queue_lock = self.queue.lock
        self._begun = self._failed_in = 0
        self._prune_failure: Exception | None = None
        self._is_called = self._is_awaited = False
        self._closing, self._stop = threading.Event(), threading.Event()
        self._lease: RunLease | None = None
        if job.claim is not None:
            self.claim(job.claim)
        self._thread.start()

    def statistics(self) -> PushStatistics:
        """Return the statistics so far."""
        return self._now

    def refresh(self) -> None:
        """Count the backlog, and upload it soon; see :meth:`PushWorker.refresh`."""
        with contextlib.suppress(AsymcheckError):
            self._note(backlog=len(self._due()))
        self._call()

    def claim(self, claim: LeaseClaim) -> None:
        """Begin to take the lease of the run; see :meth:`PushWorker.claim`."""
        if self._lease is not None:
            self._lease.close()
        self.lease = LeaseStatus("undecided", claim.token)
        location, config = parse_location(self.rules.remote), self._job.config.remote
        self._lease = RunLease(location, config, self._run, claim, self._last_step, self._note_lease)

    def _last_step(self) -> int | None:
        with self._queue_lock:
            newest = max((checkpoint.ref for checkpoint in self.queue.known.refresh()), default=None)
        return None if newest is None else newest.step

    def _note_lease(self, status: LeaseStatus) -> None:
        with self._turn:
            self.lease = status
            self._turn.notify_all()

    @property
    def is_connected(self) -> bool:
        """Whether the remote location was listed."""
        return self._remote is not None

    def wait(self) -> None:
        """Wait until all due checkpoints are at the remote location; see :meth:`PushWorker.wait`."""
        with self._queue_lock:
            # Damaged checkpoints may have been repaired. A running attempt adds its findings to the old mapping.
            self.queue.damaged = {}
        wanted = self._pending()
        began = self._begun
        while wanted & self._pending():
            if not self._thread.is_alive():
                raise ClosedStoreError(f"run {self._run!r}: pushing to {self.rules.remote} has ended")
            with self._turn:
                self._is_awaited = True
                self._turn.notify_all()
                self._turn.wait(_WAIT_S)
                # A failure of an attempt that began before this call does not count.
                if self._failure is not None and self._failed_in > began:
                    raise self._failure
        if self._damaged:
            raise InconsistentCheckpointError(
                f"run {self._run!r}: damaged checkpoints were not pushed to {self.rules.remote}. Run asymcheck verify "
                "--repair, or delete them:",
                self._damaged,
            )

    def _pending(self) -> set[str]:
        """Return the save ids of checkpoints that are due or not verified."""
        with self._queue_lock:
            return {checkpoint.save_id for checkpoint in self._due()} | self._unverified.keys()

    def _call(self) -> None:
        with self._turn:
            self._is_called = True
            self._turn.notify_all()

    def _work(self) -> None:
        # Threads that this thread starts inherit its priority.
        stand_back()
        try:
            while not self._closing.is_set():
                failed = not self._round()
                if isinstance(self._failure, ClosedStoreError):
                    return
                self._pause(failed=failed)
            # The last checkpoints may have become durable in the meantime.
            self._round()
        finally:
            if self._remote is not None:
                self._remote.close()

    def _pause(self, *, failed: bool) -> None:
        with self._turn:
            # A commit does not end the pause after a failure, so an unreachable location is not tried at every step.
            self._turn.wait_for(
                lambda: self._closing.is_set() or self._is_awaited or (self._is_called and not failed),
                RETRY_S if failed else self._job.poll_s,
            )
            self._is_called = self._is_awaited = False

    def _round(self) -> bool:
        """Try each due checkpoint once, newest first; return False after a failure."""
        with self._turn:
            self._begun += 1
        tried: set[str] = set()
        failed = False
        try:
            self._await_turn()
            while (checkpoint := self._next(tried)) is not None or self._unverified:
                if self._remote is None:
                    self._remote = self._connect()
                elif checkpoint is None:
                    self._verify_remote(self._remote)
                else:
                    tried.add(checkpoint.save_id)
                    failed |= not self._try(self._remote, checkpoint)
            if self._remote is not None:
                self._push_heads(self._remote)
                self._parts.refresh(self._remote)
        except Exception as error:  # noqa: BLE001 - training must go on; the statistics report the error
            self._fail(error)
            failed = True
        with self._turn:
            self.is_well = not failed
            if not failed:
                self._failure = None
            self._note()
            self._turn.notify_all()
        return not failed

    def _await_turn(self) -> None:
        """Wait until it is known whether another training has the lease of the run; raise if so."""
        self._check_stop(0, 0)
        while not self.lease.is_decided:
            with self._turn:
                self._turn.wait(_WAIT_S)
            self._check_stop(0, 0)

    def _next(self, tried: set[str]) -> Checkpoint | None:
        due = self._due()
        self._note(backlog=len(due))
        untried = [checkpoint for checkpoint in reversed(due) if checkpoint.save_id not in tried]
        if self._remote is not None and not all(map(self._is_whole, untried)):
            untried = begun_first(self._remote, self._run, untried)
        return next(iter(untried), None)

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        listing = self.queue.known.listing(checkpoint)
        return listing is None or listing.is_whole

    def _try(self, remote: RemoteTier, checkpoint: Checkpoint) -> bool:
        """Push a checkpoint; return False after a failure that may not concern other checkpoints."""
        try:
            self._push(remote, checkpoint)
        except BLOCKING_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - other checkpoints may succeed
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        with self._turn:
            self._failure, self._failed_in = error, self._begun
            self._note(failures=1)
            self._turn.notify_all()

    def _due(self) -> list[Checkpoint]:
        with self._queue_lock:
            backlog = self.queue.backlog()
            self._newest = max(
                (row.ref for row in backlog.remote if row.on_line is not False and row.ref not in self._parts),
                default=None,
            )
            self._damaged = backlog.damaged
            return backlog.due

    def _connect(self) -> RemoteTier:
        remote = RemoteTier(parse_location(self.rules.remote), self._job.config, create=True)
        try:
            known = CheckpointCache(remote, self._run, metrics=self.rules.asks_for_metrics)
            present = known.refresh()
            with self._queue_lock:
                self.queue.generation = known.generation
                local = {checkpoint.save_id for checkpoint in self.queue.known.refresh()}
                self.queue.sent.update((checkpoint.save_id, checkpoint) for checkpoint in present)
                count = 0
                for checkpoint in reversed([row for row in present if row.save_id in local]):
                    listing = known.listing(checkpoint)
                    if listing is not None and count < _VERIFIED_MANIFESTS:
                        count += len(listing.manifests)
                        self._unverified[checkpoint.save_id] = listing
        except BaseException:
            remote.close()
            raise
        self._encoder = encoder_for(remote)
        if self.rules.keep is not None and self._job.prunes:
            self._pruner = RemotePruner(remote, self._run, self.rules.keep)
        return remote

    def _verify_remote(self, remote: RemoteTier) -> None:
        """Verify that listed checkpoints are whole. Checkpoints that are not whole become due again."""
        present = RemotePresence(remote)
        while self._unverified:
            save_id = next(iter(self._unverified))
            self._check_stop(0, 0)
            is_whole = present.has(self._unverified[save_id])
            with self._queue_lock:
                if not is_whole:
                    self.queue.sent.pop(save_id, None)
                del self._unverified[save_id]

    def _push_heads(self, remote: RemoteTier) -> None:
        """Publish new head records. A rollback creates one, even if no checkpoint follows."""
        heads = self._local.manifests.heads(self._run)
        if heads != self._heads:
            publish_heads(self._local, remote, self._run)
            self._heads = heads

    def _push(self, remote: RemoteTier, checkpoint: Checkpoint) -> None:
        with self._queue_lock:
            listing = self.queue.known.listing(checkpoint)
            if listing is None:
                return
            self.sending = checkpoint.save_id
        damaged = self.queue.damaged
        try:
            moved = self._copy(remote, checkpoint, listing)
        except HeadRecordError:
            raise
        except (FormatError, RecoveryError) as error:
            # A checkpoint that was deleted in the meantime is no longer due.
            if self._local.manifests.listing(self._run, checkpoint.ref).manifests:
                add_damaged(damaged, checkpoint, error)
                self._note(failures=1)
        else:
            with self._queue_lock:
                self.queue.sent[checkpoint.save_id] = checkpoint
                if not listing.is_whole:
                    self._parts.add(checkpoint.ref)
                elif self._newest is None or self._newest < checkpoint.ref:
                    self._newest = checkpoint.ref
            self._note(pushed=len(moved.committed), sent=moved.moved_bytes)
            self._prune()
        finally:
            self.sending = None

    def _copy(self, remote: RemoteTier, checkpoint: Checkpoint, listing: CheckpointFiles) -> Moved:
        moved: Moved | None = None

        def details() -> Detail:
            sent = 0 if moved is None else moved.moved_bytes
            location = str(remote.location)
            return {
                "location": location,
                "run": self._run,
                "save": checkpoint.save_id,
                "step": checkpoint.step,
                "sent": sent,
            }

        with timed("push", 0, details):
            moved = push(self._local, remote, [listing], self._check_stop, self._encoder)
        return moved

    def _prune(self) -> None:
        """Apply the retention of the remote location. A failure does not block uploads."""
        if self._pruner is None:
            return
        try:
            self._pruner.prune(time.time_ns())
        except AsymcheckError as error:
            self._prune_failure = error
        else:
            self._prune_failure = self._pruner.failure

    def _check_stop(self, _done: int, _total: int) -> None:
        if self._stop.is_set():
            raise GivenUpError("upload cancelled: the time limit of close() has passed")
        self.check_lease()

    def _note(self, *, pushed: int = 0, backlog: int | None = None, sent: int = 0, failures: int = 0) -> None:
        with self._turn:
            now = self._now
            self._now = PushStatistics(
                pushed=now.pushed + pushed,
                backlog=now.backlog if backlog is None else backlog,
                damaged=len(self._damaged),
                sent_bytes=now.sent_bytes + sent,
                failures=now.failures + failures,
                problem=self._problem(),
                newest_step=None if self._newest is None else self._newest.step,
            )

    def _problem(self) -> str:
        if self._failure is None and self._damaged:
            return f"damaged checkpoint: {self._damaged[-1]}"
        problem = self._failure or self._prune_failure
        return self._parts.late() if problem is None else f"{type(problem).__name__}: {problem}"

    def _end(self, limit_s: float | None) -> bool:
        first = not self._closing.is_set()
        self.close_in(limit_s)
        return first

    def close_in(self, limit_s: float | None) -> None:
        """End within ``limit_s``; None means no limit. Does not warn of the remaining backlog."""
        self._closing.set()
        self._call()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._stop.set()
            # A thread that waits for a response ends with its deadline, or with the process.
            self._thread.join(GIVE_UP_S)
        if self._lease is not None:
            self._lease.close()
