"""Test a full or failing disk at any operation of a save, a deletion, a collection or a restore."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from asymcheck import events
from asymcheck.errors import AsymcheckError, OutOfSpaceError, StorageError
from asymcheck.events import COMMIT_ORDER, Event
from asymcheck.store import Store
from tests.crash import faults
from tests.crash.actions import Action, open_store, take
from tests.crash.faults import CATALOG_CHANGES, CHANGES, Counter, WatchedFiles
from tests.crash.states import Journal, Promises, fingerprint, make_state
from tests.crash.survival import check_goes_on, check_unrepaired, leftovers
from tests.visiting import Visited, visiting

Copy = Callable[[Sequence[Action]], Path]

BEFORE: dict[str, list[Action]] = {
    "the first save": [],
    "a later save": [["save", 1]],
    "a save into recycled packs": [["save", 0], ["save", 1], ["save", 2], ["delete", 0], ["delete", 1], ["gc"]],
}
NEXT = 4
"""Step of the failing save."""


@pytest.fixture
def fresh(template: Copy, tmp_path: Path) -> Callable[[str], Path]:
    """Function that returns a new copy of the store of a scene, in a folder with its journal."""

    def copy(scene: str) -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(template(BEFORE[scene]), tmp_path / "copy")
        return tmp_path / "copy"

    return copy


def _save_operations(folder: Path) -> int:
    """Return the number of operations of a save, including the opening of the store."""
    counter = Counter(CHANGES)
    with open_store(folder / "store", files=WatchedFiles(counter)) as store:
        store.save(make_state(NEXT), step=NEXT)
    return len(counter.seen)


def _check_after_failure(store: Store, promised: Promises, *, may_exist: bool = False) -> None:
    """Check that earlier checkpoints exist, the failed step does not, and a collection removes all leftovers."""
    if may_exist:
        # If the failed step exists, it is complete.
        promised.begun["default", NEXT] = fingerprint(make_state(NEXT))
        promised.newest.clear()
    check_unrepaired(store.path, promised)
    store.gc()
    assert leftovers(store) == []


class _Failing:
    """Refuses one operation, or this one and all later ones, until it is repaired."""

    def __init__(self, at: int, number: int, *, for_good: bool) -> None:
        self._at, self._refuse, self._for_good = at, faults.refuse(number), for_good
        self._wanted = OutOfSpaceError if number == errno.ENOSPC else StorageError
        self.count = 0
        self.broken_syncs: list[Path] = []
        self.works = False

    def check(self, error: AsymcheckError) -> None:
        """Check the type of an error."""
        assert isinstance(error, self._wanted), repr(error)

    def __call__(self, operation: str, path: Path) -> None:
        if self.works or operation not in CHANGES:
            return
        self.count += 1
        if operation == "sync":
            assert path not in self.broken_syncs, "a file whose sync failed was synced again"
        if self.count == self._at or (self._for_good and self.count > self._at):
            if operation == "sync":
                self.broken_syncs.append(path)
            self._refuse(operation, path)


@pytest.mark.slow(quick=["some-the first save-full once"])
@pytest.mark.parametrize(
    ("number", "for_good"),
    [(errno.ENOSPC, False), (errno.EIO, False), (errno.EIO, True)],
    ids=["full once", "failing once", "failing for good"],
)
@pytest.mark.parametrize("scene", BEFORE)
@visiting(4)
def test_a_refused_operation(
    scene: str, number: int, for_good: bool, visited: Visited[int], fresh: Callable[[str], Path]
) -> None:
    """Test that the save fails with the right error or succeeds, leaves no file, and that the next save succeeds."""
    for at in visited(range(1, _save_operations(fresh(scene)) + 1)):
        with _with_point(f"operation {at}"):
            _refuse_and_check(fresh(scene), _Failing(at, number, for_good=for_good), for_good=for_good)


def _refuse_and_check(folder: Path, failing: _Failing, *, for_good: bool) -> None:
    promised = Journal(folder / "journal").promises()
    try:
        store = open_store(folder / "store", files=WatchedFiles(failing))
    except AsymcheckError as error:
        failing.check(error)
        store = open_store(folder / "store")
    with store:
        try:
            store.save(make_state(NEXT), step=NEXT)
        except AsymcheckError as error:
            failing.check(error)
            failing.works = True
            # The checkpoint may only stay if the device also refuses to remove a name.
            _check_after_failure(store, promised, may_exist=for_good)
        else:
            failing.works = True
            assert fingerprint(store.load(NEXT)) == fingerprint(make_state(NEXT)), (
                "a save is reported that was not done"
            )
        state = make_state(NEXT + 1)
        store.save(state, step=NEXT + 1)
        assert fingerprint(store.load()) == fingerprint(state)


@contextlib.contextmanager
def _with_point(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("scene", BEFORE)
def test_a_catalog_that_refuses(scene: str, fresh: Callable[[str], Path]) -> None:
    """Test that a failure inside a transaction, even after the commit, leaves nothing of the save."""
    counter = Counter(CATALOG_CHANGES)
    with faults.watched_catalog(counter), open_store(fresh(scene) / "store") as store:
        store.save(make_state(NEXT), step=NEXT)
    assert counter.seen[-2:] == ["put_manifest", "delete"]
    for at in range(1, len(counter.seen) + 1):
        folder = fresh(scene)
        promised = Journal(folder / "journal").promises()
        refusing = Counter(CATALOG_CHANGES, at, faults.refuse(errno.EIO))
        with _with_point(f"change {at}"), open_store(folder / "store") as store:
            with faults.watched_catalog(refusing), pytest.raises(StorageError):
                store.save(make_state(NEXT), step=NEXT)
            _check_after_failure(store, promised)
        check_goes_on(folder / "store", promised)


class _Interrupted(BaseException):
    """Stands for Ctrl-C."""


@pytest.mark.slow(quick=["frame.written"])
@pytest.mark.parametrize("event", COMMIT_ORDER)
def test_interrupted_at_an_event(event: str, fresh: Callable[[str], Path]) -> None:
    """Test that an interrupted save leaves nothing in a process that continues."""

    def interrupt(seen: Event) -> None:
        if seen.name == event:
            raise _Interrupted

    folder = fresh("a save into recycled packs")
    promised = Journal(folder / "journal").promises()
    with open_store(folder / "store") as store:
        with events.observe(interrupt), pytest.raises(_Interrupted):
            store.save(make_state(NEXT), step=NEXT)
        _check_after_failure(store, promised)
    check_goes_on(folder / "store", promised)


OTHER_ACTIONS: dict[str, tuple[list[Action], list[Action]]] = {
    "a deletion": ([["save", 0], ["save", 1]], [["delete", 0]]),
    "a collection": ([["save", 0], ["save", 2], ["delete", 0]], [["gc"]]),
    "a restore": ([["save", 0], ["save", 1]], [["restore", 0]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize("scene", OTHER_ACTIONS)
def test_another_action_is_refused(scene: str, number: int, template: Copy, tmp_path: Path) -> None:
    """Test that a failed deletion, collection or restore can be repeated, and loses no other checkpoint."""
    before, actions = OTHER_ACTIONS[scene]
    for at in _until_enough():
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template(before), folder)
        failing = _Failing(at, number, for_good=False)
        journal = Journal(folder / "journal")
        with open_store(folder / "store") as store:
            store.gc()
        try:
            with open_store(folder / "store", files=WatchedFiles(failing)) as store:
                take(store, journal, actions)
        except AsymcheckError as error:
            failing.check(error)
        if failing.count < at:
            return
        with _with_point(f"operation {at}"), open_store(folder / "store") as store:
            _check_after_failure(store, journal.promises())
        check_goes_on(folder / "store", journal.promises())


def _until_enough() -> Iterator[int]:
    yield from range(1, 1000)
    raise AssertionError("there is no end to the operations")
