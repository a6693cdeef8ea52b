"""Loops that change parameters outside their optimizers: with the default proof, no checkpoint is torn in silence."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import AsymcheckError, CaptureWarning, LostCheckpointWarning
from tests.checkpointer.loops import CONFIG, copy_late, copy_of, folder_for_rings
from tests.store.equality import assert_same

CAPTURES, CAPTURES_LONG = 8, 200


@dataclasses.dataclass
class Net:
    """A model of some partitions, and its optimizer."""

    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer

    @property
    def weight(self) -> torch.Tensor:
        """The tensor that is changed."""
        return self.model[1].weight

    def backward(self) -> None:
        """Forward and backward."""
        self.model(torch.randn(4, 32)).square().mean().backward()

    def step(self) -> None:
        """Step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _net() -> Net:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    return Net(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _clamp(net: Net) -> None:
    with torch.no_grad():
        for parameter in net.model.parameters():
            parameter.clamp_(-0.02, 0.02).add_(1e-4)


def _set_one(net: Net) -> None:
    with torch.no_grad():
        net.weight[3, 4] += 1


def _write_array(net: Net) -> None:
    net.weight.detach().numpy()[3, 4] += 1


def _write_data(net: Net) -> None:
    net.weight.data.add_(1e-3)


CHANGES: dict[str, Callable[[Net], None]] = {
    "clamp_ without gradients": _clamp,
    "one element": _set_one,
}


def _between(change: Callable[[Net], None], net: Net) -> Callable[[], None]:
    return partial(change, net)


def _with_gradients(net: Net) -> Callable[[], None]:
    """Step as soon as a gradient is there, by hand, so that no hook of an optimizer is called."""

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)

    for parameter in net.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return lambda: None


def _inside_backward(net: Net) -> Callable[[], None]:
    """The same with optimizers."""

    def step(parameter: torch.Tensor) -> None:
        torch.optim.SGD([parameter], lr=0.1).step()

    for parameter in net.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return lambda: None


LOOPS: dict[str, Callable[[Net], Callable[[], None]]] = {
    **{name: partial(_between, change) for name, change in CHANGES.items()},
    "by hand with each gradient": _with_gradients,
    "optimizers inside the backward pass": _inside_backward,
}
"""Each prepares a loop, and returns what is done between ``step()`` and the next forward pass."""


@pytest.fixture
def config(tmp_path: Path) -> CaptureConfig:
    """The default but for the place of the rings."""
    return CaptureConfig(ring_folder=str(folder_for_rings(tmp_path)))


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """A new store of small partitions."""
    with Store.open(store_path, config=CONFIG) as opened:
        yield opened


def _assert_none_is_torn(store: Store, expected: dict[int, object]) -> None:
    for step, state in expected.items():
        with contextlib.suppress(AsymcheckError):
            loaded = store.load(step)
            assert_same(loaded, state, f"step {step}")


def _train(store: Store, net: Net, config: CaptureConfig, between: Callable[[], None], captures: int) -> list[str]:
    """Train with a change between ``step()`` and the optimizer step; return the warnings."""
    expected: dict[int, object] = {}
    state: dict[str, object] = {"model": net.model, "optimizer": net.optimizer}
    net.backward()
    net.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(store, state, capture=config, on_error="warn") as checkpointer:
            for step in range(captures):
                net.backward()
                net.step()
                checkpointer.step(step)
                expected[step] = copy_of(state)
                between()
    _assert_none_is_torn(store, expected)
    return [str(one.message) for one in caught if one.category in (CaptureWarning, LostCheckpointWarning)]


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("when", ["late", "soon"])
def test_no_checkpoint_is_torn_by_a_change_outside_the_optimizer(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    """Each is what the state was when ``step()`` returned, or is no checkpoint."""
    if when == "late":
        copy_late(monkeypatch)
    net = _net()
    _train(store, net, config, LOOPS[how](net), CAPTURES)


@pytest.mark.long
@pytest.mark.parametrize("how", LOOPS)
def test_none_of_two_hundred_is_torn(store: Store, config: CaptureConfig, how: str) -> None:
    """The same for longer."""
    net = _net()
    _train(store, net, config, LOOPS[how](net), CAPTURES_LONG)


@contextlib.contextmanager
def _hooked(net: Net) -> Iterator[Callable[[], None]]:
    """Change parameters in a hook of all optimizers; yield what makes it the first one again."""
    handle = register_optimizer_step_pre_hook(lambda *_: _clamp(net))
    try:
        yield lambda: optimizer_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # it is ordered
    finally:
        handle.remove()


def test_a_hook_of_optimizers_that_was_there_before_is_called_after_the_fence(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change what it likes then: nothing is lost."""
    copy_late(monkeypatch)
    net = _net()
    with _hooked(net):
        assert _train(store, net, config, lambda: None, CAPTURES) == []


def test_a_hook_that_comes_before_the_fence_later_tears_nothing(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is looked at in each ``step()``; what was changed too early until then is given up."""
    copy_late(monkeypatch)
    net = _net()
    with _hooked(net) as overtake:
        calls = itertools.count()
        _train(store, net, config, lambda: overtake() if next(calls) == 1 else None, CAPTURES)
