"""Test the lock of a run: a second training of the same run is refused, or takes the run over from the first."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store, StoreConfig
from asymcheck.config import CaptureConfig
from asymcheck.errors import InvalidInputError, RunInUseError, StorageError
from asymcheck.format import layout
from asymcheck.storage import process_identity
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme import NvmeTier, run_lock
from tests.checkpointer.loops import linear_loop, rings
from tests.checkpointer.step_trainer import train
from tests.zygote import Zygote, wait_until


class _Trainer:
    """Process that trains a run, one step at each call."""

    def __init__(self, zygote: Zygote, store: Path, run: str) -> None:
        """Start the process."""
        pipes = [store.parent / f"{os.urandom(4).hex()}.pipe" for _ in range(2)]
        for pipe in pipes:
            os.mkfifo(pipe)
        requests, answers = map(str, pipes)
        self.process = zygote.start(train, store=str(store), run=run, requests=requests, answers=answers)
        self._requests, self._answers = pipes[0].open("w", buffering=1), pipes[1].open()

    def step(self) -> str:
        """Train one step, and return the answer of the process."""
        self._requests.write("\n")
        return self._answers.readline().strip()

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.process.kill()
        self.process.wait()
        self._requests.close()
        self._answers.close()


@contextlib.contextmanager
def _trainer(zygote: Zygote, store: Path, run: str = "default") -> Iterator[_Trainer]:
    """Yield a process that has trained one step of a run."""
    trainer = _Trainer(zygote, store, run)
    try:
        assert trainer.step() == "7"
        yield trainer
    finally:
        trainer.kill()


def _open(path: Path, lock_timeout_s: float = 60.0) -> Store:
    return Store.open(path, create=True, config=StoreConfig(lock_timeout_s=lock_timeout_s))


def _state() -> dict[str, object]:
    return {"w": torch.ones(8)}


@pytest.mark.slow(quick=["restore"])
@pytest.mark.parametrize("first_call", ["restore", "step", "save"])
def test_run_of_a_living_process_is_refused(
    store_path: Path, zygote: Zygote, first_call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Test that the wait is visible, that the error names the process and its last step, and that the first goes on."""
    with _trainer(zygote, store_path) as trainer, _open(store_path, 0.1) as store:
        checkpointer = Checkpointer(store, _state(), every=1)
        with pytest.raises(RunInUseError) as caught:
            checkpointer.restore() if first_call == "restore" else getattr(checkpointer, first_call)(99)
        checkpointer.close()
        assert not caught.value.taken_over
        assert [record.levelname for record in caplog.records if "waiting up to 0.1 s" in record.message] == ["WARNING"]
        assert caught.value.last_step == 7
        assert f"process {trainer.process.pid} " in caught.value.trainer
        assert os.uname().nodename in caught.value.trainer
        assert "takeover=True" in str(caught.value)
        assert trainer.step() == "8"
        assert [checkpoint.step for checkpoint in store.checkpoints() if checkpoint.on_line] == [7, 8]


@pytest.mark.slow
def test_wait_for_another_training_is_printed(store_path: Path, zygote: Zygote) -> None:
    """Test a program that sets up no logging: without a line on standard error, its start would look like a hang."""
    with _trainer(zygote, store_path) as first:
        second = _Trainer(zygote, store_path, "default")
        try:
            line = f"is in use by process {first.process.pid} "
            wait_until(lambda: line in second.process.output.read_text(), "the line")
        finally:
            second.kill()


@pytest.mark.slow
def test_takeover_ends_the_older_training(store_path: Path, zygote: Zygote) -> None:
    """Test that the newer training continues from the last checkpoint, and that the older one gets an error."""
    with _trainer(zygote, store_path) as trainer, _open(store_path) as store:
        with Checkpointer(store, _state(), every=1, takeover=True) as checkpointer:
            restored = checkpointer.restore()
            assert restored is not None
            assert restored.step == 7
            assert trainer.step() == "taken over"
            checkpointer.step(8)
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [7, 8]


def test_run_of_a_killed_process_is_free_at_once(store_path: Path, zygote: Zygote) -> None:
    """Test a restart after SIGKILL, with no time to wait."""
    with _trainer(zygote, store_path) as trainer, _open(store_path, 0.1) as store:
        trainer.process.kill()
        trainer.process.wait_killed()
        with Checkpointer(store, _state(), every=1) as checkpointer:
            restored = checkpointer.restore()
            assert restored is not None
            assert restored.step == 7


@pytest.mark.slow
def test_lock_of_a_closed_training_is_free(store_path: Path, zygote: Zygote) -> None:
    """Test that close() of the Checkpointer, or of its store alone, releases the run."""
    for closes_checkpointer in (True, False):
        with _open(store_path) as store:
            checkpointer = Checkpointer(store, _state(), every=1)
            checkpointer.restore()
            if closes_checkpointer:
                checkpointer.close()
                with _trainer(zygote, store_path):
                    pass
        with _trainer(zygote, store_path):
            pass


@pytest.mark.slow
def test_other_runs_are_not_locked(store_path: Path, zygote: Zygote) -> None:
    """Test two runs of one store that are trained at the same time."""
    with _trainer(zygote, store_path, "a") as a, _trainer(zygote, store_path, "b") as b:
        assert (a.step(), b.step()) == ("8", "8")


def test_second_checkpointer_of_one_process_takes_the_run_over(store_path: Path) -> None:
    """Test a notebook cell that is run twice."""
    with _open(store_path) as store:
        old, new = Checkpointer(store, _state(), every=1), Checkpointer(store, _state(), every=1)
        old.save(1)
        new.restore()
        with pytest.raises(RunInUseError, match="another Checkpointer of this process"):
            old.step(2)
        new.step(2)
        new.close()
        old.close()


def _again(store_path: Path, config: CaptureConfig, step: int) -> tuple[Store, Checkpointer, int | None]:
    """Run a notebook cell that leaves its Checkpointer open, with a capture that waits for the next optimizer step."""
    _, _, loop = linear_loop()
    store = _open(store_path)
    checkpointer = Checkpointer(store, loop.state, capture=config, every=1)
    restored = checkpointer.restore()
    loop.iterate(step)
    checkpointer.step(step)
    return store, checkpointer, None if restored is None else restored.step


def test_cell_that_is_run_again_finishes_its_earlier_run(
    store_path: Path, config: CaptureConfig, tmp_path: Path
) -> None:
    """Test that the last capture of each run is restored, that its memory is freed, and that old objects can close."""
    runs = []
    for step in (1, 2, 3):
        runs.append(_again(store_path, config, step))
        assert len(rings(tmp_path)) == 1
    assert [restored for *_, restored in runs] == [None, 1, 2]
    for store, checkpointer, _ in runs:
        checkpointer.close()
        store.close()
    assert rings(tmp_path) == []


def test_cell_whose_checkpointer_restores_again_takes_the_run_back(
    store_path: Path, config: CaptureConfig, tmp_path: Path
) -> None:
    """Test that closing the store waits for the last capture of a Checkpointer that another one had replaced."""
    _, _, loop = linear_loop()
    with _open(store_path) as store:
        first, second = (Checkpointer(store, loop.state, capture=config, every=1) for _ in range(2))
        for step, checkpointer in enumerate((first, second, first)):
            checkpointer.restore()
            loop.iterate(step)
            checkpointer.step(step)
    with _open(store_path) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1, 2]
    assert rings(tmp_path) == []
    first.close()


def test_training_that_was_taken_over_does_not_roll_back(store_path: Path, config: CaptureConfig) -> None:
    """Test that no new generation abandons the checkpoints of the newer training."""
    _, _, loop = linear_loop()
    with _open(store_path) as store, Checkpointer(store, loop.state, capture=config, every=1) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        checkpointer.wait()
        store.training.run_lock("default").take(0.0, takeover=True)
        with pytest.raises(RunInUseError):
            checkpointer.rollback()
        assert store.resources.nvme.manifests.heads("default") == [1]


def test_refused_restore_does_not_take_the_run_back(
    store_path: Path, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a training that was taken over by another process, and goes on after the error of its restore."""
    monkeypatch.setattr(run_lock, "_may_replace", lambda _trainer: False)
    _, _, loop = linear_loop()
    with _open(store_path, 0.1) as store, Checkpointer(store, loop.state, capture=config, every=1) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        store.training.run_lock("default").take(0.0, takeover=True)
        with pytest.raises(RunInUseError):
            checkpointer.restore()
        loop.iterate(1)
        with pytest.raises(RunInUseError):
            checkpointer.step(1)
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]


def test_training_of_another_thread_is_not_finished(store_path: Path, config: CaptureConfig, tmp_path: Path) -> None:
    """Test that the memory stays as long as the thread may call ``step()``."""
    begun, ends = threading.Event(), threading.Event()

    def train() -> None:
        store, checkpointer, _ = _again(store_path, config, 1)
        checkpointer.wait()
        begun.set()
        ends.wait()
        checkpointer.close()
        store.close()

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    store, checkpointer, restored = _again(store_path, config, 2)
    assert (restored, len(rings(tmp_path))) == (1, 2)
    ends.set()
    thread.join()
    checkpointer.close()
    store.close()
    assert rings(tmp_path) == []


@pytest.mark.slow
def test_lock_held_by_a_copy_of_a_dead_process_is_taken_over(
    store_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a lock that a native fork inherited: its process is dead, and only the descriptor lives on."""
    with _trainer(zygote, store_path), _open(store_path) as store:
        monkeypatch.setattr(process_identity, "is_dead", lambda owner: owner.pid != os.getpid())
        # The ring, which the living process holds as well, is not part of this test.
        monkeypatch.setattr(NvmeTier, "is_dead", lambda *_: False)
        with Checkpointer(store, _state(), every=1) as checkpointer:
            assert checkpointer.restore() is not None


@pytest.mark.slow
def test_run_of_a_container_with_another_boot_id_is_in_use(
    store_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test containers of systemd and LXC: a lock that is held shows that its training lives."""
    with _trainer(zygote, store_path) as trainer, _open(store_path, 0.1) as store:
        monkeypatch.setattr(process_identity, "_boot_id", lambda: "another")
        with pytest.raises(RunInUseError):
            Checkpointer(store, _state(), every=1).restore()
        assert trainer.step() == "8"


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"[]", b'{"pid": "x"}'])
def test_damaged_lock_file_is_no_obstacle(store_path: Path, zygote: Zygote, content: bytes) -> None:
    """Test that a lock file with any content is free if no process holds it, and held if one does."""
    path = store_path / layout.LOCKS / layout.lock_name("default")
    with _trainer(zygote, store_path) as trainer, _open(store_path, 0.1) as store:
        path.write_bytes(content)
        with pytest.raises(RunInUseError, match="another process"):
            Checkpointer(store, _state(), every=1).restore()
        trainer.process.kill()
        trainer.process.wait()
        with Checkpointer(store, _state(), every=1) as checkpointer:
            assert checkpointer.restore() is not None
            path.unlink()
            checkpointer.step(9)


def test_file_system_that_has_shut_down_ends_no_training(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test XFS after an error of its drive, which refuses to show the lock file: the training has not lost the run."""
    lstat, refused = Path.lstat, list[Path]()

    def refuse(path: Path) -> os.stat_result:
        if path.name == layout.lock_name("default"):
            refused.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return lstat(path)

    with _open(store_path) as store, Checkpointer(store, _state(), every=100) as checkpointer:
        checkpointer.save(1)
        monkeypatch.setattr(Path, "lstat", refuse)
        assert not checkpointer.step(2)
        monkeypatch.undo()
    assert refused


def test_lock_file_that_is_a_link_is_refused(store_path: Path, tmp_path: Path) -> None:
    """Test that the target of a link in the place of a lock file keeps its content."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    with _open(store_path) as store:
        path = store_path / layout.LOCKS / layout.lock_name("default")
        path.parent.mkdir()
        path.symlink_to(victim)
        with pytest.raises(Exception, match="symbolic link"):
            Checkpointer(store, _state(), every=1).restore()
    assert victim.read_bytes() == b"precious"


def test_removed_store_is_a_clear_error(store_path: Path) -> None:
    """Test a store whose directory is removed between its opening and the start of the training."""
    with _open(store_path) as store:
        shutil.rmtree(store_path)
        with pytest.raises(StorageError, match="does not exist any more: was it moved"):
            store.training.run_lock("default").take(1.0, takeover=False)


def test_one_of_two_restarts_takes_the_lock_of_a_dead_training(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a second restart at the moment when the first one replaces the lock file of a killed training."""
    with _open(store_path) as store:
        path = store_path / layout.LOCKS / layout.lock_name("default")
        path.parent.mkdir()
        dead = dataclasses.replace(process_identity.this_process(), start_ticks=1)
        path.write_bytes(dataclasses.replace(run_lock.Trainer.this(), owner=dead).encode())
        create = run_lock.create_locked

        def create_later(files: Files, target: Path) -> int:
            monkeypatch.undo()
            with pytest.raises(RunInUseError):
                store.training.run_lock("default").take(0.0, takeover=False)
            return create(files, target)

        monkeypatch.setattr(run_lock, "create_locked", create_later)
        lock = store.training.run_lock("default")
        lock.take(0.0, takeover=False)
        lock.check()


def test_trainer_survives_its_encoding() -> None:
    """Test that a lock file names the process that wrote it."""
    trainer = run_lock.Trainer.this()
    assert run_lock.Trainer.decode(trainer.encode()) == trainer


def test_takeover_is_a_flag(store_path: Path) -> None:
    """Test that another value is refused."""
    with _open(store_path) as store, pytest.raises(InvalidInputError):
        Checkpointer(store, _state(), takeover="yes")  # type: ignore[arg-type]  # the mistake of the test
