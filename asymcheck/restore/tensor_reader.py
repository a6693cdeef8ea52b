"""Read stored tensors sequentially in bounded memory, and verify every partition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from asymcheck.format.manifest import TensorRow
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.types import Digest

_KEPT = 3
"""Number of partitions in the cache: one for each of two tensors that are compared, and one of the next tensors."""


def partition_reader(sources: PartitionLocator) -> Callable[[Digest], memoryview]:
    """Return a function that returns the verified bytes of a partition, as :func:`read_any` does.

    It has a small cache, because consecutive tensors often share a partition.
    """
    return functools.lru_cache(_KEPT)(partial(read_any, sources))


class TensorStream:
    """Sequential reader of one tensor."""

    def __init__(self, row: TensorRow, read: Callable[[Digest], memoryview]) -> None:
        """Read the tensor of a manifest's row; ``read`` returns the bytes of a partition."""
        self._row = row
        self._read = read
        self._extent = 0
        self._used = 0

    def read_into(self, block: npt.NDArray[np.uint8]) -> None:
        """Fill a block with the next bytes. The block must not be longer than the rest of the tensor.

        Raises:
            DamagedPartitionError: no copy of a partition is intact.
        """
        if self._row.inline is not None:
            block[:] = np.frombuffer(self._row.inline, dtype=np.uint8)[self._used : self._used + len(block)]
            self._used += len(block)
            return
        filled = 0
        while filled < len(block):
            extent = self._row.extents[self._extent]
            count = min(extent.length - self._used, len(block) - filled)
            start = extent.offset + self._used
            data = self._read(extent.digest)[start : start + count]
            block[filled : filled + count] = np.frombuffer(data, dtype=np.uint8)
            filled += count
            self._used += count
            if self._used == extent.length:
                self._extent, self._used = self._extent + 1, 0
