"""Fixtures: a store with four checkpoints of a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asymcheck

CONFIG = asymcheck.StoreConfig(partition_bytes=8192, bundle_below_bytes=4096, inline_bytes=64)
STEPS = (10, 20, 30, 40)


def model_of(step: int) -> dict[str, object]:
    """Return the weights of a step: two dtypes, a frozen tensor, a tied one, an integer, and a scalar."""
    numbers = torch.Generator().manual_seed(step)
    embedding = torch.randn(90, 50, generator=numbers)
    return {
        "embedding": embedding,
        "head": embedding,
        "half": torch.randn(70, 70, generator=numbers).bfloat16(),
        "frozen": torch.arange(9000, dtype=torch.float32),
        "bias": torch.randn(7, generator=numbers).half(),
        "scale": torch.tensor(float(step)),
        "batches": torch.tensor(step),
        "name": f"after {step}",
    }


def state_of(step: int) -> dict[str, object]:
    """Return a state with optimizer state and a scheduler."""
    moments = {0: {"exp_avg": torch.full((90, 50), float(step)), "step": torch.tensor(step)}}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1}]}
    return {"model": model_of(step), "optimizer": optimizer, "scheduler": {"last": step}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[asymcheck.Store]:
    """Return an open store with the checkpoints of :data:`STEPS`."""
    with asymcheck.Store.open(tmp_path / "store", config=CONFIG, create=True) as opened:
        for step in STEPS:
            opened.save(state_of(step), step=step)
        yield opened
