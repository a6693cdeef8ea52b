"""Throughput of a remote location: measured by use, and limited on request."""

from __future__ import annotations

import threading
import time

_HALF_BYTES = 1 << 28
"""Older measurements count half after so many bytes."""
_ENOUGH_BYTES = 16 << 20
"""Fewer bytes say nothing."""
_CLOSE_S = 0.4
"""Time for HDFS to complete a file, before it was measured."""
_CLOSE_WEIGHT = 0.2


class ThroughputMeter:
    """Bytes by seconds, the latest count most. Thread-safe."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0)
        self._lock = threading.Lock()

    def note(self, count: int, seconds: float) -> None:
        """Note how long so many bytes took in one stream, beside all others."""
        kept = 0.5 ** (count / _HALF_BYTES)
        with self._lock:
            nbytes, spent = self._sums
            self._sums = (nbytes * kept + count, spent * kept + seconds)

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second of one stream; None before enough was measured."""
        nbytes, seconds = self._sums
        return nbytes / seconds if nbytes >= _ENOUGH_BYTES and seconds > 0 else None


class Throughput:
    """Measurements of one location. Thread-safe."""

    def __init__(self) -> None:
        self.writing = ThroughputMeter()
        """How fast the location takes bytes."""
        self.making = ThroughputMeter()
        """How fast bytes to send are read, checked and encoded."""
        self._lock = threading.Lock()
        self.close_s = _CLOSE_S
        """Seconds to complete one more file."""

    def closed(self, seconds: float) -> None:
        """Note how long one file took until it was complete, after its last byte."""
        with self._lock:
            self.close_s += (seconds - self.close_s) * _CLOSE_WEIGHT


class RateLimit:
    """A limit on bytes a second, shared by threads."""

    def __init__(self, bytes_per_s: int | None) -> None:
        """Let through ``bytes_per_s``; None: all."""
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        """Return when ``count`` bytes may be sent."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._bytes_per_s
            pause = self._free_at - now
        time.sleep(pause)
