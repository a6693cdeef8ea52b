"""Run a rank of a Trainer of transformers or Lightning that is killed, or resumes and compares."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asymcheck import Push, Ranks, Store
from asymcheck.config import CaptureConfig
from tests.integrations.loop_ranks import local, shard_on_cpu
from tests.store.equality import assert_same

RANK = int(os.environ.get("LOCAL_RANK", "0"))
_EVERY, _VICTIM = 2, 1
Outcome = dict[str, object]
Knobs = dict[str, Any]
Train = Callable[[Path, "Store | None", Knobs, int, "int | None"], Outcome]


def by_fsdp(folder: Path, store: Store | None, knobs: Knobs, kill_at: int, step: int | None) -> Outcome:
    """Train as :func:`by_transformers`, with FSDP2."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    found = by_transformers(folder, store, knobs, kill_at, step, plugin)
    assert all(isinstance(weight, DTensor) for weight in found["model"].values())
    return local(found)


def by_transformers(
    folder: Path,
    store: Store | None,
    knobs: Knobs,
    kill_at: int,
    step: int | None,
    plugin: object = None,
) -> Outcome:
    """Train to the end from the newest checkpoint, if there is a store; return the outcome of this rank."""
    import transformers

    from asymcheck.integrations.transformers import AsymcheckCallback
    from tests.integrations.small_trainer import Begun, KillAt, make_trainer, outcome

    transformers.utils.logging.set_verbosity_error()
    trainer, begun = make_trainer(folder, tied=plugin is None), Begun()
    if plugin is not None:
        shard_on_cpu(trainer.accelerator.state, plugin)
        trainer.is_fsdp_enabled = True
    trainer.add_callback(begun)
    # Each rank has different random numbers.
    torch.rand(RANK)
    resume = None
    if store is not None:
        callback = AsymcheckCallback(store, **{"keep": None, **knobs})
        trainer.add_callback(KillAt(kill_at, callback, kill_at - _EVERY))
        resume = callback.resume(trainer, step)
    trainer.train(resume_from_checkpoint=resume)
    return {**outcome(trainer), "first": begun.step}


def by_lightning(
    folder: Path, store: Store | None, knobs: Knobs, kill_at: int, step: int | None, strategy: object = None
) -> Outcome:
    """Train to the end with Lightning."""
    from asymcheck.integrations.lightning import AsymcheckCallback
    from tests.integrations.small_fit import Differing, KillAt, fit, outcome

    callbacks = [Differing()]
    if store is not None:
        saving = AsymcheckCallback(store, **{"keep": None, **knobs}, resume=step is None or step)
        callbacks += [saving, KillAt(kill_at, saving, kill_at - _EVERY)]
    trainer, module = fit(folder, *callbacks, ranks=2, strategy=strategy)
    return {**outcome(trainer, module), "losses": dict(module.losses)}


def by_model_parallel(folder: Path, store: Store | None, knobs: Knobs, kill_at: int, step: int | None) -> Outcome:
    """Train as :func:`by_lightning`, with FSDP2."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    found = by_lightning(folder, store, knobs, kill_at, step, ModelParallelStrategy(2, 1))
    assert isinstance(found["model"]["net.0.weight"], DTensor)
    return local(found)


def train(
    by: Train, folder: Path, store: str = "", *, every: int = 1, kill_at: int = -1, step: int | None = None
) -> Outcome:
    """Train with a store of that name in a folder, or without a store."""
    if not store:
        return by(folder, None, {}, -1, None)
    with Store.open(folder / store, create=True) as opened:
        return by(folder, opened, {"every": every}, kill_at, step)


def train_apart(by: Train, folder: Path, step: int | None = None) -> Outcome:
    """Train as if each rank were on a separate machine with a store, and push to one location."""
    node, location = f"machine-{RANK}", (folder / "there").as_uri()
    memory = folder / node / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    knobs = {
        "every": 1,
        "push": Push(location),
        # The ranks of a Trainer may find each other only when the training begins.
        "ranks": partial(Ranks.from_torch, node=node),
        "capture": CaptureConfig(ring_folder=str(memory)),
    }
    with Store.open(folder / node / "store", remote=location, create=True) as opened:
        return by(folder, opened, knobs, -1, step)


def compare(found: Outcome, whole: Outcome) -> object:
    """Check that a resumed training has the outcome of an uninterrupted one; return its first step."""
    rest = {name: value for name, value in found.items() if name not in ("first", "losses")}
    assert_same(rest, {name: whole[name] for name in rest})
    if "losses" not in found:
        return found["first"]
    losses = found["losses"]
    assert losses.items() <= whole["losses"].items()
    return min(losses)


def main(trainer: str, what: str, folder: Path, steps: list[int]) -> None:
    """Train until one rank is killed at a step; or resume, also from some other steps, and report the steps."""
    torch.set_num_threads(1)
    by = {
        "transformers": by_transformers,
        "fsdp": by_fsdp,
        "lightning": by_lightning,
        "model-parallel": by_model_parallel,
    }[trainer]
    if what == "kill":
        train(by, folder, "killed", every=_EVERY, kill_at=steps[0] if RANK == _VICTIM else -1)
        return
    resumed = train(by, folder, "killed", every=_EVERY)
    whole = train(by, folder)
    first = [compare(resumed, whole)]
    if steps:
        first += [compare(train_apart(by, folder, step), whole) for step in (None, *steps)]
    steps_done = whole["where" if "where" in whole else "state"][0]
    reports = {"first": first, "random": whole["random"].tolist(), "last": steps_done}
    (folder / f"report-{RANK}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), list(map(int, sys.argv[4:])))
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)
