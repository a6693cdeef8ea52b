"""Scenarios with failing, differing or missing ranks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast
from unittest import mock

import torch

from asymcheck.capture.inflight import CheckpointReport
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import AsymcheckError, InvalidInputError, OutOfSpaceError
from asymcheck.storage.nvme.run_lock import RunLock
from tests.distributed.launched import RANK, checkpointer, noted, opened, ranks_of
from tests.distributed.training import Training


def failures(folder: Path) -> dict[str, object]:
    """Run ranks that fail, differ, or are missing: the others report it, and continue with the next checkpoint."""
    found: dict[str, object] = {}
    with opened(folder) as store:
        training = Training()
        state = training.state()
        with checkpointer(folder, store, state, ranks=ranks_of(folder, 60), on_error="warn") as ckpt, noted() as texts:
            training.train(0, 0)
            ckpt.save(0)
            training.train(1, 0)
            with full_disk() if RANK == 1 else contextlib.nullcontext():
                found["refused save"] = raised(lambda: ckpt.save(1))
            # Save the same step again with other bytes, as a second attempt.
            training.train(2, 0)
            second = ckpt.save(1)
            found["attempts"] = [second.save_id, training.digest()]
            training.train(3, 0)
            with unstorable(state) if RANK == 1 else contextlib.nullcontext():
                found["unstorable"] = raised(lambda: ckpt.save(3))
            # A rank that cannot load the state fails the restore of all ranks.
            with unfitting(state) if RANK == 1 else contextlib.nullcontext():
                found["unfitting"] = raised(ckpt.restore)
            found["restored"] = raised(lambda: getattr(ckpt.restore(), "save_id", None))
            found["restored bytes"] = training.digest()
            training.train(4, 0)
            found["other steps"] = raised(lambda: ckpt.save(4 + RANK))
            found["reports"] = list(texts)
        late = ranks_of(folder, 60)
        with checkpointer(folder, store, state, ranks=late, run="late", on_error="warn") as ckpt:
            ckpt.save(0)
            late.timeout_s = 1.5
            with noted() as texts:
                if RANK == 0:
                    began = time.monotonic()
                    ckpt.step(1)
                    ckpt.wait()
                    found["waited"] = time.monotonic() - began
                    found["missing in the commit"] = texts
                time.sleep(0 if RANK == 0 else 2.5)
                with noted() as more:
                    found["missing in step"] = [raised(lambda: ckpt.step(2)), more] if RANK == 1 else None
        if RANK == 0:
            alone = checkpointer(folder, store, state, ranks=ranks_of(folder, 0.5), run="alone")
            found["missing at the start"] = raised(alone.restore)
    return found


def caught(folder: Path) -> dict[str, object]:
    """Run a rank whose caller catches its errors: the ranks stay in step, and lose nothing else."""
    training = Training()
    state = training.state()
    refused: set[int] = set()

    def refuse(report: CheckpointReport) -> None:
        if report.step in refused:
            message = f"step {report.step} is not liked"
            raise InvalidInputError(message)

    with opened(folder) as store:
        found: dict[str, object] = {}
        with checkpointer(folder, store, state, ranks=ranks_of(folder, 60), on_checkpoint=refuse) as ckpt:
            refused |= {1} if RANK == 1 else {2}
            steps = []
            for step in range(7):
                training.train(step, 0)
                metrics = {"loss": cast(float, "unknown") if step == 4 and RANK == 1 else 0.5}
                steps.append(raised(partial(ckpt.step, step, metrics)))
                # The outcome is known at this point, and not yet reported.
                store.training.settle()
            found["steps"] = steps
            refused |= {6} if RANK == 1 else set()
            found["restored"] = [raised(ckpt.restore), raised(lambda: getattr(ckpt.restore(), "step", None))]
            training.train(7, 0)
            ckpt.step(7)
            refused |= {7} if RANK == 0 else set()
            found["rolled back"] = [raised(ckpt.rollback), raised(lambda: ckpt.rollback().step)]
            refused |= {8} if RANK == 1 else set()
            found["saved"] = [raised(lambda: ckpt.save(8)), raised(lambda: ckpt.save(9).step)]
        with checkpointer(folder, store, state, ranks=ranks_of(folder, 60)) as ckpt:
            found["other steps"] = [raised(lambda: ckpt.restore(3 if RANK else None)), raised(lambda: ckpt.restore(3))]
            with noted() as texts:
                ckpt.save(2)
            found["earlier step"] = list(texts)
        assert ckpt._coordinator is not None
        found["left"] = ckpt._coordinator._session is None
        found["stored"] = [one.step for one in store.checkpoints() if one.complete]
    return found


def run_in_use(folder: Path) -> dict[str, object]:
    """Restore a run that another process trains, and lose a run to another process."""
    found: dict[str, object] = {}
    # Only the lock of the run is waited for briefly, because the ranks take turns with the lock of the catalog.
    take = RunLock.take

    def take_soon(lock: RunLock, _timeout_s: float, *, takeover: bool) -> None:
        take(lock, 0.1, takeover=takeover)

    with mock.patch.object(RunLock, "take", take_soon), opened(folder) as store:
        ranks = ranks_of(folder, 60)
        with checkpointer(folder, store, Training().state(), ranks=ranks) as ckpt:
            with other_trainer(folder) if RANK == 0 else contextlib.nullcontext():
                found["refused"] = raised(ckpt.restore)
            found["free"] = raised(lambda: ckpt.save(0).step)
            with other_trainer(folder) if RANK == 0 else contextlib.nullcontext():
                found["taken over"] = [raised(lambda: ckpt.step(1)), raised(ckpt.rollback)]
        found["stored"] = [checkpoint.step for checkpoint in store.checkpoints()]
    return found


@contextlib.contextmanager
def other_trainer(folder: Path) -> Iterator[None]:
    """Hold the lock of the run in another process, which takes the run over."""
    program = (
        "import sys; from pathlib import Path; from asymcheck.storage.local_files import Files\n"
        "from asymcheck.storage.nvme.run_lock import RunLock\n"
        "lock = RunLock(Files(), Path(sys.argv[1]), 'default', lambda: 5)\n"
        "lock.take(0, takeover=True); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(folder / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Make catalog entries of packs fail."""
    seal_frames = RingTransaction.seal_frames

    def refused(_self: RingTransaction) -> None:
        message = "the disk of this test is full"
        raise OutOfSpaceError(message)

    RingTransaction.seal_frames = refused  # type: ignore[method-assign]  # a fault
    yield
    RingTransaction.seal_frames = seal_frames  # type: ignore[method-assign]  # as above


@contextlib.contextmanager
def unstorable(state: dict[str, object]) -> Iterator[None]:
    """Put an unsupported value into the state."""
    state["object"] = object()
    yield
    del state["object"]


@contextlib.contextmanager
def unfitting(state: dict[str, object]) -> Iterator[None]:
    """Put a tensor with another shape into the state."""
    own, state["own"] = state["own"], torch.zeros(7)
    yield
    state["own"] = own


def raised(call: Callable[[], object]) -> str:
    """Return the error that a call raises, or its result."""
    try:
        return f"returned {call()!r}"
    except AsymcheckError as error:
        return f"{type(error).__name__}: {error}"
