"""``dedupe``: disk usage of checkpoints of several ranks, and the time until one is durable.

Start real processes with torchrun and gloo: DDP, FSDP2, FSDP2 with tensor parallelism and replicated norms, and a
frozen model with adapters. Compare with torch.distributed.checkpoint (DCP), which also writes replicas once, and with
torch.save on each rank.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.report import Report, Row, row
from benchmarks.torchrun import run_ranks

OURS, DCP, TORCH = "asymcheck", "torch DCP", "torch.save"
LAYOUTS = (("DDP", 2), ("DDP", 4), ("FSDP2 + TP", 4), ("LoRA", 2))
"""Layouts whose bytes are counted: parallelism and number of ranks."""
_DDP4, _LORA = "DDP, 4 ranks", "LoRA, 2 ranks"
_TIMED = ("FSDP2", 4)
_CHILD = "benchmarks.dedupe_child"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of the saved state and number of checkpoints."""

    counted: tuple[int, int]
    """Layers and width of the model whose bytes are counted."""
    checkpoints: int
    """Numbers of checkpoints after which the bytes are counted, for each layout."""
    timed: tuple[int, int]
    """Layers and width of the model whose saves are timed."""
    rounds: int
    """Number of timed saves for each library."""


FULL = Shape((6, 768), 10, (12, 768), 7)
QUICK = Shape((2, 512), 4, (4, 512), 3)


def run(folder: Path | None, *, quick: bool, shape: Shape | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces the sizes."""
    shape = shape or (QUICK if quick else FULL)
    counted: dict[str, dict[str, Any]] = {}
    timed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        described = environment.describe(Path(scratch))
        for ranks in sorted({ranks for _, ranks in LAYOUTS}):
            names = [layout for layout, count in LAYOUTS if count == ranks]
            jobs: list[dict[str, object]] = [
                {"layout": name, "timed": False, "count": shape.checkpoints, **_sizes(shape.counted)} for name in names
            ]
            if ranks == _TIMED[1]:
                jobs.append({"layout": _TIMED[0], "timed": True, "count": shape.rounds, **_sizes(shape.timed)})
            folder_of_ranks = Path(scratch) / str(ranks)
            folder_of_ranks.mkdir()
            found = run_ranks(ranks, _CHILD, "measure", folder_of_ranks, json.dumps(jobs))["found"]
            if ranks == _TIMED[1]:
                timed = found.pop()
            counted |= {f"{name}, {ranks} ranks": one for name, one in zip(names, found, strict=True)}
    sizes = {name: f"{one['state'] / 1e6:.1f} MB" for name, one in {**counted, "timed": timed}.items()}
    described["state"] = f"{sizes[_DDP4]} with AdamW; LoRA {sizes[_LORA]}; timed {sizes['timed']}"
    disk_usage = {label: one["taken"] for label, one in counted.items()}
    times: dict[str, list[float]] = timed["times"]
    results = [one for label, systems in disk_usage.items() for one in _rows(label, systems)]
    results += [row(system, "time to durable", "s", values) for system, values in times.items()]
    return Report("dedupe", described, results, _ratios(disk_usage, times))


def _sizes(size: tuple[int, int]) -> dict[str, object]:
    return {"layers": size[0], "width": size[1]}


def _rows(label: str, systems: dict[str, list[int]]) -> list[Row]:
    count = len(systems[OURS])
    return [
        row(system, f"checkpoints, {number} of {label}", "MB", [sizes[number - 1] / 1e6])
        for number in (1, count)
        for system, sizes in systems.items()
    ]


def _ratios(disk_usage: dict[str, dict[str, list[int]]], times: dict[str, list[float]]) -> dict[str, float]:
    last = {label: {system: sizes[-1] for system, sizes in systems.items()} for label, systems in disk_usage.items()}
    found = {
        "bytes_ddp2/dcp": last["DDP, 2 ranks"][OURS] / last["DDP, 2 ranks"][DCP],
        "bytes_ddp4/dcp": last[_DDP4][OURS] / last[_DDP4][DCP],
        "bytes_ddp4_first/dcp": disk_usage[_DDP4][OURS][0] / disk_usage[_DDP4][DCP][0],
        "bytes_ddp4/torch_save_each": last[_DDP4][OURS] / last[_DDP4][TORCH],
        "bytes_fsdp_tp4/dcp": last["FSDP2 + TP, 4 ranks"][OURS] / last["FSDP2 + TP, 4 ranks"][DCP],
        "bytes_lora/dcp": last[_LORA][OURS] / last[_LORA][DCP],
        # Rank 0 only, because both ranks have the same state.
        "bytes_lora/torch_save": last[_LORA][OURS] / (last[_LORA][TORCH] / 2),
    }
    return {**found, "save_time_fsdp4/dcp": statistics.median(times[OURS]) / statistics.median(times[DCP])}
