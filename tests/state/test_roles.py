"""Test that roles follow from names, the last part first."""

import pytest

from asymcheck.format.registry import ROLES
from asymcheck.state.names import role_of


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.h.0.attn.weight", "weights"),
        ("model.buffers.running_mean", "weights"),
        ("module.fc.bias", "weights"),
        ("ema.fc", "weights"),
        ("decoder.weight", "weights"),
        ("optimizer.state.3.exp_avg", "first_moment"),
        ("optimizer.state.3.momentum_buffer", "first_moment"),
        ("optimizer.state.3.exp_avg_sq", "second_moment"),
        ("optimizer.state.3.max_exp_avg_sq", "second_moment"),
        ("optimizer.state.3.square_avg", "second_moment"),
        ("optimizer.state.3.step", "other"),
        ("model.fc.grad", "gradient"),
        ("rng.torch", "rng"),
        ("rng", "rng"),
        ("loader.position", "other"),
        ("", "other"),
    ],
)
def test_role_follows_from_the_name(name: str, role: str) -> None:
    """Test optimizer state and parameters by the last part of the name, and others by the first."""
    assert role_of(name) == role
    assert role in ROLES
