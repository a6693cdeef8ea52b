"""Time stamps that do not go backwards, because save ids sort by time."""

from __future__ import annotations

import time


class _Clock:
    """Clock of this process, which continues if the clock of the machine is set back."""

    def __init__(self) -> None:
        self._latest_ns = 0

    def now_ns(self) -> int:
        """Return the time in nanoseconds since 1970-01-01 UTC, later than all earlier results."""
        self._latest_ns = max(time.time_ns(), self._latest_ns + 1)
        return self._latest_ns


now_ns = _Clock().now_ns
