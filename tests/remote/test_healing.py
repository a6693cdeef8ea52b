"""A remote location that stands behind a store: what is lost here is read from there, and brought back by a repair."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asymcheck import Checkpointer, RemoteCopyWarning, SkippedCheckpointWarning, Store, UnreachableRemoteWarning
from asymcheck.cli.main import commands
from asymcheck.errors import (
    DamagedPartitionError,
    InconsistentCheckpointError,
    InvalidInputError,
    RecoveryError,
    RemoteUnreachableError,
    StoreNotFoundError,
    StructureError,
)
from asymcheck.migration.pull import pull
from asymcheck.pipeline.request import new_save_id
from asymcheck.tiers.remote import RemoteTier, parse_location
from asymcheck.tiers.spanning import Far
from asymcheck.types import Part
from tests.cli.conftest import run_command
from tests.remote.conftest import CONFIG, check_state, config, save_steps, state_of

NOWHERE = "hdfs://127.0.0.1:1/x"
UNREACHABLE = config(deadline_s=20.0, options={"dfs.client.failover.max.attempts": "1"})


def flip(store: Path) -> None:
    """A bit in every pack."""
    for pack in (store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[4096 + 2000] ^= 1
        pack.write_bytes(data)


def lose_packs(store: Path) -> None:
    """All of them."""
    for pack in (store / "packs").iterdir():
        pack.unlink()


def lose_manifest(store: Path) -> None:
    """The newest checkpoint, as if it had never been."""
    shutil.rmtree(max((store / "manifests" / "default").iterdir()))


def damage_manifest(store: Path) -> None:
    """The newest one has other content."""
    (manifest,) = max((store / "manifests" / "default").iterdir()).iterdir()
    manifest.write_bytes(b"x")


LOSSES = [flip, lose_packs, damage_manifest]


@pytest.fixture
def pushed(store: Path, folder: str) -> Path:
    """A store whose two checkpoints were pushed to ``folder``."""
    with Store.open(store, config=CONFIG) as opened:
        opened.push(folder, everything=True)
    return store


@pytest.mark.parametrize("lose", [*LOSSES, lose_manifest])
def test_what_is_lost_here_is_read_from_there(pushed: Path, folder: str, lose: Callable[[Path], None]) -> None:
    """The newest checkpoint is read; without the location it is passed over, or all are lost."""
    lose(pushed)
    with Store.open(pushed, config=CONFIG, read_only=True, remote=folder) as opened:
        if lose in (flip, lose_packs):
            with pytest.warns(RemoteCopyWarning, match="verify .* --repair --remote file:///"):
                check_state(opened.load(), 2)
        else:
            check_state(opened.load(), 2)
    with Store.open(pushed, config=CONFIG, read_only=True) as opened:
        if lose in (flip, lose_packs):
            with pytest.raises((InconsistentCheckpointError, DamagedPartitionError)):
                opened.load()
        elif lose is damage_manifest:
            with pytest.warns(SkippedCheckpointWarning):
                check_state(opened.load(), 1)
        else:
            check_state(opened.load(), 1)


@pytest.mark.parametrize("lose", LOSSES)
def test_a_repair_brings_it_back(pushed: Path, folder: str, lose: Callable[[Path], None]) -> None:
    """It says so; the location is not needed any more; a second one does nothing."""
    lose(pushed)
    with Store.open(pushed, config=CONFIG, remote=folder) as opened:
        done = opened.repair()
        assert [one.where for one in done.done if one.kind == "remote"] == [folder]
        assert done.left == ()
        assert opened.repair().done == ()
    with Store.open(pushed, config=CONFIG) as opened:
        check_state(opened.load(), 2)
        check_state(opened.load(1), 1)
        assert opened.verify() == []


def test_a_repair_that_fails_leaves_what_is_here(pushed: Path, folder: str) -> None:
    """The location cannot give what is lost: the checkpoint stays, and is whole again when its bytes are saved."""
    flip(pushed)
    for pack in (Path(folder.removeprefix("file://")) / "packs").iterdir():
        os.truncate(pack, 0)
    with Store.open(pushed, config=CONFIG, remote=folder) as opened:
        with contextlib.suppress(RecoveryError):
            opened.repair()
        assert [one.step for one in opened.checkpoints()] == [1, 2]
        opened.save(state_of(2), step=3)
        check_state(opened.load(2), 2)


def test_a_repair_that_is_interrupted_is_done_again(pushed: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the manifests that it writes, and within one: nothing of what was here is gone, and the next goes on."""
    lose_packs(pushed)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("asymcheck.migration.pull.enter", "asymcheck.migration.pull.finish"):
        with monkeypatch.context() as patched:
            patched.setattr(place, interrupted)
            with Store.open(pushed, config=CONFIG, remote=folder) as opened, pytest.raises(KeyboardInterrupt):
                opened.repair()
        with Store.open(pushed, config=CONFIG) as opened:
            assert [one.step for one in opened.checkpoints() if one.complete] == [1, 2]
    with Store.open(pushed, config=CONFIG, remote=folder) as opened:
        assert opened.repair().left == ()
        check_state(opened.load(2), 2)
        assert opened.verify() == []


def test_the_command_brings_it_back(pushed: Path, folder: str) -> None:
    """And a restore with the location says that it should be done."""
    flip(pushed)
    target = pushed.parent / "out.pt"
    outcome = run_command("restore", pushed, "--to", target, "--remote", folder)
    assert (outcome.status, "was read from file:///" in outcome.err) == (0, True)
    outcome = run_command("verify", pushed, "--repair", "--remote", folder)
    assert (outcome.status, "partitions fetched" in outcome.out) == (0, True)
    assert run_command("verify", pushed, "--remote", folder).status == 2
    assert set(commands.commands) >= {"push", "pull"}


def test_a_location_that_does_not_answer_stops_no_training(store: Path) -> None:
    """What lies here is read, with a warning."""
    with Store.open(store, config=UNREACHABLE, remote=NOWHERE) as opened:
        with pytest.warns(UnreachableRemoteWarning, match="no|refused"):
            check_state(opened.load(), 2)
        opened.save({"step": 3}, step=3)


def test_a_location_that_does_not_answer_is_not_taken_for_empty(store: Path, tmp_path: Path) -> None:
    """Where what lies here is not enough, that is the error, not an older checkpoint or none."""
    with (
        Store.open(tmp_path / "new", config=UNREACHABLE, remote=NOWHERE) as opened,
        pytest.raises(RemoteUnreachableError),
    ):
        opened.load()
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    newest.unlink()
    with (
        Store.open(store, config=UNREACHABLE, remote=NOWHERE) as opened,
        pytest.warns(UnreachableRemoteWarning),
        pytest.raises(RemoteUnreachableError),
    ):
        opened.load()


def test_a_location_where_nothing_was_pushed_yet(store: Path, folder: str) -> None:
    """It has nothing to give, and is no error."""
    with Store.open(store, config=CONFIG, remote=folder) as opened:
        check_state(opened.load(), 2)


def lose_descriptor(there: Path) -> None:
    """The file alone."""
    (there / "asymcheck.store").unlink()


def damage_descriptor(there: Path) -> None:
    """Both copies."""
    (there / "asymcheck.store").write_bytes(b"x" * 8192)


def put_something_else(there: Path) -> None:
    """As when the folder above is named by mistake."""
    shutil.rmtree(there)
    there.mkdir()
    (there / "notes.txt").write_text("x")


def put_a_file(there: Path) -> None:
    """In the place of the folder."""
    shutil.rmtree(there)
    there.write_text("x")


@pytest.mark.parametrize("change", [lose_descriptor, damage_descriptor, put_something_else, put_a_file])
def test_a_location_that_cannot_be_read_is_like_one_that_does_not_answer(
    pushed: Path, folder: str, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """What lies here is read, with a warning; where that is not enough, it is not taken for an empty one."""
    change(Path(folder.removeprefix("file://")))
    with (
        Store.open(pushed, config=CONFIG, remote=folder) as opened,
        pytest.warns(UnreachableRemoteWarning, match="only what lies on this machine is known"),
    ):
        check_state(opened.load(), 2)
    state = state_of(0)
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder) as opened,
        Checkpointer(opened, state) as checkpointer,
        pytest.raises(RemoteUnreachableError, match="not known"),
    ):
        checkpointer.restore()


def test_a_location_that_has_lost_its_descriptor_gets_no_new_one(pushed: Path, folder: str) -> None:
    """To open it and to push there is refused."""
    lose_descriptor(Path(folder.removeprefix("file://")))
    with pytest.raises(StructureError, match=r"has lost its asymcheck\.store: it has manifests and packs; put"):
        Store.open(folder, config=CONFIG)
    with Store.open(pushed, config=CONFIG) as opened, pytest.raises(StructureError, match="has lost its"):
        opened.push(folder, 2)


def test_a_creation_that_was_killed_left_no_location(store: Path, folder: str) -> None:
    """Folders without anything in them are no loss of a descriptor."""
    for name in ("heads", "manifests", "packs"):
        (Path(folder.removeprefix("file://")) / name).mkdir(parents=True)
    with pytest.raises(StoreNotFoundError, match="nothing was pushed there"):
        Store.open(folder, config=CONFIG)
    with Store.open(store, config=CONFIG) as opened:
        assert len(opened.push(folder, 2).committed) == 1


def test_a_training_that_begins_from_nothing_says_so(tmp_path: Path, folder: str) -> None:
    """An empty mount point looks like a location to which nothing was pushed yet."""
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder) as opened,
        Checkpointer(opened, state_of(0)) as checkpointer,
    ):
        with pytest.warns(UnreachableRemoteWarning, match=f"nothing was pushed to {folder} yet.* mounted"):
            assert checkpointer.restore() is None
        checkpointer.save(0)


def test_what_was_pulled_is_read_without_the_location(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Its packs are others than the manifest names; so are those of a store whose packs a repair has moved."""
    with Store.open(tmp_path / "new", config=CONFIG) as opened:
        opened.pull(folder, everything=True)
    for pack in (pushed / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[-10] ^= 1
        pack.write_bytes(data)
    with Store.open(pushed, config=CONFIG) as opened:
        assert opened.repair().left == ()
    for path in (tmp_path / "new", pushed):
        with Store.open(path, config=UNREACHABLE, remote=NOWHERE) as opened, pytest.warns(UnreachableRemoteWarning):
            check_state(opened.load(), 2)


def test_threads_open_the_location_once(pushed: Path, folder: str) -> None:
    """One tier, whoever asks first."""
    opened: list[RemoteTier] = []

    def connect() -> RemoteTier:
        time.sleep(0.05)
        opened.append(RemoteTier(parse_location(folder), CONFIG))
        return opened[-1]

    far = Far(folder, connect)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(map(id, threads.map(lambda _: far.tier(), range(8))))) == 1
    far.close()
    assert len(opened) == 1


def packs_of(folder: str) -> set[Path]:
    """The packs of a location."""
    return set((Path(folder.removeprefix("file://")) / "packs").iterdir())


@pytest.fixture
def broken_there(store: Path, folder: str) -> Path:
    """A store whose two checkpoints were pushed, of which the second cannot be had there."""
    with Store.open(store, config=CONFIG) as opened:
        opened.push(folder, 1)
        before = packs_of(folder)
        opened.push(folder, 2)
    for pack in packs_of(folder) - before:
        pack.unlink()
    return store


def test_what_cannot_be_had_stops_no_other_repair(broken_there: Path, folder: str) -> None:
    """The other checkpoint is brought back; the reason is said of the one that is left."""
    lose_packs(broken_there)
    with Store.open(broken_there, config=CONFIG, remote=folder) as opened:
        done = opened.repair()
        assert [one.where for one in done.done if one.kind == "remote"] == [folder]
        (left,) = done.left
        assert left.kind == "lost-partitions"
        assert "step 2" in left.where
        assert f"; it could not be brought from {folder}: " in left.message
        assert [one.step for one in opened.checkpoints()] == [1, 2]
        assert opened.repair().done == ()
    with Store.open(broken_there, config=CONFIG) as opened:
        check_state(opened.load(1), 1)


def test_what_cannot_be_had_stops_no_other_pull(broken_there: Path, folder: str, tmp_path: Path) -> None:
    """What can be copied is; the error names the rest. A single one says what is wrong with it."""
    first = state_of(3)
    with Store.open(broken_there, config=CONFIG) as opened:
        opened.save(first, step=3)
        opened.push(folder, 3)
    with Store.open(tmp_path / "new", config=CONFIG) as opened:
        with pytest.raises(InconsistentCheckpointError, match="1 of 3 checkpoints could not be copied") as caught:
            opened.pull(folder, everything=True)
        assert [reason.startswith("default step 2") for reason in caught.value.reasons] == [True]
        assert [one.step for one in opened.checkpoints()] == [1, 3]
        check_state(opened.load(3), 3)


def test_a_location_that_goes_away_ends_a_pull(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Each question may cost a deadline: the other checkpoints are not asked for."""
    asked: list[str] = []

    def away(*_: object, **__: object) -> object:
        asked.append("once")
        raise RemoteUnreachableError("nobody answers")

    with Store.open(tmp_path / "new", config=CONFIG) as opened, pytest.MonkeyPatch.context() as patched:
        catalog = opened._catalog()
        patched.setattr("asymcheck.migration.pull.read_manifests", away)
        patched.setattr("asymcheck.tiers.manifests.ManifestReader.runs", away)
        there = RemoteTier(parse_location(folder), CONFIG)
        listings = there.manifests.checkpoints("default")
        with pytest.raises(RemoteUnreachableError):
            pull(there, opened._nvme, catalog, listings)
        there.close()
    assert len(asked) == 2


@pytest.mark.parametrize(
    "lose", [lambda head: head.unlink(), lambda head: head.write_bytes(b"x" * 8192)], ids=["missing", "damaged"]
)
def test_head_records_are_brought_back(store: Path, folder: str, lose: Callable[[Path], None]) -> None:
    """As they were; nothing else has to be lost. A pull does it, too, where one is damaged."""
    head = store / "heads" / "default" / "00000002.head"
    with Store.open(store, config=CONFIG) as opened:
        opened.save(state_of(3), step=3, generation=opened.begin_generation(opened.checkpoints()[0]))
        opened.push(folder, everything=True)
    before = head.read_bytes()
    lose(head)
    with Store.open(store, config=CONFIG) as opened:
        assert len(opened.repair().left) == 1
        opened.delete(1)
        opened.pull(folder, 1)
        assert head.read_bytes() == before
    lose(head)
    with Store.open(store, config=CONFIG, remote=folder) as opened:
        done = opened.repair()
        assert ([one.kind for one in done.done], done.left) == (["record"], ())
        assert opened.repair().done == ()
    assert head.read_bytes() == before


def test_a_head_record_of_another_training_is_not_brought(store: Path, folder: str, tmp_path: Path) -> None:
    """No checkpoint of that generation lies on both sides: what is damaged is left, and the reason is said."""
    save_steps(tmp_path / "other", 1)
    for path in (store, tmp_path / "other"):
        with Store.open(path, config=CONFIG) as opened:
            opened.save(state_of(3), step=3, generation=opened.begin_generation(None))
    with Store.open(tmp_path / "other", config=CONFIG) as opened:
        opened.push(folder, 3)
    head = store / "heads" / "default" / "00000002.head"
    head.write_bytes(b"x" * 8192)
    with Store.open(store, config=CONFIG, remote=folder) as opened:
        (left,) = opened.repair().left
        assert left.kind == "damaged-head"
        assert "may be that of another training" in left.message
        with pytest.raises(InvalidInputError, match="may be that of another training"):
            opened.pull(folder, 3)
    assert head.read_bytes() == b"x" * 8192


def test_a_manifest_of_one_rank_is_brought_back(store: Path, folder: str) -> None:
    """A checkpoint that is incomplete here counts as lost."""
    save_id = new_save_id().hex()
    with Store.open(store, config=CONFIG) as opened:
        for rank in range(2):
            opened.save(state_of(3), step=3, part=Part(rank, 2, save_id))
        opened.push(folder, 3)
    newest = max((store / "manifests" / "default").iterdir())
    max(newest.iterdir()).unlink()
    with Store.open(store, config=CONFIG) as opened:
        (left,) = opened.repair().left
        assert (left.kind, left.message) == (
            "incomplete-checkpoint",
            "manifests of ranks 1 are missing (world size 2)",
        )
    with Store.open(store, config=CONFIG, remote=folder) as opened:
        assert opened.repair().left == ()
        assert opened.verify() == []
        check_state(opened.load(3), 3)
