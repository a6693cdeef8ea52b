"""States to save: the shapes of real models with their optimizers."""

from __future__ import annotations

import torch

_GPT2_LAYER = (
    (768,),
    (768,),
    (768, 2304),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (768, 3072),
    (3072,),
    (3072, 768),
    (768,),
)


def gpt2_adamw(layers: int = 12) -> dict[str, object]:
    """Return the state of GPT-2 124M (with 12 layers) and AdamW in float32: 1.49 GB of random numbers.

    Shapes are those of the published model, with tied embeddings.
    """
    shapes = [(50257, 768), (1024, 768), *(_GPT2_LAYER * layers), (768,), (768,)]
    moments = {
        number: {"step": torch.tensor(1.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        for number, shape in enumerate(shapes)
    }
    model = {f"p{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}}


def tensors_of(state: object) -> list[torch.Tensor]:
    """Return the tensors of a state made here."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    return []


def change_everything(state: object) -> None:
    """Change at least one number in every block of 4 KiB, so that nothing is stored already."""
    for tensor in tensors_of(state):
        tensor.view(-1)[:: 4096 // tensor.element_size()] += 1
