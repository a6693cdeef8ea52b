"""Trainings that are told to end, run in processes of their own: ``python -m tests.crash.preempted WAY FOLDER …``."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from asymcheck import Checkpointer, Grace, Push, Store
from asymcheck.errors import Preempted
from asymcheck.state.rng import RngState
from tests.checkpointer.disks import Disk, open_on
from tests.checkpointer.loops import copy_of, linear_loop
from tests.crash.states import Journal, fingerprint
from tests.crash.trainer import config_for

STEPS = 1 << 30


def train(path: str, *, seed: int = 0, every: int = 1000, delay_s: float = 0.0, push: int | None = None) -> None:
    """Note each step before ``step()``, in iterations of random length, until the process is told to end."""
    folder, rng, disk = Path(path), random.Random(seed), Disk()
    journal = Journal(folder / "journal")
    disk.delay_s = delay_s
    _, _, loop = linear_loop()
    state = {**loop.state, "rng": RngState()}
    pushes = None if push is None else Push(f"file://{folder}/remote", every=push)
    with (
        open_on(disk, folder / "store") as store,
        Checkpointer(
            store, state, capture=config_for(folder), every=every, push=pushes, save_on_signal=Grace(10.0)
        ) as checkpointer,
    ):
        restored = checkpointer.restore()
        if restored is not None:
            journal.note("restored", step=restored.step, fingerprint=fingerprint(copy_of(state)))
        for step in range(restored.step + 1 if restored else 0, STEPS):
            loop.iterate(step)
            torch.rand(3)
            time.sleep(rng.uniform(0.0, 0.02))
            journal.note("step", step=step, fingerprint=fingerprint(copy_of(state)))
            checkpointer.step(step)


def train_large(path: str, *, seed: int, size: int) -> None:
    """Train a state of ``size`` bytes, whose exact values follow from its step; note steps as :func:`train` does."""
    folder, rng = Path(path), random.Random(seed)
    journal = Journal(folder / "journal")
    # All values are small multiples of 1/8192, so float32 has no rounding errors.
    tile = torch.randint(1 << 13, (1 << 20,), generator=torch.Generator().manual_seed(0)).float().div_(1 << 13)
    first = torch.arange(size // (4 << 20)).float()[:, None].add(tile).reshape(-1)
    weight = torch.nn.Parameter(first.clone())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with (
        Store.open(folder / "store", create=True) as store,
        Checkpointer(
            store, {"weight": weight, "optimizer": optimizer}, every=8, save_on_signal=Grace(10.0)
        ) as checkpointer,
    ):
        restored = checkpointer.restore()
        last = restored.step if restored else 0
        journal.note("restored", step=last, exact=torch.equal(weight + last, first))
        del first
        for step in range(last + 1, 1000):
            weight.grad = torch.ones(1).expand_as(weight)
            optimizer.step()
            time.sleep(rng.uniform(0.0, 0.5))
            journal.note("step", step=step)
            checkpointer.step(step)


def _loop(checkpointer: Checkpointer, loop: Callable[[int], object], folder: Path) -> None:
    journal = Journal(folder / "journal")
    for step in range(STEPS):
        loop(step)
        journal.note("step", step=step)
        checkpointer.step(step)
        time.sleep(0.002)


def alone(folder: Path, way: str) -> None:
    """Train in one process: with a handler of the program, with workers, in a thread, or with another notice."""
    _, _, loop = linear_loop()
    iterate, journal = loop.iterate, Journal(folder / "journal")
    grace: bool | Grace = True
    announced = threading.Event()
    if way == "handled":
        signal.signal(signal.SIGTERM, lambda *_: journal.note("handled"))
    elif way == "raising":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    elif way == "interrupt":
        grace = Grace(signals=(signal.SIGINT,))
    elif way == "polled":
        grace = Grace(notice=lambda: 5.0 if (folder / "notice").exists() else None, poll_s=0.02)
    elif way == "called":
        grace = Grace(signals=())
    elif way == "workers":
        batches: list[Iterator[object]] = []

        def iterate(step: int) -> None:
            # Workers inherit the handlers that the Checkpointer has set.
            loader = DataLoader(range(1 << 20), num_workers=2, worker_init_fn=_stay)  # type: ignore[arg-type]  # sized
            if not batches:
                batches.append(iter(loader))
            next(batches[0])
            loop.iterate(step)

    elif way == "replaced":

        def iterate(step: int) -> None:
            # A trainer may set its handler later, and another library may reset the signal.
            if step == 1:
                signal.signal(signal.SIGTERM, lambda *_: journal.note("handled"))
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            loop.iterate(step)

    elif way == "stuck":

        def iterate(step: int) -> None:
            while step == 3:
                if not announced.is_set():
                    announced.set()
                    journal.note("stuck")
                time.sleep(0.01)
            loop.iterate(step)

    with (
        Store.open(folder / "store", create=True) as store,
        Checkpointer(store, loop.state, capture=config_for(folder), every=1000, save_on_signal=grace) as checkpointer,
    ):
        if way == "called":
            signal.signal(signal.SIGUSR2, lambda *_: checkpointer.preempt(5.0))
        if way == "thread":
            ended: list[Preempted] = []
            thread = threading.Thread(target=_caught, args=(ended, lambda: _loop(checkpointer, iterate, folder)))
            thread.start()
            thread.join()
            raise ended[0]
        _loop(checkpointer, iterate, folder)


def _caught(ended: list[Preempted], train_all: Callable[[], None]) -> None:
    try:
        train_all()
    except Preempted as end:
        ended.append(end)


def _stay(_worker: int) -> None:
    """Ignore SIGTERM in a worker, as docs/preemption.md advises."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def ranks(folder: Path, _way: str) -> None:
    """Train with DistributedDataParallel under torchrun."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = torch.nn.Linear(16, 16)
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": network, "optimizer": optimizer}
    journal = Journal(folder / f"journal-{dist.get_rank()}")
    journal.note("pid", pid=os.getpid())
    with (
        Store.open(folder / "store", create=True) as store,
        Checkpointer(store, state, capture=config_for(folder), every=1000, save_on_signal=True) as checkpointer,
    ):
        for step in range(STEPS):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            journal.note("step", step=step)
            checkpointer.step(step)
            time.sleep(0.002 * dist.get_rank())


def main(way: str, folder: str, options: str = "{}") -> None:
    """Train one way, and end a forked process like a separate one."""
    try:
        if way in ("train", "train_large"):
            (train if way == "train" else train_large)(folder, **json.loads(options))
        (ranks if way == "ranks" else alone)(Path(folder), way)
    except SystemExit as ended:
        sys.stderr.flush()
        os._exit(int(str(ended.code)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
