"""``reshard``: seconds until a state that 4 ranks saved is back on 2, and the other way round.

Ranks are real processes, started by torchrun, with gloo; every tensor is a DTensor cut by its rows. The one other
library that can do it is torch.distributed.checkpoint. Files are dropped from the page cache before each read; both
fill tensors that are there; asymcheck verifies every byte, the other none.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.report import Report, row

DIRECTIONS = ((4, 2), (2, 4))
OURS, OTHER = "asymcheck", "torch DCP"
_CHILD = "benchmarks.reshard_child"
_ROOT = Path(__file__).resolve().parents[1]


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
            told = _run(saved, "save", place, count, rounds)
            described["state"] = str(told["state"])
            told = _run(wanted, "restore", place, count, rounds)
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


def _run(ranks: int, action: str, place: Path, layers: int, rounds: int) -> dict[str, Any]:
    """Do something by several ranks; return what rank 0 said.

    Raises:
        RuntimeError: it failed, or one library restored something else.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # As many threads as each would get anyway; torchrun would say so on its standard error.
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    done = subprocess.run(
        [*launch, "-m", _CHILD, action, str(place), str(layers), str(rounds)],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{action} by {ranks} ranks failed:\n{done.stderr[-4000:]}")
    told: dict[str, Any] = json.loads((place / f"{action}.json").read_text())
    return told
