"""Run a training with FSDP2 under torchrun: save, restore, and report the results.

``trainer.py save STORE OUT`` trains some steps, saves two checkpoints (of a fully sharded model, and of a model that is
also tensor-parallel), and continues the training. It then does the same as ``trainer.py restore STORE OUT``: it
restores the checkpoints into new models and continues from there. The losses and digests of all tensors are written to
OUT as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from asymcheck import Store
from asymcheck.commit.save_request import new_save_id
from asymcheck.format.digest import digest
from asymcheck.types import SaveId
from tests.reshard.ranks import save_rank
from tests.store.equality import tensor_bytes

STEPS = 3
"""Number of steps before the save."""


def build(seed: int) -> torch.nn.Module:
    """Return a small model whose sizes only 1 divides, except for the tensor-parallel ones."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5), torch.nn.Linear(5, 3))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[str]:
    """Return the exact loss of each step; all ranks get the same batch."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        batch, target = (torch.randn(4, size, generator=generator) for size in (7, 3))
        loss = torch.nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def fully_sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model sharded over all ranks, layer by layer."""
    model = build(seed)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def in_two_dimensions(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model that is tensor-parallel over two ranks, and sharded over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = build(seed)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the digest of each whole tensor: parameters, and their optimizer state."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name} {key}"] = digest(tensor_bytes(whole)).hex()
    return found


def go_on(store: Store, action: str) -> dict[str, object]:
    """Save or restore; return the results of the next steps."""
    rank, reports = dist.get_rank(), {}
    for step, make in enumerate([fully_sharded, in_two_dimensions]):
        model, optimizer = make(seed=step if action == "save" else 99)
        state = {"model": model, "optimizer": optimizer}
        if action == "save":
            train(model, optimizer, 0, STEPS)
            save_id: list[bytes] = [new_save_id()]
            dist.broadcast_object_list(save_id)
            save_rank(store, state, step, rank, dist.get_world_size(), SaveId(save_id[0]))
            dist.barrier()
        else:
            store.load(step, into=state, rank=rank)
        reports[make.__name__] = {"tensors": digests(model, optimizer), "losses": train(model, optimizer, STEPS, 2)}
    return reports


def main() -> None:
    """Run the action of the command line."""
    action, location, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with Store.open(location, create=True) as store:
        reports = {one: go_on(store, one) for one in dict.fromkeys([action, "restore"])}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(reports))
    dist.barrier()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
