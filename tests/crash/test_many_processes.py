"""Test one store that several unsynchronised processes use."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck.errors import CheckpointNotFoundError, LockTimeoutError, RecoveryError
from asymcheck.store import Store
from tests.crash.actions import delete, open_store, save
from tests.crash.states import CONFIG, Journal, Promises, fingerprint, make_state
from tests.crash.survival import check_goes_on, check_steps, check_unrepaired, leftovers
from tests.zygote import Child, Zygote, wait_until

SAVES = 20
SAVES_LONG = 600


def write(path: str, name: str, run: str, first: int, saves: int) -> None:
    """Save every second step from ``first`` on and keep two, until asked to stop; the states are similar.

    Runs in a child.
    """
    journal = Journal(Path(path) / f"journal-{name}")
    with open_store(Path(path) / "store") as store:
        for step in range(first, first + 2 * saves, 2):
            # Repeat the content every few steps, so that partitions are reused while they are about to be freed.
            save(store, journal, step, run, content=step % 10)
            if step - 4 >= first:
                delete(store, journal, step - 4, run)
            if _should_stop(path):
                return


def _should_stop(path: str) -> bool:
    return (Path(path) / "over").exists()


def collect(path: str) -> None:
    """Collect until asked to stop. Runs in a child."""
    rounds = freed = 0
    with open_store(Path(path) / "store") as store:
        while not _should_stop(path):
            store.gc(dry_run=rounds % 5 == 4)
            freed += store.gc().freed_packs
            rounds += 1
    Journal(Path(path) / "journal-gc").note("collected", rounds=rounds, freed=freed)


def read(path: str, run: str, seed: int) -> None:
    """Read the newest or another listed checkpoint until asked to stop; accept clear refusals. Runs in a child."""
    dice = random.Random(seed)
    expected = [fingerprint(make_state(content)) for content in range(10)]
    right = refused = 0
    with open_store(Path(path) / "store", read_only=True) as store:
        while not _should_stop(path):
            steps = [checkpoint.step for checkpoint in store.checkpoints(run)]
            step = dice.choice([None, *steps])
            try:
                restored = store.restore(step, run=run)
            except CheckpointNotFoundError:
                refused += 1
            except RecoveryError as error:
                # A step given by number may be deleted meanwhile, but one of the newest always stays.
                if step is None:
                    raise AssertionError("no checkpoint could be restored") from error
                refused += 1
            else:
                assert fingerprint(restored.state) == expected[restored.checkpoint.step % 10], "other bytes"
                right += 1
            if dice.random() < 0.1:
                errors = [finding for finding in store.verify(run=run) if finding.severity.value == "error"]
                # A checkpoint may look like this between the deletion of its manifest and of its packs.
                assert {finding.kind for finding in errors} <= {"missing-partition", "damaged-manifest"}, errors
    Journal(Path(path) / "journal-reader").note("read", right=right, refused=refused)


def _run(zygote: Zygote, folder: Path, runs: list[str], saves: int) -> None:
    with open_store(folder / "store") as store:
        journals = [Journal(folder / f"journal-{name}") for name in ("a", "b")]
        for journal, run, step in zip(journals, runs, (0, 1), strict=True):
            save(store, journal, step, run, content=step)
    others: list[Child] = [
        zygote.start(collect, path=str(folder)),
        *(zygote.start(read, path=str(folder), run=run, seed=1) for run in set(runs)),
    ]
    writers = [
        zygote.start(write, path=str(folder), name=name, run=run, first=first, saves=saves)
        for name, run, first in (("a", runs[0], 2), ("b", runs[1], 3))
    ]
    for child in writers:
        child.finish()
    (folder / "over").touch()
    for child in others:
        child.finish()
    promised = Promises()
    for journal in journals:
        more = journal.promises()
        promised.durable |= more.durable
        promised.begun |= more.begun
        promised.deleted |= more.deleted
        assert len(journal.lines("saved")) == saves + 1
    check_unrepaired(folder / "store", promised)
    check_goes_on(folder / "store", promised)
    (collected,) = Journal(folder / "journal-gc").lines("collected")
    assert int(str(collected["freed"])) >= 1
    for line in Journal(folder / "journal-reader").lines("read"):
        assert int(str(line["right"])) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("runs", [["default", "other"], ["default", "default"]], ids=["two runs", "one run"])
def test_two_writers_a_collector_and_readers(zygote: Zygote, tmp_path: Path, runs: list[str]) -> None:
    """Test similar states, collected after each deletion: every reader gets correct bytes, and no process fails."""
    _run(zygote, tmp_path, runs, SAVES)


@pytest.mark.long
@pytest.mark.parametrize("runs", [["default", "other"], ["default", "default"]], ids=["two runs", "one run"])
def test_the_same_for_minutes(zygote: Zygote, tmp_path: Path, runs: list[str]) -> None:
    """Test thirty times as long."""
    _run(zygote, tmp_path, runs, SAVES_LONG)


def create(path: str, number: int) -> None:
    """Wait for the signal, then create or open the store and save. Runs in a child."""
    wait_until((Path(path) / "go").exists, "the signal")
    with open_store(Path(path) / "above" / "store") as store:
        save(store, Journal(Path(path) / f"journal-{number}"), number)


@pytest.mark.slow
def test_several_processes_create_one_store(zygote: Zygote, tmp_path: Path) -> None:
    """Test that all processes get the same store, with the checkpoints of all."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        children = [zygote.start(create, path=str(folder), number=number) for number in range(4)]
        (folder / "go").touch()
        for child in children:
            child.finish()
        promised = Promises()
        for number in range(4):
            more = Journal(folder / f"journal-{number}").promises()
            promised.durable |= more.durable
            promised.begun |= more.begun
        assert len(promised.durable) == 4
        check_unrepaired(folder / "above" / "store", promised)
        check_goes_on(folder / "above" / "store", promised)


def hold_the_catalog(path: str) -> None:
    """Hold the writer lock until killed. Runs in a child."""
    with open_store(Path(path)) as store, store.resources.catalog().write():
        (Path(path) / "held").touch()
        time.sleep(600)


@pytest.mark.slow
def test_a_lock_that_is_held_names_its_holder(store_path: Path, zygote: Zygote) -> None:
    """Test that the message names the process to stop and its command line."""
    config = dataclasses.replace(CONFIG, lock_timeout_s=0.2)
    holder = zygote.start(hold_the_catalog, path=str(store_path))
    wait_until((store_path / "held").exists, "the holder")
    try:
        with Store.open(store_path, config=config, create=True) as store, pytest.raises(LockTimeoutError) as caught:
            store.save(make_state(0), step=0)
        assert f"process {holder.pid}" in str(caught.value)
        assert "zygote" in str(caught.value)
    finally:
        holder.kill()
        holder.wait_killed()
    with open_store(store_path) as store:
        store.save(make_state(0), step=0)
        (store_path / "held").unlink()
        check_steps(store, {0: 0})


@pytest.mark.slow
def test_one_of_two_writers_is_killed_again_and_again(zygote: Zygote, tmp_path: Path) -> None:
    """Test that the other process never waits for a lock, a pin or an incomplete file of the dead."""
    dice = random.Random(5)
    survivor = zygote.start(write, path=str(tmp_path), name="a", run="default", first=0, saves=10_000)
    journal = Journal(tmp_path / "journal-a")
    wait_until(lambda: bool(journal.lines("saved")), "the first save")
    for kills in range(12):
        opened = len(Journal(tmp_path / "journal-b").lines())
        # The writer saves its own steps, and resumes the same run after each death.
        child = zygote.start(write, path=str(tmp_path), name="b", run="other", first=1 + 1000 * kills, saves=1000)
        deadline = time.monotonic() + dice.uniform(0.0, 0.2)
        while time.monotonic() < deadline and len(Journal(tmp_path / "journal-b").lines()) < opened + 9:
            time.sleep(0.005)
        child.kill()
        child.wait_killed()
    (tmp_path / "over").touch()
    survivor.finish()
    promised = journal.promises()
    more = Journal(tmp_path / "journal-b").promises()
    promised.durable |= more.durable
    promised.begun |= more.begun
    promised.deleted |= more.deleted
    promised.newest.clear()
    check_unrepaired(tmp_path / "store", promised)
    check_goes_on(tmp_path / "store", promised)


@pytest.mark.slow
def test_threads_share_a_store(store_path: Path) -> None:
    """Test two threads that save, one that deletes and collects, and one that reads, with one store object."""
    over = threading.Event()
    failures: list[BaseException] = []

    def thread(work: Callable[[Store], None], store: Store) -> threading.Thread:
        def run() -> None:
            try:
                work(store)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                failures.append(error)

        started = threading.Thread(target=run)
        started.start()
        return started

    def writer(run: str) -> Callable[[Store], None]:
        def work(store: Store) -> None:
            for step in range(12):
                store.save(make_state(step % 5), step=step, run=run)

        return work

    def tidy(store: Store) -> None:
        while not over.is_set():
            for run in ("a", "b"):
                for checkpoint in store.checkpoints(run)[:-2]:
                    store.delete(checkpoint.step, run=run)
            store.gc()

    def reader(store: Store) -> None:
        while not over.is_set():
            for run in ("a", "b"):
                with contextlib.suppress(CheckpointNotFoundError):
                    restored = store.restore(run=run)
                    assert fingerprint(restored.state) == fingerprint(make_state(restored.checkpoint.step % 5))

    with open_store(store_path) as store:
        others = [thread(tidy, store), thread(reader, store)]
        for one in [thread(writer(run), store) for run in ("a", "b")]:
            one.join()
        over.set()
        for one in others:
            one.join()
        assert failures == []
        store.gc()
        assert leftovers(store) == []
        assert store.verify() == []
