"""Test opening and creating a store."""

import dataclasses
import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from asymcheck import RemoteConfig, Store, StoreConfig, events
from asymcheck.errors import (
    AsymcheckError,
    ClosedStoreError,
    InvalidInputError,
    ReadOnlyStoreError,
    StorageError,
    StoreNotFoundError,
    StructureError,
    UnsupportedFileSystemError,
)
from asymcheck.storage.nvme import catalog as catalog_module
from asymcheck.storage.nvme import drives, tier
from tests.store.equality import assert_same, directory_content

_FORKING = """
import os, sys
from asymcheck import Store
from asymcheck.errors import ForkedStoreError

with Store.open(sys.argv[1], create=True) as store:
    store.save({"x": 1}, step=1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.load()
        except ForkedStoreError:
            store.close()
            with Store.open(store.path, create=True) as own:
                status = 0 if own.load() == {"x": 1} else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.load() == {"x": 1}
    store.save({"x": 2}, step=2)
"""
NAMES = {"asymcheck.store", "heads", "manifests", "packs", "pool"}


def _has_open_catalog(store_path: Path) -> bool:
    """Return whether this process has the catalog of a store open; other tests may have left other catalogs open."""
    return any(path == os.path.realpath(store_path / "catalog") for _, path, _ in catalog_module._open_catalogs)


def test_a_missing_or_empty_directory_becomes_a_store(tmp_path: Path) -> None:
    """Test that parents are created, and that a path may be text."""
    (tmp_path / "empty").mkdir()
    for location in (tmp_path / "a" / "b" / "c", str(tmp_path / "text"), tmp_path / "empty"):
        with Store.open(location, create=True) as store:
            assert {path.name for path in Path(location).iterdir()} == NAMES
            assert store.path == Path(location)
            assert store.checkpoints() == []


def test_creation_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Test that a mistyped path shows in the log of the training."""
    with caplog.at_level(logging.INFO, logger="asymcheck"):
        for _ in range(2):
            Store.open(tmp_path / "store", create=True).close()
    assert [record.getMessage() for record in caplog.records] == [f"created new store at {tmp_path / 'store'}"]


def test_existing_store_is_not_recreated(store_path: Path) -> None:
    """Test that the descriptor is not changed."""
    with Store.open(store_path, create=True) as store:
        store.save({"x": 1}, step=1)
    before = directory_content(store_path)["asymcheck.store"]
    with Store.open(store_path, create=True) as store:
        assert store.load() == {"x": 1}
    assert directory_content(store_path)["asymcheck.store"] == before


def _with_file(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def _with_hidden_file(path: Path) -> None:
    path.mkdir()
    (path / ".git").mkdir()


def _with_a_folder_of_the_same_name(path: Path) -> None:
    (path / "packs").mkdir(parents=True)
    (path / "packs" / "linux.tar").write_text("mine")


def _without_its_descriptor(path: Path) -> None:
    with Store.open(path, create=True) as store:
        store.save({"x": torch.ones(5000)}, step=1)
    (path / "asymcheck.store").unlink()


@pytest.mark.parametrize(
    "make", [_with_file, _with_hidden_file, _with_a_folder_of_the_same_name, _without_its_descriptor]
)
def test_a_directory_that_is_something_else_is_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Test that a foreign directory is neither opened nor changed."""
    path = tmp_path / "other"
    make(path)
    before = directory_content(path)
    for read_only in (False, True):
        with pytest.raises(StoreNotFoundError):
            Store.open(path, read_only=read_only)
    assert directory_content(path) == before


def test_interrupted_creation_is_continued(tmp_path: Path) -> None:
    """Test that only empty folders and temporary files exist before the descriptor."""
    for name in ("heads", "manifests", "packs"):
        (tmp_path / name).mkdir()
    (tmp_path / "0123.tmp").write_bytes(b"half a descriptor")
    with Store.open(tmp_path, create=True) as store:
        store.save({"x": 1}, step=1)
        assert store.load() == {"x": 1}


def test_a_file_is_no_place_for_a_store(tmp_path: Path) -> None:
    """Test a file at the path, and a file as a parent."""
    (tmp_path / "file").write_text("mine")
    for location in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(AsymcheckError):
            Store.open(location, create=True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["nul\0", "no-utf-8-\udcff", "~nobody-of-this-name/store"])
def test_a_name_that_no_catalog_can_have_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Test that opening raises the error, not the first save or LMDB."""
    location = name if name.startswith("~") else tmp_path / name
    with pytest.raises(InvalidInputError, match="location"):
        Store.open(location, create=True)
    assert list(tmp_path.iterdir()) == []


def test_reading_needs_an_existing_store(store_path: Path) -> None:
    """Test that opening for reading creates nothing."""
    with pytest.raises(StoreNotFoundError, match="does not exist"):
        Store.open(store_path, read_only=True)
    assert not store_path.exists()


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_mistyped_path_creates_no_store(store_path: Path, is_empty: bool) -> None:
    """Test that only ``create=True`` creates a store, and that the error says so."""
    if is_empty:
        store_path.mkdir()
    with pytest.raises(StoreNotFoundError, match="create=True"):
        Store.open(store_path)
    assert not store_path.exists() or list(store_path.iterdir()) == []
    Store.open(store_path, create=True).close()
    Store.open(store_path).close()


def test_a_store_cannot_be_created_read_only(store_path: Path) -> None:
    """Test two options that contradict each other."""
    with pytest.raises(InvalidInputError, match="create=True with read_only=True"):
        Store.open(store_path, create=True, read_only=True)


def test_a_store_opened_for_reading_changes_nothing(store_path: Path) -> None:
    """Test that loads, listings and checks work, writes are refused, and no byte changes."""
    state = {"x": torch.arange(5000), "y": 1}
    with Store.open(store_path, create=True) as store:
        saved = store.save(state, step=1)
    before = directory_content(store_path)
    with Store.open(store_path, read_only=True) as store:
        assert_same(store.load(), state)
        assert_same(store.load(tensors="x"), {"x": state["x"]})
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
        assert store.verify() == []
        for call in (
            lambda: store.save(state, step=2),
            lambda: store.delete(1),
            store.gc,
            lambda: store.gc(dry_run=True),
            lambda: store.training.begin_generation(saved),
        ):
            with pytest.raises(ReadOnlyStoreError, match="read_only=True"):
                call()
    assert directory_content(store_path) == before


def test_a_reader_needs_no_catalog(store_path: Path) -> None:
    """Test that a missing or destroyed catalog does not affect opening and loading."""
    with Store.open(store_path, create=True) as store:
        store.save({"x": torch.arange(5000)}, step=1)
    (store_path / "catalog" / "data.mdb").write_bytes(b"not LMDB")
    with Store.open(store_path, read_only=True) as store:
        assert_same(store.load(), {"x": torch.arange(5000)})


def test_a_closed_store_says_so(store: Store) -> None:
    """Test that closing twice is allowed, and that using a closed store raises an error."""
    saved = store.save({"x": 1}, step=1)
    store.close()
    store.close()
    for call in (
        lambda: store.save({}, step=2),
        store.load,
        store.restore,
        store.checkpoints,
        lambda: store.delete(1),
        store.gc,
        store.verify,
        lambda: store.training.begin_generation(saved),
    ):
        with pytest.raises(ClosedStoreError, match="is closed"):
            call()


@pytest.mark.slow
def test_a_forked_child_must_open_the_store_itself(tmp_path: Path) -> None:
    """Test a data loader worker that would use locks and mappings of its parent."""
    # Use a separate process, because threads of other tests may hold a lock during a fork.
    command = [sys.executable, "-c", _FORKING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_system_without_hard_links_is_refused(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the error names the cause, which exFAT reports like a lack of permission."""
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, os.strerror(errno.EPERM))))
    with pytest.raises(UnsupportedFileSystemError, match="needs a file system with hard links"):
        Store.open(store_path, create=True)


def test_a_network_file_system_is_refused_for_writing(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that only writing is refused, because it would damage the catalog."""
    with Store.open(store_path, create=True) as store:
        store.save({"x": 1}, step=1)
    mountinfo = f"1 0 0:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:2 / {store_path} rw shared:7 - nfs4 server:/x rw\n"

    def refuse(path: Path) -> None:
        drives.refuse_network(path, mountinfo)

    monkeypatch.setattr(tier, "refuse_network", refuse)
    with pytest.raises(UnsupportedFileSystemError, match=r"network file system \(nfs4\)"):
        Store.open(store_path, create=True)
    with pytest.raises(UnsupportedFileSystemError):
        Store.open(store_path / "new", create=True)
    assert not (store_path / "new").exists()
    with Store.open(store_path, read_only=True) as store:
        assert store.load() == {"x": 1}
    with Store.open(store_path.parent / "local", create=True) as store:
        store.save({"x": 1}, step=1)


WRONG: list[dict[str, object]] = [
    {"partition_bytes": 0},
    {"partition_bytes": 4095},
    {"partition_bytes": 4097},
    {"partition_bytes": (1 << 30) + 4096},
    {"partition_bytes": 8192.0},
    {"bundle_below_bytes": 8 * 1024 * 1024 + 1},
    {"bundle_below_bytes": -1},
    {"deferred_bytes_min": 4095},
    {"deferred_bytes_min": 4097},
    {"deferred_bytes_min": (16 << 20) + 4096},
    {"deferred_bytes_max": 8192 + 1},
    {"deferred_bytes_max": (2 << 20) - 4096},
    {"deferred_bytes_max": (1 << 30) + 4096},
    {"inline_bytes": -1},
    {"inline_bytes": 4097},
    {"inline_total_bytes": -1},
    {"slots": 0},
    {"slots": 1.5},
    {"slots": True},
    {"pack_bytes": 0},
    {"pack_bytes": 1 << 40},
    {"pool_bytes": -1},
    {"catalog_map_bytes": 0},
    {"catalog_readers": 0},
    {"lock_timeout_s": -1.0},
    {"lock_timeout_s": float("inf")},
    {"read_lock_timeout_s": float("nan")},
    {"commit_attempts": 0},
    {"remote": "file:///mnt/checkpoints"},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_configuration_that_cannot_work_is_refused(fields: dict[str, object]) -> None:
    """Test that the error names the field, when the configuration is created."""
    (name,) = fields
    with pytest.raises(InvalidInputError, match=name):
        StoreConfig(**fields)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("config", [3, {"slots": 2}, RemoteConfig(), StoreConfig], ids=str)
def test_invalid_configuration_object_is_refused(store_path: Path, config: object) -> None:
    """Test a local store and a location."""
    for location in (store_path, store_path.as_uri()):
        with pytest.raises(InvalidInputError, match=r"give asymcheck.StoreConfig\(…\)"):
            Store.open(location, config=config, create=True)  # type: ignore[arg-type]  # wrong on purpose
    assert not store_path.exists()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: StoreConfig(remote="hdfs://namenode:8020/there"), "pass a URI as Store.open"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: RemoteConfig(options=8), "give a mapping"),  # type: ignore[arg-type]  # as above
    ],
)
def test_invalid_remote_configuration_object_is_refused(made: Callable[[], object], message: str) -> None:
    """Test that the error is an error of this package."""
    with pytest.raises(InvalidInputError, match=message):
        made()


@pytest.mark.parametrize(
    "fields",
    [
        {"partition_bytes": 4096, "bundle_below_bytes": 4096},
        {"partition_bytes": 1 << 30},
        {"bundle_below_bytes": 0},
        {"deferred_bytes_min": 4096, "deferred_bytes_max": 8192},
        {"deferred_bytes_min": 512 << 20, "deferred_bytes_max": 1 << 30},
        {"inline_bytes": 0},
        {"inline_bytes": 4096},
        {"inline_total_bytes": 0},
        {"slots": 1},
        {"pack_bytes": 1},
        {"pack_bytes": 8 << 30},
        {"pool_bytes": 0},
        {"lock_timeout_s": 0.0},
        {"lock_timeout_s": threading.TIMEOUT_MAX},
        {"commit_attempts": 1},
    ],
    ids=str,
)
def test_the_limits_of_a_configuration_work(store_path: Path, fields: dict[str, int]) -> None:
    """Test that a store with the extreme allowed values saves and loads."""
    state = {"a": torch.arange(3), "b": torch.arange(20_000), "c": torch.empty(0), "d": torch.ones(2_000_000)}
    with Store.open(store_path, config=dataclasses.replace(StoreConfig(), **fields), create=True) as store:
        store.save(state, step=1)
        assert_same(store.load(), state)
        assert store.verify() == []


def test_two_threads_open_one_catalog(store_path: Path) -> None:
    """Test that closing the store closes the catalog, and leaves no descriptor, lock or mark."""
    entered, go_on = threading.Event(), threading.Event()

    def observer(event: events.Event) -> None:
        if event.name == "catalog.rebuilt":
            entered.set()
            go_on.wait(0.3)

    with events.observe(observer), Store.open(store_path, create=True) as store:
        first = threading.Thread(target=store.save, args=({"x": 1},), kwargs={"step": 1, "run": "a"})
        second = threading.Thread(target=store.save, args=({"x": 1},), kwargs={"step": 1, "run": "b"})
        first.start()
        assert entered.wait(60)
        second.start()
        first.join()
        second.join()
    assert not _has_open_catalog(store_path)
    assert list((store_path / "catalog" / "open").iterdir()) == []


def test_two_stores_of_one_process_share_the_directory(store_path: Path) -> None:
    """Test also two paths of the same directory; closing the last store closes the catalog."""
    (store_path.parent / "link").symlink_to(store_path)
    state = {"x": torch.arange(5000)}
    with Store.open(store_path, create=True) as one, Store.open(store_path.parent / "link", create=True) as other:
        one.save(state, step=1)
        assert other.save(state, step=2).written_bytes == 0
        one.close()
        assert _has_open_catalog(store_path)
        other.save({"x": torch.arange(5001)}, step=3)
        assert [checkpoint.step for checkpoint in other.checkpoints()] == [1, 2, 3]
    assert not _has_open_catalog(store_path)


def test_two_threads_open_a_new_catalog_once(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a thread that waits while another one creates the catalog: LMDB supports no second environment."""
    begun, waits, lock = list[str](), threading.Event(), catalog_module._open_lock
    created = catalog_module.Catalog

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is second:
                waits.set()
            lock.acquire()

        def __exit__(self, *_error: object) -> None:
            lock.release()

    def create(*arguments: Any, **more: Any) -> catalog_module.Catalog:  # noqa: ANN401 - passed on
        begun.append(threading.current_thread().name)
        if len(begun) == 1:
            second.start()
            assert waits.wait(60)
        return created(*arguments, **more)

    monkeypatch.setattr(catalog_module, "_open_lock", Lock())
    monkeypatch.setattr(catalog_module, "Catalog", create)
    with Store.open(store_path, create=True) as one, Store.open(store_path) as other:
        second = threading.Thread(target=other.save, args=({"x": 1},), kwargs={"step": 1, "run": "other"})
        one.save({"x": 1}, step=1)
        second.join()
    assert len(begun) == 1
    assert not _has_open_catalog(store_path)


@pytest.mark.parametrize("read_only", [False, True])
def test_packs_without_the_folder_of_manifests_are_no_garbage(store_path: Path, read_only: bool) -> None:
    """Test that a store without its folder of manifests is not treated as a store without checkpoints."""
    with Store.open(store_path, create=True) as store:
        store.save({"a": torch.randn(100_000)}, step=1)
    (store_path / "manifests").rename(store_path.parent / "elsewhere")
    with pytest.raises(StructureError, match="folder manifests is missing"):
        Store.open(store_path, read_only=read_only)
    (store_path.parent / "elsewhere").rename(store_path / "manifests")
    with Store.open(store_path, read_only=read_only) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]


@pytest.mark.parametrize("read_only", [False, True])
def test_store_that_vanishes_is_not_empty(store_path: Path, read_only: bool) -> None:
    """Test an unmounted drive, after which a resume must not start from scratch."""
    state = {"a": torch.randn(100_000)}
    with Store.open(store_path, create=True) as store:
        store.save(state, step=1)
    with Store.open(store_path, read_only=read_only) as store:
        store_path.rename(store_path.parent / "elsewhere")
        for ask in (store.checkpoints, store.runs, store.load, lambda: store.restore(into=state, fall_back=True)):
            with pytest.raises(StorageError, match=r"store .* does not exist any more: was it moved"):
                ask()
        (store_path.parent / "elsewhere").rename(store_path)
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
        assert store.checkpoints("another") == []


def test_writes_to_a_store_that_vanished_name_the_cause(store_path: Path) -> None:
    """Test a collection, and a background save, which writes its packs before it reads any manifest."""
    state = {"a": torch.randn(100_000)}
    with Store.open(store_path, create=True) as store:
        store.save(state, step=1)
        store_path.rename(store_path.parent / "elsewhere")
        for write in (store.gc, lambda: store.save({"a": state["a"] + 1}, step=2, generation=lambda: 1)):
            with pytest.raises(StorageError, match=r"store .* does not exist any more: was it moved"):
                write()
        (store_path.parent / "elsewhere").rename(store_path)
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]


def test_store_that_vanishes_while_a_pack_is_written_names_the_cause(store_path: Path) -> None:
    """Test a directory that is removed during a training: the open file of the pack hides that until its rename."""

    def vanish(event: events.Event) -> None:
        if event.name == "pack.synced":
            store_path.rename(store_path.parent / "elsewhere")

    with Store.open(store_path, create=True) as store:
        with (
            events.observe(vanish),
            pytest.raises(StorageError, match=r"store .* does not exist any more: was it moved"),
        ):
            store.save({"a": torch.randn(100_000)}, step=1)
        (store_path.parent / "elsewhere").rename(store_path)


def test_change_of_the_working_directory_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a store that was opened by a relative path: the error names the cause, and the store can be closed."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Store.open("store", create=True) as store:
        store.save({"a": 1}, step=1)
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(StorageError, match="was it moved or removed, or did the program change that directory"):
            store.save({"a": 2}, step=2)
    assert not _has_open_catalog(tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        assert store.load() == {"a": 1}


def test_store_is_closed_after_its_link_was_replaced(store_path: Path, tmp_path: Path) -> None:
    """Test a store that was opened by a link, which leads elsewhere when the store is closed."""
    Store.open(store_path, create=True).close()
    link = tmp_path / "link"
    link.symlink_to(store_path)
    store = Store.open(link)
    store.save({"a": 1}, step=1)
    link.unlink()
    link.symlink_to(tmp_path)
    store.close()
    assert not _has_open_catalog(store_path)


def test_place_that_cannot_hold_a_store_is_a_clear_error() -> None:
    """Test /proc, where no directory can be created."""
    with pytest.raises(StorageError, match="cannot create store /proc/asymcheck-test"):
        Store.open("/proc/asymcheck-test", create=True)


@pytest.mark.parametrize("create", [False, True])
def test_a_lost_descriptor_is_replaced_by_that_of_a_new_store(tmp_path: Path, *, create: bool) -> None:
    """Test the advice in the error, as docs/failure-model.md gives it."""
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"x": torch.arange(100_000)}, step=1)
    descriptor = tmp_path / "store" / "asymcheck.store"
    descriptor.unlink()
    with pytest.raises(StoreNotFoundError, match=r"lost its asymcheck\.store, but it has manifests and packs"):
        Store.open(tmp_path / "store", create=create)
    with Store.open(tmp_path / "new", create=True):
        descriptor.write_bytes((tmp_path / "new" / "asymcheck.store").read_bytes())
    with Store.open(tmp_path / "store") as store:
        assert torch.equal(store.load()["x"], torch.arange(100_000))
        store.save({"x": torch.arange(50_000)}, step=2)
        assert store.verify(deep=True) == []
