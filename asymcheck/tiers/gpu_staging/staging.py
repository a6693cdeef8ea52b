"""The staging buffer: device memory, taken once, for what cannot stay where it is until it has been copied."""

from __future__ import annotations

import dataclasses
import threading

import torch

from asymcheck.tiers.room import Room

_ALIGNED_TO = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Bytes of a staging buffer."""

    memory: torch.Tensor
    """uint8, as long as was asked for."""
    start: int
    """Bytes from the start of the buffer."""
    taken: int
    """Bytes of the buffer that it keeps."""


class Staging:
    """A buffer on one device. Thread-safe."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Allocate ``size`` bytes now, and never more; none at all if the device has not got them."""
        try:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._room = Room(0, self._buffer.numel())
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes that are free."""
        with self._lock:
            return self._room.free_bytes

    def take(self, length: int) -> Region | None:
        """Return ``length`` bytes of the buffer; None when it has no such piece free."""
        taken = max(1, -(-length // _ALIGNED_TO)) * _ALIGNED_TO
        with self._lock:
            start = self._room.take(taken)
        return None if start is None else Region(self._buffer[start : start + length], start, taken)

    def give_back(self, region: Region) -> None:
        """Free a region, once. What was queued for the device may still write to it only if nothing reads it."""
        with self._lock:
            self._room.give_back(region.start, region.taken)
