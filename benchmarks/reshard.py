"""``reshard``: seconds to restore a state of 4 ranks on 2, and a state of 2 ranks on 4.

Start real processes with torchrun and gloo. Every tensor is a DTensor sharded by rows. Compare with
torch.distributed.checkpoint, the only other library that can reshard. Drop the files from the page cache before each
read. Both libraries fill existing tensors. asymcheck verifies every byte, and the other library verifies nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks import environment
from benchmarks.report import Report, row
from benchmarks.torchrun import run_ranks

DIRECTIONS = ((4, 2), (2, 4))
OURS, PEER = "asymcheck", "torch DCP"
_CHILD = "benchmarks.reshard_child"


def run(folder: Path | None, *, quick: bool, layers: int | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``layers`` replaces the 12 of GPT-2; 0 means a small state."""
    count = (2 if quick else 12) if layers is None else layers
    rounds = 2 if quick else 7
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        described = environment.describe(Path(scratch))
        for saved, restored in DIRECTIONS:
            ranks_folder = Path(scratch) / f"{saved}to{restored}"
            ranks_folder.mkdir()
            result = run_ranks(saved, _CHILD, "save", ranks_folder, count, rounds)
            described["state"] = str(result["state"])
            result = run_ranks(restored, _CHILD, "restore", ranks_folder, count, rounds)
            described["made cold by"] = str(result["made cold by"])
            times[f"{saved} to {restored} ranks"] = result["times"]
    results = [
        row(system, f"time to restore, {direction}", "s", values)
        for direction, systems in times.items()
        for system, values in systems.items()
    ]
    medians = {
        direction: {system: statistics.median(values) for system, values in systems.items()}
        for direction, systems in times.items()
    }
    ratios = {
        f"reshard_time_{direction.replace(' ranks', '').replace(' ', '_')}/dcp": both[OURS] / both[PEER]
        for direction, both in medians.items()
    }
    sums = {system: sum(both[system] for both in medians.values()) for system in (OURS, PEER)}
    return Report("reshard", described, results, {"reshard_time/dcp": sums[OURS] / sums[PEER], **ratios})
