"""A small training, equal on every rank except for its own data."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from asymcheck.format.digest import digest

_WIDTH = 48


class Training:
    """A model of four layers with AdamW, and a tensor that each rank has alone."""

    def __init__(self, seed: int = 0) -> None:
        """Begin with numbers that follow from ``seed``."""
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
        self.own = torch.full((600,), float(seed))
        self.make_optimizer()

    def make_optimizer(self) -> None:
        """Create the optimizer, again after the parameters were replaced."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self) -> dict[str, object]:
        """Return the saved state."""
        return {"model": self.model, "optimizer": self.optimizer, "own": self.own}

    def train(self, step: int, part: int, through: nn.Module | None = None) -> float:
        """Train one step, on the data of a part."""
        generator = torch.Generator().manual_seed(1000 * step + part)
        inputs = torch.randn(4, _WIDTH, generator=generator)
        self.optimizer.zero_grad()
        loss = (through or self.model)(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.own += step + 1 + int(os.environ.get("RANK", "0"))
        return float(loss.detach())

    def digest(self) -> str:
        """Return a digest of the whole state."""
        moments = [self.optimizer.state[one] for one in self.model.parameters()]
        tensors = [*self.model.parameters(), self.own]
        tensors += [value for one in moments for value in one.values() if isinstance(value, torch.Tensor)]
        return digest_of(tensors)


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of tensors; of sharded ones, of the local shard."""
    found = []
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.append(digest(local.detach().contiguous().numpy().tobytes()))
    return digest(b"".join(found)).hex()
