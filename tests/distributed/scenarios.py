"""Scenarios of ranks, run as a program with one process per rank; results are written to files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import asymcheck
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import AsymcheckError
from tests.distributed.failing import caught, failures, run_in_use
from tests.distributed.launched import RANK, Scenario, checkpointer, noted, opened, process_group, ranks_of
from tests.distributed.training import Training, digest_of

COLLECTIVES = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object "
    "irecv isend monitored_barrier new_group recv recv_object_list reduce reduce_scatter reduce_scatter_tensor "
    "scatter scatter_object_list send send_object_list"
)


def refuse_collectives() -> None:
    """Make every collective raise that a Python program can call."""
    for name in COLLECTIVES.split():

        def refused(*_arguments: object, name: str = name, **_more: object) -> None:
            message = f"{name} was called"
            raise AssertionError(message)

        for module in (dist, distributed_c10d):
            setattr(module, name, refused)


def replicas(folder: Path) -> dict[str, object]:
    """Run DDP: no collective is used, each byte is written once, and the resumed training is equal."""
    with process_group(folder), opened(folder) as store:
        training = Training()
        ddp = DistributedDataParallel(training.model)
        refuse_collectives()
        with checkpointer(folder, store, training.state()) as ckpt:
            first = ckpt.restore()
            losses = []
            for step in range(6):
                losses.append(training.train(step, RANK, ddp))
                ckpt.step(step, {"loss": losses[-1]})
            ckpt.wait()
            written, states = ckpt.statistics().written_bytes, {5: training.digest()}
            own = training.own.clone()
            rolled = ckpt.rollback()
            assert rolled.step == 5
            assert training.digest() == states[5]

        # Create another training with other numbers, until it is restored.
        again = Training(seed=1)
        again_ddp = DistributedDataParallel(again.model)
        for step in range(2):
            # DDP reorders its sums after its first step, which changes the last bits with more than two ranks.
            again.train(step, RANK, again_ddp)
        with checkpointer(folder, store, again.state()) as ckpt:
            restored = ckpt.restore(2)
            assert restored is not None
            resumed = [again.train(step, RANK, again_ddp) for step in range(3, 6)]
            saved = ckpt.save(5)
        assert torch.equal(own, again.own)
        assert again.digest() == states[5]
        return {
            "first": None if first is None else first.step,
            "losses": losses,
            "resumed": resumed,
            "written": written,
            "saved": [saved.step, saved.generation, saved.complete, saved.world_size],
            "generations": [rolled.generation, restored.generation],
        }


def sharded(folder: Path) -> dict[str, object]:
    """Run FSDP2: each rank stores and restores its shards; another process gets whole tensors."""
    with process_group(folder), opened(folder) as store:
        training = Training()
        for layer in training.model:
            fully_shard(layer)
        fully_shard(training.model)
        training.make_optimizer()
        with checkpointer(folder, store, training.state(), keep=asymcheck.Retention(keep_last=2)) as ckpt:
            ckpt.restore()
            for step in range(4):
                training.train(step, RANK, training.model)
                ckpt.step(step)
            ckpt.wait()
            before = training.digest()
            whole = {name: cast(DTensor, one).full_tensor() for name, one in training.model.named_parameters()}
            training.train(4, RANK, training.model)
            assert training.digest() != before
            restored = ckpt.restore()
        assert restored is not None
        assert training.digest() == before
        if RANK == 0:
            torch.save(whole, folder / "whole.pt")
        return {
            "step": restored.step,
            "prunes": ckpt._maintenance is not None and ckpt._maintenance._pruner is not None,
        }


def divergence(folder: Path) -> dict[str, object]:
    """Change a replica on only one rank."""
    with opened(folder) as store:
        training = Training()
        with checkpointer(folder, store, training.state(), ranks=ranks_of(folder, 60)) as ckpt, noted() as texts:
            for step in range(5):
                training.train(step, 0)
                if step == 3 and RANK == 1:
                    with torch.no_grad():
                        weight = training.model[1].weight
                        weight.view(torch.int32)[0, 0] ^= 1
                ckpt.step(step)
                ckpt.wait()
            reports = list(texts)
            before = training.digest()
            training.train(5, 0)
            ckpt.restore()
        return {
            "reports": reports,
            "is_same": training.digest() == before,
            "weight": digest_of([training.model[1].weight]),
        }


def paced(folder: Path) -> dict[str, object]:
    """Run DDP with an automatic interval and one slow rank, for which the other waits in each step."""
    # Long enough that the interval has many steps, even if other work slows down each step.
    aim = asymcheck.AutoInterval(mtbf=timedelta(seconds=20), overhead=1.0)
    begun: list[int] = []
    chosen: list[list[object]] = []
    with process_group(folder), opened(folder) as store:
        training = Training()
        ddp = DistributedDataParallel(training.model)
        refuse_collectives()
        with checkpointer(folder, store, training.state(), every=aim) as ckpt:
            ckpt.restore()
            for first, enough in ((0, 5), (2, 10)):
                # As many steps as these checkpoints need, up to a limit.
                for step in range(first, 5000):
                    time.sleep(0.004 if RANK else 0.0)
                    training.train(step, RANK, ddp)
                    if ckpt.step(step):
                        begun.append(step)
                        chosen.append([ckpt.interval.steps, ckpt.interval.reason])
                    if len(begun) == enough:
                        break
                ckpt.wait()
                if not first:
                    # Restore the first saved step.
                    ckpt.restore(1)
            steps = [pace.step_s for pace in ckpt.statistics().paces]
    return {"begun": begun, "chosen": chosen, "step_s": steps}


def killed(folder: Path) -> dict[str, object]:
    """Train and save until killed, or for some steps; note the state of each step before its save."""
    found: dict[str, object] = {}
    with opened(folder) as store, noted() as texts:
        training = Training()
        ranks = ranks_of(folder, 90)
        ckpt = checkpointer(folder, store, training.state(), ranks=ranks, on_error="warn")
        restored = ckpt.restore()
        # Processes may start at very different times, so synchronise them here.
        ranks.timeout_s = float(sys.argv[4])
        found = {"restored": None if restored is None else restored.step, "digest": training.digest(), "reports": texts}
        tell(found)
        start = 0 if restored is None else restored.step + 1
        try:
            for step in range(start, start + int(sys.argv[3])):
                training.train(step, 0)
                note(folder, step, training.digest())
                ckpt.step(step)
                mark(folder, f"step-{step}-{RANK}")
                time.sleep(0.04)
                if sum("Lost" in text for text in texts) > 1:
                    # The other rank has ended, and it is sufficient that the training continues.
                    break
            ckpt.wait()
        except AsymcheckError as error:
            found["ended"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(AsymcheckError):
            ckpt.close()
    return found


def stuck(folder: Path) -> dict[str, object]:
    """Save one checkpoint, and begin a second that is complete in memory, but never committed."""
    with opened(folder) as store:
        training = Training()

        def train(step: int) -> str:
            training.train(step, 0)
            return training.digest()

        never_commit(folder, checkpointer(folder, store, training.state(), ranks=ranks_of(folder, 60)), train)
    return {}


def never_commit(folder: Path, ckpt: asymcheck.Checkpointer, train: Callable[[int], str]) -> None:
    """Save step 0, and step 1 only in memory, then hang; ``train`` runs a step and returns the state."""
    ckpt.restore()
    note(folder, 0, train(0))
    ckpt.save(0)
    RingTransaction.seal_frames = lambda _self: time.sleep(1000)  # type: ignore[method-assign, assignment]  # what the test needs
    note(folder, 1, train(1))
    ckpt.step(1, {"loss": float(RANK), f"of-{RANK}": 1.0})
    ckpt.wait("memory")
    mark(folder, f"in-memory-{RANK}")
    time.sleep(1000)


def outlived(folder: Path) -> dict[str, object]:
    """Capture step 1 on both ranks and step 2 on rank 0 only, which then waits for rank 1 in vain."""
    with opened(folder) as store:
        training, ranks = Training(), ranks_of(folder, 60)
        ckpt = checkpointer(folder, store, training.state(), ranks=ranks, on_error="warn")
        ckpt.restore()
        training.train(0, 0)
        ckpt.save(0)
        ranks.timeout_s = 3.0
        if RANK == 1:
            RingTransaction.seal_frames = lambda _self: time.sleep(1000)  # type: ignore[method-assign, assignment]  # killed there
        for step in range(1, 3 - RANK):
            training.train(step, 0)
            note(folder, step, training.digest())
            ckpt.step(step)
            ckpt.wait("memory")
            mark(folder, f"in-memory-{step}-{RANK}")
        if RANK == 0:
            ckpt.wait()
            mark(folder, "lost")
        time.sleep(1000)
    return {}


def note(folder: Path, step: int, text: str) -> None:
    """Write the state of a step to a file."""
    path = folder / f"state-{step}-{RANK}"
    assert not path.exists() or path.read_text() == text, f"step {step} is not what it was before the kill"
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def mark(folder: Path, name: str) -> None:
    """Report that this rank has reached a point."""
    (folder / name).touch()


def tell(found: dict[str, object]) -> None:
    """Report to the test."""
    path = Path(sys.argv[2]) / f"report-{RANK}.json"
    path.with_suffix(".tmp").write_text(json.dumps(found))
    path.with_suffix(".tmp").rename(path)


SCENARIOS: dict[str, Scenario] = {
    one.__name__: one
    for one in (replicas, sharded, divergence, failures, caught, run_in_use, paced, killed, stuck, outlived)
}


def main() -> None:
    """Run the scenarios of the command line, separated by commas."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    found: dict[str, object] = {}
    for name in sys.argv[1].split(","):
        inside = folder / name if "," in sys.argv[1] else folder
        inside.mkdir(exist_ok=True)
        (inside / "memory").mkdir(exist_ok=True)
        reports = SCENARIOS[name](inside)
        found = {**found, name: reports} if "," in sys.argv[1] else reports
    tell(found)


if __name__ == "__main__":
    main()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)
