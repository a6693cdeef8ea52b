"""Train on a local Ray cluster of two workers, uninterrupted or with a killed or preempted worker."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from asymcheck import Checkpointer, Grace, RngState, Store

STEPS, EVERY, ENDED_IN = 12, 3, 8


def train(config: dict[str, str]) -> None:
    """Train to the end, from the newest checkpoint if there is one. Ray runs this function in each worker."""
    import ray.train.torch

    folder, training = Path(config["folder"]), config["training"]
    rank = torch.distributed.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 13), torch.nn.Dropout(0.3), torch.nn.Linear(13, 1)]
    net = ray.train.torch.prepare_model(torch.nn.Sequential(*layers))
    assert isinstance(net, DistributedDataParallel)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    torch.manual_seed(10 + rank)  # each rank draws different random numbers
    state = {"model": net, "optimizer": optimizer, "schedule": schedule, "rng": RngState()}
    losses: dict[int, float] = {}
    with contextlib.ExitStack() as opened:
        checkpointer, first = None, 0
        if training != "whole":
            store = opened.enter_context(Store.open(folder / training, create=True))
            checkpointer = Checkpointer(store, state, every=EVERY, keep=None, save_on_signal=Grace(signals=()))
            opened.enter_context(checkpointer)
            restored = checkpointer.restore()
            first = restored.step if restored else 0
        for step in range(first + 1, STEPS + 1):
            loss = net(torch.randn(4, 6)).square().mean()
            if training == "killed" and first == 0 and rank == 1 and step == ENDED_IN:
                loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if checkpointer is None:
                continue
            if training == "preempted":
                time.sleep(0.1)  # ranks agree on the last step every 0.25 s
                if first == 0 and rank == 1 and step == ENDED_IN:
                    checkpointer.preempt(30.0)
            checkpointer.step(step)
        ray.train.report({"loss": loss.item()})
    outcome = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    outcome |= {"losses": losses, "first": first, "schedule": schedule.state_dict()}
    torch.save(outcome, folder / f"{training}-{rank}.pt")


def main(folder: Path, *trainings: str) -> None:
    """Start a cluster, and run trainings to the end, with one restart by Ray."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    for training in trainings:
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": str(folder), "training": training},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=training, storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
            ),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
