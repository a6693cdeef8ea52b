"""``models``: real trainings of six models, under every checkpoint scheme and at several intervals.

Run each cell in a separate process. The model trains without checkpoints, then with checkpoints, then once more until
SIGKILL ends the process in the middle of the loop. Another process resumes from the surviving files. The resumed state
is compared, bit for bit, with the state of the killed process after that step.

The whole grid takes many hours. ``--cells FILE`` keeps each finished cell, and a later run continues there. Ctrl-C ends
a run early, with a report of the finished cells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks import environment, models_child, peers
from benchmarks.models_child import Cell, Measured, Recovered
from benchmarks.report import Report, Row, row
from benchmarks.schemes import SCHEMES
from benchmarks.zoo import MODELS, SizeName

_TIMEOUT_S = 900
OURS = "asymcheck +S+O"
_KILL = 0
"""Stands for the interval in the cell of a recovery after a kill."""
_RATIOS = {
    "stall_p95/best_peer_every_10": "visible stall p95, {}, every 10",
    "slowdown/best_peer_every_10": "slowdown, {}, every 10",
    "durable/best_peer": "time to durable, {}, every 10",
    "recovery/best_peer": "recovery, {}",
    "bytes/best_lossless": "bytes a checkpoint, {}, every 10",
}
"""Ratios and the metrics that they compare with the best library, by model."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Models, schemes and intervals of the grid."""

    models: Sequence[str]
    """Names of models."""
    size: SizeName
    """Size of all models."""
    steps: Mapping[int, int]
    """Number of steps in each round, by checkpoint interval in steps, the most important first."""
    schemes: Sequence[str]
    """Names of schemes."""
    kills: int = 1
    """Number of kills for each model and scheme."""

    def cells(self) -> Iterator[Cell]:
        """Yield all cells, the most important first, so that an unfinished run is useful.

        The first interval and the kills come first: some schemes with all models, then the others with one model. Then
        some schemes with one model at the other intervals, then all the rest.
        """
        main, *others = self.steps
        first = [scheme for scheme in self.schemes if scheme in _FIRST]
        groups = (
            (first, self.models, [main, _KILL]),
            (self.schemes, self.models[:1], [main, _KILL]),
            (first, self.models[:1], others),
            (self.schemes, self.models, [main, _KILL, *others]),
        )
        yield from dict.fromkeys(
            Cell(model, self.size, scheme, every, self.steps.get(every, self.kills))
            for schemes, models, intervals in groups
            for scheme in schemes
            for model in models
            for every in intervals
        )


_FIRST = ("asymcheck +S+O", "safetensors", "torch DCP async process", "torch DCP async staged", "torchsnapshot async")
"""Schemes whose cells are measured before all others, the fastest libraries first."""
_ALL = (*_FIRST, *(scheme.name for scheme in SCHEMES if scheme.name not in _FIRST))
FULL = Grid(MODELS, "real", {10: 20, 1: 6, 50: 50}, _ALL, kills=2)
QUICK = Grid(MODELS, "tiny", {10: 20, 1: 10, 50: 50}, _ALL, kills=3)


def run(
    folder: Path | None, *, quick: bool, grid: Grid | None = None, cells: Path | None = None, model: str | None = None
) -> Report:
    """Measure in a temporary folder inside ``folder``, all models or one of them.

    Continue with the finished cells in the file ``cells``.
    """
    grid = _runnable(grid or (QUICK if quick else FULL))
    if model is not None:
        if model not in MODELS:
            raise SystemExit(f"--model {model}: give one of {', '.join(MODELS)}")
        grid = dataclasses.replace(grid, models=[model])
    finished = _Finished(cells)
    # Fork from a process that has imported all libraries and started no thread, so that no cell imports them again.
    context = multiprocessing.get_context("forkserver")
    # Missing libraries are skipped. This setting hides the warning of DeepSpeed about a missing GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context.set_forkserver_preload([models_child.__name__, "benchmarks.deepspeed_engines"])
    planned = list(grid.cells())
    with tempfile.TemporaryDirectory(dir=folder) as scratch, contextlib.suppress(KeyboardInterrupt):
        for number, cell in enumerate(planned):
            if cell not in finished.rows:
                began = time.monotonic()
                finished.add(cell, *_measured_cell(context, cell, Path(scratch)))
                print(f"{number + 1} of {len(planned)}: {cell}, {time.monotonic() - began:.0f} s", flush=True)
    described = environment.describe(folder or Path(tempfile.gettempdir()))
    described["state"] = "; ".join(dict.fromkeys(filter(None, finished.states.values())))
    found = [cell for cell in planned if cell in finished.rows]
    if len(found) < len(planned):
        described["skipped"] = f"{len(planned) - len(found)} of {len(planned)} cells, which are not measured yet"
    results = [one for cell in found for one in finished.rows[cell]]
    return Report("models", described, results, _ratios(grid, results))


class _Finished:
    """Finished cells, also in a file with a line of JSON for each, if one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[Cell, list[Row]] = {}
        self.states: dict[Cell, str] = {}
        """Size of the model of each cell, in words."""
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                one = json.loads(line)
                self._keep(Cell(**one["cell"]), [Row(**item) for item in one["rows"]], one["state"])

    def _keep(self, cell: Cell, rows: list[Row], state: str) -> None:
        self.rows[cell], self.states[cell] = rows, state

    def add(self, cell: Cell, rows: list[Row], state: str) -> None:
        self._keep(cell, rows, state)
        if self._path is not None:
            where = environment.describe(self._path.parent)
            line = {
                "cell": dataclasses.asdict(cell),
                "state": state,
                **{name: where[name] for name in ("date", "asymcheck", "processor")},
                "rows": [dataclasses.asdict(one) for one in rows],
            }
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _measured_cell(context: ForkServerContext, cell: Cell, scratch: Path) -> tuple[list[Row], str]:
    """Return the rows of a cell, and the size of its model in words, if it was measured.

    A library that fails has no rows. A failure of asymcheck ends the run.
    """
    try:
        return _tried(context, cell, scratch)
    except _CellError as error:
        if cell.scheme.startswith("asymcheck"):
            raise SystemExit(str(error)) from error
        print(error, flush=True)
        return [], ""


class _CellError(Exception):
    """A process of a cell failed or did not answer."""


def _tried(context: ForkServerContext, cell: Cell, scratch: Path) -> tuple[list[Row], str]:
    if cell.every != _KILL:
        measured = _measured(context, cell, scratch)
        size = f"{cell.model} {measured.parameters / 1e6:.1f} M, {measured.state_bytes / 1e6:.0f} MB"
        return _rows(cell, measured), size
    killed = dataclasses.replace(cell, every=2, steps=10**6)
    return _recovery_rows(cell, [_killed(context, killed, scratch, number) for number in range(cell.steps)]), ""


def _runnable(grid: Grid) -> Grid:
    """Return the grid without the schemes that cannot run on this machine, and report these schemes."""
    lacks = {scheme.name: scheme.missing() for scheme in SCHEMES}
    for name, missing in lacks.items():
        if missing is not None:
            print(f"left out: {name} ({missing})", flush=True)
    return dataclasses.replace(grid, schemes=[name for name in grid.schemes if lacks[name] is None])


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _rows(cell: Cell, measured: Measured) -> list[Row]:
    """Return the measurements of one cell."""
    label = f"{cell.model}, every {cell.every}"
    rows = [
        row(cell.scheme, f"slowdown, {label}", "x", measured.slowdowns),
        row(cell.scheme, f"visible stall, {label}", "ms", [one * 1e3 for one in measured.stalls]),
        row(
            cell.scheme, f"visible stall of the first two, {label}", "ms", [one * 1e3 for one in measured.first_stalls]
        ),
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


def _recovery_rows(cell: Cell, recovered: Sequence[tuple[int, Recovered]]) -> list[Row]:
    lost = [reached - found.step for reached, found in recovered]
    make = functools.partial(row, cell.scheme)
    rows = [
        make(f"steps lost, {cell.model}", "steps", [float(one) for one in lost]),
        make(f"bit-exact, {cell.model}", "share", [float(found.is_exact) for _, found in recovered]),
    ]
    # A kill during a save may leave no readable checkpoint, and then there is no recovery to measure.
    if restored := [found for _, found in recovered if found.step >= 0]:
        rows += [
            make(f"recovery, {cell.model}", "ms", [found.recover_s * 1e3 for found in restored]),
            make(f"first step after it, {cell.model}", "ms", [found.first_step_s * 1e3 for found in restored]),
        ]
    return rows


def _measured(context: ForkServerContext, cell: Cell, scratch: Path) -> Measured:
    where = scratch / "cell"
    where.mkdir()
    os.sync()
    with _removed(where):
        measured = _asked(context, models_child.measure, (cell, where))
    if not isinstance(measured, Measured):
        raise _CellError(f"{cell}: {measured}")
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
        if not ours.poll(_TIMEOUT_S):
            return "no answer in time"
        answer: object = ours.recv()
        process.join(_TIMEOUT_S)
    except EOFError:
        process.join(_TIMEOUT_S)
        answer = f"ended with status {process.exitcode}"
    finally:
        # Without an answer, or after Ctrl-C, it would go on in the folder of its cell.
        process.kill()
        process.join()
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
        try:
            digests = _reached(ours, 7 + 3 * number)
            with _ended(_children_of(process.pid)):
                time.sleep(random.random() * statistics.fmean(digests.durations))
                process.kill()
                process.join()
                digests.drain(ours)
                recovered = _asked(context, models_child.recover, (cell, where, digests.by_step))
        finally:
            process.kill()
            process.join()
    if not isinstance(recovered, Recovered):
        raise _CellError(f"{cell}: {recovered}")
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
            raise _CellError("the training that was to be killed stopped reporting steps")
        try:
            digests.note(pipe.recv())
        except EOFError as error:
            raise _CellError("the training that was to be killed ended early") from error
    return digests


def _ratios(grid: Grid, results: Sequence[Row]) -> dict[str, float]:
    """Return the worst ratios of all models that asymcheck and a library have finished."""
    medians = {(one.system, one.metric): one.median for one in results}
    upstream = {scheme.name for scheme in SCHEMES if scheme.kind == "upstream"}
    ratios: dict[str, float] = {}
    for model in grid.models:
        exact = {name for name in upstream if medians.get((name, f"bit-exact, {model}"), 1.0) == 1.0}
        found = {every: medians.get((OURS, f"slowdown, {model}, every {every}")) for every in grid.steps}
        _raise(ratios, {f"slowdown_every_{every}": value for every, value in found.items() if value is not None})
        for name, metric in _RATIOS.items():
            mine = medians.get((OURS, metric.format(model)))
            others = [medians[peer, metric.format(model)] for peer in exact if (peer, metric.format(model)) in medians]
            if mine is not None and others:
                _raise(ratios, {name: mine / min(others)})
    return ratios


def _raise(ratios: dict[str, float], found: Mapping[str, float]) -> None:
    for name, value in found.items():
        ratios[name] = max(value, ratios.get(name, 0.0))
