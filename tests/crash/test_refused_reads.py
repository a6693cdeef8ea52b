"""Test a partly unreadable disk: another copy, another checkpoint, or an error that names the file."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from asymcheck import events
from asymcheck.errors import (
    AsymcheckError,
    InconsistentCheckpointError,
    ReadOnlyStoreError,
    SkippedCheckpointWarning,
    TooManyFilesError,
)
from asymcheck.events import Event
from asymcheck.fsck.verify import Severity
from asymcheck.storage.local_files import Files
from asymcheck.store import Store
from tests.crash import faults
from tests.crash.actions import open_store
from tests.crash.faults import LOOKS, Counter, WatchedFiles
from tests.crash.states import fingerprint, make_state
from tests.crash.survival import leftovers


@pytest.fixture
def path(store_path: Path) -> Path:
    """Return a store with steps 0 and 2, which share only data that never changes."""
    with open_store(store_path) as store:
        store.save(make_state(0), step=0)
        store.save(make_state(2), step=2)
    return store_path


def _broken(path: Path, bad: Callable[[Path], bool], number: int = errno.EIO, operation: str = "pread") -> Store:
    """Open a store of which some files cannot be read."""
    refuse = faults.refuse(number)

    def before(done: str, file: Path) -> None:
        if done == operation and bad(file):
            refuse(done, file)

    return open_store(path, read_only=True, files=WatchedFiles(before))


def test_one_of_two_copies_cannot_be_read(store_path: Path) -> None:
    """Test that the other copy is used, and that verify names the unreadable one and reports no lost checkpoint."""
    with open_store(store_path) as store, open_store(store_path) as other:
        packs: list[set[Path]] = []

        def save_the_same(event: Event) -> None:
            if event.name == "pack.sealed" and not packs:
                packs.append(set((store_path / "packs").glob("*.pack")))
                other.save(make_state(0), step=0)

        with events.observe(save_the_same):
            store.save(make_state(0), step=1)
        (first,) = packs[0]

    class BadFrames(Files):
        """Files that read header and index of the pack, and none of its larger frames."""

        def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, path: Path) -> int:
            if path == first and sum(map(len, buffers)) > 8192:
                faults.refuse(errno.EIO)("pread", path)
            return super().pread(descriptor, buffers, offset, path)

    with open_store(store_path, read_only=True, files=BadFrames()) as store:
        for step in (0, 1):
            assert fingerprint(store.load(step)) == fingerprint(make_state(0))
        findings = store.verify()
    assert findings
    assert {finding.severity for finding in findings} == {Severity.WARNING}
    assert all(first.name in finding.where and "Input/output error" in finding.message for finding in findings)
    with _broken(store_path, lambda file: file == first, errno.EACCES, "open_read") as store:
        for step in (0, 1):
            assert fingerprint(store.load(step)) == fingerprint(make_state(0))


def test_the_newest_cannot_be_read(path: Path) -> None:
    """Test that an older checkpoint is restored with the reason, and that a request by step is refused."""
    with open_store(path, read_only=True) as store:
        needed = {part.pack for tensor in store.tensors(2)[1] for part in tensor.partitions}
        older = {part.pack for tensor in store.tensors(0)[1] for part in tensor.partitions}
    lost = [f"{pack}.pack" for pack in needed - older]
    with _broken(path, lambda file: file.name in lost) as store:
        with pytest.warns(SkippedCheckpointWarning, match="Input/output error"):
            assert fingerprint(store.load()) == fingerprint(make_state(0))
        with pytest.raises(InconsistentCheckpointError, match="Input/output error"):
            store.load(2)


def test_a_manifest_cannot_be_read(path: Path) -> None:
    """Test an unreadable manifest, and that no pack is collected, because its packs are unknown."""
    (manifest,) = path.glob("manifests/default/*-000000000002-*/*.manifest")
    with _broken(path, lambda file: file == manifest) as store:
        with pytest.warns(SkippedCheckpointWarning, match="Input/output error"):
            assert fingerprint(store.load()) == fingerprint(make_state(0))
        assert any(finding.severity is Severity.ERROR for finding in store.verify())


@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_missing_permission_is_reported(path: Path, kind: str) -> None:
    """Test that missing permission is not treated as damage: an older checkpoint would silently lose steps."""
    with open_store(path, read_only=True) as store:
        sound = store.verify()
        newest = {part.pack for tensor in store.tensors(2)[1] for part in tensor.partitions}
    files = {file for pack in newest for file in path.glob(f"packs/{pack}.pack")}
    if kind == "manifests":
        files = set(path.glob("manifests/default/*-000000000002-*/*.manifest"))
    with _broken(path, files.__contains__, errno.EACCES, "open_read") as store:
        for action in (store.load, lambda: store.load(2), store.verify):
            with pytest.raises(ReadOnlyStoreError, match="Permission denied"):
                action()
    with open_store(path) as store:
        assert store.verify() == sound


@pytest.mark.parametrize(("number", "error"), [(errno.EMFILE, TooManyFilesError), (errno.EACCES, ReadOnlyStoreError)])
def test_a_collection_takes_no_refusal_for_damage(path: Path, number: int, error: type[AsymcheckError]) -> None:
    """Test that a collection that may not open a manifest does not advise to delete the intact checkpoint."""
    refuse = faults.refuse(number)

    def before(done: str, file: Path) -> None:
        if done == "open_read" and file.suffix == ".manifest":
            refuse(done, file)

    with open_store(path, files=WatchedFiles(before)) as store, pytest.raises(error) as caught:
        store.gc()
    assert "delete" not in str(caught.value)


def _until_enough() -> Iterator[int]:
    yield from range(1, 1000)
    raise AssertionError("there is no end to the operations")


ACTIONS: dict[str, Callable[[Store], object]] = {
    "load": lambda store: store.load(2),
    "load the newest": lambda store: store.restore().state,
    "save": lambda store: store.save(make_state(3), step=3),
    "gc": lambda store: store.gc(),
    "delete": lambda store: store.delete(0),
    "verify": lambda store: store.verify(),
    "checkpoints": lambda store: store.checkpoints(),
}


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_any_look_fails(path: Path, action: str, tmp_path: Path) -> None:
    """Test that any failing read, open or listing raises an error of this package, or gives a right result."""
    for at in _until_enough():
        copy = tmp_path / f"copy-{at}"
        shutil.copytree(path, copy)
        counter = Counter(LOOKS, at, faults.refuse(errno.EIO))
        try:
            with open_store(copy, read_only=action.startswith("load"), files=WatchedFiles(counter)) as store:
                outcome = ACTIONS[action](store)
        except AsymcheckError as error:
            if "Input/output error" not in str(error):
                raise AssertionError(f"look {at}: the error hides its cause") from error
        else:
            if action == "load":
                assert fingerprint(outcome) == fingerprint(make_state(2)), f"look {at}"
            if action == "load the newest":
                assert fingerprint(outcome) in [fingerprint(make_state(step)) for step in (0, 2)], f"look {at}"
        with open_store(copy) as store:
            assert fingerprint(store.load(2)) == fingerprint(make_state(2))
            store.gc()
            assert leftovers(store) == []
            assert store.verify() == []
        shutil.rmtree(copy)
        if len(counter.seen) < at:
            return
