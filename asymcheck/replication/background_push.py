"""Background push of a training, in a child process, so that uploads use neither its GIL nor its memory.

Measured with a loop of small operators, which needs the GIL all the time, on two cores, during an upload of 132 MB to
HDFS: an iteration took 1.37 times as long with a thread in the same process, and 1.12 times with a separate process.

The training writes a request, the child writes its status (:mod:`asymcheck.replication.push_status`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from asymcheck.config import SECONDS, check_number
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    AsymcheckError,
    ClosedStoreError,
    GivenUpError,
    UnreachableRemoteWarning,
    warn_user,
)
from asymcheck.events import relay
from asymcheck.executor import start
from asymcheck.gc.retention_runner import MaintenanceThread
from asymcheck.policies.push_selection import due, held
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.replication.push_loop import GIVE_UP_S, RETRY_S
from asymcheck.replication.push_status import Failure, Mailbox, PushJob, PushRequest, PushStatus, encoded
from asymcheck.replication.run_lease import LeaseClaim, LeaseStatus
from asymcheck.replication.transfer_stats import PushStatistics
from asymcheck.storage import damaged_frames
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme.run_lock import Trainer
from asymcheck.storage.remote import RemoteTier, parse_location

_logger = logging.getLogger(__name__)
_START_S = 30.0
"""Seconds that a starting child gets in addition to a time limit, because the training may starve it of CPU time."""
_ANSWER_S = 3.0
"""Seconds that the child gets after a time limit to cancel its uploads and report."""
_POLL_S = 0.02
_QUIET_S = 5.0
"""Time after which a missing answer is reported."""

# Terminals and schedulers send these signals to all processes, but only the training decides what to do.
_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

_CHILD = (
    # `python -c` puts the working directory first in sys.path; the training may not import from there.
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); import os, signal; "
    f"numbers = [getattr(signal, name) for name in {_IGNORED_SIGNALS}]; "
    "[signal.signal(number, signal.SIG_IGN) for number in numbers]; "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers); "
    # The priority drops after the imports: at low priority, imports took a minute beside two busy loops on two cores.
    "from asymcheck.replication.push_loop import serve; "
    "serve({requests}, {statuses}, {parent})"
)

_forking = threading.Lock()
"""Held while a child starts. Otherwise a process forked at that moment would inherit its pipes and keep them open."""
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forking.release)


class BackgroundPush:
    """Push of one run in a child process. A killed child is replaced. Close it, or use it in a ``with`` block.

    The training never waits for an upload: if the remote location does not respond, only the backlog grows. The newest
    checkpoint goes first. A checkpoint that was deleted before its upload is not pushed. Without a job, all methods do
    nothing.
    """

    def __init__(self, local: ReadTier, job: PushJob | None) -> None:
        """Prepare to push from ``local``; :meth:`start` starts the child."""
        self._local, self._job = local, job
        self._known = None if job is None else CheckpointCache(local, job.run, metrics=job.rules.asks_for_metrics)
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()
        self._request = PushRequest()
        # Memory shared with the current child, and whether it has reported.
        self._requests: Mailbox | None = None
        self._statuses: Mailbox | None = None
        self._has_begun = self._is_given_up = False
        # Last status. Each child goes on from the status of the child before.
        self._now = PushStatus()
        self._lease = LeaseStatus()
        self._warned: set[str] = set()

    @property
    def pushes(self) -> bool:
        """Whether this rank, or another rank of this store, pushes."""
        return self._job is not None

    @property
    def _is_open(self) -> bool:
        return self._thread is not None and not self._request.is_closing

    def start(self) -> BackgroundPush:
        """Start the child, unless it was started. Checkpoints that an earlier training left go first.

        Raises:
            StorageError: this process may have no more threads.
        """
        if self._job is not None and self._thread is None:
            thread = threading.Thread(target=self._work, args=(self._job,), name="asymcheck-pushing", daemon=True)
            start(thread)
            self._thread = thread
        return self

    def warn_of_new_start(self) -> None:
        """Warn if the location has checkpoints of the run, of which the store has none. They would be in the way."""
        # Without the lease, the location has no run to warn of, or does not answer: another request could hold the
        # training for another deadline.
        if self._job is None or self.lease.phase != "held":
            return
        run, location = self._job.run, self._job.rules.remote
        # A location that does not answer is reported by the push.
        with (
            contextlib.suppress(AsymcheckError),
            contextlib.closing(RemoteTier(parse_location(location), self._job.config)) as remote,
        ):
            refs = remote.manifests.refs(run)
            if not refs:
                return
            warn_user(
                f"run {run!r} starts from scratch, but {location} has checkpoints of it, the newest of step "
                f"{refs[-1].step}, and no other training of this name can be pushed there. To continue that training, "
                f"stop this one, and open a new store with remote={location!r}. To keep both, give this run a new name",
                AbandonedCheckpointsWarning,
            )

    def refresh(self) -> None:
        """Upload the backlog soon. Call it after a commit. Never raises."""
        if self._is_open:
            self._ask(looks=self._request.looks + 1)

    def after_commit(self, upkeep: MaintenanceThread | None, is_full: bool = False) -> None:  # noqa: FBT001, FBT002 - bound
        """Prune, then upload the backlog. Runs on its own thread; never raises.

        With ``is_full``, a save has failed on a full drive.
        """
        if upkeep is not None:
            upkeep.after_commit(is_full=is_full)
        self.refresh()

    def statistics(self) -> PushStatistics:
        """Count the backlog, and return the statistics so far."""
        with self._turn:
            now = self._look()
            backlog = now.statistics.backlog
            with contextlib.suppress(AsymcheckError):
                backlog += len(self._waiting()) - len(now.waiting)
            return dataclasses.replace(now.statistics, backlog=backlog)

    def held(self) -> Mapping[str, str]:
        """Return the save ids that no retention may delete before their upload, with the reasons."""
        if self._job is None or not self._is_open:
            return {}
        return held(self._job.rules, self._waiting(), self._now.sending, self._now.begun)

    def _waiting(self) -> list[str]:
        """Return the save ids that wait, newest last: those of the status, and those committed since. Uses no network.

        Raises:
            StorageError: the store cannot be listed.
        """
        if self._job is None or self._known is None:
            return []
        with self._turn:
            now = self._look()
            local = {checkpoint.save_id: checkpoint for checkpoint in self._known.refresh()}
            unseen = [row for save_id, row in local.items() if save_id > now.newest_seen]
            new = [row.save_id for row in due(self._job.rules, unseen, (), time.time_ns())]
            return [*(save_id for save_id in now.waiting if save_id in local), *new]

    def _look(self) -> PushStatus:
        """Read the status of the child if it is new. The caller holds ``_turn``."""
        status = None if self._statuses is None else self._statuses.read(PushStatus)
        if status is None:
            return self._now
        for interval in status.intervals_since(self._now.traced):
            relay(interval)
        self._now, self._has_begun = status, True
        claim = self._request.claim
        if claim is not None and status.lease.token == claim.token:
            self._lease = status.lease
            if status.lease.phase == "held":
                # The next child goes on with the lease.
                claim = dataclasses.replace(claim, was_held=True, takeover=False)
                self._request = dataclasses.replace(self._request, claim=claim)
        return status

    def _ask(self, **changes: object) -> None:
        """Change the request, and write it for the child."""
        with self._turn:
            changes = {"damaged": damaged_frames.known(), **changes}
            self._request = dataclasses.replace(self._request, **changes)  # type: ignore[arg-type]  # as named
            # In a forked process, the child belongs to the parent.
            if self._requests is not None and self._pid == os.getpid():
                self._requests.write(self._request)
            self._turn.notify_all()

    def wait(self, *, raises: bool = True, is_ending: Callable[[], bool] = bool) -> None:
        """Wait until all checkpoints that are due now are at the remote location; on failure raise, or warn.

        Return early if ``is_ending`` tells that the process is about to end.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: an attempt that began after the call failed.
            InconsistentCheckpointError: some checkpoints of the store are damaged; the others were uploaded.
        """
        if self._job is None or self._thread is None:
            return
        with self._turn:
            number = self._request.waits + 1
            # This also ends the pause before the next child.
            self._ask(waits=number)
            while (status := self._look()).answered < number and self._thread.is_alive():
                if is_ending():
                    return
                self._turn.wait(_POLL_S)
            error = None if status.failure is None else status.failure.error()
            if status.answered < number:
                error = ClosedStoreError(f"run {self._job.run!r}: pushing to {self._job.rules.remote} has ended")
        if error is not None:
            if raises:
                raise error
            self.warn()

    def guard(self, store_id: str, *, takeover: bool) -> None:
        """Take the lease of the run at the remote location, on rank 0. Call it with the lock of the run in the store.

        With ``takeover``, take the run over from a living training on another machine.

        Raises:
            RunInUseError: another training has the lease.
        """
        if self._job is None or not self._job.prunes:
            return
        self.start()
        if self._is_open and (self._lease.phase == "none" or self._lease.is_taken):
            status = os.stat(self._job.store)
            folder = f"{status.st_dev}:{status.st_ino}"
            claim = LeaseClaim(Trainer.this(), store_id, folder, os.urandom(16).hex(), takeover)
            with self._turn:
                self._lease = LeaseStatus("undecided", claim.token)
                self._ask(claim=claim)
            self._await_lease(self._job)
        self.check()

    def _await_lease(self, job: PushJob) -> None:
        """Wait until a claim is decided, at most ``deadline_s`` without an answer of the location."""
        deadline_s = job.config.remote.deadline_s
        began = time.monotonic()
        limit, quiet, is_logged = began + deadline_s, began + _QUIET_S, False
        with self._turn:
            while not self.lease.is_decided and self._is_open and (now := time.monotonic()) < limit:
                if self._lease.until and not is_logged:
                    limit, quiet, is_logged = self._lease.until + deadline_s, math.inf, True
                    holder = f"run {job.run} at {job.rules.remote} may be in use by {self._lease.other}"
                    _logger.warning("%s; waiting up to %.0f s for a sign of life", holder, self._lease.until - now)
                elif now > quiet:
                    quiet = math.inf
                    text = "%s does not answer; waiting up to %g s to learn whether another machine trains run %s"
                    _logger.warning(text, job.rules.remote, deadline_s, job.run)
                self._turn.wait(_POLL_S)
            problem = self._lease.problem if self._lease.is_decided else "no answer in time"
        if problem:
            _logger.warning("run %s is not guarded against other machines: %s", job.run, problem)

    @property
    def lease(self) -> LeaseStatus:
        """Lease of the run at the remote location. While another training has it, nothing is pushed."""
        with self._turn:
            self._look()
            return self._lease

    def check(self) -> None:
        """Raise if another training has the lease of the run.

        Raises:
            RunInUseError: another training trains the run, or has taken it over.
        """
        if self._job is not None and self._is_open:
            self.lease.check(self._job.run, self._job.rules.remote)

    def warn(self) -> None:
        """Warn of a problem, once per kind of problem until the push works again."""
        # The next step reports a lost lease.
        if self._job is None or self._thread is None or self.lease.is_taken:
            return
        with self._turn:
            problem = self._look().statistics.problem
        if not problem:
            self._warned.clear()
            return
        # Damaged checkpoints can stay for long, and must not hide other problems.
        kind = problem.split(":", 1)[0]
        if kind not in self._warned:
            self._warned.add(kind)
            now = self.statistics()
            waits = f"{now.backlog} checkpoint{' waits' if now.backlog == 1 else 's wait'} to be pushed, "
            warn_user(
                f"{self._job.rules.remote}: {waits if now.backlog else ''}training goes on: {problem}",
                UnreachableRemoteWarning,
            )

    def close(
        self, timeout_s: float | None = None, *, is_alone: bool = False, sends_newest: bool = False
    ) -> PushStatistics:
        """Push the remaining checkpoints once, end, and return the statistics. Closing twice is no error.

        Args:
            timeout_s: seconds until giving up; None for ``close_s`` of the rules. The next push of this store to the
                location sends the rest, and sends no partition again.
            is_alone: do not wait for parts of other machines, because a rank of the job has ended.
            sends_newest: push the newest checkpoint first, even if no rule selects it.

        Raises:
            InvalidInputError: ``timeout_s`` is out of range; the push goes on.

        Warns:
            UnreachableRemoteWarning: checkpoints were not uploaded, or another problem exists.
        """
        if self._job is None or self._thread is None:
            return PushStatistics()
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, *SECONDS)
        limit_s = self._job.rules.close_s if timeout_s is None else timeout_s
        self._close(limit_s, is_alone=is_alone, sends_newest=sends_newest)
        return self.statistics()

    def close_before_kill(self, left_s: float) -> None:
        """Push the newest checkpoint first, even if no rule selects it, and close within ``left_s`` seconds."""
        self._close(max(left_s, 0.0), is_killed=True, sends_newest=True)

    def _close(
        self, limit_s: float | None, *, sends_newest: bool, is_killed: bool = False, is_alone: bool = False
    ) -> None:
        """End once, and warn. With ``is_killed``, the end takes at most ``limit_s``."""
        job, thread = self._job, self._thread
        if job is None or thread is None or self._request.is_closing:
            return
        # While another training has the lease, nothing is pushed.
        self._ask(is_alone=is_alone, sends_newest=sends_newest and not self.lease.is_taken)
        self._end(thread, limit_s, is_killed=is_killed)
        now = self.statistics()
        if now.backlog:
            counted = "1 checkpoint was" if now.backlog == 1 else f"{now.backlog} checkpoints were"
            # A cause may be permanent, such as another training of the same name at the location.
            reason, condition = (
                (now.problem, "once the cause is removed, ") if now.problem else ("no time was left", "")
            )
            warn_user(
                f"run {job.run!r}: {counted} not pushed to {job.rules.remote} ({reason}); {condition}the next training "
                "that pushes there sends them, or asymcheck push --all does",
                UnreachableRemoteWarning,
            )
        elif now.problem and self._lease.phase != "refused":
            warn_user(f"run {job.run!r}, pushed to {job.rules.remote}: {now.problem}", UnreachableRemoteWarning)

    def _end(self, thread: threading.Thread, limit_s: float | None, *, is_killed: bool) -> None:
        grace_s = GIVE_UP_S + _ANSWER_S
        if is_killed and limit_s is not None:
            limit_s, grace_s = max(limit_s - GIVE_UP_S, 0.0), min(limit_s, GIVE_UP_S)
        self._ask(is_closing=True, close_s=limit_s)
        with self._turn:
            self._look()
            grace_s += 0.0 if self._has_begun or is_killed else _START_S
        thread.join(None if limit_s is None else min(limit_s + grace_s, threading.TIMEOUT_MAX))
        self._is_given_up = True
        if thread.is_alive():
            # The thread kills a child that is just starting.
            if (process := self._process) is not None:
                process.kill()
            thread.join(GIVE_UP_S)

    def _work(self, job: PushJob) -> None:
        """Run one child after the other until the end."""
        is_last = False
        while not is_last:
            # If close() is called while no child runs, one more child pushes the rest.
            is_last = self._request.is_closing
            failure = self._attempt(job)
            with self._turn:
                is_last = is_last or failure is None or self._is_given_up
                if failure is not None:
                    self._note_end(failure)
                self._turn.notify_all()
                if not is_last:
                    self._turn.wait_for(self._is_wanted, RETRY_S)

    def _is_wanted(self) -> bool:
        return self._request.is_closing or self._request.waits > self._now.answered

    def _note_end(self, error: AsymcheckError) -> None:
        """Note the end of a child, which answers all waits."""
        if not self._lease.is_decided:
            self._lease = dataclasses.replace(self._lease, phase="unguarded", problem=str(error))
        failure, now = Failure.of(error), self._now.statistics
        statistics = dataclasses.replace(now.between_uploads(), failures=now.failures + 1, problem=str(failure))
        self._now = dataclasses.replace(
            self._now,
            statistics=statistics,
            sending=None,
            lease=LeaseStatus(),
            answered=self._request.waits,
            failure=failure,
        )

    def _attempt(self, job: PushJob) -> AsymcheckError | None:
        """Run one child until it ends; return the reason, or None if a request has ended it."""
        remote = job.rules.remote
        try:
            with self._started(job) as process:
                status = process.wait()
                with self._turn:
                    found = self._look()
        except OSError as error:
            return GivenUpError(f"cannot start the process that pushes to {remote}: {error}")
        if status == 0:
            return None
        if found.failure is not None and found.answered < 0:
            return found.failure.error()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        again = "" if self._request.is_closing else f"; another one begins in {RETRY_S:.0f} s"
        return GivenUpError(f"the process that pushes to {remote} {how}{again}")

    @contextlib.contextmanager
    def _started(self, job: PushJob) -> Iterator[subprocess.Popen[bytes]]:
        """Start a child for the ``with`` block."""
        with _anonymous("request") as requests, _anonymous("status") as statuses:
            try:
                with self._turn:
                    self._requests, self._statuses = Mailbox(requests), Mailbox(statuses)
                    self._has_begun = False
                    self._requests.write(self._request)
                job = dataclasses.replace(job, before=self._now)
                self._process = _start(self._requests, self._statuses, job)
                if self._is_given_up:
                    self._process.kill()
                yield self._process
            finally:
                with self._turn:
                    self._requests = self._statuses = self._process = None

    def abandon(self) -> None:
        """End the child at once, and wait for nothing. The next push of this store to the location sends the rest."""
        # In a forked process, the child belongs to the parent.
        if self._is_open and self._pid == os.getpid():
            self._is_given_up = True
            self._ask(is_closing=True, close_s=0.0)
            if (process := self._process) is not None:
                process.kill()

    def __enter__(self) -> BackgroundPush:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close. After an exception in the block, no warning of the push hides the exception."""
        with contextlib.suppress(UnreachableRemoteWarning) if error is not None else contextlib.nullcontext():
            self.close()


def _anonymous(name: str) -> io.FileIO:
    """Create a file in memory, which is neither in a file system nor subject to its limits."""
    return io.FileIO(os.memfd_create(f"asymcheck-{name}"), "r+")


def _start(requests: Mailbox, statuses: Mailbox, job: PushJob) -> subprocess.Popen[bytes]:
    """Start a child. The job is passed in memory, as it may contain credentials."""
    with _forking, _anonymous("job") as file:
        file.write(encoded(job).encode())
        file.seek(0)
        shared = requests.file.fileno(), statuses.file.fileno()
        code = _CHILD.format(requests=shared[0], statuses=shared[1], parent=os.getpid())
        # The child inherits the blocked signals, until it has set its own handlers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in _IGNORED_SIGNALS])
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code],
                # The import path of the training. Entries of sys.path need not be strings.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if type(entry) is str)},
                stdin=file,
                stdout=subprocess.DEVNULL,
                pass_fds=shared,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
