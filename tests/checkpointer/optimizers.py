"""A simple training loop with every kind of optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.checkpointer.loops import (
    Loop,
)

WIDTH = 48


def batch(step: int, rows: int = 8) -> torch.Tensor:
    """Return the batch of a step, which is the same in every run."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def simple(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: object) -> Loop:
    """Return the loop of a model and its optimizer, with ``more`` in its state."""
    return Loop(
        {"model": model, "optimizer": optimizer, **more},
        lambda step: update(optimizer, model(batch(step)).square().mean()),
    )


Kind = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def of_kind(kind: Kind) -> Callable[[], Loop]:
    """Return a function that creates a loop with an optimizer of a kind."""

    def make() -> Loop:
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH))
        return simple(model, kind(list(model.parameters())))

    return make


class _Closing(torch.optim.LBFGS):
    """LBFGS, which evaluates the loss itself, in this case a function of the parameters only."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, max_iter=2, history_size=2)

    def step(self, _closure: object = None) -> torch.Tensor:  # type: ignore[override]  # called without a closure
        """Take an optimizer step."""

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
