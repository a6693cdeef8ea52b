"""Run one cell of ``models`` in a separate process: a training with checkpoints, and its recovery after a kill.

The modules of all libraries are imported before a process is forked. asymcheck would import its own ones at first use.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import asymcheck.checkpointer  # noqa: F401 - imported before processes are forked
from asymcheck.format.digest import digest
from benchmarks import peers, states
from benchmarks.async_peers import SETTLING, Saver, flat_tensors, process_group, train, untimed
from benchmarks.resident import peak_since, reset_peak
from benchmarks.schemes import NONE, SCHEMES, Scheme
from benchmarks.zoo import SizeName, Training

_WARM_UP = 3
_PLAIN_STEPS = 10
_ROUNDS = 2
_RING_FOLDER = "ASYMCHECK_RING_FOLDER"


@dataclasses.dataclass(frozen=True)
class Cell:
    """Task of one process."""

    model: str
    size: SizeName
    scheme: str
    every: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """Costs of checkpoints for one training."""

    parameters: int
    state_bytes: int
    plain_s: float
    """Mean seconds of an iteration without checkpoints, measured before, between and after the rounds."""
    slowdowns: list[float]
    """Slowdown of each round, relative to the iterations without checkpoints before and after it."""
    first_stalls: list[float]
    """Stalls of the untimed checkpoints."""
    stalls: list[float]
    durable: list[float]
    errors: list[float]
    bytes_a_checkpoint: float
    peak_bytes: int
    """Peak resident memory, including shared memory, minus the peak of the plain training."""
    processor_s_per_gb: float
    """Processor seconds beyond the plain training, for each GB of saved state."""


@dataclasses.dataclass(frozen=True)
class Recovered:
    """Recovery in a new process."""

    step: int
    """Step of the restored state; -1 for none."""
    recover_s: float
    """Seconds from the call until the state is restored."""
    first_step_s: float
    """Seconds of the first training step after the recovery."""
    is_exact: bool
    """Whether the restored state equals, bit for bit, the state of the killed training after that step."""


def scheme_of(cell: Cell) -> Scheme:
    """Return the scheme of a cell."""
    return next(scheme for scheme in (*SCHEMES, NONE) if scheme.name == cell.scheme)


def measure(cell: Cell, where: Path, pipe: Connection) -> None:
    """Train without and with checkpoints; send a :class:`Measured`, or the text of the error."""
    _answer(pipe, lambda: _measure(cell, where))


def recover(cell: Cell, where: Path, digests: dict[int, bytes], pipe: Connection) -> None:
    """Resume; send a :class:`Recovered`, or the text of the error."""
    _answer(pipe, lambda: _recover(cell, where, digests))


def _answer(pipe: Connection, work: Callable[[], object]) -> None:
    _be_silent()
    try:
        answer = work()
    except Exception as error:  # noqa: BLE001 - the parent prints it
        answer = f"{type(error).__name__}: {error}"
    pipe.send(answer)
    pipe.close()


def _be_silent() -> None:
    """Hide the terminal output of libraries and of the processes that they start."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _measure(cell: Cell, where: Path) -> Measured:
    _keep_rings_in(where)
    training = _warm(cell)
    with process_group():
        plain = _Plain(training, where)
        before = reset_peak()
        rounds = [_round(cell, training, where / str(number), plain) for number in range(_ROUNDS)]
        peak = peak_since(before)
    state_bytes = sum(tensor.nbytes for tensor in states.unique(flat_tensors(training.state)).values())
    steps, count = untimed(cell.every) + cell.steps, SETTLING + len(range(0, cell.steps, cell.every))
    spent_s = statistics.mean(one.processor_s for one in rounds) - plain.processor_s * steps
    return Measured(
        parameters=training.parameters,
        state_bytes=state_bytes,
        plain_s=statistics.mean(plain.means),
        slowdowns=[one.slowdown for one in rounds],
        first_stalls=[stall for one in rounds for stall in one.saver.stalls[:SETTLING]],
        stalls=[stall for one in rounds for stall in one.saver.stalls[SETTLING:]],
        durable=[seconds for one in rounds for seconds in one.saver.durable],
        errors=[error for one in rounds for error in one.saver.errors],
        # A scheme that keeps only the newest checkpoints has fewer files than checkpoints.
        bytes_a_checkpoint=statistics.mean(
            one.file_bytes / max(1, min(count, one.kept_count or count)) for one in rounds
        ),
        peak_bytes=peak,
        processor_s_per_gb=max(0.0, spent_s) / (count * state_bytes / 1e9),
    )


class _Plain:
    """Repeated measurements of the training without checkpoints, because the speed of machines varies."""

    def __init__(self, training: Training, where: Path) -> None:
        """Train a first time."""
        self._saver = NONE.make(training.state, where)
        self._training = training
        self.means = [self._train()]
        """Mean seconds of an iteration, for each measurement."""
        used = time.process_time()
        self.measure_again()
        self.processor_s = (time.process_time() - used) / _PLAIN_STEPS
        """Processor seconds of an iteration."""

    def _train(self) -> float:
        return train(self._training.iterate, self._saver, 0, _PLAIN_STEPS)

    def measure_again(self) -> float:
        """Train once more; return the mean of this measurement and the previous one."""
        self.means.append(self._train())
        return statistics.mean(self.means[-2:])


@dataclasses.dataclass(frozen=True)
class _Round:
    """One round of a scheme, in an empty folder."""

    saver: Saver
    slowdown: float
    """Compare with the plain training before and after the round."""
    processor_s: float
    file_bytes: int
    kept_count: int | None
    """Number of checkpoints that are kept; None for all."""


def _round(cell: Cell, training: Training, where: Path, plain: _Plain) -> _Round:
    where.mkdir()
    used = _processor_s()
    saver = scheme_of(cell).make(training.state, where)
    with_s = train(lambda step: training.iterate(step, saver.before_optimizer), saver, cell.every, cell.steps)
    saver.finish()
    used = _processor_s() - used
    files = sum(path.stat().st_blocks * 512 for path in peers.files_in(where))
    kept_count = _kept_count(where)
    peers.remove(where)
    return _Round(saver, with_s / plain.measure_again(), used, files, kept_count)


def ring_folder(where: Path) -> Path:
    """Return the folder of a cell's rings: in memory, and removable together with the cell."""
    return Path("/dev/shm") / f"asymcheck-benchmark-{where.stat().st_ino}"


def _keep_rings_in(where: Path) -> None:
    folder = ring_folder(where)
    folder.mkdir(exist_ok=True)
    os.environ[_RING_FOLDER] = str(folder)


def _kept_count(where: Path) -> int | None:
    """Return the number of checkpoints that an overwriting scheme keeps: one, or one per slot; None for others."""
    names = [path.name for path in where.iterdir()]
    if "checkpoint.pt" in names:
        return 1
    slots = [name for name in names if name.startswith("slot-")]
    return len(slots) or None


def _warm(cell: Cell) -> Training:
    # Leave one core to background work, because real machines have more cores than a training uses.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    training = Training(cell.model, cell.size)
    for step in range(_WARM_UP):
        training.iterate(step)
    return training


def train_until_killed(cell: Cell, where: Path, pipe: Connection) -> None:
    """Train until killed; send the digest of the state after each step, and the time between steps."""
    _be_silent()
    _keep_rings_in(where)
    training = _warm(cell)
    with process_group():
        saver = scheme_of(cell).make(training.state, where)
        began = time.perf_counter()
        for step in range(cell.steps):
            training.iterate(step, saver.before_optimizer)
            # Send the digest before the call, so that every resumable step is known, whenever the kill happens.
            pipe.send((step, state_digest(training), time.perf_counter() - began))
            began = time.perf_counter()
            if step % cell.every == 0:
                saver.save(step)


def state_digest(training: Training) -> bytes:
    """Return one digest of all tensors of a state."""
    parts = [
        digest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        for tensor in flat_tensors(training.state).values()
    ]
    return digest(b"".join(parts))


def _recover(cell: Cell, where: Path, digests: dict[int, bytes]) -> Recovered:
    _keep_rings_in(where)
    scheme = scheme_of(cell)
    training = _warm(cell)
    with process_group():
        began = time.perf_counter()
        step = _step_of(scheme, training, where)
        recovered_s = time.perf_counter() - began
        is_exact = step >= 0 and digests.get(step) == state_digest(training)
        began = time.perf_counter()
        training.iterate(step + 1)
        first_s = time.perf_counter() - began
    return Recovered(step, recovered_s, first_s, is_exact)


def _step_of(scheme: Scheme, training: Training, where: Path) -> int:
    """Return the restored step of a scheme, or -1."""
    try:
        return -1 if scheme.recover is None else scheme.recover(training.state, where)
    except Exception:
        # An unreadable checkpoint after a kill is a result for peers, but a defect of asymcheck.
        if scheme.kind == "asymcheck":
            raise
        return -1


def _processor_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
