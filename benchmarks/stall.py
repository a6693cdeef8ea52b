"""``stall``: how long checkpoints block a real training loop, and how much they slow it down.

Train a GPT-2 with AdamW on the CPU, with a checkpoint at a fixed interval, by every system in turn. In between, train
without checkpoints. *Visible stall* is all time on the training thread for one checkpoint: the call, hooks, fences, and
the wait for the previous checkpoint. *Slowdown* is the mean time of an iteration with checkpoints divided by the mean
time without. The report adds lower bounds. A copy of the state blocks the loop for at least its bytes divided by the
bandwidth of memory, minus the time available for the copy. It slows the loop by at least its share of the cores.

Most parts train on 64 tokens a step, which is almost entirely optimizer time and the hardest case. The last part trains
on 1,024 tokens: one text of GPT-2's full context length, the smallest realistic batch.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from benchmarks import async_peers, environment, peers, states
from benchmarks.async_peers import ASYNC, OURS, SETTLING, SYNC, Factory, Saver, process_group
from benchmarks.report import Report, Row, best, rotated, row

_CONTEXT = 1024
_SHORT = 64
_WARM_UP = 2
OURS_NAME = "asymcheck immediate"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Training plan of each system in one part."""

    every: int
    """Checkpoint interval in steps."""
    steps: int
    """Number of timed steps. The first begins a checkpoint. For earlier steps see :func:`async_peers.train`."""
    rounds: int = 1
    """Rounds of each system."""
    tokens: int = _SHORT
    """Tokens in each step."""
    systems: tuple[str, ...] = ()
    """Systems to measure; none means all."""

    @property
    def label(self) -> str:
        """Suffix of the row names."""
        return f"every {self.every}" + ("" if self.tokens == _SHORT else f" of {self.tokens:,} tokens")

    @property
    def ratio(self) -> str:
        """Suffix of the ratio name."""
        return f"slowdown_every_{self.every}" + ("" if self.tokens == _SHORT else f"_of_{self.tokens}_tokens")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model and length of the training."""

    layers: int
    """Layers of the model."""
    width: int
    """Width of the model."""
    plans: tuple[Plan, ...]
    """Parts of the workload; the first begins a checkpoint at every step."""


_LONG = (OURS_NAME, "asymcheck asymmetric", "torch DCP async staged")
# The cost of one checkpoint in ten steps is below the noise between two trainings, so several are measured.
FULL = Shape(12, 768, (Plan(1, 12), Plan(10, 20, 2), Plan(50, 50, systems=_LONG), Plan(10, 10, 2, _CONTEXT, _LONG)))
QUICK = Shape(2, 128, (Plan(1, 8),))


def run(folder: Path | None, *, quick: bool, shape: Shape | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces model and steps."""
    shape = shape or (QUICK if quick else FULL)
    loop = Loop(shape.layers, shape.width)
    results: list[Row] = []
    at_1: dict[str, float] = {}
    ratios: dict[str, float] = {}
    copy_s = loop.nbytes / loop.copy_bandwidth()
    with tempfile.TemporaryDirectory(dir=folder) as scratch, process_group():
        for plan in shape.plans:
            loop.tokens = plan.tokens
            found, plain = _rounds(loop, Path(scratch), plan)
            results += _rows(found, plain, plan, copy_s)
            ratios[plan.ratio] = statistics.median(found[OURS_NAME].slowdowns)
            at_1 = at_1 or {name: float(np.percentile(result.stalls, 95)) for name, result in found.items()}
        described = environment.describe(Path(scratch))
    described["state"] = loop.described
    peer = best(at_1, list(ASYNC))
    described["best peer"] = peer
    of_stalls = {
        "stall_p95/best_peer": at_1[OURS_NAME] / at_1[peer],
        "immediate/asymmetric": at_1[OURS_NAME] / at_1["asymcheck asymmetric"],
    }
    return Report("stall", described, results, of_stalls | ratios)


def _rows(found: Mapping[str, _Result], plain: Sequence[float], plan: Plan, copy_s: float) -> Iterator[Row]:
    """Yield the measurements of one part, and its bounds for a state that one thread copies in ``copy_s``."""
    for name, result in found.items():
        yield row(name, f"visible stall, {plan.label}", "ms", [one * 1e3 for one in result.stalls])
        yield row(
            name, f"visible stall of the first two, {plan.label}", "ms", [one * 1e3 for one in result.first_stalls]
        )
        yield row(name, f"time to durable, {plan.label}", "s", result.durable)
        yield row(name, f"slowdown, {plan.label}", "x", result.slowdowns)
    iteration_s = statistics.median(plain)
    yield row("no checkpoints", f"iteration, {plan.label}", "ms", [one * 1e3 for one in plain])
    yield row("bound", f"visible stall, {plan.label}", "ms", [max(0.0, copy_s - iteration_s) * 1e3])
    # The training keeps all cores busy, so a copy takes at least its processor time, spread over the cores.
    copy_share_s = copy_s / torch.get_num_threads()
    yield row("bound", f"slowdown, {plan.label}", "x", [1 + copy_share_s / (plan.every * iteration_s)])


@dataclasses.dataclass
class _Result:
    """Seconds of the checkpoints of one system in all rounds."""

    first_stalls: list[float] = dataclasses.field(default_factory=list)
    """Stalls of the untimed checkpoints of each round."""
    stalls: list[float] = dataclasses.field(default_factory=list)
    durable: list[float] = dataclasses.field(default_factory=list)
    slowdowns: list[float] = dataclasses.field(default_factory=list)
    """Slowdown of each round, relative to the iterations without checkpoints before and after it."""


def _rounds(loop: Loop, scratch: Path, plan: Plan) -> tuple[dict[str, _Result], list[float]]:
    """Train with each system in turn, for several rounds; return the measurements and means of plain iterations."""
    factories = {name: one for name, one in (OURS | SYNC | ASYNC).items() if not plan.systems or name in plan.systems}
    found = {name: _Result() for name in factories}
    short = max(plan.steps // 4, 4)
    plain = [loop.time(Saver(loop.state, scratch), 0, plan.steps)]
    for number in range(plan.rounds):
        for name in rotated(list(factories), number):
            saver, mean = _measured(loop, factories[name], scratch / "store", plan)
            plain.append(loop.time(Saver(loop.state, scratch), 0, short))
            result, slowdown = found[name], mean / statistics.mean(plain[-2:])
            result.first_stalls += saver.stalls[:SETTLING]
            result.stalls += saver.stalls[SETTLING:]
            result.durable += saver.durable
            result.slowdowns.append(slowdown)
            worst = max(saver.stalls[SETTLING:]) * 1e3
            print(f"{name}, {plan.label}: at most {worst:.1f} ms, slowdown {slowdown:.3f}", flush=True)
    return found, plain


def _measured(loop: Loop, factory: Factory, where: Path, plan: Plan) -> tuple[Saver, float]:
    """Train with one system; return it and the mean time of an iteration."""
    peers.remove(where)
    where.mkdir()
    os.sync()
    saver = factory(loop.state, where)
    mean = loop.time(saver, plan.every, plan.steps)
    saver.finish()
    peers.remove(where)
    return saver, mean


class Loop:
    """A GPT-2 that learns the sources of Python's standard library."""

    def __init__(self, layers: int, width: int) -> None:
        """Create the model, and train until the optimizer has its state."""
        logging.set_verbosity_error()
        torch.manual_seed(0)
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=max(width // 64, 2), n_positions=_CONTEXT)
        self.model = GPT2LMHeadModel(config).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self._optimizer}
        source = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
        self._text = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8)
        self.tokens = _SHORT
        """Tokens in each step."""
        # The first step creates the optimizer's state.
        self.time(Saver(self.state, Path()), 0, _WARM_UP)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.nbytes for tensor in states.unique(async_peers.flat_tensors(self.state)).values())

    @property
    def described(self) -> str:
        """Description of the saved state."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"GPT-2 of {parameters / 1e6:.0f} million parameters with AdamW, {self.nbytes / 1e9:.2f} GB"

    def copy_bandwidth(self) -> float:
        """Return the bandwidth of plain copies in memory by one thread, in bytes per second."""
        source = np.ones(256 << 20, dtype=np.uint8)
        target = np.empty_like(source)
        rates = []
        for _ in range(4):
            began = time.perf_counter()
            np.copyto(target, source)
            rates.append(source.nbytes / (time.perf_counter() - began))
        return max(rates)

    def time(self, saver: Saver, every: int, steps: int) -> float:
        """Train; return the mean seconds of an iteration including checkpoints."""
        return async_peers.train(lambda _step: self.iterate(saver), saver, every, steps)

    def iterate(self, saver: Saver) -> None:
        """Train for one step."""
        start = int(torch.randint(len(self._text) - self.tokens, ()))
        tokens = self._text[None, start : start + self.tokens].long()
        self._optimizer.zero_grad()
        self.model(tokens, labels=tokens).loss.backward()
        saver.before_optimizer()
        self._optimizer.step()
