"""Test Ctrl-C anywhere in a capture: training can continue, without a loss of memory."""

from __future__ import annotations

import collections
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asymcheck import Checkpointer, Store
from asymcheck.capture.signals import INTERRUPTS
from asymcheck.config import CaptureConfig
from asymcheck.errors import Preempted
from asymcheck.storage.nvme import ManifestFiles
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import assert_stored, copy_late, copy_of, folder_for_rings, linear_loop, sized
from tests.zygote import REPOSITORY

Interrupts = type(INTERRUPTS)
POINTS = 20
"""Interrupts in each package."""

TRAINER = """
import collections, itertools, json, signal, sys, warnings
import torch
from asymcheck import CaptureConfig, Checkpointer, Retention, Store, StoreConfig

warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
buffer = torch.zeros(10_000)
state = {"model": model, "optimizer": optimizer, "buffer": buffer}
steps = itertools.count()
seen, at = collections.Counter(), None


def trace(frame, event, _):
    global at
    package = frame.f_code.co_filename.rpartition("/asymcheck/")[2].rpartition("/")[0]
    if package not in ("capture", "commit", "storage/shm"):
        return None
    seen[package] += 1
    if (package, seen[package]) == at:
        at = None
        signal.raise_signal(signal.SIGINT)
    return trace


def iterate(checkpointer):
    step = next(steps)
    model(torch.randn(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    buffer.add_(1)
    checkpointer.step(step)
    return step


interrupts = 0
with Store.open(sys.argv[1], config=StoreConfig(partition_bytes=8192, bundle_below_bytes=4096), create=True) as store:
    config = CaptureConfig(ring_folder=sys.argv[2], ring_bytes=1 << 20)
    checkpointer = Checkpointer(store, state, on_error="warn", keep=Retention(keep_last=2), capture=config, every=1)
    for _ in range(4):
        iterate(checkpointer)
    sys.settrace(trace)
    iterate(checkpointer)
    totals = dict(seen)
    for package, point in itertools.product(totals, range(int(sys.argv[3]))):
        seen.clear()
        at = package, 1 + point * totals[package] // int(sys.argv[3])
        sys.settrace(trace)  # whose error ends it
        try:
            iterate(checkpointer)
        except KeyboardInterrupt:
            interrupts += 1
        at = None
        iterate(checkpointer)
    sys.settrace(None)
    checkpointer.wait()
    last = iterate(checkpointer)
    checkpointer.wait()
    background = checkpointer._background
    kept = [moving.slots + [moving.manifest_slot] for moving in background._engine.flusher._kept]
    held = {id(slot) for slots in kept for slot in slots}
    nobodys = sum(slot.frame_bytes for slot in background._engine.ring._taken if id(slot) not in held)
    checkpointer.close()
    loaded = store.restore()
    is_same = torch.equal(loaded.state["buffer"], buffer) and torch.equal(
        loaded.state["model"]["5.weight"], model[5].weight
    )
is_last, lost = loaded.checkpoint.step == last, checkpointer.statistics().lost
print(json.dumps([interrupts, sorted(totals), nobodys, is_last, is_same, lost]))
"""


@pytest.mark.slow
def test_training_continues_after_an_interrupt_anywhere(store_path: Path, tmp_path: Path) -> None:
    """Test that no fence waits forever, no ring space is lost, and later checkpoints are intact."""
    words = [str(store_path), str(folder_for_rings(tmp_path)), str(POINTS)]
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    interrupts, packages, nobodys, is_last, is_same, lost = json.loads(done.stdout)
    assert interrupts > 3 * POINTS // 2
    assert packages == ["capture", "commit", "storage/shm"]
    assert (nobodys, is_last, is_same) == (0, True, True)
    assert lost <= interrupts


@pytest.fixture
def called() -> Iterator[list[int]]:
    """Arguments of the calls of a training's handler."""
    found: list[int] = []

    def note(number: int, _frame: object) -> None:
        found.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGUSR1)
    before = [signal.signal(number, note) for number in numbers]
    yield found
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_an_interrupt_of_close_costs_no_checkpoint(
    called: list[int], store_path: Path, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the last close waits for the checkpoint whose commit was in flight at the interrupts."""
    may_publish, publish = threading.Event(), ManifestFiles.publish

    def publish_late(*arguments: Any) -> object:  # noqa: ANN401 - of any manifest
        may_publish.wait(60)
        return publish(*arguments)

    def interrupted(close: Callable[[], object]) -> None:
        threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        close()

    monkeypatch.setattr(ManifestFiles, "publish", publish_late)
    _, _, loop = linear_loop()
    with Store.open(store_path, create=True) as store:
        checkpointer = Checkpointer(store, loop.state, capture=config, every=1)
        loop.iterate(0)
        checkpointer.step(0)
        for close in (checkpointer.close, store.close):
            with pytest.raises(KeyboardInterrupt):
                interrupted(close)
        threading.Timer(0.2, may_publish.set).start()
    assert may_publish.is_set()
    with Store.open(store_path) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]


def test_an_interrupt_of_a_fence_that_waits_for_room_costs_no_checkpoint(
    called: list[int], store: Store, disk: Disk, config: CaptureConfig
) -> None:
    """Test that the capture thread copies the rest of a state for which the ring of a slow disk had no room."""
    _, _, loop = linear_loop()
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=sized(config, 96 << 10), every=1, keep=None) as checkpointer:
        for step in range(2):
            loop.iterate(step)
            # The ring has space for one state and a half.
            disk.opened.clear()
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
        threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.iterate(2)
        disk.opened.set()
    assert called == [signal.SIGINT]
    assert_stored(store, expected)


def test_an_interrupt_while_close_releases_partitions_loses_none(
    called: list[int], store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a signal between two queues, neither of which has the partition at that time."""

    class Interrupted(collections.deque[Any]):
        def popleft(self) -> object:
            released = super().popleft()
            if not self:
                signal.raise_signal(signal.SIGINT)
            return released

    copy_late(monkeypatch)
    _, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config, every=1)
    loop.iterate(0)
    checkpointer.step(0)
    engine = checkpointer._background._engine  # type: ignore[union-attr]  # it has begun
    engine._unreleased = Interrupted(engine._unreleased)  # type: ignore[union-attr]  # as above
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    checkpointer.close()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]


def test_handlers_wait_until_the_outermost_block_ends(called: list[int]) -> None:
    """Test that all deferred handlers run in order, even if one raises, and that the handlers are then restored."""
    interrupts = Interrupts()
    handler = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        with interrupts:
            with interrupts:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGUSR1)
            assert called == []

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert called == [signal.SIGINT, signal.SIGUSR1]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.release(Holder())
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_the_program_sets_later_counts(called: list[int]) -> None:
    """Test that the next block defers the new handler, and that releasing restores the new handler."""
    later: list[int] = []

    def note(number: int, _frame: object) -> None:
        later.append(number)

    interrupts = Interrupts()
    with interrupts:
        pass
    signal.signal(signal.SIGUSR1, note)
    with interrupts:
        signal.raise_signal(signal.SIGUSR1)
        assert later == []
    assert (later, called) == ([signal.SIGUSR1], [])
    interrupts.release(Holder())
    assert signal.getsignal(signal.SIGUSR1) is note


def test_handlers_stay_replaced_while_a_checkpointer_is_open(called: list[int]) -> None:
    """Test that only the first block replaces the seven handlers."""
    interrupts, holder = Interrupts(), Holder()
    interrupts.hold(holder)
    handler = signal.getsignal(signal.SIGUSR1)
    with interrupts:
        replaced = signal.getsignal(signal.SIGUSR1)
    interrupts.release(Holder())
    assert replaced == signal.getsignal(signal.SIGUSR1) != handler
    interrupts.release(holder)
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_library_that_puts_the_deferring_handler_back_loses_no_signal(called: list[int]) -> None:
    """Test trainers that save handlers at their start and restore the deferring handler at their end."""
    interrupts = Interrupts()
    with interrupts:
        saved = signal.getsignal(signal.SIGUSR1)
    interrupts.release(Holder())
    assert signal.getsignal(signal.SIGUSR1) != saved
    signal.signal(signal.SIGUSR1, saved)
    signal.raise_signal(signal.SIGUSR1)
    assert called == [signal.SIGUSR1]


def test_a_library_that_removes_its_handler_leaves_that_of_the_program(called: list[int]) -> None:
    """Test a trainer that saves the deferring handler, sets its own, and restores the saved one at its end."""
    interrupts, holder, of_library = Interrupts(), Holder(), list[int]()
    interrupts.hold(holder)
    with interrupts:
        saved = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda number, _frame: of_library.append(number))
    with interrupts:
        signal.raise_signal(signal.SIGUSR1)
    interrupts.release(holder)
    signal.signal(signal.SIGUSR1, saved)
    signal.raise_signal(signal.SIGUSR1)
    assert (of_library, called) == ([signal.SIGUSR1], [signal.SIGUSR1])


def test_interrupted_system_calls_are_restarted_as_the_program_says(called: list[int]) -> None:
    """Test that ``signal.siginterrupt(number, False)`` survives both replacements of the handler."""
    interrupts = Interrupts()
    signal.siginterrupt(signal.SIGUSR1, False)
    with interrupts:
        assert restarts(signal.SIGUSR1)
    interrupts.release(Holder())
    assert restarts(signal.SIGUSR1)
    assert not restarts(signal.SIGINT)


def test_another_checkpointer_that_is_closed_leaves_the_signals_of_this_one(
    store: Store, config: CaptureConfig
) -> None:
    """Test SIGTERM before the first step, which must be saved before the process ends."""
    _, _, loop = linear_loop()
    another = Checkpointer(store, loop.state, run="another", capture=config, every=1)
    another.step(0)
    checkpointer = Checkpointer(store, loop.state, capture=config, every=2, save_on_signal=True)
    another.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Preempted):
        checkpointer.step(1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [checkpoint.step for checkpoint in store.checkpoints("default")] == [1]


class Holder:
    """An object that supports weak references."""


def restarts(number: int) -> bool:
    """Return whether the kernel restarts the system calls that a signal interrupts."""
    before, after = os.pipe()

    def write_later() -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        time.sleep(0.1)
        os.write(after, b"x")

    thread = threading.Thread(target=write_later)
    libc = ctypes.CDLL(None, use_errno=True)
    thread.start()
    try:
        # Do not use os.read(), which repeats the call itself.
        return bool(libc.read(before, ctypes.create_string_buffer(1), 1) == 1)
    except KeyboardInterrupt:
        return False
    finally:
        thread.join()
        os.close(before)
        os.close(after)


def test_interrupts_arrive_where_permitted(called: list[int]) -> None:
    """Test that an interrupt arrives once, and that signals without a Python handler are not touched."""
    interrupts = Interrupts()
    with interrupts:
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        interrupts.deliver()
        signal.raise_signal(signal.SIGUSR1)
        interrupts.deliver()
        interrupts.deliver()
        assert called == [signal.SIGUSR1]
    assert called == [signal.SIGUSR1]
