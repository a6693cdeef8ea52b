"""Test pushes by a child process: its messages, and independence of the end of either process."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck import Checkpointer, Push, Store, errors
from asymcheck.errors import (
    AsymcheckError,
    ClosedStoreError,
    GivenUpError,
    InconsistentCheckpointError,
    InvalidInputError,
    RanksMissingError,
    UnreachableRemoteWarning,
)
from asymcheck.events import Interval, watch
from asymcheck.replication import background_push as module
from asymcheck.replication.background_push import BackgroundPush
from asymcheck.replication.push_status import Failure, decoded, encoded
from asymcheck.replication.run_lease import LeaseStatus
from tests.remote.conftest import CONFIG, by_process, check_location, config, lose_packs, state_of
from tests.zygote import REPOSITORY, wait_until

TRAINER = """
import os, sys, time
from asymcheck import Push, Store
store = Store.open(sys.argv[1], create=True)
pushing = store.training.push_in_background(Push(sys.argv[2], close_s=None)).start()
pushing.wait()
holding = os.fork()
if not holding:
    # A data loader's worker, which has all descriptors of the trainer that are open.
    time.sleep(600)
print(pushing._process.pid, holding, flush=True)
time.sleep(600)
"""


UPLOADING = """
import sys, time
from asymcheck import Push, Store
from tests.remote.conftest import config
store = Store.open(sys.argv[1], config=config(bytes_per_s=120_000))
pushing = store.training.push_in_background(Push(sys.argv[2])).start()
while not pushing.statistics().done_bytes:
    time.sleep(0.01)
print(pushing._process.pid, flush=True)
time.sleep(600)
"""


def process_of(pushing: BackgroundPush) -> int:
    """Return the id of the push process, if it runs."""
    wait_until(lambda: pushing._process is not None, "the process to begin")
    assert pushing._process is not None
    return pushing._process.pid


@contextlib.contextmanager
def stopped(pushing: BackgroundPush) -> Iterator[None]:
    """Stop the push process temporarily."""
    pid = process_of(pushing)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        # The process may have been killed meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_every_so_many_steps_arrive(store_path: Path, any_location: str) -> None:
    """Test that every n-th step is pushed during background saves, and that other steps are not."""
    state, push = dict(state_of(0)), Push(any_location, every=2, close_s=None)
    with (
        Store.open(store_path, config=CONFIG, create=True) as store,
        store.training.push_in_background(push) as pushing,
    ):
        with Checkpointer(store, state, every=1, keep=None) as checkpointer:
            for step in range(5):
                state.update(state_of(step))
                checkpointer.step(step)
            checkpointer.wait()
        wait_until(lambda: pushing.statistics().pushed > 0, "a checkpoint to be pushed before the end")
    assert pushing.statistics() == pushing.close()
    now = pushing.statistics()
    assert (now.pushed, now.backlog, now.problem, now.newest_step) == (3, 0, "", 4)
    check_location(any_location, 0, 2, 4)


@pytest.mark.slow
def test_each_push_is_traced(store: Path, folder: str) -> None:
    """Test that a trace of the training shows uploads and failures."""
    intervals: list[Interval] = []
    push = Push(folder, close_s=None)
    began = time.perf_counter()
    with watch(intervals.append), Store.open(store, config=CONFIG, create=True) as opened:
        statistics = opened.training.push_in_background(push).start().close()
        sent = {one.detail["step"]: one for one in intervals if one.name == "push"}
        assert sorted(sent) == [1, 2]
        assert sum(int(one.detail["sent"]) for one in sent.values()) == statistics.sent_bytes > 0
        intervals.clear()
        opened.save(state_of(3), step=3)
        lose_packs(store)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnreachableRemoteWarning)
            opened.training.push_in_background(push).start().close()
        (failed,) = (one for one in intervals if one.name == "push")
        assert (failed.detail["step"], failed.detail["failed"]) == (3, "MissingPartitionError")
    for one in (*sent.values(), failed):
        assert began < one.start_s < one.start_s + one.seconds < time.perf_counter()
        assert (one.detail["location"], one.thread_name) == (folder, "asymcheck-pushing")


@pytest.mark.slow
def test_push_process_does_not_load_torch(store: Path, folder: str) -> None:
    """Test the memory of the process: torch with GPU support would load gigabytes of libraries."""
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
        assert "torch" not in Path(f"/proc/{process_of(pushing)}/maps").read_text("utf-8")
    check_location(folder, 1, 2)


@pytest.mark.slow
def test_a_commit_is_counted_and_held_at_once(store: Path, folder: str) -> None:
    """Test independence of the state of the push process; pushed checkpoints are not held."""
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder, hold=2) as pushing:
        pushing.wait()
        assert (pushing.statistics().pushed, pushing.statistics().backlog, pushing.held()) == (2, 0, {})
        with stopped(pushing):
            for step in (3, 4, 5):
                opened.save(state_of(step), step=step)
                pushing.refresh()
                assert pushing.statistics().backlog == step - 2
            ids = {one.step: one.save_id for one in opened.checkpoints()}
            assert pushing.held() == {ids[4]: "to be pushed", ids[5]: "to be pushed"}
        pushing.wait()
        assert (pushing.statistics().pushed, pushing.statistics().backlog, pushing.held()) == (5, 0, {})
    check_location(folder, 1, 2, 3, 4, 5)


@pytest.mark.slow
def test_one_that_is_killed_is_begun_again(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that checkpoints sent by the first process are counted once, and not sent again."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
        first = process_of(pushing)
        sent = pushing.statistics().sent_bytes
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: pushing.statistics().failures == 1, "its end to be seen")
        opened.save(state_of(3), step=3)
        pushing.refresh()
        wait_until(lambda: pushing.statistics().pushed == 3, "another one to push")
        wait_until(lambda: pushing.statistics().problem == "", "all to be well")
        now = pushing.statistics()
        assert (now.backlog, now.failures, now.problem, now.newest_step) == (0, 1, "", 3)
        assert sent < now.sent_bytes < 2 * sent
        assert process_of(pushing) != first
    check_location(folder, 1, 2, 3)


@pytest.mark.slow
def test_waiter_learns_of_a_killed_process(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a later wait ends with the next attempt, and not with its pause."""
    monkeypatch.setattr(module, "RETRY_S", 900.0)
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        with stopped(pushing):
            threading.Timer(0.2, os.kill, (process_of(pushing), signal.SIGKILL)).start()
            with pytest.raises(GivenUpError, match=r"was killed by signal 9; another one begins in 900 s"):
                pushing.wait()
        assert pushing.statistics().problem.startswith("GivenUpError: the process that pushes to file://")
        waiting = threading.Thread(target=pushing.wait, daemon=True)
        waiting.start()
        wait_until(lambda: not waiting.is_alive(), "the wait to end")
        wait_until(lambda: pushing.statistics().problem == "", "all to be well")
        assert (pushing.statistics().pushed, pushing.statistics().failures) == (2, 1)
    check_location(folder, 1, 2)


@pytest.mark.slow
def test_backlog_is_sent_at_the_end_after_a_kill(store: Path, folder: str) -> None:
    """Test that another process sends the backlog without a pause."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        pushing = by_process(opened, folder, close_s=60.0)
        pushing.wait()
        os.kill(process_of(pushing), signal.SIGKILL)
        wait_until(lambda: pushing.statistics().failures == 1, "its end to be seen")
        opened.save(state_of(3), step=3)
        now = pushing.close()
        assert (now.pushed, now.backlog, now.problem) == (3, 0, "")
    check_location(folder, 1, 2, 3)


@pytest.mark.slow
def test_new_process_trusts_only_the_location(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a checkpoint that the killed process had sent and that was deleted meanwhile."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
        with Store.open(folder, config=CONFIG, create=True) as remote:
            remote.delete(1)
        os.kill(process_of(pushing), signal.SIGKILL)
        wait_until(lambda: pushing.statistics().pushed == 3, "it to be sent again")
    check_location(folder, 1, 2)


@pytest.mark.slow
def test_findings_of_a_killed_process_stay_until_the_next_one_has_listed_the_location(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a location that disappears: pushed checkpoints do not wait again, and a new one does."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    remote = Path(folder.removeprefix("file://"))
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
        remote.rename(remote.with_name("aside"))
        remote.touch()
        os.kill(process_of(pushing), signal.SIGKILL)
        # The first failure is the kill, the second one is that of the next process.
        wait_until(lambda: pushing.statistics().failures > 1, "the next process to fail")
        assert (pushing.statistics().backlog, pushing.held()) == (0, {})
        save_id = opened.save(state_of(3), step=3).save_id
        assert (pushing.statistics().backlog, pushing.held()) == (1, {save_id: "to be pushed"})
        remote.unlink()
        remote.with_name("aside").rename(remote)
        pushing.wait()
    check_location(folder, 1, 2, 3)


@pytest.mark.slow
def test_workers_forked_at_its_start_keep_nothing_open(store: Path, folder: str) -> None:
    """Test that workers outlive the process, and that the end of the process is noticed."""
    workers: list[int] = []
    try:
        for _ in range(2):
            with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
                for _ in range(3):
                    worker = os.fork()
                    if not worker:
                        time.sleep(600)
                        os._exit(0)
                    workers.append(worker)
                pushing.wait()
                os.kill(process_of(pushing), signal.SIGKILL)
                wait_until(lambda: pushing.statistics().failures == 1, "its end to be seen")
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    check_location(folder, 1, 2)


def test_a_wait_after_the_end(store: Path, folder: str) -> None:
    """Test a wait when no process pushes any more."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        with by_process(opened, folder) as pushing:
            pass
        with pytest.raises(ClosedStoreError, match="has ended"):
            pushing.wait()
        pushing.refresh()
        assert pushing.statistics().pushed == 2


@pytest.mark.slow
def test_stopped_process_blocks_nobody(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test refresh() and close()."""
    monkeypatch.setattr(module, "_START_S", 0.0)
    monkeypatch.setattr(module, "_ANSWER_S", 0.1)
    monkeypatch.setattr(module, "GIVE_UP_S", 1.0)
    with Store.open(store, config=CONFIG, create=True) as opened:
        pushing = by_process(opened, folder)
        with stopped(pushing):
            for _ in range(1000):
                pushing.refresh()
            with pytest.warns(UnreachableRemoteWarning, match="2 checkpoints were not pushed"):
                pushing.close(0.1)
            assert pushing._thread is not None
            assert not pushing._thread.is_alive()


@pytest.mark.slow
def test_signals_are_ignored_by_the_process(store: Path, folder: str) -> None:
    """Test signals that terminals and schedulers send to all processes: the training decides."""
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
        for name in module._IGNORED_SIGNALS:
            os.kill(process_of(pushing), getattr(signal, name))
        opened.save(state_of(3), step=3)
        pushing.wait()
        assert pushing.statistics().failures == 0
    check_location(folder, 1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("worker_lives", [True, False])
def test_process_ends_with_a_killed_training(store: Path, folder: str, *, worker_lives: bool) -> None:
    """Test also another process that has inherited the open files of the training."""
    arguments = [sys.executable, "-c", TRAINER, str(store), folder]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid, worker = map(int, trainer.stdout.readline().split())
        if not worker_lives:
            os.kill(worker, signal.SIGKILL)
        ending = os.pidfd_open(pid)
        trainer.kill()
    poll = select.poll()
    poll.register(ending, select.POLLIN)
    try:
        assert poll.poll(30_000)
    finally:
        os.close(ending)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    check_location(folder, 1, 2)


@pytest.mark.slow
def test_process_of_a_replaced_checkpointer_ends(store: Path, folder: str) -> None:
    """Test a notebook cell that is run again without closing its Checkpointer."""
    pushers: list[BackgroundPush] = []
    with Store.open(store, config=CONFIG) as opened:
        for step in (3, 4):
            state = state_of(step)
            checkpointer = Checkpointer(opened, state, every=1, keep=None, push=Push(folder))
            checkpointer.restore()
            state.update(state_of(step))
            checkpointer.step(step)
            pushers.append(checkpointer._pusher)
        gc.collect()
        replaced, own = (pushing._thread for pushing in pushers)
        assert replaced is not None
        assert own is not None
        replaced.join(30)
        assert (replaced.is_alive(), own.is_alive()) == (False, True)
        checkpointer.close()
    check_location(folder, 1, 2, 3, 4)


@pytest.mark.slow
def test_process_of_a_killed_training_finishes_its_upload(store: Path, folder: str) -> None:
    """Test that the newest checkpoint arrives, and that no other one is begun."""
    arguments = [sys.executable, "-c", UPLOADING, str(store), folder]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        ending = os.pidfd_open(int(trainer.stdout.readline()))
        trainer.kill()
    try:
        assert select.select([ending], [], [], 30.0)[0]
    finally:
        os.close(ending)
    check_location(folder, 2)


@pytest.mark.slow
def test_credentials_are_in_no_file(store: Path, folder: str) -> None:
    """Test an option of the client that may be a secret: not in files, the arguments or the environment."""
    with Store.open(store, config=config(options={"secret": "hush-7531"}), create=True) as opened:
        pushing = by_process(opened, folder)
        wait_until(lambda: pushing.statistics().problem != "", "the option to be refused")
        process = Path(f"/proc/{process_of(pushing)}")
        assert not [name for name in ("cmdline", "environ") if b"hush-7531" in (process / name).read_bytes()]
        # The job, the requests and the status are in memory that no other user can read.
        files = [os.readlink(entry) for entry in (process / "fd").iterdir()]
        assert sum(file.startswith("/memfd:asymcheck-") for file in files) == 3
        with pytest.warns(UnreachableRemoteWarning, match="no option 'secret'"):
            pushing.close()


@pytest.mark.slow
def test_damaged_checkpoint_is_reported_and_not_held(store: Path, folder: str) -> None:
    """Test all fields of the error."""
    newest = max((store / "packs").iterdir(), key=lambda pack: pack.stat().st_mtime_ns)
    original = newest.read_bytes()
    newest.unlink()
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        with pytest.raises(InconsistentCheckpointError, match=r"damaged(.|\n)*step 2 .*no readable pack") as caught:
            pushing.wait()
        assert len(caught.value.reasons) == 1
        assert (pushing.statistics().damaged, pushing.statistics().backlog, pushing.held()) == (1, 0, {})
        newest.write_bytes(original)
        pushing.wait()
        assert pushing.statistics().problem == ""
    check_location(folder, 1, 2)


def test_the_longest_time_that_an_end_can_take(store: Path, folder: str) -> None:
    """Test the maximum time that a thread can wait."""
    with Store.open(store, config=CONFIG, create=True) as opened:
        assert by_process(opened, folder).close(threading.TIMEOUT_MAX).pushed == 2


def test_a_time_that_no_end_can_take(store: Path, folder: str) -> None:
    """Test that the error leaves the push running."""
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        with pytest.raises(InvalidInputError, match=r"timeout_s .*: give a number from 0\.0"):
            pushing.close(-1)
        pushing.wait()


def test_errors_survive_the_status() -> None:
    """Test errors with fields, one with a field that JSON cannot express, and one of another package."""

    def transferred(error: Exception) -> AsymcheckError:
        return decoded(Failure, encoded(Failure.of(error))).error()

    damaged = transferred(errors.DamagedPartitionError("damaged", b"x" * 16))
    assert isinstance(damaged, errors.DamagedPartitionError)
    assert (str(damaged), damaged.digest) == ("damaged", None)
    missing = transferred(RanksMissingError("rank 1 is missing", [1]))
    assert isinstance(missing, RanksMissingError)
    assert missing.missing == (1,)
    assert repr(transferred(KeyError("x"))) == repr(GivenUpError("KeyError: 'x'"))


@pytest.mark.slow
def test_process_has_low_priority(store: Path, folder: str) -> None:
    """Test all threads of the process, without a terminal."""
    with Store.open(store, config=CONFIG, create=True) as opened, by_process(opened, folder) as pushing:
        pushing.wait()
        pid = process_of(pushing)
        tasks = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        assert len(tasks) > 1
        assert {os.getpriority(os.PRIO_PROCESS, task) for task in tasks} == {19}
        assert os.readlink(f"/proc/{pid}/fd/1") == os.devnull
        assert "memfd:" in os.readlink(f"/proc/{pid}/fd/0")
        pushing.close()
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 1000], ids=["selected", "not selected"])
def test_end_before_a_kill_sends_the_newest_checkpoint_once(store: Path, folder: str, every: int) -> None:
    """Test that no second process sends a checkpoint with which the first one begins."""
    sent: list[int] = []
    note = watch(lambda interval: sent.append(int(interval.detail["step"])) if interval.name == "push" else None)
    with note, Store.open(store, config=CONFIG) as opened:
        by_process(opened, folder, every=every).close_before_kill(60.0)
    assert sent == ([2, 1] if every == 1 else [2])
    check_location(folder, *sorted(sent))


@pytest.mark.slow
def test_end_before_a_kill_cancels_an_upload(store_path: Path, folder: str) -> None:
    """Test the upload of a selected checkpoint, which goes on after that of the newest one."""
    sent: list[int] = []
    note = watch(lambda interval: sent.append(int(interval.detail["step"])) if interval.name == "push" else None)
    with note, Store.open(store_path, config=config(bytes_per_s=120_000), create=True) as opened:
        opened.save(state_of(2), step=2)
        pushing = by_process(opened, folder, every=2)
        wait_until(lambda: pushing.statistics().done_bytes > 0, "the upload to begin")
        opened.save(state_of(3), step=3)
        pushing.close_before_kill(60.0)
    assert sent == [2, 3, 2]
    check_location(folder, 2, 3)


def test_end_before_a_kill_keeps_its_time_limit(store: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a process that does not answer: no grace is added to the time that is left."""
    with Store.open(store, config=CONFIG) as opened:
        pushing = by_process(opened, folder, every=1)
        with stopped(pushing):
            for grace in ("_START_S", "_ANSWER_S"):
                monkeypatch.setattr(module, grace, 600.0)
            began = time.monotonic()
            with pytest.warns(UnreachableRemoteWarning, match="2 checkpoints were not pushed"):
                pushing.close_before_kill(0.5)
            assert time.monotonic() - began < 100


def test_end_before_a_kill_sends_nothing_without_the_lease(store: Path, folder: str) -> None:
    """Test a run that another training has taken over: its newest checkpoint may not become that of the location."""
    with Store.open(store, config=CONFIG) as opened:
        pushing = by_process(opened, folder, every=1000)
        pushing.wait()
        pushing._lease = LeaseStatus("lost")
        pushing.close_before_kill(30.0)
    assert not Path(folder.removeprefix("file://")).exists()


def test_end_without_time_leaves_no_process(store: Path, folder: str) -> None:
    """Test an end before the process has started."""
    with Store.open(store, config=CONFIG) as opened:
        pushing = by_process(opened, folder, every=1)
        with pytest.warns(UnreachableRemoteWarning):
            pushing.close_before_kill(0.0)
        assert pushing._process is None


def test_refused_checkpointer_pushes_nothing(tmp_path: Path) -> None:
    """Test an argument that is refused last, because only the main thread receives signals."""
    refused = list[str]()
    with Store.open(tmp_path / "store", create=True) as store:

        def create() -> None:
            try:
                Checkpointer(store, {"w": 1}, push=Push(f"file://{tmp_path / 'far'}"), save_on_signal=True)
            except InvalidInputError as error:
                refused.append(str(error))

        before = threading.active_count()
        thread = threading.Thread(target=create)
        thread.start()
        thread.join()
        assert "only the main thread" in refused[0]
        assert threading.active_count() == before
