"""Test rings that another training recovers at the same time: own rings are awaited, others ignored."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asymcheck import Store
from asymcheck.commit import orphan_recovery
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import CaptureWarning, LockTimeoutError, OutOfSpaceError, SkippedCheckpointWarning, warn_user
from asymcheck.format import registry
from asymcheck.format.manifest import Manifest
from asymcheck.storage.process_identity import this_process
from asymcheck.storage.shm import orphaned_rings, ring_reader
from asymcheck.storage.shm.orphaned_rings import list_rings, open_orphaned_ring
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import CheckpointRef
from tests.checkpointer.loops import folder_for_rings, rings
from tests.crash.dead_rings import CAPTURED, DURABLE, kill_when_ready, set_owner
from tests.crash.trainer import assert_restored, train_two_runs
from tests.zygote import Zygote, wait_until


def _hold_lock(ring: Path) -> RingReader:
    """Hold the lock of a ring, like a process that recovers it."""
    holder = open_orphaned_ring(ring)
    assert holder is not None
    return holder


def _adopt(folder: Path) -> None:
    with Store.open(folder / "store", create=True) as store, store.training.adopting(folder_for_rings(folder)):
        pass


def _later(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Timer(2.0, action)
    thread.start()
    return thread


@pytest.fixture
def two(zygote: Zygote, tmp_path: Path) -> dict[str, Path]:
    """Return the rings of two runs of one store, by name; each has all captures of its run."""
    kill_when_ready(zygote.start(train_two_runs, path=str(tmp_path), steps=3), tmp_path)
    found = {}
    for ring in rings(tmp_path):
        with RingReader(ring) as reader:
            found[reader.header.run] = ring
    return found


@pytest.mark.slow(quick=["given up"])
@pytest.mark.parametrize("how", ["given up", "taken up"])
def test_own_ring_is_awaited(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Test that the restore waits for the ring, because it would otherwise restore an older step."""
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_PATIENCE_S", 0.1)
    (ring,) = rings(folder)
    holder = _hold_lock(ring)

    def go_on() -> None:
        holder.close()
        if how == "taken up":
            _adopt(folder)

    thread = threading.Thread(target=go_on)

    def warn_and_go_on(message: str, category: type[Warning]) -> None:
        # Wait for the event instead of a fixed time, because a busy machine may be slow.
        warn_user(message, category)
        thread.start()

    monkeypatch.setattr(orphaned_rings, "warn_user", warn_and_go_on)
    with pytest.warns(CaptureWarning, match=rf"{ring}.* locked by process {os.getpid()} .* waiting"):
        assert_restored(folder, CAPTURED - 1)
    thread.join()
    assert rings(folder) == []


def test_frames_are_found_in_all_parts_of_a_ring(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a scan in parts of one block, on several threads: the frames are those of a scan in one part."""
    (ring,) = rings(folder)
    with RingReader(ring, hold=False) as reader:
        whole = reader.entries
    monkeypatch.setattr(ring_reader, "_PART_BYTES", registry.BLOCK_BYTES)
    with RingReader(ring, hold=False) as reader:
        assert len(whole) > 2
        np.testing.assert_array_equal(reader.entries, whole)


@pytest.mark.parametrize("is_alive", [False, True], ids=["dead", "alive"])
def test_own_ring_of_another_container_is_awaited(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_alive: bool
) -> None:
    """Test a restart in another PID namespace: the mark in the catalog tells whether the old process lives."""
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_PATIENCE_S", 0.1)
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_S", 0.1)
    (ring,) = rings(folder)
    with RingReader(ring, hold=False) as reader:
        owner = dataclasses.replace(reader.header.owner, pid_namespace="pid:[1]")
    set_owner(ring, owner)
    mark = folder / "store" / "catalog" / "open" / f"{owner.pid}-{owner.start_ticks}-{owner.boot_id}-pid:[1]"
    with _hold_lock(ring), mark.open("xb") as file:
        if is_alive:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert_restored(folder, DURABLE - 1, DURABLE - 1)
        else:
            with pytest.warns(CaptureWarning, match="waiting"), pytest.raises(LockTimeoutError, match=str(ring)):
                assert_restored(folder, 0)
    assert rings(folder) == [ring]


_HOLDER = """
import fcntl, mmap, sys
memory = mmap.mmap(-1, 1 << 30)
for start in range(0, len(memory), 4096):
    memory[start] = 1
held = [open(path.strip(), "ab") for path in (sys.stdin.readline(), sys.stdin.readline())]
for file in held:
    fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ring_of_a_process_that_is_still_exiting_is_awaited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a start right after SIGKILL: the system keeps the locks of a process until it has freed its memory."""
    (ring,) = rings(folder)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stat = Path(f"/proc/{process.pid}/stat")
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        owner = dataclasses.replace(this_process(), pid=process.pid, start_ticks=ticks)
        set_owner(ring, owner)
        mark = folder / f"store/catalog/open/{owner.pid}-{ticks}-{owner.boot_id}-{owner.pid_namespace}"
        process.stdin.write(f"{ring}\n{mark}\n")
        process.stdin.flush()
        process.stdout.readline()

        def kill_and_list(*arguments: Any) -> list[Path]:  # noqa: ANN401 - passed on
            process.kill()
            # PF_EXITING
            wait_until(lambda: bool(int(stat.read_text().rpartition(")")[2].split()[6]) & 4), "the exit to begin")
            return list_rings(*arguments)

        # The memory of a large training takes seconds to free.
        monkeypatch.setattr(orphaned_rings, "_INSPECTION_S", 0.0)
        monkeypatch.setattr(orphan_recovery, "list_rings", kill_and_list)
        assert_restored(folder, CAPTURED - 1)


@pytest.mark.slow
def test_a_ring_that_is_gone_at_last_is_waited_for_no_longer(folder: Path) -> None:
    """Test that the wait ends when the other process deletes the ring."""
    (ring,) = rings(folder)
    holder = _hold_lock(ring)
    thread = _later(lambda: (holder.unlink(), holder.close()))
    assert_restored(folder, DURABLE - 1, DURABLE - 1)
    thread.join()


def test_blocking_process_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that nothing is restored, and that all captures are restored after the end of the process."""
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_PATIENCE_S", 0.1)
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_S", 0.1)
    (ring,) = rings(folder)
    with (
        _hold_lock(ring),
        pytest.warns(CaptureWarning, match="at most 0.1 seconds"),
        pytest.raises(LockTimeoutError, match=rf"{ring}.* by process {os.getpid()} .*Stop that process"),
    ):
        assert_restored(folder, 0)
    assert_restored(folder, CAPTURED - 1)


@pytest.mark.slow
def test_invisible_process_has_no_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a process that is not visible, for instance in another container."""
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_PATIENCE_S", 0.1)
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_S", 0.1)
    monkeypatch.setattr(orphaned_rings, "_LOCKS", folder / "locks")
    (ring,) = rings(folder)
    for text in (None, "1: FLOCK\n", f"1: FLOCK  ADVISORY  WRITE -1 00:00:{ring.stat().st_ino} 0 EOF\n"):
        if text is not None:
            (folder / "locks").write_text(text)
        with (
            _hold_lock(ring),
            pytest.warns(CaptureWarning, match="locked by a process that is not visible to this process"),
            pytest.raises(LockTimeoutError, match="by a process that is not visible to this process"),
        ):
            assert_restored(folder, 0)


@pytest.mark.slow
def test_the_ring_of_another_run_is_not_waited_for(
    tmp_path: Path, two: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that only a training of that run waits for its ring."""
    monkeypatch.setattr(orphaned_rings, "_ADOPTION_PATIENCE_S", 200.0)
    began = time.monotonic()
    with _hold_lock(two["two"]):
        assert_restored(tmp_path, 2, run="one")
    assert time.monotonic() - began < orphaned_rings._ADOPTION_PATIENCE_S
    assert rings(tmp_path) == [two["two"]]
    assert_restored(tmp_path, 2, run="two")


@pytest.mark.slow
def test_a_capture_of_another_run_that_does_not_fit_is_kept(
    tmp_path: Path, two: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that only the training of that run needs the space for its capture."""

    class Full(RingTransaction):
        def commit_capture(self, captured: Manifest, *args: Any, **more: Any) -> CheckpointRef:  # noqa: ANN401 - passed on
            if captured.header.run == "two":
                raise OutOfSpaceError("the drive is full")
            return super().commit_capture(captured, *args, **more)

    with monkeypatch.context() as full:
        full.setattr(orphan_recovery, "RingTransaction", Full)
        with pytest.warns(SkippedCheckpointWarning, match="step . of run 'two' in memory: .*full; the ring is kept"):
            assert_restored(tmp_path, 2, run="one")
        assert rings(tmp_path) == [two["two"]]
        with pytest.raises(OutOfSpaceError, match="step 0 of run 'two'"):
            assert_restored(tmp_path, 2, run="two")
    assert_restored(tmp_path, 2, run="two")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["one", "two"])
def test_own_ring_is_recovered_first(tmp_path: Path, two: dict[str, Path], run: str) -> None:
    """Test that the own ring comes first, so that waiting processes continue soon, and that all rings are recovered."""
    assert sorted(two) == ["one", "two"]
    with (
        Store.open(tmp_path / "store", create=True) as store,
        store.training.adopting(folder_for_rings(tmp_path), run=run) as adopted,
    ):
        taken = [(one.run, one.step) for one in adopted if one.ref is not None]
    (other,) = two.keys() - {run}
    assert taken == [(run, 0), (run, 1), (run, 2), (other, 0), (other, 1), (other, 2)]
    assert rings(tmp_path) == []
