"""Pushing in a process of its own: the interpreter of the training, and its memory, are left alone.

Measured beside a loop of small operators, which needs the interpreter all the time: while 132 MB went to HDFS, on two
cores, an iteration took 1.37 times as long with a thread in the same process, and 1.12 times with a process.
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
from asymcheck.replication.transfer_stats import PushStatistics
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier, is_uri, parse_location
from asymcheck.types import Checkpoint

_START_S = 30.0
"""It has so long to begin, when it is to end in a given time: it may be starved by the training until then."""
_ANSWER_S = 3.0
"""Seconds that the process may take to give up and to report it, after its time is over."""

_WAIT_S = 0.5
_POLL_S = 0.05

# They are for the training, which says what is to be done: terminals and schedulers send them to all processes.
_NOT_FOR_IT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

_CHILD = (
    # What the training does not import from, the directory it is in, is nothing to import from here.
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); import os, signal; "
    f"numbers = [getattr(signal, name) for name in {_NOT_FOR_IT}]; "
    "[signal.signal(number, signal.SIG_IGN) for number in numbers]; "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers); "
    # The priority drops when all is imported: with it, imports took a minute beside two busy loops on two cores.
    "from asymcheck.replication.push_process import serve; "
    "serve({descriptor}, {parent})"
)

_forking = threading.Lock()
"""Held while a process is begun: one that is forked then would have what the two talk by, and keep it open."""


# Messages travel pickled, between a training and the process that pushes for it.


class StatusRequest(NamedTuple):
    """A request after a commit. Answered by :class:`StatusReply`, and not sent again before that."""


class WaitRequest(NamedTuple):
    """A request to send all that is to be pushed now. Answered by :class:`WaitReply`."""

    number: int


class CloseRequest(NamedTuple):
    """A request to push what is left in so many seconds, or None for as long as it takes, and to end."""

    limit_s: float | None


class StatusReply(NamedTuple):
    """The state of the process; sent when it has changed, and after a :class:`StatusRequest`."""

    statistics: PushStatistics
    """Statistics so far."""
    sending: str | None
    """The save id of the checkpoint that is being sent."""
    is_connected: bool
    """Whether it has listed the location."""
    is_well: bool
    """Whether it has done what there was to do, and nothing was in the way."""
    generation: int
    """The newest that is known there."""
    damaged: Damaged
    """The checkpoints that cannot be pushed."""
    sent: Mapping[str, Checkpoint]
    """Checkpoints that are known to be there and were not before, by save id."""
    not_sent: Collection[str]
    """The save ids of those that are not there, as was thought."""
    has_looked: bool
    """Whether it is the answer to a :class:`StatusRequest`."""
    intervals: Sequence[Interval] = ()
    """Intervals reported to its watchers since the last news; clocks of one machine agree."""


class WaitReply(NamedTuple):
    """The end of a wait, with the reason why not all is there."""

    number: int
    error: Exception | None


class FailureReply(NamedTuple):
    """The last message of a process that could not begin, with the reason."""

    error: Exception


class PushProcess(PushWorker):
    """Pushes in a process of its own, which is begun again when it was killed, and ends with this one."""

    def __init__(self, here: ReadTier, order: PushJob) -> None:
        super().__init__(here, order)
        self._child: Connection[Any, Any] | None = None
        # Of the process that pushes now, and of those before it.
        self._now, self._before = PushStatistics(), PushStatistics()
        self._backlog = 0
        # Looks: one is not answered yet, and another one is due then.
        self._is_looking = self._looks_again = False
        self._waits: dict[int, Exception | None] = {}
        self._count = self._ends = 0
        self._is_awaited = self._has_begun = self._is_told_to_close = False
        self._closing_in: CloseRequest | None = None
        self._ours: Connection[Any, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        _living.add(self)
        self._thread.start()

    def statistics(self) -> PushStatistics:
        """Return what it has done so far; see :meth:`PushWorker.statistics`."""
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

    def look(self) -> None:
        """Count what waits, and send it soon; see :meth:`PushWorker.look`."""
        self._count_backlog()
        with self._turn:
            if self._is_looking:
                # No more than one lies in the socket: who writes into a full one waits.
                self._looks_again = True
            elif self._send(StatusRequest()):
                self._is_looking = True

    def wait(self) -> None:
        """Wait until all that is to be pushed now lies there; see :meth:`PushWorker.wait`."""
        with self._turn:
            self._count += 1
            number, ends = self._count, self._ends
            # Who waits does not wait for the next attempt.
            self._is_awaited = True
            self._turn.notify_all()
            self._until(lambda: self._child is not None or self._ends > ends or not self._thread.is_alive())
            child = self._child
            self._send(WaitRequest(number))
            self._until(lambda: number in self._waits or child is None or self._child is not child)
            if number not in self._waits:
                raise self._failure or ClosedStoreError(f"run {self._run!r}: pushing to {self.rules.remote} has ended")
            error = self._waits.pop(number)
        if error is not None:
            raise error

    def _until(self, so: Callable[[], bool]) -> None:
        """Wait until something is so. The caller has ``_turn``."""
        while not so():
            self._turn.wait(_WAIT_S)

    def _end(self, limit_s: float | None) -> bool:
        with self._turn:
            first = self._closing_in is None
            self._closing_in = self._closing_in or CloseRequest(limit_s)
            if first:
                self._tell_to_close()
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

    def _tell_to_close(self) -> None:
        if self._closing_in is not None and self._send(self._closing_in):
            self._is_told_to_close = True

    def _count_backlog(self) -> None:
        with contextlib.suppress(AsymcheckError):
            backlog = len(self._due())
            with self._turn:
                self._backlog = backlog

    def _send(self, message: object) -> bool:
        """Send a message; return False when there is no process for it. The caller has ``_turn``."""
        if self._child is None:
            return False
        try:
            self._child.send(message)
        except OSError:
            # It was killed; the thread that listens finds out, too.
            return False
        return True

    def _work(self) -> None:
        is_last = False
        while not is_last:
            # What is still to be sent at the end is sent, also when there is no process at that moment.
            is_last = self._closing_in is not None
            failure = self._attempt()
            with self._turn:
                is_last = is_last or self._is_told_to_close
                self._child = self._process = self.sending = None
                self._is_looking = self._looks_again = self._has_begun = False
                if failure is not None:
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
        """Let a process push until it ends; return why, unless it was to end."""
        try:
            return self._serve()
        except OSError as error:
            return GivenUpError(f"no process could be begun that pushes to {self.rules.remote}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on, and the statistics say it
            return error

    def _serve(self) -> Exception | None:
        with self._begun() as (process, child):
            with self._turn:
                child.send(self._order)
                self._process, self._child = process, child
                self._tell_to_close()
                self._turn.notify_all()
            failure: Exception | None = None
            told: dict[str, Checkpoint] = {}
            while (message := _next(process, child)) is not None:
                if isinstance(message, FailureReply):
                    failure = message.error
                elif isinstance(message, WaitReply):
                    with self._turn:
                        self._waits[message.number] = message.error
                        self._turn.notify_all()
                elif isinstance(message, StatusReply):
                    self._take(message, told)
            status = process.wait()
        if status == 0 and self._is_told_to_close:
            return None
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return failure or GivenUpError(
            f"the process that pushes to {self.rules.remote} {how}; another one begins in {RETRY_S:.0f} s"
        )

    @contextlib.contextmanager
    def _begun(self) -> Iterator[tuple[subprocess.Popen[bytes], Connection[Any, Any]]]:
        with _forking:
            ours, theirs = socket.socketpair()
            child = self._ours = Connection(ours.detach())
            try:
                with theirs:
                    process = _begin(theirs.fileno())
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

    def _take(self, message: StatusReply, told: dict[str, Checkpoint]) -> None:
        """Note what it says; ``told`` is what this process has said to be there."""
        for interval in message.intervals:
            relay(interval)
        told.update(message.sent)
        for save_id in message.not_sent:
            told.pop(save_id, None)
        with self.queue.lock:
            # Until it has looked, what one before it has seen there holds.
            self.queue.sent = dict(told) if message.is_connected else {**self.queue.sent, **message.sent}
            self.queue.generation = max(self.queue.generation, message.generation)
            self.queue.damaged = message.damaged
        self._count_backlog()
        with self._turn:
            self._now, self.sending, self._has_begun = message.statistics, message.sending, True
            if message.is_well or message.statistics.problem:
                self._failure = None
            if message.has_looked:
                self._is_looking = False
                if self._looks_again:
                    self._looks_again = False
                    self._is_looking = self._send(StatusRequest())

    def leave(self) -> None:
        """Let go of the process, in a forked child: it ends with this one's parent."""
        if self._ours is not None:
            self._ours.close()
        self._child = None


def _begin(descriptor: int) -> subprocess.Popen[bytes]:
    """Begin a process that is talked to by the socket ``descriptor``."""
    # It inherits what is blocked here, until it can say itself what it does not listen to.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in _NOT_FOR_IT])
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(descriptor=descriptor, parent=os.getpid())],
            # Where this program was found, and what it has imported; not all that is in there need be text.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if type(one) is str)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _next(process: subprocess.Popen[bytes], child: Connection[Any, Any]) -> object:
    """Return the next message; None if the process has ended, even if a third process holds its end of the socket."""
    try:
        while not child.poll(_WAIT_S):
            if process.poll() is not None and not child.poll():
                return None
        message: object = child.recv()
    except (EOFError, OSError):
        return None
    return message


def serve(descriptor: int, parent: int) -> None:
    """Push for the process ``parent``, which sends its orders by the socket ``descriptor``, until it closes or ends."""
    _stand_back()
    training: Connection[Any, Any] = Connection(descriptor)
    status = 1
    try:
        # When the training is gone, what was sent stays, and the next one goes on from there.
        with contextlib.suppress(EOFError, ConnectionError):
            status = _serve(training, parent)
    except Exception:  # noqa: BLE001 - the training sees the status
        traceback.print_exc()
    # Not by the interpreter's own end, which would wait for threads that wait for servers.
    os._exit(status)


def _stand_back() -> None:
    """Take what the training leaves, with all threads that libraries have begun."""
    for task in os.listdir("/proc/self/task"):
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task), NICE)


def _serve(training: Connection[Any, Any], parent: int) -> int:
    while not training.poll(_POLL_S):
        if os.getppid() != parent:
            return 1
    order: PushJob = training.recv()
    place, config = order.store, order.config
    try:
        is_remote = is_uri(place)
        here = RemoteTier(parse_location(place), config) if is_remote else NvmeTier(Path(place), config, read_only=True)
        pushing = PushThread(here, order)
    except AsymcheckError as error:
        training.send(FailureReply(_portable(error)))
        return 1
    serving = _Serving(training, parent, pushing)
    with watch(serving.note):
        serving.serve()
    return 0


class _Serving:
    """One training that is served."""

    def __init__(self, training: Connection[Any, Any], parent: int, pushing: PushThread) -> None:
        self._training, self._parent, self._pushing = training, parent, pushing
        self._told: object = None
        self._told_sent: dict[str, Checkpoint] = {}
        self._waited: list[WaitReply] = []
        self._intervals: deque[Interval] = deque()
        self._closed = threading.Event()

    def serve(self) -> None:
        """Return when it has been closed, or the training has ended."""
        while True:
            has_looked = self._training.poll(_POLL_S) and self._obey(self._training.recv())
            if os.getppid() != self._parent:
                # A process that the training has forked may hold its end of the socket.
                return
            # In this order what is told is no older than the answers, and no newer than the end.
            is_over = self._closed.is_set()
            waited, self._waited = self._waited, []
            self._tell(has_looked=has_looked)
            for one in waited:
                self._training.send(one)
            if is_over:
                return

    def note(self, interval: Interval) -> None:
        """Keep what the training may want to know of: not of each frame, there may be many thousands."""
        if interval.name == "push":
            self._intervals.append(dataclasses.replace(interval, thread=os.getpid()))

    def _obey(self, message: object) -> bool:
        """Do what is asked, or begin it; return whether it was to look."""
        if isinstance(message, WaitRequest):
            begin(partial(self._wait, message.number), "push-wait")
        elif isinstance(message, CloseRequest):
            begin(partial(self._close, message.limit_s), "push-close")
        else:
            self._pushing.look()
        return isinstance(message, StatusRequest)

    def _wait(self, number: int) -> None:
        try:
            self._pushing.wait()
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            self._waited.append(WaitReply(number, _portable(error)))
        else:
            self._waited.append(WaitReply(number, None))

    def _close(self, limit_s: float | None) -> None:
        try:
            self._pushing.close_in(limit_s)
        finally:
            self._closed.set()

    def _tell(self, *, has_looked: bool) -> None:
        """Send what is new. First the numbers: what is counted as pushed is then among what is known to be there."""
        pushing, queue = self._pushing, self._pushing.queue
        facts = pushing.statistics(), pushing.sending, pushing.is_connected, pushing.is_well
        with queue.lock:
            state = *facts, queue.generation, dict(queue.damaged)
            told = state, len(queue.sent)
            if told == self._told and not has_looked and not self._intervals:
                return
            sent = dict(queue.sent)
        before, self._told, self._told_sent = self._told_sent, told, sent
        new = {save_id: one for save_id, one in sent.items() if save_id not in before}
        intervals = [self._intervals.popleft() for _ in range(len(self._intervals))]
        self._training.send(StatusReply(*state, new, before.keys() - sent.keys(), has_looked, intervals))


def _portable(error: Exception) -> Exception:
    """Return an error that arrives as it is: not every class can be made again from its words."""
    try:
        found: Exception = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        return GivenUpError(f"{type(error).__name__}: {error}")
    return found


_living: weakref.WeakSet[PushProcess] = weakref.WeakSet()


def _leave_in_child() -> None:
    _forking.release()
    for one in tuple(_living):
        one.leave()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_leave_in_child)
