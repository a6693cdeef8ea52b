"""Test differences between a state and a checkpoint that torch accepts silently: one warning names all of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from asymcheck import Checkpointer, Store
from asymcheck.errors import StateDifferenceWarning, StateMismatchError


def _trained(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: float | None
) -> dict[str, object]:
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


def test_differences_are_an_error_if_strict(path: Path) -> None:
    """Test Checkpointer.restore() and Store.load(): nothing is overwritten."""
    state = _trained(weight_decay=0.25)
    before = [parameter.clone() for parameter in state["model"].parameters()]  # type: ignore[attr-defined]  # a module
    with Store.open(path) as store:
        with pytest.raises(StateMismatchError, match=r"weight_decay is 0\.25"):
            Checkpointer(store, state).restore(strict=True)
        with pytest.raises(StateMismatchError, match=r"weight_decay is 0\.25"):
            store.load(into=state, strict=True)
        Checkpointer(store, _trained()).restore(strict=True)
    after = state["model"].parameters()  # type: ignore[attr-defined]  # as above
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_strict_load_of_a_partial_state_is_refused(path: Path) -> None:
    """Test stored values that the given state lacks, at the top and below."""
    with Store.open(path, create=True) as store:
        store.save({"plain": {"a": 1, "b": 2}, "other": 3}, step=2)
        assert store.load(into={"plain": {"a": 0}}) == {"plain": {"a": 1}}
        with pytest.raises(StateMismatchError, match=r"plain: stored, but not .*: b\n.*stored, but not .*: other"):
            store.load(into={"plain": {"a": 0}}, strict=True)


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


@pytest.mark.parametrize(
    ("optimizer_class", "evidence"),
    [
        (torch.optim.SGD, r"optimizer\.param_groups: .*'momentum'.* given, but not stored; .*'betas'"),
        (torch.optim.Adamax, r"optimizer\.state: 'exp_inf' given, but not stored; 'exp_avg_sq' stored"),
    ],
)
def test_optimizer_of_another_class_is_refused(
    path: Path, optimizer_class: type[torch.optim.Optimizer], evidence: str
) -> None:
    """Test the state of AdamW in other optimizers, which would raise KeyError at the next step."""
    state = _trained(optimizer_class)
    before = [parameter.clone() for parameter in state["model"].parameters()]  # type: ignore[attr-defined]  # a module
    with Store.open(path) as store, pytest.raises(StateMismatchError, match=rf"(?s){evidence}.*construct that class"):
        Checkpointer(store, state).restore()
    after = state["model"].parameters()  # type: ignore[attr-defined]  # as above
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_related_class_of_optimizer_is_restored_with_a_warning(path: Path) -> None:
    """Test the state of AdamW in Adam, which has the same options and state."""
    assert "decoupled_weight_decay is False" in _warning(path, _trained(torch.optim.Adam))


def test_empty_mapping_that_stays_empty_is_named(path: Path) -> None:
    """Test Store.load(into=…) of a mapping that a program expects to be filled."""
    with Store.open(path, create=True) as store:
        store.save({"plain": {"a": 1}}, step=2)
        with pytest.warns(StateDifferenceWarning, match="plain: stored, but not in the given state: a; give None"):
            assert store.load(into={"plain": {}}) == {"plain": {}}
        assert store.load(into={"plain": None}) == {"plain": {"a": 1}}


def test_list_of_tensors_grows_to_its_stored_length(store_path: Path) -> None:
    """Test a list that the training extends: its tensors are filled in place, and the others are added."""
    with Store.open(store_path, create=True) as store:
        store.save({"averages": [torch.full((3,), float(number)) for number in range(3)]}, step=1)
        for length in range(4):
            averages = [torch.zeros(3) for _ in range(length)]
            filled = list(averages)
            Checkpointer(store, {"averages": averages}).restore()
            assert [tensor[0].item() for tensor in averages] == [0, 1, 2]
            assert all(one is other for one, other in zip(averages, filled, strict=False))
        with pytest.raises(StateMismatchError, match=r"a list of 5 is given, but .* 3 is stored; remove the last 2"):
            Checkpointer(store, {"averages": [torch.zeros(3) for _ in range(5)]}).restore()
        with pytest.raises(StateMismatchError, match=r"averages: a list of 2 is given.*; give None to create it"):
            store.load(into={"averages": [torch.zeros(3), torch.zeros(3)]})


def test_conversions_of_tensors_are_counted(path: Path) -> None:
    """Test a float32 checkpoint in a model of half precision."""
    state = _trained()
    state["model"].half()  # type: ignore[attr-defined]  # a module
    assert "model: 2 tensors are converted from float32 to float16" in _warning(path, state)


def test_changed_hyperparameter_is_named_with_both_values(path: Path) -> None:
    """Test another weight decay in the code."""
    text = _warning(path, _trained(weight_decay=0.25))
    assert "weight_decay is 0.25 in the given optimizer, and 0.01 in the checkpoint" in text


_SCHEDULES: dict[str, tuple[Callable[[Optimizer], object], Callable[[Optimizer], object], str]] = {
    "more steps": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
        "T_max is 20 in the given schedule, and 10 in the checkpoint",
    ),
    "other milestones": (
        lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
        lambda o: lr_scheduler.MultiStepLR(o, [3]),
        r"milestones is Counter\(\{3: 1\}\) in the given schedule, and Counter\(\{2: 1, 5: 1\}\) in the checkpoint",
    ),
    "after a warm-up": (
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 3)], [5]),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 4)], [5]),
        "step_size is 4 in the given schedule",
    ),
    "another class": (
        lambda o: lr_scheduler.StepLR(o, 3),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        "'T_max', 'eta_min' given, but not stored; 'gamma', 'step_size' stored.*Was it a schedule of another class",
    ),
}


@pytest.mark.parametrize("name", _SCHEDULES)
def test_changed_schedule_is_named(store_path: Path, name: str) -> None:
    """Test options of a learning rate schedule in the code, which the stored ones replace."""
    saved, given, named = _SCHEDULES[name]
    optimizers = [torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1) for _ in range(2)]
    with Store.open(store_path, create=True) as store:
        store.save({"schedule": saved(optimizers[0])}, step=1)
    assert re.search(f"schedule: .*{named}", _warning(store_path, {"schedule": given(optimizers[1])}))


class _Counting(torch.optim.AdamW):
    """Optimizer that keeps state among its defaults, as schedule-free optimizers and Prodigy do."""

    def __init__(self, *, warmup: int = 0, weight_decay: float = 0.0) -> None:
        super().__init__(torch.nn.Linear(4, 2).parameters(), weight_decay=weight_decay)
        for group in (self.defaults, *self.param_groups):
            group.update(k=0, warmup=warmup)


def test_state_of_an_optimizer_in_its_groups_is_no_difference(store_path: Path) -> None:
    """Test a counter that no constructor takes. An argument of a constructor is compared."""
    saved, given = _Counting(), _Counting()
    saved.param_groups[0]["k"] = 7
    with Store.open(store_path, create=True) as store:
        store.save({"optimizer": saved}, step=1)
        Checkpointer(store, {"optimizer": given}).restore(strict=True)
    assert given.param_groups[0]["k"] == 7
    text = _warning(store_path, {"optimizer": _Counting(warmup=3, weight_decay=0.25)})
    assert "warmup is 3" in text
    assert "weight_decay is 0.25" in text
    assert "k is" not in text


@pytest.mark.parametrize(("given", "is_named"), [(None, False), (True, True)])
def test_choice_of_implementation_is_named_unless_left_to_torch(
    store_path: Path, given: bool | None, *, is_named: bool
) -> None:
    """Test ``foreach=False`` in the checkpoint, as runs with FSDP2 set it."""
    with Store.open(store_path, create=True) as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.save(_trained(foreach=False), step=1)
        Checkpointer(store, _trained(foreach=given)).restore()
    assert any("foreach is True" in str(warning.message) for warning in caught) is is_named


def test_partial_load_of_a_store_gives_no_warning(path: Path) -> None:
    """Test Store.load(into=…), where a part of the checkpoint is asked for on purpose."""
    with Store.open(path) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        store.load(into={"model": torch.nn.Linear(4, 2)})


@pytest.mark.parametrize("is_saved_wrapped", [True, False])
@pytest.mark.parametrize("wrapper", ["_orig_mod", "module"])
def test_wrappers_in_names_are_mapped_in_both_directions(
    store_path: Path, wrapper: str, *, is_saved_wrapped: bool
) -> None:
    """Test torch.compile and DistributedDataParallel, which add a part to every name, inside of a module, too."""

    def model(*, is_wrapped: bool) -> torch.nn.Module:
        inner = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
        outer = torch.nn.ModuleDict({wrapper: inner}) if is_wrapped else inner
        return torch.nn.ModuleDict({"encoder": outer, "head": torch.nn.Linear(4, 2)})

    saved, restored = model(is_wrapped=is_saved_wrapped), model(is_wrapped=not is_saved_wrapped)
    with Store.open(store_path, create=True) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        store.save({"model": saved}, step=1)
        assert Checkpointer(store, {"model": restored}).restore() is not None
    pairs = zip(saved.state_dict().values(), restored.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_name_that_only_resembles_a_stored_one_is_suggested(path: Path) -> None:
    """Test a mistyped key of the state, and a renamed layer."""
    with Store.open(path) as store:
        with pytest.raises(StateMismatchError, match="modle: is not in the checkpoint; did you mean 'model'"):
            store.load(into={"modle": torch.nn.Linear(4, 2)})
        layer = torch.nn.ParameterDict({"weights": torch.zeros(2, 4), "bias": torch.zeros(2)})
        with pytest.raises(StateMismatchError, match=r"weights: is not in the checkpoint; did you mean 'weight'"):
            store.load(into={"model": layer})


def test_new_part_of_a_state_is_added_after_the_restore(path: Path) -> None:
    """Test the advice for a part that an earlier version of a training did not have, and that it works."""
    with Store.open(path) as store:
        state = _trained() | {"later": torch.zeros(3)}
        with Checkpointer(store, state, every=1) as checkpointer:
            with pytest.raises(StateMismatchError, match="later: is not in the checkpoint; add it to the state after"):
                checkpointer.restore()
            later = state.pop("later")
            restored = checkpointer.restore()
            assert restored is not None
            state["later"] = later
            checkpointer.step(restored.step + 1)
        loaded = store.load()
        assert isinstance(loaded, dict)
        assert set(loaded) == set(state)


def test_names_that_become_equal_without_wrappers_are_not_mapped(store_path: Path) -> None:
    """Test a module that has a real part with the name of a wrapper."""
    saved = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(4, 2), "module": torch.nn.ModuleDict({"a": torch.nn.Linear(4, 2)})}
    )
    with Store.open(store_path, create=True) as store:
        store.save({"model": saved}, step=1)
        same = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(4, 2), "module": torch.nn.ModuleDict({"a": torch.nn.Linear(4, 2)})}
        )
        store.load(into={"model": same})
        assert torch.equal(same["a"].weight, saved["a"].weight)  # type: ignore[arg-type, union-attr]  # a linear layer
        with pytest.raises(StateMismatchError):
            store.load(into={"model": torch.nn.ModuleDict({"a": torch.nn.Linear(4, 2)})})
