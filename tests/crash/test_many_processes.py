"""Several processes at one store at the same time, with nobody arranging who comes when."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from asymcheck.errors import CheckpointNotFoundError, RecoveryError
from tests.crash.actions import delete, open_store, save
from tests.crash.states import Journal, Promises, fingerprint, make_state
from tests.crash.survival import check_as_it_lies, check_goes_on
from tests.crash.zygote import Child, Zygote, wait_until

SECONDS = 4.0
LONG_SECONDS = 60.0


def write(path: str, name: str, run: str, first: int, seconds: float) -> None:
    """Save every second step from ``first`` on and keep two; the states are much alike. Runs in a child."""
    journal = Journal(Path(path) / f"journal-{name}")
    end = time.monotonic() + seconds
    with open_store(Path(path) / "store") as store:
        step = first
        while time.monotonic() < end:
            # The same content comes back every few steps: its partitions are reused while they are about to be freed.
            save(store, journal, step, run, content=step % 6)
            if step - 4 >= first:
                delete(store, journal, step - 4, run)
            step += 2


def collect(path: str, seconds: float) -> None:
    """Collect all the time. Runs in a child."""
    end = time.monotonic() + seconds
    rounds = freed = 0
    with open_store(Path(path) / "store") as store:
        while time.monotonic() < end:
            store.gc(dry_run=rounds % 5 == 4)
            freed += store.gc().freed_packs
            rounds += 1
    Journal(Path(path) / "journal-gc").note("collected", rounds=rounds, freed=freed)


def read(path: str, run: str, seconds: float, seed: int) -> None:
    """Read all the time: the newest, and whatever else is listed; each is right, or a clear refusal. Runs in a child."""
    dice = random.Random(seed)
    expected = [fingerprint(make_state(content)) for content in range(6)]
    end = time.monotonic() + seconds
    right = refused = 0
    with open_store(Path(path) / "store", read_only=True) as store:
        while time.monotonic() < end:
            steps = [checkpoint.step for checkpoint in store.checkpoints(run)]
            step = dice.choice([None, *steps])
            try:
                restored = store.restore(step, run=run)
            except CheckpointNotFoundError:
                refused += 1
            except RecoveryError as error:
                # A step that was named may be deleted meanwhile; but among the newest there is always one that stays.
                assert step is not None, f"no checkpoint could be restored: {error}"
                refused += 1
            else:
                assert fingerprint(restored.state) == expected[restored.checkpoint.step % 6], "other bytes"
                right += 1
            if dice.random() < 0.1:
                errors = [finding for finding in store.verify(run=run) if finding.severity.value == "error"]
                # What was deleted between its manifest and its packs looks like this.
                assert {finding.kind for finding in errors} <= {"missing-partition", "damaged-manifest"}, errors
    Journal(Path(path) / "journal-reader").note("read", right=right, refused=refused)


def _run(zygote: Zygote, folder: Path, runs: list[str], seconds: float) -> None:
    with open_store(folder / "store") as store:
        journals = [Journal(folder / f"journal-{name}") for name in ("a", "b")]
        for journal, run, step in zip(journals, runs, (0, 1), strict=True):
            save(store, journal, step, run, content=step)
    children: list[Child] = [
        zygote.start(write, path=str(folder), name="a", run=runs[0], first=2, seconds=seconds),
        zygote.start(write, path=str(folder), name="b", run=runs[1], first=3, seconds=seconds),
        zygote.start(collect, path=str(folder), seconds=seconds),
        *(zygote.start(read, path=str(folder), run=run, seconds=seconds, seed=1) for run in set(runs)),
    ]
    for child in children:
        child.finish()
    owed = Promises()
    for journal in journals:
        more = journal.promises()
        owed.durable |= more.durable
        owed.begun |= more.begun
        owed.deleted |= more.deleted
        assert len(journal.lines("saved")) >= 5
    check_as_it_lies(folder / "store", owed)
    check_goes_on(folder / "store", owed)
    (collected,) = Journal(folder / "journal-gc").lines("collected")
    assert int(str(collected["freed"])) >= 3
    for line in Journal(folder / "journal-reader").lines("read"):
        assert int(str(line["right"])) >= 5


@pytest.mark.parametrize("runs", [["default", "other"], ["default", "default"]], ids=["two runs", "one run"])
def test_two_writers_a_collector_and_readers(zygote: Zygote, tmp_path: Path, runs: list[str]) -> None:
    """States that are much alike, collected as soon as they are deleted: nobody gets wrong bytes, nobody fails."""
    _run(zygote, tmp_path, runs, SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("runs", [["default", "other"], ["default", "default"]], ids=["two runs", "one run"])
def test_the_same_for_minutes(zygote: Zygote, tmp_path: Path, runs: list[str]) -> None:
    """The same, fifteen times as long."""
    _run(zygote, tmp_path, runs, LONG_SECONDS)


def create(path: str, number: int) -> None:
    """Wait for the signal, then create or open the store and save. Runs in a child."""
    wait_until((Path(path) / "go").exists, "the signal")
    with open_store(Path(path) / "above" / "store") as store:
        save(store, Journal(Path(path) / f"journal-{number}"), number)


def test_several_processes_create_one_store(zygote: Zygote, tmp_path: Path) -> None:
    """All of them get the same store, and all their checkpoints are in it."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        children = [zygote.start(create, path=str(folder), number=number) for number in range(4)]
        (folder / "go").touch()
        for child in children:
            child.finish()
        owed = Promises()
        for number in range(4):
            more = Journal(folder / f"journal-{number}").promises()
            owed.durable |= more.durable
            owed.begun |= more.begun
        assert len(owed.durable) == 4
        check_as_it_lies(folder / "above" / "store", owed)
        check_goes_on(folder / "above" / "store", owed)
