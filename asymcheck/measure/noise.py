"""Synthetic tensors for a store that has no checkpoint yet: they encode about as trained ones do."""

from __future__ import annotations

import numpy as np

from asymcheck.types import Sample

NOISE = "synthetic float noise: the store has no checkpoint with tensors to measure on"


def noise_samples(bytes_each: int) -> tuple[Sample, ...]:
    """Return samples of normally distributed floats: weights, moments, and the checkpoint before."""
    rng = np.random.default_rng(0)
    count = bytes_each // 4
    weights = rng.normal(0, 0.02, count).astype(np.float32)
    older = weights - rng.normal(0, 1e-5, count).astype(np.float32)
    first = rng.normal(0, 1e-4, count).astype(np.float32)
    half, older_half = (
        (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes() for values in (weights, older)
    )
    return (
        Sample("weights", "float32", weights.tobytes(), older.tobytes()),
        Sample("weights", "bfloat16", half, older_half),
        Sample("first_moment", "float32", first.tobytes()),
        Sample("second_moment", "float32", np.square(first).tobytes()),
    )
