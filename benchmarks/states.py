"""Create states with the shapes of real models and their optimizers."""

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


def gpt2_shapes(layers: int = 12) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of GPT-2 and AdamW, by name; with 0 layers, of a few small tensors."""
    shapes = [(50257, 768), (1024, 768), *(_GPT2_LAYER * layers), (768,), (768,)]
    if not layers:
        shapes = [(1001, 96), (7, 3), (1,)]
    parts = ("model", "exp_avg", "exp_avg_sq")
    return {f"{part}.p{number}": shape for part in parts for number, shape in enumerate(shapes)}


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
    """Return the tensors of a state of this module."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    return []


def change_everything(state: object) -> None:
    """Change at least one number in every block of 4 KiB, so that no bytes are stored already."""
    for tensor in tensors_of(state):
        tensor.view(-1)[:: 4096 // tensor.element_size()] += 1


def named_tensors(state: object, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state of this module by their dotted names, as the peers store them."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    if isinstance(state, dict):
        return {
            inner: tensor
            for key, value in state.items()
            for inner, tensor in named_tensors(value, f"{name}.{key}" if name else str(key)).items()
        }
    return {}


def unique(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by their first names, each memory once, because other libraries refuse tied tensors."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(first.values())


def small(megabytes: int = 8) -> dict[str, object]:
    """Return a state of that many MB in tensors of many sizes, for functional checks of a workload."""
    count = 16
    large = torch.randn(megabytes * 10**6 // 4 // 2)
    rest = torch.randn(count, megabytes * 10**6 // 4 // 2 // count)
    model = {f"p{number}": part.clone() for number, part in enumerate(rest)}
    return {"model": {"large": large, **model}, "step": torch.tensor(1.0)}


def describe(state: object) -> str:
    """Return a description of the state for the report."""
    tensors = tensors_of(state)
    return f"{len(tensors)} tensors of float32, {sum(tensor.nbytes for tensor in tensors) / 1e9:.3f} GB"


def differing(state: object, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that differ from ``state`` in any bit."""
    return [
        name
        for name, tensor in named_tensors(state).items()
        if name not in tensors or not torch.equal(_bytes_of(tensor), _bytes_of(tensors[name]))
    ]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def empty_like(state: object) -> object:
    """Return the same state with zeroed tensors, in existing memory."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state).fill_(0)
    if isinstance(state, dict):
        return {key: empty_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [empty_like(value) for value in state]
    return state
