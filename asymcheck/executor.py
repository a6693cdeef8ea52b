"""Supervised threads: an exception of a task is passed to its waiter, and never ends a worker.

All threads are daemons and end with the process. Executors of ``concurrent.futures`` are not used, because Python shuts
them down before it calls exit handlers, which flush checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from asymcheck.errors import StorageError

_P = ParamSpec("_P")
_T = TypeVar("_T")

NICE = 19
"""Priority of background threads: the lowest."""
_POLL_S = 0.005


def stand_back() -> None:
    """Lower the priority of the calling thread, in favour of the threads of the training.

    Measured on two cores that a GPT-2 keeps busy: writing 1.5 GB delayed the training by 2 s at equal priority, because
    each operator waits for its slowest thread, and by 0.7 s at low priority.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Thread(threading.Thread):
    """Daemon thread that can be joined again after an interrupt.

    Up to Python 3.12, a thread of the standard library counts as ended after an interrupted join().
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[object, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._is_done = threading.Event()

    def run(self) -> None:
        """Run the target."""
        try:
            super().run()
        finally:
            self._is_done.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the target."""
        if self._is_done.wait(timeout):
            super().join()


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StorageError: this process, user or container may have no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise StorageError(
            f"cannot start thread {thread.name}: {error}. Raise the limit of processes (ulimit -u), or that of the "
            "container (pids.max)"
        ) from error


def begin(call: Callable[[], _T], name: str) -> Future[_T]:
    """Run ``call`` on a new thread; return a future of its result."""
    done: Future[_T] = Future()
    start(threading.Thread(target=carry_out, args=(done, call), name=f"asymcheck-{name}", daemon=True))
    return done


def carry_out(done: Future[_T], call: Callable[[], _T]) -> None:
    """Run ``call``, unless ``done`` was cancelled, and set its result or exception."""
    if done.set_running_or_notify_cancel():
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised by the waiter
            done.set_exception(error)
            # Avoids a reference cycle between the error and this frame.
            del done
        else:
            done.set_result(result)


def together(work: Callable[[], object], count: int, name: str, stop: Callable[[], object]) -> None:
    """Run ``work`` on ``count`` threads, and wait until all have ended. If ``count`` is 1, run it on this thread.

    Use fewer threads if Python starts no more. It starts none while it exits, and ``work`` runs on this thread.
    The first failure, or an interrupt of this thread, calls ``stop``, after which ``work`` should return soon. After
    the end of this function, no thread runs, so the caller may close shared resources.

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
        # This precedes the check of failures: if a thread fails while none is busy, no other one will start.
        busy.append(None)
        try:
            if not failures:
                work()
        except BaseException as error:  # noqa: BLE001 - raised on the calling thread
            failures.append(error)
            stop()
        finally:
            busy.pop()

    started: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            for number in range(count):
                thread = threading.Thread(target=run, name=f"asymcheck-{name}-{number}", daemon=True)
                thread.start()
                started.append(thread)
        if not started:
            run()
        for thread in started:
            thread.join()
    except BaseException as error:
        failures.append(error)
        stop()
        # join() is not used: up to Python 3.12, a thread whose join() was interrupted counts as ended.
        while busy:
            # A second interrupt is ignored, because the first one is being raised.
            with contextlib.suppress(BaseException):
                time.sleep(_POLL_S)
        raise
    if failures:
        del failures[1:]
        raise failures.pop()


def share(items: Iterable[_T], work: Callable[[Iterator[_T]], object], count: int, name: str) -> None:
    """Run ``work`` on ``count`` threads, each with an iterator that takes items from the same queue.

    After the first failure, the iterators end. The rest is as in :func:`together`.
    """
    left = deque(items)

    def taken() -> Iterator[_T]:
        # Not asked before, because another thread may take the last item.
        with contextlib.suppress(IndexError):
            while True:
                yield left.popleft()

    together(lambda: work(taken()), count, name, left.clear)


class Workers:
    """Task queue with threads of low priority, and threads of normal priority for a backlog. Thread-safe.

    Raising the priority of a thread requires a privilege, so there are two kinds of threads. Low priority is best for
    occasional checkpoints. If checkpoints come faster than they are written, training has to wait for space in the end,
    and threads without a core only prolong the wait. Measured on two cores, with a checkpoint of 83 MB after each step
    of 55 to 70 ms: with low priority, steps took 131 to 140 ms (median), including waits of 50 to 65 ms. With normal
    priority, steps took 118 to 134 ms, including waits of 3 ms.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        """Start ``count`` threads of each kind. A single thread keeps the order of tasks.

        Threads start at once, because Python starts none during exit handlers.

        Raises:
            StorageError: a thread could not be started.
        """
        self._in_order = count == 1
        self._lock = threading.Lock()
        # By kind, so that only the active kind is woken.
        self._changed = {kind: threading.Condition(self._lock) for kind in (True, False)}
        self._tasks: deque[Callable[[], None]] = deque()
        self._busy = 0
        self._is_behind = False
        self._is_ending = False
        self._threads = [
            Thread(self._run, name if count == 1 else f"{name}-{number}", (kind,))
            for number, kind in enumerate([True] * count + [False] * count)
        ]
        try:
            for thread in self._threads:
                start(thread)
        except StorageError:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            raise

    def submit(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queue ``call``; return a future of its result."""
        done: Future[_T] = Future()
        with self._lock:
            self._tasks.append(lambda: carry_out(done, lambda: call(*args, **kwargs)))
            self._changed[not self._is_behind].notify()
        return done

    def hurry(self, *, is_behind: bool) -> None:
        """Switch to threads of normal priority while there is a backlog."""
        with self._lock:
            if is_behind != self._is_behind:
                self._is_behind = is_behind
                self._changed[not is_behind].notify_all()

    def close(self) -> None:
        """Finish all tasks, and end the threads."""
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
            # Otherwise, the references of the last task would stay until the next one.
            del task
            with self._lock:
                self._busy -= 1
                if self._is_ending:
                    self._wake_all()
                elif self._in_order:
                    # The other kind of threads may have been waiting for this task.
                    self._changed[not self._is_behind].notify()

    def _may_take(self, stands_back: bool) -> bool:  # noqa: FBT001 - as above
        is_turn = stands_back != self._is_behind
        return is_turn and bool(self._tasks) and not (self._in_order and self._busy)
