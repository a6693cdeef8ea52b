"""Test consecutive sharded states: layouts are compared, and recomputed after a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from asymcheck import TensorShard
from asymcheck.errors import UnsupportedValueError
from asymcheck.state.flattener import Flattener
from asymcheck.state.walk import FlatState, flatten
from tests.reshard.ranks import as_rank
from tests.state.test_flattener import described

State = dict[str, Any]


def _state() -> State:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("a", "b"))
    part = torch.rand(4, 4)
    return {
        "mesh": [4, 2, 2],
        "weight": DTensor.from_local(part, mesh, [Shard(0), Replicate()], run_check=False),
        "tied": DTensor.from_local(part, mesh, [Shard(0), Replicate()], run_check=False),
        "bias": DTensor.from_local(torch.rand(2), mesh, [Replicate(), Shard(0)], run_check=False),
        "part": TensorShard(torch.rand(2, 2), (4, 2), (2, 0)),
        "plain": torch.rand(4, 4),
    }


def _laid_out(state: State, *placements: Any) -> None:  # noqa: ANN401 - placements have no type in all versions of torch
    one = state["weight"]
    state["weight"] = DTensor.from_local(one.to_local(), one.device_mesh, [*placements], run_check=False)


def _remade(one: DTensor, local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...]) -> DTensor:
    """Return a DTensor with the same placement objects, as modules create it in each step."""
    strides = tuple(torch.empty(shape, device="meta").stride())
    made = DTensor.from_local(local, mesh, one.placements, run_check=False, shape=torch.Size(shape), stride=strides)
    made._spec.placements = one._spec.placements
    return made


def _other_mesh(state: State) -> None:
    one = state["weight"]
    mesh = DeviceMesh("cpu", torch.tensor([[3, 2], [1, 0]]), mesh_dim_names=("a", "b"))
    state["weight"] = _remade(one, one.to_local(), mesh, one.shape)


def _padded(state: State) -> None:
    """Return a tensor whose whole has more rows, while this rank keeps its number of rows."""
    one = state["weight"]
    state["weight"] = _remade(one, one.to_local(), one.device_mesh, (7, 4))


def _elsewhere(state: State) -> None:
    one = state["bias"]
    state["bias"] = _remade(one, torch.rand(2), one.device_mesh, one.shape)


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda _: None,
    "values": lambda state: state["weight"].to_local().fill_(1),
    "memory": _elsewhere,
    "the dimension": lambda state: _laid_out(state, Shard(1), Replicate()),
    "the dimension of the mesh": lambda state: _laid_out(state, Replicate(), Shard(0)),
    "no longer cut": lambda state: _laid_out(state, Replicate(), Replicate()),
    "sums": lambda state: _laid_out(state, Partial(), Replicate()),
    "another mesh": _other_mesh,
    "the whole": _padded,
    "no DTensor": lambda state: state.update(weight=state["weight"].to_local()),
    "a DTensor": lambda state: state.update(plain=state["weight"]),
    "a part": lambda state: state.update(bias=TensorShard(torch.rand(2), (4,), (0,))),
    "a part elsewhere": lambda state: state.update(part=TensorShard(state["part"].local, (4, 2), (0, 0))),
    "no part": lambda state: state.update(part=state["part"].local),
}


def _outcome(flatten_one: Callable[[object], FlatState], state: State) -> object:
    try:
        return described(flatten_one(state))
    except UnsupportedValueError as error:
        return str(error)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_change_of_a_layout_is_seen(change: str, rank: int) -> None:
    """Test changes that leave the other properties equal."""
    with as_rank(rank, 4):
        state, flattener = _state(), Flattener()
        for _ in range(3):
            before = flattener.flatten(state)
        CHANGES[change](state)
        assert _outcome(flattener.flatten, state) == _outcome(flatten, state)
        if change in {"nothing", "values", "memory"}:
            assert flattener.flatten(state).columns is before.columns
