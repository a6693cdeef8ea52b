"""Ctrl-C anywhere in what a training thread does for a capture: the training can go on, and loses no memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck.pipeline.interrupts import INTERRUPTS
from tests.checkpointer.loops import folder_for_rings
from tests.zygote import REPOSITORY

POINTS = 150

TRAINER = """
import itertools, json, signal, sys, warnings
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
seen, at = 0, None


def trace(frame, event, _):
    global seen, at
    if "asymcheck/pipeline/" not in frame.f_code.co_filename and "dram_ring/" not in frame.f_code.co_filename:
        return None
    seen += 1
    if seen == at:
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
with Store.open(sys.argv[1], config=StoreConfig(partition_bytes=8192, bundle_below_bytes=4096)) as store:
    config = CaptureConfig(ring_folder=sys.argv[2], ring_bytes=1 << 20)
    checkpointer = Checkpointer(store, state, on_error="warn", keep=Retention(keep_last=2), capture=config)
    for _ in range(4):
        iterate(checkpointer)
    sys.settrace(trace)
    iterate(checkpointer)
    total = seen
    for point in range(int(sys.argv[3])):
        seen, at = 0, 1 + point * total // int(sys.argv[3])
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
    kept = [moving.capture.slots + [moving.manifest_slot] for moving in background._flusher._kept]
    held = {id(slot) for slots in kept for slot in slots}
    nobodys = sum(slot.frame_bytes for slot in background._ring._taken if id(slot) not in held)
    checkpointer.close()
    loaded = store.restore()
    is_same = torch.equal(loaded.state["buffer"], buffer) and torch.equal(
        loaded.state["model"]["5.weight"], model[5].weight
    )
is_last, lost = loaded.checkpoint.step == last, checkpointer.statistics().lost
print(json.dumps([interrupts, nobodys, is_last, is_same, lost]))
"""


def test_wherever_it_comes_the_training_goes_on(store_path: Path, tmp_path: Path) -> None:
    """No fence waits for what nobody will do, no room of the ring is lost, and later checkpoints are whole."""
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
    interrupts, nobodys, is_last, is_same, lost = json.loads(done.stdout)
    assert interrupts > POINTS // 2
    assert (nobodys, is_last, is_same) == (0, True, True)
    assert lost <= interrupts


@pytest.fixture
def called() -> Iterator[list[int]]:
    """What a handler of a training was called with."""
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


def test_handlers_wait_until_the_outermost_block_ends(called: list[int]) -> None:
    """All of them are called, in order, also when one raises; and then they are as they were."""
    handler = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        with INTERRUPTS:
            with INTERRUPTS:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGUSR1)
            assert called == []

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert called == [signal.SIGINT, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_they_come_where_they_are_let(called: list[int]) -> None:
    """Once; what has no handler of Python is left alone."""
    with INTERRUPTS:
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        INTERRUPTS.come()
        signal.raise_signal(signal.SIGUSR1)
        INTERRUPTS.come()
        INTERRUPTS.come()
        assert called == [signal.SIGUSR1]
    assert called == [signal.SIGUSR1]
