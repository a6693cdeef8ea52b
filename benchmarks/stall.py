"""``stall``: how long checkpoints hold a real training loop, and how much they slow it down.

A GPT-2 with AdamW is trained on the CPU, a checkpoint every so many steps, by every system in turn; between them the
loop runs without checkpoints. *Visible stall* is all time on the training thread that one checkpoint takes: the call,
hooks, fences, and waiting for the one before. *Slowdown* is the mean time of an iteration with checkpoints divided by
the one without. Beside it stands the bound: nobody who copies the state can take less than its bytes by the bandwidth
of memory, less the time in which it may be copied.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from benchmarks import async_peers, environment, peers
from benchmarks.async_peers import ASYNC, OURS, SYNC, Factory, Saver, process_group
from benchmarks.report import Report, Row, best, row

_CONTEXT = 64
_WARM_UP = 2
OURS_NAME = "asymcheck asymmetric"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is trained, and how long."""

    layers: int
    """Layers of the model."""
    width: int
    """Its width."""
    steps: Mapping[int, int]
    """Number of steps to train, by the number of steps from one checkpoint to the next."""


FULL = Shape(12, 768, {1: 12, 10: 31, 50: 101})
QUICK = Shape(2, 128, {1: 8})


def run(folder: Path | None, *, quick: bool, shape: Shape | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces model and steps."""
    shape = shape or (QUICK if quick else FULL)
    plans = shape.steps
    loop = _Loop(shape.layers, shape.width)
    results: list[Row] = []
    medians: dict[tuple[str, int], float] = {}
    slow: dict[tuple[str, int], float] = {}
    plain = 0.0
    with tempfile.TemporaryDirectory(dir=folder) as scratch, process_group():
        for every, steps in plans.items():
            plain = loop.time(Saver(loop.state, Path(scratch)), 0, steps)
            for name, factory in (OURS | SYNC | ASYNC).items():
                saver, mean = _measured(loop, factory, Path(scratch) / "store", every, steps)
                again = loop.time(Saver(loop.state, Path(scratch)), 0, max(steps // 4, 4))
                slow[name, every] = mean / statistics.mean((plain, again))
                label = f"every {every}"
                # The first one sets up memory, threads or processes, for all alike.
                stalls = saver.stalls[1:]
                results.append(row(name, f"visible stall, {label}", "ms", [one * 1e3 for one in stalls]))
                results.append(row(name, f"time to durable, {label}", "s", saver.durable))
                results.append(row(name, f"slowdown, {label}", "x", [slow[name, every]]))
                medians[name, every] = float(np.percentile(stalls, 95))
                print(f"{name}, {label}: p95 {medians[name, every] * 1e3:.1f} ms, slowdown {slow[name, every]:.3f}")
            results.append(row("no checkpoints", f"iteration, every {every}", "ms", [plain * 1e3]))
        described = environment.describe(Path(scratch))
    described["state"] = loop.described
    bound = max(0.0, loop.nbytes / loop.copy_bandwidth() - plain)
    results.append(row("bound", "visible stall", "ms", [bound * 1e3]))
    at_1 = {name: value for (name, every), value in medians.items() if every == 1}
    peer = best(at_1, list(ASYNC))
    described["best peer"] = peer
    ratios = {
        "stall_p95/best_peer": at_1[OURS_NAME] / at_1[peer],
        "asymmetric/symmetric": at_1[OURS_NAME] / at_1["asymcheck symmetric"],
    }
    ratios |= {f"slowdown_every_{every}": slow[OURS_NAME, every] for every in plans}
    return Report("stall", described, results, ratios)


def _measured(loop: _Loop, factory: Factory, where: Path, every: int, steps: int) -> tuple[Saver, float]:
    """Run the loop with one system; return it and the mean time of an iteration."""
    peers.remove(where)
    where.mkdir()
    os.sync()
    saver = factory(loop.state, where)
    mean = loop.time(saver, every, steps)
    saver.finish()
    peers.remove(where)
    return saver, mean


class _Loop:
    """A GPT-2 that learns the sources of Python's standard library."""

    def __init__(self, layers: int, width: int) -> None:
        logging.set_verbosity_error()
        torch.manual_seed(0)
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=max(width // 64, 2), n_positions=_CONTEXT)
        self._model = GPT2LMHeadModel(config).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self.state: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}
        source = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
        self._text = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8)
        # The optimizer's state appears with the first step.
        self.time(Saver(self.state, Path()), 0, _WARM_UP)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        unique = {tensor.data_ptr(): tensor.nbytes for tensor in self._tensors().values()}
        return sum(unique.values())

    def _tensors(self) -> dict[str, torch.Tensor]:
        return async_peers.Saver(self.state, Path()).tensors()

    @property
    def described(self) -> str:
        """What is saved."""
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        return f"GPT-2 of {parameters / 1e6:.0f} million parameters with AdamW, {self.nbytes / 1e9:.2f} GB"

    def copy_bandwidth(self) -> float:
        """Return bytes per second of plain copies in memory, by one thread."""
        source = np.ones(256 << 20, dtype=np.uint8)
        target = np.empty_like(source)
        rates = []
        for _ in range(4):
            began = time.perf_counter()
            np.copyto(target, source)
            rates.append(source.nbytes / (time.perf_counter() - began))
        return max(rates)

    def time(self, saver: Saver, every: int, steps: int) -> float:
        """Train; return the mean seconds of an iteration, checkpoints included."""
        began = time.perf_counter()
        for step in range(steps):
            starts = torch.randint(len(self._text) - _CONTEXT, (1,))
            tokens = torch.stack([self._text[start : start + _CONTEXT] for start in starts.tolist()]).long()
            self._optimizer.zero_grad()
            self._model(tokens, labels=tokens).loss.backward()
            saver.before_optimizer()
            self._optimizer.step()
            if every and step % every == 0:
                saver.save(step)
        return (time.perf_counter() - began) / steps
