"""Background push in a separate process, so that uploads use neither the GIL nor the memory of the training.

Measured with a loop of small operators, which needs the GIL all the time, on two cores, during an upload of 132 MB to
HDFS: an iteration took 1.37 times as long with a thread in the same process, and 1.12 times with a separate process.

The training and the child exchange pickled messages over a socket pair. The child ends with the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

from asymcheck.errors import AsymcheckError, ClosedStoreError, GivenUpError
from asymcheck.events import Interval, relay, watch
from asymcheck.executor import NICE, begin
from asymcheck.replication.background_push import Damaged, PushJob, PushWorker
from asymcheck.replication.push_thread import GIVE_UP_S, RETRY_S, PushThread
from asymcheck.replication.run_lease import LeaseClaim, LeaseStatus
from asymcheck.replication.transfer_stats import PushStatistics
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier, is_uri, parse_location
from asymcheck.types import Checkpoint

_START_S = 30.0
"""Seconds that a starting child gets in addition to a time limit, because the training may starve it of CPU time."""
_ANSWER_S = 3.0
"""Seconds that the child gets after a time limit to cancel its uploads and report."""

_WAIT_S = 0.5
_POLL_S = 0.05

# Terminals and schedulers send these signals to all processes, but only the training decides what to do.
_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

_CHILD = (
    # `python -c` puts the working directory first in sys.path; the training may not import from there.
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); import os, signal; "
    f"numbers = [getattr(signal, name) for name in {_IGNORED_SIGNALS}]; "
    "[signal.signal(number, signal.SIG_IGN) for number in numbers]; "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers); "
    # The priority drops after the imports: at low priority, imports took a minute beside two busy loops on two cores.
    "from asymcheck.replication.push_process import serve; "
    "serve({descriptor}, {parent})"
)

_forking = threading.Lock()
"""Held while a child starts. Otherwise a process forked at that moment would inherit the socket and keep it open."""


class StatusRequest(NamedTuple):
    """Request after a commit. At most one is unanswered; the answer is a :class:`StatusReply`."""


class WaitRequest(NamedTuple):
    """Request to push all due checkpoints now. The answer is a :class:`WaitReply`."""

    number: int


class ClaimRequest(NamedTuple):
    """Request to take the lease of the run. Each :class:`StatusReply` has the outcome so far."""

    claim: LeaseClaim


class CloseRequest(NamedTuple):
    """Request to push the remaining checkpoints and end."""

    limit_s: float | None
    """Time limit in seconds; None for no limit."""


class StatusReply(NamedTuple):
    """State of the child, sent after each change and after a :class:`StatusRequest`."""

    statistics: PushStatistics
    sending: str | None
    """Save id of the checkpoint that is being uploaded."""
    is_connected: bool
    """Whether the remote location was listed."""
    is_well: bool
    """Whether the last round had no failure."""
    lease: LeaseStatus
    """Lease of the run at the remote location."""
    generation: int
    """Newest generation at the remote location."""
    damaged: Damaged
    """Checkpoints that cannot be pushed."""
    sent: Mapping[str, Checkpoint]
    """Checkpoints at the remote location that no earlier reply named, by save id."""
    not_sent: Collection[str]
    """Save ids of checkpoints that an earlier reply named, but that are not at the remote location."""
    has_looked: bool
    """Whether this is the answer to a :class:`StatusRequest`."""
    intervals: Sequence[Interval] = ()
    """Trace intervals since the last reply. All processes of a machine share the monotonic clock."""


class WaitReply(NamedTuple):
    """End of a wait, with the error that ended it."""

    number: int
    error: Exception | None


class FailureReply(NamedTuple):
    """Last message of a child that could not start."""

    error: Exception


class PushProcess(PushWorker):
    """Push worker in a child process. A killed child is replaced; the child ends with this process."""

    def __init__(self, local: ReadTier, job: PushJob) -> None:
        super().__init__(local, job)
        self._child: Connection[Any, Any] | None = None
        # Statistics of the current child, and the sum of those of earlier children.
        self._now, self._before = PushStatistics(), PushStatistics()
        self._backlog = 0
        # Whether a StatusRequest is unanswered, and whether another one must follow.
        self._is_looking = self._looks_again = False
        self._waits: dict[int, Exception | None] = {}
        self._count = self._ends = 0
        self._is_awaited = self._has_begun = self._is_told_to_close = False
        self._closing_in: CloseRequest | None = None
        self._own_end: Connection[Any, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        _living.add(self)
        self._thread.start()

    def statistics(self) -> PushStatistics:
        """Return the statistics so far; see :meth:`PushWorker.statistics`."""
        with self._turn:
            now, before = self._now, self._before
            failure = self._failure
            return dataclasses.replace(
                now,
                pushed=before.pushed + now.pushed,
                backlog=self._backlog,
                sent_bytes=before.sent_bytes + now.sent_bytes,
                failures=before.failures + now.failures,
                problem=now.problem if failure is None else f"{type(failure).__name__}: {failure}",
            )

    def refresh(self) -> None:
        """Count the backlog, and upload it soon; see :meth:`PushWorker.refresh`."""
        self._count_backlog()
        with self._turn:
            if self._is_looking:
                # With more than one request in the socket, its buffer could fill up, and send() would block.
                self._looks_again = True
            elif self._send(StatusRequest()):
                self._is_looking = True

    def wait(self) -> None:
        """Wait until all due checkpoints are at the remote location; see :meth:`PushWorker.wait`."""
        with self._turn:
            self._count += 1
            number, ends = self._count, self._ends
            # End the pause before the next attempt.
            self._is_awaited = True
            self._turn.notify_all()
            self._wait_until(lambda: self._child is not None or self._ends > ends or not self._thread.is_alive())
            child = self._child
            self._send(WaitRequest(number))
            self._wait_until(lambda: number in self._waits or child is None or self._child is not child)
            if number not in self._waits:
                raise self._failure or ClosedStoreError(f"run {self._run!r}: pushing to {self.rules.remote} has ended")
            error = self._waits.pop(number)
        if error is not None:
            raise error

    def claim(self, claim: LeaseClaim) -> None:
        """Begin to take the lease of the run; see :meth:`PushWorker.claim`."""
        with self._turn:
            self.lease = LeaseStatus("undecided", claim.token)
            self._job = dataclasses.replace(self._job, claim=claim)
            self._send(ClaimRequest(claim))

    def _apply_lease(self, lease: LeaseStatus) -> None:
        """Apply the status of the present claim. A child that replaces a killed one goes on with its lease."""
        claim = self._job.claim
        if claim is not None and lease.token == claim.token:
            self.lease = lease
            if lease.phase == "held":
                self._job = dataclasses.replace(
                    self._job, claim=dataclasses.replace(claim, was_held=True, takeover=False)
                )

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. The caller holds ``_turn``."""
        while not condition():
            self._turn.wait(_WAIT_S)

    def _end(self, limit_s: float | None) -> bool:
        with self._turn:
            first = self._closing_in is None
            self._closing_in = self._closing_in or CloseRequest(limit_s)
            if first:
                self._send_close()
            self._turn.notify_all()
            grace_s = GIVE_UP_S + _ANSWER_S + (0.0 if self._has_begun else _START_S)
        self._thread.join(None if limit_s is None else min(limit_s + grace_s, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            with self._turn:
                if self._process is not None:
                    self._process.kill()
            self._thread.join(GIVE_UP_S)
        if first:
            self._count_backlog()
        return first

    def _send_close(self) -> None:
        if self._closing_in is not None and self._send(self._closing_in):
            self._is_told_to_close = True

    def _count_backlog(self) -> None:
        with contextlib.suppress(AsymcheckError):
            backlog = len(self._due())
            with self._turn:
                self._backlog = backlog

    def _send(self, message: object) -> bool:
        """Send a message; return False without a child. The caller holds ``_turn``."""
        if self._child is None:
            return False
        try:
            self._child.send(message)
        except OSError:
            # The child was killed. The thread of this worker notices as well.
            return False
        return True

    def _work(self) -> None:
        is_last = False
        while not is_last:
            # If close() is called while no child runs, one more child pushes the rest.
            is_last = self._closing_in is not None
            failure = self._attempt()
            with self._turn:
                is_last = is_last or self._is_told_to_close
                self._child = self._process = self.sending = None
                self._is_looking = self._looks_again = self._has_begun = False
                if failure is not None:
                    if not self.lease.is_decided:
                        self.lease = dataclasses.replace(self.lease, phase="unguarded", problem=str(failure))
                    self._ends += 1
                    self._failure = failure
                    now = self.statistics()
                    self._before = dataclasses.replace(now, failures=now.failures + 1)
                    self._now = PushStatistics(newest_step=now.newest_step)
                self._is_awaited = False
                self._turn.notify_all()
                if not is_last:
                    self._turn.wait_for(lambda: self._is_awaited or self._closing_in is not None, RETRY_S)

    def _attempt(self) -> Exception | None:
        """Run one child until it ends; return the reason, or None if it was told to end."""
        try:
            return self._run_child()
        except OSError as error:
            return GivenUpError(f"cannot start the process that pushes to {self.rules.remote}: {error}")
        except Exception as error:  # noqa: BLE001 - training must go on; the statistics report the error
            return error

    def _run_child(self) -> Exception | None:
        with self._started() as (process, child):
            with self._turn:
                child.send(self._job)
                self._process, self._child = process, child
                self._send_close()
                self._turn.notify_all()
            failure: Exception | None = None
            reported: dict[str, Checkpoint] = {}
            while (message := _next(process, child)) is not None:
                if isinstance(message, FailureReply):
                    failure = message.error
                elif isinstance(message, WaitReply):
                    with self._turn:
                        self._waits[message.number] = message.error
                        self._turn.notify_all()
                elif isinstance(message, StatusReply):
                    self._apply(message, reported)
            status = process.wait()
        if status == 0 and self._is_told_to_close:
            return None
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return failure or GivenUpError(
            f"the process that pushes to {self.rules.remote} {how}; another one begins in {RETRY_S:.0f} s"
        )

    @contextlib.contextmanager
    def _started(self) -> Iterator[tuple[subprocess.Popen[bytes], Connection[Any, Any]]]:
        with _forking:
            own_end, child_end = socket.socketpair()
            child = self._own_end = Connection(own_end.detach())
            try:
                with child_end:
                    process = _start(child_end.fileno())
            except BaseException:
                child.close()
                raise
        try:
            yield process, child
        finally:
            with self._turn:
                child.close()
            if process.poll() is None:
                process.kill()
                process.wait()

    def _apply(self, message: StatusReply, reported: dict[str, Checkpoint]) -> None:
        """Apply a reply. ``reported`` accumulates what this child has reported as sent."""
        for interval in message.intervals:
            relay(interval)
        reported.update(message.sent)
        for save_id in message.not_sent:
            reported.pop(save_id, None)
        with self.queue.lock:
            # Until this child has listed the location, the findings of earlier children remain valid.
            self.queue.sent = dict(reported) if message.is_connected else {**self.queue.sent, **message.sent}
            self.queue.generation = max(self.queue.generation, message.generation)
            self.queue.damaged = message.damaged
        self._count_backlog()
        with self._turn:
            self._now, self.sending, self._has_begun = message.statistics, message.sending, True
            self._apply_lease(message.lease)
            self._turn.notify_all()
            if message.is_well or message.statistics.problem:
                self._failure = None
            if message.has_looked:
                self._is_looking = False
                if self._looks_again:
                    self._looks_again = False
                    self._is_looking = self._send(StatusRequest())

    def leave(self) -> None:
        """Close the connection in a forked process. The child stays with the parent of that process."""
        if self._own_end is not None:
            self._own_end.close()
        self._child = None


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a child that communicates over the socket ``descriptor``."""
    # The child inherits the blocked signals, until it has set its own handlers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in _IGNORED_SIGNALS])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(descriptor=descriptor, parent=os.getpid())],
            # The import path of the training. Entries of sys.path need not be strings.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if type(entry) is str)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _next(process: subprocess.Popen[bytes], child: Connection[Any, Any]) -> object:
    """Return the next message; None after the child's end, even if another process holds its end of the socket."""
    try:
        while not child.poll(_WAIT_S):
            if process.poll() is not None and not child.poll():
                return None
        message: object = child.recv()
    except (EOFError, OSError):
        return None
    return message


def serve(descriptor: int, parent: int) -> None:
    """Push for the process ``parent``, which sends requests over the socket ``descriptor``, until either ends."""
    _lower_priority()
    training: Connection[Any, Any] = Connection(descriptor)
    status = 1
    try:
        # If the training was killed, its next start continues the upload.
        with contextlib.suppress(EOFError, ConnectionError):
            status = _serve(training, parent)
    except Exception:  # noqa: BLE001 - the training sees the status
        traceback.print_exc()
    # A regular exit would wait for threads that wait for servers.
    os._exit(status)


def _lower_priority() -> None:
    """Lower the priority of all threads, including those of libraries."""
    for task in os.listdir("/proc/self/task"):
        # A thread may have ended in the meantime.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task), NICE)


def _serve(training: Connection[Any, Any], parent: int) -> int:
    while not training.poll(_POLL_S):
        if os.getppid() != parent:
            return 1
    job: PushJob = training.recv()
    try:
        local = (
            RemoteTier(parse_location(job.store), job.config)
            if is_uri(job.store)
            else NvmeTier(Path(job.store), job.config, read_only=True)
        )
        worker = PushThread(local, job)
    except AsymcheckError as error:
        training.send(FailureReply(_portable(error)))
        return 1
    server = _Server(training, parent, worker)
    with watch(server.add_interval):
        server.serve()
    return 0


class _Server:
    """Loop of the child: requests of the training in, replies out."""

    def __init__(self, training: Connection[Any, Any], parent: int, worker: PushThread) -> None:
        self._training, self._parent, self._worker = training, parent, worker
        self._reported: object = None
        self._reported_sent: dict[str, Checkpoint] = {}
        self._wait_replies: list[WaitReply] = []
        self._intervals: deque[Interval] = deque()
        self._closed = threading.Event()

    def serve(self) -> None:
        """Serve until a CloseRequest was carried out, or the training has ended."""
        while True:
            has_looked = self._training.poll(_POLL_S) and self._handle(self._training.recv())
            if os.getppid() != self._parent:
                # A process that the training has forked may still hold its end of the socket.
                return
            # In this order, the status is not older than the wait replies, and the last status is complete.
            is_over = self._closed.is_set()
            replies, self._wait_replies = self._wait_replies, []
            self._report(has_looked=has_looked)
            for reply in replies:
                self._training.send(reply)
            if is_over:
                return

    def add_interval(self, interval: Interval) -> None:
        """Keep an interval for the training. Intervals of single frames are dropped, as there may be thousands."""
        if interval.name == "push":
            self._intervals.append(dataclasses.replace(interval, thread=os.getpid()))

    def _handle(self, message: object) -> bool:
        """Begin what a request asks for; return whether it was a StatusRequest."""
        if isinstance(message, WaitRequest):
            begin(partial(self._wait, message.number), "push-wait")
        elif isinstance(message, ClaimRequest):
            self._worker.claim(message.claim)
        elif isinstance(message, CloseRequest):
            begin(partial(self._close, message.limit_s), "push-close")
        else:
            self._worker.refresh()
        return isinstance(message, StatusRequest)

    def _wait(self, number: int) -> None:
        error: Exception | None = None
        try:
            self._worker.wait()
        except Exception as failure:  # noqa: BLE001 - raised in the training
            error = _portable(failure)
        self._wait_replies.append(WaitReply(number, error))

    def _close(self, limit_s: float | None) -> None:
        try:
            self._worker.close_in(limit_s)
        finally:
            self._closed.set()

    def _report(self, *, has_looked: bool) -> None:
        """Send changes. Statistics are read first, so that each checkpoint counted as pushed is in ``sent``."""
        worker, queue = self._worker, self._worker.queue
        facts = worker.statistics(), worker.sending, worker.is_connected, worker.is_well, worker.lease
        with queue.lock:
            state = *facts, queue.generation, dict(queue.damaged)
            report = state, len(queue.sent)
            if report == self._reported and not has_looked and not self._intervals:
                return
            sent = dict(queue.sent)
        before, self._reported, self._reported_sent = self._reported_sent, report, sent
        new = {save_id: checkpoint for save_id, checkpoint in sent.items() if save_id not in before}
        intervals = [self._intervals.popleft() for _ in range(len(self._intervals))]
        self._training.send(StatusReply(*state, new, before.keys() - sent.keys(), has_looked, intervals))


def _portable(error: Exception) -> Exception:
    """Return an error that survives pickling. Not every exception can be built from its message."""
    try:
        copy: Exception = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # noqa: BLE001 - a constructor may raise anything
        return GivenUpError(f"{type(error).__name__}: {error}")
    return copy


_living: weakref.WeakSet[PushProcess] = weakref.WeakSet()


def _leave_in_child() -> None:
    _forking.release()
    for worker in tuple(_living):
        worker.leave()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_leave_in_child)
