"""What the ranks of a test do. Run as a program, in one process a rank; each tells what it found in a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import asymcheck
from asymcheck import Checkpointer, Ranks, Store
from asymcheck.config import CaptureConfig, StoreConfig
from asymcheck.errors import AsymcheckError, InvalidInputError, OutOfSpaceError
from asymcheck.pipeline.drain import Drain
from tests.ranks.training import Training, digest_of

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CONFIG = StoreConfig(
    partition_bytes=8 * 1024, bundle_below_bytes=4 * 1024, inline_bytes=16, inline_total_bytes=32, slots=2
)
COLLECTIVES = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object "
    "irecv isend monitored_barrier new_group recv recv_object_list reduce reduce_scatter reduce_scatter_tensor "
    "scatter scatter_object_list send send_object_list"
)

Scenario = Callable[[Path], dict[str, object]]


def connect() -> dist.Store:
    """Return the store by which the ranks find each other."""
    return dist.TCPStore("127.0.0.1", int(os.environ["MEETING"]), None, is_master=False, wait_for_workers=False)


def ranks_of(folder: Path, timeout_s: float) -> Ranks:
    """Return the ranks of all launches in a folder: what those before said is still there."""
    return Ranks(RANK, WORLD, dist.PrefixStore(str(folder), connect()), timeout_s=timeout_s)


@contextlib.contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """Have the default process group meanwhile."""
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{folder}/group", connect()), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


def opened(folder: Path) -> Store:
    """Open the store of all ranks."""
    return Store.open(folder / "store", config=CONFIG)


def checkpointer(folder: Path, store: Store, state: dict[str, object], **more: object) -> Checkpointer:
    """Return a Checkpointer that proves all it captures."""
    capture = CaptureConfig(proof="full", ring_folder=str(folder / "memory"))
    return Checkpointer(store, state, capture=capture, **{"every": 1, **more})  # type: ignore[arg-type]  # knobs of tests


def refuse_collectives() -> None:
    """Let every collective raise that a Python program can call."""
    for name in COLLECTIVES.split():

        def refused(*_arguments: object, name: str = name, **_more: object) -> None:
            message = f"{name} was called"
            raise AssertionError(message)

        for module in (dist, distributed_c10d):
            setattr(module, name, refused)


def replicas(folder: Path) -> dict[str, object]:
    """DDP: no collective, each byte written once, the resumed training is the same."""
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

        # Another training: other numbers everywhere, until it is restored.
        again = Training(seed=1)
        again_ddp = DistributedDataParallel(again.model)
        for step in range(2):
            # It orders its sums anew after its first step, which makes other last bits with more than two ranks.
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
    """FSDP2: each rank stores its part, and gets it back; somebody else gets whole tensors."""
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
        return {"step": restored.step, "prunes": ckpt._upkeep is not None}


def divergence(folder: Path) -> dict[str, object]:
    """A replica that changes on one rank alone."""
    with opened(folder) as store:
        training = Training()
        with checkpointer(folder, store, training.state(), ranks=ranks_of(folder, 30)) as ckpt, noted() as texts:
            for step in range(5):
                training.train(step, 0)
                if step == 3 and RANK == 1:
                    with torch.no_grad():
                        weight = training.model[1].weight
                        weight.view(torch.int32)[0, 0] ^= 1
                ckpt.step(step)
                ckpt.wait()
            told = list(texts)
            before = training.digest()
            training.train(5, 0)
            ckpt.restore()
        return {"told": told, "is_same": training.digest() == before, "weight": digest_of([training.model[1].weight])}


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Keep the warnings that come."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda text, kind, *_rest: texts.append(f"{kind.__name__}: {text}")
        yield texts


def failures(folder: Path) -> dict[str, object]:
    """Ranks that fail, differ, or do not come: the others say so, and go on to the next checkpoint."""
    found: dict[str, object] = {}
    with opened(folder) as store:
        training = Training()
        state = training.state()
        with checkpointer(folder, store, state, ranks=ranks_of(folder, 30), on_error="warn") as ckpt, noted() as texts:
            training.train(0, 0)
            ckpt.save(0)
            training.train(1, 0)
            with full_disk() if RANK == 1 else contextlib.nullcontext():
                found["refused save"] = raised(lambda: ckpt.save(1))
            # The same step again, with other bytes: another attempt.
            training.train(2, 0)
            second = ckpt.save(1)
            found["attempts"] = [second.save_id, training.digest()]
            training.train(3, 0)
            with unstorable(state) if RANK == 1 else contextlib.nullcontext():
                found["unstorable"] = raised(lambda: ckpt.save(3))
            # A rank that fails to take the state fails the restore of all.
            with unfitting(state) if RANK == 1 else contextlib.nullcontext():
                found["unfitting"] = raised(ckpt.restore)
            found["restored"] = raised(lambda: getattr(ckpt.restore(), "save_id", None))
            found["restored bytes"] = training.digest()
            training.train(4, 0)
            found["other steps"] = raised(lambda: ckpt.save(4 + RANK))
            found["told"] = list(texts)
        late = ranks_of(folder, 30)
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
    """Errors that one rank raises, and its caller catches: the ranks stay in step, and nothing else is lost."""
    training = Training()
    state = training.state()
    refused: set[int] = set()

    def refuse(report: asymcheck.CheckpointReport) -> None:
        if report.step in refused:
            message = f"step {report.step} is not liked"
            raise InvalidInputError(message)

    with opened(folder) as store:
        found: dict[str, object] = {}
        with checkpointer(folder, store, state, ranks=ranks_of(folder, 30), on_checkpoint=refuse) as ckpt:
            refused |= {1} if RANK == 1 else {2}
            steps = []
            for step in range(7):
                training.train(step, 0)
                metrics = {"loss": cast(float, "unknown") if step == 4 and RANK == 1 else 0.5}
                steps.append(raised(partial(ckpt.step, step, metrics)))
                # What has become of it is known here, and not told yet.
                store.settle()
            found["steps"] = steps
            refused |= {6} if RANK == 1 else set()
            found["restored"] = [raised(ckpt.restore), raised(lambda: getattr(ckpt.restore(), "step", None))]
            training.train(7, 0)
            ckpt.step(7)
            refused |= {7} if RANK == 0 else set()
            found["rolled back"] = [raised(ckpt.rollback), raised(lambda: ckpt.rollback().step)]
            refused |= {8} if RANK == 1 else set()
            found["saved"] = [raised(lambda: ckpt.save(8)), raised(lambda: ckpt.save(9).step)]
        with checkpointer(folder, store, state, ranks=ranks_of(folder, 30)) as ckpt:
            found["other steps"] = [raised(lambda: ckpt.restore(3 if RANK else None)), raised(lambda: ckpt.restore(3))]
        assert ckpt._together is not None
        found["left"] = ckpt._together._session is None
        found["stored"] = [one.step for one in store.checkpoints() if one.complete]
    return found


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let packs not be entered."""
    enter = Drain.enter

    def refused(_self: Drain) -> None:
        message = "the disk of this test is full"
        raise OutOfSpaceError(message)

    Drain.enter = refused  # type: ignore[method-assign]  # a fault
    yield
    Drain.enter = enter  # type: ignore[method-assign]  # as above


@contextlib.contextmanager
def unstorable(state: dict[str, object]) -> Iterator[None]:
    """Have something in the state that cannot be stored."""
    state["object"] = object()
    yield
    del state["object"]


@contextlib.contextmanager
def unfitting(state: dict[str, object]) -> Iterator[None]:
    """Have a tensor in the state that is of another shape."""
    own, state["own"] = state["own"], torch.zeros(7)
    yield
    state["own"] = own


def raised(call: Callable[[], object]) -> str:
    """Return what error a call raises, or what it returned."""
    try:
        return f"returned {call()!r}"
    except AsymcheckError as error:
        return f"{type(error).__name__}: {error}"


def paced(folder: Path) -> dict[str, object]:
    """An interval that is chosen: DDP with one slow rank, for which the other one waits in each step."""
    # So long that the interval is many steps even where other work slows down every one of them.
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
                # As many steps as these checkpoints take, at most so many that it ends.
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
                    # To the first one that was saved.
                    ckpt.restore(1)
            steps = [pace.step_s for pace in ckpt.statistics().paces]
    return {"begun": begun, "chosen": chosen, "step_s": steps}


def killed(folder: Path) -> dict[str, object]:
    """Train and save until killed, or so many steps; note what the state is at each step before it is saved."""
    found: dict[str, object] = {}
    with opened(folder) as store, noted() as texts:
        training = Training()
        ranks = ranks_of(folder, 90)
        ckpt = checkpointer(folder, store, training.state(), ranks=ranks, on_error="warn")
        restored = ckpt.restore()
        # Processes may start at very different times; from here on they keep together.
        ranks.timeout_s = 2.0
        found = {"restored": None if restored is None else restored.step, "digest": training.digest(), "told": texts}
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
                    # The other one has ended; that training goes on is enough.
                    break
            ckpt.wait()
        except AsymcheckError as error:
            found["ended"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(AsymcheckError):
            ckpt.close()
    return found


def stuck(folder: Path) -> dict[str, object]:
    """Save one checkpoint, and begin a second that is complete in memory, but is never committed."""
    with opened(folder) as store:
        training = Training()
        ckpt = checkpointer(folder, store, training.state(), ranks=ranks_of(folder, 60))
        ckpt.restore()
        training.train(0, 0)
        note(folder, 0, training.digest())
        ckpt.save(0)
        Drain.enter = lambda _self: time.sleep(1000)  # type: ignore[method-assign, assignment]  # what the test needs
        training.train(1, 0)
        note(folder, 1, training.digest())
        ckpt.step(1)
        ckpt.wait("dram")
        mark(folder, f"in-memory-{RANK}")
        time.sleep(1000)
    return {}


def note(folder: Path, step: int, text: str) -> None:
    """Write down what the state is at a step."""
    path = folder / f"state-{step}-{RANK}"
    assert not path.exists() or path.read_text() == text, f"step {step} is not what it was before the kill"
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def mark(folder: Path, name: str) -> None:
    """Say that this rank has come so far."""
    (folder / name).touch()


def tell(found: dict[str, object]) -> None:
    """Tell the test."""
    path = Path(sys.argv[2]) / f"told-{RANK}.json"
    path.with_suffix(".tmp").write_text(json.dumps(found))
    path.with_suffix(".tmp").rename(path)


SCENARIOS: dict[str, Scenario] = {
    one.__name__: one for one in (replicas, sharded, divergence, failures, caught, paced, killed, stuck)
}


def main() -> None:
    """Do what the command line says: scenarios, with commas between."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    found: dict[str, object] = {}
    for name in sys.argv[1].split(","):
        inside = folder / name if "," in sys.argv[1] else folder
        inside.mkdir(exist_ok=True)
        (inside / "memory").mkdir(exist_ok=True)
        told = SCENARIOS[name](inside)
        found = {**found, name: told} if "," in sys.argv[1] else told
    tell(found)


if __name__ == "__main__":
    main()
    # Not by way of the interpreter's end: torch's threads of gloo abort the process there, once in a dozen times.
    sys.stdout.flush()
    os._exit(0)
