"""Models whose weights are a function of the training step, so that a mixture of two releases is visible."""

from __future__ import annotations

import torch

SIZES = (300, 700, 40)


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a model with large and small tensors and a tied weight."""
    made = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(SIZES, (*SIZES[1:], SIZES[0]), strict=True)))
    made.tied = torch.nn.Linear(SIZES[0], SIZES[1])
    made.tied.weight = made[0].weight
    made.register_buffer("counter", torch.zeros(3, dtype=torch.int64))
    return made.to(dtype)


@torch.no_grad()
def train_to(made: torch.nn.Module, step: int) -> None:
    """Set all weights to those of a step; few bytes differ between neighbouring steps."""
    for number, parameter in enumerate(made.parameters()):
        places = torch.arange(parameter.numel()).view(parameter.shape)
        fixed = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.copy_(fixed + (places % 50 == step % 50) * 0.5)
        parameter.view(-1)[0] = step
    made.counter.fill_(step)


def check(made: torch.nn.Module, step: int) -> None:
    """Fail unless all weights are those of a step."""
    expected = model()
    train_to(expected, step)
    given = made.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor.to(given[name].dtype), given[name]), f"{name} is not that of step {step}"
