"""Test the garbage of a step: a full collection of Python would stall training for hundreds of milliseconds."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict

import pytest
import torch

from asymcheck.errors import UnsupportedValueError
from asymcheck.state.flattener import Flattener
from asymcheck.state.walk import flatten

TENSORS_PER_PARAMETER = 4
"""State of AdamW: weights, two moments and a count."""


def _state() -> dict[str, object]:
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(100))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 0}


@pytest.mark.slow
def test_a_state_that_is_flattened_again_leaves_little_to_the_collector() -> None:
    """Test one object for each tensor; its description and its node are shared between steps."""
    state, flattener = _state(), Flattener()
    kept = [flattener.flatten(state) for _ in range(2)]
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        kept += [flattener.flatten(state) for _ in range(3)]
        gc.collect(0)
        made = (len(gc.get_objects()) - before) / 3
    finally:
        gc.enable()
    tensors = len(kept[0].leaves)
    assert tensors == TENSORS_PER_PARAMETER * 200
    assert made < 1.5 * tensors
    assert all(one.tree == kept[0].tree for one in kept)


def test_nodes_are_never_confused() -> None:
    """Test True, 1 and 1.0, which are equal and hash alike, and tensors, arrays, rows and keys that differ once."""
    tensor = torch.ones(3)
    states = [
        *({"a": value} for value in (True, 1, 1.0, "1", None, 2)),
        *({"a": tensor}, {"a": tensor.numpy()}, {"b": tensor}, {"a": 0, "b": tensor}, {"b": tensor, "a": 0}),
        {1: tensor},
        {"x": torch.zeros(1), "a": tensor},
        {str(number): number for number in range(40)},
        {str(number): torch.ones(1) for number in range(40)},
    ]
    trees = [repr(flatten(state).tree) for state in states]
    assert len(set(trees)) == len(states)
    assert trees == [repr(flatten(copy.copy(state)).tree) for state in states]


def _versions(*modules: tuple[object, object]) -> OrderedDict[object, object]:
    return OrderedDict((module, {"version": version}) for module, version in modules)


@pytest.mark.parametrize(
    "metadata",
    [
        _versions(("", 1), ("layer", 2)),
        _versions(("layer", 2), ("", 1)),
        _versions(("", True), ("layer", 2)),
        _versions(("", 1.0), ("layer", 2)),
        _versions(("", 1 << 70)),
        _versions(("Schicht größer", 1)),
        _versions((3, 1)),
        _versions(),
        OrderedDict(a={"version": 1, "more": 2}),
        OrderedDict(a={"Version": 1}),
        OrderedDict(a={}),
        OrderedDict(a=OrderedDict(version=1)),
        OrderedDict(a=[1]),
        {"": {"version": 1}},
        OrderedDict(a={"version": torch.ones(2)}),
    ],
)
def test_module_versions_equal_a_walk(metadata: object) -> None:
    """Test the versions of modules in the first states, and in states that are compared with an earlier one."""
    flattener, weight = Flattener(), torch.ones(2)
    for _ in range(4):
        state: OrderedDict[str, object] = OrderedDict(weight=weight)
        state._metadata = metadata  # type: ignore[attr-defined]  # as torch hangs it there
        tree = flattener.flatten({"model": state}).tree
        node = repr(tree[1][0][1][2])  # type: ignore[index]  # a node is a nested list
        assert node.replace("['T', 1]", "['T', 0]") == repr(flatten(metadata).tree)


def test_a_version_that_equals_the_previous_one_has_its_own_node() -> None:
    """Test True and 1.0 after versions of 1, which are equal to them."""
    flattener, weight = Flattener(), torch.ones(2)
    for version in (1, 1, 1, True, 1, 1, 1, 1.0):
        state: OrderedDict[str, object] = OrderedDict(weight=weight)
        state._metadata = _versions(("", version))  # type: ignore[attr-defined]  # as torch hangs it there
        assert repr(flattener.flatten({"model": state}).tree) == repr(flatten({"model": state}).tree)


def test_a_module_whose_name_cannot_be_stored_is_named() -> None:
    """Test that the error is the same as for any other key."""
    state: OrderedDict[str, object] = OrderedDict(weight=1)
    state._metadata = _versions(("\ud800", 1))  # type: ignore[attr-defined]  # as torch hangs it there
    with pytest.raises(UnsupportedValueError, match=r"cannot store state at model\._metadata"):
        flatten({"model": state})
