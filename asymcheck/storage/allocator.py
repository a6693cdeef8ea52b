"""Which bytes of a ring are free: first fit, and neighbours that become free are joined."""

from __future__ import annotations

import bisect


class Allocator:
    """Free byte ranges of one file. Not thread-safe."""

    def __init__(self, start: int, length: int) -> None:
        """All ``length`` bytes from ``start`` on are free."""
        self._starts = [start]
        self._lengths = [length]
        self.free_bytes = length
        """Bytes that are free, in one piece or in many."""

    def take(self, length: int) -> int | None:
        """Return where ``length`` bytes were free and are taken now; None when no piece is long enough."""
        for index, there in enumerate(self._lengths):
            if there >= length:
                start = self._starts[index]
                if there == length:
                    del self._starts[index], self._lengths[index]
                else:
                    self._starts[index] += length
                    self._lengths[index] -= length
                self.free_bytes -= length
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        """Make bytes free that were taken."""
        self.free_bytes += length
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and start + length == self._starts[index]:
            length += self._lengths.pop(index)
            del self._starts[index]
        if index and self._starts[index - 1] + self._lengths[index - 1] == start:
            self._lengths[index - 1] += length
        else:
            self._starts.insert(index, start)
            self._lengths.insert(index, length)
