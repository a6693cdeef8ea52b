"""Read stored tensors sequentially in bounded memory, and verify every partition."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asymcheck.format.manifest import TensorRow
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.storage.nvme import Slot
from asymcheck.types import Digest

# One for each of two tensors that are compared, and as many that they may share with the next tensors.
_KEPT = 4


class PartitionCache:
    """Reader of partitions with a small cache, because consecutive tensors often share a partition."""

    def __init__(self, sources: PartitionLocator, digests: Sequence[Digest]) -> None:
        """Read only ``digests`` from ``sources``."""
        self._sources = sources
        self._slot_bytes = sources.payload_bytes(digests)[0]
        self._kept: OrderedDict[Digest, tuple[Slot, memoryview]] = OrderedDict()

    def read(self, digest: Digest) -> memoryview:
        """Return the verified bytes of a partition. They stay valid until two other partitions were read.

        Raises:
            DamagedPartitionError: no copy of the partition is intact.
        """
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest][1]
        slot = self._kept.popitem(last=False)[1][0] if len(self._kept) == _KEPT else Slot(self._slot_bytes)
        data = read_any(self._sources, digest, slot)
        self._kept[digest] = (slot, data)
        return data


class TensorStream:
    """Sequential reader of one tensor."""

    def __init__(self, row: TensorRow, cache: PartitionCache) -> None:
        """Read the tensor of a manifest's row."""
        self._row = row
        self._cache = cache
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
            data = self._cache.read(extent.digest)[start : start + count]
            block[filled : filled + count] = np.frombuffer(data, dtype=np.uint8)
            filled += count
            self._used += count
            if self._used == extent.length:
                self._extent, self._used = self._extent + 1, 0
