"""Run one rank of the workload ``dedupe``, started by torchrun: train, save by each library, and count bytes or time.

The model is a stack of layers with norms. Each layer is a residual of two matrices. The model learns random numbers
with AdamW.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import asymcheck
from benchmarks import peers
from benchmarks.report import rotated

OURS, DCP, TORCH = "asymcheck", "torch DCP", "torch.save"
_TENSOR_RANKS = 2
_TOKENS, _BATCH = 8, 2
_LOW_RANK = 8

Tensors = dict[str, torch.Tensor]


class _Layer(nn.Module):
    """A residual of two matrices behind a norm, with optional low-rank adapters on both matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))
        return outputs


class _Adapted(nn.Module):
    """A frozen matrix with a trained low-rank adapter."""

    def __init__(self, matrix: nn.Linear) -> None:
        super().__init__()
        self.matrix = matrix
        self.first = nn.Linear(matrix.in_features, _LOW_RANK, bias=False)
        self.second = nn.Linear(_LOW_RANK, matrix.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.matrix(inputs) + self.second(self.first(inputs))
        return outputs


def _replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _sharded(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model


def _sharded_in_two(model: nn.Module) -> nn.Module:
    """Shard matrices over two ranks, replicate norms on both, and shard everything over the remaining ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // _TENSOR_RANKS, _TENSOR_RANKS), mesh_dim_names=("d", "t"))
    split = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.children():
        parallelize_module(layer, mesh["t"], split)
        fully_shard(layer, mesh=mesh["d"])
    fully_shard(model, mesh=mesh["d"])
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": _replicated,
    "FSDP2": _sharded,
    "FSDP2 + TP": _sharded_in_two,
    "LoRA": _replicated,
}
"""Layouts of a model over the ranks, by name. The last layout is mostly frozen."""


class Training:
    """A model and its optimizer on one rank."""

    def __init__(self, layout: str, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[_Layer(width) for _ in range(layers)])
        if layout == "LoRA":
            self.model.requires_grad_(False)
            for layer in self.model.children():
                layer.up, layer.down = _Adapted(layer.up), _Adapted(layer.down)  # type: ignore[arg-type]  # a _Layer
        self._parallel = LAYOUTS[layout](self.model)
        # Create the optimizer after sharding, because sharding replaces the parameters.
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=1e-3, foreach=False)
        self._shape = (_BATCH, _TOKENS, width)
        torch.manual_seed(1 + dist.get_rank())

    def train(self) -> None:
        """Train one step, on numbers that differ between the ranks."""
        self._parallel(torch.randn(self._shape)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        """Return the state for asymcheck."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> Tensors:
        """Return the same state as named tensors, for the other libraries."""
        found: Tensors = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            moments = self.optimizer.state.get(parameter, {})
            found |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # Clone the piece, because torch.save would write the whole memory of a view.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def _save_dcp(tensors: Tensors, where: Path) -> None:
    """Save on all ranks, and sync the folder, because the library syncs only files."""
    save_distributed(dict(tensors), storage_writer=FileSystemWriter(where, thread_count=peers.THREADS))
    if dist.get_rank() == 0:
        peers.sync(where)
    dist.barrier()


def _save_torch(tensors: Tensors, where: Path) -> None:
    where.mkdir(exist_ok=True)
    file = where / f"{dist.get_rank()}.pt"
    torch.save({name: _local(tensor) for name, tensor in tensors.items()}, file)
    # Without a sync, delayed allocation would hide used space.
    peers.sync(file)
    dist.barrier()


def _open(where: Path) -> asymcheck.Store:
    """Open the store, which rank 0 creates. Disable codecs, because only deduplication is measured."""
    config = asymcheck.StoreConfig(compression="off")
    if dist.get_rank() == 0:
        asymcheck.Store.open(where, config=config, create=True).close()
    dist.barrier()
    return asymcheck.Store.open(where, config=config, create=True)


def measure_bytes(folder: Path, training: Training, count: int) -> dict[str, object]:
    """Save after every step; return the disk usage of all checkpoints so far, by library."""
    disk_usage: dict[str, list[int]] = {OURS: [], DCP: [], TORCH: []}
    rivals = {DCP: _save_dcp, TORCH: _save_torch}
    with (
        _open(folder / "store") as store,
        asymcheck.Checkpointer(store, training.state(), every=1, keep=None) as checkpointer,
    ):
        for step in range(count):
            training.train()
            checkpointer.save(step)
            dist.barrier()
            disk_usage[OURS].append(peers.on_drive(folder / "store"))
            for name, save in rivals.items():
                save(training.tensors(), folder / name)
                disk_usage[name].append(peers.on_drive(folder / name) + sum(disk_usage[name][-1:]))
                dist.barrier()
                if dist.get_rank() == 0 and (name == TORCH or step < count - 1):
                    shutil.rmtree(folder / name)
                dist.barrier()
        _check(OURS, training, checkpointer.restore)
        _check(DCP, training, lambda: _load_dcp(training, folder / DCP))
        if sum(one.complete for one in store.checkpoints()) != count:
            raise RuntimeError(f"{OURS} has {store.checkpoints()}, not {count} whole checkpoints")
    return {"taken": disk_usage}


def _load_dcp(training: Training, where: Path) -> None:
    load_distributed(dict(training.tensors()), storage_reader=FileSystemReader(where))


def _check(name: str, training: Training, load: Callable[[], object]) -> None:
    """Clear all tensors, restore them, and compare."""
    expected = {one: _local(tensor) for one, tensor in training.tensors().items()}
    with torch.no_grad():
        for tensor in training.tensors().values():
            tensor.fill_(-1)
    load()
    found = training.tensors()
    if found.keys() != expected.keys() or not all(_local(found[one]).equal(expected[one]) for one in expected):
        raise RuntimeError(f"{name} restored something else than was saved")


def measure_times(folder: Path, training: Training, rounds: int) -> dict[str, object]:
    """Return the seconds of saves from a common start, by library. Each round saves a different state."""
    times: dict[str, list[float]] = {OURS: [], DCP: []}
    with (
        _open(folder / "store") as store,
        asymcheck.Checkpointer(store, training.state(), every=1, keep=None) as checkpointer,
    ):
        for number in range(rounds + 1):
            training.train()
            tensors, where = training.tensors(), folder / f"dcp-{number}"
            saves: dict[str, Callable[[], object]] = {
                OURS: lambda: checkpointer.save(number),  # noqa: B023 - called in this round
                DCP: lambda: _save_dcp(tensors, where),  # noqa: B023 - called in this round
            }
            for name, save in rotated(list(saves.items()), number):
                dist.barrier()
                began = time.perf_counter()
                save()
                dist.barrier()
                if number:
                    times[name].append(time.perf_counter() - began)
            if dist.get_rank() == 0:
                shutil.rmtree(where)
    return {"times": times}


def main() -> None:
    """Parse the arguments and run the action: ``measure``, the folder, and the measurements as JSON."""
    action, folder, jobs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    dist.init_process_group("gloo")
    results = [_measure(folder / str(number), **job) for number, job in enumerate(jobs)]
    if dist.get_rank() == 0:
        (folder / f"{action}.json").write_text(json.dumps({"found": results}))
    dist.barrier()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)


def _measure(folder: Path, layout: str, layers: int, width: int, count: int, *, timed: bool) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    training = Training(layout, layers, width)
    results = (measure_times if timed else measure_bytes)(folder, training, count)
    size = sum(tensor.nbytes for tensor in training.tensors().values())
    if dist.get_rank() == 0:
        # Free memory for the next measurement.
        shutil.rmtree(folder)
    dist.barrier()
    return {**results, "state": size}


if __name__ == "__main__":
    main()
