"""Differences between a given state and a checkpoint that torch accepts in silence: one warning names all of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.errors import StateDifferenceWarning


def _trained(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: float) -> dict[str, object]:
    model = torch.nn.Linear(4, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def path(store_path: Path) -> Path:
    """Return a store with a checkpoint of a linear layer and AdamW."""
    with Store.open(store_path, create=True) as store:
        store.save(_trained(), step=1)
    return store_path


def _warning(path: Path, state: dict[str, object]) -> str:
    with Store.open(path) as store, pytest.warns(StateDifferenceWarning) as caught:
        Checkpointer(store, state).restore()
    assert len(caught) == 1
    return str(caught[0].message)


def test_equal_state_gives_no_warning(path: Path) -> None:
    """Test the same model and optimizer, with another learning rate, as a schedule leaves it."""
    state = _trained()
    state["optimizer"].param_groups[0]["lr"] = 0.5  # type: ignore[attr-defined]  # an optimizer
    with Store.open(path) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checkpointer(store, state).restore() is not None


def test_forgotten_part_is_named(path: Path) -> None:
    """Test a state without the optimizer."""
    assert "stored, but not in the given state: optimizer" in _warning(path, {"model": torch.nn.Linear(4, 2)})


def test_optimizer_of_another_class_is_named(path: Path) -> None:
    """Test the state of AdamW in SGD, which raises KeyError at the first step."""
    text = _warning(path, _trained(torch.optim.SGD, momentum=0.9))
    assert "optimizer: param_groups.0" in text
    assert "'momentum'" in text
    assert "'betas'" in text


def test_conversions_of_tensors_are_counted(path: Path) -> None:
    """Test a float32 checkpoint in a model of half precision."""
    state = _trained()
    state["model"].half()  # type: ignore[attr-defined]  # a module
    assert "model: 2 tensors are converted from float32 to float16" in _warning(path, state)


def test_changed_hyperparameter_is_named_with_both_values(path: Path) -> None:
    """Test another weight decay in the code."""
    text = _warning(path, _trained(weight_decay=0.25))
    assert "weight_decay is 0.25 in the given optimizer, and 0.01 in the checkpoint" in text


def test_partial_load_of_a_store_gives_no_warning(path: Path) -> None:
    """Test Store.load(into=…), where a part of the checkpoint is asked for on purpose."""
    with Store.open(path) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        store.load(into={"model": torch.nn.Linear(4, 2)})
