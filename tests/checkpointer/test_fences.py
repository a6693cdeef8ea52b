"""Test fences in compiled optimizers, with other training threads, and with Ctrl-C."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.capture import engine
from asymcheck.capture.device_copy import Devices, Transfers
from asymcheck.capture.tear_detection import SourceDigests, TearDetector
from asymcheck.config import CaptureConfig
from asymcheck.errors import LostCheckpointError
from asymcheck.events import watch
from tests.checkpointer.loops import (
    CONFIG,
    Loop,
    assert_every_step_is_right,
    assert_stored,
    copy_late,
    copy_of,
    linear_loop,
)
from tests.store.equality import assert_same


@pytest.fixture
def unproven(config: CaptureConfig, monkeypatch: pytest.MonkeyPatch) -> CaptureConfig:
    """Disable the proof, so that a missing fence shows as a torn checkpoint."""
    copy_late(monkeypatch)
    return dataclasses.replace(config, proof="off")


@pytest.mark.slow(quick=["0"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses features that torch has deprecated.
@pytest.mark.parametrize("warm", [0, 2])
def test_a_compiled_optimizer_step_waits(store: Store, unproven: CaptureConfig, warm: int) -> None:
    """Test optimizers compiled before and after the first capture, and that the copies are not compiled."""
    torch.compiler.reset()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step_compiled = torch.compile(optimizer.step, backend="eager")

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        model(torch.full((2, 64), 1.0 + step)).square().mean().backward()
        step_compiled()

    for step in range(warm):
        iterate(step)
    assert_every_step_is_right(store, Loop({"model": model, "optimizer": optimizer}, iterate), 3, unproven)


class _Perturbing(torch.optim.SGD):
    """Changes the weights before it calls the closure, as sharpness-aware minimization does."""

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]  # needs a closure
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1.0)
        return torch.as_tensor(super().step(closure))  # type: ignore[no-untyped-call]  # as torch has it


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS, _Perturbing])
def test_a_closure_runs_before_the_fence(
    store: Store, unproven: CaptureConfig, kind: type[torch.optim.Optimizer], *, is_named: bool
) -> None:
    """Test that the copy overlaps with forward and backward pass in a closure, unless the optimizer acts before it."""
    order: list[str] = []
    model = torch.nn.Linear(64, 64)
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]  # all of these have a rate

    def closure() -> torch.Tensor:
        order.append("forward")
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        return torch.as_tensor(loss)

    def iterate(_step: int) -> None:
        if is_named:
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)

    loop = Loop({"model": model, "optimizer": optimizer}, iterate)
    with watch(lambda interval: order.append(interval.name) if interval.name in ("step", "fence") else None):
        assert_every_step_is_right(store, loop, 3, unproven)
    after = order.index("step") + 1
    assert order[after : after + 2] == (["fence", "forward"] if kind is _Perturbing else ["forward", "fence"])


def test_an_optimizer_of_another_thread_ends_no_fence(
    store: Store, unproven: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the other thread waits for the capture in flight, and that a later capture keeps its fence."""
    waits, goes_on = threading.Event(), threading.Event()
    wait = engine.CaptureEngine._wait_until_copied

    def slow(self: engine.CaptureEngine, capture: engine.Capture) -> None:
        wait(self, capture)
        if threading.current_thread() is other:
            waits.set()
            assert goes_on.wait(60)

    monkeypatch.setattr(engine.CaptureEngine, "_wait_until_copied", slow)
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    other = threading.Thread(target=torch.optim.SGD([parameter], 0.1).step)
    _, _, loop = linear_loop()
    expected = {}
    with Checkpointer(store, loop.state, capture=unproven, every=1, keep=None) as checkpointer:
        for step in range(3):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
            if step == 0:
                other.start()
                assert waits.wait(60)
            if step == 1:
                goes_on.set()
                other.join()
    assert_stored(store, expected)


def test_an_optimizer_of_another_thread_waits_while_bytes_are_compared() -> None:
    """Test that the step of another thread is not mistaken for a change outside an optimizer."""
    detector, compares, goes_on = TearDetector("sampled"), threading.Event(), threading.Event()

    class Compared(SourceDigests):
        def fence(self, *, compare: bool) -> list[str]:
            if not compares.is_set():
                compares.set()
                assert compare
                assert goes_on.wait(60)
            return []

    source_digests = Compared([], [], Transfers(Devices(0), [], []), [])
    first, other = (threading.Thread(target=detector.fence, args=(source_digests,)) for _ in range(2))
    first.start()
    assert compares.wait(60)
    other.start()
    other.join(0.1)
    assert other.is_alive()
    goes_on.set()
    first.join()
    other.join()


def test_an_interrupt_in_a_fence_is_that_of_the_training(
    store: Store, unproven: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the interrupt is raised in the training, the capture is discarded, and training can continue."""
    copy, raised = engine.CaptureEngine._copy, threading.Event()

    def interrupted(self: engine.CaptureEngine, capture: engine.Capture, number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raised.set()
            raise KeyboardInterrupt
        assert raised.wait(60)
        copy(self, capture, number)

    model, optimizer, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=unproven, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        before = copy_of(model)
        with monkeypatch.context() as patch:
            patch.setattr(engine.CaptureEngine, "_copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert_same(copy_of(model), before, "before the optimizer's step")
        with pytest.raises(LostCheckpointError, match=r"step 0 .*KeyboardInterrupt"):
            checkpointer.wait()
        loop.iterate(1)
        checkpointer.step(1)
        expected = {1: copy_of(loop.state)}
    assert_stored(store, expected)


def test_a_load_into_the_state_waits_for_its_capture(store: Store, unproven: CaptureConfig) -> None:
    """Test that the capture contains the state before the load."""
    model, _, loop = linear_loop()
    expected = {}
    with Checkpointer(store, loop.state, capture=unproven, every=1, keep=None) as checkpointer:
        for step in range(2):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
            if step == 0:
                checkpointer.wait()
        store.load(step=0, into={"model": model})
    assert_stored(store, expected)


@pytest.mark.parametrize("restore", ["load", "rollback"])
def test_a_restore_from_another_store_waits_for_the_capture(
    store: Store, unproven: CaptureConfig, tmp_path: Path, restore: str
) -> None:
    """Test weights of another store, loaded or rolled back into a model while the capture of the model is pending."""
    model, _, loop = linear_loop()
    with (
        Store.open(tmp_path / "other", config=CONFIG, create=True) as other,
        Checkpointer(other, {"model": model}, capture=unproven, every=1) as second,
        Checkpointer(store, loop.state, capture=unproven, every=1) as checkpointer,
    ):
        second.step(0)
        second.wait()
        loop.iterate(0)
        checkpointer.step(0)
        expected = {0: copy_of(loop.state)}
        if restore == "load":
            other.load(into={"model": model})
        else:
            second.rollback()
    assert_stored(store, expected)
