"""Test rollback to the newest checkpoint in memory, without reading the drive."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.config import CaptureConfig
from asymcheck.errors import (
    CaptureWarning,
    CheckpointNotFoundError,
    LostCheckpointWarning,
    PartialRestoreError,
    StateMismatchError,
)
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import assert_stored, copy_of, linear_loop
from tests.store.equality import assert_same


@pytest.mark.parametrize("steps", [1, 4])
def test_rollback_takes_the_newest_state_from_memory(
    store: Store, disk: Disk, config: CaptureConfig, steps: int
) -> None:
    """Test that every bit is restored without reading a pack, and that training continues in a new generation."""
    model, _, loop = linear_loop()
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(steps):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
        checkpointer.wait()
        loop.iterate(99)
        model.weight.data.fill_(float("nan"))
        disk.read.clear()
        back = checkpointer.rollback()
        assert [path for path in disk.read if path.parent.name == "packs"] == []
        assert back.step == checkpointer.latest_step == steps - 1
        assert_same(copy_of(loop.state), expected[steps - 1])
        loop.iterate(steps)
        checkpointer.step(steps)
        expected[steps] = copy_of(loop.state)
    assert_stored(store, expected)
    assert [(c.generation, c.on_line) for c in store.checkpoints()] == [*([(1, True)] * steps), (2, True)]


def test_rollback_passes_over_a_capture_that_could_not_be_stored(
    store: Store, disk: Disk, config: CaptureConfig
) -> None:
    """Test that the newest durable capture is restored from memory, without a read of the drive."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, on_error="warn", every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        checkpointer.wait()
        expected = copy_of(loop.state)
        loop.iterate(1)
        disk.full = "packs"
        checkpointer.step(1)
        with pytest.warns(LostCheckpointWarning):
            checkpointer.wait()
        disk.full = None
        assert checkpointer.rollback().step == 0
        assert_same(copy_of(loop.state), expected)


def test_a_full_deque_whose_items_have_moved_is_restored(store: Store, config: CaptureConfig) -> None:
    """Test items at one place that differ in shape, in type and in keys, and that share tensors with others."""
    tensors = [torch.full((500 + number // 2,), float(number)) for number in range(8)]

    def items(first: int) -> list[object]:
        """Return a window of four items."""
        every = [(tensors[0], tensors[1]), None, {"a": tensors[2]}, [tensors[3], tensors[3]], {"b": 4}, tensors[5]]
        return [*every, (tensors[6], tensors[6]), 7][first : first + 4]

    state = {"window": deque(items(0), 4), "w": torch.zeros(2000)}
    window, expected = state["window"], copy_of({"window": items(0)})
    with Checkpointer(store, state, capture=config, every=1, keep=None) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        for first in range(5):
            for restore in (checkpointer.rollback, checkpointer.restore):
                window.clear()
                window.extend(items(first))
                for tensor in tensors:
                    tensor.fill_(torch.nan)
                restore()
                assert state["window"] is window
                assert_same({"window": [*window]}, expected)


def test_values_that_were_added_after_the_checkpoint_are_removed(store: Store, config: CaptureConfig) -> None:
    """Test values of other types and lengths, in the same containers, of which a loop may have references."""

    def add(state: dict[str, Any], step: int) -> None:
        state["history"][step] = {"loss": 1 / step}
        state["words"].update({f"word {step}": step})
        state["rows"][f"row {step}"] += step
        state["log"][-1] = [(step, None)] * step
        state["best"] = {"step": step, "weights": {"w": torch.full((9,), step), "array": np.full(9, step)}}
        state["pair"] = (step,) * step
        state[f"note {step}"] = [step]

    state: dict[str, Any] = {"history": {}, "words": Counter(), "rows": defaultdict(int), "log": [None], "pair": ()}
    state |= {"best": None, "w": torch.ones(2000)}
    containers = [state[key] for key in ("history", "words", "rows", "log")]
    with Checkpointer(store, state, capture=config, every=1, keep=None) as checkpointer:
        for saved in (1, 3):
            expected = copy.deepcopy(state)
            checkpointer.step(saved)
            checkpointer.wait()
            add(state, saved)
            add(state, saved + 1)
            checkpointer.rollback()
            assert_same(copy_of(state), copy_of(expected))
            assert [id(state[key]) for key in ("history", "words", "rows", "log")] == [*map(id, containers)]
            add(state, saved)


def test_rollback_refuses_to_leave_tensors_and_objects_as_they_are(store: Store, config: CaptureConfig) -> None:
    """Test values that are not in the checkpoint, but may belong to a model that is no part of the state."""
    state: dict[str, Any] = {"weights": {"a": torch.ones(2000)}, "ema": None}
    with Checkpointer(store, state, capture=config, every=1, keep=None) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        for place, value in (("ema", torch.nn.Linear(2, 2)), ("ema", torch.nn.Parameter(torch.ones(2)))):
            state[place] = value
            with pytest.raises(StateMismatchError, match=r"ema: .* is given, but NoneType is stored"):
                checkpointer.rollback()
        state["ema"] = None
        state["weights"]["b"] = torch.ones(2)
        with pytest.raises(StateMismatchError, match=r"weights\.b: is not in the checkpoint"):
            checkpointer.rollback()


def skip_batches(checkpointer: Checkpointer) -> None:
    """Skip optimizer steps, for instance because gradients are infinite, until the loss of a checkpoint is known."""
    while not checkpointer.statistics().lost:
        time.sleep(0.01)
        checkpointer.step(5)


def test_rollback_is_no_change_outside_an_optimizer(store: Store, disk: Disk, config: CaptureConfig) -> None:
    """Test that a rollback fences a capture whose loss was reported before the next optimizer step.

    Otherwise the tear detection would blame the training for the restored bytes, and copy all tensors at once from then
    on.
    """
    _, _, loop = linear_loop()
    config = dataclasses.replace(config, proof="sampled")
    with Checkpointer(store, loop.state, capture=config, on_error="warn", every=4, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        checkpointer.wait()
        loop.iterate(4)
        disk.full = "packs"
        checkpointer.step(4)
        with pytest.warns(LostCheckpointWarning):
            skip_batches(checkpointer)
        disk.full = None
        assert checkpointer.rollback().step == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error", CaptureWarning)
            loop.iterate(6)


def test_saves_continue_after_a_rollback_that_follows_a_partial_restore(
    store: Store, config: CaptureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the state in memory replaces the mixture that a restore has left."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise PartialRestoreError("it is damaged", ["model.weight"], None)

    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        loop.iterate(0)
        checkpointer.step(0)
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr("asymcheck.checkpointer.restored_alone", fail)
            with pytest.raises(PartialRestoreError, match="it is damaged"):
                checkpointer.restore()
        with pytest.raises(PartialRestoreError, match="failed after it had overwritten"):
            checkpointer.step(1)
        assert checkpointer.rollback().step == 0
        loop.iterate(1)
        checkpointer.step(1)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 1]


def test_nothing_in_memory_is_no_rollback(store: Store, config: CaptureConfig) -> None:
    """Test that the error says so, and that no generation begins."""
    _, _, loop = linear_loop()
    with pytest.raises(CheckpointNotFoundError, match="restore"):
        Checkpointer(store, loop.state, capture=config, every=1, keep=None).rollback()
    assert not list((store.path / "heads").rglob("*.head"))


def test_a_rollback_does_not_leave_the_line(store: Store, config: CaptureConfig) -> None:
    """Test that a capture that was abandoned by a restore of an older step is not restored."""
    _, _, loop = linear_loop()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(4):
            loop.iterate(step)
            checkpointer.step(step)
        checkpointer.restore(1)
        with pytest.raises(CheckpointNotFoundError, match="in memory"):
            checkpointer.rollback()
        assert checkpointer.latest_step == 1
