"""Test a kill of one process at any operation, a normal run of the next process, and then a power loss.

The promises of the second process may depend on data that the first left unsynced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from asymcheck.storage import process_identity
from asymcheck.storage.local_files import DESCRIPTORS
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.nvme.catalog import Catalog
from asymcheck.store import Store
from tests.crash.actions import Action, lose_catalog, take
from tests.crash.faults import CHANGES, Counter, WatchedFiles
from tests.crash.power import Entry, LoggedJournal, RecordingFiles, after_power_loss, recorded_catalog
from tests.crash.states import CONFIG
from tests.crash.survival import check_survived

FIRST: list[Action] = [["save", 0], ["save", 1], ["restore", 0], ["delete", 1], ["gc"], ["save", 2]]
"""Actions of the process that is killed."""

SECOND: list[list[Action]] = [
    [["save", 5], ["restore", 5], ["gc"]],
    [["save", 5, 0]],
    [["save", 5, 2]],
]
"""Actions of the next process: it saves a new state, or a state that the first process may have saved."""


class _Killed(BaseException):
    """Ends a simulated process: no handler of the store catches it, and no later operation changes anything."""


class _MortalFiles(WatchedFiles, RecordingFiles):
    """Records operations until a chosen one, and refuses this one and all later ones."""

    def __init__(self, log: list[Entry], at: int) -> None:
        """Fail before the ``at``-th operation; with 0 never."""
        RecordingFiles.__init__(self, log)
        self.dead = False
        self.counter = Counter(CHANGES, at, self._die)
        WatchedFiles.__init__(self, self._step)

    def _step(self, operation: str, path: Path) -> None:
        if self.dead and operation in CHANGES:
            raise _Killed
        self.counter(operation, path)

    def _die(self, _operation: str, _path: Path) -> NoReturn:
        self.dead = True
        raise _Killed

    @contextlib.contextmanager
    def catalog_dies_too(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Prevent transactions of a dead process."""
        write = Catalog.write

        @contextlib.contextmanager
        def mortal_write(catalog: Catalog, **options: bool) -> Iterator[object]:
            if self.dead:
                raise _Killed
            with write(catalog, **options) as transaction:
                yield transaction

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "write", mortal_write)
            yield


def _live(base: Path, log: list[Entry], script: Sequence[Action], patch: pytest.MonkeyPatch, at: int = 0) -> list[str]:
    """Run a script as a separate process; return the names of its operations."""
    boot_id = str(uuid.uuid4())
    patch.setattr(process_identity, "_boot_id", lambda: boot_id)
    files = _MortalFiles(log, at)
    config = dataclasses.replace(CONFIG, slots=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(_Killed))
        stack.enter_context(files.catalog_dies_too(patch))
        stack.enter_context(recorded_catalog(log))
        store = stack.enter_context(Store(NvmeTier(base / "above" / "store", config, files=files)))
        take(store, LoggedJournal(log), script)
    # A dead process holds no locks.
    DESCRIPTORS.close_in_child()
    return files.counter.seen


def _check(second: Sequence[Action], at: int, *, catalog_lost: bool, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Kill the first process before its ``at``-th operation, run the second script, and lose power."""
    base, after_loss = folder / "base", folder / "left"
    shutil.rmtree(base, ignore_errors=True)
    shutil.rmtree(after_loss, ignore_errors=True)
    base.mkdir()
    log: list[Entry] = []
    _live(base, log, FIRST, patch, at)
    if catalog_lost and (base / "above" / "store" / "catalog").exists():
        lose_catalog(base / "above" / "store")
    killed_after = log[-1][:3] if log else "the start"
    _live(base, log, second, patch)
    patch.setattr(process_identity, "_boot_id", lambda: "the third")
    promised = after_power_loss(
        base, log, after_loss, loss="names and data", catalog="missing" if at % 2 else "as it was"
    )
    try:
        check_survived(after_loss / "above" / "store", promised)
    except Exception as error:
        raise AssertionError(f"killed before operation {at}, after {killed_after}: {error}") from error


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the names of all operations of the first process."""
    with pytest.MonkeyPatch.context() as patch:
        return _live(tmp_path_factory.mktemp("count"), [], FIRST, patch)


@pytest.mark.slow(quick=["1-True"])
@pytest.mark.parametrize(("second", "catalog_lost"), [(0, False), (1, True), (2, False)])
def test_killed_before_a_barrier_then_powerless(
    second: int, catalog_lost: bool, operations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that promises of the second process hold for each barrier that the first did not reach."""
    barriers = [at for at, name in enumerate(operations, start=1) if name.startswith("sync")]
    assert len(barriers) > 30
    for at in barriers[second::3]:
        _check(SECOND[second], at, catalog_lost=catalog_lost, folder=tmp_path, patch=monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("catalog_lost", [False, True])
@pytest.mark.parametrize("second", SECOND, ids=["a new state", "its first state", "its last state"])
def test_killed_anywhere_then_powerless(
    second: Sequence[Action], catalog_lost: bool, operations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a kill before every single operation."""
    for at in range(1, len(operations) + 1):
        _check(second, at, catalog_lost=catalog_lost, folder=tmp_path, patch=monkeypatch)
