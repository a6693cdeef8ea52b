"""Test background pushes: training never waits, and durable checkpoints arrive.

The push loops run on threads of the test, whose functions a test can break. ``test_push_process`` tests real child
processes.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import pytest

import asymcheck.replication.push_loop as module
from asymcheck import Push, Retention, Store
from asymcheck.errors import (
    HeadRecordError,
    InconsistentCheckpointError,
    InvalidInputError,
    OutOfSpaceError,
    RemoteUnreachableError,
    StorageError,
    UnreachableRemoteWarning,
)
from asymcheck.gc.collect import Collected
from asymcheck.replication.background_push import BackgroundPush
from asymcheck.replication.collect_remote import RemoteSweep
from asymcheck.replication.push_loop import PushLoop
from asymcheck.replication.push_status import PushRequest
from asymcheck.replication.transfer_stats import Moved
from asymcheck.storage import damaged_frames
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.local_files import Files
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import PackFile, Slot
from asymcheck.storage.remote import RemoteTier, clients
from asymcheck.storage.remote.client_interface import Entry, FileSystem
from asymcheck.storage.remote.manifests import RemoteManifests
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.types import CheckpointRef, PackId
from tests.crash import faults
from tests.remote.conftest import CONFIG, check_location, check_state, config, save_steps, state_of
from tests.zygote import wait_until

NOWHERE = "hdfs://127.0.0.1:1/x"
IMPATIENT = config(deadline_s=20.0, options={"dfs.client.failover.max.attempts": "1"})


pytestmark = pytest.mark.usefixtures("on_thread")


def by_thread(store: Store, location: str | Push, every: int | None = None, poll_s: float = 0.5) -> BackgroundPush:
    """Return a background push, which has begun."""
    rules = location if isinstance(location, Push) else Push(location, every=every, close_s=None)
    return store.training.push_in_background(rules, poll_s=poll_s).start()


def test_the_newest_goes_first(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a backlog is sent newest first, because a lost machine would need the newest checkpoint."""
    order: list[int] = []
    real = module.push

    def push(local: ReadTier, remote: RemoteTier, listings: list[CheckpointFiles], *arguments: object) -> Moved:
        order.extend(listing.ref.step for listing in listings)
        return real(local, remote, listings, *arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(module, "push", push)
    with Store.open(store, config=CONFIG, create=True) as opened:
        by_thread(opened, folder).close()
    assert order == [2, 1]


def test_a_location_that_does_not_answer_stops_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that saves continue, the backlog grows and is visible, and the end warns once."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    with Store.open(store, config=IMPATIENT, create=True) as opened:
        pushing = by_thread(opened, NOWHERE)
        wait_until(lambda: pushing.statistics().failures > 0, "a push to fail")
        assert pushing.statistics().backlog == 2
        opened.save(state_of(3), step=3)
        wait_until(lambda: pushing.statistics().backlog == 3, "the backlog to grow")
        assert "RemoteUnreachableError" in pushing.statistics().problem
        with pytest.warns(UnreachableRemoteWarning, match="3 checkpoints were not pushed"):
            pushing.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pushing.close()
        check_state(opened.load(), 3)


def test_push_resumes_after_an_outage(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that no call is needed."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    original = RemoteFiles.write
    left = [3]

    def write(self: RemoteFiles, *arguments: object) -> int:
        if left[0]:
            left[0] -= 1
            raise RemoteUnreachableError("not now")
        return original(self, *arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(RemoteFiles, "write", write)
    with Store.open(store, config=config(attempts=1), create=True) as opened, by_thread(opened, folder) as pushing:
        wait_until(lambda: pushing.statistics().pushed == 2, "the checkpoints to be pushed")
    assert pushing.statistics().failures == 3
    check_location(folder, 1, 2)


def test_damaged_checkpoint_does_not_block_others(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the damaged checkpoint is not tried in each round, and never silently skipped."""
    rounds: list[PushLoop] = []
    original = PushLoop._round

    def one_round(loop: PushLoop) -> bool:
        rounds.append(loop)
        return original(loop)

    monkeypatch.setattr(PushLoop, "_round", one_round)
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    newest.unlink()
    with Store.open(store, config=CONFIG, create=True) as opened:
        pushing = by_thread(opened, folder, poll_s=0.01)
        wait_until(lambda: pushing.statistics().damaged == 1, "the damage to be seen")
        wait_until(lambda: pushing.statistics().pushed == 1, "the other one to be pushed")
        before = len(rounds)
        wait_until(lambda: len(rounds) > before + 2, "rounds without an attempt")
        assert pushing.statistics().failures == 1
        with pytest.warns(UnreachableRemoteWarning, match=r"damaged checkpoint: step 2 "):
            now = pushing.close()
    assert (now.pushed, now.backlog, now.damaged, now.failures) == (1, 0, 1, 1)
    check_location(folder, 1)


def test_wait_sends_repaired_checkpoints(store: Path, folder: str) -> None:
    """Test the advice of the error: before the repair, a wait sends all others and raises again."""
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    original = newest.read_bytes()
    newest.unlink()
    with Store.open(store, config=CONFIG, create=True) as opened, by_thread(opened, folder) as pushing:
        for _ in range(2):
            with pytest.raises(InconsistentCheckpointError, match=r"damaged(.|\n)*step 2 .*no readable pack"):
                pushing.wait()
            check_location(folder, 1)
        newest.write_bytes(original)
        pushing.wait()
    now = pushing.statistics()
    assert (now.pushed, now.backlog, now.damaged, now.problem) == (2, 0, 0, "")
    check_location(folder, 1, 2)


def test_repaired_checkpoint_is_sent_without_a_wait(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the regular retry, because repairs are not announced."""
    monkeypatch.setattr(module, "DAMAGED_RETRY_S", 0.05)
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    original = newest.read_bytes()
    newest.unlink()
    with Store.open(store, config=CONFIG, create=True) as opened, by_thread(opened, folder, poll_s=0.01) as pushing:
        wait_until(lambda: pushing.statistics().failures > 1, "it to be tried again")
        newest.write_bytes(original)
        wait_until(lambda: pushing.statistics().pushed == 2, "it to be pushed")
    check_location(folder, 1, 2)


def assert_other_pushed(store: Path, folder: str, warning: str) -> None:
    """Check that step 1 is pushed, although step 2 cannot be read, and that a warning says so."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        pushing = by_thread(opened, folder)
        wait_until(lambda: pushing.statistics().pushed == 1, "the other one to be pushed")
        with pytest.warns(UnreachableRemoteWarning, match=warning):
            assert pushing.close().damaged == 1
    check_location(folder, 1)


def test_one_that_the_drive_does_not_give_does_not_hold_up_the_others(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a read error of the drive is not reported as an error of the location."""
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    original = PackFile.read_frame

    def read_frame(pack: PackFile, sequence: int, slot: Slot) -> memoryview:
        if pack.path == newest:
            raise StorageError(f"read pack {pack.path}: Input/output error")
        return original(pack, sequence, slot)

    monkeypatch.setattr(PackFile, "read_frame", read_frame)
    assert_other_pushed(store, folder, r"damaged checkpoint: .*Input/output error")


def test_one_that_this_user_may_not_read_does_not_hold_up_the_others(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that an older checkpoint is pushed, and that the warning names the reason."""
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    open_read = Files.open_read

    def checked(files: Files, path: PurePath) -> int:
        if path == newest:
            faults.refuse(errno.EACCES)("open_read", newest)
        return open_read(files, path)

    monkeypatch.setattr(Files, "open_read", checked)
    assert_other_pushed(store, folder, r"damaged checkpoint: step 2 .*Permission denied")


def test_one_that_the_location_does_not_take_does_not_hold_up_the_others(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the checkpoint waits, and is tried again."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    original = RemoteManifests.stage

    def stage(manifests: RemoteManifests, run: str, ref: CheckpointRef, data: bytes) -> object:
        if ref.step == 2:
            raise StorageError("it does not fit")
        return original(manifests, run, ref, data)

    monkeypatch.setattr(RemoteManifests, "stage", stage)
    with Store.open(store, config=CONFIG, create=True) as opened, by_thread(opened, folder) as pushing:
        wait_until(lambda: pushing.statistics().failures > 2, "it to fail again and again")
        now = pushing.statistics()
        assert (now.pushed, now.backlog, now.damaged, now.problem) == (1, 1, 0, "StorageError: it does not fit")
        monkeypatch.undo()
        pushing.wait()
    check_location(folder, 1, 2)


def test_damaged_remote_head_record_is_no_local_damage(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the backlog waits for a repair of the location."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.training.begin_generation(opened.checkpoints()[-1])
        opened.push(folder, 1)
        (head,) = (Path(folder.removeprefix("file://")) / "heads/default").iterdir()
        head.write_bytes(bytes(head.stat().st_size))
        with by_thread(opened, folder) as pushing:
            wait_until(lambda: pushing.statistics().failures > 2, "it to fail again and again")
            now = pushing.statistics()
            assert (now.pushed, now.backlog, now.damaged) == (0, 1, 0)
            assert "HeadRecordError" in now.problem
            with pytest.raises(HeadRecordError, match="remove that file"):
                pushing.wait()
            head.unlink()
            wait_until(lambda: pushing.statistics().pushed == 1, "the checkpoint to be pushed")
    check_location(folder, 1, 2)


def test_failed_remote_deletion_blocks_nothing(
    store: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that all checkpoints are sent, the problem is reported, and the collection is not retried at once."""
    save_steps(tmp_path / "other", 1)
    with Store.open(tmp_path / "other", config=CONFIG, create=True) as other:
        other.save(state_of(1), step=1, run="other")
        other.push(folder, run="other")
    (manifest,) = (Path(folder.removeprefix("file://")) / "manifests/other").rglob("*.manifest")
    manifest.write_bytes(b"x")
    save_steps(store, 3, 4)
    begun: list[RemoteSweep] = []
    original = RemoteSweep.carry_out

    def collect(sweep: RemoteSweep) -> Collected:
        begun.append(sweep)
        return original(sweep)

    monkeypatch.setattr(RemoteSweep, "carry_out", collect)
    with Store.open(store, config=CONFIG, create=True) as opened:
        pushing = by_thread(opened, Push(folder, keep=Retention(keep_last=3)))
        with pytest.warns(UnreachableRemoteWarning, match="nothing was removed"):
            now = pushing.close()
        assert (now.pushed, now.backlog, now.failures) == (3, 0, 0)
        assert "nothing was removed" in now.problem
    assert len(begun) == 1
    with Store.open(folder, config=CONFIG, create=True) as remote:
        assert [one.step for one in remote.checkpoints() if one.run == "default"] == [2, 3, 4]


def test_a_location_does_not_stay_full(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that packs of deleted checkpoints are removed once they are old enough, although no push succeeds before."""
    packs = Path(folder.removeprefix("file://")) / "packs"
    with Store.open(store, config=CONFIG) as opened:
        opened.push(folder, everything=True)
        old, write = {pack.stem for pack in packs.iterdir()}, RemoteFiles.write

        def write_with_quota(files: RemoteFiles, path: PurePosixPath, *content: Any) -> int:  # noqa: ANN401 - passed on
            # Not by size, because it depends on the order of uploads how much a removed checkpoint frees.
            if path.parent.name == "packs" and old <= {pack.name.partition(".")[0] for pack in packs.iterdir()}:
                raise OutOfSpaceError("quota exceeded")
            return write(files, path, *content)

        monkeypatch.setattr(RemoteFiles, "write", write_with_quota)
        opened.save(state_of(3), step=3)
        loop = opened.training.push_loop(Push(folder, keep=Retention(keep_last=1)))
        for is_old in (False, False, True):
            for pack in packs.iterdir() if is_old else ():
                os.utime(pack, (1, 1))
            assert not loop._round()
            assert loop._pruner is not None
            # As if an hour has passed.
            loop._pruner._collected_at = None
        assert loop._round()
    check_location(folder, 3)


def test_a_push_lists_no_older_checkpoints_at_the_location(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the number of listings of a push does not grow with the checkpoints at the location."""
    listed: list[str] = []
    children = clients._LocalClient.children

    def list_children(client: FileSystem, path: str) -> list[Entry]:
        listed.append(path)
        return children(client, path)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(clients._LocalClient, "children", list_children)
    counts = []
    with Store.open(store, config=CONFIG) as opened:
        loop = opened.training.push_loop(Push(folder, keep=Retention(keep_last=100)))
        for step in range(3, 9):
            opened.save(state_of(step), step=step)
            listed.clear()
            assert loop._round()
            counts.append(len(listed))
    assert counts[-1] == counts[1]
    check_location(folder, *range(1, 9))


def test_nothing_is_pushed_to_a_location_that_was_emptied(store: Path, folder: str) -> None:
    """Test that no checkpoint counts as pushed at a location that nobody could open, until the user creates it."""
    top = Path(folder.removeprefix("file://"))
    with Store.open(store, config=CONFIG) as opened:
        loop = opened.training.push_loop(Push(folder))
        assert loop._round()
        shutil.rmtree(top)
        # As in an object store, where a folder needs not exist, or stays after its last object.
        for name in ("heads", "manifests/default", "packs"):
            (top / name).mkdir(parents=True)
        opened.save(state_of(3), step=3)
        assert not loop._round()
        assert "has no asymcheck.store any more" in loop.status().statistics.problem
        restarted = opened.training.push_loop(Push(folder))
        assert not restarted._round()
        assert "has no asymcheck.store any more" in restarted.status().statistics.problem
        assert not [file for file in top.rglob("*") if file.is_file()]
        opened.push(folder, create=True)
        assert loop._round()
        assert restarted._round()
    check_location(folder, 1, 2, 3)


def test_head_record_is_not_written_to_a_missing_mount(store: Path, folder: str) -> None:
    """Test a return to an older step without a new checkpoint: the record is pushed once the location is mounted."""
    top = Path(folder.removeprefix("file://"))
    with Store.open(store, config=CONFIG) as opened:
        loop = opened.training.push_loop(Push(folder))
        assert loop._round()
        mounted = top.rename(top.with_name("mounted"))
        opened.training.begin_generation(opened.checkpoints()[0])
        assert not loop._round()
        assert not top.exists()
        mounted.rename(top)
        assert loop._round()
    with Store.open(folder, config=CONFIG) as remote:
        assert [head.generation for head in remote.training.heads("default")] == [2]


def test_a_chosen_checkpoint_that_was_deleted_before_its_push_is_reported(store: Path, folder: str) -> None:
    """Test that the report leaves out checkpoints that were pushed, and those that the location would not keep."""
    with Store.open(store, config=CONFIG) as opened:
        loop = opened.training.push_loop(Push(folder, keep=Retention(keep_last=1, keep_every=5)))
        assert loop._round()
        for step in range(3, 9):
            opened.save(state_of(step), step=step)
            loop.apply(PushRequest(looks=step))
        for step in range(1, 8):
            opened.delete(step)
        assert loop._round()
        now = loop.status().statistics
        assert (now.missed, now.newest_step) == (1, 8)
        assert now.problem.startswith("step 5 was deleted from the store before it was pushed")
        assert loop._round()
        assert loop.status().statistics.missed == 1
    check_location(folder, 8)


def test_the_push_process_learns_of_damage(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a request names the damaged frames that the training knows, which the location may hold."""
    pack_id, noted = PackId(bytes(range(16))), list[tuple[PackId, int]]()
    damaged_frames.note(pack_id, 4096)
    monkeypatch.setattr(damaged_frames, "note", lambda *frame: noted.append(frame))
    with Store.open(store, config=CONFIG, create=True) as opened, by_thread(opened, folder) as pushing:
        pushing.refresh()
        pushing.wait()
    assert (pack_id, 4096) in noted


def test_checkpoints_that_neither_side_keeps_are_forgotten(store: Path, folder: str) -> None:
    """Test that a decision does not cost more with each checkpoint of a long training."""
    keep = Retention(keep_last=1)
    with Store.open(store, config=CONFIG) as opened:
        loop = opened.training.push_loop(Push(folder, keep=keep))
        for step in range(3, 8):
            opened.save(state_of(step), step=step)
            opened.prune(keep)
            assert loop._round()
        assert [checkpoint.step for checkpoint in loop._sent.values()] == [7]
    check_location(folder, 7)


def test_remote_checkpoint_without_packs_is_sent_again(store: Path, folder: str) -> None:
    """Test a killed push and a lost pack; a wait includes the checkpoint."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, everything=True)
        for pack in (Path(folder.removeprefix("file://")) / "packs").iterdir():
            pack.unlink()
        with by_thread(opened, folder) as pushing:
            pushing.wait()
            assert pushing.statistics().pushed == 2
    check_location(folder, 1, 2)


def test_head_record_is_pushed_before_the_next_checkpoint(store: Path, folder: str) -> None:
    """Test that a machine lost right after a rollback does not bring back abandoned checkpoints."""
    with Store.open(store, config=CONFIG, create=True) as opened, by_thread(opened, folder, poll_s=0.05) as pushing:
        pushing.wait()
        opened.training.begin_generation(opened.checkpoints()[0])
        heads = Path(folder.removeprefix("file://")) / "heads/default"
        wait_until(lambda: heads.exists() and len(list(heads.glob("*.head"))) == 1, "the head record to arrive")
    with Store.open(folder, config=CONFIG, create=True) as remote:
        check_state(remote.load(), 1)


def test_abandoned_checkpoint_is_not_the_newest_remote_one(store: Path, folder: str, tmp_path: Path) -> None:
    """Test that a new machine resumes from an older checkpoint."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, everything=True)
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as opened:
        opened.pull(folder, 1)
        opened.training.begin_generation(opened.checkpoints()[0])
        with by_thread(opened, folder) as pushing:
            wait_until(lambda: pushing.statistics().newest_step is not None, "the location to be looked into")
            assert pushing.statistics().newest_step == 1


@pytest.mark.slow
def test_abandoned_checkpoint_is_not_the_best(store_path: Path, folder: str) -> None:
    """Test a restore during the upload, after the better checkpoint was deleted locally."""
    with Store.open(store_path, config=CONFIG, create=True) as opened:
        for step, loss in ((1, 3.0), (2, 1.0)):
            opened.save(state_of(step), step=step, metrics={"loss": loss})
        opened.push(folder, everything=True)
        with by_thread(opened, Push(folder, best=("loss", 1))) as pushing:
            pushing.wait()
            opened.training.begin_generation(opened.checkpoints()[0])
            opened.delete(2)
            opened.save(state_of(3), step=3, metrics={"loss": 2.0})
        assert pushing.statistics().newest_step == 3
    check_location(folder, 1, 2, 3)


def test_store_with_an_older_line_decides_nothing(store: Path, folder: str, tmp_path: Path) -> None:
    """Test a store that does not know that another machine has restored an older step."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, everything=True)
        opened.training.begin_generation(opened.checkpoints()[0])
        opened.push(folder)
    with Store.open(tmp_path / "new", config=CONFIG, create=True) as opened:
        opened.save(state_of(1), step=1)
        with by_thread(opened, folder) as pushing:
            wait_until(lambda: pushing.statistics().newest_step is not None, "the location to be looked into")
            assert pushing.statistics().newest_step == 1


@pytest.mark.slow(quick=["10000000000.0"])
@pytest.mark.parametrize("timeout_s", [-1, "x", 1e10])
def test_a_time_that_no_end_can_take(store: Path, folder: str, timeout_s: object) -> None:
    """Test that the error leaves the push running."""
    with Store.open(store, config=CONFIG, create=True) as opened, by_thread(opened, folder) as pushing:
        with pytest.raises(InvalidInputError, match=r"timeout_s .*: give a number from 0\.0"):
            pushing.close(timeout_s)  # type: ignore[arg-type]  # wrong on purpose
        pushing.wait()
    check_location(folder, 1, 2)
