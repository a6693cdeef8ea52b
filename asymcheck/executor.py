"""Threads: every task runs under supervision. An exception of a task is passed to the waiter, and ends no thread early.

All threads end with the process, whatever they wait for. No executor of ``concurrent.futures`` is used: Python ends
those before it calls what is registered for the exit, and that flushes checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

NICE = 19
"""The priority of threads that stand back: the last."""
_POLL_S = 0.005


def stand_back() -> None:
    """Give way to the threads of the training, from now on, on the calling thread.

    Where there are cores to spare it changes nothing. Measured on two cores that a GPT-2 keeps busy: to write 1.5 GB
    at equal priority cost the training 2 s, for each of its operators waits for the slower of its threads; so 0.7 s.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def begin(call: Callable[[], _T], name: str) -> Future[_T]:
    """Run ``call`` on a thread of its own; the result tells when the call has ended, and what it returned or raised."""
    done: Future[_T] = Future()
    threading.Thread(target=carry_out, args=(done, call), name=f"asymcheck-{name}", daemon=True).start()
    return done


def carry_out(done: Future[_T], call: Callable[[], _T]) -> None:
    """Call ``call``, unless ``done`` was cancelled, and put what it returns or raises into ``done``."""
    if done.set_running_or_notify_cancel():
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - carried to whoever waits
            done.set_exception(error)
            # The error knows this frame, which must not know the error.
            del done
        else:
            done.set_result(result)


def together(work: Callable[[], object], count: int, name: str, stop: Callable[[], object]) -> None:
    """Run ``work`` on ``count`` threads, and return when all of them have ended. For one, the calling thread does.

    The first failure, or an interrupt of this thread, calls ``stop``, after which ``work`` should soon return. When
    this returns or raises no thread works any more, so that the caller may close what they used.

    Raises:
        BaseException: the first failure, or the interrupt.
    """
    if count <= 1:
        for _ in range(count):
            work()
        return
    failures: list[BaseException] = []
    busy: list[None] = []

    def run() -> None:
        # Before the look at the failures: whoever adds one and then sees nobody busy knows that nothing will begin.
        busy.append(None)
        try:
            if not failures:
                work()
        except BaseException as error:  # noqa: BLE001 - raised on the calling thread
            failures.append(error)
            stop()
        finally:
            busy.pop()

    threads = [threading.Thread(target=run, name=f"asymcheck-{name}-{i}", daemon=True) for i in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:
        failures.append(error)
        stop()
        # Not by join(): in Python up to 3.12, a thread whose join() was interrupted counts as ended ever after.
        while busy:
            # A second interrupt changes nothing: the first one is being raised already.
            with contextlib.suppress(BaseException):
                time.sleep(_POLL_S)
        raise
    if failures:
        del failures[1:]
        raise failures.pop()


class Workers:
    """A queue of tasks for threads that stand back, and for others that take over while work piles up. Thread-safe.

    A thread that has given up its priority cannot have it back without a privilege, so there are two kinds of threads.
    Standing back is best for a checkpoint now and then. When checkpoints come sooner than they are written, the
    training has to wait for room in the end, and threads that get no core meanwhile only make that longer. Measured on
    two cores, a checkpoint of 83 MB after each step of 55 to 70 ms: with threads that stand back, the steps took 131 to
    140 ms, of which the training waited for 50 to 65 (median); with others, 118 to 134 ms, of which it waited for 3.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        """Start ``count`` threads of either kind, of that name, numbered where there are several; one keeps the order.

        They start now, because Python starts no thread when it calls what is registered for the exit.
        """
        self._in_order = count == 1
        self._lock = threading.Lock()
        # By whether they stand back: only those who are to work are woken.
        self._changed = {kind: threading.Condition(self._lock) for kind in (True, False)}
        self._tasks: deque[Callable[[], None]] = deque()
        self._busy = 0
        self._is_behind = False
        self._is_ending = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(kind,), name=name if count == 1 else f"{name}-{number}", daemon=True
            )
            for number, kind in enumerate([True] * count + [False] * count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have ``call`` made when its turn comes; the result tells what it returned or raised."""
        done: Future[_T] = Future()
        with self._lock:
            self._tasks.append(lambda: carry_out(done, lambda: call(*args, **kwargs)))
            self._changed[not self._is_behind].notify()
        return done

    def hurry(self, *, is_behind: bool) -> None:
        """Say whether work piles up: then threads take it on that do not stand back."""
        with self._lock:
            if is_behind != self._is_behind:
                self._is_behind = is_behind
                self._changed[not is_behind].notify_all()

    def close(self) -> None:
        """Return when all is done, and the threads have ended."""
        with self._lock:
            self._is_ending = True
            self._wake_all()
        for thread in self._threads:
            thread.join()

    def _wake_all(self) -> None:
        for changed in self._changed.values():
            changed.notify_all()

    def _run(self, stands_back: bool) -> None:  # noqa: FBT001 - a thread's argument
        if stands_back:
            stand_back()
        while True:
            with self._lock:
                while not self._may_take(stands_back):
                    if self._is_ending and not self._tasks:
                        return
                    self._changed[stands_back].wait()
                task = self._tasks.popleft()
                self._busy += 1
            task()
            # Else what the last task held stays until the next one comes.
            del task
            with self._lock:
                self._busy -= 1
                if self._is_ending:
                    self._wake_all()
                elif self._in_order:
                    # The other kind may have been waiting for this one.
                    self._changed[not self._is_behind].notify()

    def _may_take(self, stands_back: bool) -> bool:  # noqa: FBT001 - as above
        is_turn = stands_back != self._is_behind
        return is_turn and bool(self._tasks) and not (self._in_order and self._busy)
