"""Test that states that change during a capture are never stored: each change is detected, named and reported."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import LostCheckpointError, LostCheckpointWarning, TornCaptureError
from asymcheck.state import leaves
from tests.checkpointer.loops import (
    Loop,
    assert_stored,
    copy_late,
    copy_of,
    folder_for_rings,
    linear_loop,
    rings,
)

Mutation = Callable[[torch.nn.Linear, torch.optim.AdamW], object]
TORN_STEP = 2


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureConfig:
    """Return a configuration in which only the fence copies deferred state, and all bytes are compared."""
    copy_late(monkeypatch)
    return CaptureConfig(proof="full", ring_folder=str(folder_for_rings(tmp_path)))


def _moment(model: torch.nn.Linear, optimizer: torch.optim.AdamW, name: str = "exp_avg") -> torch.Tensor:
    return torch.as_tensor(optimizer.state[model.weight][name])


def _add_without_gradient(model: torch.nn.Linear, _optimizer: torch.optim.AdamW) -> None:
    with torch.no_grad():
        model.weight.add_(1e-3)


def _write_bytes(model: torch.nn.Linear, _optimizer: torch.optim.AdamW) -> None:
    storage = model.weight.untyped_storage()
    storage[len(storage) - 1] = storage[len(storage) - 1] ^ 1


def _write_array(model: torch.nn.Linear, _optimizer: torch.optim.AdamW) -> None:
    model.weight.detach().numpy()[3, 4] = 7


def _swap(model: torch.nn.Linear, _optimizer: torch.optim.AdamW) -> None:
    kept = model.weight.data[0].clone()
    model.weight.data[0] = model.weight.data[1]
    model.weight.data[1] = kept


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "data": (lambda model, _optimizer: model.weight.data.add_(1), r"model\.weight"),
    "array": (_write_array, r"model\.weight"),
    "view": (lambda model, _optimizer: model.weight.data.view(-1)[777:778].zero_(), r"model\.weight"),
    "no_grad": (_add_without_gradient, r"model\.weight"),
    "last bit of the storage": (_write_bytes, r"model\.weight"),
    "swapped rows": (_swap, r"model\.weight"),
    "bias": (lambda model, _optimizer: model.bias.data.neg_(), r"model\.bias"),
    "first moment": (lambda model, optimizer: _moment(model, optimizer).mul_(0.5), r"optimizer\.state\.0\.exp_avg "),
    "second moment": (
        lambda model, optimizer: _moment(model, optimizer, "exp_avg_sq").data.view(-1)[-1:].add_(1),
        r"optimizer\.state\.0\.exp_avg_sq",
    ),
    "loading": (
        lambda model, _optimizer: model.load_state_dict(
            {name: value * 2 for name, value in model.state_dict().items()}
        ),
        r"model\.weight",
    ),
}


def _train(
    store: Store, config: CaptureConfig, mutation: Mutation, *, steps: int = 5, on_error: str = "raise"
) -> tuple[dict[int, object], list[LostCheckpointError]]:
    """Train, and change the state in the forward pass after one step; return the states and the errors."""
    model, optimizer, loop = linear_loop()
    expected: dict[int, object] = {}
    errors = []
    with Checkpointer(store, loop.state, capture=config, on_error=on_error, every=1, keep=None) as checkpointer:  # type: ignore[arg-type]  # as given
        for step in range(steps):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
            if step == TORN_STEP:
                mutation(model, optimizer)
            try:
                checkpointer.wait()
            except LostCheckpointError as error:
                errors.append(error)
        statistics = checkpointer.statistics()
    assert (statistics.captures, statistics.durable + statistics.lost) == (steps, steps)
    return expected, errors


@pytest.mark.slow(quick=["last bit of the storage"])
@pytest.mark.parametrize("how", MUTATIONS)
def test_change_during_a_capture_discards_it(store: Store, config: CaptureConfig, tmp_path: Path, how: str) -> None:
    """Test that the error names the tensor, no checkpoint has the step, and later checkpoints are correct."""
    mutation, name = MUTATIONS[how]
    expected, errors = _train(store, config, mutation)
    assert len(errors) == 1
    assert f"step {TORN_STEP}" in str(errors[0])
    assert isinstance(errors[0].__cause__, TornCaptureError)
    with pytest.raises(TornCaptureError, match=name):
        raise errors[0].__cause__
    del expected[TORN_STEP]
    assert_stored(store, expected)
    assert store.verify() == []
    assert rings(tmp_path) == []


def test_with_on_error_warn_training_goes_on(store: Store, config: CaptureConfig) -> None:
    """Test that the loss is one warning that points at the training loop."""
    with pytest.warns(LostCheckpointWarning, match=rf"step {TORN_STEP} .*model\.weight changed") as caught:
        expected, errors = _train(store, config, MUTATIONS["data"][0], on_error="warn")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert errors == []
    del expected[TORN_STEP]
    assert_stored(store, expected)


def test_the_loss_is_raised_by_a_later_step(store: Store, config: CaptureConfig) -> None:
    """Test that ``step()`` also reports a loss to a loop that never waits."""
    model, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        model.weight.data.add_(1)
        checkpointer.fence()
        background = checkpointer._background
        assert background is not None
        background.wait("local")
        with pytest.raises(LostCheckpointError, match="step 0"):
            checkpointer.step(1)
        # The loss is reported once, and the checkpoint of this step was begun nevertheless.
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]


def test_the_loss_is_raised_by_close(store: Store, config: CaptureConfig) -> None:
    """Test that ``close()`` raises the error, closing again is allowed, and no resource is left."""
    model, _, loop = linear_loop()
    checkpointer = Checkpointer(store, loop.state, capture=config, every=1, keep=None)
    loop.iterate(0)
    checkpointer.step(0)
    model.weight.data.add_(1)
    with pytest.raises(LostCheckpointError, match="step 0"):
        checkpointer.close()
    checkpointer.close()
    assert checkpointer.statistics().lost == 1
    assert store.checkpoints() == []


def test_loop_sees_the_error_that_ended_it(store: Store, config: CaptureConfig) -> None:
    """Test that other losses are warnings."""
    model, _, loop = linear_loop()

    def train() -> None:
        with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
            loop.iterate(0)
            checkpointer.step(0)
            model.weight.data.add_(1)
            raise KeyboardInterrupt

    with (
        pytest.warns(LostCheckpointWarning, match="LostCheckpointError: step 0") as told,
        pytest.raises(KeyboardInterrupt),
    ):
        train()
    assert told[0].filename == __file__


class _Exchanging(torch.optim.SGD):
    """Optimizer that exchanges its parameters between steps, as schedule-free optimizers do."""

    def eval(self) -> None:
        """Exchange each parameter for an average."""
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.5)

    def first_step(self) -> None:
        """Move each parameter, as SAM does."""
        self.eval()


@pytest.mark.parametrize("method", ["eval", "first_step"])
def test_optimizer_that_changes_parameters_between_steps_tears_nothing(
    store: Store, config: CaptureConfig, method: str
) -> None:
    """Test that its parameters are copied inside ``step()``."""
    model = torch.nn.Linear(30, 20)
    optimizer = _Exchanging(model.parameters(), lr=0.1, momentum=0.9)
    state, expected = {"model": model, "optimizer": optimizer}, {}
    with warnings.catch_warnings(), Checkpointer(store, state, capture=config, every=1, keep=None) as checkpointer:
        warnings.simplefilter("error")
        for step in range(3):
            model(torch.ones(30)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
            expected[step] = copy_of(state)
            getattr(optimizer, method)()
            checkpointer.wait()
    assert_stored(store, expected)


def test_a_change_that_is_taken_back_is_none(store: Store, config: CaptureConfig) -> None:
    """Test that only content is compared: weights that are exchanged for an evaluation and put back are correct."""
    model, _, loop = linear_loop()

    def evaluate() -> None:
        kept = model.weight.detach().clone()
        model.weight.data.zero_()
        model.weight.data.copy_(kept)

    expected, errors = _train_with(store, config, loop, lambda _checkpointer: evaluate(), lambda: None)
    assert errors == []
    assert_stored(store, expected)


def test_a_change_after_the_fence_is_harmless(store: Store, config: CaptureConfig) -> None:
    """Test that the capture contains the state before the change."""
    model, optimizer, loop = linear_loop()

    def change(checkpointer: Checkpointer) -> None:
        checkpointer.fence()
        model.weight.data.add_(1)
        _moment(model, optimizer).zero_()

    expected, errors = _train_with(store, config, loop, change, lambda: None)
    assert errors == []
    assert_stored(store, expected)


def test_change_before_step_is_included(store: Store, config: CaptureConfig) -> None:
    """Test a change such as clipped weights after the optimizer step."""
    model, _, loop = linear_loop()

    def clip() -> None:
        model.weight.data.clamp_(-0.01, 0.01)

    expected, errors = _train_with(store, config, loop, lambda _checkpointer: None, clip)
    assert errors == []
    assert_stored(store, expected)
    loaded = store.load(4)
    assert isinstance(loaded, dict)
    assert loaded["model"]["weight"].abs().max() <= 0.01


@pytest.mark.parametrize("is_late", [False, True])
def test_tensors_outside_optimizers_are_deferred_by_name(store: Store, config: CaptureConfig, is_late: bool) -> None:
    """Test averaged weights that are updated before ``step()``, and after it, which is detected and discarded."""
    model, _, loop = linear_loop()
    average = AveragedModel(model)
    state, expected = loop.state | {"average": average}, {}
    errors: list[LostCheckpointError] = []
    config = dataclasses.replace(config, deferred=("average.*",))
    with Checkpointer(store, state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(4):
            loop.iterate(step)
            if not is_late:
                average.update_parameters(model)
            checkpointer.step(step)
            expected[step] = copy_of(state)
            if is_late:
                average.update_parameters(model)
            try:
                checkpointer.wait()
            except LostCheckpointError as error:
                errors.append(error)
                del expected[step]
    # From the second capture on, the changing tensors are copied in step().
    assert [str(error.__cause__)[:22] for error in errors] == ["tensor average.module."] * is_late
    assert_stored(store, expected)


def _train_with(
    store: Store,
    config: CaptureConfig,
    loop: Loop,
    after: Callable[[Checkpointer], object],
    before: Callable[[], object],
) -> tuple[dict[int, object], list[LostCheckpointError]]:
    """Train with functions that run before and after each ``step()``."""
    expected: dict[int, object] = {}
    errors = []
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(5):
            loop.iterate(step)
            before()
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
            after(checkpointer)
        try:
            checkpointer.wait()
        except LostCheckpointError as error:
            errors.append(error)
    return expected, errors


def test_without_proof_a_torn_state_would_be_stored(store: Store, tmp_path: Path, config: CaptureConfig) -> None:
    """Test that the tests above depend on the proof, and not on changes that come too late."""
    unproved = CaptureConfig(proof="off", ring_folder=config.ring_folder)
    expected, errors = _train(store, unproved, MUTATIONS["data"][0])
    assert errors == []
    with pytest.raises(AssertionError):
        assert_stored(store, expected)


@pytest.mark.parametrize("bytes_for_a_thread", [8 << 20, 1], ids=["one thread", "several threads"])
def test_the_first_capture_finds_a_change_that_raises_no_version(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch, bytes_for_a_thread: int
) -> None:
    """Test one of 40 tensors, whose digests one thread or several threads compute."""
    monkeypatch.setattr(leaves, "_BYTES_FOR_A_THREAD", bytes_for_a_thread)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1200)) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampled = CaptureConfig(proof="sampled", ring_folder=config.ring_folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        with Checkpointer(store, state, capture=sampled, on_error="warn", every=1, keep=None) as checkpointer:
            checkpointer.step(0)
            model[7].data.add_(1)
            optimizer.step()
            checkpointer.wait()
    found = [str(warning.message) for warning in caught if warning.category is LostCheckpointWarning]
    assert len(found) == 1
    assert "tensor model.7 changed" in found[0]
