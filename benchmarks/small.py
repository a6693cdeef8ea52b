"""``small``: a state of 5 MB, for which fixed costs dominate: time until it is durable, and time to recover it.

The model really trains, so that every checkpoint differs. *Save* is a call of ``Store.save``. *Step and wait* is
``Checkpointer.step`` followed by ``wait``. torch.save writes to a temporary file, syncs it, renames it and syncs the
directory. Recovery is measured in a new process that has imported its libraries and created model and optimizer.
``Checkpointer.restore``, which also opens a new generation durably, is compared with ``torch.load`` and
``load_state_dict``. The files are in the page cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import asymcheck
from benchmarks import environment, peers
from benchmarks.report import Report, rotated, row

SAVE, STEP, PEER = "asymcheck save", "asymcheck step and wait", "torch.save"
_RUN = "steps"


def run(folder: Path | None, *, quick: bool, width: int = 128) -> Report:
    """Measure in a temporary folder inside ``folder``; ``width`` is the width of a transformer of two layers."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        trained = _Trained(width)
        durable = _durable(trained, work, rounds=5 if quick else 30)
        recovery = _recovery(width, work, rounds=2 if quick else 7)
        described = environment.describe(work)
    described["state"] = f"a transformer of two layers and width {width} with AdamW, {trained.nbytes / 1e6:.1f} MB"
    results = [row(name, "time to durable", "ms", [1e3 * one for one in values]) for name, values in durable.items()]
    results += [row(name, "recovery", "ms", [1e3 * one for one in values]) for name, values in recovery.items()]
    times = {name: statistics.median(values) for name, values in durable.items()}
    recovery_s = {name: statistics.median(values) for name, values in recovery.items()}
    ratios = {
        "durable/torch_save": times[SAVE] / times[PEER],
        "durable_step/torch_save": times[STEP] / times[PEER],
        "recovery/torch_load": recovery_s["asymcheck"] / recovery_s[PEER],
    }
    return Report("small", described, results, ratios)


class _Trained:
    """A model with its optimizer."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._batch = torch.randn(2, 8, width)
        self.iterate()

    @property
    def state(self) -> dict[str, object]:
        """Saved state."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        moments = [tensor for entry in self.optimizer.state.values() for tensor in entry.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *moments])

    def iterate(self) -> None:
        """Train for one iteration: every tensor changes."""
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()

    def dicts(self) -> dict[str, object]:
        """Return the input of torch.save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def _durable(trained: _Trained, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each system's saves. The first three rounds are a warm-up."""
    times: dict[str, list[float]] = {}
    keep = asymcheck.Retention(keep_last=2)
    with (
        asymcheck.Store.open(folder / "store", create=True) as store,
        asymcheck.Checkpointer(store, trained.state, run=_RUN, every=1, keep=keep) as checkpointer,
    ):
        for number in range(rounds + 3):

            def save(step: int = number) -> None:
                store.save(trained.state, step=step)

            def step_and_wait(step: int = number) -> None:
                checkpointer.step(step)
                checkpointer.wait()

            systems: dict[str, Callable[[], None]] = {
                SAVE: save,
                STEP: step_and_wait,
                PEER: lambda: _torch_save(trained, folder / "theirs.pt"),
            }
            for name, call in rotated(list(systems.items()), number):
                trained.iterate()
                os.sync()
                began = time.perf_counter()
                call()
                if number >= 3:
                    times.setdefault(name, []).append(time.perf_counter() - began)
    return times


def _torch_save(trained: _Trained, path: Path) -> None:
    draft = path.with_suffix(".draft")
    torch.save(trained.dicts(), draft)
    peers.sync(draft)
    draft.rename(path)
    peers.sync(path)


def _recovery(width: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of recoveries in new processes."""
    times: dict[str, list[float]] = {}
    # Keep compiled modules, as in an installed package.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for number in range(rounds + 1):
        for name in rotated(["asymcheck", PEER], number):
            command = [sys.executable, "-m", "benchmarks.small", name, str(folder), str(width)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
            if number:
                times.setdefault(name, []).append(float(json.loads(done.stdout)))
    return times


def _recover(name: str, folder: Path, width: int) -> float:
    """Recover the state in this process; return the seconds."""
    trained = _Trained(width)
    if name == PEER:
        began = time.perf_counter()
        dicts = torch.load(folder / "theirs.pt", weights_only=True)
        trained.model.load_state_dict(dicts["model"])
        trained.optimizer.load_state_dict(dicts["optimizer"])
        return time.perf_counter() - began
    open_store, checkpointer_of = asymcheck.Store.open, asymcheck.Checkpointer
    began = time.perf_counter()
    with open_store(folder / "store") as store, checkpointer_of(store, trained.state, run=_RUN) as checkpointer:
        if checkpointer.restore() is None:
            raise RuntimeError(f"{folder / 'store'} has no checkpoint of run {_RUN}")
        return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(_recover(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
