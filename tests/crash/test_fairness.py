"""Writers and collections of several processes take turns."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from asymcheck.storage.nvme import catalog as catalog_module
from tests.crash.actions import open_store
from tests.crash.states import Journal, make_state
from tests.zygote import Child, Zygote, wait_until

_SECONDS = 5.0


def _begin(folder: Path, name: str, signal: str = "go") -> float:
    """Say that this process is ready, wait for the signal, and return its time [s]."""
    (folder / f"ready-{name}").touch()
    wait_until((folder / signal).exists, "the signal")
    return time.monotonic()


def write(path: str, run: str, seconds: float) -> None:
    """Save and delete steps of a run for some time after the signal. Runs in a child."""
    step = 0
    with open_store(Path(path) / "store") as store:
        until = _begin(Path(path), run) + seconds
        while time.monotonic() < until:
            store.save(make_state(step), step=step, run=run)
            if step > 0:
                store.delete(step - 1, run=run)
            step += 1
    Journal(Path(path) / f"journal-{run}").note("ended", count=step)


def collect(path: str, name: str, seconds: float) -> None:
    """Collect for some time after the signal. Runs in a child."""
    rounds = freed = 0
    with open_store(Path(path) / "store") as store:
        until = _begin(Path(path), name) + seconds
        while time.monotonic() < until:
            freed += store.gc().freed_packs
            rounds += 1
    Journal(Path(path) / f"journal-{name}").note("ended", count=rounds, freed=freed)


@pytest.mark.slow
def test_two_collections_in_loops_starve_no_writer(zygote: Zygote, tmp_path: Path) -> None:
    """Test that two writers make about as many checkpoints, while two processes collect without a pause."""
    with open_store(tmp_path / "store") as store:
        store.save(make_state(0), step=0, run="first")
    path = str(tmp_path)
    children = [zygote.start(write, path=path, run=run, seconds=_SECONDS) for run in ("a", "b")]
    children += [zygote.start(collect, path=path, name=name, seconds=_SECONDS) for name in ("gc-1", "gc-2")]
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == len(children), "all processes")
    (tmp_path / "go").touch()
    for child in children:
        child.finish()
    counts = {
        name: int(str(Journal(tmp_path / f"journal-{name}").lines("ended")[0]["count"]))
        for name in ("a", "b", "gc-1", "gc-2")
    }
    assert max(counts["a"], counts["b"]) <= 3 * min(counts["a"], counts["b"]), counts
    assert min(counts["gc-1"], counts["gc-2"]) >= 1, counts


def take_turn(path: str, name: str, gives_way: bool) -> None:
    """Wait for the writer lock after the signal, and note when it was taken. Runs in a child."""
    folder = Path(path)
    catalog_module._GIVE_WAY_S = 60.0
    if not gives_way:
        # The test looks at the lock of waiting writers, which holds it for a moment.
        catalog_module._GIVE_WAY_POLL_S = 0.1
    with open_store(folder / "store") as store:
        catalog = store.resources.catalog()
        _begin(folder, name, f"go-{name}")
        (folder / f"begun-{name}").touch()
        with catalog.write(gives_way=gives_way):
            Journal(folder / "journal").note(name)


def _start_turn(zygote: Zygote, folder: Path, name: str, *, gives_way: bool = False) -> Child:
    child = zygote.start(take_turn, path=str(folder), name=name, gives_way=gives_way)
    wait_until((folder / f"ready-{name}").exists, name)
    return child


def _let_writer_wait(folder: Path, name: str) -> None:
    """Let a process try to take the writer lock, which this process holds."""

    def is_waiting() -> bool:
        descriptor = os.open(folder / "store" / "catalog" / "open", os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    (folder / f"go-{name}").touch()
    wait_until(is_waiting, name)


def _order(folder: Path) -> list[str]:
    return [line.split('"')[3] for line in (folder / "journal").read_text().splitlines()]


@pytest.mark.slow
def test_waiting_writer_precedes_a_collection(zygote: Zygote, tmp_path: Path) -> None:
    """Test a collection that begins while a writer waits for the lock: it goes behind the writer."""
    expected = []
    with open_store(tmp_path / "store") as store:
        for number in range(2):
            writer, collection = f"writer-{number}", f"gc-{number}"
            children = [
                _start_turn(zygote, tmp_path, writer),
                _start_turn(zygote, tmp_path, collection, gives_way=True),
            ]
            with store.resources.catalog().write():
                _let_writer_wait(tmp_path, writer)
                (tmp_path / f"go-{collection}").touch()
                wait_until((tmp_path / f"begun-{collection}").exists, collection)
                # A correct collection does nothing in this time. A wrong one would try to take the lock.
                time.sleep(0.1)
            for child in children:
                child.finish()
            expected += [writer, collection]
    assert _order(tmp_path) == expected


def test_writer_lets_a_waiting_writer_pass(zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a process that takes the writer lock again at once: a writer that waits for it comes first."""
    monkeypatch.setattr(catalog_module, "_TURN_S", 60.0)
    with open_store(tmp_path / "store") as store:
        catalog = store.resources.catalog()
        child = _start_turn(zygote, tmp_path, "other")
        with catalog.write():
            _let_writer_wait(tmp_path, "other")
        with catalog.write():
            Journal(tmp_path / "journal").note("again")
        child.finish()
    assert _order(tmp_path) == ["other", "again"]
