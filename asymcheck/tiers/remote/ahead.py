"""Work done ahead: what is needed next is made while what was made before is on its way."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar

from asymcheck.errors import ClosedStoreError
from asymcheck.threads import begin, carry_out

_P = ParamSpec("_P")
_T = TypeVar("_T")


def ahead(items: Iterator[_T], name: str) -> Generator[_T, None, None]:
    """Yield what ``items`` yields, made on a thread of its own, one ahead. Close it: then that thread has ended.

    Raises:
        AsymcheckError: what ``items`` raised, in its place.
    """
    made: queue.SimpleQueue[tuple[_T] | BaseException | None] = queue.SimpleQueue()
    room, stopped = threading.Semaphore(1), threading.Event()

    def work() -> None:
        try:
            while room.acquire() and not stopped.is_set():
                item = next(items, stopped)
                if item is stopped:
                    break
                made.put((item,))  # type: ignore[arg-type]  # the sentinel has been dealt with
            made.put(None)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits for it
            made.put(error)

    worker = begin(work, name)
    try:
        while (found := made.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            room.release()
            yield found[0]
    finally:
        stopped.set()
        room.release()
        worker.result()


class Readers(Executor):
    """Threads that end when nothing is left to do, or with the process.

    Those of concurrent.futures are joined before it ends, however long a location takes to answer.
    """

    def __init__(self, count: int, name: str) -> None:
        """Do so many things at the same time."""
        self._name = name
        self._free = count
        # What does it, and what cancels it.
        self._waiting: deque[tuple[Callable[[], None], Callable[[], bool]]] = deque()
        self._lock = threading.Lock()
        self._is_shut = False

    def submit(self, call: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Begin ``call`` when it is its turn.

        Raises:
            ClosedStoreError: after the end.
        """
        future: Future[_T] = Future()

        with self._lock:
            if self._is_shut:
                raise ClosedStoreError("the location was closed while something was read from it")
            self._waiting.append((partial(carry_out, future, partial(call, *args, **kwargs)), future.cancel))
            if self._free:
                begin(self._work, self._name)
                self._free -= 1
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                task, _ = self._waiting.popleft()
            task()

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as Executor has it; nobody waits
        """Begin nothing more; what has begun ends as it may."""
        with self._lock:
            self._is_shut = True
            left = list(self._waiting) if cancel_futures else []
        for _, cancel in left:
            cancel()
