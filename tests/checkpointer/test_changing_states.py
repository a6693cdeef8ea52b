"""Test loops that change parameters outside their optimizers: the default proof stores no torn checkpoint silently."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import re
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
from asymcheck.errors import AbandonedCheckpointsWarning, CaptureWarning, CheckpointNotFoundError
from tests.checkpointer.loops import copy_late, copy_of, folder_for_rings
from tests.store.equality import assert_same

CAPTURES, CAPTURES_LONG = 8, 200
LOST_MAX = 1
"""Number of checkpoints that a change costs: only the first, because changing tensors are known from then on."""


Between = Callable[[Checkpointer], object]
"""Function that a loop calls between ``step()`` and the next forward pass."""


@dataclasses.dataclass
class Net:
    """A model of some partitions, and its optimizer."""

    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer

    @property
    def weight(self) -> torch.Tensor:
        """Tensor that is changed."""
        return self.model[1].weight

    def backward(self) -> None:
        """Run the forward and the backward pass."""
        self.model(torch.randn(4, 32)).square().mean().backward()

    def step(self) -> None:
        """Run the optimizer step."""
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
    net.weight.data[5, 6] += 1


CHANGES: dict[str, Callable[[Net], None]] = {
    "clamp_ without gradients": _clamp,
    "one element": _set_one,
    "a numpy view": _write_array,
    "one element of .data": _write_data,
}


def _between(change: Callable[[Net], None], net: Net) -> Between:
    return lambda _checkpointer: change(net)


def _with_gradients(net: Net) -> Between:
    """Step by hand as soon as a gradient exists, so that no optimizer hook is called."""

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)

    for parameter in net.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return lambda _checkpointer: None


def _inside_backward(net: Net) -> Between:
    """Step with optimizers as soon as a gradient exists."""

    def step(parameter: torch.Tensor) -> None:
        torch.optim.SGD([parameter], lr=0.1).step()

    for parameter in net.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return lambda _checkpointer: None


LOOPS: dict[str, Callable[[Net], Between]] = {
    **{name: partial(_between, change) for name, change in CHANGES.items()},
    "by hand with each gradient": _with_gradients,
    "optimizers inside the backward pass": _inside_backward,
}
"""Functions that prepare a loop, and return the function to call between steps."""


@pytest.fixture
def config(tmp_path: Path) -> CaptureConfig:
    """Return the default configuration, with rings in a temporary folder."""
    return CaptureConfig(ring_folder=str(folder_for_rings(tmp_path)))


def _assert_none_is_torn(store: Store, expected: dict[int, object], lost_max: int = LOST_MAX) -> None:
    lost = []
    for step, state in expected.items():
        try:
            loaded = store.load(step)
        except CheckpointNotFoundError:
            lost.append(step)
        else:
            assert_same(loaded, state, f"step {step}")
    assert len(lost) <= lost_max
    assert_same(store.load(), expected[max(expected.keys() - lost)], "the newest")


def _train(
    store: Store,
    net: Net,
    config: CaptureConfig,
    between: Between,
    captures: int = CAPTURES,
    lost_max: int = LOST_MAX,
) -> list[str]:
    """Train with a change between ``step()`` and the optimizer step; return the warnings other than losses."""
    expected: dict[int, object] = {}
    state: dict[str, object] = {"model": net.model, "optimizer": net.optimizer}
    net.backward()
    net.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(store, state, capture=config, on_error="warn", every=1, keep=None) as checkpointer:
            for step in range(captures):
                net.backward()
                net.step()
                checkpointer.step(step)
                expected[step] = copy_of(state)
                between(checkpointer)
    _assert_none_is_torn(store, expected, lost_max)
    return [str(one.message) for one in caught if one.category is CaptureWarning]


def _train_with(
    store: Store, monkeypatch: pytest.MonkeyPatch, config: CaptureConfig, how: str, when: str, captures: int
) -> None:
    """Train with changes that come before all copies, or at any time.

    At any time, the copies of the first captures may precede the change. A later change is then found at once only if
    all bytes are proven, and at different captures for different tensors.
    """
    net = _net()
    between = LOOPS[how](net)
    if when == "late":
        copy_late(monkeypatch)
        warned = _train(store, net, config, between, captures)
        assert len(warned) == 1
    else:
        config = dataclasses.replace(config, proof="full")
        warned = _train(store, net, config, between, captures, lost_max=len(list(net.model.parameters())))
    assert all("step() from now on" in text or "inside the backward pass" in text for text in warned)


@pytest.mark.slow(quick=["late-a numpy view"])
@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("when", ["late", "soon"])
def test_no_checkpoint_is_torn_by_a_change_outside_the_optimizer(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    """Test that each checkpoint is exact or missing, and that a warning names each changing tensor."""
    _train_with(store, monkeypatch, config, how, when, CAPTURES)


@pytest.mark.long
@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("when", ["late", "soon"])
def test_none_of_two_hundred_is_torn(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    """Test that no checkpoint of a longer training is torn."""
    _train_with(store, monkeypatch, config, how, when, CAPTURES_LONG)


@pytest.mark.slow(quick=["one element"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_after_the_copy_is_seen_at_the_fence_and_costs_no_checkpoint(
    store: Store, config: CaptureConfig, how: str
) -> None:
    """Test that a changing tensor is always detected, independent of the time of the copy."""
    net = _net()

    def change_late(checkpointer: Checkpointer) -> None:
        background = checkpointer._background
        assert background is not None
        assert background._unfenced is not None
        assert background._unfenced.copied.wait(60)
        CHANGES[how](net)

    (warned,) = _train(store, net, config, change_late, lost_max=0)
    assert "model.1.weight" in warned


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a numpy view", "one element of .data"])
def test_checkpoints_before_a_change_was_found_are_off_the_line(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Test a change that begins when samples are compared: a warning names suspect checkpoints, never the newest."""
    copy_late(monkeypatch)
    net, expected, torn = _net(), {}, []
    state: dict[str, object] = {"model": net.model, "optimizer": net.optimizer}
    net.backward()
    net.step()
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        Checkpointer(store, state, capture=config, on_error="warn", every=1, keep=None) as checkpointer,
    ):
        for step in range(30):
            checkpointer.step(step)
            assert checkpointer._background is not None
            # Delay the comparison, so that some captures pass before the change is detected.
            checkpointer._background.detector._chance.seed(1)
            expected[step] = copy_of(state)
            net.backward()
            if step >= 8:
                CHANGES[how](net)
            net.step()
    (abandoned,) = [str(one.message) for one in caught if one.category is AbandonedCheckpointsWarning]
    assert "may be torn" in abandoned
    for checkpoint in store.checkpoints():
        loaded = store.load(f"save:{checkpoint.save_id}")
        if checkpoint.on_line:
            assert_same(loaded, expected[checkpoint.step], f"step {checkpoint.step}")
        else:
            with contextlib.suppress(AssertionError):
                assert_same(loaded, expected[checkpoint.step], "torn")
                continue
            torn.append(checkpoint.step)
            assert re.search(rf"\b{checkpoint.step}\b", abandoned)
    assert torn, "the change was met at once"
    assert_same(store.load(), expected[29], "the newest")


def test_change_after_wait_is_allowed(store: Store, config: CaptureConfig) -> None:
    """Test that a change after ``wait()`` is allowed, because no capture needs the state any more."""
    net = _net()

    def change(checkpointer: Checkpointer) -> None:
        checkpointer.wait()
        _clamp(net)

    assert _train(store, net, config, change, lost_max=0) == []


@contextlib.contextmanager
def _other_process(net: Net) -> Iterator[Callable[[Checkpointer], None]]:
    """Yield a function that makes another process change a shared tensor."""
    net.model.share_memory()
    ours, theirs = multiprocessing.Pipe()

    def work() -> None:
        array = net.weight.detach().numpy()
        while theirs.recv():
            array[3, 4] += 1
            theirs.send(True)

    def change(_checkpointer: Checkpointer) -> None:
        ours.send(True)
        assert ours.recv()

    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    with warnings.catch_warnings():
        # Python warns against forks of a process with threads, but this child only uses numpy.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    try:
        yield change
    finally:
        ours.send(False)
        process.join()


@pytest.mark.slow
def test_shared_tensor_is_copied_inside_step(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a tensor in shared memory is recognised, so no checkpoint is lost."""
    copy_late(monkeypatch)
    net = _net()
    with _other_process(net) as change:
        assert _train(store, net, config, change, lost_max=0) == []


@pytest.mark.long
def test_none_of_two_hundred_is_torn_by_another_process(store: Store, config: CaptureConfig) -> None:
    """Test that no checkpoint of a longer training is torn by another process."""
    net = _net()
    with _other_process(net) as change:
        assert _train(store, net, config, change, CAPTURES_LONG, lost_max=0) == []


@contextlib.contextmanager
def _hooked(net: Net) -> Iterator[Callable[[], None]]:
    """Change parameters in a hook of all optimizers; yield a function that makes this hook the first again."""
    handle = register_optimizer_step_pre_hook(lambda *_: _clamp(net))
    try:
        yield lambda: optimizer_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # it is ordered
    finally:
        handle.remove()


def test_earlier_global_optimizer_hook_runs_after_the_fence(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that such a hook may change parameters without a loss."""
    copy_late(monkeypatch)
    net = _net()
    with _hooked(net):
        assert _train(store, net, config, lambda _checkpointer: None, lost_max=0) == []


def test_a_hook_that_comes_before_the_fence_later_tears_nothing(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that each ``step()`` checks the order of the hooks, and that a capture with an early change is discarded."""
    copy_late(monkeypatch)
    net = _net()
    with _hooked(net) as overtake:
        calls = itertools.count()
        _train(store, net, config, lambda _checkpointer: overtake() if next(calls) == 1 else None)
