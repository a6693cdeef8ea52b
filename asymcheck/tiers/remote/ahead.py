"""Work done ahead: what is needed next is made while what was made before is on its way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

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

    worker = threading.Thread(target=work, name=f"asymcheck-{name}", daemon=True)
    worker.start()
    try:
        while (found := made.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            room.release()
            yield found[0]
    finally:
        stopped.set()
        room.release()
        worker.join()


def beside(call: Callable[[], _T], name: str) -> Callable[[], _T]:
    """Begin ``call`` on a thread of its own; what is returned waits for its end, and returns or raises what it did."""
    made: queue.SimpleQueue[tuple[_T] | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            made.put((call(),))
        except BaseException as error:  # noqa: BLE001 - as above
            made.put(error)

    threading.Thread(target=work, name=f"asymcheck-{name}", daemon=True).start()

    def result() -> _T:
        found = made.get()
        if isinstance(found, BaseException):
            raise found
        return found[0]

    return result
