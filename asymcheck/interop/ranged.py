"""A file as Python's libraries want one, made of reads by position."""

from __future__ import annotations

import io
from collections.abc import Callable


class RangedFile(io.BufferedIOBase):
    """So many bytes to read, which are fetched where they are asked for; never any past the end."""

    def __init__(self, size: int, read_at: Callable[[int, int], bytes]) -> None:
        """Fetch bytes by ``read_at(offset, count)``, which is asked for at least one, all of them inside ``size``."""
        self._size = size
        self._read_at = read_at
        self._at = 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """The place can be chosen."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Choose where the next read begins, also past the end; return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return the next ``size`` bytes, or all that are left."""
        left = max(0, self._size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = self._read_at(self._at, count) if count else b""
        self._at += len(data)
        return data
