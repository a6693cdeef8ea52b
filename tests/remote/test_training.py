"""Test a training that pushes: selected checkpoints arrive, and training continues through any failure."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import asymcheck.replication.push_loop as module
from asymcheck import Checkpointer, Push, Retention, Store
from asymcheck.capture import signals
from asymcheck.capture.signals import ExitHandler
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    InvalidInputError,
    RemoteUnreachableError,
    UnreachableRemoteWarning,
)
from asymcheck.replication import background_push
from asymcheck.storage.fallback_tier import RemoteFallback
from asymcheck.storage.remote.remote_files import RemoteFiles
from tests.remote.conftest import CONFIG, check_location, check_state, config, state_of
from tests.zygote import wait_until

NOWHERE = "hdfs://127.0.0.1:1/x"
ONE_ATTEMPT = config(attempts=1, options={"dfs.client.failover.max.attempts": "1"})
ONE_LOCAL_ATTEMPT = config(attempts=1)


class Outage:
    """A location that refuses packs until the outage ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Begin with the outage."""
        self.is_on = True
        original = RemoteFiles.write

        def write(files: RemoteFiles, *arguments: object) -> int:
            if self.is_on:
                raise RemoteUnreachableError("not now")
            return original(files, *arguments)  # type: ignore[arg-type]  # as they came

        monkeypatch.setattr(RemoteFiles, "write", write)
        monkeypatch.setattr(module, "RETRY_S", 0.05)


def train(checkpointer: Checkpointer, state: dict[str, object], *steps: int) -> None:
    """Train, and make each step durable before the next."""
    for step in steps:
        state.update(state_of(step))
        checkpointer.step(step, {"loss": 10.0 - step})
        checkpointer.wait()


def steps_in(store: Store) -> list[int]:
    """Return the steps of a store."""
    return [one.step for one in store.checkpoints()]


@pytest.mark.slow(quick=["file"])
def test_selected_checkpoints_arrive(store_path: Path, any_location: str) -> None:
    """Test the push during training, and the statistics."""
    state = dict(state_of(0))
    with Store.open(store_path, config=CONFIG, create=True) as store:
        with Checkpointer(store, state, every=1, push=Push(any_location, every=2), keep=None) as checkpointer:
            train(checkpointer, state, 0, 1, 2, 3)
            checkpointer.wait("remote")
            now = checkpointer.push_statistics()
            assert (now.pushed, now.backlog, now.failures, now.problem, now.newest_step) == (2, 0, 0, "", 2)
            assert now.sent_bytes > 0
            check_location(any_location, 0, 2)
            train(checkpointer, state, 4)
        assert checkpointer.push_statistics().pushed == 3
        assert steps_in(store) == [0, 1, 2, 3, 4]
    check_location(any_location, 0, 2, 4)


@pytest.mark.parametrize("ends", ["saved", "saved before", "failed", "without save_on_exit"])
def test_last_step_is_pushed_at_the_end(store_path: Path, folder: str, ends: str) -> None:
    """Test a last step that no rule selects: with save_on_exit, it is pushed at a regular end."""
    saves = ends != "without save_on_exit"
    with Store.open(store_path, config=CONFIG, create=True) as store:
        state, every = dict(state_of(0)), 3 if ends == "saved" else 1
        checkpointer = Checkpointer(
            store, state, every=every, push=Push(folder, every=3), keep=None, save_on_exit=saves
        )
        with contextlib.suppress(ZeroDivisionError), checkpointer:
            train(checkpointer, state, 0, 1, 2, 3, 4)
            if ends == "failed":
                raise ZeroDivisionError
        assert checkpointer.push_statistics().backlog == 0
    with Store.open(folder, read_only=True) as location:
        assert steps_in(location) == ([0, 3, 4] if ends.startswith("saved") else [0, 3])


def test_wait_without_a_push_is_refused(store_path: Path) -> None:
    """Test that a wait does not return as if all checkpoints had been uploaded."""
    state = dict(state_of(0))
    with (
        Store.open(store_path, config=CONFIG, create=True) as store,
        Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        train(checkpointer, state, 0)
        with pytest.raises(InvalidInputError, match=r"nothing is pushed; give .*push="):
            checkpointer.wait("remote")
        assert checkpointer.push_statistics().pushed == 0
        with pytest.raises(InvalidInputError, match="push="):
            Checkpointer(store, state, push="hdfs://x/y", every=1, keep=None)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(InvalidInputError, match="'remote'"):
            checkpointer.wait("s3")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.slow
@pytest.mark.usefixtures("on_thread")
def test_retention_keeps_waiting_checkpoints_up_to_a_limit(
    store_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test two waiting checkpoints besides the newest; the next start sends them, and they are deleted."""
    outage = Outage(monkeypatch)
    state = dict(state_of(0))
    push, keep = Push(folder, every=2, hold=2), Retention(keep_last=1)
    with Store.open(store_path, config=ONE_LOCAL_ATTEMPT, create=True) as store:
        checkpointer = Checkpointer(store, state, push=push, keep=keep, every=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnreachableRemoteWarning)
            train(checkpointer, state, *range(8))
        wait_until(lambda: steps_in(store) == [4, 6, 7], "all but two that wait, and the newest, to go")
        assert checkpointer.push_statistics().backlog == 2
        with pytest.warns(UnreachableRemoteWarning, match=rf"2 checkpoints were not pushed to {folder} \(Remote.*next"):
            checkpointer.close()
        outage.is_on = False
        with Checkpointer(store, state, push=push, keep=keep, every=1) as checkpointer:
            wait_until(lambda: checkpointer.push_statistics().pushed == 2, "the next start to send them")
            checkpointer.restore()
            train(checkpointer, state, 9)
            wait_until(lambda: steps_in(store) == [9], "what was sent to go")
    check_location(folder, 4, 6)


@pytest.mark.slow
def test_outage_is_reported_once_and_the_backlog_grows(store_path: Path) -> None:
    """Test that every step is saved locally, and that wait() reports the reason, and close() the backlog."""
    state = dict(state_of(0))
    with (
        Store.open(store_path, config=ONE_ATTEMPT, create=True) as store,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UnreachableRemoteWarning)
        checkpointer = Checkpointer(store, state, push=Push(NOWHERE), every=1, keep=None)
        for step in range(3):
            train(checkpointer, state, step)
            assert checkpointer.push_statistics().backlog == step + 1
            wait_until(lambda: checkpointer.push_statistics().failures > 0, "a push to fail")
        assert len(caught) == 1
        assert str(caught[0].message).startswith(
            f"{NOWHERE}: 1 checkpoint waits to be pushed, training goes on: Remote"
        )
        with pytest.raises(RemoteUnreachableError):
            checkpointer.wait("remote")
        checkpointer.close()
        assert [str(one.message)[:42] for one in caught[1:]] == ["run 'default': 3 checkpoints were not pushed"[:42]]
        assert steps_in(store) == [0, 1, 2]
        check_state(store.load(), 2)
        with Checkpointer(store, state, push=Push(NOWHERE), on_error="warn", every=1, keep=None) as checkpointer:
            checkpointer.wait("remote")
            assert len(caught) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("on_thread")
def test_second_outage_is_reported_again(store_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the second outage is reported once."""
    outage = Outage(monkeypatch)
    state = dict(state_of(0))
    with (
        Store.open(store_path, config=ONE_LOCAL_ATTEMPT, create=True) as store,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UnreachableRemoteWarning)
        with Checkpointer(store, state, push=Push(folder), every=1, keep=None) as checkpointer:
            for step, is_on in enumerate((True, True, False, True, False)):
                outage.is_on = is_on
                train(checkpointer, state, step)
                if is_on:
                    wait_until(lambda: checkpointer.push_statistics().problem != "", "a push to fail")
                else:
                    checkpointer.wait("remote")
                # This call passes the observed problem to the loop.
                checkpointer.wait("local" if is_on else "remote")
    assert len(caught) == 2


@pytest.mark.usefixtures("on_thread")
def test_end_is_bounded_in_time(store_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a location that never responds; unfinished uploads are not committed, and the next start sends them."""
    state = dict(state_of(0))
    blocked, freed = threading.Event(), threading.Event()
    original: Callable[..., int] = RemoteFiles.write

    def write(files: RemoteFiles, *arguments: object) -> int:
        if not freed.is_set():
            blocked.set()
            freed.wait()
        return original(files, *arguments)

    monkeypatch.setattr(RemoteFiles, "write", write)
    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    with Store.open(store_path, config=CONFIG, create=True) as store:
        checkpointer = Checkpointer(store, state, push=Push(folder, close_s=0.1), every=1, keep=None)
        train(checkpointer, state, 0)
        assert blocked.wait(60)
        with pytest.warns(UnreachableRemoteWarning, match="1 checkpoint was not pushed .*no time was left"):
            checkpointer.close()
        checkpointer.close()
        check_state(store.load(), 0)
        freed.set()
        with Checkpointer(store, state, push=Push(folder), every=1, keep=None) as checkpointer:
            checkpointer.wait("remote")
    check_location(folder, 0)


@pytest.mark.usefixtures("on_thread")
def test_sigterm_ends_a_wait_for_uploads(store_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test an upload that takes too long: the process ends before, and the next start sends the checkpoint."""
    state = dict(state_of(0))
    blocked, freed, waiting = threading.Event(), threading.Event(), threading.Event()
    were_sent: list[bool] = []
    original: Callable[..., int] = RemoteFiles.write

    def write(*arguments: object) -> int:
        blocked.set()
        freed.wait()
        return original(*arguments)

    def is_ending(handler: ExitHandler) -> bool:
        waiting.set()
        return is_due(handler)

    def terminate() -> None:
        blocked.wait()
        waiting.wait(5)
        os.kill(os.getpid(), signal.SIGTERM)
        # Without an effect of the signal, the upload goes on.
        freed.wait(2)
        freed.set()

    monkeypatch.setattr(RemoteFiles, "write", write)
    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    monkeypatch.setattr(signals, "end_by_default", lambda _number: were_sent.append(freed.is_set()))
    is_due = ExitHandler.is_due
    monkeypatch.setattr(ExitHandler, "is_due", is_ending)
    for name in ("_depth", "_is_terminated"):
        monkeypatch.setattr(ExitHandler, name, getattr(ExitHandler, name))
    with Store.open(store_path, config=CONFIG, create=True) as store:
        checkpointer = Checkpointer(store, state, push=Push(folder, close_s=0.1), every=1, keep=None)
        train(checkpointer, state, 0)
        terminating = threading.Thread(target=terminate)
        terminating.start()
        with pytest.warns(UnreachableRemoteWarning, match="1 checkpoint was not pushed .*no time was left"):
            checkpointer.wait("remote")
        freed.set()
        terminating.join()
    assert were_sent == [False]


@pytest.mark.usefixtures("on_thread")
def test_rule_that_selects_few_saved_steps_is_reported(store_path: Path, folder: str) -> None:
    """Test one warning if most checkpoints would stay on one drive, and none for a program that only saves."""
    state = dict(state_of(0))
    with Store.open(store_path, config=CONFIG, create=True) as store:
        with Checkpointer(store, state, push=Push(folder, every=50)) as checkpointer:
            checkpointer.save(50)
            with pytest.warns(UnreachableRemoteWarning, match=r"multiple of 50, and with every='auto' few") as caught:
                train(checkpointer, state, 51)
            train(checkpointer, state, 52)
        assert len(caught) == 1


@pytest.mark.slow(long=["hdfs"])
def test_the_location_has_a_retention_of_its_own(store_path: Path, any_location: str) -> None:
    """Test that remote checkpoints are deleted with their packs, when old enough, and local ones are not."""
    state = dict(state_of(0))
    push = Push(any_location, every=2, keep=Retention(keep_last=1, keep_best=("loss", 1, "max")))
    with Store.open(store_path, config=config(grace_s=0.0), create=True) as store:
        for first in (0, 4):
            with Checkpointer(store, state, push=push, every=1, keep=None) as checkpointer:
                checkpointer.restore()
                for step in range(first, first + 4):
                    train(checkpointer, state, step)
                    checkpointer.wait("remote")
        assert steps_in(store) == list(range(8))
    check_location(any_location, 0, 6)
    with (
        Store.open(any_location, config=CONFIG, create=True) as remote,
        Store.open(store_path, config=CONFIG, create=True) as store,
    ):
        if not any_location.startswith("s3:"):  # where a later collection removes the last packs
            assert remote.gc(dry_run=True).freed_packs == 0
        assert remote.resources.usage().pack_bytes < 3 * 4 * 60_000


@pytest.mark.slow
@pytest.mark.usefixtures("on_thread")
def test_foreign_location_is_reported_until_fixed(
    tmp_path: Path, any_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the backlog waits, and never counts as sent."""
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    push = Push(any_location, close_s=1.0)
    state = dict(state_of(0))
    with (
        Store.open(tmp_path / "lost", config=CONFIG, create=True) as store,
        Checkpointer(store, state, push=push, every=1, keep=None) as first,
    ):
        train(first, state, 0, 1)
        first.wait("remote")
    # The store is lost, and no location is configured from which it could be restored.
    with Store.open(tmp_path / "anew", config=CONFIG, create=True) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreachableRemoteWarning)
        with Checkpointer(store, state, push=push, every=1, keep=None) as second:
            train(second, state, 0, 1)
            wait_until(lambda: second.push_statistics().failures > 2, "the push fails again and again")
            assert "another training" in second.push_statistics().problem
            assert second.push_statistics().backlog == 2
            with pytest.raises(InvalidInputError, match="another training"):
                second.wait("remote")
    check_location(any_location, 0, 1)


def test_a_new_machine_without_the_location_is_warned_at_once(tmp_path: Path, folder: str) -> None:
    """Test a store without remote=, which has lost everything, before the first step of a training from scratch."""
    state = dict(state_of(0))
    for name in ("first", "second"):
        with (
            warnings.catch_warnings(record=True) as caught,
            Store.open(tmp_path / name, config=CONFIG, create=True) as store,
            Checkpointer(store, state, push=Push(folder, close_s=0.0), every=1, keep=None) as checkpointer,
        ):
            warnings.simplefilter("always")
            assert checkpointer.restore() is None
            told = [str(one.message) for one in caught if one.category is AbandonedCheckpointsWarning]
            if name == "first":
                train(checkpointer, state, 0, 1)
                checkpointer.wait("remote")
    assert len(told) == 1
    assert "the newest of step 1" in told[0]
    assert f"open a new store with remote='{folder}'" in told[0]


def test_a_location_that_fails_is_asked_once_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a new start does not wait for a second deadline after the lease could not be taken."""
    asked: list[object] = []
    monkeypatch.setattr(background_push, "RemoteTier", lambda *location: asked.append(location))
    (tmp_path / "file").touch()
    with (
        Store.open(tmp_path / "store", config=CONFIG, create=True) as store,
        Checkpointer(store, dict(state_of(0)), push=Push(f"file://{tmp_path}/file", close_s=0.0)) as checkpointer,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UnreachableRemoteWarning)
        assert checkpointer.restore() is None
        checkpointer.close()
    assert asked == []


@pytest.mark.slow
def test_a_new_machine_goes_on_with_a_number_that_the_location_does_not_have(tmp_path: Path, folder: str) -> None:
    """Test that the location knows a generation without checkpoints, and that each store knows the whole line."""
    launches = (("lost", (0,), None), ("lost", (), 0), ("second", (1,), 0), ("third", (2,), 1))
    for generation, (name, steps, restored) in enumerate(launches, 1):
        state = state_of(9)
        with Store.open(tmp_path / name, config=CONFIG, remote=folder, create=True) as store:
            with (
                Checkpointer(store, state, push=Push(folder), every=1, keep=None) as checkpointer,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                found = checkpointer.restore()
                assert (None if found is None else found.step) == restored
                train(checkpointer, state, *steps)
                checkpointer.wait("remote")
            assert [head.generation for head in store.training.heads("default")] == list(range(1, generation + 1))
            assert checkpointer.push_statistics().problem == ""
        if steps:
            with Store.open(tmp_path / name, config=CONFIG, create=True) as alone:
                check_state(alone.load(), *steps)


@pytest.mark.slow
def test_a_training_that_was_lost_before_its_first_checkpoint_begins_again(tmp_path: Path, folder: str) -> None:
    """Test a generation that only the location knows; another training of that name is refused."""
    state = state_of(9)
    with Store.open(tmp_path / "lost", config=CONFIG, create=True) as store:
        store.save(state, step=0, generation=store.training.begin_generation(None))
        store.push(folder)
    with Store.open(folder, config=CONFIG, create=True) as remote:
        # A push that is killed before its first manifest leaves this state.
        remote.delete(0)
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder, create=True) as store,
        Checkpointer(store, state, push=Push(folder), every=1, keep=None) as checkpointer,
    ):
        assert checkpointer.restore() is None
        train(checkpointer, state, 0)
        checkpointer.wait("remote")
    check_location(folder, 0)
    with (
        Store.open(tmp_path / "another", config=CONFIG, remote=folder, create=True) as store,
        pytest.warns(
            UnreachableRemoteWarning, match=r"pushed there\. To continue .*asymcheck pull .*\); once the cause"
        ),
        Checkpointer(store, state, push=Push(folder), every=1, keep=None) as checkpointer,
    ):
        train(checkpointer, state, 1)
    check_location(folder, 0)


def test_a_rollback_does_not_wait_for_the_location(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that generation numbers of the location are read at the start, so that a rollback needs no connection."""
    with Store.open(tmp_path / "lost", config=CONFIG, create=True) as store:
        store.save(state_of(0), step=0)
        store.push(folder)
    state = dict(state_of(9))
    with (
        Store.open(tmp_path / "new", config=CONFIG, remote=folder, create=True) as store,
        Checkpointer(store, state, every=1, keep=None) as checkpointer,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        assert checkpointer.restore() is not None
        train(checkpointer, state, 1)
        checkpointer.wait()

        def refuse(*_arguments: object) -> None:
            pytest.fail("the location was asked")

        monkeypatch.setattr(RemoteFallback, "ask", refuse)
        monkeypatch.setattr(RemoteFallback, "tier", refuse)
        assert checkpointer.rollback().step == 1
        monkeypatch.undo()
        assert [head.generation for head in store.training.heads("default")] == [2, 3]


def test_the_next_training_does_not_push_to_the_drive_under_a_missing_mount(store: Path, folder: str) -> None:
    """Test a restart before the shared file system is mounted: the push goes on once it is."""
    top = Path(folder.removeprefix("file://"))
    with Store.open(store, config=CONFIG) as opened:
        opened.push(folder)
        mounted = top.rename(top.with_name("mounted"))
        state = state_of(2)
        with Checkpointer(opened, state, every=1, push=Push(folder), keep=None) as checkpointer:
            with warnings.catch_warnings():
                # Each of these calls may be the first to warn.
                warnings.simplefilter("ignore", UnreachableRemoteWarning)
                checkpointer.restore()
                train(checkpointer, state, 3)
                with pytest.raises(RemoteUnreachableError, match=r"unmounted\? Mount it again"):
                    checkpointer.wait("remote")
            assert not top.exists()
            mounted.rename(top)
            checkpointer.wait("remote")
    check_location(folder, 1, 2, 3)
