"""Test SIGKILL during pruning: kept checkpoints are intact, and captures in memory are not lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from asymcheck import Checkpointer, Retention, Store, events
from asymcheck.events import Event
from asymcheck.restore.resolve import resolve_one
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import copy_of, linear_loop
from tests.crash import faults
from tests.crash.states import Journal, fingerprint
from tests.crash.survival import leftovers
from tests.crash.trainer import FOR_EVER, _note_complete, config_for, newest_complete
from tests.zygote import Zygote, wait_until

KEPT = 2
EVENTS = ["manifest.committed", "catalog.committed", "gc.marked_freed", "gc.retired", "gc.forgotten"]
# Data that never changes is copied out of its first pack once.
POINTS = [*((event, number) for event in EVENTS for number in (1, 3, 6)), ("gc.repacked", 1)]


def train_keeping(path: str, *, kill: str = "", number: int = 0) -> None:
    """Resume, save every step and keep the last two; get killed at the given occurrence of an event."""
    folder, seen = Path(path), [0]
    journal = Journal(folder / "journal")

    def observer(event: Event) -> None:
        _note_complete(journal, event, "default")
        if event.name == kill:
            seen[0] += 1
            if seen[0] == number:
                faults.kill_this_process()

    with events.observe(observer), open_on(Disk(), folder / "store") as store:
        _, _, loop = linear_loop()
        # A third of the state never changes.
        loop.state["frozen"] = copy_of(loop.state["model"])
        keep = Retention(keep_last=KEPT)
        checkpointer = Checkpointer(store, loop.state, keep=keep, capture=config_for(folder), every=1)
        restored = checkpointer.restore()
        first = 0 if restored is None else restored.step + 1
        journal.note("restored", step=first - 1)
        for step in range(first, FOR_EVER):
            loop.iterate(step)
            journal.note("step", run="default", step=step, fingerprint=fingerprint(copy_of(loop.state)))
            checkpointer.step(step)


def read_keeping(path: str) -> None:
    """Read the newest checkpoint repeatedly, until a file asks to stop."""
    folder, count = Path(path), 0
    while not (folder / "enough").exists():
        with Store.open(folder / "store", read_only=True) as store:
            restored = store.restore()
        line = next(
            line for line in Journal(folder / "journal").lines("step") if line["step"] == restored.checkpoint.step
        )
        assert restored.skipped == ()
        assert fingerprint(restored.state) == line["fingerprint"]
        count += 1
        Journal(folder / "read").note("read", count=count)


def assert_kept(folder: Path) -> None:
    """Assert that the newest complete step is restored, all listed steps are complete, and two stay."""
    prints = {line["step"]: line["fingerprint"] for line in Journal(folder / "journal").lines("step")}
    with Store.open(folder / "store", create=True) as store:
        with store.training.adopting(config_for(folder).ring_folder):
            pass
        restored = store.restore()
        assert restored.skipped == ()
        assert restored.checkpoint.step >= newest_complete(folder)
        for checkpoint in store.checkpoints():
            assert fingerprint(store.load(checkpoint.step)) == prints[checkpoint.step]
        newest = [checkpoint.step for checkpoint in store.checkpoints()][-KEPT:]
        store.prune(Retention(keep_last=KEPT))
        assert [checkpoint.step for checkpoint in store.checkpoints()] == newest
        assert leftovers(store) == []
        assert store.disk_usage().locked_bytes == 0
        for step in newest:
            assert fingerprint(store.load(step)) == prints[step]


@pytest.mark.slow(quick=["gc.retired-1"], long=["*-3", "[!g]*-1"])
@pytest.mark.parametrize(("event", "number"), POINTS)
def test_killed_at_each_event(zygote: Zygote, tmp_path: Path, event: str, number: int) -> None:
    """Test events of a commit and of the pruning after it, early and late in the training."""
    zygote.start(train_keeping, path=str(tmp_path), kill=event, number=number).wait_killed()
    assert_kept(tmp_path)


@pytest.mark.slow
def test_killed_at_random_again_and_again(zygote: Zygote, tmp_path: Path) -> None:
    """Test one training resumed twice: each start continues from the newest complete step."""
    dice, journal = random.Random(8), Journal(tmp_path / "journal")
    for _ in range(2):
        promised, started = newest_complete(tmp_path), len(journal.lines("restored"))
        child = zygote.start(train_keeping, path=str(tmp_path))
        wait_until(lambda before=started: len(journal.lines("restored")) > before, "the restore")  # type: ignore[misc]  # bound now
        wait_until(lambda before=promised: newest_complete(tmp_path) >= before + 3, "three checkpoints")  # type: ignore[misc]  # bound now
        time.sleep(dice.uniform(0.05, 0.4))
        child.kill()
        child.wait_killed()
        assert int(str(journal.lines("restored")[started]["step"])) >= promised
    assert newest_complete(tmp_path) > 4, "the trainings saved nothing"
    assert_kept(tmp_path)


@pytest.mark.slow
def test_concurrent_reader_always_finds_a_checkpoint(zygote: Zygote, tmp_path: Path) -> None:
    """Test that another process always restores the newest checkpoint, while checkpoints are deleted quickly."""
    training = zygote.start(train_keeping, path=str(tmp_path))
    wait_until(lambda: newest_complete(tmp_path) > KEPT and _has_checkpoints(tmp_path), "the first checkpoints")
    reader = zygote.start(read_keeping, path=str(tmp_path))
    wait_until(lambda: len(Journal(tmp_path / "read").lines()) >= 20, "the reader")
    (tmp_path / "enough").touch()
    reader.finish()
    training.kill()
    training.wait_killed()
    assert_kept(tmp_path)


def _has_checkpoints(folder: Path) -> bool:
    with Store.open(folder / "store", read_only=True) as store:
        return bool(store.checkpoints())


def test_training_keeps_a_checkpoint_that_is_read(tmp_path: Path) -> None:
    """Test that a checkpoint stays while its packs are open, and is deleted one step later."""
    with Store.open(tmp_path / "store", create=True) as store, Store.open(tmp_path / "store", read_only=True) as other:
        _, _, loop = linear_loop()
        with Checkpointer(
            store, loop.state, keep=Retention(keep_last=1), capture=config_for(tmp_path), every=1
        ) as checkpointer:
            loop.iterate(0)
            checkpointer.save(0)
            (listing,) = other.resources.tier.manifests.checkpoints("default")
            with resolve_one(other.resources.tier, listing).sources:
                for step in range(1, 5):
                    loop.iterate(step)
                    checkpointer.save(step)
                    assert [one.step for one in store.checkpoints()] == [0, step]
            loop.iterate(5)
            checkpointer.save(5)
            assert [one.step for one in store.checkpoints()] == [5]
