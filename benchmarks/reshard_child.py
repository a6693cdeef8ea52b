"""Run one rank of the workload ``reshard``, started by torchrun: save a state, or restore it repeatedly."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import asymcheck
from asymcheck.commit.encoder import Encoder
from asymcheck.commit.save_request import LineagePosition, SaveRequest, new_save_id
from asymcheck.commit.synchronous_save import save
from asymcheck.state.walk import flatten
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import SaveId
from benchmarks import coldness, peers, states
from benchmarks.report import rotated

SYSTEMS = ("asymcheck", "torch DCP")
_PATTERN = 0x9E3779B1
"""Multiplier of numbers that makes all blocks of a state differ."""


def state_of(layers: int, *, empty: bool) -> dict[str, torch.Tensor]:
    """Return this rank's shards of a state that is the same for any number of ranks."""
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    state: dict[str, torch.Tensor] = {}
    first = 0
    for name, shape in states.gpt2_shapes(layers).items():
        rows = -(-shape[0] // count)
        begin, end = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        inner = math.prod(shape[1:])
        numbers = torch.arange(first + begin * inner, first + end * inner, dtype=torch.int64)
        local = (numbers * _PATTERN).to(torch.int32).view(torch.float32).reshape(end - begin, *shape[1:])
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        state[name] = DTensor.from_local(
            torch.zeros_like(local).fill_(0) if empty else local,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=strides,
        )
        first += math.prod(shape)
    return state


def _save(where: Path, layers: int) -> dict[str, object]:
    state = state_of(layers, empty=False)
    save_id: list[bytes] = [new_save_id()]
    dist.broadcast_object_list(save_id)
    if dist.get_rank() == 0:
        asymcheck.Store.open(where / "store", create=True).close()
    dist.barrier()
    tier = NvmeTier(where / "store", asymcheck.StoreConfig())
    request = SaveRequest("default", 1, {}, dist.get_rank(), dist.get_world_size(), SaveId(save_id[0]))
    encoder = Encoder(tier.config.compression, "nvme")
    save(tier, tier.open_catalog(lambda _: None), encoder, flatten(state), request, lambda: LineagePosition(1, None))
    tier.close()
    save_distributed(dict(state), storage_writer=FileSystemWriter(where / "dcp", thread_count=peers.THREADS))
    if dist.get_rank() == 0:
        peers.sync(where / "dcp")
    size = sum(tensor.nbytes for tensor in state.values())
    return {"state": f"GPT-2 of {layers} layers with AdamW, {len(state)} tensors, {size / 1e9:.2f} GB"}


def _restore(where: Path, layers: int, rounds: int) -> dict[str, object]:
    into, expected = state_of(layers, empty=True), state_of(layers, empty=False)
    reads: dict[str, tuple[Path, Callable[[], object]]] = {
        SYSTEMS[0]: (where / "store", lambda: _load(where / "store", into)),
        SYSTEMS[1]: (
            where / "dcp",
            lambda: load_distributed(dict(into), storage_reader=FileSystemReader(where / "dcp")),
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in reads}
    made_cold: set[str] = set()
    for number in range(rounds + 1):
        for name, (path, read) in rotated(list(reads.items()), number):
            if dist.get_rank() == 0:
                made_cold.add(coldness.make_cold(peers.files_in(path)))
            dist.barrier()
            began = time.perf_counter()
            read()
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - began)
            else:
                _check(name, into, expected)
    return {"times": times, "made cold by": ", ".join(sorted(made_cold))}


def _load(where: Path, into: dict[str, torch.Tensor]) -> None:
    with asymcheck.Store.open(where, read_only=True) as store:
        store.load(into=into, rank=dist.get_rank())


def _check(name: str, into: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for tensor, value in zip(into.values(), expected.values(), strict=True):
        restored, right = (one.to_local().view(torch.int32) for one in (tensor, value) if isinstance(one, DTensor))
        if not torch.equal(restored, right):
            raise RuntimeError(f"{name} restored something else than was saved")
        restored.zero_()


def main() -> None:
    """Parse the arguments and run the action: ``save`` or ``restore``, the folder, the layers, and the repetitions."""
    action, where, layers, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    result = _save(where, layers) if action == "save" else _restore(where, layers, rounds)
    if dist.get_rank() == 0:
        (where / f"{action}.json").write_text(json.dumps(result))
    dist.barrier()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
