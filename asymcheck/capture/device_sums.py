"""Checksums of device memory, computed on the device, so that neither the program nor the device waits for the host.

A checksum treats the bytes as a matrix of 64-bit words. It has two sums of all words, modulo 2^64: one weighted by the
row, the other by the column. The words are mixed first, so that high bits count as much as low ones. Weights are odd,
so each change of one word changes both sums. Other changes are missed by chance only. The host computes the same
checksum of captured bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from asymcheck.capture.device_copy import Device, EagerCopies, gathered
from asymcheck.state.leaves import Leaf
from asymcheck.state.partition_plan import Piece
from asymcheck.storage.gpu_staging import Mark

_WORD = 8
_WIDTH = 1024
"""Words in a row."""
_BLOCK = 32
"""Rows that the host mixes and adds at once."""
_SUMS = 4
"""Sums of a checksum: by row, by column, of the words after the last whole row, of the bytes after the last word."""

_FACTOR = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
"""Odd factor with irregular bits, as a signed word."""
_LOW = (1 << 32) - 1

Checksum = tuple[int, ...]
_Words = TypeVar("_Words", npt.NDArray[np.int64], torch.Tensor)


def checksum(data: memoryview) -> Checksum:
    """Return the checksum of bytes in host memory. Releases the GIL for long ones."""
    whole = len(data) // _WORD * _WORD
    words, rest = np.frombuffer(data[:whole], dtype=np.int64), np.frombuffer(data[whole:], dtype=np.uint8)
    rows, rest = _rows(words), rest.astype(np.int64)
    by_row, by_column = np.empty(len(rows), dtype=np.int64), np.zeros(_WIDTH, dtype=np.int64)
    for start in range(0, len(rows), _BLOCK):
        # Small enough for the processor's cache.
        block = _mixed(rows[start : start + _BLOCK])
        by_row[start : start + _BLOCK] = block.sum(1)
        by_column += block.sum(0)
    parts = (by_row, by_column, _mixed(words[rows.size :]), rest)
    return tuple(int((part * np.arange(1, 2 * len(part) + 1, 2)).sum()) for part in parts)


def _device_checksum(data: torch.Tensor) -> torch.Tensor:
    """Return the same checksum of uint8 data on a device, as a tensor of int64."""
    whole = len(data) // _WORD * _WORD
    is_aligned = data.storage_offset() % _WORD == 0
    words = _mixed((data[:whole] if is_aligned else data[:whole].clone()).view(torch.int64))
    rows = _rows(words)
    parts = (rows.sum(1), rows.sum(0), words[rows.numel() :], data[whole:].to(torch.int64))
    return torch.stack([_weighted_sum(part) for part in parts])


def _weighted_sum(part: torch.Tensor) -> torch.Tensor:
    if not len(part):
        # One operation instead of three, because the training waits until all are queued.
        return part.new_zeros(())
    return (part * torch.arange(1, 2 * len(part) + 1, 2, device=part.device)).sum()


def _mixed(words: _Words) -> _Words:
    """Return a one-to-one function of each word. The mask makes the shift of a signed word a logical one."""
    words = (words ^ ((words >> 32) & _LOW)) * _FACTOR
    return words ^ ((words >> 32) & _LOW)


def _rows(words: _Words) -> _Words:
    return words[: len(words) // _WIDTH * _WIDTH].reshape(-1, _WIDTH)


class DeviceSums:
    """Checksums of partitions on one device, at the start of a capture and at its fence."""

    def __init__(self, device: Device, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """Prepare; ``pieces`` are those of each partition, by number."""
        self._device, self._pieces = device, pieces
        self.at_start: dict[int, Checksum] = {}
        """Checksums at the start, by number, once ``asides`` of :meth:`take` are settled."""
        self._taken: list[torch.Tensor] = []
        self._fenced: Mark | None = None

    def take(self, leaves: Mapping[int, Leaf], asides: EagerCopies) -> None:
        """Queue the checksums of the current bytes, and request them from ``asides``."""
        self._queue(leaves)
        length = len(self._pieces) * _SUMS * _WORD
        asides.want_computed(self._device, length, lambda: self._taken[0].view(-1).view(torch.uint8), self._started)

    def _started(self, data: bytes) -> None:
        sums = np.frombuffer(data, dtype=np.int64).reshape(-1, _SUMS).tolist()
        self.at_start = dict(zip(self._pieces, map(tuple, sums), strict=True))

    def fence(self, leaves: Mapping[int, Leaf]) -> None:
        """Queue the checksums again, before the training changes the bytes."""
        if not self._device.link.is_recorded():
            self._queue(leaves)
            self._fenced = self._device.link.mark()

    def _queue(self, leaves: Mapping[int, Leaf]) -> None:
        def work() -> None:
            sums = [_device_checksum(gathered(leaves, pieces)) for pieces in self._pieces.values()]
            self._taken.append(torch.stack(sums))

        self._device.link.run(work)

    def changed(self) -> Iterable[int]:
        """Return the partitions that changed between start and fence. Waits until the device has reached the fence."""
        if self._fenced is None:
            return []
        found: list[bool] = []

        def work() -> None:
            start, fence = self._taken
            found.extend((start != fence).any(1).tolist())

        # On the copy queue, because the queue of the training has later work.
        self._device.link.queue(work, self._fenced).wait()
        self._fenced = None
        return [number for number, has_changed in zip(self._pieces, found, strict=True) if has_changed]
