"""``gpu``: cost of checkpoints for a training on a GPU, beside other libraries, and restores onto the device.

Train a GPT-2 with AdamW on the device. *Limit* is the bandwidth of plain copies from the device to pinned memory.
*Capture* is the size of the state divided by the time from the call of ``step()`` until the last copy on the device, on
an idle machine, once the plan is made. *Visible stall* is the duration of ten iterations, of which the first has a
checkpoint, minus that of ten without, by the device's clock. Each checkpoint is durable before the next begins, so that
the drive is not the limit. In a second part, an iteration has one sequence and is shorter than the copy of the state,
so that the link is the limit. *Host stall* is the host time in calls, hooks and fences. *Restores* read from the drive,
not from the page cache. The workload needs CUDA; ``measure()`` runs on any device, so that a test can run it.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import asymcheck
from asymcheck.config import CaptureConfig
from benchmarks import async_peers, coldness, environment, peers, raw, states
from benchmarks.async_peers import ASYNC, SYNC, Factory, Ours, Saver, Schedule
from benchmarks.report import Report, Row, best, rotated, row

_BYTES_PER_PARAMETER = 12
"""Weight and two moments in float32."""
_VOCABULARY = 50_257
_CHUNK = 256 << 20
_LINK_ROUNDS = 5
_LEAD = 2
"""Iterations before each measurement, so that the host is ahead of the device, as in a training."""
_WARM_UP = 7
"""Warm-up checkpoints of asymcheck: the first creates the ring, and the plan follows after five measured iterations."""
_SMALLEST_S = 1e-6
"""Shortest stall that counts in a ratio [s]."""
_SHORT = "one sequence"
"""Name of the part with short iterations."""
_NEWEST = asymcheck.Retention(keep_last=1)
OURS_NAME = "asymcheck immediate"
OURS: dict[str, Factory] = {
    f"asymcheck {schedule}": partial(Ours, schedule=schedule, keep=_NEWEST) for schedule in get_args(Schedule)
}
"""asymcheck, by schedule. Disks are small, so each keeps one checkpoint."""
_SMALL_STAGING = 4 << 20
"""Bytes of a staging buffer for the small tensors of a checkpoint, and hardly any of its clones."""


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
    rounds: int
    """Measured checkpoints of each system."""
    every: int = 10
    """Iterations of one measurement. The first has a checkpoint."""

    @property
    def layers(self) -> int:
        """Return the number of layers for a state of that size; at least one."""
        parameters = self.gigabytes * 1e9 / _BYTES_PER_PARAMETER - (_VOCABULARY + self.context) * self.width
        return max(round(parameters / (12 * self.width**2)), 1)


FULL = Shape(14.0, 1600, 8, 1024, 3)
QUICK = Shape(0.5, 768, 4, 256, 2)


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
    limit = pinned_limit(device)
    report = measure(folder, shape, device, OURS | SYNC | ASYNC)
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
    for _ in range(_LINK_ROUNDS + 1):
        began = _Mark(device)
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        rates.append(8 * _CHUNK / 1e9 / _Mark(device).seconds_after(began))
    # The first copy wakes the link.
    return rates[1:]


def measure(folder: Path | None, shape: Shape, device: torch.device, systems: dict[str, Factory]) -> Report:
    """Measure ``systems`` on any device, without its link to the host."""
    loop = _Loop(shape, device)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, async_peers.process_group():
        where = Path(scratch)
        results = [row(OURS_NAME, "capture", "GB/s", _capture_rates(loop, where / "capture"))]
        peers.remove(where / "capture")
        stalls, ratios = _stalls(loop, where, systems)
        loop.shape = dataclasses.replace(shape, batch=1, rounds=2 * shape.rounds)
        plans, plan_ratios = _stalls(loop, where, {name: one for name, one in systems.items() if name in OURS | ASYNC})
        stalls += [dataclasses.replace(one, metric=f"{one.metric}, {_SHORT}") for one in plans]
        ratios |= {f"{name}_of_1_sequence": ratio for name, ratio in plan_ratios.items()}
        restores, restore_ratios = _restores(loop, where / "restore", shape.rounds)
        described = environment.describe(where)
    described["state"] = loop.described
    return Report("gpu", described, [*results, *stalls, *restores], ratios | restore_ratios)


def _capture_rates(loop: _Loop, where: Path) -> list[float]:
    """Return GB/s of captures without training, for each round after the plan is made."""
    rates = []
    # Otherwise, the clock would stop when parts have only been cloned on the device.
    capture = CaptureConfig(staging_bytes=_SMALL_STAGING)
    with (
        asymcheck.Store.open(where, create=True) as store,
        asymcheck.Checkpointer(store, loop.state, capture=capture, every=1, keep=_NEWEST) as checkpointer,
    ):
        for step in range(_WARM_UP + loop.shape.rounds):
            loop.iterate()
            _Mark(loop.device).wait()
            began = time.perf_counter()
            checkpointer.step(step)
            # The device waits for the copies, and the host waits for the device.
            checkpointer.fence()
            _Mark(loop.device).wait()
            rates.append(loop.nbytes / 1e9 / (time.perf_counter() - began))
            checkpointer.wait()
    return rates[_WARM_UP:]


@dataclasses.dataclass
class _Costs:
    """Measurements of one system."""

    visible: list[float] = dataclasses.field(default_factory=list)
    """Seconds by which ten iterations with a checkpoint took longer than without."""
    first: float = 0.0
    """The same for the first checkpoint."""
    host: list[float] = dataclasses.field(default_factory=list)
    durable: list[float] = dataclasses.field(default_factory=list)


def _stalls(loop: _Loop, where: Path, systems: dict[str, Factory]) -> tuple[list[Row], dict[str, float]]:
    every = loop.shape.every
    plain: list[float] = []
    found: dict[str, _Costs] = {}
    for name, factory in systems.items():
        found[name] = _costs(loop, factory, where / "store", plain, _WARM_UP if name in OURS else 1)
        peers.remove(where / "store")
        seconds = statistics.median(found[name].visible)
        print(f"{name}: {seconds * 1e3:.1f} ms in {every} iterations", flush=True)
    results = [row("no checkpoints", "iteration", "ms", [one * 1e3 for one in plain])]
    for name, costs in found.items():
        for metric, unit, factor, values in (
            (f"visible stall, every {every}", "ms", 1e3, costs.visible),
            ("visible stall of the first", "ms", 1e3, [costs.first]),
            ("host stall", "ms", 1e3, costs.host),
            ("time to durable", "s", 1, costs.durable),
        ):
            results.append(row(name, metric, unit, [one * factor for one in values]))
    visible = {name: statistics.median(costs.visible) for name, costs in found.items()}
    iterations = every * statistics.median(plain)
    ratios = {f"slowdown_every_{every}": 1 + visible[OURS_NAME] / iterations}
    background = [name for name in found if name in ASYNC]
    if background:
        peer = best(visible, background)
        ratios[f"slowdown_every_{every}_of_best_peer"] = 1 + visible[peer] / iterations
        # A stall is a difference of two times, and may be 0 if iterations vary by more.
        ratios["stall/best_peer"] = visible[OURS_NAME] / max(visible[peer], _SMALLEST_S)
    return results, ratios


def _costs(loop: _Loop, factory: Factory, where: Path, plain: list[float], warm_up: int) -> _Costs:
    """Train with one system, and add the iterations without checkpoints to ``plain``."""
    costs, every = _Costs(), loop.shape.every
    where.mkdir()
    saver = factory(loop.state, where)
    for number in range(warm_up + loop.shape.rounds):
        # Only the first of the warm-up checkpoints is measured.
        if 0 < number < warm_up:
            loop.train(1, saver, number)
        else:
            before = loop.train(every)
            # Noise may make the iterations with the checkpoint the shorter ones.
            costs.visible.append(max(sum(loop.train(every, saver, number)) - sum(before), 0.0))
            plain += before
        saver.drain()
        peers.remove(where / str(number - 1))
    costs.first = costs.visible.pop(0)
    saver.finish()
    costs.host, costs.durable = saver.stalls[warm_up:], saver.durable[warm_up:]
    return costs


def _restores(loop: _Loop, where: Path, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """Measure restores onto the device, by asymcheck and by other libraries, and raw reads of as many bytes."""
    where.mkdir()
    tensors = states.unique(async_peers.flat_tensors(loop.state))
    limit = raw.Limit([tensor.cpu() for tensor in tensors.values()])
    limit.write(where / "raw")
    filled = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    systems: dict[str, tuple[Path, Callable[[], object]]] = {
        "raw read": (where / "raw", lambda: limit.read(where / "raw")),
        "asymcheck load": (where / "store", partial(_load, where / "store", device=loop.device)),
        "asymcheck load into": (where / "store", partial(_load, where / "store", into=filled)),
    }
    with asymcheck.Store.open(where / "store", create=True) as store:
        store.save(dict(tensors), step=1)
    for peer in (peers.TorchSave(), peers.Safetensors(), peers.DistributedCheckpoint()):
        saved = where / peer.name.replace(" ", "-")
        peers.save_durably(peer, tensors, saved)
        if isinstance(peer, peers.DistributedCheckpoint):
            systems[f"{peer.name} into"] = saved, partial(_filled, peer, saved, filled)
    torch_file, safetensors_file = where / "torch.save", where / "safetensors"
    systems["torch.load mmap"] = torch_file, partial(torch.load, torch_file, map_location=loop.device, mmap=True)
    systems["safetensors"] = safetensors_file, partial(load_file, safetensors_file, device=str(loop.device))
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds):
        for name, (path, read) in rotated(list(systems.items()), number):
            os.sync()
            coldness.make_cold(peers.files_in(path))
            began = time.perf_counter()
            restored = read()
            _Mark(loop.device).wait()
            times[name].append(time.perf_counter() - began)
            if number == 0 and isinstance(restored, dict):
                _check(name, tensors, restored)
            # Otherwise the next restore could be compared with the tensors of this one.
            for tensor in filled.values():
                tensor.zero_()
            del restored
            gc.collect()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = min(medians["asymcheck load"], medians["asymcheck load into"])
    rivals = [name for name in medians if not name.startswith(("raw", "asymcheck"))]
    ratios = {
        "restore/limit": medians["raw read"] / ours,
        "restore/best_peer": medians[best(medians, rivals)] / ours,
    }
    return [row(name, "time to restore onto the device", "s", values) for name, values in times.items()], ratios


def _filled(peer: peers.Peer, where: Path, tensors: dict[str, torch.Tensor]) -> object:
    peer.fills()[peer.name](where, tensors)
    return tensors


def _load(where: Path, device: torch.device | None = None, into: dict[str, torch.Tensor] | None = None) -> object:
    with asymcheck.Store.open(where, read_only=True) as store:
        return store.load(into=into) if device is None else store.load(device=device)


def _check(name: str, saved: dict[str, torch.Tensor], restored: dict[str, Any]) -> None:
    """Raise RuntimeError unless all tensors were restored onto their device."""
    for key, tensor in saved.items():
        found = restored[key]
        if found.device != tensor.device or not torch.equal(found, tensor):
            raise RuntimeError(f"{name} restored a different tensor {key}")


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
        self.device, self.shape = device, shape
        config = GPT2Config(
            n_layer=shape.layers, n_embd=shape.width, n_head=max(shape.width // 64, 1), n_positions=shape.context
        )
        with torch.device(device):
            self._model = GPT2LMHeadModel(config).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self.state: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}
        self.train(2)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.nbytes = self.parameters * _BYTES_PER_PARAMETER
        """Bytes of the state without buffers and counters."""

    @property
    def described(self) -> str:
        """Description of the saved state."""
        return f"GPT-2 of {self.parameters / 1e6:.0f} million parameters with AdamW, {self.nbytes / 1e9:.2f} GB"

    def iterate(self, saver: Saver | None = None) -> None:
        """Enqueue the forward pass, the backward pass and an optimizer step."""
        tokens = torch.randint(_VOCABULARY, (self.shape.batch, self.shape.context), device=self.device)
        self._optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._model(tokens, labels=tokens).loss
        loss.backward()
        if saver is not None:
            saver.before_optimizer()
        self._optimizer.step()

    def train(self, iterations: int, saver: Saver | None = None, step: int = 0) -> list[float]:
        """Return the seconds of each iteration. With ``saver``, the first one begins with a checkpoint of ``step``."""
        for _ in range(_LEAD):
            self.iterate()
        marks = [_Mark(self.device)]
        for number in range(iterations):
            if saver is not None and number == 0:
                saver.save(step)
            self.iterate(saver)
            marks.append(_Mark(self.device))
        return [after.seconds_after(before) for before, after in pairwise(marks)]
