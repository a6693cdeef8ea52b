"""Test that the same random numbers follow a restore."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from asymcheck import RngState
from asymcheck.errors import StateDifferenceWarning
from asymcheck.types import Stateful


def _draw() -> tuple[list[float], list[float], list[float], list[float]]:
    return (
        torch.rand(5).tolist(),
        np.random.random(5).tolist(),  # noqa: NPY002 - the global generator is what is saved
        [random.random() for _ in range(5)],
        [random.gauss(0, 1), float(np.random.standard_normal())],  # noqa: NPY002 - as above; both keep a spare number
    )


def test_all_generators_continue() -> None:
    """Test torch, numpy and random, also with a pending normal number."""
    random.gauss(0, 1)
    np.random.standard_normal()  # noqa: NPY002 - as above
    state = RngState().state_dict()
    first = _draw()
    _draw()
    RngState().load_state_dict(state)
    assert _draw() == first


def test_state_is_a_copy() -> None:
    """Test that drawing more numbers does not change the state."""
    state = RngState().state_dict()
    kept = torch.as_tensor(state["torch"]).clone()
    _draw()
    assert torch.equal(torch.as_tensor(state["torch"]), kept)


def test_rng_state_is_stateful() -> None:
    """Test state_dict() and load_state_dict()."""
    assert isinstance(RngState(), Stateful)


def test_generators_of_other_devices_are_left_alone_when_their_number_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the generators of the host are restored, and that a warning names the others."""
    state = RngState().state_dict()
    first = _draw()
    restored: list[list[torch.Tensor]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    for count in (0, 1, 2, 99):
        state["cuda"] = [torch.full((16,), count, dtype=torch.uint8)] * count
        differs = pytest.warns(StateDifferenceWarning, match=f"of {count} CUDA devices")
        with differs if count in (1, 99) else nullcontext():
            RngState().load_state_dict(state)
        assert _draw() == first
    assert [[int(one[0]) for one in states] for states in restored] == [[2, 2]]
