"""Measured throughput of a drive or a remote location, and rate limiting."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_HALF_BYTES = 1 << 28
"""Number of bytes after which older measurements have half their weight."""
_ENOUGH_BYTES = 16 << 20
"""Minimum number of bytes for a measurement."""
_CLOSE_S = 0.4
"""Initial estimate of the time in which HDFS completes a file."""
_CLOSE_WEIGHT = 0.2


class ThroughputMeter:
    """Moving average of a throughput. Thread-safe."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0)
        self._lock = threading.Lock()

    def note(self, count: int, seconds: float) -> None:
        """Record the seconds that ``count`` bytes took in one of the concurrent streams."""
        kept = 0.5 ** (count / _HALF_BYTES)
        with self._lock:
            nbytes, spent = self._sums
            self._sums = (nbytes * kept + count, spent * kept + seconds)

    @contextlib.contextmanager
    def measure(self, count: int) -> Iterator[None]:
        """Record the seconds of a block that transfers ``count`` bytes, unless the block raises."""
        began = time.perf_counter()
        yield
        self.note(count, time.perf_counter() - began)

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second of one stream; None before enough bytes were measured."""
        nbytes, seconds = self._sums
        return nbytes / seconds if nbytes >= _ENOUGH_BYTES and seconds > 0 else None


class Throughput:
    """Measurements of one remote location. Thread-safe."""

    def __init__(self) -> None:
        self.writing = ThroughputMeter()
        """Throughput of writes to the location."""
        self.making = ThroughputMeter()
        """Throughput of reading, checking and encoding the bytes to send."""
        self._lock = threading.Lock()
        self.close_s = _CLOSE_S
        """Average seconds to complete a file."""

    def closed(self, seconds: float) -> None:
        """Record the seconds from the last write to the completion of a file."""
        with self._lock:
            self.close_s += (seconds - self.close_s) * _CLOSE_WEIGHT


class RateLimit:
    """Limit on bytes per second. Thread-safe."""

    def __init__(self, bytes_per_s: int | None) -> None:
        """Limit to ``bytes_per_s``; None for no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        """Wait until ``count`` bytes may be sent."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._bytes_per_s
            pause = self._free_at - now
        time.sleep(pause)
