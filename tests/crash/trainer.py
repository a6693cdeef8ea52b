"""Training with background saves, run in a child that will be killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from asymcheck import Checkpointer, Push, Store, events
from asymcheck.capture.engine import CaptureEngine
from asymcheck.capture.ring_flush import RingFlusher
from asymcheck.config import CaptureConfig
from asymcheck.events import Event
from asymcheck.fsck.verify import Severity
from asymcheck.replication.checkpoint_cache import CheckpointCache
from asymcheck.tracing import Trace
from asymcheck.types import Checkpoint
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import Loop, copy_late, copy_of, folder_for_rings, linear_loop
from tests.crash import faults
from tests.crash.states import Journal, fingerprint
from tests.zygote import PATIENCE_S

FOR_EVER = 1 << 30


def config_for(folder: Path) -> CaptureConfig:
    """Return the capture settings of a folder: rings in this folder, with space for many states."""
    return CaptureConfig(2 << 20, str(folder_for_rings(folder)), "full")


def _note_complete(journal: Journal, event: Event, run: str) -> None:
    if event.name == "capture.complete":
        journal.note("complete", run=run, step=int(event.detail.split()[1]))


def train(
    path: str, *, steps: int = FOR_EVER, durable: int = 0, delay_s: float = 0.0, kill: str = "", number: int = 0
) -> None:
    """Resume, and save every step; note the state of each step, and when it is complete in memory.

    Args:
        path: folder with the store, the journal and the rings.
        steps: step at which to stop and wait for the kill.
        durable: number of steps that reach the disk; later writes to packs wait. 0 for all.
        delay_s: duration of each write.
        kill: event at which to be killed.
        number: occurrence of the event.
    """
    folder = Path(path)
    journal, disk, seen = Journal(folder / "journal"), Disk(), [0]
    disk.delay_s = delay_s

    def observer(event: Event) -> None:
        _note_complete(journal, event, "default")
        if event.name == kill:
            seen[0] += 1
            if seen[0] == number:
                faults.kill_this_process()

    with events.observe(observer), open_on(disk, folder / "store") as store:
        _, _, loop = linear_loop()
        checkpointer = Checkpointer(store, loop.state, capture=config_for(folder), every=1, keep=None)
        restored = checkpointer.restore()
        first = _note_restored(journal, loop, restored)
        for step in range(first, first + steps):
            loop.iterate(step)
            # Note the step before it begins, because it may be complete before the next line runs.
            journal.note("step", run="default", step=step, fingerprint=fingerprint(copy_of(loop.state)))
            checkpointer.step(step)
            if step - first + 1 == durable:
                checkpointer.wait()
                disk.opened.clear()
            if durable:
                checkpointer.wait("memory")
        checkpointer.wait("memory")
        journal.note("ready")
        time.sleep(3600)


def _note_restored(journal: Journal, loop: Loop, restored: Checkpoint | None) -> int:
    if restored is None:
        journal.note("restored", step=-1)
        return 0
    journal.note("restored", step=restored.step, fingerprint=fingerprint(copy_of(loop.state)))
    return restored.step + 1


def train_two_runs(path: str, steps: int) -> None:
    """Save two runs of one store at once, whose writes to packs wait, and wait for the kill."""
    folder = Path(path)
    journal, disk = Journal(folder / "journal"), Disk()
    with open_on(disk, folder / "store") as store:
        disk.opened.clear()
        _, _, loop = linear_loop()
        both = {
            run: Checkpointer(store, loop.state, run=run, capture=config_for(folder), every=1, keep=None)
            for run in ("one", "two")
        }
        for step in range(steps):
            loop.iterate(step)
            for run, checkpointer in both.items():
                journal.note("step", run=run, step=step, fingerprint=fingerprint(copy_of(loop.state)))
                checkpointer.step(step)
                checkpointer.wait("memory")
                journal.note("complete", run=run, step=step)
        journal.note("ready")
        time.sleep(3600)


def train_two_until_terminated(path: str, where: str) -> None:
    """Save two runs on a slow disk, and get SIGTERM ``outside`` a call, or ``inside`` a call of the first or second."""
    folder = Path(path)
    disk = Disk()
    store = open_on(disk, folder / "store")
    _, _, loop = linear_loop()
    both = [
        Checkpointer(store, dict(loop.state), run=run, capture=config_for(folder), every=1, keep=None)
        for run in ("one", "two")
    ]
    for step in range(2):
        loop.iterate(step)
        disk.delay_s = 0.01 * step
        for number, checkpointer in enumerate(both):
            if step and where == f"inside {number}":
                checkpointer._state["terminating"] = _Terminating()
            checkpointer.step(step)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)


def train_until_terminated(path: str, where: str) -> None:
    """Save two steps on a slow disk, and get SIGTERM: ``outside`` a call, ``inside`` one, or while a lock is held.

    Locks are held in a ``fence``, at a ``window``, while ``pushed`` checkpoints are counted, or while a ``trace`` is
    written. ``closing`` waits for the disk.
    """
    folder, armed = Path(path), threading.Event()
    # A process that hangs also ends, but not by SIGTERM.
    signal.alarm(int(PATIENCE_S))
    disk = Disk()
    store = open_on(disk, folder / "store")
    _, _, loop = linear_loop()
    push = Push(f"file://{folder}/remote") if where == "pushed" else None
    checkpointer = Checkpointer(store, loop.state, capture=config_for(folder), push=push, every=1, keep=None)
    if where == "trace":
        Trace(folder / "trace.json")
    if where == "handled":
        signal.signal(signal.SIGTERM, _leave)
    loop.iterate(0)
    checkpointer.step(0)
    disk.delay_s = 0.01
    if where in _TERMINATES_IN:
        checkpointer.wait()
        # Leave copies to the fence, so that some are pending when a window begins.
        copy_late(pytest.MonkeyPatch())
        _terminate_in(where, armed, disk)
    loop.iterate(1)
    if where == "inside":
        loop.state["terminating"] = _Terminating()
    if where in _TERMINATES_IN:
        # Leave a capture to commit.
        disk.opened.clear()
    checkpointer.step(1)
    if where in _TERMINATES_IN:
        armed.set()
        _ = checkpointer.push_statistics()
        # If another thread writes this line, use the next one.
        while where == "trace" and armed.is_set():
            with events.timed("mine"):
                pass
            time.sleep(0.01)
        if where == "closing":
            checkpointer.close()
        loop.iterate(2)
        raise AssertionError(f"nothing came to {where}")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End as at the end of the program, as its own SIGTERM handler may do."""
    raise SystemExit(3)


class _Terminating:
    """A part of a state that sends the signal while it is captured."""

    def state_dict(self) -> dict[str, object]:
        """Return the state after sending the signal."""
        os.kill(os.getpid(), signal.SIGTERM)
        return {"value": 1}

    def load_state_dict(self, _state: dict[str, object]) -> None:
        """Ignore the state."""


_TERMINATES_IN: dict[str, tuple[type, str]] = {
    "fence": (CaptureEngine, "_copy_released"),
    "window": (CaptureEngine, "_release"),
    "pushed": (CheckpointCache, "refresh"),
    "trace": (Trace, "_write"),
    "closing": (RingFlusher, "close"),
}
"""Functions that the training thread calls in the middle of a copy, or with a lock that other threads need.

``closing`` comes before the last checkpoint is durable.
"""


def _terminate_in(where: str, armed: threading.Event, disk: Disk) -> None:
    """Send the signal when the training thread calls the function; only then let the disk write the rest."""
    owner, name = _TERMINATES_IN[where]
    original = vars(owner)[name]

    def called(*arguments: object) -> object:
        if armed.is_set() and threading.current_thread() is threading.main_thread():
            armed.clear()
            disk.opened.set()
            os.kill(os.getpid(), signal.SIGTERM)
        elif armed.is_set() and where == "fence":
            # Otherwise, the thread could make all copies before.
            disk.opened.wait()
        return original(*arguments)

    setattr(owner, name, called)


def assert_restored(folder: Path, at_least: int, at_most: int = FOR_EVER, run: str = "default") -> int:
    """Restore as a new process does; fail unless the step is allowed and has the right bytes.

    Return the step.
    """
    journal = Journal(folder / "journal")
    prints = {(line["run"], line["step"]): line["fingerprint"] for line in journal.lines("step")}
    with Store.open(folder / "store", create=True) as store:
        _, _, loop = linear_loop()
        # An optimizer has no state to fill before its first step.
        loop.iterate(0)
        restored = Checkpointer(store, loop.state, run=run, capture=config_for(folder), every=1, keep=None).restore()
        step = -1 if restored is None else restored.step
        assert at_least <= step <= at_most, f"step {step} was restored, not one of {at_least} to {at_most}"
        if restored is not None:
            assert fingerprint(copy_of(loop.state)) == prints[run, step], f"step {step} was restored with other bytes"
        assert [str(found) for found in store.verify() if found.severity is not Severity.HINT] == []
    return step


def newest_complete(folder: Path, run: str = "default") -> int:
    """Return the newest step that was reported complete in memory; -1 for none."""
    lines = Journal(folder / "journal").lines("complete")
    return max((int(str(line["step"])) for line in lines if line["run"] == run), default=-1)
