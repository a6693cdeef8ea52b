"""Run a rank of an own loop with Accelerate or Fabric, which is killed, or resumes and compares."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from asymcheck import Checkpointer, RngState, Store
from tests.store.equality import assert_same

RANK = int(os.environ.get("RANK", "0"))
EPOCHS, ROWS, BATCH, ACCUMULATE, EVERY = 3, 56, 4, 2, 2
Losses = dict[int, float]


def rows() -> TensorDataset:
    """Return rows that depend on nothing."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator))


def model() -> torch.nn.Module:
    """Return a model with dropout, of sizes that two ranks do not divide."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Dropout(0.3), torch.nn.Linear(13, 1))


def save(checkpointer: Checkpointer | None, step: int, kill_at: int) -> None:
    """Save a step; kill one rank at a step, when the checkpoint of the step before is durable on all ranks."""
    if checkpointer is None:
        return
    checkpointer.step(step)
    if step == kill_at - 1:
        checkpointer.wait()
    if step == kill_at and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def local(state: Any) -> Any:  # noqa: ANN401 - any state
    """Replace distributed tensors by this rank's shards."""
    if isinstance(state, DTensor):
        return state.to_local().detach()
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return [local(value) for value in state] if isinstance(state, list) else state


class Registered:
    """An object that Accelerate saves and restores with the rest."""

    seen = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps seen."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the number of steps seen."""
        self.seen = state["seen"]


def shard_on_cpu(state: Any, plugin: object) -> None:  # noqa: ANN401 - imported elsewhere
    """Enable FSDP2, which Accelerate itself enables only on accelerators; on CPU, it would use DDP."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = plugin


def accelerator_of(kind: str) -> Any:  # noqa: ANN401 - imported here
    """Return an accelerator with DDP, FSDP2 or ZeRO, and perhaps with loaders of torchdata."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    loaders = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=kind == "stateful")
    options: dict[str, Any] = {"gradient_accumulation_steps": ACCUMULATE, "dataloader_config": loaders}
    if kind == "fsdp2":
        accelerator = Accelerator(cpu=True, **options)
        shard_on_cpu(accelerator.state, FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"))
        return accelerator
    if kind.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": ACCUMULATE,
            "zero_optimization": {"stage": int(kind[-1])},
            "zero_allow_untested_optimizer": True,
        }
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
        return Accelerator(**options)
    return Accelerator(cpu=True, **options)


def by_accelerate(kind: str, store: Store | None, kill_at: int) -> dict[str, Any]:
    """Train to the end from the newest checkpoint, if there is a store; return the outcome of this rank."""
    from accelerate.utils import set_seed

    from asymcheck.integrations.accelerate import accelerator_state

    accelerator = accelerator_of(kind)
    set_seed(5)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    loader = DataLoader(rows(), batch_size=BATCH, shuffle=True)
    net, optimizer, schedule, loader = accelerator.prepare(net, optimizer, schedule, loader)
    registered = Registered()
    accelerator.register_for_checkpointing(registered)
    torch.manual_seed(10 + RANK)  # each rank draws different random numbers
    steps_in_epoch = -(-len(loader) // ACCUMULATE)
    checkpointer, done = None, 0
    if store is not None:
        checkpointer = Checkpointer(store, accelerator_state(accelerator), every=EVERY, keep=None)
        restored = checkpointer.restore()
        done = 0 if restored is None else restored.step
    losses: Losses = {}
    step = done
    for epoch in range(done // steps_in_epoch, EPOCHS):
        loader.set_epoch(epoch)
        skipped = done % steps_in_epoch * ACCUMULATE if epoch == done // steps_in_epoch else 0
        batches = loader if kind == "stateful" else accelerator.skip_first_batches(loader, skipped)
        for inputs, targets in batches:
            with accelerator.accumulate(net):
                loss = torch.nn.functional.mse_loss(net(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.setdefault(step + 1, loss.item())
            if accelerator.sync_gradients:
                step += 1
                registered.seen += 1
                save(checkpointer, step, kill_at)
    if checkpointer is not None:
        checkpointer.close()
    weights = {name: value.detach() for name, value in accelerator.unwrap_model(net).named_parameters()}
    assert kind != "fsdp2" or all(isinstance(value, DTensor) for value in weights.values())
    outcome = {"model": local(weights), "random": torch.get_rng_state(), "seen": registered.seen, "step": step}
    if not kind.startswith("zero"):
        outcome |= {"optimizer": local(optimizer.optimizer.state_dict()), "schedule": schedule.state_dict()}
    return outcome | {"losses": losses, "first": done}


def by_fabric(kind: str, store: Store | None, kill_at: int) -> dict[str, Any]:
    """Train to the end with Fabric, with DDP or FSDP2."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def shard(net: torch.nn.Module, mesh: Any) -> torch.nn.Module:  # noqa: ANN401 - signature of Fabric
        return fully_shard(net, mesh=mesh["data_parallel"])

    strategy = "ddp" if kind == "ddp" else ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = fabric.setup(model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=0.05))
    torch.manual_seed(10 + RANK)  # each rank draws different random numbers
    checkpointer, done = None, 0
    if store is not None:
        state = {"model": net, "optimizer": optimizer, "rng": RngState()}
        checkpointer = Checkpointer(store, state, every=EVERY, keep=None)
        restored = checkpointer.restore()
        done = 0 if restored is None else restored.step
    losses: Losses = {}
    for step in range(done + 1, 13):
        loss = net(torch.randn(BATCH, 6)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        save(checkpointer, step, kill_at)
    if checkpointer is not None:
        checkpointer.close()
    weights = {name: value.detach() for name, value in net.named_parameters()}
    assert kind != "fsdp2" or all(isinstance(value, DTensor) for value in weights.values())
    outcome = {"model": local(weights), "optimizer": local(optimizer.state_dict()), "random": torch.get_rng_state()}
    return {**outcome, "step": step, "losses": losses, "first": done}


def compare(found: dict[str, Any], whole: dict[str, Any]) -> int:
    """Check that a resumed training has the outcome of an uninterrupted one; return its first step."""
    first, losses = found.pop("first"), found.pop("losses")
    assert losses == {step: loss for step, loss in whole["losses"].items() if step > first}
    assert_same(found, {name: whole[name] for name in found})
    return int(first)


def main(trainer: str, kind: str, what: str, folder: Path, kill_at: int) -> None:
    """Train until one rank is killed at a step; or resume, compare, and report the first step."""
    torch.set_num_threads(1)
    train = {"accelerate": by_accelerate, "fabric": by_fabric}[trainer]
    with Store.open(folder / "store", create=True) as store:
        if what == "kill":
            train(kind, store, kill_at)
            return
        resumed = train(kind, store, -1)
    if trainer == "accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
    whole = train(kind, None, -1)
    report = {"first": compare(resumed, whole), "random": whole["random"].tolist(), "last": whole["step"]}
    (folder / f"report-{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)
