"""Deadlines and retries for operations of remote clients, which cannot be cancelled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sized
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from asymcheck.config import RemoteConfig
from asymcheck.errors import RemoteUnreachableError
from asymcheck.executor import begin

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_QUIET_S = 5.0
"""Time after which a missing answer is reported."""
_LOOK_S = 1.0
"""Interval of looks for progress."""
_OVERDUE_MAX = 32
_PROBE_AFTER_S = 600.0


class OverdueCalls:
    """Calls to one location that had no answer in time. Each occupies a thread until its answer. Thread-safe.

    A mounted file system without its server may not answer for days. A training would then collect thousands of
    threads, up to the limit of its container.
    """

    def __init__(self) -> None:
        self._calls: list[Future[Any]] = []
        self._next_s = 0.0
        self._lock = threading.Lock()

    def check(self, action: str) -> None:
        """Refuse another call while too many have no answer, except once in a while.

        Raises:
            RemoteUnreachableError: the call must not begin now.
        """
        with self._lock:
            self._calls = [call for call in self._calls if not call.done()]
            if len(self._calls) < _OVERDUE_MAX:
                return
            now = time.monotonic()
            if now < self._next_s:
                raise RemoteUnreachableError(f"{action}: {len(self._calls)} earlier operations still have no answer")
            self._next_s = now + _PROBE_AFTER_S

    def add(self, call: Future[Any]) -> None:
        """Add a call that had no answer in time."""
        with self._lock:
            self._calls.append(call)
            if len(self._calls) == _OVERDUE_MAX:
                self._next_s = time.monotonic() + _PROBE_AFTER_S

    def forget(self) -> None:
        """Allow all calls again, because the location has answered."""
        with self._lock:
            self._calls = []


def within(
    seconds: float, action: str, call: Callable[[], _T], overdue: OverdueCalls | None = None, progress: Sized = ()
) -> _T:
    """Run ``call`` on a separate thread and return its result, or raise its exception.

    After a timeout, the thread ends with the process. Its late writes are harmless, because they go to temporary
    names. It renames only complete files. ``overdue`` limits the number of such threads. The time begins again when
    ``call`` has extended ``progress``.

    Raises:
        RemoteUnreachableError: the call made no progress for ``seconds``, or ``overdue`` refuses it.
    """
    overdue = overdue or OverdueCalls()
    overdue.check(action)
    done = begin(call, "remote")
    try:
        if not wait([done], min(seconds, _QUIET_S)).done and seconds > _QUIET_S and not progress:
            _logger.warning("%s: no answer for %g s; waiting up to %.3g s", action, _QUIET_S, seconds)
        ends, reached = time.monotonic() + max(0, seconds - _QUIET_S), 0
        while not wait([done], min(_LOOK_S, max(0, ends - time.monotonic()))).done:
            if len(progress) > reached:
                ends, reached = time.monotonic() + seconds, len(progress)
            elif time.monotonic() >= ends:
                overdue.add(done)
                raise RemoteUnreachableError(f"{action}: no answer in {round(seconds, 3):g} s")
        overdue.forget()
        return done.result()
    finally:
        # Break the reference cycle between this frame and the error, which would keep the objects of the call alive.
        del done


def tried(config: RemoteConfig, call: Callable[[float], _T]) -> _T:
    """Call ``call`` with a timeout in seconds, and retry transient failures until the deadline.

    Each attempt but the last gets half of the remaining time, so that a hanging connection leaves time for others.

    Raises:
        RemoteUnreachableError: the last attempt failed.
    """
    ends, remaining_s, number = time.monotonic() + config.deadline_s, config.deadline_s, 1
    while True:
        try:
            return call(remaining_s if number == config.attempts else remaining_s / 2)
        except RemoteUnreachableError as error:
            pause_s = config.retry_s * 2 ** (number - 1)
            remaining_s = ends - time.monotonic() - pause_s
            if number >= config.attempts or remaining_s <= 0:
                if number == 1:
                    raise
                raise RemoteUnreachableError(f"{error}; gave up after {number} attempts") from error
            _logger.warning("%s; trying again", error)
        time.sleep(pause_s)
        number += 1
