"""Test power loss at every operation: unsynced data is lost in part or completely, but no promise is broken."""

from __future__ import annotations

import dataclasses
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asymcheck.errors import AsymcheckError
from asymcheck.storage import process_identity
from asymcheck.storage.nvme import NvmeTier
from asymcheck.store import Store
from tests.crash.actions import Action, take
from tests.crash.power import CATALOGS, LOSSES, Entry, LoggedJournal, RecordingFiles, after_power_loss, recorded_catalog
from tests.crash.states import CONFIG
from tests.crash.survival import check_survived
from tests.visiting import Visited, visiting

SCRIPT: list[Action] = [
    ["save", 0],
    ["save", 1],
    ["delete", 0],
    ["gc"],
    ["save", 2],
    ["save", 3],
    ["restore", 2],
    ["delete", 1],
    ["delete", 3],
    ["gc"],
    ["save", 4],
]
"""Creation, saves with reuse, into new packs and into recycled packs, deletions, collections, and a restore."""


def record(base: Path, script: Sequence[Action], files: type[RecordingFiles] = RecordingFiles) -> list[Entry]:
    """Run actions on a new store in ``base/folder/store`` and return the log."""
    log: list[Entry] = []
    base.mkdir(exist_ok=True)
    config = dataclasses.replace(CONFIG, slots=1)
    with recorded_catalog(log), Store(NvmeTier(base / "folder" / "store", config, files=files(log))) as store:
        take(store, LoggedJournal(log), script)
    return log


def cuts(log: list[Entry]) -> list[int]:
    """Return the points of a power loss: after each operation, with the blocks of one write taken together."""
    kinds = [entry[0] for entry in log]
    return [end for end in range(1, len(log) + 1) if kinds[end - 1 : end + 1] != ["write", "write"]]


def lose_and_check(base: Path, log: list[Entry], target: Path, **choices: object) -> None:
    """Check the store after a power loss and a reboot."""
    shutil.rmtree(target, ignore_errors=True)
    promised = after_power_loss(base, log, target, **choices)  # type: ignore[arg-type]  # the keywords of that function
    check_survived(target / "folder" / "store", promised)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Entry]]:
    """Return the script's folder and its log."""
    base = tmp_path_factory.mktemp("recording")
    return base, record(base, SCRIPT)


@pytest.fixture
def reboot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Simulate a reboot: the owners of all pins are dead."""

    def start_again() -> None:
        boot_id = str(uuid.uuid4())
        monkeypatch.setattr(process_identity, "_boot_id", lambda: boot_id)

    return start_again


def test_the_script_goes_everywhere(recording: tuple[Path, list[Entry]]) -> None:
    """Test that the script recycles packs, removes folders and makes every kind of sync."""
    _, log = recording
    kinds = {entry[0] for entry in log}
    assert kinds >= {"create", "write", "sync", "sync_directory", "rename", "link", "unlink", "mkdir"}
    from_pool = [entry for entry in log if entry[0] == "rename" and entry[1].parent.name == "pool"]
    assert len(from_pool) >= 2
    assert len(cuts(log)) > 150


@pytest.mark.slow
@visiting(24)
@pytest.mark.parametrize("loss", ["names and data", "half"])
def test_power_loss_anywhere(
    loss: str,
    visited: Visited[int],
    recording: tuple[Path, list[Entry]],
    tmp_path: Path,
    reboot: Callable[[], None],
) -> None:
    """Test operations of the script, with an unchanged, older, torn or missing catalog in turn."""
    base, log = recording
    reboot()
    for number, end in enumerate(visited(cuts(log))):
        catalog = CATALOGS[number % len(CATALOGS)]
        try:
            lose_and_check(base, log[:end], tmp_path / "left", loss=loss, catalog=catalog, seed=end)
        except Exception as error:
            raise AssertionError(f"cut at {end} after {log[end - 1][:3]}, catalog {catalog}: {error}") from error


@pytest.mark.long
@pytest.mark.parametrize("whole_renames", [True, False])
@pytest.mark.parametrize("catalog", CATALOGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_power_loss_anywhere_in_every_way(
    loss: str,
    catalog: str,
    whole_renames: bool,
    recording: tuple[Path, list[Entry]],
    tmp_path: Path,
    reboot: Callable[[], None],
) -> None:
    """Test every choice of lost data, also on a file system where a rename between directories is two changes."""
    base, log = recording
    reboot()
    for end in cuts(log):
        for seed in range(3 if loss in ("half", "little", "nearly all") else 1):
            choices = {"loss": loss, "catalog": catalog, "seed": 1000 * end + seed, "whole_renames": whole_renames}
            try:
                lose_and_check(base, log[:end], tmp_path / "left", **choices)
            except Exception as error:
                raise AssertionError(f"cut at {end} after {log[end - 1][:3]}, {choices}: {error}") from error


def test_a_mark_is_durable_before_the_first_transaction(recording: tuple[Path, list[Entry]]) -> None:
    """Test that the mark survives a power loss, because unsynced transactions make the catalog unreliable."""
    _, log = recording
    kinds = [entry[0] for entry in log]
    made = next(number for number, entry in enumerate(log) if entry[0] == "create" and entry[1].parent.name == "open")
    synced = [entry[1].name for entry in log[made : kinds.index("catalog")] if entry[0] == "sync_directory"]
    assert synced[:3] == ["open", "catalog", "store"]
    removed = next(number for number, entry in enumerate(log) if entry == ("unlink", log[made][1]))
    newest = max(number for number, kind in enumerate(kinds[:removed]) if kind == "catalog")
    assert log[newest][2], "the mark was removed before the catalog was synced"


class _Forgetful(RecordingFiles):
    """Files that omit one kind of sync."""

    forgotten: Callable[[Path], bool]

    def sync(self, descriptor: int, path: Path) -> None:
        """Sync all other files."""
        if not type(self).forgotten(path):
            super().sync(descriptor, path)

    def sync_directory(self, path: Path) -> None:
        """Sync all other directories."""
        if not type(self).forgotten(path / ""):
            super().sync_directory(path)


class _RenamesFirst(RecordingFiles):
    """Files that are synced only after the rename to their final name."""

    def __init__(self, log: list[Entry]) -> None:
        """Append to ``log``."""
        super().__init__(log)
        self._late: set[Path] = set()

    def sync(self, descriptor: int, path: Path) -> None:
        """Defer the sync, except for a file that will be linked."""
        if path.parent.name in ("packs", "manifests"):
            self._late.add(path)
        else:
            super().sync(descriptor, path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, and sync now."""
        super().rename(source, target)
        if source in self._late:
            self.log.append(("sync", target))


def _forgetting(forgotten: Callable[[Path], bool]) -> type[RecordingFiles]:
    return type("Forgetful", (_Forgetful,), {"forgotten": staticmethod(forgotten)})


def _is_manifest(path: Path) -> bool:
    return path.parent.parent.parent.name == "manifests"


BROKEN = {
    "no sync at all": (lambda path: path.suffix != "", "record file has 0 bytes"),
    "packs": (lambda path: path.parent.name == "packs", "pack header has 0 of 4096 bytes"),
    "manifests": (_is_manifest, "is there in part"),
    "the store's folder": (lambda path: path.name == "store", "the store itself is gone"),
    "the folder above the store": (lambda path: path.name == "folder", "the store itself is gone"),
    "packs/": (lambda path: path.name == "packs", "no readable pack"),
    "manifests/": (lambda path: path.name == "manifests", "was reported durable and is lost"),
    "manifests/<run>/": (lambda path: path.parent.name == "manifests", "was reported durable and is lost"),
    "a checkpoint's folder": (lambda path: path.parent.parent.name == "manifests", "was reported durable and is lost"),
    "heads/<run>/": (lambda path: path.parent.name == "heads", "is taken for the newest"),
    "heads/": (lambda path: path.name == "heads", "is taken for the newest"),
}
"""An omitted barrier, and the message of the failing check."""


@pytest.mark.slow(
    quick=["no sync at all"],
    long=["manifests", "*folder*", "packs/", "manifests/", "heads/*", "names before content"],
)
@pytest.mark.parametrize("barrier", [*BROKEN, "names before content"])
def test_a_forgotten_barrier_is_noticed(barrier: str, tmp_path: Path, reboot: Callable[[], None]) -> None:
    """Test that the check fails, with the reason, for a program that omits any one of the barriers."""
    forgotten, message = BROKEN.get(barrier, (None, "damaged-pack"))
    log = record(tmp_path / "base", SCRIPT, _forgetting(forgotten) if forgotten else _RenamesFirst)
    reboot()
    # The latest promise shows the omission first.
    ends = sorted(cuts(log), key=lambda end: log[end - 1][0] != "note")
    for end in ends:
        for loss in ("names and data", "data"):
            noticed = _noticed(tmp_path / "base", log[:end], tmp_path / "left", loss)
            if noticed:
                assert message in noticed
                return
    raise AssertionError("nothing was lost without that barrier")


def _noticed(base: Path, log: list[Entry], target: Path, loss: str) -> str:
    """Return the message of the check after a power loss, or an empty text if it passes."""
    try:
        lose_and_check(base, log, target, loss=loss, catalog="as it was")
    except (AssertionError, AsymcheckError) as error:
        return str(error) or repr(error)
    return ""
