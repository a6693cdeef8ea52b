"""First-fit allocator for byte ranges of a ring or a staging buffer. Adjacent free ranges are merged."""

from __future__ import annotations

import bisect


class Allocator:
    """Free byte ranges of one file. Not thread-safe."""

    def __init__(self, start: int, length: int) -> None:
        """Begin with one free range of ``length`` bytes at ``start``."""
        self._starts = [start]
        self._lengths = [length]
        self.free_bytes = length
        """Total free bytes, over all free ranges."""

    def take(self, length: int) -> int | None:
        """Allocate ``length`` bytes and return their offset; None if no free range is long enough."""
        for index, available in enumerate(self._lengths):
            if available >= length:
                start = self._starts[index]
                if available == length:
                    del self._starts[index], self._lengths[index]
                else:
                    self._starts[index] += length
                    self._lengths[index] -= length
                self.free_bytes -= length
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        """Free an allocated range."""
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
