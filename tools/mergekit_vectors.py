"""Write ``tests/merging/mergekit_vectors.json``: results of mergekit for random tensors.

Run ``PYTHONPATH=FOLDER python -m tools.mergekit_vectors`` after ``pip install --no-deps --target FOLDER mergekit``. The
pins of mergekit conflict with those of this project, so mergekit is not a dependency.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TARGET = Path(__file__).resolve().parents[1] / "tests" / "merging" / "mergekit_vectors.json"
_ELEMENTS = 40


def _ties(base: torch.Tensor, values: Sequence[torch.Tensor], weights: Sequence[float], density: float) -> torch.Tensor:
    methods: Any = importlib.import_module("mergekit.merge_methods.registry")
    groups: Any = importlib.import_module("mergekit.merge_methods.base")
    method = methods.get("ties")
    group = groups.TensorGroup.from_tensors([*values, base], base_index=len(values))
    numbers = range(len(values))
    each = {"weight": dict(zip(numbers, weights, strict=True)), "density": dict.fromkeys(numbers, density)}
    shared = {"int8_mask": False, "normalize": True, "rescale": False, "lambda": 1.0}
    merged: torch.Tensor = method.merge_group(group, **each, **shared)
    return merged


def _dare(
    base: torch.Tensor, values: Sequence[torch.Tensor], weights: Sequence[float], density: float
) -> tuple[torch.Tensor, list[list[bool]]]:
    """Return the result with mergekit's random masks, which are rescaled as in the paper, and the masks."""
    sparsify: Any = importlib.import_module("mergekit.sparsify")
    kept = [sparsify.bernoulli(value - base, density) for value in values]
    pairs = zip(weights, kept, strict=True)
    merged = base + sum((weight * delta / density for weight, delta in pairs), torch.zeros_like(base))
    return merged, [(delta != 0).tolist() for delta in kept]


def _slerp(x: torch.Tensor, y: torch.Tensor, t: float) -> torch.Tensor:
    slerp: Any = importlib.import_module("mergekit.merge_methods.slerp")
    merged: torch.Tensor = slerp.slerp(torch.tensor([t]), x[None], y[None])[0]
    return merged


def _linear(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    groups: Any = importlib.import_module("mergekit.merge_methods.base")
    linear: Any = importlib.import_module("mergekit.merge_methods.linear")
    batch = groups.TensorBatch(tuple(value[None] for value in values))
    merged: torch.Tensor = linear.linear_merge.implementation(batch, torch.tensor([weights]))[0]
    return merged


def main() -> None:
    """Write the file."""
    torch.manual_seed(1)
    base = torch.randn(_ELEMENTS)
    values = [base + 0.3 * torch.randn(_ELEMENTS) for _ in range(3)]
    weights = [0.5, 1.0, 0.25]
    cases: list[dict[str, object]] = []

    def add(
        name: str, inputs: Sequence[torch.Tensor], expected: torch.Tensor, masks: object = (), **settings: object
    ) -> None:
        case = {"name": name, "settings": settings, "inputs": [value.double().tolist() for value in inputs]}
        cases.append({**case, "masks": masks, "expected": expected.double().tolist()})

    add("mean", values, _linear(values, [1.0] * 3), method="mean")
    add("weighted", values, _linear(values, weights), method="weighted", weights=weights)
    for t in (0.0, 0.25, 1.0):
        add(f"slerp-{t}", values[:2], _slerp(values[0], values[1], t), method="slerp", t=t)
    add("slerp-parallel", [base, 2 * base], _slerp(base, 2 * base, 0.3), method="slerp", t=0.3)
    add("slerp-opposite", [base, -base], _slerp(base, -base, 0.3), method="slerp", t=0.3)
    add("slerp-zero", [base, 0 * base], _slerp(base, 0 * base, 0.3), method="slerp", t=0.3)
    for density in (0.2, 0.5, 1.0):
        merged = _ties(base, values, weights, density)
        add(f"ties-{density}", [*values, base], merged, method="ties", weights=weights, density=density)
        merged, masks = _dare(base, values, weights, density)
        add(f"dare-{density}", [*values, base], merged, masks, method="dare", weights=weights, density=density)
    TARGET.write_text(json.dumps({"mergekit": "0.1.5", "cases": cases}) + "\n", "utf-8")


if __name__ == "__main__":
    main()
