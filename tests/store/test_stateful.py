"""Test objects with their own state: modules, optimizers, schedulers, scalers and generators."""

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from asymcheck import RngState, Store
from asymcheck.errors import StateDifferenceWarning
from asymcheck.restore import in_place
from tests.store.equality import assert_same, tensors_in

LrScheduler = lr_scheduler.LRScheduler
Parameters = list[torch.nn.Parameter]


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 40),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(40, 5),
    )


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW with groups": lambda p: torch.optim.AdamW([{"params": p[:3], "lr": 1e-2}, {"params": p[3:]}], lr=1e-3),
    "AdamW with a tensor as rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = torch.optim.Adafactor
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([one for one in p if one.ndim == 2])

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 7]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.StepLR(o, 2)], milestones=[2]
    ),
    "SequentialLR of milestones": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.MultiStepLR(o, [1, 4])], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        inputs, target = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))

        def closure(inputs: torch.Tensor = inputs, target: torch.Tensor = target) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), target)
            loss.backward()
            return loss

        loss = optimizer.step(closure)  # type: ignore[arg-type]  # LBFGS and the others differ in type
        losses.append(float(loss.detach()))
    return losses


def _addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    found = tensors_in(optimizer.state_dict()["state"])
    return [tensor.data_ptr() for tensor in found if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_is_identical(store: Store, name: str) -> None:
    """Test that a new model and optimizer have the same losses, including dropout."""
    model = _model()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    _train(model, optimizer, 2)
    store.save({"model": model, "optimizer": optimizer, "rng": RngState()}, step=2)
    expected = _train(model, optimizer, 3)

    model = _model(seed=1)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    store.load(into={"model": model, "optimizer": optimizer, "rng": RngState()})
    assert _train(model, optimizer, 3) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_comes_back_whole(store: Store, name: str) -> None:
    """Test every value and tensor with its type, also without an optimizer to fill."""
    model = _model()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    _train(model, optimizer, 1)
    store.save({"optimizer": optimizer}, step=1)
    assert_same(store.load(), {"optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_warm_optimizer_is_filled_in_place(store: Store, name: str) -> None:
    """Test that no tensor is allocated, and that captured graphs stay valid."""
    model = _model()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    _train(model, optimizer, 1)
    state = {"optimizer": optimizer}
    store.save(state, step=1)
    expected = store.load()
    _train(model, optimizer, 1)
    before = _addresses(optimizer)
    store.load(into=state)
    if name != "LBFGS":  # The history of LBFGS grows, so some of its tensors are always new.
        assert _addresses(optimizer) == before
    assert_same({"optimizer": optimizer.state_dict()}, expected)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_continue(store: Store, name: str) -> None:
    """Test that a new scheduler returns the same rates."""

    def rates(optimizer: torch.optim.Optimizer, scheduler: LrScheduler, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    rates(optimizer, scheduler, 4)
    store.save({"optimizer": optimizer, "scheduler": scheduler}, step=4)
    expected = rates(optimizer, scheduler, 6)

    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    store.load(into={"optimizer": optimizer, "scheduler": scheduler})
    assert rates(optimizer, scheduler, 6) == expected


def test_plateau_scheduler_continues(store: Store) -> None:
    """Test an infinite best value."""
    state = []
    for _ in range(2):
        optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
        state.append({"optimizer": optimizer, "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)})
    first, second = state
    store.save(first, step=0)
    for loss in (1.0, 2.0, 3.0):
        first["scheduler"].step(loss)  # type: ignore[attr-defined]  # a scheduler, two lines above
    store.save(first, step=3)
    store.load(0, into=second)
    assert second["scheduler"].state_dict()["best"] == float("inf")
    store.load(into=second)
    assert second["scheduler"].state_dict() == first["scheduler"].state_dict()
    assert second["optimizer"].state_dict()["param_groups"] == first["optimizer"].state_dict()["param_groups"]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_counter_is_restored_where_expected(store: Store) -> None:
    """Test a milestone schedule, which needs a Counter and gets it from a stored mapping, also in a list."""

    def schedule(milestones: list[int]) -> tuple[LrScheduler, LrScheduler]:
        optimizer = torch.optim.SGD(_model().parameters(), lr=1.0)
        inner = lr_scheduler.MultiStepLR(optimizer, milestones)
        return inner, lr_scheduler.SequentialLR(optimizer, [inner, lr_scheduler.StepLR(optimizer, 3)], [100])

    _, saved = schedule([2, 5, 5])
    inner, other = schedule([3])
    seen = Counter("abca")
    store.save({"schedule": saved, "seen": seen}, step=1)
    loaded: Any = store.load()
    assert_same(loaded["schedule"]["_schedulers"][0]["milestones"], {2: 1, 5: 2})
    into = {"schedule": other, "seen": Counter("cba")}
    with pytest.warns(StateDifferenceWarning, match="schedule: milestones is Counter"):
        store.load(into=into)
    assert_same(into["seen"], Counter({"a": 2, "b": 1, "c": 1}))
    inner.optimizer.step()
    inner.step(5)
    assert inner.get_last_lr() == [pytest.approx(0.1**3)]


def test_a_scaler_of_mixed_precision_comes_back(store: Store) -> None:
    """Test scale and growth counter, and a disabled scaler with an empty state."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    store.save({"scaler": scaler, "disabled": disabled}, step=1)
    other = torch.amp.GradScaler("cpu")
    store.load(into={"scaler": other, "disabled": torch.amp.GradScaler("cpu", enabled=False)})
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 1024.0


def test_a_module_comes_back_with_the_versions_of_its_parts(store: Store) -> None:
    """Test the versions that `Module.load_state_dict` reads, for instance for old normalisation layers."""
    model = _model()
    store.save({"model": model}, step=1)
    loaded = store.load()
    assert isinstance(loaded, dict)
    assert_same(loaded["model"], model.state_dict())
    assert isinstance(loaded["model"], OrderedDict)
    assert loaded["model"]._metadata["1"] == {"version": 2}  # type: ignore[attr-defined]  # torch hangs it there
    other = _model(seed=1)
    other.load_state_dict(loaded["model"])
    assert_same(other.state_dict(), model.state_dict())


def test_a_state_dict_is_stored_like_its_module(store: Store) -> None:
    """Test a saved mapping that fills a module, and the reverse."""
    model, other = _model(), _model(seed=1)
    store.save({"model": model.state_dict()}, step=1)
    store.load(into={"model": other})
    assert_same(other.state_dict(), model.state_dict())
    store.save({"model": model}, step=2)
    into = {"model": _model(seed=2).state_dict()}
    store.load(into=into)
    assert_same(into["model"], model.state_dict())


def test_an_object_can_be_the_whole_state(store: Store) -> None:
    """Test `store.save(model)` and `store.load(into=model)`."""
    model, other = _model(), _model(seed=1)
    store.save(model, step=1)
    assert store.load(into=other) is other
    assert_same(other.state_dict(), model.state_dict())
    assert_same(store.load(), model.state_dict())


def test_objects_in_sequences_take_part(store: Store) -> None:
    """Test lists and tuples of modules, as in an ensemble."""
    members, others = [_model(1), _model(2)], [_model(3), _model(4)]
    store.save({"members": tuple(members)}, step=1)
    store.load(into={"members": tuple(others)})
    for one, other in zip(members, others, strict=True):
        assert_same(other.state_dict(), one.state_dict())


def test_module_restores_its_extra_state(store: Store) -> None:
    """Test a plain value and a mapping from `get_extra_state`."""

    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, object]:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:  # noqa: ANN401 - as in torch
            self.seen = state["seen"]

    model, other = Counting(2, 2), Counting(2, 2)
    model.seen = 7
    store.save(model, step=1)
    store.load(into=other)
    assert other.seen == 7


class _Forwarding:
    """Wrapper that forwards its attributes to a module."""

    def __init__(self, inner: torch.nn.Module) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute
        return getattr(self._inner, name)


class _ByStaticAttributes(type):
    """Class of protocols that are checked as from Python 3.12 on."""

    def __instancecheck__(cls, instance: object) -> bool:
        return all(inspect.getattr_static(instance, name, None) for name in ("state_dict", "load_state_dict"))


def test_wrapper_that_forwards_its_attributes_is_restored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that what a save takes for an object with a state is one in a restore, in all versions of Python."""
    monkeypatch.setattr(in_place, "Stateful", _ByStaticAttributes("Stateful", (), {}))
    model, other = _model(), _model(seed=1)
    store.save({"model": _Forwarding(model)}, step=1)
    store.load(into={"model": _Forwarding(other)})
    assert_same(other.state_dict(), model.state_dict())
