"""What is captured is the state as of the step, whatever trains, and however late it is copied."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import CaptureWarning
from tests.checkpointer.loops import (
    CONFIG,
    Loop,
    assert_every_step_is_right,
    copy_late,
    folder_for_rings,
    linear_loop,
    snapshot,
)

# Some optimizers do nothing in some steps, and then every tensor is that of the step before.
pytestmark = pytest.mark.filterwarnings("ignore::asymcheck.errors.StaleStateWarning")

WIDTH = 48
STEPS = 5


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """A new store of small partitions."""
    with Store.open(store_path, config=CONFIG) as opened:
        yield opened


@pytest.fixture(params=["early", "late"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureConfig:
    """Capture as soon as possible, and as late as possible."""
    if request.param == "late":
        copy_late(monkeypatch)
    return CaptureConfig(proof="full", ring_folder=str(folder_for_rings(tmp_path)))


def _batch(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def _update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _simple(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: object) -> Loop:
    return Loop(
        {"model": model, "optimizer": optimizer, **more},
        lambda step: _update(optimizer, model(_batch(step)).square().mean()),
    )


class Counting(torch.nn.Module):
    """Its forward pass changes buffers in place, in every way that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(40, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Transform a batch, and remember it."""
        self.get_buffer("seen").data.lerp_(batch.mean(0), 0.1)
        self.get_buffer("calls").add_(1)
        return torch.as_tensor(self.norm(self.linear(batch)))


def buffers() -> Loop:
    """Running statistics, a counter and a large buffer that every forward pass changes."""
    model = Counting()
    loop = _simple(model, torch.optim.AdamW(model.parameters()))
    loop.between = lambda _checkpointer: model(_batch(99))
    return loop


def buffers_beside_parameters() -> Loop:
    """A parameter and a buffer in one allocation, as in models that flatten their memory."""
    flat = torch.randn(2 * 64 * WIDTH)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(flat[: 64 * WIDTH].view(64, WIDTH))
    model.register_buffer("seen", flat[64 * WIDTH :].view(64, WIDTH))
    optimizer = torch.optim.SGD([model.weight], 0.1)

    def forward(step: int) -> torch.Tensor:
        seen = model.get_buffer("seen")
        seen.add_(1)
        return functional.linear(_batch(step), model.get_parameter("weight")).square().mean()

    loop = Loop({"model": model, "optimizer": optimizer}, lambda step: _update(optimizer, forward(step)))
    loop.between = lambda _checkpointer: forward(1)
    return loop


def accumulation() -> Loop:
    """Three forward and backward passes for each optimizer step."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters())

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            model(_batch(3 * step + part)).square().mean().backward()
        optimizer.step()

    return Loop({"model": model, "optimizer": optimizer}, iterate)


def alternation() -> Loop:
    """Two networks against each other: between two steps of one, the other steps."""
    one, other = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
    makes, judges = torch.optim.Adam(one.parameters()), torch.optim.SGD(other.parameters(), 0.01, momentum=0.9)

    def iterate(step: int) -> None:
        _update(judges, other(one(_batch(step)).detach()).mean() - other(_batch(step + 1)).mean())
        if step % 2:
            _update(makes, -other(one(_batch(step))).mean())

    return Loop({"one": one, "other": other, "makes": makes, "judges": judges}, iterate)


def unknown_optimizer() -> Loop:
    """An optimizer that is not in the state steps on parameters that are, just after ``step()``."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    known, unknown = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    loop = _simple(model, known)
    loop.between = lambda _checkpointer: _update(unknown, model(_batch(7)).square().mean())
    return loop


Kind = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def _of_kind(kind: Kind) -> Callable[[], Loop]:
    def make() -> Loop:
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH))
        return _simple(model, kind(list(model.parameters())))

    return make


class _Closing(torch.optim.LBFGS):
    """LBFGS, which evaluates the loss itself, here of nothing but the parameters."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, max_iter=2, history_size=2)

    def step(self, _closure: object = None) -> torch.Tensor:  # type: ignore[override]  # called without a closure
        """Take a step downhill."""

        def closure() -> torch.Tensor:
            self.zero_grad()
            loss = torch.stack([value.square().sum() for value in self.param_groups[0]["params"]]).sum()
            loss.backward()
            return loss

        return torch.as_tensor(super().step(closure))  # type: ignore[no-untyped-call]  # as torch has it


KINDS: dict[str, Kind] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw-single": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.5),
    "lbfgs": _Closing,
}


def averages() -> Loop:
    """Averages of the weights, updated through `.data` between two steps."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    loop = _simple(model, torch.optim.AdamW(model.parameters()), average=average)

    def update(_checkpointer: Checkpointer) -> None:
        for name, value in model.named_parameters():
            average[name].data.lerp_(value.data, 0.1)

    loop.between = update
    return loop


def averaged_model() -> Loop:
    """The average of a model that torch has of a model, with its buffers."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    loop = _simple(model, torch.optim.SGD(model.parameters(), 0.1), average=average)
    loop.between = lambda _checkpointer: average.update_parameters(model)
    return loop


def array_of_a_parameter() -> Loop:
    """A numpy array in the state that is the memory of a parameter, and is written between two steps."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    array = model.weight.detach().numpy()[2:]
    loop = _simple(model, torch.optim.AdamW(model.parameters()), array=array)
    loop.between = lambda _checkpointer: array.fill(0.5)
    return loop


def view_of_a_parameter() -> Loop:
    """A tensor in the state that is another view of a parameter, and is written between two steps."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    view = model.weight.data.view(-1)[5:]
    loop = _simple(model, torch.optim.AdamW(model.parameters()), view=view)
    loop.between = lambda _checkpointer: view.mul_(0.5)
    return loop


class Tied(torch.nn.Module):
    """A weight under two names, and one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.into.weight
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Transform a batch."""
        return torch.as_tensor(self.out(self.frozen(self.into(batch))))


def tied_and_frozen() -> Loop:
    """Frozen parameters are given to the optimizer, too, as is often done."""
    model = Tied()
    return _simple(model, torch.optim.AdamW(model.parameters()))


def late_state() -> Loop:
    """Nothing but zeros in the first steps: the optimizer has no state before its first gradient."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def iterate(step: int) -> None:
        if step >= 2:
            _update(optimizer, model(_batch(step)).square().mean())

    return Loop({"model": model, "optimizer": optimizer}, iterate)


def growing() -> Loop:
    """A layer, its parameter group and another entry of the state are added while training goes on."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    loop = _simple(model, optimizer)

    def grow(_checkpointer: Checkpointer) -> None:
        layer = torch.nn.Linear(WIDTH, WIDTH)
        model.append(layer)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
        loop.state[f"extra{len(model)}"] = torch.full((2000,), float(len(model)))

    loop.between = grow
    return loop


def scheduled() -> Loop:
    """A learning rate scheduler, which replaces the optimizer's step by its own."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 2)

    def iterate(step: int) -> None:
        _update(optimizer, model(_batch(step)).square().mean())
        scheduler.step()

    return Loop({"model": model, "optimizer": optimizer, "scheduler": scheduler}, iterate)


def scaled() -> Loop:
    """Gradients scaled for half precision; the scaler calls the optimizer."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_batch(step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Loop({"model": model, "optimizer": optimizer, "scaler": scaler}, iterate)


def odd_layouts() -> Loop:
    """Parameters that are transposed, strided, conjugated, complex, or one element of another."""
    model = torch.nn.Module()
    base = torch.randn(WIDTH, 3 * WIDTH)
    model.transposed = torch.nn.Parameter(torch.randn(2 * WIDTH, WIDTH).t())
    model.strided = torch.nn.Parameter(base[:, ::3])
    model.complex = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
    model.register_buffer("conjugated", torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj())
    model.last = torch.nn.Parameter(torch.randn(4, WIDTH).to(memory_format=torch.contiguous_format)[1:2])
    optimizer = torch.optim.Adam(model.parameters())

    def iterate(_step: int) -> None:
        losses = [value.abs().square().sum() for value in model.parameters()]
        _update(optimizer, torch.stack(losses).sum())
        model.get_buffer("conjugated").mul_(2)

    return Loop({"model": model, "optimizer": optimizer}, iterate)


def recomputed() -> Loop:
    """Activations that the backward pass computes again, with the buffers that this changes."""
    block = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.AdamW(block.parameters())

    def iterate(step: int) -> None:
        batch = _batch(step).requires_grad_()
        _update(optimizer, torch.as_tensor(checkpoint(block, batch, use_reentrant=False)).square().mean())

    return Loop({"model": block, "optimizer": optimizer}, iterate)


def compiled() -> Loop:
    """A compiled model, whose state has names of its own."""
    torch.compiler.reset()
    plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    model = torch.compile(plain, backend="eager")
    assert isinstance(model, torch.nn.Module)
    return _simple(model, torch.optim.AdamW(model.parameters()))


def reassigned() -> Loop:
    """Parameters whose memory is exchanged for other memory just after ``step()``."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    loop = _simple(model, torch.optim.AdamW(model.parameters()))

    def exchange(_checkpointer: Checkpointer) -> None:
        model.weight.data = model.weight.data + 1

    loop.between = exchange
    return loop


def fenced_loading() -> Loop:
    """The user loads another state after ``fence()``."""
    model, optimizer, loop = linear_loop(WIDTH)
    kept = snapshot(loop.state)

    def load(checkpointer: Checkpointer) -> None:
        checkpointer.fence()
        assert isinstance(kept, dict)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        model.weight.data.add_(3)

    loop.between = load
    return loop


def no_tensors() -> Loop:
    """Plain values only, all of which change."""
    state: dict[str, object] = {"epoch": 0, "names": ["a"], "nested": {"text": "x"}}

    def iterate(step: int) -> None:
        state["epoch"] = step
        state["names"] = ["a"] * step

    return Loop(state, iterate)


def empty_tensors() -> Loop:
    """Tensors of no elements, among parameters and beside them."""
    model = torch.nn.Module()
    model.nothing = torch.nn.Parameter(torch.empty(0, 5))
    model.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters())

    def iterate(_step: int) -> None:
        _update(optimizer, torch.stack([value.square().sum() for value in model.parameters()]).sum())

    return Loop({"model": model, "optimizer": optimizer, "none": torch.empty(3, 0)}, iterate)


def many_tensors() -> Loop:
    """Two thousand tiny parameters, each with a moment."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(9)) for _ in range(2000)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def iterate(step: int) -> None:
        for value in model:
            value.grad = value.detach() + step
        optimizer.step()

    return Loop({"model": model, "optimizer": optimizer}, iterate)


CASES: dict[str, Callable[[], Loop]] = {
    "buffers": buffers,
    "buffers-beside-parameters": buffers_beside_parameters,
    "accumulation": accumulation,
    "alternation": alternation,
    "unknown-optimizer": unknown_optimizer,
    "averages": averages,
    "averaged-model": averaged_model,
    "array-of-a-parameter": array_of_a_parameter,
    "view-of-a-parameter": view_of_a_parameter,
    "tied-and-frozen": tied_and_frozen,
    "late-state": late_state,
    "growing": growing,
    "scheduled": scheduled,
    "scaled": scaled,
    "odd-layouts": odd_layouts,
    "recomputed": recomputed,
    "reassigned": reassigned,
    "fenced-loading": fenced_loading,
    "no-tensors": no_tensors,
    "empty-tensors": empty_tensors,
    **{kind: _of_kind(make) for kind, make in KINDS.items()},
}


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_stored_as_it_was(store: Store, config: CaptureConfig, case: str) -> None:
    """Every bit of every step, with no warning and no error."""
    torch.manual_seed(0)
    assert_every_step_is_right(store, CASES[case](), STEPS, config)


@pytest.mark.parametrize("case", [many_tensors, compiled], ids=["many-tensors", "compiled"])
def test_each_step_of_a_large_model_is_stored_as_it_was(
    store: Store, config: CaptureConfig, case: Callable[[], Loop]
) -> None:
    """The same for what takes longer."""
    torch.manual_seed(0)
    assert_every_step_is_right(store, case(), 3, config)


@pytest.mark.parametrize("each", [False, True], ids=["one", "one for each parameter"])
def test_an_optimizer_inside_the_backward_pass_is_noticed(store: Store, config: CaptureConfig, each: bool) -> None:
    """One warning, however many such optimizers there are, and every capture is right, the first one too."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adam([value]) for value in parameters] if each else [torch.optim.Adam(parameters[:1])]
    for value, optimizer in zip(parameters, optimizers, strict=False):

        def hook(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        value.register_post_accumulate_grad_hook(hook)
    loop = Loop({"model": model, "optimizers": optimizers}, lambda step: model(_batch(step)).square().mean().backward())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_every_step_is_right(store, loop, STEPS, config)
    assert [warning.category for warning in caught] == [CaptureWarning]
    assert "inside the backward pass" in str(caught[0].message)
