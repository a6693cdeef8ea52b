"""Test marks of the processes that use a catalog."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.errors import LockTimeoutError
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme.catalog import CatalogUsers
from asymcheck.storage.process_identity import this_process


def test_one_process_has_one_mark_in_a_catalog(tmp_path: Path) -> None:
    """Test that LMDB is not opened twice in a process, for example by two paths to one directory."""
    folder = tmp_path / "open"
    folder.mkdir()
    first, second = CatalogUsers(Files(), folder), CatalogUsers(Files(), folder)
    first.put()
    with pytest.raises(LockTimeoutError, match="has opened the store by another path"):
        second.put()
    first.take_back()
    second.put()
    second.take_back()
    assert list(folder.iterdir()) == []


def test_a_mark_that_was_left_counts_as_dead(tmp_path: Path) -> None:
    """Test the mark of a process in which a commit failed, seen by the same process before and after the next mark."""
    folder = tmp_path / "open"
    folder.mkdir()
    first, second = CatalogUsers(Files(), folder), CatalogUsers(Files(), folder)
    first.put()
    first.take_back(as_if_killed=True)
    left = list(folder.iterdir())
    assert len(left) == 1
    assert second.other_marks() == (left, {})
    second.put()
    assert second.other_marks() == ([], {})
    second.take_back()
    assert list(folder.iterdir()) == []


def test_a_locked_mark_of_another_boot_belongs_to_a_living_process(tmp_path: Path) -> None:
    """Test containers of systemd and LXC, each with a separate boot id: only the lock shows that a process lives."""
    users, owner = CatalogUsers(Files(), tmp_path), dataclasses.replace(this_process(), boot_id="another")
    mark = tmp_path / f"{owner.pid}-{owner.start_ticks}-another-{owner.pid_namespace}"
    assert users.is_dead(owner)
    with mark.open("xb") as file:
        assert users.is_dead(owner)
        assert users.other_marks() == ([mark], {})
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not users.is_dead(owner)
        assert users.other_marks() == ([], {mark: owner})


def test_lock_that_a_process_of_another_container_holds(store_path: Path) -> None:
    """Test that the error names no process of this container, which may have the same number."""
    other = dataclasses.replace(this_process(), pid=1, pid_namespace="pid:[1]")
    name = f"{other.pid}-{other.start_ticks}-{other.boot_id}-{other.pid_namespace}"
    with Store.open(store_path, create=True, config=StoreConfig(lock_timeout_s=0.1)) as store:
        store.save({"w": 1}, step=1)
        catalog = store_path / "catalog"
        with (catalog / "open" / name).open("xb") as mark, (catalog / "writer.lock").open("r+") as lock:
            fcntl.flock(mark, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(f"{other.pid:<20}")
            lock.flush()
            with pytest.raises(LockTimeoutError, match="by process 1 of another container; stop that process"):
                store.save({"w": 2}, step=2)


_TRAINING = """
import sys
from asymcheck import Store

with Store.open(sys.argv[1], create=True) as store:
    store.save({"w": 1}, step=1)
    print("saved", flush=True)
    sys.stdin.readline()
"""


def test_catalog_in_a_copy_of_a_store_in_use_is_not_trusted(store_path: Path, tmp_path: Path) -> None:
    """Test that a copy, whose catalog may be torn, is not taken to be in use by the training of the original."""
    copied = tmp_path / "copy"
    command, pipe = [sys.executable, "-c", _TRAINING, str(store_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "saved\n"
        shutil.copytree(store_path, copied)
        data = copied / "catalog" / "data.mdb"
        data.write_bytes(b"torn" * (data.stat().st_size // 4))
        for path, step in ((copied, 2), (store_path, 3)):
            with Store.open(path) as store:
                store.save({"w": step}, step=step)
                assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, step]
                assert len(list((path / "catalog" / "open").iterdir())) == (1 if path == copied else 2)
        training.communicate("\n", timeout=60)
    assert training.returncode == 0


_COLLECTIONS = """
import sys
from asymcheck import Store

for path in sys.argv[1:]:
    with Store.open(path) as store:
        store.gc()
"""


def test_hard_linked_copy_has_its_own_catalog(store_path: Path, tmp_path: Path) -> None:
    """Test that a collection in the original does not remove the pins of a save in a copy of ``cp -al``."""
    copied = tmp_path / "copy"
    with Store.open(store_path, create=True) as store:
        store.save({"w": torch.ones(10_000)}, step=1)
    shutil.copytree(store_path, copied, copy_function=os.link)

    def collect_in_both() -> int:
        subprocess.run([sys.executable, "-c", _COLLECTIONS, store_path, copied], check=True)
        return 1

    with Store.open(copied) as store:
        store.save({"w": torch.zeros(10_000)}, step=2, generation=collect_in_both)
        assert store.verify() == []
        store.load(2)


def test_store_that_replaces_a_removed_one_has_its_own_catalog(store_path: Path) -> None:
    """Test a notebook that removes its store and creates another one, and closes the first one last."""
    state = {"w": torch.ones(100)}
    removed = Store.open(store_path, create=True)
    removed.save(state, step=1)
    shutil.rmtree(store_path)
    marks = store_path / "catalog" / "open"
    with Store.open(store_path, create=True) as store:
        store.save(state, step=1)
        (mark,) = marks.iterdir()
        removed.close()
        assert list(marks.iterdir()) == [mark]
        assert store.verify() == []
    assert list(marks.iterdir()) == []
