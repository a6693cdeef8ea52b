"""Test that a capture is the state at its step, for any training and any delay of the copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import CaptureWarning
from tests.checkpointer.cases import CASES, STEPS, compiled, many_tensors
from tests.checkpointer.loops import (
    Loop,
    assert_every_step_is_right,
    copy_late,
    folder_for_rings,
)
from tests.checkpointer.optimizers import WIDTH, batch

# Some optimizers skip some steps, so all tensors equal those of the previous step.
pytestmark = pytest.mark.filterwarnings("ignore::asymcheck.errors.StaleStateWarning")


@pytest.fixture(params=["early", "late"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureConfig:
    """Return configurations that capture as early and as late as possible."""
    if request.param == "late":
        copy_late(monkeypatch)
    return CaptureConfig(proof="full", ring_folder=str(folder_for_rings(tmp_path)))


@pytest.mark.slow(quick=["late-late-state"])
@pytest.mark.parametrize("case", CASES)
def test_each_step_is_stored_exactly(store: Store, config: CaptureConfig, case: str) -> None:
    """Test every bit of every step, without a warning or an error."""
    torch.manual_seed(0)
    assert_every_step_is_right(store, CASES[case](), STEPS, config)


@pytest.mark.slow(quick=["late-compiled"])
@pytest.mark.parametrize("case", [many_tensors, compiled], ids=["many-tensors", "compiled"])
def test_each_step_of_a_large_model_is_stored_exactly(
    store: Store, config: CaptureConfig, case: Callable[[], Loop]
) -> None:
    """Test every bit of every step, with longer copies."""
    torch.manual_seed(0)
    assert_every_step_is_right(store, case(), 3, config)


@pytest.mark.slow(quick=["early-one"])
@pytest.mark.parametrize("each", [False, True], ids=["one", "one for each parameter"])
def test_an_optimizer_inside_the_backward_pass_is_noticed(store: Store, config: CaptureConfig, each: bool) -> None:
    """Test that one warning is given for any number of such optimizers, and that every capture is correct."""
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adam([value]) for value in parameters] if each else [torch.optim.Adam(parameters[:1])]
    for value, optimizer in zip(parameters, optimizers, strict=False):

        def hook(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        value.register_post_accumulate_grad_hook(hook)
    loop = Loop({"model": model, "optimizers": optimizers}, lambda step: model(batch(step)).square().mean().backward())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_every_step_is_right(store, loop, STEPS, config)
    assert [warning.category for warning in caught] == [CaptureWarning]
    assert "inside the backward pass" in str(caught[0].message)
