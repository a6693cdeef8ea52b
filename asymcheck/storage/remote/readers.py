"""Threads that read from a remote location ahead of the program."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asymcheck.errors import ClosedStoreError
from asymcheck.executor import begin, carry_out

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Readers:
    """At most ``count`` daemon threads, which end when the queue is empty.

    Python joins the threads of concurrent.futures at exit, which could block on a slow location.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()
        self._is_shut = False

    def submit(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queue ``call``."""
        future: Future[_T] = Future()
        with self._lock:
            if self._is_shut:
                raise ClosedStoreError("the remote location was closed during a read; open it again")
            self._waiting.append((future, partial(call, *args, **kwargs)))
            if self._free:
                begin(self._work, "read-ahead")
                self._free -= 1
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                future, call = self._waiting.popleft()
            carry_out(future, call)

    def close(self) -> None:
        """Start no more calls, without waiting for running calls."""
        with self._lock:
            self._is_shut = True
            cancelled = list(self._waiting)
        for future, _ in cancelled:
            future.cancel()


def result_of(reading: Future[_T] | None, read: Callable[[], _T]) -> _T:
    """Return the result of a read ahead. If the read has not begun, cancel it, and read on this thread.

    A read that waits in the queue may never begin: all threads may wait for such reads, or another thread cancels it.
    """
    return read() if reading is None or reading.cancel() else reading.result()
