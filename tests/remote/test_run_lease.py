"""Test the lease of a run at a remote location, which excludes trainings with other stores."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Push, Ranks, Store, events
from asymcheck.errors import RemoteUnreachableError, RunInUseError, UnreachableRemoteWarning
from asymcheck.format import layout
from asymcheck.replication import background_push
from asymcheck.replication.push_loop import PushLoop
from asymcheck.replication.push_status import PushJob, PushRequest
from asymcheck.replication.run_lease import LeaseClaim, LeaseStatus, RunLease
from asymcheck.storage import process_identity
from asymcheck.storage.nvme.run_lock import Trainer
from asymcheck.storage.remote import parse_location
from tests.remote.conftest import CONFIG, REMOTE, check_state, children_of, config
from tests.remote.lease_trainer import train
from tests.zygote import PATIENCE_S, Child, Zygote, wait_until

_SHORT_S, _LONG_S = 1.0, 600.0
"""Lease times: a holder with the short one renews its lease soon, and a newcomer with the long one awaits that."""
_HERE = Trainer.this()
_ELSEWHERE = dataclasses.replace(
    _HERE, owner=dataclasses.replace(_HERE.owner, pid=77, boot_id="another boot"), host="another-host"
)
_PARENT = dataclasses.replace(
    _HERE,
    owner=dataclasses.replace(
        _HERE.owner, pid=os.getppid(), start_ticks=process_identity._start_ticks(os.getppid()) or 0
    ),
)
"""Trainer that is another living process."""
_ENDED = dataclasses.replace(_HERE, owner=dataclasses.replace(_HERE.owner, pid=2**22 + 1))


@dataclasses.dataclass
class _Holder:
    """A lease that this process takes for some training, and the states that it has reported."""

    lease: RunLease
    states: list[LeaseStatus]

    @property
    def phases(self) -> list[str]:
        return [status.phase for status in self.states]

    def wait_for(self, phase: str) -> None:
        wait_until(lambda: self.phases[-1:] == [phase], f"the lease to be {phase}, after {self.phases}")


@contextlib.contextmanager
def _holder(
    location: str,
    trainer: Trainer = _HERE,
    store: str = "a",
    lease_s: float = _LONG_S,
    *,
    folder: str = "1:2",
    takeover: bool = False,
    was_held: bool = False,
) -> Iterator[_Holder]:
    states: list[LeaseStatus] = []
    claim = LeaseClaim(trainer, store, folder, os.urandom(4).hex(), takeover, was_held)
    configuration = dataclasses.replace(REMOTE, lease_s=lease_s)
    lease = RunLease(parse_location(location), configuration, "default", claim, lambda: 7, states.append)
    try:
        yield _Holder(lease, states)
    finally:
        lease.close()
        # close() does not wait for a late renewal, whose lease would look like that of a living training.
        lease._thread.join()


def _leases(location: str) -> list[Path]:
    folder = Path(location.removeprefix("file://")) / layout.LOCKS / "default"
    return sorted(path for path in folder.glob("*") if layout.parse_lease_name(path.name))


def _leave(location: str, trainer: Trainer, content: bytes | None = None) -> Path:
    """Write the lease of a training that was killed."""
    folder = Path(location.removeprefix("file://")) / layout.LOCKS / "default"
    folder.mkdir(parents=True)
    lease = folder / layout.lease_name(5)
    facts = {"run": "default", "store_id": "b", "folder": "1:2", "token": "t", "last_step": 3}
    lease.write_bytes(trainer.encode(**facts) if content is None else content)
    return lease


def _checkpointer(store: Store, location: str, *, takeover: bool = False) -> Checkpointer:
    push = Push(location, every=1)
    return Checkpointer(store, {"w": torch.ones(8)}, every=1, keep=None, push=push, takeover=takeover)


@pytest.mark.slow(quick=["file"])
def test_lease_of_a_living_training_is_refused(store: Path, any_location: str) -> None:
    """Test that the newcomer learns process, host and last step from the lease, and the holder goes on."""
    with Store.open(store, config=config()) as opened:
        opened.push(any_location, 1)
    with _holder(any_location, _ELSEWHERE, lease_s=_SHORT_S) as first:
        first.wait_for("held")
        with _holder(any_location, store="b") as second:
            second.wait_for("refused")
        assert second.phases == ["watching", "refused"]
        assert second.states[-1].other == _ELSEWHERE
        assert second.states[-1].last_step == 7
        assert first.phases == ["held"]
    with _holder(any_location) as third:
        third.wait_for("held")
        assert third.phases == ["held"]


@pytest.mark.parametrize("trainer", [_HERE, _ENDED], ids=["same process", "dead process"])
def test_lease_of_this_process_or_of_a_dead_one_is_replaced_at_once(folder: str, trainer: Trainer) -> None:
    """Test a notebook cell that is run twice, and a restart after SIGKILL with a new store."""
    lease = _leave(folder, trainer)
    with _holder(folder) as holder:
        holder.wait_for("held")
        assert holder.phases == ["held"]
        wait_until(lambda: not lease.exists(), "the older lease to be removed")
        assert [layout.parse_lease_name(path.name) for path in _leases(folder)] == [6]
    assert not _leases(folder)


def test_lease_of_the_same_store_is_replaced_at_once(folder: str) -> None:
    """Test a training that has released its store, and still pushes: the lock of the store decides."""
    _leave(folder, _PARENT)
    with _holder(folder, store="b") as holder:
        holder.wait_for("held")
        assert holder.phases == ["held"]


def test_training_of_a_copy_of_the_store_is_refused(folder: str) -> None:
    """Test a store that was copied on its machine: each copy has its own lock, so both trainings can run."""
    _leave(folder, _PARENT)
    with _holder(folder, store="b", folder="1:3") as holder:
        holder.wait_for("watching")


@pytest.mark.parametrize(
    "content",
    [None, b"", b"[]", b"[" * 4096, b'{"pid": ' + b"9" * 4000, b"\xff"],
    ids=lambda content: repr(content)[:9],
)
def test_silent_training_of_another_machine_is_replaced_after_the_lease_time(
    folder: str, content: bytes | None
) -> None:
    """Test a holder whose death is not visible, also if its lease cannot be read."""
    _leave(folder, _ELSEWHERE, content)
    began = time.monotonic()
    with _holder(folder, lease_s=0.5) as holder:
        holder.wait_for("held")
        assert holder.phases == ["watching", "held"]
        assert time.monotonic() - began >= 0.5
        assert holder.states[0].other == (_ELSEWHERE if content is None else None)


def test_one_of_two_newcomers_gets_the_lease(folder: str) -> None:
    """Test two trainings that watch the same silent lease."""
    _leave(folder, _ELSEWHERE)
    with _holder(folder, lease_s=1.0) as one, _holder(folder, _ELSEWHERE, "c", 1.0) as two:
        wait_until(lambda: one.phases[-1:] + two.phases[-1:] in (["held", "refused"], ["refused", "held"]), "the end")


def test_lease_that_another_training_took_over_is_lost(folder: str) -> None:
    """Test that the older holder learns of the takeover, and that its end leaves the lease of the newer one."""
    _leave(folder, _ENDED)
    with _holder(folder, _ELSEWHERE, "c", takeover=True) as second:
        second.wait_for("held")
        with _holder(folder, lease_s=0.3, takeover=True) as first:
            first.wait_for("held")
            with _holder(folder, _ELSEWHERE, "d", takeover=True) as third:
                third.wait_for("held")
                first.wait_for("lost")
                assert first.states[-1].other == _ELSEWHERE
            assert not _leases(folder)


def test_lease_that_was_removed_by_hand_is_published_again(pushed: Path, folder: str) -> None:
    """Test that a cleaned location ends no training."""
    del pushed
    _leave(folder, _ENDED)
    with _holder(folder) as holder:
        holder.wait_for("held")
        for lease in _leases(folder):
            lease.unlink()
        # Its thread sleeps until the next renewal. With a short lease time, a late renewal would find the lease lost.
        holder.lease._advance()
        assert _leases(folder)
        assert holder.phases == ["held"]


@pytest.mark.parametrize("was_held", [False, True], ids=["same push process", "next push process"])
def test_missing_mount_takes_no_lease_away(pushed: Path, folder: str, *, was_held: bool) -> None:
    """Test a file system that is unmounted for longer than the lease time: nothing is written to its mount point."""
    del pushed
    top = Path(folder.removeprefix("file://"))
    with _holder(folder, was_held=was_held) as holder:
        holder.wait_for("held")
        mounted = top.rename(top.with_name("mounted"))
        for _ in range(2):
            with pytest.raises(RemoteUnreachableError, match=r"unmounted\? Mount it again"):
                holder.lease._advance()
            holder.lease._renewed -= 2 * _LONG_S
        assert not top.exists()
        mounted.rename(top)
        holder.lease._advance()
        assert holder.phases == ["held"]
        assert _leases(folder)


def test_next_push_process_goes_on_with_the_lease(folder: str) -> None:
    """Test that the process that replaces a killed push process renews the lease, or finds that it was lost."""
    _leave(folder, _ELSEWHERE)
    with _holder(folder, was_held=True, takeover=True) as replacement:
        replacement.wait_for("lost")
    with _holder(folder, takeover=True) as first:
        first.wait_for("held")


def test_new_run_is_guarded_once_the_location_has_it(folder: str, store: Path) -> None:
    """Test that an empty location stays empty until the first push."""
    with _holder(folder, lease_s=0.3) as holder:
        holder.wait_for("unguarded")
        assert not Path(folder.removeprefix("file://")).exists()
        with Store.open(store) as opened:
            opened.push(folder, 1)
        holder.wait_for("held")
        assert holder.states[0].problem == ""


def test_leases_are_neither_reported_nor_counted(pushed: Path, folder: str) -> None:
    """Test that checks and collections ignore leases, and that no event of a push is emitted."""
    seen: list[str] = []
    with (
        events.observe(lambda event: seen.append(event.name)),
        _holder(folder) as holder,
        Store.open(folder, config=config(grace_s=0)) as remote,
    ):
        holder.wait_for("held")
        assert not remote.verify()
        assert remote.gc().removed_temporaries == 0
        assert len(_leases(folder)) == 1
    assert "remote.lease_closed" in seen
    assert "remote.small_closed" not in seen
    del pushed


def test_readers_take_no_lease(pushed: Path, folder: str, tmp_path: Path) -> None:
    """Test a pull, a load, and a training that reads from the location without a push."""
    with Store.open(folder) as remote:
        check_state(remote.load(), 2)
    with Store.open(tmp_path / "new", create=True, remote=folder, config=config()) as store:
        store.pull(folder)
        with Checkpointer(store, {"w": torch.ones(8)}, run="other", every=1) as checkpointer:
            checkpointer.restore()
            checkpointer.save(3)
    assert not (Path(folder.removeprefix("file://")) / layout.LOCKS).exists()
    del pushed


def test_unreachable_location_is_no_obstacle(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Test that training begins at once, and that one line of the log says that it is not guarded."""
    impatient = config(attempts=1, deadline_s=20.0, options={"dfs.client.failover.max.attempts": "1"})
    with Store.open(store_path, create=True, config=impatient) as store:
        checkpointer = _checkpointer(store, "hdfs://127.0.0.1:1/x")
        began = time.monotonic()
        with caplog.at_level(logging.WARNING):
            checkpointer.restore()
            checkpointer.save(1)
        assert time.monotonic() - began < 20
        lines = [record.message for record in caplog.records if "not guarded" in record.message]
        assert len(lines) == 1
        assert "127.0.0.1" in lines[0]
        with pytest.warns(UnreachableRemoteWarning):
            checkpointer.close()


def test_nothing_is_pushed_while_another_training_has_the_lease(store: Path, folder: str) -> None:
    """Test checkpoints that wait in the store of a training that is refused."""
    _leave(folder, _ENDED)
    with _holder(folder, _ELSEWHERE, lease_s=_SHORT_S) as holder, Store.open(store, config=CONFIG) as opened:
        holder.wait_for("held")
        claim = LeaseClaim(_HERE, "a", "1:2", "mine", takeover=False)
        push = Push(folder, every=1)
        job = PushJob(str(store), config(lease_s=_LONG_S), push, "default", poll_s=1.0, prunes=False)
        loop = PushLoop(opened.resources.tier, job)
        loop.apply(PushRequest(waits=1, is_closing=True, claim=claim))
        loop.run()
        failure = loop.status().failure
        assert failure is not None
        assert isinstance(failure.error(), RunInUseError)
        assert "process 77 on host another-host" in failure.message
        assert not (Path(folder.removeprefix("file://")) / layout.MANIFESTS).exists()


def test_only_rank_0_takes_a_lease(store: Path, folder: str) -> None:
    """Test that another rank of a job that pushes from its machine does not even connect."""
    with Store.open(store, config=config()) as opened:
        for rank in (1, 0):
            ranks = Ranks(rank, 2, torch.distributed.HashStore())
            checkpointer = Checkpointer(opened, {"w": torch.ones(8)}, push=Push(folder, every=1), ranks=ranks)
            checkpointer._pusher.guard("a", takeover=False)
            assert (checkpointer._pusher._thread is None) == (rank > 0)
            checkpointer._pusher.close()


# Trainings in processes of their own.


@dataclasses.dataclass
class _Training:
    """A process that trains and pushes."""

    child: Child
    folder: Path

    def output(self) -> list[dict[str, object]]:
        """Return what the process has printed so far."""
        if not self.child.output.exists():
            return []
        lines = self.child.output.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def steps(self) -> list[object]:
        return [line["step"] for line in self.output() if "step" in line]

    def stop(self) -> None:
        (self.folder / "stop").touch()
        self.child.finish()

    def refusal(self) -> dict[str, object]:
        """Return the error that ends the training."""
        assert self.child.has_ended(PATIENCE_S), "the training goes on"
        self.child.finish()
        return self.output()[-1]


def _train(zygote: Zygote, folder: Path, location: str, lease_s: float, *, takeover: bool = False) -> _Training:
    folder.mkdir(exist_ok=True)
    arguments = {"folder": str(folder), "location": location, "lease_s": lease_s}
    return _Training(zygote.start(train, **arguments, takeover=takeover), folder)


def _begun(training: _Training, location: str) -> _Training:
    """Wait until a training has a lease."""
    wait_until(lambda: bool(training.steps()) and bool(_leases(location)), "the first training to begin")
    return training


@pytest.mark.slow
def test_second_machine_is_refused_until_it_takes_the_run_over(tmp_path: Path, folder: str, zygote: Zygote) -> None:
    """Test two stores and one location: refused, then taken over; the older training ends at its next step."""
    first = _begun(_train(zygote, tmp_path / "a", folder, _SHORT_S), folder)
    with Store.open(tmp_path / "b", create=True, remote=folder, config=config(lease_s=_LONG_S)) as store:
        refused = _checkpointer(store, folder)
        with pytest.raises(
            RunInUseError, match=f"process {first.child.pid} .*pushes to {folder}.*takeover=True"
        ) as caught:
            refused.restore()
        assert not caught.value.taken_over
        assert caught.value.last_step in first.steps()
        assert os.uname().nodename in caught.value.trainer
        refused.close()
        steps = len(first.steps())
        wait_until(lambda: len(first.steps()) > steps, "the first training to go on")
        with _checkpointer(store, folder, takeover=True) as checkpointer:
            restored = checkpointer.restore()
            assert restored is not None
            error = first.refusal()
            assert error["taken over"] is True
            assert f"process {os.getpid()} " in str(error["trainer"])
            checkpointer.save(restored.step + 1)
            checkpointer.wait("remote")
    assert not _leases(folder)


@pytest.mark.slow
def test_clean_end_frees_the_run(tmp_path: Path, folder: str, zygote: Zygote) -> None:
    """Test that another machine continues at once after the last upload."""
    first = _begun(_train(zygote, tmp_path / "a", folder, _SHORT_S), folder)
    first.stop()
    assert not _leases(folder)
    second = _begun(_train(zygote, tmp_path / "b", folder, _LONG_S), folder)
    second.stop()
    assert first.steps()[-1] < second.steps()[0]  # type: ignore[operator]  # both are steps


@pytest.mark.slow
@pytest.mark.parametrize("where", ["this machine", "same store", "another machine"])
def test_killed_training_is_replaced(
    tmp_path: Path, folder: str, zygote: Zygote, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Test a restart after SIGKILL: without a wait on its machine, after the lease time on another one."""
    is_far = where == "another machine"
    first = _begun(_train(zygote, tmp_path / "a", folder, 6.0), folder)
    pushes = children_of(first.child.pid)
    first.child.kill()
    first.child.wait()
    if is_far:
        # The process that pushes renews the lease until it finds that the training has ended.
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pushes), "the push to end")
        lease = _leases(folder)[-1]
        lease.write_text(json.dumps({**json.loads(lease.read_bytes()), "boot_id": "x", "host": "far"}))
    lease_s = _SHORT_S if is_far else _LONG_S
    path = tmp_path / ("a/store" if where == "same store" else "b")
    with (
        caplog.at_level(logging.WARNING, logger="asymcheck"),
        Store.open(path, create=True, remote=folder, config=config(lease_s=lease_s)) as store,
        _checkpointer(store, folder) as checkpointer,
    ):
        began = time.monotonic()
        assert checkpointer.restore() is not None
        assert (time.monotonic() - began >= lease_s) == is_far
    lines = [record.message for record in caplog.records if "sign of life" in record.message]
    assert len(lines) == is_far
    assert all(re.search(r"on host far since.*waiting up to [01] s", line) for line in lines)


@pytest.mark.slow
def test_one_of_two_machines_continues_after_a_kill(tmp_path: Path, folder: str, zygote: Zygote) -> None:
    """Test two newcomers that start at the same time."""
    first = _begun(_train(zygote, tmp_path / "a", folder, 6.0), folder)
    first.child.kill()
    first.child.wait()
    both = [_train(zygote, tmp_path / name, folder, 6.0) for name in "bc"]
    wait_until(lambda: any("taken over" in line for one in both for line in one.output()), "one to be refused")
    refused, trains = sorted(both, key=lambda one: bool(one.steps()))
    assert refused.refusal()["taken over"] is False
    assert f"process {trains.child.pid} " in str(refused.output()[-1]["trainer"])
    trains.stop()


@pytest.mark.slow
def test_stopped_training_learns_that_another_one_came_and_went(tmp_path: Path, folder: str, zygote: Zygote) -> None:
    """Test a pause of the machine for longer than the lease time: the newer training has ended when it goes on."""
    first = _begun(_train(zygote, tmp_path / "a", folder, _SHORT_S), folder)
    processes = [first.child.pid, *children_of(first.child.pid)]
    assert len(processes) == 2
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    with (
        Store.open(tmp_path / "b", create=True, remote=folder, config=config(lease_s=_SHORT_S)) as store,
        _checkpointer(store, folder) as checkpointer,
    ):
        assert checkpointer.restore() is not None
    for process in processes:
        os.kill(process, signal.SIGCONT)
    error = first.refusal()
    assert error["taken over"] is True
    assert str(error["trainer"]).startswith("another process, which pushes to ")


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True])
def test_killed_push_process_keeps_the_lease(
    store_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Test that the next push process of the training renews the lease, or finds that the run was taken over."""
    monkeypatch.setattr(background_push, "RETRY_S", 0.2)
    with contextlib.ExitStack() as held:
        store = held.enter_context(Store.open(store_path, create=True, config=config(lease_s=1.0)))
        # A takeover by the next push process would go unnoticed.
        checkpointer = _checkpointer(store, folder, takeover=True)
        checkpointer.save(1)
        worker = checkpointer._pusher
        wait_until(lambda: worker.lease.phase == "held", "the training to learn of the lease")
        process = worker._process
        assert process is not None
        process.kill()
        process.wait()
        number = _leases(folder)[-1]
        if is_lost:
            held.enter_context(_holder(folder, _ELSEWHERE, takeover=True))
            wait_until(lambda: worker.lease.phase == "lost", "the loss to be noticed")
            with pytest.raises(RunInUseError, match="taken over by process 77 on host another"):
                checkpointer.step(2)
            held.enter_context(pytest.warns(UnreachableRemoteWarning, match="taken over"))
        else:
            wait_until(lambda: bool(_leases(folder)) and _leases(folder)[-1] != number, "the next lease")
            wait_until(lambda: not worker.statistics().problem, "the next process to push")
            checkpointer.save(2)
        checkpointer.close()
        assert bool(_leases(folder)) == is_lost
