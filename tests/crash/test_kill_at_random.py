"""Test SIGKILL at random times, repeatedly on one store."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from asymcheck.store import Store
from tests.crash.actions import delete, open_store, restore, save
from tests.crash.states import Journal, Promises
from tests.crash.survival import check_goes_on, check_unrepaired
from tests.zygote import Child, Zygote, wait_until

KEPT = 3
LONGEST_S = 0.12
"""Seconds, longer than any round of the writer, so that the kill may happen at any point."""


def write_for_ever(path: str, run: str, seed: int) -> None:
    """Save step after step; between saves, delete, collect and restore an earlier step. Runs in a child."""
    dice = random.Random(seed)
    journal = Journal(Path(path) / f"journal-{run}")
    with open_store(Path(path) / "store") as store:
        journal.note("opened")
        while True:
            steps = [checkpoint.step for checkpoint in store.checkpoints(run)]
            newest = max(steps, default=-1)
            # Begin after all steps that were ever begun, so that a step identifies one state.
            begun = max((step for _, step in journal.promises().begun), default=-1)
            save(store, journal, max(newest, begun) + 1, run)
            _tidy(store, journal, run, dice)


def _tidy(store: Store, journal: Journal, run: str, dice: random.Random) -> None:
    steps = sorted(checkpoint.step for checkpoint in store.checkpoints(run))
    for step in steps[:-KEPT]:
        delete(store, journal, step, run)
    if dice.random() < 0.5:
        store.gc()
    if dice.random() < 0.2:
        restore(store, journal, dice.choice(steps[-KEPT:]), run)


def _owed(folder: Path, runs: list[str]) -> Promises:
    promised = Promises()
    for run in runs:
        more = Journal(folder / f"journal-{run}").promises()
        promised.durable |= more.durable
        promised.begun |= more.begun
        promised.deleted |= more.deleted
        promised.newest |= more.newest
    return promised


def _kill_repeatedly(zygote: Zygote, folder: Path, runs: list[str], kills: int, seed: int) -> None:
    """Start a writer for each run, kill all together, check, and repeat with the same store."""
    dice = random.Random(seed)
    for number in range(kills):
        opened = _times_opened(folder, runs)
        children = [
            zygote.start(write_for_ever, path=str(folder), run=run, seed=dice.randrange(1 << 30)) for run in runs
        ]
        # In a quarter of the rounds, the kill may also happen while the store is opened.
        if dice.random() < 0.75:
            _wait_opened(folder, runs, opened)
        time.sleep(dice.uniform(0, LONGEST_S))
        _kill(children)
        try:
            check_unrepaired(folder / "store", _owed(folder, runs))
            if number % 3 == 2 or number == kills - 1:
                _check_goes_on(folder, runs)
        except Exception as error:
            raise AssertionError(f"after kill {number + 1}, seed {seed}: {error}") from error


def _times_opened(folder: Path, runs: list[str]) -> list[int]:
    return [len(Journal(folder / f"journal-{run}").lines("opened")) for run in runs]


def _wait_opened(folder: Path, runs: list[str], before: list[int]) -> None:
    def have_opened() -> bool:
        return all(now > then for now, then in zip(_times_opened(folder, runs), before, strict=True))

    wait_until(have_opened, "the writers")


def _kill(children: list[Child]) -> None:
    for child in children:
        child.kill()
    for child in children:
        child.wait_killed()


def _check_goes_on(folder: Path, runs: list[str]) -> None:
    """Check a further save, whose checkpoints also count as promised from then on."""
    with open_store(folder / "store") as store:
        newest = {run: max([c.step for c in store.checkpoints(run)], default=-1) for run in runs}
    check_goes_on(folder / "store", _owed(folder, runs))
    with open_store(folder / "store") as store:
        for run in runs:
            # If a writer was always killed before its first save, its run has no checkpoint.
            if newest[run] + 1 in {checkpoint.step for checkpoint in store.checkpoints(run)}:
                delete(store, Journal(folder / f"journal-{run}"), newest[run] + 1, run)


@pytest.mark.slow
def test_two_writers(zygote: Zygote, tmp_path: Path) -> None:
    """Test two runs in one store, with overlapping saves and collections, killed together."""
    _kill_repeatedly(zygote, tmp_path, ["default", "other"], kills=6, seed=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 18))
@pytest.mark.parametrize("runs", [["default"], ["default", "other"], ["default", "b", "c"]], ids=len)
def test_hundreds_of_kills(zygote: Zygote, tmp_path: Path, runs: list[str], seed: int) -> None:
    """Test 960 kills."""
    _kill_repeatedly(zygote, tmp_path, runs, kills=40, seed=seed)
