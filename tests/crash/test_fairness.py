"""Writers and collections of several processes take turns."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.crash.actions import open_store
from tests.crash.states import Journal, make_state
from tests.zygote import Zygote, wait_until

_SECONDS = 5.0


def _begin(folder: Path, name: str) -> float:
    """Say that this process is ready, wait for the signal, and return its time [s]."""
    (folder / f"ready-{name}").touch()
    wait_until((folder / "go").exists, "the signal")
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


def commit(path: str, name: str, gives_way: bool) -> None:
    """Wait for the writer lock, and note when it was taken. Runs in a child."""
    with open_store(Path(path) / "store") as store:
        catalog = store.resources.catalog()
        _begin(Path(path), name)
        if not gives_way:
            # The collections come first.
            time.sleep(0.2)
        for _ in range(5):
            with catalog.write(gives_way=gives_way):
                Journal(Path(path) / "journal").note(name)
                time.sleep(0.02)


def test_waiting_writers_precede_collections(zygote: Zygote, tmp_path: Path) -> None:
    """Test that two writers take turns, and are not behind two collections that came first."""
    with open_store(tmp_path / "store") as store:
        catalog = store.resources.catalog()
        children = [
            zygote.start(commit, path=str(tmp_path), name=name, gives_way=name.startswith("gc"))
            for name in ("gc-1", "gc-2", "a", "b")
        ]
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == len(children), "all processes")
        with catalog.write():
            (tmp_path / "go").touch()
            time.sleep(0.5)
    for child in children:
        child.finish()
    order = [line.split('"')[3] for line in (tmp_path / "journal").read_text().splitlines()]
    writers = [name for name in order if name in ("a", "b")]
    assert sum(name in ("a", "b") for name in order[:10]) >= 5, order
    assert sum(name != other for name, other in itertools.pairwise(writers)) >= 3, order
    assert len(order) == 20
