"""``reshard``: seconds until a state that 4 ranks saved is back on 2, and the other way round.

Ranks are real processes, started by torchrun, with gloo; every tensor is a DTensor cut by its rows. The one other
library that can do it is torch.distributed.checkpoint. Files are dropped from the page cache before each read; both
fill tensors that are there; asymcheck verifies every byte, the other none.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks import environment
from benchmarks.report import Report, row
from benchmarks.torchrun import run_ranks

DIRECTIONS = ((4, 2), (2, 4))
OURS, OTHER = "asymcheck", "torch DCP"
_CHILD = "benchmarks.reshard_child"


def run(folder: Path | None, *, quick: bool, layers: int | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``layers`` replaces the 12 of GPT-2, 0 being a small state."""
    count = (2 if quick else 12) if layers is None else layers
    rounds = 2 if quick else 7
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        described = environment.describe(Path(scratch))
        for saved, wanted in DIRECTIONS:
            place = Path(scratch) / f"{saved}to{wanted}"
            place.mkdir()
            told = run_ranks(saved, _CHILD, "save", place, count, rounds)
            described["state"] = str(told["state"])
            told = run_ranks(wanted, _CHILD, "restore", place, count, rounds)
            described["made cold by"] = str(told["made cold by"])
            times[f"{saved} to {wanted} ranks"] = told["times"]
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
        f"reshard_time_{direction.replace(' ranks', '').replace(' ', '_')}/dcp": both[OURS] / both[OTHER]
        for direction, both in medians.items()
    }
    sums = {system: sum(both[system] for both in medians.values()) for system in (OURS, OTHER)}
    return Report("reshard", described, results, {"reshard_time/dcp": sums[OURS] / sums[OTHER], **ratios})
