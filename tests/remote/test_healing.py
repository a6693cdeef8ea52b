"""A remote location that stands behind a store: what is lost here is read from there, and brought back by a repair."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import RemoteCopyWarning, SkippedCheckpointWarning, Store, UnreachableRemoteWarning
from asymcheck.cli.main import commands
from asymcheck.errors import (
    DamagedPartitionError,
    InconsistentCheckpointError,
    RecoveryError,
    RemoteUnreachableError,
)
from tests.cli.conftest import run_command
from tests.remote.conftest import CONFIG, check_state, config, state_of

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
