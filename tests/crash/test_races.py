"""Test forced races: another operation runs exactly between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from asymcheck import events
from asymcheck.commit.pack_builder import PackBuilder
from asymcheck.errors import RecoveryError, StorageError
from asymcheck.events import Event
from asymcheck.storage.local_files import FILE_MODE, Files
from asymcheck.storage.nvme import Transaction
from asymcheck.storage.reachability import StoreReachability
from asymcheck.store import Store
from asymcheck.types import Digest, Location, PackId
from tests.crash.actions import open_store
from tests.crash.states import fingerprint, make_state
from tests.crash.survival import check_steps


@contextlib.contextmanager
def at_first(name: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Call a function at the first event of a name; yield the names of all events."""
    seen: list[str] = []

    def observer(event: Event) -> None:
        seen.append(event.name)
        if event.name == name and seen.count(name) == 1:
            act()

    with events.observe(observer):
        yield seen


def test_a_pack_is_collected_between_lookup_and_pin(stores: tuple[Store, Store]) -> None:
    """Test that a save writes partitions itself if a collection has freed the packs that it meant to reuse."""
    store, other = stores
    store.save(make_state(0), step=0)

    def collect() -> None:
        other.delete(0)
        assert other.gc().freed_packs >= 1

    with at_first("pack.sealed", collect) as seen:
        checkpoint = store.save(make_state(1), step=1)
    assert seen.count("catalog.pinned") == 2
    assert checkpoint.written_bytes > 100_000
    check_steps(store, {1: 1})


def test_a_pack_is_collected_after_the_pin(stores: tuple[Store, Store]) -> None:
    """Test that a collection keeps a pinned pack, although no manifest references it yet."""
    store, other = stores
    store.save(make_state(0), step=0)

    def collect() -> None:
        other.delete(0)
        assert other.gc().freed_packs == 0

    with at_first("catalog.pinned", collect) as seen:
        checkpoint = store.save(make_state(0), step=1)
    assert seen.count("catalog.pinned") == 1
    assert checkpoint.written_bytes == 0
    check_steps(store, {1: 0})


def test_collection_ignoring_pins_is_noticed(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the checkpoint is lost without pins, so that the test above can fail."""
    store, other = stores
    store.save(make_state(0), step=0)
    monkeypatch.setattr(Transaction, "pins", lambda _self: {})

    def collect() -> None:
        other.delete(0)
        other.gc()

    with at_first("catalog.pinned", collect):
        store.save(make_state(0), step=1)
    with pytest.raises(RecoveryError):
        store.load(1)


def test_a_manifest_is_committed_during_collection(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a collection starts again if the catalog has a checkpoint that its listing missed."""
    store, other = stores
    store.save(make_state(0), step=0)
    store.delete(0)
    plans = []
    original = StoreReachability._read_packs

    def read_packs(self: StoreReachability) -> None:
        if not plans:
            # This save reuses all packs that the collection is about to free, and commits before it does.
            assert other.save(make_state(0), step=1).written_bytes == 0
        plans.append(self)
        original(self)

    monkeypatch.setattr(StoreReachability, "_read_packs", read_packs)
    store.gc()
    assert len(plans) == 2
    check_steps(store, {1: 0})


def test_collection_that_does_not_start_again_is_noticed(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the checkpoint is lost without the check of the catalog, so that the test above can fail."""
    store, other = stores
    store.save(make_state(0), step=0)
    store.delete(0)
    original = StoreReachability._read_packs

    def read_packs(self: StoreReachability) -> None:
        other.save(make_state(0), step=1)
        original(self)

    monkeypatch.setattr(StoreReachability, "_read_packs", read_packs)
    monkeypatch.setattr(Transaction, "manifests", lambda _self: set())
    store.gc()
    with pytest.raises(RecoveryError):
        store.load(1)


def test_collection_takes_packs_at_every_attempt(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a save that loses its packs repeatedly fails with a clear error and leaves no file."""
    store, _ = stores
    store.save(make_state(0), step=0)
    monkeypatch.setattr(Transaction, "pack_state", lambda _self, _pack: None)
    take_back = PackBuilder.take_back

    def find_again(self: PackBuilder, packs: Sequence[PackId]) -> list[Digest]:
        lost = take_back(self, packs)
        self._gone.clear()
        return lost

    monkeypatch.setattr(PackBuilder, "take_back", find_again)
    with pytest.raises(StorageError, match="removed partitions 8 times"):
        store.save(make_state(0), step=1)
    monkeypatch.undo()
    check_steps(store, {0: 0})


def test_two_saves_store_the_same_bytes(stores: tuple[Store, Store]) -> None:
    """Test that the partitions are stored twice, and that deleting one checkpoint does not affect the other."""
    store, other = stores
    with at_first("pack.sealed", lambda: other.save(make_state(0), step=0)):
        store.save(make_state(0), step=1)
    assert store.resources.usage().pack_bytes > 200_000
    store.delete(0)
    check_steps(store, {1: 0})


def test_a_pack_moves_between_lookup_and_index(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a stale catalog entry is ignored if its pack is gone when its index is read."""
    store, other = stores
    store.save(make_state(0), step=0)
    original = Transaction.location
    done = []

    def location(self: Transaction, digest: Digest) -> Location | None:
        found = original(self, digest)
        if not done:
            done.append(found)
            other.delete(0)
            other.gc()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "location", location)
        assert store.save(make_state(0), step=1).written_bytes > 0
    check_steps(store, {1: 0})


class _Creating(Files):
    """Runs an action right after a pack was created, before it is locked."""

    act: Callable[[], object] | None = None

    def open_new(self, path: Path, mode: int = FILE_MODE) -> int:
        """Create, then act."""
        descriptor = super().open_new(path, mode)
        if self.act is not None and path.parent.name in ("packs", "default"):
            act, self.act = self.act, None
            act()
        return descriptor


def test_pack_collected_before_its_lock(store_path: Path) -> None:
    """Test that the save starts the pack again."""
    files = _Creating()
    with open_store(store_path, files=files) as store, open_store(store_path) as other:
        store.gc()
        removed = []
        files.act = lambda: removed.append(other.gc().removed_temporaries)
        store.save(make_state(0), step=0)
        assert removed == [1]
        check_steps(store, {0: 0})


def test_head_record_collected_before_its_lock(store_path: Path) -> None:
    """Test that the generation begins nevertheless."""
    files = _Creating()
    with open_store(store_path, files=files) as store, open_store(store_path) as other:
        checkpoint = store.save(make_state(0), step=0)
        removed = []
        files.act = lambda: removed.append(other.gc().removed_temporaries)
        assert store.training.begin_generation(checkpoint) == 2
        assert removed == [1]
        check_steps(store, {0: 0})


@pytest.mark.parametrize("how", ["deletion", "collection"])
def test_folder_removed_during_a_deletion(store_path: Path, how: str) -> None:
    """Test that two deletions of a step, or a deletion and a collection, do not conflict."""

    class Removing(Files):
        armed = False

        def unlink(self, path: Path) -> None:
            if self.armed and how == "deletion":
                self.armed = False
                other.delete(0)
            super().unlink(path)
            if self.armed:
                self.armed = False
                other.gc()

    files = Removing()
    with open_store(store_path, files=files) as store, open_store(store_path) as other:
        store.save(make_state(0), step=0)
        store.save(make_state(1), step=1)
        files.armed = True
        store.delete(0)
        check_steps(store, {1: 1})


def test_the_same_step_twice(stores: tuple[Store, Store]) -> None:
    """Test that both saves are kept, the later one is the newest, and deleting the step deletes both."""
    store, other = stores
    with at_first("manifest.committed", lambda: other.save(make_state(3, salt=1), step=3)):
        store.save(make_state(3), step=3)
    first, second = store.checkpoints()
    assert first.step == second.step == 3
    assert first.save_id < second.save_id
    assert fingerprint(store.load()) == fingerprint(make_state(3, salt=1))
    assert fingerprint(store.load(3)) == fingerprint(make_state(3, salt=1))
    assert len(store.delete(3)) == 2
    check_steps(store, {})


def test_two_restores_at_once(store_path: Path) -> None:
    """Test that each restore begins a generation, and that training continues from the later one."""
    files = _Creating()
    with open_store(store_path, files=files) as store, open_store(store_path) as other:
        first, second = store.save(make_state(0), step=0), store.save(make_state(1), step=1)
        begun = []
        files.act = lambda: begun.append(other.training.begin_generation(second))
        assert store.training.begin_generation(first) == 3
        assert begun == [2]
        assert store.restore().checkpoint.step == 0
        check_steps(store, {0: 0, 1: 1})
