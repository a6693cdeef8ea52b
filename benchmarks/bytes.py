"""``bytes``: disk usage of 100 checkpoints of a training, one at every step.

Save real trainings (see ``benchmarks.training``) with ``Store.save``, as users do. For comparison, measure the same
number of files of torch.save and safetensors. Save each checkpoint also into a store with the smallest encoding, and
the first ones into a store without encoding, to measure the effect of the policy on the time to durable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import asymcheck
from asymcheck.config import COMPRESSIONS
from benchmarks import environment, peers, states, training
from benchmarks.report import Report, Row, rotated, row

COUNT = 100
_QUICK_COUNT = 5
_COMPARED = 40
"""Number of checkpoints that are saved into all stores. The first save of each store is a warm-up."""
OURS, SMALLEST, TORCH, SAFETENSORS = "asymcheck", "asymcheck smallest", "torch.save", "safetensors"


def run(folder: Path | None, *, quick: bool, shape: training.Shape | None = None, count: int | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces the model, ``count`` the checkpoints."""
    shape = shape or (training.QUICK if quick else training.FULL)
    count = count or (_QUICK_COUNT if quick else COUNT)
    start = training.pretrained(shape)
    results: list[Row] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        worst = 0.0
        for name, variant in training.VARIANTS.items():
            used_bytes, times = _train(variant(start), Path(scratch) / name, count)
            results += [
                row(system, f"checkpoints, {count} of {name}", "MB", [size / 1e6])
                for system, size in used_bytes.items()
            ]
            ratios[f"bytes_{name}/torch_save"] = used_bytes[OURS] / used_bytes[TORCH]
            ratios[f"bytes_{name}_smallest/torch_save"] = used_bytes[SMALLEST] / used_bytes[TORCH]
            results += [
                row(f"{OURS}, {mode}", f"time to durable, {name}", "ms", [one * 1e3 for one in save_s])
                for mode, save_s in times.items()
            ]
            ratios[f"bytes_{name}/safetensors"] = used_bytes[OURS] / used_bytes[SAFETENSORS]
            worst = max(worst, statistics.median(times["auto"]) / statistics.median(times["off"]))
        ratios["time_to_durable_with/without_policy"] = worst
        described = environment.describe(Path(scratch))
    parameters = sum(parameter.numel() for parameter in start.model.parameters())
    described["state"] = f"GPT-2 of {parameters / 1e6:.1f} million parameters with AdamW, {count} checkpoints"
    return Report("bytes", described, results, ratios)


def _train(run: training.Run, where: Path, count: int) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Save after every step; return the disk usage of all checkpoints by system, and the seconds of saves."""
    folders = {mode: where.with_suffix(f".{mode}") for mode in COMPRESSIONS}
    times: dict[str, list[float]] = {mode: [] for mode in COMPRESSIONS}
    with contextlib.ExitStack() as stack:
        stores = {
            mode: stack.enter_context(
                asymcheck.Store.open(folders[mode], config=asymcheck.StoreConfig(compression=mode), create=True)
            )
            for mode in COMPRESSIONS
        }
        for step in range(count):
            run.train(1)
            compared = [mode for mode in stores if mode != "off" or step < _COMPARED]
            for mode in rotated(compared, step):
                os.sync()
                began = time.perf_counter()
                stores[mode].save(run.state(), step=step)
                if step and step < _COMPARED:
                    times[mode].append(time.perf_counter() - began)
    used_bytes = {OURS: peers.on_drive(folders["auto"]), SMALLEST: peers.on_drive(folders["smallest"])}
    for folder in folders.values():
        shutil.rmtree(folder)
    # These files have the same size at every step.
    torch.save(run.state(), where.with_suffix(".pt"))
    used_bytes[TORCH] = count * peers.on_drive(where.with_suffix(".pt"))
    # safetensors accepts only tensors, and each memory once.
    unique = states.unique(states.named_tensors(run.state()))
    tensors = {name: tensor.contiguous() for name, tensor in unique.items()}
    save_file(tensors, where.with_suffix(".safetensors"))
    used_bytes[SAFETENSORS] = count * peers.on_drive(where.with_suffix(".safetensors"))
    return used_bytes, times
