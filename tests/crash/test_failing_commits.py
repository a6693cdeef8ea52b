"""The drive refuses writes of the catalog: one save fails, and the same process goes on."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from asymcheck.errors import OutOfSpaceError, StorageError
from asymcheck.events import observe
from asymcheck.store import Store
from tests.crash.actions import open_store
from tests.crash.states import fingerprint, make_state
from tests.zygote import Zygote

_SOURCE = Path(__file__).with_name("failing_writes.c")
_FOREVER = 1_000_000


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return a process whose children can make writes fail."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is missing")
    folder = tmp_path_factory.mktemp("failing")
    library = folder / "failing_writes.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        process = Zygote(folder, "asymcheck.store")
    yield process
    process.close()


def _arm(name: str, skip: int, count: int, number: int) -> None:
    ctypes.CDLL(None).arm(name.encode(), skip, count, number)


def _check(store: Store, steps: list[int]) -> None:
    assert [checkpoint.step for checkpoint in store.checkpoints()] == steps
    for step in steps:
        assert fingerprint(store.load(step)) == fingerprint(make_state(step))
    assert store.verify() == []


def fail_once(path: str, skip: int, count: int, number: int) -> None:
    """Let one save fail at its ``skip``-th commit of the catalog, then save and collect. Runs in a child."""
    with open_store(Path(path)) as store:
        store.save(make_state(1), step=1)
        _arm("data.mdb", skip, count, number)
        with pytest.raises(StorageError, match="mdb_txn_commit") as caught:
            store.save(make_state(2), step=2)
        assert isinstance(caught.value, OutOfSpaceError) == (number != errno.EIO)
        assert not (Path(path) / "catalog/open/damaged").exists()
        _arm("data.mdb", 0, 0, 0)
        store.save(make_state(3), step=3)
        assert store.gc().freed_packs >= 1
        assert not store.gc(dry_run=True).freed_packs
        store.save(make_state(4), step=4)
        _check(store, [1, 3, 4])
    with open_store(Path(path)) as store:
        store.delete(1)
        store.gc()
        _check(store, [3, 4])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=["failing", "full", "quota"])
@pytest.mark.parametrize("count", [1, 2, _FOREVER])
@pytest.mark.parametrize("skip", [0, 1])
def test_save_after_a_failed_commit_succeeds(
    zygote: Zygote, store_path: Path, skip: int, count: int, number: int
) -> None:
    """Test a commit that fails when packs are pinned, and one that fails after the manifest was renamed."""
    zygote.start(fail_once, path=str(store_path), skip=skip, count=count, number=number).finish()


def read_meanwhile(path: str) -> None:
    """Keep a read transaction open while a commit fails and the next one begins. Runs in a child."""
    with open_store(Path(path)) as store:
        store.save(make_state(1), step=1)
        catalog = store.resources.catalog()
        reading, done = threading.Event(), threading.Event()
        seen: list[int] = []

        def read() -> None:
            with catalog.read() as transaction:
                reading.set()
                done.wait(0.5)
                seen.append(len(transaction.manifests()))

        reader = threading.Thread(target=read)
        reader.start()
        reading.wait()
        _arm("data.mdb", 0, 1, errno.EIO)
        with pytest.raises(StorageError, match="mdb_txn_commit"):
            store.save(make_state(2), step=2)
        assert seen == [1], "the environment was closed under a reader"
        reader.join()
        store.save(make_state(3), step=3)
        _check(store, [1, 3])


def test_failed_commit_waits_for_readers(zygote: Zygote, store_path: Path) -> None:
    """Test that the environment is not closed while another thread reads the catalog."""
    zygote.start(read_meanwhile, path=str(store_path)).finish()


def refuse_pid(path: str) -> None:
    """Save while the lock file of the catalog cannot be written. Runs in a child."""
    with open_store(Path(path)) as store:
        _arm("writer.lock", 0, _FOREVER, errno.ENOSPC)
        store.save(make_state(1), step=1)
        store.gc()
        assert ctypes.CDLL(None).left() < _FOREVER
        assert os.path.getsize(Path(path) / "catalog/writer.lock") == 0
        _check(store, [1])


def test_save_needs_no_process_id_in_the_lock_file(zygote: Zygote, store_path: Path) -> None:
    """Test that a failed write of the process id, which only serves messages, fails no save."""
    zygote.start(refuse_pid, path=str(store_path)).finish()


@pytest.mark.parametrize("error", [lmdb.DiskError("no space left"), lmdb.Error("Input/output error")])
def test_catalog_is_rebuilt_after_its_last_sync_failed(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error
) -> None:
    """Test a drive that fails at the end: after a power loss, the catalog might be older than the packs."""

    class Failing:
        def __init__(self, environment: lmdb.Environment) -> None:
            self.close = environment.close

        def sync(self, _force: bool) -> None:
            raise error

    store = open_store(store_path)
    store.save(make_state(1), step=1)
    catalog = store.resources.catalog()
    monkeypatch.setattr(catalog, "_env", Failing(catalog._env))
    with pytest.raises(StorageError):
        store.close()
    assert list((store_path / "catalog/open").iterdir())
    rebuilt: list[str] = []
    with observe(lambda event: rebuilt.append(event.name)), open_store(store_path) as store:
        store.resources.catalog()
        _check(store, [1])
    assert "catalog.rebuilt" in rebuilt
