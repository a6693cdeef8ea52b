"""Test that a state that does not match the checkpoint is refused before any byte is overwritten."""

import copy
import re
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asymcheck import Store
from asymcheck.errors import InvalidInputError, PartialRestoreError, StateDifferenceWarning, StateMismatchError

BIG = 3_000_000


def _read_only() -> np.ndarray:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


MISFITS: dict[str, tuple[object, object, str]] = {
    "shape": (torch.ones(4), torch.zeros(5), r"b: float32 \[5\] is given, but float32 \[4\] is stored"),
    "dimensions": (torch.ones(4), torch.zeros(4, 1), r"\[4, 1\]"),
    "dtype": (torch.ones(4), torch.zeros(4, dtype=torch.bfloat16), "bfloat16 .* is given, but float32"),
    "dtype of an array": (np.ones(4), np.zeros(4, dtype=np.float32), "float32 .* is given, but float64"),
    "dtype without a name": (np.ones(4), np.zeros(4, dtype=">f8"), "portable"),
    "a number where a tensor is given": (1.0, torch.zeros(4), "a tensor is given, but float is stored"),
    "a mapping where a tensor is given": ({"x": 1}, torch.zeros(4), "a tensor is given, but dict is stored"),
    "a tensor where a mapping is given": (torch.ones(4), {"x": 1}, "a mapping is given"),
    "a list where a mapping is given": ([1], {"x": 1}, "a mapping is given, but list is stored"),
    "a key that is not stored": ({"x": 1}, {"x": 1, "y": 1}, r"b\.y: is not in the checkpoint"),
    "a longer list": ([1, 2], [1, 2, 3], "a list of 3 is given"),
    "a shorter list": ([1, 2], [1], "a list of 1 is given"),
    "a tuple for a list": ([1, 2], (1, 2), "a tuple of 2 is given"),
    "an object for a number": (3, torch.nn.Linear(2, 2), "an object with load_state_dict"),
    "a key of another type": ({1: 2}, {"1": 2}, r"b\.1: is not in the checkpoint"),
    "a read-only array": (np.ones(4), _read_only(), "b: .*read-only"),
    "an array that runs backwards": (np.ones(4), np.zeros(4)[::-1], "b: .*strides"),
    "an expanded tensor": (torch.ones(4, 3), torch.zeros(4, 1).expand(4, 3), "b: .*expanded"),
    "a tensor without memory": (torch.ones(4), torch.zeros(4, device="meta"), "b: .*meta"),
    "an object that cannot be filled": ({"x": 1}, object(), "b: .*object"),
    "a mapping that cannot be filled": ({"x": 1}, UserDict(x=2), "b: .*UserDict"),
    "a set": ([1], {1}, "b: .*set"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_nothing_is_overwritten_when_something_does_not_fit(store: Store, name: str) -> None:
    """Test that the error names path and reason, and that matching tensors keep their values."""
    stored, given, message = MISFITS[name]
    store.save({"a": torch.ones(BIG), "b": stored, "c": torch.ones(3)}, step=1)
    into = {"c": torch.zeros(3), "a": torch.zeros(BIG), "b": given}
    with pytest.raises(StateMismatchError, match=message):
        store.load(into=into)
    assert into["a"].count_nonzero() == into["c"].count_nonzero() == 0  # type: ignore[attr-defined]  # tensors, see above
    assert into["b"] is given


def test_everything_that_does_not_fit_is_listed(store: Store) -> None:
    """Test that one error lists up to twenty mismatches, and the number of the others."""
    store.save({f"t{i}": torch.ones(2) for i in range(30)}, step=1)
    with pytest.raises(StateMismatchError, match="and 10 more") as caught:
        store.load(into={f"t{i}": torch.zeros(3) for i in range(30)})
    assert str(caught.value).count("is stored") == 20
    first = str(caught.value).partition("\n")[0]
    assert re.fullmatch(
        r"the given state does not fit step 1 \(.*\) of run 'default' in store .*; nothing was overwritten\. Build .*:",
        first,
    )


def test_root_may_not_fit(store: Store) -> None:
    """Test a state of another type."""
    store.save({"a": 1}, step=1)
    for into in ([1], torch.ones(2), (1,)):
        with pytest.raises(StateMismatchError):
            store.load(into=into)


@pytest.mark.parametrize(
    "into", [3, "model", object(), {}, [], torch.nn.Linear], ids=lambda value: type(value).__name__
)
def test_unfillable_value_is_refused(store: Store, into: object) -> None:
    """Test that a value that cannot be filled is not ignored, because training would continue with old values."""
    store.save({"a": 1, "b": torch.ones(1)}, step=1)
    with pytest.raises(InvalidInputError, match="into"):
        store.load(into=into)


def _net(width: int, *, bias: bool = True) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, width, bias=bias))


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "another width": (lambda: _net(7), r"model\.1\.weight: float32 \[7, 1000\] is given, but float32 \[5, 1000\]"),
    "a parameter more": (lambda: torch.nn.Sequential(*_net(5), torch.nn.Linear(2, 2)), r"model\.2\.weight: is not in"),
    "a parameter less": (lambda: _net(5, bias=False), r"model\.1\.bias: is stored, but not in"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_does_not_fit_keeps_its_values(store: Store, name: str) -> None:
    """Test a module that `load_state_dict` would fill half-way before its error."""
    store.save({"model": _net(5), "a": torch.ones(BIG)}, step=1)
    make, message = MODULES[name]
    model = make()
    into = {"a": torch.zeros(BIG), "model": model}
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=message):
        store.load(into=into)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert into["a"].count_nonzero() == 0  # type: ignore[operator]  # a tensor, as written above


def test_a_module_of_another_dtype_is_filled_with_rounded_values(store: Store) -> None:
    """Test a float32 checkpoint and a bfloat16 model, because `load_state_dict` converts."""
    model = torch.nn.Linear(100, 100)
    store.save({"model": model}, step=1)
    other = torch.nn.Linear(100, 100).bfloat16()
    with pytest.warns(StateDifferenceWarning, match="2 tensors are converted from float32 to bfloat16"):
        store.load(into={"model": other})
    assert torch.equal(other.weight, model.weight.bfloat16())


def test_a_module_that_renames_old_parameters_may_do_so(store: Store) -> None:
    """Test that names are not checked if a hook of the module changes them."""

    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.new = torch.nn.Linear(60, 60)
            self.register_load_state_dict_pre_hook(self._rename)

        @staticmethod
        def _rename(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
            del module, rest
            for name in ("weight", "bias"):
                state[f"{prefix}new.{name}"] = state.pop(f"{prefix}old.{name}")

    old = torch.nn.ModuleDict({"old": torch.nn.Linear(60, 60)})
    store.save({"model": old}, step=1)
    model = Renamed()
    store.load(into={"model": model})
    assert torch.equal(model.new.weight, old["old"].weight)  # type: ignore[arg-type]  # a parameter


def test_an_optimizer_of_other_groups_is_refused(store: Store) -> None:
    """Test other numbers of groups or parameters, and that the model keeps its values."""
    model = torch.nn.Linear(1000, 1000)
    store.save({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, step=1)
    for groups in ([model.weight], [{"params": [model.weight]}, {"params": [model.bias]}]):
        other = torch.nn.Linear(1000, 1000)
        before = other.weight.detach().clone()
        optimizer = torch.optim.SGD(groups, lr=0.5)
        with pytest.raises(StateMismatchError, match=r"optimizer\.param_groups"):
            store.load(into={"model": other, "optimizer": optimizer})
        assert torch.equal(other.weight, before)
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_named_parameters_in_another_order_are_refused(store: Store) -> None:
    """Test an optimizer whose parameters would get the moments of each other. Other names are accepted."""
    named = [*torch.nn.Linear(3, 3).named_parameters()]
    store.save({"optimizer": torch.optim.SGD(named)}, step=1)
    with pytest.raises(StateMismatchError, match=r"parameter 0 is 'bias' in the given .* 'weight' in the checkpoint"):
        store.load(into={"optimizer": torch.optim.SGD(named[::-1])})
    store.load(into={"optimizer": torch.optim.SGD([(f"new.{name}", value) for name, value in named])})


class Picky:
    """An object that refuses its state."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(2000)

    def state_dict(self) -> dict[str, object]:
        """Return its tensor."""
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Refuse."""
        message = "not today"
        raise ValueError(message)


def test_late_refusal_of_an_object_lists_overwritten_tensors(store: Store) -> None:
    """Test an error that the store cannot predict."""
    store.save({"a": torch.ones(2000), "picky": Picky()}, step=1)
    into = {"a": torch.zeros(2000), "picky": Picky()}
    with pytest.raises(PartialRestoreError, match=r"picky.*not today") as caught:
        store.load(into=into)
    assert set(caught.value.overwritten) == {"a", "picky.tensor"}
    assert isinstance(caught.value.__cause__, ValueError)


def test_late_refusal_of_an_object_lists_converted_tensors(store: Store) -> None:
    """Test a module of another dtype, into which torch copies the tensors."""
    store.save({"model": torch.nn.Linear(3, 2), "picky": Picky()}, step=1)
    into = {"model": torch.nn.Linear(3, 2).double(), "picky": Picky()}
    with pytest.warns(StateDifferenceWarning), pytest.raises(PartialRestoreError) as caught:
        store.load(into=into)
    assert set(caught.value.overwritten) == {"model.weight", "model.bias", "picky.tensor"}


def test_a_tensor_in_two_places_cannot_take_two_tensors(store: Store) -> None:
    """Test a state that ties tensors that the checkpoint has separately: filling it would mix both."""
    store.save({"a": torch.full((BIG,), 1.0), "b": torch.full((BIG,), 2.0)}, step=1)
    tensor = torch.zeros(BIG)
    for into in ({"a": tensor, "b": tensor}, {"a": tensor, "b": tensor.detach()}):
        with pytest.raises(StateMismatchError, match=r"b: shares its memory with a"):
            store.load(into=into)
        assert tensor.count_nonzero() == 0


@pytest.mark.parametrize("size", [50, BIG])
def test_overlapping_tensors_with_different_values_are_refused(store: Store, size: int) -> None:
    """Test that overlapping tensors are filled if the checkpoint has equal values for the overlap."""
    base = torch.arange(2.0 * size)
    store.save({"a": base[:size].clone(), "b": base[size // 2 :].clone(), "c": torch.ones(3)}, step=1)
    store.save(
        {"a": torch.full((size,), 1.0), "b": torch.full((2 * size - size // 2,), 2.0), "c": torch.ones(3)}, step=2
    )
    memory = torch.zeros(2 * size)
    into = {"a": memory[:size], "b": memory[size // 2 :], "c": torch.zeros(3)}
    with pytest.raises(StateMismatchError, match=r"^(a|b|a, b): shares memory with other tensors of the given state"):
        store.load(into=into)
    memory.fill_(torch.nan)
    store.load(step=1, into=into)
    assert torch.equal(memory, base)


@pytest.mark.parametrize("size", [5, BIG])
def test_a_tensor_whose_elements_share_memory_takes_only_equal_values(store: Store, size: int) -> None:
    """Test sliding windows over a signal, which are filled if the values of shared elements are equal."""
    signal = torch.arange(size + 3.0)
    windows = signal.as_strided((size, 4), (1, 1))
    store.save({"w": windows}, step=1)
    store.save({"w": torch.arange(4.0 * size).reshape(size, 4)}, step=2)
    given = torch.zeros_like(signal).as_strided((size, 4), (1, 1))
    with pytest.raises(StateMismatchError, match=r"^w: shares memory .* or among its elements"):
        store.load(into={"w": given})
    store.load(step=1, into={"w": given})
    assert torch.equal(given, windows)


def test_slices_between_each_other_share_nothing(store: Store) -> None:
    """Test interleaved slices without common elements."""
    store.save({"even": torch.full((BIG,), torch.nan), "odd": torch.full((BIG,), 2.0)}, step=1)
    memory = torch.zeros(BIG, 2)
    store.load(into={"even": memory[:, 0], "odd": memory[:, 1]})
    assert memory[:, 0].isnan().all()
    assert memory[:, 1].eq(2.0).all()


def test_untied_checkpoint_in_a_tied_module_takes_the_last(store: Store) -> None:
    """Test that one of the two tensors is used completely, as by `load_state_dict`."""
    untied = torch.nn.Sequential(torch.nn.Linear(1500, 1500, bias=False), torch.nn.Linear(1500, 1500, bias=False))
    tied = torch.nn.Sequential(torch.nn.Linear(1500, 1500, bias=False), torch.nn.Linear(1500, 1500, bias=False))
    tied[1].weight = tied[0].weight
    store.save({"model": untied}, step=1)
    with pytest.warns(
        StateDifferenceWarning, match=r"model\.0\.weight and model\.1\.weight are one tensor in the given"
    ):
        store.load(into={"model": tied})
    assert tied[0].weight is tied[1].weight
    assert torch.equal(tied[1].weight, untied[1].weight)
    with pytest.raises(StateMismatchError, match="are one tensor"):
        store.load(into={"model": tied}, strict=True)


def test_untied_checkpoint_of_equal_tensors_fits_a_tied_module(store: Store) -> None:
    """Test a checkpoint with two copies of one tensor, and one module in two places of the state."""
    module = torch.nn.Linear(1500, 1500, bias=False)
    store.save({"model": module, "ema": copy.deepcopy(module)}, step=1)
    other = torch.nn.Linear(1500, 1500, bias=False)
    store.load(into={"model": other, "ema": other}, strict=True)
    assert torch.equal(other.weight, module.weight)
    module.weight.data.zero_()
    store.save({"model": module, "ema": other}, step=2)
    with pytest.raises(StateMismatchError, match=r"model\.weight and ema\.weight are one tensor"):
        store.load(into={"model": other, "ema": other}, strict=True)
