"""Test a save, a deletion with a collection, and a reader under chosen schedules of their file operations.

Each process is a thread that stops before every file operation, until the scheduler lets it go on. A seed chooses the
order. ``tools/protocol_store.py`` explores all orders of a model; these tests run the code itself through some of them.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asymcheck.errors import AsymcheckError
from asymcheck.storage.nvme import Transaction
from asymcheck.store import Store
from tests.crash.actions import open_store
from tests.crash.conftest import Template
from tests.crash.faults import WatchedFiles
from tests.crash.states import fingerprint, make_state

_BLOCKED_S = 0.03
"""A thread that reaches no file operation for so long waits for a lock that another thread holds."""
_STAYS = 0.8
"""Probability that the thread of the last operation goes on, so that threads also make progress between switches."""


class Scheduler:
    """Lets one of several threads run from one file operation to the next."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._changed = threading.Condition()
        self._stopped: dict[str, int] = {}
        self._granted = ""
        self.order: list[str] = []
        """Name of the thread and file operation, in order."""

    def stop(self, name: str, operation: str, path: Path) -> None:
        """Wait before an operation until the scheduler chooses the thread."""
        with self._changed:
            self._stopped[name] = self._stopped.get(name, 0) + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._granted == name)
            self._granted = ""
            self._stopped[name] -= 1
            self.order.append(f"{name}: {operation} {path.name}")

    def run(self, actions: dict[str, Callable[[], None]]) -> None:
        """Run actions in threads until all have ended."""
        threads = {name: threading.Thread(target=act, name=name) for name, act in actions.items()}
        for thread in threads.values():
            thread.start()
        last = ""
        while alive := [name for name, thread in threads.items() if thread.is_alive()]:
            with self._changed:
                self._changed.wait_for(lambda: not self._granted and all(map(self._stopped.get, alive)), _BLOCKED_S)
                ready = sorted(name for name, count in self._stopped.items() if count)
                if ready and not self._granted:
                    last = last if last in ready and self._dice.random() < _STAYS else self._dice.choice(ready)
                    self._granted = last
                    self._changed.notify_all()


def _save(store: Store) -> None:
    # The state of the deleted step, so that the save reuses packs that the collection is about to free.
    store.save(make_state(0), step=2)


def _collect(store: Store) -> None:
    store.delete(0)
    store.gc()


def _read(store: Store) -> None:
    assert fingerprint(store.load(1)) == fingerprint(make_state(1)), "the reader gave other bytes"


ACTIONS = {"save": _save, "collect": _collect, "read": _read}


def run_schedule(path: Path, seed: int) -> list[str]:
    """Save step 2, delete step 0 and collect, and read step 1 at the same time; return the problems."""
    scheduler, problems = Scheduler(seed), list[str]()

    def run(name: str) -> None:
        try:
            with open_store(path, files=WatchedFiles(partial(scheduler.stop, name)), slots=1) as store:
                ACTIONS[name](store)
        except (AsymcheckError, AssertionError) as error:
            problems.append(f"{name}: {error}")

    # The store is open all the time, so that no process rebuilds the catalog.
    with open_store(path) as store:
        store.gc(dry_run=True)
        scheduler.run({name: partial(run, name) for name in ACTIONS})
        try:
            for step, content in ((1, 1), (2, 0)):
                assert fingerprint(store.load(step)) == fingerprint(make_state(content)), f"step {step}: other bytes"
        except (AsymcheckError, AssertionError) as error:
            problems.append(str(error))
        return [*problems, *map(str, store.verify())]


@pytest.fixture
def copies(template: Template, tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that makes a store with the steps 0 and 1."""
    source = template([["save", 0], ["save", 1]]) / "store"

    def copy(number: int) -> Path:
        return Path(shutil.copytree(source, tmp_path / str(number)))

    return copy


@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 30), marks=pytest.mark.slow),
        pytest.param(range(30, 2000), marks=pytest.mark.long),
    ],
)
def test_schedules_lose_nothing(copies: Callable[[int], Path], seeds: range) -> None:
    """Test that the reader gets its bytes, that both checkpoints are whole, and that nothing is damaged."""
    for seed in seeds:
        path = copies(seed)
        assert run_schedule(path, seed) == [], f"seed {seed}"
        shutil.rmtree(path)


@pytest.mark.slow
def test_schedules_without_pins_lose_a_checkpoint(
    copies: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that some schedule loses a checkpoint if collections ignore pins, so that the test above can fail."""
    monkeypatch.setattr(Transaction, "pins", lambda _self: {})
    assert any(run_schedule(copies(seed), seed) for seed in range(200))
