"""Role of a tensor in training, derived from its name."""

from __future__ import annotations

_BY_LAST_PART = {
    "exp_avg": "first_moment",
    "momentum_buffer": "first_moment",
    "exp_avg_sq": "second_moment",
    "max_exp_avg_sq": "second_moment",
    "square_avg": "second_moment",
    "grad": "gradient",
    "master": "weights",
    "master_param": "weights",
    "weight": "weights",
    "bias": "weights",
}
_BY_FIRST_PART = {"model": "weights", "module": "weights", "ema": "weights", "rng": "rng"}


def role_of(name: str) -> str:
    """Return the role of a tensor: by the last part of its dotted name, else by the first, else ``other``."""
    parts = name.split(".")
    return _BY_LAST_PART.get(parts[-1]) or _BY_FIRST_PART.get(parts[0], "other")
