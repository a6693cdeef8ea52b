"""``bytes``: what 100 checkpoints of a training take on the drive, one at every step.

Real trainings (see ``benchmarks.training``), saved with ``Store.save`` as a user does. Beside it what as many files of
torch.save and safetensors take.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import asymcheck
from benchmarks import environment, peers, training
from benchmarks.report import Report, Row, row

COUNT = 100
_QUICK_COUNT = 5
OURS, TORCH, SAFETENSORS = "asymcheck", "torch.save", "safetensors"


def run(folder: Path | None, *, quick: bool, shape: training.Shape | None = None, count: int | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces the model, ``count`` the checkpoints."""
    shape = shape or (training.QUICK if quick else training.FULL)
    count = count or (_QUICK_COUNT if quick else COUNT)
    start = training.pretrained(shape)
    results: list[Row] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for name, way in training.WAYS.items():
            taken = _train(way(start), Path(scratch) / name, count)
            results += [
                row(system, f"checkpoints, {count} of {name}", "MB", [size / 1e6]) for system, size in taken.items()
            ]
            ratios[f"bytes_{name}/torch_save"] = taken[OURS] / taken[TORCH]
            ratios[f"bytes_{name}/safetensors"] = taken[OURS] / taken[SAFETENSORS]
        described = environment.describe(Path(scratch))
    parameters = sum(parameter.numel() for parameter in start.model.parameters())
    described["state"] = f"GPT-2 of {parameters / 1e6:.1f} million parameters with AdamW, {count} checkpoints"
    return Report("bytes", described, results, ratios)


def _train(run: training.Run, where: Path, count: int) -> dict[str, int]:
    """Save after every step; return the bytes that all checkpoints take by each system."""
    with asymcheck.Store.open(where) as store:
        for step in range(count):
            run.train(1)
            store.save(run.state(), step=step)
    taken = {OURS: peers.on_drive(where)}
    shutil.rmtree(where)
    # Their files are as large for every step.
    torch.save(run.state(), where.with_suffix(".pt"))
    taken[TORCH] = count * peers.on_drive(where.with_suffix(".pt"))
    # It takes tensors only, each memory once.
    tensors = {name: tensor.contiguous() for name, tensor in training.tensors_of(run.state())}
    save_file(tensors, where.with_suffix(".safetensors"))
    taken[SAFETENSORS] = count * peers.on_drive(where.with_suffix(".safetensors"))
    return taken
