"""``gpu``: cost of checkpoints for a training on a GPU, and bandwidth of the capture.

Train a GPT-2 with AdamW on the device. *Limit* is the bandwidth of plain copies from the device to pinned memory.
*Capture* is the size of the state divided by the time from the call of ``step()`` until the last copy on the device, on
an idle machine. *Visible stall* is the duration of an iteration with a checkpoint minus the median without, by the
device's clock. *Host stall* is the host time in calls, hooks and fences. *Slowdown* is the mean iteration with
checkpoints divided by the mean without. The workload needs CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import asymcheck
from asymcheck.config import CaptureConfig
from benchmarks import environment
from benchmarks.report import Report, Row, row

_BYTES_PER_PARAMETER = 12
"""Weight and two moments in float32."""
_VOCABULARY = 50_257
_CHUNK = 256 << 20
_ROUNDS = 5
_WARM_UP = 7
"""Number of warm-up checkpoints: the first creates the ring, and the plan follows after five measured iterations."""
_OURS = "asymcheck asymmetric"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model and length of the training."""

    gigabytes: float
    """Approximate bytes of the state, divided by 1e9."""
    width: int
    """Width of the model; the number of layers follows from it."""
    batch: int
    """Sequences in a batch."""
    context: int
    """Tokens in a sequence."""
    steps: Mapping[int, int]
    """Number of steps to train, by checkpoint interval in steps."""

    @property
    def layers(self) -> int:
        """Return the number of layers for a state of that size; at least one."""
        parameters = self.gigabytes * 1e9 / _BYTES_PER_PARAMETER - (_VOCABULARY + self.context) * self.width
        return max(round(parameters / (12 * self.width**2)), 1)


FULL = Shape(14.0, 1600, 8, 1024, {1: 20, 10: 41})
QUICK = Shape(0.5, 256, 4, 256, {1: 8, 10: 21})


def run(folder: Path | None, *, quick: bool, gigabytes: float | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``gigabytes`` replaces the size of the state.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise SystemExit("gpu: this workload needs a CUDA device, and torch finds none; `stall` measures on the CPU")
    shape = QUICK if quick else FULL
    shape = dataclasses.replace(shape, gigabytes=gigabytes or shape.gigabytes)
    device = torch.device("cuda")
    report = measure(folder, shape, device)
    limit = pinned_limit(device)
    report.environment["device"] = torch.cuda.get_device_name(device)
    report.results.append(row("limit", "device to pinned memory", "GB/s", limit))
    captured = next(one.median for one in report.results if one.metric == "capture")
    report.ratios["capture/limit"] = captured / statistics.median(limit)
    return report


def pinned_limit(device: torch.device) -> list[float]:
    """Return GB/s of copies from the device to pinned memory, for each round."""
    source = torch.ones(_CHUNK, dtype=torch.uint8, device=device)
    target = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(_ROUNDS + 1):
        began = _Mark(device)
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        rates.append(8 * _CHUNK / 1e9 / _Mark(device).seconds_after(began))
    # The first copy wakes the link.
    return rates[1:]


def measure(folder: Path | None, shape: Shape, device: torch.device) -> Report:
    """Measure everything except the link, on any device, so that a test can run this function."""
    loop = _Loop(shape, device)
    results: list[Row] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        where = Path(scratch)
        results.append(row(_OURS, "capture", "GB/s", _capture_rates(loop, where / "capture")))
        for every, steps in shape.steps.items():
            plain = loop.train(steps)
            with _checkpointer(loop, where / f"every-{every}") as checkpointer:
                loop.train(_WARM_UP, checkpointer, 1)
                before = dataclasses.replace(checkpointer.statistics())
                times = loop.train(steps, checkpointer, every)
                after = checkpointer.statistics()
                checkpointer.wait()
            usual = statistics.median(plain)
            stalls = [max(seconds - usual, 0.0) for seconds in times[::every]]
            host = sum(getattr(after, name) - getattr(before, name) for name in ("step_s", "fence_s", "hooks_s"))
            label = f"every {every}"
            results.append(row("no checkpoints", f"iteration, {label}", "ms", [one * 1e3 for one in plain]))
            results.append(row(_OURS, f"visible stall, {label}", "ms", [one * 1e3 for one in stalls]))
            p95 = float(np.percentile(stalls, 95))
            results.append(row(_OURS, f"visible stall p95, {label}", "ms", [p95 * 1e3]))
            results.append(row(_OURS, f"host stall, {label}", "ms", [host / len(stalls) * 1e3]))
            ratios[f"slowdown_every_{every}"] = statistics.mean(times) / statistics.mean(plain)
        described = environment.describe(where)
    described["state"] = loop.described
    return Report("gpu", described, results, ratios)


def _capture_rates(loop: _Loop, where: Path) -> list[float]:
    """Return GB/s of captures without training, for each round."""
    rates = []
    # Disable staging. Otherwise, the clock would stop when a part has only been cloned on the device.
    with _checkpointer(loop, where, CaptureConfig(staging_bytes=0)) as checkpointer:
        for step in range(_ROUNDS + 1):
            loop.iterate()
            _Mark(loop.device).wait()
            began = time.perf_counter()
            checkpointer.step(step)
            # The device waits for the copies, and the host waits for the device.
            checkpointer.fence()
            _Mark(loop.device).wait()
            rates.append(loop.nbytes / 1e9 / (time.perf_counter() - began))
            checkpointer.wait()
    # The first capture creates and pins the ring.
    return rates[1:]


@contextlib.contextmanager
def _checkpointer(loop: _Loop, where: Path, capture: CaptureConfig | None = None) -> Iterator[asymcheck.Checkpointer]:
    """Yield a Checkpointer of a new store, which deletes old checkpoints meanwhile because disks are small."""
    over = threading.Event()
    with asymcheck.Store.open(where, create=True) as store:

        def collect() -> None:
            while not over.wait(0.5):
                for checkpoint in store.checkpoints()[:-1]:
                    store.delete(checkpoint.step)
                store.gc()

        collector = threading.Thread(target=collect)
        collector.start()
        try:
            with asymcheck.Checkpointer(store, loop.state, capture=capture, every=1, keep=None) as checkpointer:
                yield checkpointer
        finally:
            over.set()
            collector.join()


class _Mark:
    """A point in time in the device's stream; on the CPU, the current time."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._at_s = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_after(self, earlier: _Mark) -> float:
        self.wait()
        if self._event is None or earlier._event is None:
            return self._at_s - earlier._at_s
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class _Loop:
    """A GPT-2 that learns random tokens, which need no loading."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        logging.set_verbosity_error()
        torch.manual_seed(0)
        self.device, self._shape = device, shape
        config = GPT2Config(
            n_layer=shape.layers, n_embd=shape.width, n_head=max(shape.width // 64, 1), n_positions=shape.context
        )
        with torch.device(device):
            self._model = GPT2LMHeadModel(config).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self.state: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}
        self._step = 0
        self.train(2)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.nbytes = self.parameters * _BYTES_PER_PARAMETER
        """Bytes of the state without buffers and counters."""

    @property
    def described(self) -> str:
        """Description of the saved state."""
        return f"GPT-2 of {self.parameters / 1e6:.0f} million parameters with AdamW, {self.nbytes / 1e9:.2f} GB"

    def iterate(self) -> None:
        """Enqueue the forward pass, the backward pass and an optimizer step."""
        tokens = torch.randint(_VOCABULARY, (self._shape.batch, self._shape.context), device=self.device)
        self._optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._model(tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()

    def train(self, steps: int, checkpointer: asymcheck.Checkpointer | None = None, every: int = 1) -> list[float]:
        """Return the seconds of each iteration, including the checkpoint at its beginning if it has one."""
        marks = [_Mark(self.device)]
        for number in range(steps):
            if checkpointer is not None and number % every == 0:
                self._step += 1
                checkpointer.step(self._step)
            self.iterate()
            marks.append(_Mark(self.device))
        return [after.seconds_after(before) for before, after in pairwise(marks)]
