"""Pushing in a process of its own: the interpreter of the training, and its memory, are left alone.

Measured beside a loop of small operators, which needs the interpreter all the time: while 132 MB went to HDFS, on two
cores, an iteration took 1.37 times as long with a thread in the same process, and 1.12 times with a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from asymcheck.errors import AsymcheckError, ClosedStoreError, GivenUpError
from asymcheck.migration.ledger import Ledger
from asymcheck.migration.messages import Close, Failed, Look, News, Order, Wait, Waited
from asymcheck.migration.pushing import Pushing
from asymcheck.migration.pushing_thread import GIVE_UP_S, RETRY_S
from asymcheck.migration.statistics import PushStatistics
from asymcheck.policies.pushing import check_seconds, held
from asymcheck.tiers.reading import ReadTier

_START_S = 30.0
"""It has so long to begin, when it is to end in a given time: it may be starved by the training until then."""

_WAIT_S = 0.5

_CHILD = (
    # Interrupts are for the training, which says what is to be done. It takes what the training leaves, as threads of
    # it would, also to begin: to import all takes more than a second.
    "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "os.setpriority(os.PRIO_PROCESS, 0, 19); from asymcheck.migration.pushing_child import main; "
    "main({descriptor}, {parent})"
)


class PushingProcess(Pushing):
    """Pushes in a process of its own, which is begun again when it was killed, and ends with this one."""

    def __init__(self, here: ReadTier, order: Order) -> None:
        """Push from ``here`` as ``order`` says."""
        super().__init__(order.run, order.rules)
        self._order = order
        self._ledger = Ledger(here, order.run, order.rules)
        self._turn = threading.Condition()
        self._child: Connection[Any, Any] | None = None
        # Of the process that pushes now, and of those before it.
        self._now, self._before = PushStatistics(), PushStatistics()
        self._backlog = 0
        self._sending: str | None = None
        # Looks: one is not answered yet, and another one is due then.
        self._is_looking = self._looks_again = False
        self._waits: dict[int, Exception | None] = {}
        self._count = 0
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._closing_in: Close | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._work, name="asymcheck-pushing", daemon=True)
        _living.add(self)
        self._thread.start()

    def statistics(self) -> PushStatistics:
        """Return what it has done so far; see :meth:`Pushing.statistics`."""
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
        """Count what waits, and send it soon; see :meth:`Pushing.look`."""
        self._count_backlog()
        with self._turn:
            if self._is_looking:
                # No more than one lies in the socket: who writes into a full one waits.
                self._looks_again = True
            elif self._send(Look()):
                self._is_looking = True

    def held(self) -> Mapping[str, str]:
        """Return what the retention of the store leaves alone; see :meth:`Pushing.held`."""
        due = self._ledger.look().due
        with self._turn:
            return held(self.rules, due, self._sending)

    def wait(self) -> None:
        """Wait until all that is to be pushed now lies there; see :meth:`Pushing.wait`."""
        with self._turn:
            self._count += 1
            number = self._count
            # One that begins is asked when it is there.
            self._until(lambda: self._child is not None or self._is_over())
            child = self._child
            self._send(Wait(number))
            self._until(lambda: number in self._waits or child is None or self._child is not child)
            if number not in self._waits:
                raise self._failure or ClosedStoreError(
                    f"run {self._run!r}: pushing to {self.rules.location} has ended"
                )
            error = self._waits.pop(number)
        if error is not None:
            raise error

    def _until(self, so: Callable[[], bool]) -> None:
        """Wait until something is so. The caller has ``_turn``."""
        while not so():
            self._turn.wait(_WAIT_S)

    def _is_over(self) -> bool:
        return self._failure is not None or not self._thread.is_alive()

    def close(self, timeout_s: float | None = None) -> PushStatistics:
        """Push what is left, once, and end; see :meth:`Pushing.close`."""
        limit_s = self.rules.close_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        with self._turn:
            first = not self._closing.is_set()
            self._closing_in = self._closing_in or Close(limit_s)
            self._closing.set()
            if first:
                self._send(self._closing_in)
            process = self._process
        self._thread.join(None if limit_s is None else limit_s + GIVE_UP_S + _START_S)
        if self._thread.is_alive() and process is not None:
            process.kill()
            self._thread.join(GIVE_UP_S)
        if first:
            self._count_backlog()
            self._warn_of_left()
        return self.statistics()

    def _count_backlog(self) -> None:
        with contextlib.suppress(AsymcheckError):
            backlog = len(self._ledger.look().due)
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
        while not self._closing.is_set():
            failure: Exception | None
            try:
                failure = self._serve()
            except OSError as error:
                failure = GivenUpError(f"no process could be begun that pushes to {self.rules.location}: {error}")
            except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on, and the statistics say it
                failure = error
            with self._turn:
                self._child = self._process = self._sending = None
                self._is_looking = self._looks_again = False
                if failure is not None:
                    self._failure = failure
                    self._before = dataclasses.replace(self.statistics(), failures=self.statistics().failures + 1)
                    self._now = PushStatistics(newest_step=self._now.newest_step)
                self._turn.notify_all()
            if failure is not None:
                self._closing.wait(RETRY_S)

    def _serve(self) -> Exception | None:
        """Begin a process and listen to it until it has ended; return why, unless it was to end."""
        with self._begun() as (process, child):
            with self._turn:
                child.send(self._order)
                self._process, self._child = process, child
                if self._closing_in is not None:
                    child.send(self._closing_in)
                self._turn.notify_all()
            failure: Exception | None = None
            with contextlib.suppress(EOFError, OSError):
                while True:
                    message = child.recv()
                    if isinstance(message, Failed):
                        failure = message.error
                    else:
                        self._take(message)
            status = process.wait()
        if status == 0 and self._closing.is_set():
            return None
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return failure or GivenUpError(
            f"the process that pushes to {self.rules.location} {how}; another one begins in {RETRY_S:.0f} s"
        )

    @contextlib.contextmanager
    def _begun(self) -> Iterator[tuple[subprocess.Popen[bytes], Connection[Any, Any]]]:
        ours, theirs = socket.socketpair()
        child: Connection[Any, Any] = Connection(ours.detach())
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                words = {"descriptor": theirs.fileno(), "parent": os.getpid()}
                process = subprocess.Popen(
                    [sys.executable, "-c", _CHILD.format(**words)],
                    # Where this program was found, and what it has imported.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            yield process, child
        finally:
            with self._turn:
                child.close()
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def _take(self, message: News | Waited) -> None:
        if isinstance(message, Waited):
            with self._turn:
                self._waits[message.number] = message.error
                self._turn.notify_all()
            return
        with self._ledger.lock:
            self._ledger.sent.update(message.sent)
            for save_id in message.not_sent:
                self._ledger.sent.pop(save_id, None)
            self._ledger.generation = message.generation
            self._ledger.hopeless = message.hopeless
        self._count_backlog()
        with self._turn:
            self._now, self._sending, self._failure = message.statistics, message.sending, None
            if message.has_looked:
                self._is_looking = False
                if self._looks_again:
                    self._looks_again = False
                    self._is_looking = self._send(Look())

    def leave(self) -> None:
        """Let go of the process, in a forked child: it ends with this one's parent."""
        if self._child is not None:
            self._child.close()
            self._child = None


_living: weakref.WeakSet[PushingProcess] = weakref.WeakSet()


def _leave_in_child() -> None:
    for one in tuple(_living):
        one.leave()


os.register_at_fork(after_in_child=_leave_in_child)
