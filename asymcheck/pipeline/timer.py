"""Timer: calls back at given times, where no module says how far an iteration has come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from asymcheck.threads import begin


class Timer:
    """Calls ``reached`` with a number when its time has come, on a thread of its own that the first call starts."""

    def __init__(self, reached: Callable[[int], None]) -> None:
        """Call ``reached``, which must be short, and must not raise."""
        self._reached = reached
        self._changed = threading.Condition()
        self._ahead: deque[tuple[int, float]] = deque()
        self._stopping = False
        self._thread: Future[None] | None = None

    def begin(self, times: Sequence[tuple[int, float]]) -> None:
        """Forget what was asked for before; call at these times of ``time.perf_counter()``, given in order."""
        with self._changed:
            self._ahead = deque(times)
            self._changed.notify_all()
        if self._thread is None and times:
            self._thread = begin(self._run, "timer")

    def cancel(self) -> None:
        """Call no more; a call that is under way may still end after this."""
        with self._changed:
            self._ahead.clear()

    def due(self, now_s: float) -> tuple[int | None, float | None]:
        """Take what has come by a time: its greatest number, and how long it is until the next; None for neither."""
        number = None
        while self._ahead and self._ahead[0][1] <= now_s:
            number = self._ahead.popleft()[0]
        return number, self._ahead[0][1] - now_s if self._ahead else None

    def _run(self) -> None:
        while True:
            with self._changed:
                number, left_s = self.due(time.perf_counter())
                if number is None:
                    if self._stopping:
                        return
                    self._changed.wait(left_s)
                    continue
            # Outside the lock: who is called takes one of its own, under which it may cancel.
            self._reached(number)

    def stop(self) -> None:
        """End the thread, and raise what a call raised that ended the thread early. May be called again."""
        with self._changed:
            self._stopping = True
            self._ahead.clear()
            self._changed.notify_all()
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.result()
