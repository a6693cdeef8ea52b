"""Test forked processes with an open store: data loader workers, and processes that try to use it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from asymcheck import events
from asymcheck.checkpointer import Checkpointer
from asymcheck.errors import ForkedStoreError
from asymcheck.events import Event
from asymcheck.storage.local_files import DESCRIPTORS
from asymcheck.store import Store
from tests.crash.actions import open_store, save
from tests.crash.states import Journal, fingerprint, make_state
from tests.crash.survival import check_goes_on, check_unrepaired, leftovers
from tests.zygote import Zygote, wait_until

SOON_S = 10.0
"""Limit in seconds: far below the lock timeout of 20 s, and far above a save on a busy machine."""


class _Slow(Dataset[torch.Tensor]):
    """Reports its worker processes, and keeps them busy beyond the death of their parent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        (self._folder / f"worker-{os.getpid()}").touch()
        if index >= 4:
            time.sleep(60)
        return torch.zeros(1)


class _Unseen(set[int]):
    """Descriptors that a forked process does not find, and so does not close."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def train(path: str, fork_at: str, *, keep: bool = False) -> None:
    """Save; start two data loader workers at an event of the second save, or after it; wait. Runs in a child.

    With ``keep``, the workers keep inherited descriptors.
    """
    if keep:
        DESCRIPTORS._open = _Unseen()
    folder = Path(path)
    journal = Journal(folder / "journal")
    loaders = []

    def fork(event: Event) -> None:
        if event.name == fork_at and not loaders:
            loader = iter(DataLoader(_Slow(folder), num_workers=2, multiprocessing_context="fork"))
            loaders.append(loader)
            next(loader)
            if fork_at != "catalog.committed":
                # The save holds the locks of its packs or of the catalog at this point.
                (folder / "ready").touch()
                time.sleep(600)

    store = open_store(folder / "store")
    save(store, journal, 0)
    with events.observe(fork):
        save(store, journal, 1)
    (folder / "ready").touch()
    time.sleep(600)


def _workers(folder: Path) -> list[int]:
    return [int(file.name.removeprefix("worker-")) for file in folder.glob("worker-*")]


def _check_workers_outlive(zygote: Zygote, tmp_path: Path, fork_at: str, *, keep: bool) -> None:
    child = zygote.start(train, path=str(tmp_path), fork_at=fork_at, keep=keep)
    wait_until(lambda: (tmp_path / "ready").exists() and len(_workers(tmp_path)) == 2, "the workers")
    child.kill()
    child.wait_killed()
    try:
        began = time.monotonic()
        promised = Journal(tmp_path / "journal").promises()
        assert len(promised.durable) == (2 if fork_at == "catalog.committed" else 1)
        with open_store(tmp_path / "store") as store:
            store.save(make_state(2), step=2)
            store.gc()
            assert leftovers(store) == []
        assert time.monotonic() - began < SOON_S, "the dead process's locks were waited for"
        assert all(Path(f"/proc/{pid}").exists() for pid in _workers(tmp_path)), "no worker is left: nothing is shown"
        promised.begun["default", 2] = promised.durable["default", 2] = fingerprint(make_state(2))
        promised.newest.clear()
        check_unrepaired(tmp_path / "store", promised)
        check_goes_on(tmp_path / "store", promised)
    finally:
        for pid in _workers(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("fork_at", ["pack.synced", "catalog.pinned", "catalog.committed"])
def test_workers_outlive_their_killed_parent(zygote: Zygote, tmp_path: Path, fork_at: str) -> None:
    """Test that workers hold no lock of the dead: a new process saves and collects while they are running."""
    _check_workers_outlive(zygote, tmp_path, fork_at, keep=False)


@pytest.mark.slow
def test_workers_that_keep_locks_are_noticed(zygote: Zygote, tmp_path: Path) -> None:
    """Test that a worker that keeps descriptors blocks the collection, so that the test above can fail."""
    with pytest.raises(AssertionError, match=r"packs/.*tmp"):
        _check_workers_outlive(zygote, tmp_path, "pack.synced", keep=True)


def use_after_fork(path: str) -> None:
    """Try every method in a forked process; then use the store in the parent. Runs in a child."""
    journal = Journal(Path(path) / "journal")
    store = open_store(Path(path) / "store")
    save(store, journal, 0)
    checkpointer = Checkpointer(store, make_state(0), every=1, keep=None)
    checkpointer.restore()
    pid = os.fork()
    if pid == 0:
        _check_forked(store, checkpointer, Path(path) / "store")
        # Collect objects and close files, as a worker does at its end.
        del store
        return
    assert os.waitpid(pid, 0)[1] == 0, "the forked process met something else"
    save(store, journal, 1)
    assert fingerprint(store.load(0)) == fingerprint(make_state(0))
    store.gc()
    assert leftovers(store) == []
    store.close()
    assert list((Path(path) / "store" / "catalog" / "open").iterdir()) == [], "damage was noted, or a marker left"


def _check_forked(store: Store, inherited: Checkpointer, path: Path) -> None:
    uses = [
        lambda: store.save(make_state(5), step=5),
        store.load,
        store.checkpoints,
        store.verify,
        store.gc,
        store.resources.usage,
        store.tensors,
        lambda: store.delete(0),
        lambda: store.training.begin_generation(None),
        lambda: Checkpointer(store, make_state(5)),
        lambda: inherited.save(5),
        lambda: inherited.step(5),
        inherited.restore,
        inherited.rollback,
    ]
    for use in uses:
        with pytest.raises(ForkedStoreError, match="open it again"):
            use()
    store.close()
    # The child can read with its own store, but LMDB does not allow it to write.
    with open_store(path) as child_store:
        assert fingerprint(child_store.load(0)) == fingerprint(make_state(0))
        assert child_store.verify() == []
        for use in (lambda: child_store.save(make_state(7), step=7), child_store.gc, lambda: child_store.delete(0)):
            with pytest.raises(ForkedStoreError, match="spawn"):
                use()


def fork_before_saving(path: str) -> None:
    """Open a store, read it, fork; the forked process opens its own store and saves. Runs in a child."""
    journal = Journal(Path(path) / "journal")
    with open_store(Path(path) / "store") as store:
        save(store, journal, 0)
    store = open_store(Path(path) / "store")
    store.load()
    pid = os.fork()
    if pid == 0:
        with open_store(Path(path) / "store") as child_store:
            save(child_store, journal, 1)
            child_store.gc()
        return
    assert os.waitpid(pid, 0)[1] == 0, "the forked process could not save"
    save(store, journal, 2)
    store.gc()
    assert leftovers(store) == []


@pytest.mark.slow
def test_a_fork_before_the_first_save(zygote: Zygote, tmp_path: Path) -> None:
    """Test a fork of a process that has only read, or has closed its store: the child opens its own and saves."""
    zygote.start(fork_before_saving, path=str(tmp_path)).finish()
    promised = Journal(tmp_path / "journal").promises()
    assert len(promised.durable) == 3
    check_unrepaired(tmp_path / "store", promised)
    check_goes_on(tmp_path / "store", promised)


def test_a_forked_process_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    """Test that the inherited store raises a clear error, and that the child's end does not harm the parent."""
    zygote.start(use_after_fork, path=str(tmp_path)).finish()
    promised = Journal(tmp_path / "journal").promises()
    check_unrepaired(tmp_path / "store", promised)
    check_goes_on(tmp_path / "store", promised)
