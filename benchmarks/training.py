"""Create real training states: a byte-level GPT-2 learns Python's standard library, in several ways.

All trainings begin with one pre-training in float32. It continues, or is tuned with a small learning rate, in mixed
precision (bfloat16 weights with a float32 master), or with low-rank adapters and frozen weights.
"""

from __future__ import annotations

import copy
import dataclasses
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

_BATCH = 8
_RATE, _SMALL_RATE = 6e-4, 1e-5
_WARM_UP = 20
_RANK = 8

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model, and length of the training before the first checkpoint."""

    layers: int
    width: int
    context: int
    steps: int


# From a width of 512 on, tensors are large enough for separate partitions, as in real models.
FULL = Shape(3, 512, 32, 200)
QUICK = Shape(2, 128, 32, 40)


class Run:
    """A training with steps and a state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, context: int) -> None:
        self.model, self.optimizer = model, optimizer
        self._text, self._context = text, context

    def state(self) -> State:
        """Return the state that a user saves: live tensors, which the loop continues to change."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train(self, steps: int) -> None:
        """Train on random pieces of the text."""
        for _ in range(steps):
            starts = torch.randint(len(self._text) - self._context, (_BATCH,))
            tokens = torch.stack([self._text[start : start + self._context] for start in starts.tolist()]).long()
            self.model(tokens, labels=tokens).loss.backward()
            self.update()
            self.model.zero_grad()

    def update(self) -> None:
        """Run the optimizer step."""
        self.optimizer.step()


class Mixed(Run):
    """Forward and backward in bfloat16; AdamW steps on a float32 master, from which the weights are rounded."""

    def __init__(self, run: Run) -> None:
        model = copy.deepcopy(run.model)
        self.master = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(self.master, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        super().__init__(model.bfloat16(), optimizer, run._text, run._context)  # noqa: SLF001 - the same class

    def state(self) -> State:
        """Add the master weights to the saved state."""
        return {**super().state(), "master": dict(enumerate(self.master))}

    def update(self) -> None:
        """Step on the master and round it."""
        parameters = list(self.model.parameters())
        for master, parameter in zip(self.master, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        nn.utils.clip_grad_norm_(self.master, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.master, parameters, strict=True):
                parameter.copy_(master)


class _Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        (rows, columns) = layer.get_parameter("weight").shape
        self.down = nn.Parameter(torch.randn(rows, _RANK) * 0.01)
        self.up = nn.Parameter(torch.zeros(_RANK, columns))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs) + inputs @ self.down @ self.up
        return outputs


def pretrained(shape: Shape) -> Run:
    """Return a model after a short training in float32."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=max(shape.width // 64, 2),
        n_positions=shape.context,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:100])
    run = Run(model, optimizer, torch.frombuffer(bytearray(text), dtype=torch.uint8), shape.context)
    for step in range(shape.steps):
        optimizer.param_groups[0]["lr"] = _RATE * min(1, (step + 1) / _WARM_UP)
        run.train(1)
    return run


def _going_on(run: Run) -> Run:
    return copy.deepcopy(run)


def _fine_tuned(run: Run) -> Run:
    tuned = copy.deepcopy(run)
    tuned.optimizer.param_groups[0]["lr"] = _SMALL_RATE
    return tuned


def _adapted(run: Run) -> Run:
    model = copy.deepcopy(run.model).requires_grad_(False)
    for block in model.transformer.h:  # type: ignore[union-attr]  # a GPT-2
        block.attn.c_attn = _Adapted(block.attn.c_attn)
        block.mlp.c_fc = _Adapted(block.mlp.c_fc)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Run(model, torch.optim.AdamW(chosen, lr=_RATE), run._text, run._context)  # noqa: SLF001 - the same class


VARIANTS: dict[str, Callable[[Run], Run]] = {
    "fp32": _going_on,
    "mixed": Mixed,
    "fine-tune": _fine_tuned,
    "lora": _adapted,
}
"""Ways to continue from the pre-training, by name."""


def snapshot(run: Run) -> State:
    """Return a copy of the state, as a checkpoint would store it."""
    state: State = copy.deepcopy(run.state())
    return state
