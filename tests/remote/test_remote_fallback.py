"""Test a store with a remote location that is unreachable, unreadable or empty."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asymcheck import Checkpointer, Store
from asymcheck.errors import (
    RemoteCopyWarning,
    RemoteUnreachableError,
    StoreNotFoundError,
    StructureError,
    UnreachableRemoteWarning,
)
from asymcheck.storage.fallback_tier import RemoteFallback
from asymcheck.storage.remote import RemoteTier, parse_location
from tests.damage.flips import flip
from tests.remote.conftest import CONFIG, check_state, config, lose_packs, state_of

NOWHERE = "hdfs://127.0.0.1:1/x"
UNREACHABLE = config(deadline_s=20.0, options={"dfs.client.failover.max.attempts": "1"})


def test_a_location_that_does_not_answer_stops_no_training(store: Path) -> None:
    """Test that local data is read, with a warning."""
    with Store.open(store, config=UNREACHABLE, remote=NOWHERE, create=True) as opened:
        with pytest.warns(UnreachableRemoteWarning, match="no|refused"):
            check_state(opened.load(), 2)
        opened.save({"step": 3}, step=3)


def test_a_location_that_does_not_answer_is_not_taken_for_empty(store: Path, tmp_path: Path) -> None:
    """Test that insufficient local data raises an error, instead of restoring an older checkpoint or none."""
    with (
        Store.open(tmp_path / "new", config=UNREACHABLE, remote=NOWHERE, create=True) as opened,
        pytest.raises(RemoteUnreachableError),
    ):
        opened.load()
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    newest.unlink()
    with (
        Store.open(store, config=UNREACHABLE, remote=NOWHERE, create=True) as opened,
        pytest.warns(UnreachableRemoteWarning),
        pytest.raises(RemoteUnreachableError),
    ):
        opened.load()


def test_a_location_of_earlier_pushes_is_not_taken_for_empty(pushed: Path, folder: str) -> None:
    """Test a missing mount: local data is read with a warning, and no older checkpoint if the newest is damaged."""
    top = Path(folder.removeprefix("file://"))
    mounted = top.rename(top.with_name("mounted"))
    with (
        Store.open(pushed, config=CONFIG, remote=folder) as opened,
        pytest.warns(UnreachableRemoteWarning, match=r"unmounted\? Mount it again"),
    ):
        check_state(opened.load(), 2)
    max((pushed / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns).unlink()
    with (
        Store.open(pushed, config=CONFIG, remote=folder) as opened,
        pytest.warns(UnreachableRemoteWarning),
        pytest.raises(RemoteUnreachableError, match=r"unmounted\? Mount it again"),
    ):
        opened.load()
    mounted.rename(top)
    with Store.open(pushed, config=CONFIG, remote=folder) as opened, pytest.warns(RemoteCopyWarning):
        check_state(opened.load(), 2)


def test_a_location_where_nothing_was_pushed_yet(store: Path, folder: str) -> None:
    """Test a location without checkpoints, which is not an error."""
    with Store.open(store, config=CONFIG, remote=folder, create=True) as opened:
        check_state(opened.load(), 2)


def test_checkpoint_that_the_store_never_had_is_no_damage(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Test the warning of a store on a new machine, which no repair can help, and that of a store with a loss."""
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder, create=True) as opened,
        pytest.warns(RemoteCopyWarning, match=f"does not have the checkpoint, .* run asymcheck pull {folder}"),
    ):
        check_state(opened.load(), 2)
    lose_packs(pushed)
    with (
        Store.open(pushed, config=CONFIG, remote=folder, create=True) as opened,
        pytest.warns(RemoteCopyWarning, match="missing or damaged data"),
    ):
        check_state(opened.load(), 2)


def test_a_checkpoint_that_only_the_location_has_is_on_its_line(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Test a step of a later generation, of which a store on a new machine has no head record."""
    with Store.open(pushed, config=CONFIG) as opened:
        generation = opened.training.begin_generation(opened.checkpoints()[-1])
        opened.save(state_of(3), step=3, generation=generation)
        opened.push(folder)
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder, create=True) as opened,
        pytest.warns(RemoteCopyWarning),
    ):
        assert opened.restore(3).checkpoint.on_line


def lose_descriptor(remote: Path) -> None:
    """Delete the descriptor."""
    (remote / "asymcheck.store").unlink()


def damage_descriptor(remote: Path) -> None:
    """Damage both copies of the descriptor."""
    (remote / "asymcheck.store").write_bytes(b"x" * 8192)


def put_something_else(remote: Path) -> None:
    """Put another file into the folder, as in a folder above the location."""
    shutil.rmtree(remote)
    remote.mkdir()
    (remote / "notes.txt").write_text("x")


def put_a_file(remote: Path) -> None:
    """Replace the folder by a file."""
    shutil.rmtree(remote)
    remote.write_text("x")


def move_manifests(remote: Path) -> None:
    """Move the manifests aside."""
    (remote / "manifests").rename(remote / "aside")


CHANGES = [lose_descriptor, damage_descriptor, put_something_else, put_a_file, move_manifests]


@pytest.mark.slow(quick=["lose_descriptor", "move_manifests"])
@pytest.mark.parametrize("change", CHANGES)
def test_unreadable_location_counts_as_unreachable(
    pushed: Path, folder: str, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Test that local data is read with a warning, and that the location never counts as empty."""
    change(Path(folder.removeprefix("file://")))
    with (
        Store.open(pushed, config=CONFIG, remote=folder, create=True) as opened,
        pytest.warns(UnreachableRemoteWarning, match="only checkpoints in the local store are known"),
    ):
        check_state(opened.load(), 2)
    state = state_of(0)
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder, create=True) as opened,
        Checkpointer(opened, state, every=1, keep=None) as checkpointer,
        pytest.raises(RemoteUnreachableError, match=r"not known|is missing"),
    ):
        checkpointer.restore()


def test_location_without_descriptor_gets_no_new_one(pushed: Path, folder: str) -> None:
    """Test that opening it and pushing to it is refused."""
    lose_descriptor(Path(folder.removeprefix("file://")))
    with pytest.raises(StructureError, match=r"has no asymcheck\.store, but it has manifests and packs; restore"):
        Store.open(folder, config=CONFIG, create=True)
    with (
        Store.open(pushed, config=CONFIG, create=True) as opened,
        pytest.raises(StructureError, match=r"no asymcheck\.store"),
    ):
        opened.push(folder, 2)


def test_a_creation_that_was_killed_left_no_location(store: Path, folder: str) -> None:
    """Test that empty folders do not count as a lost descriptor."""
    for name in ("heads", "manifests", "packs"):
        (Path(folder.removeprefix("file://")) / name).mkdir(parents=True)
    with pytest.raises(StoreNotFoundError, match="nothing was pushed there"):
        Store.open(folder, config=CONFIG, create=True)
    with Store.open(store, config=CONFIG, create=True) as opened:
        assert len(opened.push(folder, 2).committed) == 1


def test_a_training_that_begins_from_nothing_says_so(tmp_path: Path, folder: str) -> None:
    """Test an empty mount point, which looks like a location without checkpoints."""
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder, create=True) as opened,
        Checkpointer(opened, state_of(0), every=1, keep=None) as checkpointer,
    ):
        with pytest.warns(UnreachableRemoteWarning, match=f"remote {folder} is empty"):
            assert checkpointer.restore() is None
        checkpointer.save(0)


def test_pulled_store_does_not_need_the_location(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Test packs that differ from the hints of the manifest, also after a repair."""
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as opened:
        opened.pull(folder, everything=True)
    for pack in (pushed / "packs").iterdir():
        flip(pack, 8 * -10)
    with Store.open(pushed, config=CONFIG, create=True) as opened:
        assert opened.repair().left == ()
    for path in (tmp_path / "new", pushed):
        with (
            Store.open(path, config=UNREACHABLE, remote=NOWHERE, create=True) as opened,
            pytest.warns(UnreachableRemoteWarning),
        ):
            check_state(opened.load(), 2)


def test_threads_open_the_location_once(pushed: Path, folder: str) -> None:
    """Test that all threads get the same tier."""
    opened: list[RemoteTier] = []

    def connect() -> RemoteTier:
        time.sleep(0.05)
        opened.append(RemoteTier(parse_location(folder), CONFIG))
        return opened[-1]

    far = RemoteFallback(folder, connect)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(map(id, threads.map(lambda _: far.tier(), range(8))))) == 1
    far.close()
    assert len(opened) == 1
