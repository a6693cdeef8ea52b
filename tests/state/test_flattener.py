"""Test that incremental flattening equals flattening from scratch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asymcheck.errors import UnsupportedValueError
from asymcheck.state.flattener import Flattener
from asymcheck.state.leaves import Leaf
from asymcheck.state.shards import TensorShard
from asymcheck.state.walk import FlatState, flatten

# torch warns once in each process that some refused kinds of tensors are prototypes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
]
State = dict[Any, Any]
COMPLEX = torch.rand(3, dtype=torch.complex64)


@dataclasses.dataclass
class Options:
    """A typed value with a tensor and a number."""

    mean: torch.Tensor
    count: int = 0


class Part:
    """An object of a state, which counts the calls of state_dict()."""

    def __init__(self, state: object) -> None:
        """Hold a state."""
        self.state = state
        self.calls = 0

    def state_dict(self) -> Any:  # noqa: ANN401 - also what is no dict
        """Return the state."""
        self.calls += 1
        return self.state

    def load_state_dict(self, state: object) -> None:
        """Replace the state."""
        self.state = state


def state() -> State:
    """Return a state with every kind of value."""
    tied = torch.rand(4, 3)
    weights: OrderedDict[str, object] = OrderedDict(weight=tied, bias=torch.rand(3), count=torch.tensor(3))
    weights._metadata = OrderedDict([("", {"version": 1}), ("layer", {"version": 2})])  # type: ignore[attr-defined]  # as torch hangs it there
    return {
        "model": Part(weights),
        "optimizer": Part(
            {
                "state": {0: {"step": torch.tensor(1.0), "mean": torch.rand(4, 3)}, 1: {"step": 7, "mean": tied}},
                "param_groups": [{"lr": 0.1, "params": [0, 1], "betas": (0.9, 0.999)}],
            }
        ),
        "ema": [tied, torch.rand(2, 2).t(), torch.empty(0), torch.empty(0, 3)],
        "array": np.arange(5),
        "shard": TensorShard(torch.rand(2, 2), (4, 2), (2, 0)),
        "generator": torch.get_rng_state(),
        "twins": [torch.rand(2), torch.rand(2)],
        "complex": torch.rand(3, dtype=torch.complex64),
        "imaginary": COMPLEX.imag,
        "pair": [np.ones(2), torch.ones(2, dtype=torch.float64)],
        "step": 1,
        "history": {"loss": [0.5, 0.25], "at": (1, None)},
        "table": {0: {0: torch.rand(2), "mean": torch.rand(2)}, 1: {"mean": torch.rand(2), "square": torch.rand(2)}},
        5: torch.rand(2),
        "window": deque([torch.rand(2), torch.rand(3)], 4),
        "options": Options(torch.rand(2)),
        "counts": defaultdict(int, a=1, mean=torch.rand(2)),
        "seen": {1, 2},
    }


def described(flat: FlatState) -> list[object]:
    """Return all of a flattened state except for the objects with the bytes."""
    facts = [
        (one.name, one.aliases, one.dtype, one.shape, one.nbytes, one.group, repr(one.box), one.key)
        for one in flat.leaves
    ]
    return [repr(flat.tree), facts, flat.columns]


def outcome(flatten_one: Callable[[object], FlatState], value: State) -> FlatState | str:
    """Return a flattened state, or its error."""
    try:
        return flatten_one(value)
    except UnsupportedValueError as error:
        return str(error)


def _optimizer(value: State) -> State:
    found: State = value["optimizer"].state
    return found


def _strided(value: State) -> None:
    value["model"].state["weight"].t_()


def _swapped(value: State) -> None:
    value["ema"][0], value["ema"][1] = value["ema"][1], value["ema"][0]


def _set(value: State, key: object, item: object) -> None:
    value[key] = item


def _reordered(value: State) -> None:
    value["step"] = value.pop("step")


def _untied(value: State) -> None:
    value["model"].state["weight"] = torch.rand(4, 3)
    value["ema"][0], _optimizer(value)["state"][1]["mean"] = torch.rand(4, 3), torch.rand(4, 3)


def _bool_keys(value: State) -> None:
    states = _optimizer(value)["state"]
    _optimizer(value)["state"] = {False: states[0], True: states[1]}


def _versions(value: State, version: object) -> None:
    value["model"].state._metadata["layer"]["version"] = version


def _other_memory(value: State) -> None:
    tensor = _optimizer(value)["state"][0]["mean"]
    tensor.data = torch.rand(tensor.shape)


def _other_dtype(value: State) -> None:
    _optimizer(value)["state"][0]["mean"] = torch.zeros(4, 3, dtype=torch.int32)


def _view(value: State, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value["complex"] = view(value["complex"])


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda _: None,
    "a step": lambda value: _set(value, "step", 2),
    "1 is True": lambda value: _set(value, "step", True),
    "1 is 1.0": lambda value: _set(value, "step", 1.0),
    "a step is a tensor": lambda value: _set(value, "step", torch.tensor(1)),
    "a rate": lambda value: _optimizer(value)["param_groups"][0].update(lr=0.2),
    "a group": lambda value: _optimizer(value)["param_groups"].append({"lr": 1, "params": []}),
    "a history": lambda value: value["history"]["loss"].append(0.1),
    "a tensor in a history": lambda value: value["history"]["loss"].append(torch.rand(1)),
    "a count of steps": lambda value: _optimizer(value)["state"][1].update(step=8),
    "a generator": lambda value: _set(value, "generator", torch.get_rng_state()),
    "two generators": lambda value: value.update(generator=torch.get_rng_state(), array=np.arange(5)),
    "the memory of a tensor": _other_memory,
    "the dtype of a tensor": _other_dtype,
    "the strides of a tensor": _strided,
    "the strides alone": lambda value: value["ema"][1].t_(),
    "an imaginary part that is negative": lambda value: _set(value, "imaginary", COMPLEX.conj().imag),
    "less of a tensor": lambda value: _set(value, 5, value[5][:1]),
    "an array and a tensor": lambda value: value["pair"].reverse(),
    "no ties at all": _untied,
    "a tie": lambda value: _set(value, "generator", value[5]),
    "another tie": lambda value: value["ema"].__setitem__(0, torch.rand(4, 3)),
    "no tie": lambda value: value["model"].state.update(weight=torch.rand(4, 3)),
    "a view of a part": lambda value: _set(value, 5, value["model"].state["bias"][:2]),
    "two tensors": _swapped,
    "a conjugate": lambda value: _view(value, torch.Tensor.conj),
    "a negative": lambda value: _view(value, lambda tensor: tensor.conj().imag),
    "no tensor": lambda value: _set(value, 5, None),
    "an array for a tensor": lambda value: _set(value, 5, value[5].numpy()),
    "a tensor for an array": lambda value: _set(value, "array", torch.arange(5)),
    "an array": lambda value: _set(value, "array", np.arange(5)),
    "the dtype of an array": lambda value: _set(value, "array", np.arange(5.0)),
    "a parameter for a tensor": lambda value: _set(value, 5, torch.nn.Parameter(value[5])),
    "the place of a shard": lambda value: _set(value, "shard", TensorShard(value["shard"].local, (4, 2), (0, 0))),
    "the memory of a shard": lambda value: _set(value, "shard", TensorShard(torch.rand(2, 2), (4, 2), (2, 0))),
    "no shard": lambda value: _set(value, "shard", value["shard"].local),
    "an empty tensor": lambda value: value["ema"].__setitem__(2, torch.empty(0, 2)),
    "a key": lambda value: _set(value, "new", torch.rand(1)),
    "no key": lambda value: value.pop("generator", None),
    "the order": _reordered,
    "a tensor of a table": lambda value: value["table"][1].update(mean=torch.rand(2)),
    "a plain value in a table": lambda value: value["table"][1].update(mean=0.5),
    "a key in a table": lambda value: value["table"][1].update(new=torch.rand(2)),
    "the name of a key in a table": lambda value: _set(
        value["table"], 1, {"mean": torch.rand(2), "other": torch.rand(2)}
    ),
    "the order in a row of a table": lambda value: value["table"][1].update(mean=value["table"][1].pop("mean")),
    "a key in another row of a table": lambda value: value["table"][0].update(square=value["table"][1].pop("square")),
    "the type of a key in a table": lambda value: _set(
        value["table"], 0, {False: torch.rand(2), "mean": torch.rand(2)}
    ),
    "the kind of a row of a table": lambda value: _set(value["table"], 1, OrderedDict(value["table"][1])),
    "a row of a table that is a tensor": lambda value: _set(value["table"], 1, torch.rand(2)),
    "a row of a table": lambda value: _set(value["table"], 2, {"mean": torch.rand(2)}),
    "the order of a table": lambda value: _set(value["table"], 0, value["table"].pop(0)),
    "the key of a row of a table": lambda value: _set(value["table"], 3, value["table"].pop(1)),
    "the kind of a table": lambda value: _set(value, "table", OrderedDict(value["table"])),
    "the versions of a row of a table": lambda value: _set(value["table"], 1, Part(value["table"][1])),
    "the type of a key": _bool_keys,
    "the kind of a mapping": lambda value: _set(value, "history", OrderedDict(value["history"])),
    "the kind of a list": lambda value: _set(value, "ema", tuple(value["ema"])),
    "twins that are one": lambda value: _set(value, "twins", [value[5].clone()] * 2),
    "a twin that is the other": lambda value: _set(value, "twins", [value["twins"][0]] * 2),
    "the name of a tensor": lambda value: _optimizer(value)["state"].update(
        {0: {"step": torch.tensor(1.0), "average": torch.rand(4, 3)}}
    ),
    "the kind of a mapping of tensors": lambda value: _optimizer(value)["state"].update(
        {0: OrderedDict(_optimizer(value)["state"][0])}
    ),
    "a sparse tensor": lambda value: _set(value, 5, torch.rand(2).to_sparse()),
    "a sparse matrix": lambda value: value["ema"].__setitem__(0, torch.rand(4, 3).to_sparse_csr()),
    "a nested tensor": lambda value: _set(value, 5, torch.nested.nested_tensor([torch.rand(2)])),
    "an object": lambda value: _set(value, "history", Part(value["history"])),
    "a version": lambda value: _versions(value, 3),
    "a version that is True": lambda value: _versions(value, True),
    "a tensor among versions": lambda value: _versions(value, torch.rand(1)),
    "the length of a window": lambda value: _set(value, "window", deque(value["window"], 5)),
    "a list for a window": lambda value: _set(value, "window", list(value["window"])),
    "an item of a window": lambda value: value["window"].append(torch.rand(3)),
    "a tensor in a window": lambda value: value["window"].__setitem__(0, torch.rand(2)),
    "a field": lambda value: setattr(value["options"], "count", value["options"].count + 1),
    "a tensor in a field": lambda value: setattr(value["options"], "count", torch.rand(1)),
    "a dict for an object": lambda value: _set(value, "options", vars(value["options"])),
    "a factory": lambda value: _set(value, "counts", defaultdict(float, value["counts"])),
    "a count": lambda value: value["counts"].update(a=2),
    "a set": lambda value: value["seen"].add(len(value["seen"])),
    "no versions": lambda value: _set(value, "model", Part(OrderedDict(value["model"].state))),
}


TWICE = {"the strides alone", "an array and a tensor", "a generator", "a history"}
"""Changes that can be applied again after the change."""


@pytest.mark.slow
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=6))
@settings(deadline=None, max_examples=300)
def test_one_state_after_another_is_as_if_each_were_the_first(changes: Sequence[str]) -> None:
    """Test any sequence of changes."""
    value, flattener = state(), Flattener()
    for change in ["nothing", *(one for each in changes for one in ("nothing", each)), "nothing"]:
        # A change may need an entry that an earlier change has removed.
        try:
            CHANGES[change](value)
        except (KeyError, AttributeError, TypeError, RuntimeError):
            continue
        flat, alone = outcome(flattener.flatten, value), outcome(flatten, value)
        if isinstance(flat, FlatState) and isinstance(alone, FlatState):
            assert described(flat) == described(alone)
            assert all(map(_is_same, flat.leaves, alone.leaves))
        else:
            assert flat == alone


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_state_is_seen(change: str) -> None:
    """Test each change alone, from an unchanged state, and its repetition."""
    value, flattener = state(), Flattener()
    for _ in range(2):
        flattener.flatten(value)
        flattener.flatten(value)
        CHANGES[change](value)
        flat, alone = outcome(flattener.flatten, value), outcome(flatten, value)
        if not isinstance(flat, FlatState) or not isinstance(alone, FlatState):
            assert flat == alone
            return
        assert described(flat) == described(alone)
        if change not in TWICE:
            return


def _is_same(one: Leaf, other: Leaf) -> bool:
    """Return whether two leaves have the same memory."""
    if isinstance(one.source, torch.Tensor) and isinstance(other.source, torch.Tensor):
        return one.source.data_ptr() == other.source.data_ptr() and one.source.stride() == other.source.stride()
    return one.source is other.source


@pytest.mark.parametrize(
    "change",
    ["nothing", "a step", "a rate", "a history", "a generator", "a count of steps", "a field", "a set", "a count"],
)
def test_changing_values_do_not_trigger_a_walk(change: str) -> None:
    """Test that the columns of tensors stay the same object."""
    value, flattener = state(), Flattener()
    flattener.flatten(value)
    before = flattener.flatten(value)
    CHANGES[change](value)
    assert flattener.flatten(value).columns is before.columns


def test_numbers_of_a_generator_do_not_trigger_a_walk() -> None:
    """Test that a generator, whose state is a new tensor each time, keeps the description of the other values."""
    value = {"draws": torch.Generator(), "numpy": np.random.default_rng(1), **state()}
    flattener = Flattener()
    flattener.flatten(value)
    before = flattener.flatten(value)
    torch.rand(1, generator=value["draws"])
    value["numpy"].random()
    after = flattener.flatten(value)
    assert after.columns is before.columns
    assert after.tree == flatten(value).tree != before.tree
    assert after.leaves[0].some_bytes(0, 5056) == value["draws"].get_state().numpy().tobytes()


def test_objects_are_asked_once_even_after_a_change() -> None:
    """Test a state_dict() that is slow or has side effects."""
    value, flattener = state(), Flattener()
    flattener.flatten(value)
    flattener.flatten(value)
    value[5] = None
    part = value["model"]
    part.calls = 0
    flattener.flatten(value)
    assert part.calls == 1


@pytest.mark.slow
def test_no_tensor_is_kept() -> None:
    """Test that memory that was freed between two saves is not kept."""
    value, flattener = state(), Flattener()
    tensor = weakref.ref(value[5])
    flattener.flatten(value)
    flattener.flatten(value)
    del value[5]
    gc.collect()
    assert tensor() is None


def test_unsupported_value_is_named_after_a_change() -> None:
    """Test a value that replaces a tensor; the next state is walked."""
    value, flattener = state(), Flattener()
    flattener.flatten(value)
    flattener.flatten(value)
    value["ema"][1] = torch.rand(2, 2).to_sparse()
    with pytest.raises(UnsupportedValueError, match=r"ema\.1"):
        flattener.flatten(value)
    value["ema"][1] = torch.rand(2, 2)
    assert described(flattener.flatten(value)) == described(flatten(value))


def test_a_tensor_without_bytes_is_refused_where_one_with_bytes_was() -> None:
    """Test without an empty tensor next to it, because empty tensors share one address."""
    flattener = Flattener()
    for _ in range(3):
        flattener.flatten([torch.rand(2)])
    with pytest.raises(UnsupportedValueError, match="meta device"):
        flattener.flatten([torch.rand(2, device="meta")])


def test_states_of_two_trainings_are_distinct() -> None:
    """Test a copy of a state with separate memory."""
    value, flattener = state(), Flattener()
    flattener.flatten(value)
    flattener.flatten(value)
    other = copy.deepcopy(value)
    assert described(flattener.flatten(other)) == described(flatten(other))
