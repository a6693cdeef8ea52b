"""Run the threads of a process one at a time, so that a schedule can be repeated.

The running thread goes on until it stops at the gate, or waits for a lock. Python's conditions, events and futures wait
for locks, too. If no thread can go on, the scheduler chooses one of those at the gate.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from asymcheck.storage.local_files import DESCRIPTORS
from asymcheck.storage.nvme import catalog

_allocate, _start, _join = threading.Lock, threading._start_new_thread, threading.Thread.join  # type: ignore[attr-defined]  # patched below


def _never() -> bool:
    return False


def _always() -> bool:
    return True


class _Thread:
    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = _allocate()
        self.turn.acquire()
        self.may_go: Callable[[], bool] = _always
        self.operation: object = None
        """Operation before which the thread is stopped; None for a thread that needs no answer of the scheduler."""
        self.wakes_s = 0.0
        self.has_ended = False


class Threads:
    """The threads of this process. The calling thread, with the name "", is the first."""

    def __init__(
        self, ask: Callable[[Mapping[str, tuple[object, float]]], str], clock: Callable[[], float], wait: object
    ) -> None:
        """Replace locks and the start of threads.

        Args:
            ask: returns the thread that goes on, from the operations of the stopped threads and the times at which they
                wake [s]. Without such threads, all wait for each other.
            clock: returns the time [s].
            wait: operation of a thread that waits for a lock with a timeout.
        """
        self._ask, self._clock, self._wait_operation = ask, clock, wait
        self._running = _Thread("")
        self._all = [self._running]
        self._records: dict[threading.Thread, _Thread] = {}
        changes = {"Lock": self._lock, "_allocate_lock": self._lock, "_CRLock": None, "_time": clock}
        vars(threading).update(changes, _start_new_thread=self._start)
        threading.Thread.join = self._joining()  # type: ignore[method-assign]  # in this process
        # Locks that were made at the import, and that are held during file operations.
        DESCRIPTORS._forking, catalog._open_lock = threading.RLock(), threading.Lock()

    def stop(self, operation: object, wakes_s: float = 0.0) -> None:
        """Wait until the scheduler lets this thread go on."""
        self._wait(_never, operation, wakes_s)

    def wait_for(self, may_go: Callable[[], bool], timeout_s: float) -> bool:
        """Let other threads run until a condition holds; return whether it does. A negative timeout is none."""
        if not may_go() and timeout_s >= 0:
            self._wait(may_go, self._wait_operation, self._clock() + timeout_s)
        elif not may_go():
            self._wait(may_go, None, math.inf)
        return may_go()

    def _wait(self, may_go: Callable[[], bool], operation: object, wakes_s: float) -> None:
        me = self._running
        me.may_go, me.operation, me.wakes_s = may_go, operation, wakes_s
        if self._pass_on() is not me:
            me.turn.acquire()

    def _pass_on(self) -> _Thread:
        before, chosen = self._running, self._chosen()
        chosen.may_go, chosen.operation = _always, None
        self._running = chosen
        if chosen is not before:
            chosen.turn.release()
        return chosen

    def _chosen(self) -> _Thread:
        for thread in self._all:
            if thread.may_go():
                return thread
        stopped = {thread.name: (thread.operation, thread.wakes_s) for thread in self._all if thread.operation}
        name = self._ask(stopped)
        return next(thread for thread in self._all if thread.name == name)

    def _start(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> int:
        owner: threading.Thread = function.__self__  # type: ignore[attr-defined]  # Thread._bootstrap
        name = owner.name.removeprefix("asymcheck-").split()[0]
        thread = self._records[owner] = _Thread(f"{name}.{len(self._records)}")
        self._all.append(thread)

        def run() -> None:
            thread.turn.acquire()
            function(*arguments)
            thread.has_ended = True
            self._all.remove(thread)
            self._pass_on()

        return int(_start(run, ()))

    def _joining(self) -> Callable[..., None]:
        def join(joined: threading.Thread, timeout: float | None = None) -> None:
            record = self._records[joined]
            self.wait_for(lambda: record.has_ended, -1.0 if timeout is None else timeout)
            if record.has_ended:
                _join(joined)

        return join

    def _lock(self) -> _Lock:
        return _Lock(self)


class _Lock:
    """Lock for which :class:`Threads` waits."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_held and not (blocking and self._threads.wait_for(self._is_free, timeout)):
            return False
        self._is_held = True
        return True

    __enter__ = acquire

    def _is_free(self) -> bool:
        return not self._is_held

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False

    def __exit__(self, *_error: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._is_held
