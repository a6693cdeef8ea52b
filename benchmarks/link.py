"""``link``: what the schedules are worth while the link to host memory is the bottleneck.

Train a GPT-2 with AdamW on half of the cores, with a checkpoint at every third step. All copies of a capture pass
through a paced link, which carries one piece at a time and sleeps for the time that the piece takes at a limited
bandwidth. The *load* is the time to copy the state over the link, divided by the time of an iteration. In the second
part, the training uses the link itself: each block of the model transfers data before its forward and before its
backward, together for a quarter of the iteration, as if its weights were gathered or loaded.

The schedules differ in when partitions are released: inside ``step()`` (eager), all when ``step()`` returns
(immediate), evenly over the windows of the iteration (symmetric), or in proportion to their length (asymmetric).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

from asymcheck.capture import engine
from asymcheck.capture.device_copy import Transfers
from asymcheck.capture.schedule import blocks_of
from asymcheck.state.leaves import Leaf, copy_partition
from asymcheck.state.partition_plan import Partition
from benchmarks import environment, peers
from benchmarks.async_peers import Ours, Saver, Schedule, process_group
from benchmarks.report import Report, Row, rotated, row
from benchmarks.stall import Loop

SCHEDULES: tuple[Schedule, ...] = ("immediate", "asymmetric", "symmetric", "eager")
PARTS = ("link of its own", "link shared with the training")
_EVERY = 3
_PROFILED = 8
"""Checkpoints before the measured ones: the plan needs the profile of some iterations."""
_SHARE = 0.25
"""Share of an iteration for which the training uses a shared link."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model, loads and number of measured checkpoints."""

    layers: int
    width: int
    loads: tuple[float, ...]
    checkpoints: int


FULL = Shape(6, 512, (0.5, 1.0, 2.0), 6)
QUICK = Shape(2, 128, (0.5, 1.5), 2)


def run(folder: Path | None, *, quick: bool, shape: Shape | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``shape`` replaces model and loads."""
    shape = shape or (QUICK if quick else FULL)
    threads = torch.get_num_threads()
    # Leave one core to the copies, because real machines have more cores than a training uses.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch, process_group():
            loop = Loop(shape.layers, shape.width)
            results = [one for part in PARTS for one in _part(loop, part, shape, Path(scratch))]
            described = environment.describe(folder or Path(scratch))
    finally:
        torch.set_num_threads(threads)
    described["state"] = loop.described
    return Report("link", described, results, _ratios(results, shape))


def _ratios(results: Sequence[Row], shape: Shape) -> dict[str, float]:
    """Compare the default with the others, at the load at which it does worst."""
    slowdowns = {(one.system, one.metric): one.median for one in results}
    ratios = {}
    for part, suffix in zip(PARTS, ("", "_shared"), strict=True):
        for other in SCHEDULES[1:]:
            worst = max(
                slowdowns[SCHEDULES[0], metric_of(part, load)] / slowdowns[other, metric_of(part, load)]
                for load in shape.loads
            )
            ratios[f"{SCHEDULES[0]}/{other}{suffix}"] = worst
    return ratios


def metric_of(part: str, load: float) -> str:
    """Return the name of the slowdown at a load."""
    return f"slowdown, {part}, load {load:g}"


class PacedLink:
    """Carries one piece at a time, at a limited bandwidth."""

    def __init__(self, bytes_per_s: float) -> None:
        """Carry ``bytes_per_s`` bytes a second."""
        self._bytes_per_s = bytes_per_s
        self._busy = threading.Lock()

    def carry(self, length: float) -> None:
        """Wait for the link, and for the transfer of ``length`` bytes."""
        with self._busy:
            time.sleep(length / self._bytes_per_s)

    @contextlib.contextmanager
    def for_captures(self) -> Iterator[None]:
        """Let all copies of captures pass through the link."""
        copy = Transfers.copy

        def copy_eager(partition: Partition, leaves: Sequence[Leaf], payload: memoryview) -> None:
            self.carry(len(payload))
            copy_partition(partition, leaves, payload)

        def copy_later(transfers: Transfers, number: int, payload: memoryview) -> None:
            self.carry(len(payload))
            copy(transfers, number, payload)

        with (
            mock.patch.object(engine, "copy_partition", copy_eager),
            mock.patch.object(Transfers, "copy", copy_later),
        ):
            yield

    @contextlib.contextmanager
    def for_training(self, model: torch.nn.Module, length: float) -> Iterator[None]:
        """Carry ``length`` bytes in each iteration, in equal parts before forward and backward of each block."""
        blocks = blocks_of(model)
        part = length / (2 * len(blocks))
        handles = [
            handle
            for block in blocks
            for handle in (
                block.register_forward_pre_hook(lambda *_: self.carry(part)),
                block.register_full_backward_pre_hook(lambda *_: self.carry(part)),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _part(loop: Loop, part: str, shape: Shape, scratch: Path) -> Iterator[Row]:
    plain_s = statistics.median(_times(loop, Saver(loop.state, scratch), 4 * _EVERY))
    for number, load in enumerate(shape.loads):
        link = PacedLink(loop.nbytes / (load * plain_s))
        used = loop.nbytes / load * _SHARE if part == PARTS[1] else 0
        with link.for_training(loop.model, used) if used else contextlib.nullcontext():
            for schedule in rotated(SCHEDULES, number):
                before = _times(loop, Saver(loop.state, scratch), 2 * _EVERY)
                with link.for_captures():
                    stalls, seconds = _trained(loop, schedule, shape, scratch / "store")
                plain = statistics.median([*before, *_times(loop, Saver(loop.state, scratch), 2 * _EVERY)])
                slowdowns = [one / plain for one in seconds]
                print(f"{part}, load {load:g}, {schedule}: slowdown {statistics.median(slowdowns):.3f}", flush=True)
                yield row(schedule, metric_of(part, load), "x", slowdowns)
                yield row(schedule, f"visible stall, {part}, load {load:g}", "ms", [one * 1e3 for one in stalls])


def _times(loop: Loop, saver: Saver, steps: int) -> list[float]:
    """Return the seconds of each of ``steps`` iterations, with a checkpoint at every third."""
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        if step % _EVERY == 0:
            saver.save(step)
        loop.iterate(saver)
        seconds.append(time.perf_counter() - began)
    return seconds


def _trained(loop: Loop, schedule: Schedule, shape: Shape, where: Path) -> tuple[list[float], list[float]]:
    """Train with checkpoints; return their stalls, and the seconds of the iterations that begin with one."""
    where.mkdir()
    saver = Ours(loop.state, where, schedule)
    try:
        seconds = _times(loop, saver, _EVERY * (_PROFILED + shape.checkpoints))
    finally:
        saver.finish()
        peers.remove(where)
    return saver.stalls[_PROFILED:], seconds[::_EVERY][_PROFILED:]
