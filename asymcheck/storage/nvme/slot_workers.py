"""Worker threads with a slot each, which never outlive the call that started them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from asymcheck.executor import together
from asymcheck.storage.slots import Slot, SlotPool

_T = TypeVar("_T")


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
    todo: queue.SimpleQueue[_T] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    stopped = threading.Event()

    def run() -> None:
        with slots.slot(payload_bytes) as slot:
            while not stopped.is_set():
                try:
                    item = todo.get_nowait()
                except queue.Empty:
                    return
                work(item, slot)

    together(run, min(threads, len(items)), name, stopped.set)
