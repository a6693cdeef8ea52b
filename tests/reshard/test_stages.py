"""Test pipeline stages: an optimizer never receives the numbered state of another stage."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from asymcheck import Store
from asymcheck.errors import StateMismatchError
from tests.reshard.ranks import save_ranks

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


FIRST, SECOND = ("in", "a", "b"), ("in", "c", "d")
"""Layers of each stage; one layer is in both, as with tied embeddings."""


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Return a new store."""
    with Store.open(store_path, create=True) as opened:
        yield opened


def _stage(layers: Sequence[str], seed: int = 0) -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in layers})


def _trained(layers: Sequence[str], make: MakeOptimizer = torch.optim.Adam) -> dict[str, object]:
    """Return a stage and its optimizer after two steps; the values of a layer follow from its name."""
    model = _stage(layers)
    optimizer = make(list(model.parameters()))
    for _ in range(2):
        for name, layer in model.items():
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, float(ord(name[0])))
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _assert_moments(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    wanted = _trained([*model])
    for mine, other in zip(model.parameters(), wanted["model"].parameters(), strict=True):  # type: ignore[attr-defined]  # a module
        assert torch.equal(optimizer.state[mine]["exp_avg"], wanted["optimizer"].state[other]["exp_avg"])  # type: ignore[attr-defined]  # an optimizer


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("shared", [0, 1])
def test_numbers_of_another_stage_are_refused(store: Store, is_last: bool, shared: int) -> None:
    """Test that the error has advice and is raised before a write, with the optimizer before and after its module."""
    first, second = FIRST[1 - shared :], SECOND[1 - shared :]
    save_ranks(store, [_trained(first), _trained(second)])
    for rank, layers, theirs in ((1, first, 1), (2, second, 0)):
        model = _stage(layers, seed=1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        pairs: list[tuple[str, object]] = [("model", model), ("optimizer", torch.optim.Adam(model.parameters()))]
        with pytest.raises(StateMismatchError, match="nothing was overwritten") as error:
            store.load(into=dict(pairs if is_last else pairs[::-1]), rank=rank)
        place = f"model.{layers[shared]}.weight"
        assert f"  optimizer: its parameters are numbered as rank {theirs} has them, which saved no {place}" in str(
            error.value
        )
        assert "get_optimizer_state_dict" in str(error.value)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(("rank", "layers"), [(0, FIRST), (1, SECOND), (3, SECOND)])
def test_stage_restores_its_own_optimizer(store: Store, rank: int, layers: Sequence[str]) -> None:
    """Test the same number of ranks, and more ranks that read their own stage."""
    save_ranks(store, [_trained(FIRST), _trained(SECOND)])
    model = _stage(layers, seed=1)
    optimizer = torch.optim.Adam(model.parameters())
    store.load(into={"model": model, "optimizer": optimizer}, rank=rank)
    _assert_moments(model, optimizer)


@pytest.mark.parametrize("rank", range(4))
def test_moments_by_name_come_back_by_any_number_of_ranks(store: Store, rank: int) -> None:
    """Test the advice of the error."""
    states, by_name = [], StateDictOptions(flatten_optimizer_state_dict=True)
    for layers in (FIRST, SECOND):
        state = _trained(layers, partial(torch.optim.Adam, lr=0.5))
        named = get_optimizer_state_dict(state["model"], state["optimizer"], options=by_name)  # type: ignore[arg-type]  # module and optimizer
        states.append({**state, "optimizer": named})
    save_ranks(store, states)
    model = _stage((FIRST, SECOND)[rank // 2], seed=1)
    optimizer = torch.optim.Adam(model.parameters())
    named = get_optimizer_state_dict(model, optimizer, options=by_name)
    names = {*named}
    store.restore(into={"model": model, "optimizer": named}, rank=rank, grows=True, world_size=4)
    assert not any(isinstance(named[name], torch.Tensor) for name in named.keys() - names)
    set_optimizer_state_dict(model, optimizer, named, options=by_name)
    _assert_moments(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.step()


def test_an_optimizer_without_moments_has_nothing_of_another_stage(store: Store) -> None:
    """Test groups that are equal on all stages."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    save_ranks(store, [_trained(FIRST, make), _trained(SECOND, make)])
    model = _stage(FIRST, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store.load(into={"model": model, "optimizer": optimizer}, rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("rest", [{}, {"model": {}}, {"model": ("a", "b")}], ids=["none", "empty", "some"])
def test_replicas_saved_by_rank_0_are_no_other_stage(store: Store, rest: dict[str, Sequence[str]]) -> None:
    """Test ranks with the same model, of which rank 1 saves none or a part, and its own optimizer."""
    state = _trained(FIRST)
    model: dict[str, torch.Tensor] = state["model"].state_dict()  # type: ignore[attr-defined]  # a module
    kept = {
        name: {key: value for key, value in model.items() if key.split(".")[0] in layers}
        for name, layers in rest.items()
    }
    save_ranks(store, [state, {"optimizer": state["optimizer"], **kept}])
    mine = _stage(FIRST, seed=1)
    optimizer = torch.optim.Adam(mine.parameters())
    store.load(into={"model": mine, "optimizer": optimizer}, rank=1)
    assert all(torch.equal(value, model[name]) for name, value in mine.state_dict().items())
    _assert_moments(mine, optimizer)


def test_a_module_that_takes_old_names_is_no_other_stage(store: Store) -> None:
    """Test a name that no rank has, which cannot belong to another rank."""
    save_ranks(store, [_trained(FIRST), _trained(FIRST)])
    model = _stage(("in", "x", "b"), seed=1)

    def rename(_module: object, state: dict[str, torch.Tensor], *_more: object) -> None:
        for key in ("weight", "bias"):
            state[f"x.{key}"] = state.pop(f"a.{key}")

    model.register_load_state_dict_pre_hook(rename)
    optimizer = torch.optim.Adam(model.parameters())
    store.load(into={"model": model, "optimizer": optimizer}, rank=3)
    assert all(state["exp_avg"].any() for state in optimizer.state.values())
