"""Memory: how fast bytes are copied, digested, and fetched from an accelerator."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from asymcheck.format.digest import digest
from asymcheck.measure.clock import seconds_of
from asymcheck.tiers.available import available_bytes

_COPY_BYTES = 64 << 20
_DIGEST_BYTES = 4 << 20


def copy_bytes_per_s(budget_s: float) -> float:
    """Return how many bytes one thread copies in a second, much more than caches hold."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    return _COPY_BYTES / seconds_of(lambda: np.copyto(target, source), budget_s)


def digest_bytes_per_s(budget_s: float) -> float:
    """Return how many bytes one thread digests in a second, of a partition that was just copied."""
    data = np.ones(_DIGEST_BYTES, dtype=np.uint8).data
    return _DIGEST_BYTES / seconds_of(lambda: digest(data), budget_s)


def device_copy(budget_s: float) -> tuple[str, float] | None:
    """Return the accelerator and the bytes per second that come from it into pinned memory; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return torch.cuda.get_device_name(device), _COPY_BYTES / seconds_of(copy, budget_s)


def ring_room_bytes(folder: Path) -> int:
    """Return how much memory a ring in ``folder`` may take: what a Checkpointer allows itself by default."""
    limits = []
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        limits.append(status.f_bavail * status.f_frsize * 9 // 10)
    available = available_bytes()
    if available is not None:
        limits.append(available // 2)
    return min(limits, default=0)
