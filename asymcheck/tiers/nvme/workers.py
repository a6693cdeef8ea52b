"""Worker threads with a slot each, which never outlive the call that started them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from asymcheck.tiers.slots import Slot, SlotPool

_T = TypeVar("_T")
_POLL_S = 0.005


def work_off(
    items: Sequence[_T],
    work: Callable[[_T, Slot], None],
    *,
    slots: SlotPool,
    payload_bytes: int,
    threads: int,
    name: str,
) -> None:
    """Call ``work`` for every item, on several threads; each has a slot with room for ``payload_bytes``.

    One thread is enough for one item; it is the calling one.

    The first failure stops them all. When this returns or raises, for an interrupt too, no thread works any more, so
    that the caller may close what they wrote to.
    """
    if min(threads, len(items)) > 1:
        _work_off_by_threads(items, work, lambda: slots.slot(payload_bytes), threads, name)
    elif items:
        with slots.slot(payload_bytes) as slot:
            for item in items:
                work(item, slot)


def _work_off_by_threads(
    items: Sequence[_T],
    work: Callable[[_T, Slot], None],
    lend: Callable[[], AbstractContextManager[Slot]],
    threads: int,
    name: str,
) -> None:
    todo: queue.SimpleQueue[_T] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    failures: list[BaseException] = []
    busy: list[None] = []

    def run() -> None:
        # Before the look at the failures: who adds one and then sees nobody busy knows that nothing will be begun.
        busy.append(None)
        try:
            with lend() as slot:
                while not failures:
                    try:
                        item = todo.get_nowait()
                    except queue.Empty:
                        return
                    work(item, slot)
        except BaseException as error:  # noqa: BLE001 - carried to the calling thread, which raises it
            failures.append(error)
        finally:
            busy.pop()

    workers = [threading.Thread(target=run, name=f"asymcheck-{name}-{i}") for i in range(min(threads, len(items)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException as error:
        failures.append(error)
        # Not by join(): in Python up to 3.12, one that was interrupted takes the thread for ended ever after.
        while busy:
            # A second interrupt changes nothing: the first one is being raised already.
            with contextlib.suppress(BaseException):
                time.sleep(_POLL_S)
        raise
    if failures:
        raise failures[0]
