"""Training loops of every kind: state that a forward pass changes, owners of tensors, and steps of optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asymcheck import Checkpointer
from tests.checkpointer.loops import (
    Loop,
    copy_of,
    linear_loop,
)
from tests.checkpointer.optimizers import KINDS, WIDTH, batch, of_kind, simple, update

STEPS = 5
"""Minimum number of steps that each loop supports."""


class Counting(torch.nn.Module):
    """A model whose forward pass changes buffers in place, in every way that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(40, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Transform a batch, and store it in a buffer."""
        self.get_buffer("seen").data.lerp_(batch.mean(0), 0.1)
        self.get_buffer("calls").add_(1)
        return torch.as_tensor(self.norm(self.linear(batch)))


def buffers() -> Loop:
    """Return a loop with running statistics, a counter and a large buffer that every forward pass changes."""
    model = Counting()
    loop = simple(model, torch.optim.AdamW(model.parameters()))
    loop.between = lambda _checkpointer: model(batch(99))
    return loop


def buffers_beside_parameters() -> Loop:
    """Return a loop with a parameter and a buffer in one allocation, as in models that flatten their memory."""
    flat = torch.randn(2 * 64 * WIDTH)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(flat[: 64 * WIDTH].view(64, WIDTH))
    model.register_buffer("seen", flat[64 * WIDTH :].view(64, WIDTH))
    optimizer = torch.optim.SGD([model.weight], 0.1)

    def forward(step: int) -> torch.Tensor:
        seen = model.get_buffer("seen")
        seen.add_(1)
        return functional.linear(batch(step), model.get_parameter("weight")).square().mean()

    loop = Loop({"model": model, "optimizer": optimizer}, lambda step: update(optimizer, forward(step)))
    loop.between = lambda _checkpointer: forward(1)
    return loop


def accumulation() -> Loop:
    """Return a loop with three forward and backward passes for each optimizer step."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters())

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            model(batch(3 * step + part)).square().mean().backward()
        optimizer.step()

    return Loop({"model": model, "optimizer": optimizer}, iterate)


def alternation() -> Loop:
    """Return a loop of two networks, which take optimizer steps alternately."""
    one, other = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
    makes, judges = torch.optim.Adam(one.parameters()), torch.optim.SGD(other.parameters(), 0.01, momentum=0.9)

    def iterate(step: int) -> None:
        update(judges, other(one(batch(step)).detach()).mean() - other(batch(step + 1)).mean())
        if step % 2:
            update(makes, -other(one(batch(step))).mean())

    return Loop({"one": one, "other": other, "makes": makes, "judges": judges}, iterate)


def unknown_optimizer() -> Loop:
    """Return a loop whose parameters an optimizer outside the state changes, just after ``step()``."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    known, unknown = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    loop = simple(model, known)
    loop.between = lambda _checkpointer: update(unknown, model(batch(7)).square().mean())
    return loop


def averages() -> Loop:
    """Return a loop with averages of the weights, updated through `.data` between two steps."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    loop = simple(model, torch.optim.AdamW(model.parameters()), average=average)

    def update(_checkpointer: Checkpointer) -> None:
        for name, value in model.named_parameters():
            average[name].data.lerp_(value.data, 0.1)

    loop.between = update
    return loop


def averaged_model() -> Loop:
    """Return a loop with torch's average of a model, including its buffers."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    loop = simple(model, torch.optim.SGD(model.parameters(), 0.1), average=average)
    loop.between = lambda _checkpointer: average.update_parameters(model)
    return loop


def array_of_a_parameter() -> Loop:
    """Return a loop with a numpy array in the state that shares a parameter's memory and is written between steps."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    array = model.weight.detach().numpy()[2:]
    loop = simple(model, torch.optim.AdamW(model.parameters()), array=array)
    loop.between = lambda _checkpointer: array.fill(0.5)
    return loop


def view_of_a_parameter() -> Loop:
    """Return a loop with a tensor in the state that is a view of a parameter and is written between steps."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    view = model.weight.data.view(-1)[5:]
    loop = simple(model, torch.optim.AdamW(model.parameters()), view=view)
    loop.between = lambda _checkpointer: view.mul_(0.5)
    return loop


class Tied(torch.nn.Module):
    """A model with a tied weight, and a weight that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.into.weight
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Transform a batch."""
        return torch.as_tensor(self.out(self.frozen(self.into(batch))))


def tied_and_frozen() -> Loop:
    """Return a loop that passes frozen parameters to the optimizer, too, as is often done."""
    model = Tied()
    return simple(model, torch.optim.AdamW(model.parameters()))


def late_state() -> Loop:
    """Return a loop whose gradients are zero at first, so the optimizer has no state in the first steps."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def iterate(step: int) -> None:
        if step >= 2:
            update(optimizer, model(batch(step)).square().mean())

    return Loop({"model": model, "optimizer": optimizer}, iterate)


def growing() -> Loop:
    """Return a loop that adds a layer, its parameter group and another entry of the state during training."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    loop = simple(model, optimizer)

    def grow(_checkpointer: Checkpointer) -> None:
        layer = torch.nn.Linear(WIDTH, WIDTH)
        model.append(layer)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
        loop.state[f"extra{len(model)}"] = torch.full((2000,), float(len(model)))

    loop.between = grow
    return loop


def scheduled() -> Loop:
    """Return a loop with a learning rate scheduler, which replaces the optimizer's step method."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 2)

    def iterate(step: int) -> None:
        update(optimizer, model(batch(step)).square().mean())
        scheduler.step()

    return Loop({"model": model, "optimizer": optimizer, "scheduler": scheduler}, iterate)


def scaled() -> Loop:
    """Return a loop with gradients scaled for half precision, in which the scaler calls the optimizer."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Loop({"model": model, "optimizer": optimizer, "scaler": scaler}, iterate)


def odd_layouts() -> Loop:
    """Return a loop with transposed, strided, conjugated and complex parameters, and one that is a single element."""
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
        update(optimizer, torch.stack(losses).sum())
        model.get_buffer("conjugated").mul_(2)

    return Loop({"model": model, "optimizer": optimizer}, iterate)


def recomputed() -> Loop:
    """Return a loop with activation checkpointing, which recomputes activations and changes buffers again."""
    block = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.AdamW(block.parameters())

    def iterate(step: int) -> None:
        rows = batch(step).requires_grad_()
        update(optimizer, torch.as_tensor(checkpoint(block, rows, use_reentrant=False)).square().mean())

    return Loop({"model": block, "optimizer": optimizer}, iterate)


def compiled() -> Loop:
    """Return a loop with a compiled model, which adds a prefix to the names of its state."""
    torch.compiler.reset()
    plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    model = torch.compile(plain, backend="eager")
    assert isinstance(model, torch.nn.Module)
    return simple(model, torch.optim.AdamW(model.parameters()))


def scripted() -> Loop:
    """Return a loop with a model that is TorchScript and accepts no hooks."""
    with warnings.catch_warnings():
        # torch warns that TorchScript is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)))
    return simple(model, torch.optim.AdamW(model.parameters()))


def reassigned() -> Loop:
    """Return a loop that replaces the memory of parameters just after ``step()``."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    loop = simple(model, torch.optim.AdamW(model.parameters()))

    def exchange(_checkpointer: Checkpointer) -> None:
        model.weight.data = model.weight.data + 1

    loop.between = exchange
    return loop


def fenced_loading() -> Loop:
    """Return a loop that loads another state after ``fence()``."""
    model, optimizer, loop = linear_loop(WIDTH)
    earlier_state = copy_of(loop.state)

    def load(checkpointer: Checkpointer) -> None:
        checkpointer.fence()
        assert isinstance(earlier_state, dict)
        model.load_state_dict(earlier_state["model"])
        optimizer.load_state_dict(earlier_state["optimizer"])
        model.weight.data.add_(3)

    loop.between = load
    return loop


def no_tensors() -> Loop:
    """Return a loop with plain values only, all of which change."""
    state: dict[str, object] = {"epoch": 0, "names": ["a"], "nested": {"text": "x"}}

    def iterate(step: int) -> None:
        state["epoch"] = step
        state["names"] = ["a"] * step

    return Loop(state, iterate)


def bounded_embedding() -> Loop:
    """Return a loop with embeddings that each forward pass rescales in place; one gets its bound only later."""
    embedding = torch.nn.Embedding(300, WIDTH, max_norm=1.0)
    bags = torch.nn.EmbeddingBag(300, WIDTH)
    model = torch.nn.ModuleDict({"words": embedding, "bags": bags})
    optimizer = torch.optim.SGD(model.parameters(), 3.0, momentum=0.9)
    rows = torch.arange(300).view(30, 10)

    def iterate(step: int) -> None:
        update(optimizer, (embedding(rows).mean() - 1).square() + (bags(rows + 0).mean() - 1).square())
        bags.max_norm = 0.5 if step > 1 else None

    loop = Loop({"model": model, "optimizer": optimizer}, iterate)
    loop.between = lambda _checkpointer: (embedding(rows), bags(rows))
    return loop


def empty_tensors() -> Loop:
    """Return a loop with empty tensors, among the parameters and elsewhere in the state."""
    model = torch.nn.Module()
    model.nothing = torch.nn.Parameter(torch.empty(0, 5))
    model.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters())

    def iterate(_step: int) -> None:
        update(optimizer, torch.stack([value.square().sum() for value in model.parameters()]).sum())

    return Loop({"model": model, "optimizer": optimizer, "none": torch.empty(3, 0)}, iterate)


def many_tensors() -> Loop:
    """Return a loop with two thousand tiny parameters, each with a moment."""
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
    "scripted": scripted,
    "reassigned": reassigned,
    "fenced-loading": fenced_loading,
    "no-tensors": no_tensors,
    "bounded-embedding": bounded_embedding,
    "empty-tensors": empty_tensors,
    **{kind: of_kind(make) for kind, make in KINDS.items()},
}
