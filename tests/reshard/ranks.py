"""Save checkpoints of several ranks, one rank after another in one process."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from asymcheck import Store, TensorShard
from asymcheck.commit.save_request import new_save_id
from asymcheck.types import Part, SaveId


def save_rank(store: Store, state: object, step: int, rank: int, world_size: int, save_id: SaveId) -> None:
    """Save one rank's part of a checkpoint."""
    store.save(state, step=step, part=Part(rank, world_size, save_id.hex()))


def save_ranks(store: Store, states: Sequence[object], step: int = 0) -> None:
    """Save a checkpoint with one of ``states`` for each rank."""
    save_id = new_save_id()
    for rank, state in enumerate(states):
        save_rank(store, state, step, rank, len(states), save_id)


def cut_in_grid(full: torch.Tensor, cuts: Sequence[Sequence[int]]) -> list[TensorShard]:
    """Split a tensor at the given positions of each dimension; pieces between equal positions are empty."""
    spans = [
        list(itertools.pairwise([0, *sorted(min(cut, size) for cut in places), size]))
        for places, size in zip(cuts, full.shape, strict=True)
    ]
    shards = []
    for place in itertools.product(*spans):
        local = full[tuple(slice(first, last) for first, last in place)].clone()
        shards.append(TensorShard(local, tuple(full.shape), tuple(first for first, _ in place)))
    return shards


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a job whose ranks cannot communicate."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_of(
    full: torch.Tensor, mesh: Sequence[int], placements: Sequence[Placement], place: Sequence[int]
) -> torch.Tensor:
    """Return the shard that torch would give to a rank: split by one mesh dimension after another."""
    local = full
    for size, placement, index in zip(mesh, placements, place, strict=True):
        if placement.is_replicate():
            continue
        splits, dim = getattr(placement, "split_factor", 1), placement.dim  # type: ignore[attr-defined]  # not replicated
        parts = [_chunk(part, size, index, dim) for part in (_chunk(local, splits, n, dim) for n in range(splits))]
        local = torch.cat(parts, dim)
    return local.clone()


def _chunk(tensor: torch.Tensor, count: int, number: int, dim: int) -> torch.Tensor:
    chunks = tensor.chunk(count, dim) if tensor.shape[dim] else ()
    return chunks[number] if number < len(chunks) else tensor.narrow(dim, 0, 0)


def distributed(full: torch.Tensor, mesh: Sequence[int], placements: Sequence[Placement], rank: int) -> DTensor:
    """Return the DTensor of a tensor on the present rank."""
    place = torch.unravel_index(torch.tensor(rank), tuple(mesh))
    local = local_of(full, mesh, placements, [int(index) for index in place])
    # Use new names, because torch would reuse the mesh of the first rank for an equal mesh.
    names = tuple(f"rank{rank}dim{dim}" for dim in range(len(mesh)))
    device_mesh = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)
    return DTensor.from_local(
        local, device_mesh, placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )
