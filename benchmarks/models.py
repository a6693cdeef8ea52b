"""``models``: real trainings of six models, under every checkpoint scheme and at several intervals.

Run each cell in a separate process. The model trains without checkpoints, then with checkpoints, then once more until
SIGKILL ends the process in the middle of the loop. Another process resumes from the surviving files. The resumed state
is compared, bit for bit, with the state of the killed process after that step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks import environment, models_child, peers
from benchmarks.models_child import Cell, Measured, Recovered
from benchmarks.report import Report, Row, row
from benchmarks.schemes import NONE, SCHEMES, Scheme
from benchmarks.zoo import MODELS

_TIMEOUT_S = 600
OURS = "asymcheck +S+O"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Models, schemes and intervals of the grid."""

    models: Sequence[str]
    """Names of models."""
    size: str
    """Size of all models, a key of :mod:`benchmarks.zoo`."""
    steps: dict[int, int]
    """Number of steps in each round, by checkpoint interval in steps."""
    schemes: Sequence[str]
    """Names of schemes."""
    kills: int = 1
    """Number of kills of each cell."""


_ALL = tuple(scheme.name for scheme in SCHEMES)
FULL = Grid(MODELS, "base", {1: 10, 10: 30, 25: 50, 50: 100, 100: 200}, _ALL, kills=3)
QUICK = Grid(MODELS, "tiny", {1: 10, 10: 20, 50: 50}, _ALL, kills=3)


def run(folder: Path | None, *, quick: bool, grid: Grid | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``."""
    grid = _runnable(grid or (QUICK if quick else FULL))
    chosen = [scheme for scheme in SCHEMES if scheme.name in grid.schemes]
    # Fork from a process that has imported all libraries and started no thread, so that no cell imports them again.
    context = multiprocessing.get_context("forkserver")
    # Missing libraries are skipped. This setting hides the warning of DeepSpeed about a missing GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context.set_forkserver_preload([models_child.__name__, "benchmarks.deepspeed_engines"])
    results: list[Row] = []
    slow: dict[tuple[str, str, int], float] = {}
    stall: dict[tuple[str, str, int], float] = {}
    sizes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for model in grid.models:
            for scheme in chosen:
                for every, steps in grid.steps.items():
                    cell = Cell(model, grid.size, scheme.name, every, steps)
                    measured = _measured(context, cell, Path(scratch))
                    sizes[model] = f"{model} {measured.parameters / 1e6:.1f} M, {measured.state_bytes / 1e6:.0f} MB"
                    results += _rows(cell, measured)
                    slow[scheme.name, model, every] = statistics.median(measured.slowdowns)
                    stall[scheme.name, model, every] = _p95(measured.stalls)
                recovered = [
                    _killed(context, Cell(model, grid.size, scheme.name, min(grid.steps), 10**6), Path(scratch), number)
                    for number in range(grid.kills)
                ]
                results += _recovery_rows(model, scheme, recovered)
                print(f"{model}, {scheme.name}: done", flush=True)
        described = environment.describe(Path(scratch))
    described["state"] = "; ".join(sizes.values())
    return Report("models", described, results, _ratios(grid, slow, stall))


def _runnable(grid: Grid) -> Grid:
    """Return the grid without the schemes that cannot run on this machine, and report these schemes."""
    lacks = {scheme.name: scheme.missing() for scheme in SCHEMES if scheme.name in grid.schemes}
    for name, missing in lacks.items():
        if missing is not None:
            print(f"left out: {name} ({missing})", flush=True)
    return dataclasses.replace(grid, schemes=[name for name, missing in lacks.items() if missing is None])


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _rows(cell: Cell, measured: Measured) -> list[Row]:
    """Return the measurements of one cell."""
    label = f"{cell.model}, every {cell.every}"
    rows = [
        row(cell.scheme, f"slowdown, {label}", "x", measured.slowdowns),
        row(cell.scheme, f"visible stall, {label}", "ms", [one * 1e3 for one in measured.stalls]),
        row(cell.scheme, f"visible stall p95, {label}", "ms", [_p95(measured.stalls) * 1e3]),
        row(cell.scheme, f"iteration, {label}", "ms", [measured.plain_s * 1e3]),
        row(cell.scheme, f"bytes a checkpoint, {label}", "MB", [measured.bytes_a_checkpoint / 1e6]),
        row(cell.scheme, f"peak memory, {label}", "x state", [measured.peak_bytes / measured.state_bytes]),
        row(cell.scheme, f"processor, {label}", "s/GB", [measured.processor_s_per_gb]),
    ]
    if measured.durable:
        rows.append(row(cell.scheme, f"time to durable, {label}", "ms", [one * 1e3 for one in measured.durable]))
    if measured.errors:
        rows.append(row(cell.scheme, f"error, {label}", "share", measured.errors))
    return rows


def _recovery_rows(model: str, scheme: Scheme, recovered: Sequence[tuple[int, Recovered]]) -> list[Row]:
    lost = [reached - found.step for reached, found in recovered]
    return [
        row(scheme.name, f"steps lost, {model}", "steps", [float(one) for one in lost]),
        row(scheme.name, f"recovery, {model}", "ms", [found.recover_s * 1e3 for _, found in recovered]),
        row(scheme.name, f"first step after it, {model}", "ms", [found.first_step_s * 1e3 for _, found in recovered]),
        row(scheme.name, f"bit-exact, {model}", "share", [float(found.is_exact) for _, found in recovered]),
    ]


def _measured(context: ForkServerContext, cell: Cell, scratch: Path) -> Measured:
    where = scratch / "cell"
    where.mkdir()
    os.sync()
    with _removed(where):
        measured = _asked(context, models_child.measure, (cell, where))
    if not isinstance(measured, Measured):
        raise SystemExit(f"{cell}: {measured}")
    return measured


@contextlib.contextmanager
def _removed(where: Path) -> Iterator[None]:
    """Remove a cell's folder at the end, and its rings."""
    rings = models_child.ring_folder(where)
    try:
        yield
    finally:
        peers.remove(where)
        peers.remove(rings)


def _asked(context: ForkServerContext, work: Any, arguments: tuple[object, ...]) -> object:  # noqa: ANN401 - a function
    """Run ``work`` in a separate process; return the value that it sends."""
    ours, child_end = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*arguments, child_end))
    process.start()
    child_end.close()
    try:
        answer: object = ours.recv() if ours.poll(_TIMEOUT_S) else "no answer in time"
    except EOFError:
        answer = f"ended with status {process.exitcode}"
    process.join(_TIMEOUT_S)
    return answer


def _killed(context: ForkServerContext, cell: Cell, scratch: Path, number: int) -> tuple[int, Recovered]:
    """Train until some steps are done, kill in the middle of the next; return the last step and the resumed state."""
    where = scratch / "killed"
    where.mkdir()
    with _removed(where):
        ours, child_end = context.Pipe(duplex=False)
        process = context.Process(target=models_child.train_until_killed, args=(cell, where, child_end))
        process.start()
        child_end.close()
        digests = _reached(ours, 12 + 3 * number)
        with _ended(_children_of(process.pid)):
            time.sleep(random.random() * statistics.fmean(digests.durations))
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            digests.drain(ours)
            recovered = _asked(context, models_child.recover, (cell, where, digests.by_step))
    if not isinstance(recovered, Recovered):
        raise SystemExit(f"{cell}: {recovered}")
    return max(digests.by_step), recovered


def _children_of(pid: int | None) -> list[int]:
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


@contextlib.contextmanager
def _ended(children: Sequence[int]) -> Iterator[None]:
    """Kill these processes at the end: a background writer may wait forever for a dead training."""
    handles = [os.pidfd_open(pid) for pid in children]
    try:
        yield
    finally:
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


class _Digests:
    """Digests of the state after each step, as reported by a training."""

    def __init__(self) -> None:
        self.by_step: dict[int, bytes] = {}
        self.durations: list[float] = []

    def note(self, report: tuple[int, bytes, float]) -> None:
        step, digest, seconds = report
        self.by_step[step] = digest
        self.durations.append(seconds)

    def drain(self, pipe: Connection) -> None:
        """Return the values that the process had sent when it was killed."""
        try:
            while pipe.poll(0):
                self.note(pipe.recv())
        except EOFError:
            return


def _reached(pipe: Connection, steps: int) -> _Digests:
    digests = _Digests()
    while len(digests.by_step) < steps:
        if not pipe.poll(_TIMEOUT_S):
            raise SystemExit("the training that was to be killed stopped reporting steps")
        digests.note(pipe.recv())
    return digests


def _ratios(
    grid: Grid, slow: dict[tuple[str, str, int], float], stall: dict[tuple[str, str, int], float]
) -> dict[str, float]:
    """Return slowdowns of asymcheck, and its stall relative to the best library that keeps the state exact."""
    kinds = {scheme.name: scheme.kind for scheme in (*SCHEMES, NONE)}
    rivals = [name for name in grid.schemes if kinds[name] == "upstream"]
    ratios = {}
    for every in grid.steps:
        slowdowns = [slow[OURS, model, every] for model in grid.models]
        ratios[f"slowdown_every_{every}"] = statistics.median(slowdowns)
        if rivals:
            best = [min(stall[name, model, every] for name in rivals) for model in grid.models]
            ours = [stall[OURS, model, every] for model in grid.models]
            ratios[f"stall_p95/best_peer_every_{every}"] = statistics.median(
                mine / other for mine, other in zip(ours, best, strict=True)
            )
    return ratios
