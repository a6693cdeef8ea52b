"""``small``: a state of 5 MB, where fixed costs decide: until it is durable, and until a new process has it back.

The model really trains, so that every checkpoint is new. *Save* is a call of ``Store.save``. *Step and wait* is
``Checkpointer.step`` in the background, waited for at once. torch.save writes to a temporary file, syncs it, renames
it and syncs the directory. Recovery is measured in a new process that has imported its libraries and made model and
optimizer: ``Checkpointer.restore``, which also opens a new generation durably, beside ``torch.load`` and
``load_state_dict``. Files are in the page cache for both.
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

SAVE, STEP, THEIRS = "asymcheck save", "asymcheck step and wait", "torch.save"
_RUN = "steps"


def run(folder: Path | None, *, quick: bool, width: int = 128) -> Report:
    """Measure in a temporary folder inside ``folder``; ``width`` is that of a transformer of two layers."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch)
        trained = _Trained(width)
        durable = _durable(trained, place, rounds=5 if quick else 30)
        recovery = _recovery(width, place, rounds=2 if quick else 7)
        described = environment.describe(place)
    described["state"] = f"a transformer of two layers and width {width} with AdamW, {trained.nbytes / 1e6:.1f} MB"
    results = [row(name, "time to durable", "ms", [1e3 * one for one in values]) for name, values in durable.items()]
    results += [row(name, "recovery", "ms", [1e3 * one for one in values]) for name, values in recovery.items()]
    times = {name: statistics.median(values) for name, values in durable.items()}
    back = {name: statistics.median(values) for name, values in recovery.items()}
    ratios = {
        "durable/torch_save": times[SAVE] / times[THEIRS],
        "durable_step/torch_save": times[STEP] / times[THEIRS],
        "recovery/torch_load": back["asymcheck"] / back[THEIRS],
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
        """State that is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
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


def _durable(trained: _Trained, place: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each system's saves. The first three rounds warm up, for all alike."""
    times: dict[str, list[float]] = {}
    keep = asymcheck.Retention(keep_last=2)
    with (
        asymcheck.Store.open(place / "store", create=True) as store,
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
                THEIRS: lambda: _torch_save(trained, place / "theirs.pt"),
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


def _recovery(width: int, place: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that new processes took until they had the state back."""
    times: dict[str, list[float]] = {}
    # Compiled modules are kept, as those of an installed package are.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for number in range(rounds + 1):
        for name in rotated(["asymcheck", THEIRS], number):
            command = [sys.executable, "-m", "benchmarks.small", name, str(place), str(width)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
            if number:
                times.setdefault(name, []).append(float(json.loads(done.stdout)))
    return times


def _recover(name: str, place: Path, width: int) -> float:
    """Bring the state back in this process; return the seconds that it took."""
    trained = _Trained(width)
    if name == THEIRS:
        began = time.perf_counter()
        dicts = torch.load(place / "theirs.pt", weights_only=True)
        trained.model.load_state_dict(dicts["model"])
        trained.optimizer.load_state_dict(dicts["optimizer"])
        return time.perf_counter() - began
    open_store, checkpointer_of = asymcheck.Store.open, asymcheck.Checkpointer
    began = time.perf_counter()
    with open_store(place / "store") as store, checkpointer_of(store, trained.state, run=_RUN) as checkpointer:
        if checkpointer.restore() is None:
            raise RuntimeError(f"{place / 'store'} has no checkpoint of run {_RUN}")
        return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(_recover(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
