"""Test that a failed save leaves no checkpoint, keeps earlier ones, and holds no resources."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Store, StoreConfig, events
from asymcheck.errors import OutOfSpaceError, StorageError
from asymcheck.events import Event
from asymcheck.storage.local_files import Files, translated
from asymcheck.storage.nvme import NvmeTier
from tests.store.equality import assert_same

MIB = 1 << 20


class Failing(Files):
    """Fails matching operations with an operating system error."""

    def __init__(self) -> None:
        self.number = errno.ENOSPC
        self.matches: Callable[[str, Path], bool] = lambda _action, _path: False

    def _check(self, action: str, path: Path) -> None:
        if self.matches(action, path):
            with translated(action, path):
                raise OSError(self.number, os.strerror(self.number))

    def open_new(self, path: Path, mode: int = 0o644) -> int:
        """Fail or open."""
        self._check("create", path)
        return super().open_new(path, mode)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        """Fail or write."""
        self._check("write", path)
        super().pwrite(descriptor, buffers, offset, path)

    def sync(self, descriptor: int, path: Path) -> None:
        """Fail or sync."""
        self._check("sync", path)
        super().sync(descriptor, path)

    def sync_directory(self, path: Path) -> None:
        """Fail or sync."""
        self._check("sync directory", path)
        super().sync_directory(path)

    def make_directory(self, path: Path) -> bool:
        """Fail or create."""
        self._check("create directory", path)
        return super().make_directory(path)

    def unlink(self, path: Path) -> None:
        """Fail or unlink."""
        self._check("remove", path)
        super().unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        """Fail or rename."""
        self._check("rename", target)
        super().rename(source, target)


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(256, (8 * MIB,), dtype=torch.uint8, generator=generator), "y": seed}


@pytest.fixture
def files() -> Failing:
    """Return the file operations, with a setting of the failing ones."""
    return Failing()


@pytest.fixture
def store(store_path: Path, files: Failing) -> Iterator[Store]:
    """Return a store with one checkpoint, on these file operations."""
    config = StoreConfig(partition_bytes=MIB, bundle_below_bytes=MIB, pack_bytes=3 * MIB)
    with Store(NvmeTier(store_path, config, files=files)) as opened:
        opened.save(_state(1), step=1)
        yield opened


CALLS: dict[str, tuple[str, str]] = {
    "creating a pack": ("create", ".tmp"),
    "writing a frame": ("write", ".tmp"),
    "syncing a pack": ("sync", ".tmp"),
    "renaming a pack": ("rename", ".pack"),
    "syncing the packs": ("sync directory", "packs"),
    "making the checkpoint's directory": ("create directory", ""),
    "renaming the manifest": ("rename", ".manifest"),
}


@pytest.mark.slow(quick=["creating a pack-broken"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("name", CALLS)
def test_a_failed_save_leaves_nothing_behind(store: Store, files: Failing, name: str, number: int) -> None:
    """Test that the earlier checkpoint is unchanged, and that a collection by this process leaves no file."""
    action, ending = CALLS[name]
    before = {path.name for path in (store.path / "packs").iterdir()}
    files.number = number
    files.matches = lambda what, path: what == action and path.name.endswith(ending)
    with pytest.raises(OutOfSpaceError if number == errno.ENOSPC else StorageError):
        store.save(_state(2), step=2)
    files.matches = lambda _what, _path: False
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
    assert_same(store.load(), _state(1))
    collected = store.gc()
    assert {path.name for path in (store.path / "packs").iterdir()} == before
    assert collected.kept_packs == len(before)
    assert [path.name for path in (store.path / "manifests" / "default").iterdir()] == [
        path.parent.name for path in (store.path / "manifests").rglob("*.manifest")
    ]
    assert store.verify() == []


@pytest.mark.slow(quick=["writing a frame"])
@pytest.mark.parametrize("name", CALLS)
def test_the_save_after_a_failed_one_succeeds(store: Store, files: Failing, name: str) -> None:
    """Test the same state, with and without a collection in between."""
    action, ending = CALLS[name]
    files.matches = lambda what, path: what == action and path.name.endswith(ending)
    with pytest.raises(OutOfSpaceError):
        store.save(_state(2), step=2)
    files.matches = lambda _what, _path: False
    store.save(_state(2), step=2)
    assert_same(store.load(), _state(2))
    store.gc()
    assert_same(store.load(), _state(2))
    assert store.verify() == []


def test_a_manifest_that_got_its_name_in_a_failed_save_is_taken_back(store: Store, files: Failing) -> None:
    """Test that no checkpoint appears after its save was reported as failed."""
    files.matches = lambda what, path: what == "sync directory" and any(path.glob("*.manifest"))
    with pytest.raises(OutOfSpaceError):
        store.save(_state(2), step=2)
    files.matches = lambda _what, _path: False
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
    assert store.gc().freed_bytes > 8 * MIB
    assert_same(store.load(), _state(1))
    assert store.verify() == []


def test_a_manifest_that_cannot_be_taken_back_keeps_its_packs(store: Store, files: Failing) -> None:
    """Test that the checkpoint is complete, also after a collection, if even its removal fails."""

    def matches(what: str, path: Path) -> bool:
        return (what == "sync directory" and any(path.glob("*.manifest"))) or what == "remove"

    files.matches = matches
    with pytest.raises(OutOfSpaceError):
        store.save(_state(2), step=2)
    files.matches = lambda _what, _path: False
    store.gc()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]
    assert_same(store.load(), _state(2))
    assert store.verify() == []


def test_a_failed_save_releases_its_locks(store: Store, files: Failing) -> None:
    """Test that its packs can be collected immediately, and that no descriptor stays open."""
    descriptors = len(os.listdir("/proc/self/fd"))
    files.matches = lambda what, path: what == "rename" and path.name.endswith(".manifest")
    with pytest.raises(OutOfSpaceError):
        store.save(_state(2), step=2)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_interrupted_save_leaves_nothing_behind(store: Store) -> None:
    """Test Ctrl-C during the writes: no thread continues, and the store can be used."""
    main = threading.main_thread().ident
    assert main is not None
    interrupted = threading.Event()

    def observer(event: events.Event) -> None:
        if event.name == "frame.written" and not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)

    descriptors = len(os.listdir("/proc/self/fd"))
    with events.observe(observer), pytest.raises(KeyboardInterrupt):
        store.save(_state(2), step=2)
    written = []
    with events.observe(lambda event: written.append(event.name)):
        time.sleep(0.2)
    assert written == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert list((store.path / "packs").glob("*.tmp")) == []
    assert_same(store.load(), _state(1))
    store.save(_state(2), step=2)
    assert_same(store.load(), _state(2))


def test_an_observer_that_raises_fails_the_save(store: Store) -> None:
    """Test that the observer's error is raised, and that the store is unchanged."""

    def observer(event: events.Event) -> None:
        if event.name == "pack.synced":
            raise ZeroDivisionError

    with events.observe(observer), pytest.raises(ZeroDivisionError):
        store.save(_state(2), step=2)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
    store.save(_state(2), step=2)
    assert_same(store.load(), _state(2))


def test_a_save_emits_the_steps_of_the_commit_in_order(store: Store) -> None:
    """Test the order: packs, then the catalog, then the manifest."""
    seen: list[str] = []
    with events.observe(lambda event: seen.append(event.name)):
        store.save(_state(2), step=2)
    order = [name for name in dict.fromkeys(seen) if name in events.COMMIT_ORDER]
    assert order == [name for name in events.COMMIT_ORDER if name in order]
    assert set(order) == set(events.COMMIT_ORDER)


@pytest.mark.parametrize(
    ("event", "lost"),
    [
        ("catalog.pinned", ""),
        *((f"manifest.{event}", lost) for event in ("directory_created", "renamed") for lost in ("", "default/{}")),
    ],
)
def test_checkpoint_deleted_during_its_commit_is_a_named_error(store: Store, event: str, lost: str) -> None:
    """Test that earlier and later checkpoints are intact."""
    store.save({"x": torch.rand(3000)}, step=1)
    manifests, aside = store.path / "manifests", store.path.parent / "aside"

    def take_away(found: Event) -> None:
        if found.name == event:
            newest = max(os.listdir(manifests / "default"))
            (manifests / lost.format(newest)).rename(aside)

    refused = pytest.raises(StorageError, match="was removed while the manifest was being written")
    with events.observe(take_away), refused:
        store.save({"x": torch.rand(3000)}, step=2)
    if lost:
        shutil.rmtree(aside)
    else:
        aside.rename(manifests)
    state = {"x": torch.rand(3000)}
    store.save(state, step=3)
    # The directory that the failed save created may be left.
    assert {finding.kind for finding in store.verify()} <= {"empty-checkpoint"}
    assert_same(store.load(), state)
