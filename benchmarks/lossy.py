"""ExCP (Li et al., ICML 2024), our reimplementation: residuals to the previous checkpoint, pruned and quantised, lossy.

Each tensor is stored as its difference to the tensor that the previous checkpoint restores. The smaller half of these
differences becomes zero, the rest one of fifteen values, and zstd packs pairs of them. The error therefore does not
grow from checkpoint to checkpoint. No restored state equals that of the training. The loop waits for all of this work.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks import peers
from benchmarks.async_peers import Saver, flat_tensors

_LEVELS = 7
"""Values on each side of zero."""
_PRUNED = 0.5
"""Share of the differences that become zero: the smallest ones."""


class Lossy(Saver):
    """Stores residuals, and blocks the loop meanwhile."""

    name = "ExCP (reimplemented)"

    def __init__(self, state: dict[str, Any], where: Path) -> None:
        """Begin without a previous checkpoint: the first checkpoint is stored in full."""
        super().__init__(state, where)
        self._before: dict[str, torch.Tensor] = {}

    def save(self, step: int) -> None:
        """Store a checkpoint, durably."""
        began = time.perf_counter()
        target = self.where / f"{step:09}"
        stored: dict[str, object] = {}
        largest = 0.0
        for name, tensor in self.tensors().items():
            now = tensor.detach()
            former = self._before.get(name)
            if former is None or not now.is_floating_point() or now.numel() == 1:
                stored[name] = now.clone()
                self._before[name] = now.clone()
            else:
                packed, scale, restored = _packed(now - former)
                stored[name] = (packed, scale)
                self._before[name] = former + restored
                largest = max(largest, _error(self._before[name], now))
        torch.save(stored, target)
        peers.sync(target)
        self.stalls.append(time.perf_counter() - began)
        self.durable.append(self.stalls[-1])
        self.errors.append(largest)


def _error(restored: torch.Tensor, true: torch.Tensor) -> float:
    """Return the maximum difference relative to the largest value."""
    return float((restored - true).abs().max() / true.abs().max().clamp(min=1e-30))


def _packed(residual: torch.Tensor) -> tuple[bytes, float, torch.Tensor]:
    flat = residual.flatten().numpy()
    size = np.abs(flat)
    scale = float(size.max()) / _LEVELS or 1.0
    least = np.partition(size, int(_PRUNED * (len(size) - 1)))[int(_PRUNED * (len(size) - 1))]
    levels = np.where(size <= least, 0, np.rint(flat / scale)).astype(np.int8)
    even = np.pad(levels + 8, (0, len(levels) % 2)).astype(np.uint8)
    data = zstandard.ZstdCompressor(level=1).compress((even[::2] << 4 | even[1::2]).tobytes())
    return data, scale, torch.from_numpy(levels.astype(np.float32) * scale).reshape(residual.shape)


def _unpacked(data: bytes, scale: float, shape: torch.Size) -> torch.Tensor:
    count = int(np.prod(shape))
    pairs = np.frombuffer(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read(), dtype=np.uint8)
    levels = np.empty(2 * len(pairs), dtype=np.int16)
    levels[::2], levels[1::2] = pairs >> 4, pairs & 15
    return torch.from_numpy((levels[:count] - 8).astype(np.float32) * scale).reshape(shape)


def recover(state: dict[str, Any], where: Path) -> int:
    """Add up all checkpoints from the first; return the step of the last readable checkpoint."""
    tensors = flat_tensors(state)
    reached = -1
    for path in sorted(where.iterdir()):
        try:
            stored = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError):
            break
        entry: Any
        for name, entry in stored.items():
            tensor = tensors[name].detach()
            if isinstance(entry, torch.Tensor):
                tensor.copy_(entry)
            else:
                packed, scale = entry
                tensor += _unpacked(packed, scale, tensor.shape)
        reached = int(path.name)
    return reached
