"""Measure the limit of the machine: O_DIRECT between aligned memory and one file, with several calls in flight."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

CHUNK = 8 << 20
IN_FLIGHT = 4


class Limit:
    """A state's bytes in aligned memory, written or read without a copy."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, huge: bool = True) -> None:
        """Copy the tensors one after another into huge pages, or into small pages, torch's default."""
        total = sum(tensor.nbytes for tensor in tensors)
        self.nbytes = -(-total // CHUNK) * CHUNK
        """Bytes written: the tensors and the padding of the last chunk."""
        memory = _map(self.nbytes, huge=huge)
        self._memory = memoryview(memory)
        buffer, position = torch.frombuffer(memory, dtype=torch.uint8), 0
        for tensor in tensors:
            buffer[position : position + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            position += tensor.nbytes

    def write(self, path: Path) -> float:
        """Write all bytes to ``path``, in place if it exists; return seconds until they are durable."""
        began = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        self._transfer(self._memory, lambda piece, offset: os.pwrite(descriptor, piece, offset))
        os.fdatasync(descriptor)
        os.close(descriptor)
        return time.perf_counter() - began

    def read(self, path: Path, *, new_memory: bool = False) -> float:
        """Read all bytes from ``path`` into the same memory, or into new huge pages; return the seconds."""
        began = time.perf_counter()
        memory = memoryview(_map(self.nbytes, huge=True)) if new_memory else self._memory
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._transfer(memory, lambda piece, offset: os.preadv(descriptor, [piece], offset))
        os.close(descriptor)
        return time.perf_counter() - began

    def _transfer(self, memory: memoryview, call: Callable[[memoryview, int], int]) -> None:
        def lane(number: int) -> None:
            for offset in range(number * CHUNK, self.nbytes, IN_FLIGHT * CHUNK):
                done = call(memory[offset : offset + CHUNK], offset)
                if done != CHUNK:
                    raise OSError(f"{done} of {CHUNK} bytes at offset {offset}")

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lane, range(IN_FLIGHT)))


def _map(nbytes: int, *, huge: bool) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return memory
