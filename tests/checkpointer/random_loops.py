"""Random training loops: random states, and steps that change them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from tests.store.equality import tensor_bytes

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
OPTIMIZERS: tuple[Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, 0.01),
    lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, foreach=True, nesterov=True),
    lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    torch.optim.Adagrad,
)
FUSED: tuple[Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.AdamW(parameters, fused=True),
    lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, fused=True),
    lambda parameters: torch.optim.Adagrad(parameters, fused=True),
)
"""Optimizers for real numbers of at least 32 bits, in one memory layout."""
_LARGEST = 6_000
_LAYERS_MAX = 6


class Layer(torch.nn.Module):
    """Parameters of random kinds, trained or frozen, and buffers that the forward pass changes."""

    def __init__(self, chance: random.Random, *, plain: bool) -> None:
        """Choose the tensors; ``plain`` layers only have tensors that fused optimizers accept."""
        super().__init__()
        for number in range(chance.randint(1, 3)):
            value = _plain(chance) if plain else _tensor(chance)
            trained = chance.random() < 0.8
            setattr(self, f"p{number}", torch.nn.Parameter(value, requires_grad=trained))
        for number in range(chance.randint(0, 2)):
            self.register_buffer(f"b{number}", _tensor(chance).requires_grad_(requires_grad=False))
        if chance.random() < 0.3:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if chance.random() < 0.15:
            _share_memory(self)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Change the buffers, and use every parameter in the result."""
        for buffer in self.buffers():
            buffer.data.add_(1)
        for parameter in self.parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            value = value + (real.double() * 0.5).sin().sum()
        return value


def _plain(chance: random.Random) -> torch.Tensor:
    return torch.randn(chance.choice((1, 7, 300, chance.randint(1, _LARGEST))))


def _tensor(chance: random.Random) -> torch.Tensor:
    """Return a tensor of any dtype, shape and memory layout."""
    dtype = chance.choice(DTYPES)
    layout = chance.randrange(8)
    rows, columns = chance.randint(1, 60), chance.randint(1, _LARGEST // 60)
    if layout == 0:
        return torch.randn(rows, columns, 1).to(dtype).permute(1, 2, 0)
    if layout == 1:
        return torch.randn(rows, 3 * columns).to(dtype)[:, ::3]
    if layout == 2:
        return torch.randn(rows + 4, columns).to(dtype)[chance.randint(0, 3) :]
    if layout == 3:
        return torch.randn(()).to(dtype)
    if layout == 4 and chance.random() < 0.3:
        return torch.empty(0, columns, dtype=dtype)
    return torch.randn(rows, columns).to(dtype)


def _share_memory(layer: Layer) -> None:
    """Move a parameter and a buffer into one allocation."""
    flat = torch.randn(3000)
    layer.inside = torch.nn.Parameter(flat[:1700])
    layer.register_buffer("beside", flat[1700:])


class RandomLoop:
    """A training loop with random properties, which is the same for the same ``seed``."""

    def __init__(self, seed: int) -> None:
        """Choose all properties."""
        self.chance = chance = random.Random(seed)
        torch.manual_seed(seed)
        self._plain = chance.random() < 0.3
        self._kinds = (*OPTIMIZERS, *FUSED) if self._plain else OPTIMIZERS
        self.model = torch.nn.ModuleList(self._layer() for _ in range(chance.randint(1, 4)))
        if chance.random() < 0.3 and len(self.model) > 1:
            # Add a parameter under two names.
            self.model[-1].tied = next(self.model[0].parameters())
        self.optimizers: list[torch.optim.Optimizer] = []
        self.state: dict[str, object] = {"model": self.model, "optimizers": self.optimizers, "epoch": 0}
        self._own([parameter for parameter in self.model.parameters() if chance.random() < 0.9])
        if chance.random() < 0.5:
            self.state["average"] = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        if chance.random() < 0.3:
            self.state["array"] = np.arange(chance.randint(1, 3000), dtype=chance.choice(["<i8", "<f4", "|u1"]))
        if chance.random() < 0.3:
            self.state["generator"] = torch.get_rng_state()
        self._accumulated = chance.choice((1, 1, 2, 3))

    def _layer(self) -> Layer:
        return Layer(self.chance, plain=self._plain)

    def _own(self, parameters: list[torch.nn.Parameter]) -> None:
        """Assign parameters to one or two new optimizers."""
        halves = [parameters[::2], parameters[1::2]] if self.chance.random() < 0.3 else [parameters]
        self.optimizers.extend(self.chance.choice(self._kinds)(half) for half in halves if half)

    def iterate(self) -> None:
        """Run forward and backward, maybe several times, and a step of all or some optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.chance.random() < 0.5)
        for _ in range(self._accumulated):
            loss = self.forward()
            if loss.requires_grad:
                loss.backward()
        for optimizer in self.optimizers:
            if self.chance.random() < 0.9:
                optimizer.step()
        self.state["epoch"] = self.chance.random()

    def forward(self) -> torch.Tensor:
        """Run only the forward pass, as an evaluation does. Buffers change."""
        value = torch.zeros((), dtype=torch.float64)
        for layer in self.model:
            value = layer(value)
        return value

    def change_what_may_change(self) -> None:
        """Change tensors that no optimizer owns, as loops do between two steps."""
        average = self.state.get("average")
        if isinstance(average, dict):
            for tensor in average.values():
                tensor.data.neg_()
        array = self.state.get("array")
        if isinstance(array, np.ndarray):
            array += 1
        owned = {id(value) for optimizer in self.optimizers for g in optimizer.param_groups for value in g["params"]}
        for parameter in self.model.parameters():
            if id(parameter) not in owned and self.chance.random() < 0.3:
                parameter.data.neg_()

    def change_structure(self) -> None:
        """Add a layer and its parameters to an optimizer, or another entry, or remove one."""
        if len(self.model) < _LAYERS_MAX and self.chance.random() < 0.5:
            layer = self._layer()
            self.model.append(layer)
            if self.chance.random() < 0.7:
                self._own(list(layer.parameters()))
        elif self.chance.random() < 0.5:
            self.state["extra"] = torch.randn(self.chance.randint(0, 4000))
        else:
            self.state.pop("extra", None)

    def deferrable(self) -> dict[str, torch.Tensor]:
        """Return the tensors that optimizers own and that may be copied after ``step()``, by name."""
        found: dict[str, torch.Tensor] = {f"model.{name}": value for name, value in self.model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for index, entry in optimizer.state_dict()["state"].items():
                for name, value in entry.items():
                    if isinstance(value, torch.Tensor):
                        found[f"optimizers.{number}.state.{index}.{name}"] = value
        return {name: value for name, value in found.items() if value.numel()}


def mutate(tensor: torch.Tensor, chance: random.Random) -> None:
    """Change at least one bit of a tensor, in a way that no version counter shows."""
    before = tensor_bytes(tensor)
    kind = chance.randrange(4)
    if not tensor.dim():
        # Keep step counts positive, because optimizers take roots of them.
        tensor.data.add_(1)
    elif kind == 0:
        tensor.data.neg_()
    elif kind == 1:
        tensor.data[chance.randrange(tensor.shape[0])].neg_()
    elif kind == 2 and tensor.dtype != torch.bfloat16:
        array = tensor.detach().numpy()
        np.negative(array, out=array)
    if tensor_bytes(tensor) == before:
        # Write through the address, as another library may do.
        memory, first = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
        memory[first] = memory[first] ^ 1
