"""Test suggestions for missing names."""

from __future__ import annotations

from asymcheck.state.names import did_you_mean


def test_a_suggestion_looks_at_few_of_many_names() -> None:
    """Test that naming each of many missing tensors does not take quadratic time."""
    stored = iter([f"layer.{number}" for number in range(10_000)])
    assert did_you_mean("weight", stored, {"layer.0"}) == ""
    assert next(stored) == "layer.66"


def test_a_suggestion_is_similar_and_not_given() -> None:
    """Test a similar name, few other names, and no other name."""
    assert did_you_mean("weigth", ["weight", "bias"], {}) == "; did you mean 'weight', which is stored?"
    assert did_you_mean("weigth", ["weight", "bias"], {"weight"}) == "; stored are bias"
    assert did_you_mean("weigth", ["weight"], {"weight"}) == ""
