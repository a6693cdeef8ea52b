"""Absent: the ranks that did not come in time, and where each will show that it lives after all."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from asymcheck.ranks.keys import Keys


class Absent:
    """The ranks that one rank misses. It is shared by the threads of a session, each with keys of its own."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._signs: dict[int, list[str]] = {}

    def note(self, signs: Mapping[int, str]) -> None:
        """Note that ranks did not come in time, each with the key that it puts there when it comes too late."""
        with self._lock:
            for rank, key in signs.items():
                # The first, for who is late each time may put the newest there too late again; and the newest, for
                # nothing says that the first ever comes.
                self._signs[rank] = [*self._signs.get(rank, [])[:1], key]

    def clear(self) -> None:
        """Note that all have come."""
        with self._lock:
            self._signs.clear()

    def is_any(self) -> bool:
        """Tell whether some rank is missed, without looking for a sign of life."""
        with self._lock:
            return bool(self._signs)

    def is_any_still(self, keys: Keys) -> bool:
        """Tell whether some rank is missed that has shown no sign of life since; who has shown one is not missed."""
        with self._lock:
            signs = dict(self._signs)
        # What is noted meanwhile stays: the store is asked without the lock.
        come = [rank for rank, some in signs.items() if any(keys.has([key]) for key in some)]
        with self._lock:
            for rank in come:
                if self._signs.get(rank) == signs[rank]:
                    del self._signs[rank]
            return bool(self._signs)
