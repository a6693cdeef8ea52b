"""The machine's own limit: the same bytes by O_DIRECT from aligned memory, synced at the end."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

CHUNK = 8 << 20
IN_FLIGHT = 4


class Limit:
    """A state's bytes in aligned memory, ready to be written without a copy."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors, one after the other, into huge pages, which make direct writes faster."""
        total = sum(tensor.nbytes for tensor in tensors)
        self.nbytes = -(-total // CHUNK) * CHUNK
        """Bytes written: the tensors, and the rest of the last chunk."""
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(memory)
        there, position = torch.frombuffer(memory, dtype=torch.uint8), 0
        for tensor in tensors:
            there[position : position + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            position += tensor.nbytes

    def write(self, path: Path) -> float:
        """Write everything to ``path``, in place when it exists; return seconds until it is durable."""
        began = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

        def lane(number: int) -> None:
            for offset in range(number * CHUNK, self.nbytes, IN_FLIGHT * CHUNK):
                os.pwrite(descriptor, self._memory[offset : offset + CHUNK], offset)

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lane, range(IN_FLIGHT)))
        os.fdatasync(descriptor)
        os.close(descriptor)
        return time.perf_counter() - began
