"""Time stamps that do not go backwards, because save ids sort by time."""

from __future__ import annotations

import time


class _Clock:
    """Clock of this process, which continues if the clock of the machine is set back.

    It then runs at half speed until both agree. If it stood still, checkpoints would seem to follow each other at once,
    and rules such as ``Push.every_s`` would select none of them.
    """

    def __init__(self) -> None:
        self._latest_ns = 0
        self._ticks_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """Return the time in nanoseconds since 1970-01-01 UTC, later than all earlier results."""
        before_ns, self._ticks_ns = self._ticks_ns, time.monotonic_ns()
        self._latest_ns = max(time.time_ns(), self._latest_ns + max((self._ticks_ns - before_ns) // 2, 1))
        return self._latest_ns


now_ns = _Clock().now_ns
