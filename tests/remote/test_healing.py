"""Test that a store with a remote location reads lost local data from it, and that a repair restores the data."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.cli.main import commands
from asymcheck.commit.save_request import new_save_id
from asymcheck.commit.transaction import CommitTransaction
from asymcheck.errors import (
    DamagedPartitionError,
    InconsistentCheckpointError,
    InvalidInputError,
    RecoveryError,
    RemoteCopyWarning,
    RemoteUnreachableError,
    SkippedCheckpointWarning,
)
from asymcheck.replication.pull import pull
from asymcheck.storage.nvme import ManifestFiles
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.types import CheckpointRef, Part
from tests.cli.conftest import run_command
from tests.damage.flips import flip
from tests.remote.conftest import CONFIG, check_state, lose_packs, packs_of, save_steps, state_of


def flip_all(store: Path) -> None:
    """Flip a bit in every pack."""
    for pack in (store / "packs").iterdir():
        flip(pack, 8 * (4096 + 2000))


def lose_manifest(store: Path) -> None:
    """Delete the manifest of the newest checkpoint."""
    shutil.rmtree(max((store / "manifests" / "default").iterdir()))


def damage_manifest(store: Path) -> None:
    """Change the manifest of the newest checkpoint."""
    (manifest,) = max((store / "manifests" / "default").iterdir()).iterdir()
    manifest.write_bytes(b"x")


LOSSES = [flip_all, lose_packs, damage_manifest]


@pytest.mark.slow(quick=["flip_all"])
@pytest.mark.parametrize("lose", [*LOSSES, lose_manifest])
def test_lost_local_data_is_read_remotely(pushed: Path, folder: str, lose: Callable[[Path], None]) -> None:
    """Test that the newest checkpoint is read, and without the location skipped or missing."""
    lose(pushed)
    with Store.open(pushed, config=CONFIG, read_only=True, remote=folder) as opened:
        if lose in (flip_all, lose_packs):
            with pytest.warns(RemoteCopyWarning, match="verify .* --repair --remote file:///"):
                check_state(opened.load(), 2)
        else:
            check_state(opened.load(), 2)
    with Store.open(pushed, config=CONFIG, read_only=True) as opened:
        if lose in (flip_all, lose_packs):
            with pytest.raises((InconsistentCheckpointError, DamagedPartitionError)):
                opened.load()
        elif lose is damage_manifest:
            with pytest.warns(SkippedCheckpointWarning):
                check_state(opened.load(), 1)
        else:
            check_state(opened.load(), 1)


@pytest.mark.slow(quick=["damage_manifest"])
@pytest.mark.parametrize("lose", LOSSES)
def test_repair_fetches_remote_data(pushed: Path, folder: str, lose: Callable[[Path], None]) -> None:
    """Test the report, that the location is not needed afterwards, and that a second repair does nothing."""
    lose(pushed)
    with Store.open(pushed, config=CONFIG, remote=folder, create=True) as opened:
        done = opened.repair()
        assert [one.where for one in done.done if one.kind == "remote"] == [folder]
        assert done.left == ()
        assert opened.repair().done == ()
    with Store.open(pushed, config=CONFIG, create=True) as opened:
        check_state(opened.load(), 2)
        check_state(opened.load(1), 1)
        assert opened.verify() == []


def test_failed_repair_keeps_local_data(pushed: Path, folder: str) -> None:
    """Test that the checkpoint stays, and becomes consistent when its bytes are saved again."""
    flip_all(pushed)
    for pack in (Path(folder.removeprefix("file://")) / "packs").iterdir():
        os.truncate(pack, 0)
    with Store.open(pushed, config=CONFIG, remote=folder, create=True) as opened:
        with contextlib.suppress(RecoveryError):
            opened.repair()
        assert [one.step for one in opened.checkpoints()] == [1, 2]
        opened.save(state_of(2), step=3)
        check_state(opened.load(2), 2)


def test_a_repair_that_is_interrupted_is_done_again(pushed: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test interruptions between the written manifests, and within one: no local data is lost."""
    lose_packs(pushed)

    publish = ManifestFiles.publish

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted_later(
        files: ManifestFiles, run: str, ref: CheckpointRef, rank: int, size: int, data: bytes
    ) -> None:
        publish(files, run, ref, rank, size, data)
        raise KeyboardInterrupt

    for owner, name, fault in (
        (CommitTransaction, "seal", interrupted),
        (ManifestFiles, "publish", interrupted_later),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fault)
            with (
                Store.open(pushed, config=CONFIG, remote=folder, create=True) as opened,
                pytest.raises(KeyboardInterrupt),
            ):
                opened.repair()
        with Store.open(pushed, config=CONFIG, create=True) as opened:
            assert [one.step for one in opened.checkpoints() if one.complete] == [1, 2]
    with Store.open(pushed, config=CONFIG, remote=folder, create=True) as opened:
        assert opened.repair().left == ()
        check_state(opened.load(2), 2)
        assert opened.verify() == []


def test_command_fetches_remote_data(pushed: Path, folder: str) -> None:
    """Test that a restore with the location recommends a repair."""
    flip_all(pushed)
    target = pushed.parent / "out.pt"
    outcome = run_command("restore", pushed, "--to", target, "--remote", folder)
    assert (outcome.status, "was read from file:///" in outcome.err) == (0, True)
    outcome = run_command("verify", pushed, "--repair", "--remote", folder)
    assert (outcome.status, "partitions fetched" in outcome.out) == (0, True)
    assert run_command("verify", pushed, "--remote", folder).status == 2
    assert set(commands.commands) >= {"push", "pull"}


@pytest.fixture
def broken_location(store: Path, folder: str) -> Path:
    """Return a store whose two checkpoints were pushed; the second is not readable at the location."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
        before = packs_of(folder)
        opened.push(folder, 2)
    for pack in packs_of(folder) - before:
        pack.unlink()
    return store


def test_unavailable_data_does_not_stop_a_repair(broken_location: Path, folder: str) -> None:
    """Test that the other checkpoint is fetched, and the reason for the first is reported."""
    lose_packs(broken_location)
    with Store.open(broken_location, config=CONFIG, remote=folder, create=True) as opened:
        done = opened.repair()
        assert [one.where for one in done.done if one.kind == "remote"] == [folder]
        (left,) = done.left
        assert left.kind == "lost-partitions"
        assert "step 2" in left.where
        assert f"; cannot fetch it from {folder}: " in left.message
        assert [one.step for one in opened.checkpoints()] == [1, 2]
        assert opened.repair().done == ()
    with Store.open(broken_location, config=CONFIG, create=True) as opened:
        check_state(opened.load(1), 1)


def test_unavailable_data_does_not_stop_a_pull(broken_location: Path, folder: str, tmp_path: Path) -> None:
    """Test that the error lists the remaining checkpoints; a single one raises its own error."""
    first = state_of(3)
    with Store.open(broken_location, config=CONFIG, create=True) as opened:
        opened.save(first, step=3)
        opened.push(folder, 3)
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as opened:
        with pytest.raises(InconsistentCheckpointError, match="1 of 3 checkpoints could not be copied") as caught:
            opened.pull(folder, everything=True)
        assert [reason.startswith("run default, step 2") for reason in caught.value.reasons] == [True]
        assert [one.step for one in opened.checkpoints()] == [1, 3]
        check_state(opened.load(3), 3)


@pytest.mark.parametrize("lose", [lose_packs, damage_manifest])
def test_pull_fetches_lost_local_data_again(pushed: Path, folder: str, lose: Callable[[Path], None]) -> None:
    """Test that a pull does not report a checkpoint as present whose packs or manifests are lost."""
    lose(pushed)
    with Store.open(pushed, config=CONFIG) as opened:
        assert len(opened.pull(folder, everything=True).committed) == (2 if lose is lose_packs else 1)
        check_state(opened.load(), 2)
        check_state(opened.load(1), 1)
        assert opened.pull(folder, everything=True).present == 2


def test_a_location_that_goes_away_ends_a_pull(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Test that the pull asks for no further checkpoint, because each request may take a deadline."""
    asked: list[str] = []

    def away(*_: object, **__: object) -> object:
        asked.append("once")
        raise RemoteUnreachableError("nobody answers")

    with Store.open(tmp_path / "new", config=CONFIG, create=True) as opened, pytest.MonkeyPatch.context() as patched:
        catalog = opened.resources.catalog()
        patched.setattr("asymcheck.replication.pull.read_manifests", away)
        patched.setattr("asymcheck.storage.manifests.ManifestReader.runs", away)
        remote = RemoteTier(parse_location(folder), CONFIG)
        listings = remote.manifests.checkpoints("default")
        with pytest.raises(RemoteUnreachableError):
            pull(remote, opened.resources.nvme, catalog, listings)
        remote.close()
    assert len(asked) == 2


@pytest.mark.slow(quick=["damaged"])
@pytest.mark.parametrize(
    "lose", [lambda head: head.unlink(), lambda head: head.write_bytes(b"x" * 8192)], ids=["missing", "damaged"]
)
def test_head_records_are_brought_back(store: Path, folder: str, lose: Callable[[Path], None]) -> None:
    """Test a repair when nothing else is lost, and a pull over a damaged head record."""
    head = store / "heads" / "default" / "00000002.head"
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.save(state_of(3), step=3, generation=opened.training.begin_generation(opened.checkpoints()[0]))
        opened.push(folder, everything=True)
    before = head.read_bytes()
    lose(head)
    with Store.open(store, config=CONFIG, create=True) as opened:
        assert len(opened.repair().left) == 1
        opened.delete(1)
        opened.pull(folder, 1)
        assert head.read_bytes() == before
    lose(head)
    with Store.open(store, config=CONFIG, remote=folder, create=True) as opened:
        done = opened.repair()
        assert ([one.kind for one in done.done], done.left) == (["record"], ())
        assert opened.repair().done == ()
    assert head.read_bytes() == before


def test_all_head_records_are_brought_back_by_one_repair(store: Path, folder: str) -> None:
    """Test a lost record of a generation whose checkpoint is not at the location, as its retention deletes it."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        for step in (3, 4):
            parent = opened.checkpoints()[-1]
            opened.save(state_of(step), step=step, generation=opened.training.begin_generation(parent))
        opened.push(folder, 4)
    shutil.rmtree(store / "heads")
    with Store.open(store, config=CONFIG, remote=folder, create=True) as opened:
        assert opened.repair().left == ()
        assert [checkpoint.on_line for checkpoint in opened.checkpoints()] == [True] * 4


def test_a_head_record_of_another_training_is_not_brought(store: Path, folder: str, tmp_path: Path) -> None:
    """Test a head record of a generation of which both sides have no common checkpoint: it stays damaged."""
    save_steps(tmp_path / "other", 1)
    for path in (store, tmp_path / "other"):
        with Store.open(path, config=CONFIG, create=True) as opened:
            opened.save(state_of(3), step=3, generation=opened.training.begin_generation(None))
    with Store.open(tmp_path / "other", config=CONFIG, create=True) as opened:
        opened.push(folder, 3)
    head = store / "heads" / "default" / "00000002.head"
    head.write_bytes(b"x" * 8192)
    with Store.open(store, config=CONFIG, remote=folder, create=True) as opened:
        (left,) = opened.repair().left
        assert left.kind == "damaged-head"
        assert "may be that of another training" in left.message
        with pytest.raises(InvalidInputError, match="may be that of another training"):
            opened.pull(folder, 3)
    assert head.read_bytes() == b"x" * 8192


def test_a_manifest_of_one_rank_is_brought_back(store: Path, folder: str) -> None:
    """Test a locally incomplete checkpoint, which counts as lost."""
    save_id = new_save_id().hex()
    with Store.open(store, config=CONFIG, create=True) as opened:
        for rank in range(2):
            opened.save(state_of(3), step=3, part=Part(rank, 2, save_id))
        opened.push(folder, 3)
    newest = max((store / "manifests" / "default").iterdir())
    max(newest.iterdir()).unlink()
    with Store.open(store, config=CONFIG, create=True) as opened:
        (left,) = opened.repair().left
        assert (left.kind, left.message) == (
            "incomplete-checkpoint",
            "the manifest of rank 1 is missing (world size 2)",
        )
    with Store.open(store, config=CONFIG, remote=folder, create=True) as opened:
        assert opened.repair().left == ()
        assert opened.verify() == []
        check_state(opened.load(3), 3)
