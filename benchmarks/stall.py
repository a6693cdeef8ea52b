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
from benchmarks.report import Report, Row, best, rotated, row

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
    plans: Mapping[int, tuple[int, int]]
    """Steps to train, and how often each system does, by the number of steps from one checkpoint to the next."""


# What one checkpoint in ten steps costs is less than what two trainings in a row differ by: it takes several.
FULL = Shape(12, 768, {1: (12, 1), 10: (31, 3), 50: (51, 1)})
QUICK = Shape(2, 128, {1: (8, 1)})


def run(folder: Path | None, *, quick: bool, shape: Shape | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces model and steps."""
    shape = shape or (QUICK if quick else FULL)
    loop = _Loop(shape.layers, shape.width)
    results: list[Row] = []
    medians: dict[tuple[str, int], float] = {}
    slow: dict[tuple[str, int], float] = {}
    plain: list[float] = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch, process_group():
        for every, (steps, rounds) in shape.plans.items():
            found, plain = _rounds(loop, Path(scratch), every, steps, rounds)
            for name, taken in found.items():
                label = f"every {every}"
                results.append(row(name, f"visible stall, {label}", "ms", [one * 1e3 for one in taken.stalls]))
                results.append(row(name, f"time to durable, {label}", "s", taken.durable))
                results.append(row(name, f"slowdown, {label}", "x", taken.slowdowns))
                medians[name, every] = float(np.percentile(taken.stalls, 95))
                slow[name, every] = statistics.median(taken.slowdowns)
            results.append(row("no checkpoints", f"iteration, every {every}", "ms", [one * 1e3 for one in plain]))
        described = environment.describe(Path(scratch))
    described["state"] = loop.described
    bound = max(0.0, loop.nbytes / loop.copy_bandwidth() - statistics.median(plain))
    results.append(row("bound", "visible stall", "ms", [bound * 1e3]))
    at_1 = {name: value for (name, every), value in medians.items() if every == 1}
    peer = best(at_1, list(ASYNC))
    described["best peer"] = peer
    ratios = {
        "stall_p95/best_peer": at_1[OURS_NAME] / at_1[peer],
        "asymmetric/symmetric": at_1[OURS_NAME] / at_1["asymcheck symmetric"],
    }
    ratios |= {f"slowdown_every_{every}": slow[OURS_NAME, every] for every in shape.plans}
    return Report("stall", described, results, ratios)


@dataclasses.dataclass
class _Taken:
    """What the checkpoints of one system took, in seconds, in all rounds."""

    stalls: list[float] = dataclasses.field(default_factory=list)
    durable: list[float] = dataclasses.field(default_factory=list)
    slowdowns: list[float] = dataclasses.field(default_factory=list)
    """Of each round, against the iterations without checkpoints before and after it."""


def _rounds(loop: _Loop, scratch: Path, every: int, steps: int, rounds: int) -> tuple[dict[str, _Taken], list[float]]:
    """Run the loop with each system in turn, so often; return what each took, and means of plain iterations."""
    factories = OURS | SYNC | ASYNC
    found = {name: _Taken() for name in factories}
    short = max(steps // 4, 4)
    plain = [loop.time(Saver(loop.state, scratch), 0, steps)]
    for number in range(rounds):
        for name in rotated(list(factories), number):
            saver, mean = _measured(loop, factories[name], scratch / "store", every, steps)
            plain.append(loop.time(Saver(loop.state, scratch), 0, short))
            taken, slowdown = found[name], mean / statistics.mean(plain[-2:])
            # The first one sets up memory, threads or processes, for all alike.
            taken.stalls += saver.stalls[1:]
            taken.durable += saver.durable
            taken.slowdowns.append(slowdown)
            worst = max(saver.stalls[1:]) * 1e3
            print(f"{name}, every {every}: at most {worst:.1f} ms, slowdown {slowdown:.3f}", flush=True)
    return found, plain


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
