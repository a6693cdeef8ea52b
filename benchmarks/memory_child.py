"""Run one operation in a watched process: ``python -m benchmarks.memory_child OPERATION STORE STATE``.

STORE is a path or a location. STATE is a file with the state, or for a push its location.

Prepare, print the current memory, wait for a line, run the operation, report its end, and keep the results until the
parent process has read the memory a last time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import asymcheck
from benchmarks import states
from benchmarks.resident import reset_peak


def main(operation: str, store: str, state_file: str) -> None:
    """Run one operation on ``store``; ``state_file`` contains the state."""
    # Import all modules and create all pools first, so that only the memory of the state is measured.
    with (
        tempfile.TemporaryDirectory(dir=None if "://" in store else Path(store).parent) as scratch,
        asymcheck.Store.open(Path(scratch) / "warm", create=True) as warm,
    ):
        warm.save({"weights": torch.zeros(1)}, step=1)
        warm.load()
    work = OPERATIONS[operation](store, state_file)
    print(json.dumps(reset_peak()), flush=True)
    sys.stdin.readline()
    result = work()
    print("done", flush=True)
    sys.stdin.readline()
    del result


def _state(state_file: str) -> object:
    # Read the file instead of mapping it, so that the state is in private memory, as in a training.
    return torch.load(state_file, weights_only=True)


def _save(store: str, state_file: str) -> Callable[[], object]:
    state = _state(state_file)

    def work() -> object:
        with asymcheck.Store.open(store, create=True) as opened:
            return opened.save(state, step=2)

    return work


def _load(store: str, _state_file: str) -> Callable[[], object]:
    def work() -> object:
        with asymcheck.Store.open(store, read_only=True) as opened:
            return opened.load()

    return work


def _load_into(store: str, state_file: str) -> Callable[[], object]:
    state = states.empty_like(_state(state_file))

    def work() -> object:
        with asymcheck.Store.open(store, read_only=True) as opened:
            return opened.load(into=state)

    return work


def _push(store: str, location: str) -> Callable[[], object]:
    def work() -> object:
        with asymcheck.Store.open(store) as opened:
            return opened.push(location)

    return work


OPERATIONS = {"save": _save, "load": _load, "load-into": _load_into, "push": _push}

if __name__ == "__main__":
    main(*sys.argv[1:4])
