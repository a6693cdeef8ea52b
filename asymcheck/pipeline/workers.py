"""Workers: threads that stand back beside a training, and others that do not and take over while work piles up.

A thread that has given up its priority cannot have it back without a privilege, so there are two kinds of threads.
Standing back is best for a checkpoint now and then. When checkpoints come sooner than they are written, the training
has to wait for room in the end, and threads that get no core meanwhile only make that longer. Measured on two cores, a
checkpoint of 83 MB after each step of 55 to 70 ms: with threads that stand back, the steps took 131 to 140 ms, of which
the training waited for 50 to 65 (median); with others, 118 to 134 ms, of which it waited for 3.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from asymcheck.pipeline.manners import stand_back

_Item = TypeVar("_Item")


class Workers(Generic[_Item]):
    """Does work item by item. Thread-safe."""

    def __init__(self, work: Callable[[_Item], object], name: str, count: int) -> None:
        """Start ``count`` threads of either kind, of that name, numbered where there are several; one keeps the order.

        ``work`` must not raise.
        """
        self._work = work
        self._in_order = count == 1
        self._lock = threading.Lock()
        # By whether they stand back: only those who are to work are woken.
        self._changed = {kind: threading.Condition(self._lock) for kind in (True, False)}
        self._items: deque[_Item] = deque()
        self._busy = 0
        self._is_behind = False
        self._is_ending = False
        # No executor: Python ends those before it calls what is registered to be done at exit, and that flushes.
        self._threads = [
            threading.Thread(
                target=self._run, args=(kind,), name=name if count == 1 else f"{name}-{number}", daemon=True
            )
            for number, kind in enumerate([True] * count + [False] * count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, item: _Item) -> None:
        """Have an item done."""
        with self._lock:
            self._items.append(item)
            self._changed[not self._is_behind].notify()

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
                    if self._is_ending and not self._items:
                        return
                    self._changed[stands_back].wait()
                item = self._items.popleft()
                self._busy += 1
            self._work(item)
            with self._lock:
                self._busy -= 1
                if self._is_ending:
                    self._wake_all()
                elif self._in_order:
                    # The other kind may have been waiting for this one.
                    self._changed[not self._is_behind].notify()

    def _may_take(self, stands_back: bool) -> bool:  # noqa: FBT001 - as above
        is_turn = stands_back != self._is_behind
        return is_turn and bool(self._items) and not (self._in_order and self._busy)
