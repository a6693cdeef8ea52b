"""All facts of one machine and one store, within about ten seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from asymcheck.measure import coding, drive, memory
from asymcheck.policies.facts import Facts
from asymcheck.tiers.nvme import NvmeTier
from asymcheck.types import Sample


def measure(
    tier: NvmeTier,
    samples: Sequence[Sample],
    described: str,
    state_bytes: int | None,
    ring_folder: Path,
    *,
    quick: bool,
) -> Facts:
    """Measure memory, codecs (on ``samples``, which are ``described`` so) and the drive of a writable store.

    ``state_bytes`` are those of the newest checkpoint, if there is one.

    Nothing of it stays in the store; what a kill leaves, collection removes.

    Raises:
        OutOfSpaceError: there is too little room to measure in.
        StorageError: the device refused.
    """
    began = time.perf_counter()
    budget_s = 0.03 if quick else 0.2
    # The drive first: where it refuses, the rest need not be waited for.
    drive_facts, written = drive.measure_drive(tier, drive.QUICK if quick else drive.FULL)
    device = memory.device_copy(budget_s)
    return Facts(
        cores=len(os.sched_getaffinity(0)),
        ring_room_bytes=memory.ring_room_bytes(ring_folder),
        copy_bytes_per_s=memory.copy_bytes_per_s(budget_s),
        digest_bytes_per_s=memory.digest_bytes_per_s(budget_s),
        drive=drive_facts,
        codecs=coding.measure_codecs(samples, budget_s / 2),
        sample=described,
        state_bytes=state_bytes,
        device=device[0] if device else None,
        device_copy_bytes_per_s=device[1] if device else None,
        written_bytes=written,
        took_s=time.perf_counter() - began,
    )
