"""Test that tensors owned by optimizers are found incrementally, with the results of a full search."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.capture.optimizer_fence import OptimizerFences, OptimizerOwnership
from asymcheck.errors import CaptureWarning
from asymcheck.state.flattener import Flattener
from asymcheck.state.shards import TensorShard
from asymcheck.state.walk import flatten

State = dict[Any, Any]


class Trained:
    """A training with a parameter outside of the model, and a buffer of which the state has one half."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterList(torch.rand(3) for _ in range(3))
        self.hidden = torch.nn.Parameter(torch.rand(3))
        self.optimizer = torch.optim.AdamW([*self.model, self.hidden])
        for parameter in (*self.model, self.hidden):
            parameter.grad = torch.rand(3)
        self.optimizer.step()
        self.both = torch.rand(6)
        self.value: State = {
            "model": self.model,
            "optimizer": self.optimizer,
            "buffer": self.both[:3],
            "hidden": self.hidden.data,
            "rng": torch.get_rng_state(),
        }

    def owned(self, ownership: OptimizerOwnership, flattener: Flattener) -> tuple[bool, ...]:
        """Return the tensors that may be captured later."""
        return ownership.deferred_rows(flattener.flatten(self.value), [self.optimizer])

    def move_mean(self, tensor: torch.Tensor) -> None:
        """Move a part of the optimizer's state in memory."""
        self.optimizer.state[self.model[0]]["exp_avg"] = tensor

    def lose_parameter(self) -> None:
        """Remove a parameter from the optimizer."""
        self.optimizer.state.pop(self.optimizer.param_groups[0]["params"].pop())


OWNERS: dict[str, Callable[[Trained], object]] = {
    "nothing": lambda _: None,
    "a generator": lambda it: it.value.update(rng=torch.get_rng_state()),
    "a buffer elsewhere": lambda it: it.value.update(buffer=torch.rand(3)),
    "a buffer that is a parameter's": lambda it: it.value.update(buffer=it.model[0].data[:2]),
    "a buffer that is all of a parameter": lambda it: it.value.update(buffer=it.hidden.data, hidden=torch.rand(3)),
    "a buffer that an optimizer has": lambda it: it.optimizer.add_param_group(
        {"params": [it.value["buffer"].requires_grad_()]}
    ),
    "a parameter that none has": Trained.lose_parameter,
    "one more that is no optimizer's": lambda it: it.value.update(more=torch.rand(1)),
    "state that none has": lambda it: it.optimizer.state.pop(it.model[0]),
    "state elsewhere": lambda it: it.move_mean(torch.rand(3)),
    "state where a buffer is": lambda it: it.move_mean(it.both[3:]),
    "a parameter elsewhere": lambda it: setattr(it.model[0], "data", torch.rand(3)),
    "a parameter that is not there elsewhere": lambda it: setattr(it.hidden, "data", torch.rand(3)),
    "a parameter that is frozen": lambda it: it.model[1].requires_grad_(False),
    "a parameter that is frozen no more": lambda it: it.model[1].requires_grad_(True),
    "an array of a parameter": lambda it: it.value.update(rng=it.model[0].detach().numpy()),
}


@pytest.mark.slow
@given(st.lists(st.sampled_from(sorted(OWNERS)), max_size=5))
@settings(deadline=None)
def test_owned_tensors_are_found_in_every_state(changes: Sequence[str]) -> None:
    """Test that no tensor is wrongly assigned to an optimizer, because its capture would be torn."""
    training, ownership, flattener = Trained(), OptimizerOwnership(), Flattener()
    for change in ["nothing", "nothing", *changes]:
        try:
            OWNERS[change](training)
        except (IndexError, ValueError, KeyError):
            continue
        assert training.owned(ownership, flattener) == training.owned(OptimizerOwnership(), Flattener())


@pytest.mark.parametrize("change", OWNERS)
def test_change_of_ownership_is_detected(change: str) -> None:
    """Test each kind of change separately."""
    training, ownership, flattener = Trained(), OptimizerOwnership(), Flattener()
    training.owned(ownership, flattener)
    OWNERS[change](training)
    assert training.owned(ownership, flattener) == training.owned(OptimizerOwnership(), Flattener())


def test_replaced_array_is_checked_again() -> None:
    """Test that a reused id of a freed array is not trusted."""
    training, ownership = Trained(), OptimizerOwnership()
    training.value["rng"] = np.zeros(3)
    flat = flatten(training.value)
    assert all(ownership.deferred_rows(flat, [training.optimizer])[:2])
    array = flat.columns.names.index("rng")
    flat.leaves[array] = dataclasses.replace(flat.leaves[array], source=training.model[0].detach().numpy())
    assert ownership.deferred_rows(flat, [training.optimizer])[:2] == (False, True)


def test_replaced_embedding_with_scaled_rows_is_found() -> None:
    """Test an embedding with ``max_norm``, which changes a weight of the optimizer in each call."""
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(4, 2), "out": torch.nn.Linear(2, 2, bias=False)})
    ownership, found = OptimizerOwnership(), []
    for bound in (None, None, 1.0, 1.0, None):
        model["words"] = torch.nn.Embedding(4, 2, max_norm=bound)
        flat = flatten({"model": model})
        assert flat.columns.names == ("model.words.weight", "model.out.weight")
        found.append(ownership.deferred_rows(flat, [torch.optim.SGD(model.parameters())], modules=[model]))
    assert found == [(True, True), (True, True), (False, True), (False, True), (True, True)]


def test_one_object_that_stands_for_two_parts_is_an_optimizers_in_both() -> None:
    """Test rows of two ranks in one tensor."""
    weight = torch.nn.Parameter(torch.rand(2, 2))
    optimizer = torch.optim.SGD([weight])
    parts = [TensorShard(weight, (4, 2), (offset, 0)) for offset in (0, 2)]
    flat = flatten({"parts": parts, "buffer": torch.rand(1)})
    assert OptimizerOwnership().deferred_rows(flat, [optimizer]) == (True, True, False)


def test_a_frozen_parameter_is_no_optimizers() -> None:
    """Test that a frozen parameter is captured in ``step()``, because ``forward`` may change it, as an average."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("trained", "average")})
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.rand(2, 2)
    optimizer.step()
    flat = flatten({"model": model, "optimizer": optimizer})
    assert flat.columns.names[:2] == ("model.trained.weight", "model.average.weight")
    ownership, named = OptimizerOwnership(), OptimizerOwnership(["*.average.*"])
    found = [ownership.deferred_rows(flat, [optimizer])]
    model["average"].requires_grad_(False)
    found += [each.deferred_rows(flat, [optimizer]) for each in (ownership, named)]
    assert found == [(True, True, True, True), (True, False, True, False), (True, True, True, False)]


def test_a_wrapper_of_an_optimizer_need_not_have_its_state() -> None:
    """Test that state that the wrapper does not show is copied in ``step()``."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups = inner.param_groups

    weight = torch.nn.Parameter(torch.rand(2))
    flat = flatten({"weight": weight, "buffer": torch.rand(1)})
    assert OptimizerOwnership().deferred_rows(flat, [Wrapper(torch.optim.SGD([weight]))]) == (True, False)


def test_state_in_lists_is_an_optimizers() -> None:
    """Test the history of LBFGS, which has a hundred times the bytes of the parameters."""
    weight = torch.nn.Parameter(torch.rand(2))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"history": [torch.rand(2), [torch.rand(1)]], "others": {"of": (torch.rand(3),)}}
    flat = flatten({"weight": weight, "optimizer": optimizer, "buffer": torch.rand(1)})
    assert OptimizerOwnership().deferred_rows(flat, [optimizer]) == (True, True, True, True, False)


def test_methods_of_a_wrapper_do_not_count_as_those_of_its_optimizer() -> None:
    """Test a wrapper as in Accelerate, which has ``eval()`` for every optimizer."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

        def eval(self) -> None:
            """Do nothing."""

    class Exchanging(torch.optim.SGD):
        def eval(self) -> None:
            """Do nothing."""

    weight = torch.nn.Parameter(torch.rand(2))
    wrappers = [Wrapper(kind([weight])) for kind in (torch.optim.SGD, Exchanging)]
    fences = OptimizerFences(lambda: None)
    assert fences.trusted([*wrappers, wrappers[1].optimizer]) == wrappers[:1]
    fences.remove()


def test_an_empty_tensor_is_no_optimizers() -> None:
    """Test that an empty tensor, which has no memory, is ignored."""
    weight = torch.nn.Parameter(torch.rand(4)[:0])
    flat = flatten({"weight": [weight], "buffer": torch.rand(4)[:0]})
    optimizer = torch.optim.SGD([weight.detach().requires_grad_()])
    assert OptimizerOwnership().deferred_rows(flat, [optimizer]) == (False, False)


def test_an_empty_view_of_an_owned_tensor_changes_nothing() -> None:
    """Test an empty part of a flat buffer, as of a rank that has nothing of a parameter."""
    flat_buffer = torch.nn.Parameter(torch.rand(4))
    flat = flatten({"weight": flat_buffer, "nothing": flat_buffer.detach()[4:]})
    assert OptimizerOwnership().deferred_rows(flat, [torch.optim.SGD([flat_buffer])]) == (True, False)


def test_named_tensor_that_shares_memory_with_others_is_not_deferred() -> None:
    """Test that a name does not hide that another value of the state may change the tensor."""
    average = torch.rand(8)
    flat = flatten({"average": average, "view": average[:2], "other": torch.rand(1), "array": np.zeros(1)})
    ownership = OptimizerOwnership(("average", "other", "array"))
    found = dict(zip(flat.columns.names, ownership.deferred_rows(flat, []), strict=True))
    assert found == {"average": False, "view": False, "other": True, "array": False}


def test_pattern_without_a_match_is_reported_once() -> None:
    """Test that a wrong name is not ignored in silence."""
    ownership = OptimizerOwnership(("averages.*", "average"))
    with pytest.warns(CaptureWarning, match=r"averages\.\* matches no tensor"):
        ownership.deferred_rows(flatten({"average": torch.rand(1)}), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ownership.deferred_rows(flatten({"average": torch.rand(1), "more": torch.rand(1)}), [])
