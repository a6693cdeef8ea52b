"""One rank of the workload ``dedupe``, started by torchrun: trains, saves by each library, and counts or times it.

The model is a stack of layers with norms, each a residual of two matrices, that learns random numbers with AdamW.
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
    """A residual of two matrices behind a norm; both may have low-rank adapters beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))
        return outputs


class _Adapted(nn.Module):
    """A frozen matrix, with a trained low-rank adapter."""

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
    """Cut matrices over two ranks; norms are on both, and all of it is sharded over the others."""
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
"""How ranks divide a model among them, by name; of the last most is frozen."""


class Training:
    """A model that learns, with its optimizer, as one rank has them."""

    def __init__(self, layout: str, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[_Layer(width) for _ in range(layers)])
        if layout == "LoRA":
            self.model.requires_grad_(False)
            for layer in self.model.children():
                layer.up, layer.down = _Adapted(layer.up), _Adapted(layer.down)  # type: ignore[arg-type]  # a _Layer
        self._parallel = LAYOUTS[layout](self.model)
        # After the model was cut: parameters are others since.
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=1e-3, foreach=False)
        self._shape = (_BATCH, _TOKENS, width)
        torch.manual_seed(1 + dist.get_rank())

    def train(self) -> None:
        """Do one step, on numbers that other ranks do not have."""
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
    # A piece may be a view of a larger memory, all of which torch.save would write.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def _save_dcp(tensors: Tensors, where: Path) -> None:
    """Save by all ranks; when this returns, it is durable: the library syncs files, but no folder."""
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
    """Open the store, which rank 0 makes. Without codecs: bytes are to be fewer because they are written once."""
    config = asymcheck.StoreConfig(compression="off")
    if dist.get_rank() == 0:
        asymcheck.Store.open(where, config=config, create=True).close()
    dist.barrier()
    return asymcheck.Store.open(where, config=config, create=True)


def measure_bytes(place: Path, training: Training, count: int) -> dict[str, object]:
    """Save after every step; return the bytes that all checkpoints so far take on the drive, by library."""
    taken: dict[str, list[int]] = {OURS: [], DCP: [], TORCH: []}
    rivals = {DCP: _save_dcp, TORCH: _save_torch}
    with (
        _open(place / "store") as store,
        asymcheck.Checkpointer(store, training.state(), every=1, keep=None) as checkpointer,
    ):
        for step in range(count):
            training.train()
            checkpointer.save(step)
            dist.barrier()
            taken[OURS].append(peers.on_drive(place / "store"))
            for name, save in rivals.items():
                save(training.tensors(), place / name)
                taken[name].append(peers.on_drive(place / name) + sum(taken[name][-1:]))
                dist.barrier()
                if dist.get_rank() == 0 and (name == TORCH or step < count - 1):
                    shutil.rmtree(place / name)
                dist.barrier()
        _check(OURS, training, checkpointer.restore)
        _check(DCP, training, lambda: _load_dcp(training, place / DCP))
        if sum(one.complete for one in store.checkpoints()) != count:
            raise RuntimeError(f"{OURS} has {store.checkpoints()}, not {count} whole checkpoints")
    return {"taken": taken}


def _load_dcp(training: Training, where: Path) -> None:
    load_distributed(dict(training.tensors()), storage_reader=FileSystemReader(where))


def _check(name: str, training: Training, load: Callable[[], object]) -> None:
    """Take all tensors away, and see them come back."""
    expected = {one: _local(tensor) for one, tensor in training.tensors().items()}
    with torch.no_grad():
        for tensor in training.tensors().values():
            tensor.fill_(-1)
    load()
    found = training.tensors()
    if found.keys() != expected.keys() or not all(_local(found[one]).equal(expected[one]) for one in expected):
        raise RuntimeError(f"{name} restored something else than was saved")


def measure_times(place: Path, training: Training, rounds: int) -> dict[str, object]:
    """Return the seconds of saves that all ranks wait for, by library; each round saves another state."""
    times: dict[str, list[float]] = {OURS: [], DCP: []}
    with (
        _open(place / "store") as store,
        asymcheck.Checkpointer(store, training.state(), every=1, keep=None) as checkpointer,
    ):
        for number in range(rounds + 1):
            training.train()
            tensors, where = training.tensors(), place / f"dcp-{number}"
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
    """Do what the arguments say: ``measure``, where, and as JSON what, one after the other."""
    action, place, jobs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    dist.init_process_group("gloo")
    told = [_measure(place / str(number), **job) for number, job in enumerate(jobs)]
    if dist.get_rank() == 0:
        (place / f"{action}.json").write_text(json.dumps({"found": told}))
    dist.barrier()
    # Not by way of the interpreter's end: torch's threads of gloo abort the process there, once in a dozen times.
    sys.stdout.flush()
    os._exit(0)


def _measure(place: Path, layout: str, layers: int, width: int, count: int, *, timed: bool) -> dict[str, object]:
    place.mkdir(exist_ok=True)
    training = Training(layout, layers, width)
    told = (measure_times if timed else measure_bytes)(place, training, count)
    size = sum(tensor.nbytes for tensor in training.tensors().values())
    if dist.get_rank() == 0:
        # Room for what is measured next.
        shutil.rmtree(place)
    dist.barrier()
    return {**told, "state": size}


if __name__ == "__main__":
    main()
