"""Test a kill of one process before a sync, work of a living process that relies on the result, and then a power loss.

A living process keeps the catalog open, so that no recovery syncs what the killed process left unsynced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asymcheck.format import layout
from asymcheck.policies.retention import Retention
from asymcheck.store import Store
from tests.crash.actions import delete, open_store, save
from tests.crash.power import Entry, LoggedJournal, RecordingFiles, after_power_loss
from tests.crash.states import Promises
from tests.crash.survival import check_unrepaired


class _Killed(BaseException):
    """Ends a simulated process: no handler of the store catches it."""


class _DyingFiles(RecordingFiles):
    """Records operations until the sync of a certain folder, which is refused with all later changes."""

    def __init__(self, log: list[Entry]) -> None:
        super().__init__(log)
        self.dies_at: Callable[[Path], bool] = lambda _path: False
        self._is_dead = False

    def sync_directory(self, path: Path) -> None:
        """Sync, or die."""
        if self._is_dead or self.dies_at(path):
            self._is_dead = True
            raise _Killed
        super().sync_directory(path)

    def revive(self) -> None:
        """Refuse nothing any more."""
        self._is_dead, self.dies_at = False, lambda _path: False

    def unlink(self, path: Path) -> None:
        """Unlink, unless dead."""
        if self._is_dead:
            raise _Killed
        super().unlink(path)


class _Processes:
    """Two processes at one store: one is killed, and the other goes on."""

    def __init__(self, base: Path) -> None:
        self._base, self._log = base, list[Entry]()
        self.journal = LoggedJournal(self._log)
        base.mkdir()
        self.living = open_store(base / "store", files=RecordingFiles(self._log), slots=1)
        self._files = _DyingFiles(self._log)
        self._dying = open_store(base / "store", files=self._files, slots=1)

    def kill_in(self, act: Callable[[Store], object], dies_at: Callable[[Path], bool]) -> None:
        """Run an operation of the process that is killed before a sync."""
        self._files.revive()
        self._files.dies_at = dies_at
        with pytest.raises(_Killed):
            act(self._dying)

    def close(self) -> None:
        """Close the catalog, which both stores of this process share."""
        self._files.revive()
        self._dying.close()
        self.living.close()

    def power_losses(self, act: Callable[[], object]) -> Iterator[tuple[Path, Promises]]:
        """Run an operation of the living process; yield the store after a power loss at each of its syncs."""
        start = len(self._log)
        act()
        self.living.close()
        ends = [end for end in range(start, len(self._log)) if self._log[end][0].startswith("sync")]
        assert ends
        for end in [*ends, len(self._log)]:
            left = self._base.with_name(f"after {end}")
            yield left, after_power_loss(self._base, self._log[:end], left, loss="names", catalog="missing")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[_Processes]:
    """Return two processes at a new store."""
    found = _Processes(tmp_path / "base")
    yield found
    found.close()


def _is_checkpoint(path: Path) -> bool:
    return path.parent.parent.name == layout.MANIFESTS


def test_pack_in_the_pool_keeps_its_new_name(processes: _Processes) -> None:
    """Test that a save syncs the pool before it overwrites a pack, which a killed collection has freed."""
    store, journal = processes.living, processes.journal
    for step in (0, 1):
        save(store, journal, step)
    delete(store, journal, 0)
    processes.kill_in(lambda dying: dying.gc(), lambda path: path.name == layout.POOL)
    for left, promised in processes.power_losses(lambda: save(store, journal, 2)):
        check_unrepaired(left / "store", promised)


def test_deleted_checkpoint_does_not_return_without_packs(processes: _Processes) -> None:
    """Test that a collection syncs the deletion of a killed process before it frees packs."""
    store, journal = processes.living, processes.journal
    for step in (0, 1):
        save(store, journal, step)
    processes.kill_in(lambda dying: delete(dying, journal, 0), _is_checkpoint)
    for left, promised in processes.power_losses(store.gc):
        check_unrepaired(left / "store", promised)


def test_removed_folder_does_not_return_with_manifests(processes: _Processes) -> None:
    """Test two kills: of a deletion before its sync, and of a collection after it has removed the empty folder."""
    store, journal = processes.living, processes.journal
    for step in (0, 1):
        save(store, journal, step)
    ref = store.checkpoints()[0].ref
    processes.kill_in(lambda dying: delete(dying, journal, 0), _is_checkpoint)
    processes.kill_in(
        lambda dying: dying.resources.nvme.manifests.remove_files("default", ref, []),
        lambda path: path.parent.name == layout.MANIFESTS,
    )
    for left, promised in processes.power_losses(store.gc):
        check_unrepaired(left / "store", promised)


def test_retention_keeps_a_durable_checkpoint(processes: _Processes) -> None:
    """Test that retention syncs the manifest of a killed save before it deletes the older checkpoint."""
    store, journal = processes.living, processes.journal
    save(store, journal, 0)
    processes.kill_in(lambda dying: save(dying, journal, 1), _is_checkpoint)
    for left, _ in processes.power_losses(lambda: store.prune(Retention(keep_last=1))):
        with open_store(left / "store", read_only=True) as found:
            assert found.restore().checkpoint.step in (0, 1)
