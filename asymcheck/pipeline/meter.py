"""A meter: how fast one thread writes to a tier, measured by use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_HALF_BYTES = 1 << 28
"""Older measurements count half after so many bytes."""
_ENOUGH_BYTES = 16 << 20
"""Fewer bytes say nothing."""


class Meter:
    """Counts bytes, and the seconds that threads took to write them, each by itself. Thread-safe.

    What a thread has to wait for, be it others that write or a core, is part of it: what is compared with it, such as
    the time to encode, is measured beside the same others.
    """

    def __init__(self) -> None:
        """Begin without a measurement."""
        self._lock = threading.Lock()
        self._bytes = 0.0
        self._seconds = 0.0

    @contextlib.contextmanager
    def write(self, size: int) -> Iterator[None]:
        """Measure what is done inside the ``with`` block: ``size`` bytes are written."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        with self._lock:
            kept = 0.5 ** (size / _HALF_BYTES)
            self._bytes = self._bytes * kept + size
            self._seconds = self._seconds * kept + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """The speed; None before enough was measured."""
        with self._lock:
            return self._bytes / self._seconds if self._bytes >= _ENOUGH_BYTES and self._seconds > 0 else None
