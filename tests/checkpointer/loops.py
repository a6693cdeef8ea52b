"""Run training loops, and compare every step bit for bit with the store."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asymcheck import Checkpointer, Store, StoreConfig
from asymcheck.capture.schedule import CaptureSchedule
from asymcheck.config import CaptureConfig
from asymcheck.state.partition_plan import Plan, PlanInput
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.types import Stateful
from tests.store.equality import assert_same

CONFIG = StoreConfig(
    partition_bytes=8 * 1024,
    bundle_below_bytes=4 * 1024,
    # Allow so little inline data in the manifest that even the counters of optimizers are captured in partitions.
    inline_bytes=16,
    inline_total_bytes=32,
    slots=2,
    catalog_map_bytes=64 << 20,
)
"""Configuration of a store with partitions of some KiB, in proportion to the small test states."""

NEVER = 1 << 30
"""Index of a window that never opens, so that the fence copies its partitions."""


def folder_for_rings(path: Path) -> Path:
    """Return a temporary folder that contains only the rings of the test."""
    folder = path / "memory"
    folder.mkdir(exist_ok=True)
    return folder


def rings(path: Path) -> list[Path]:
    """Return the rings in the folder of the test."""
    return sorted(folder_for_rings(path).iterdir())


def sized(config: CaptureConfig, size: int) -> CaptureConfig:
    """Return the same configuration with a ring of ``size`` bytes."""
    return dataclasses.replace(config, ring_bytes=size)


def entries(path: Path) -> list[int]:
    """Return the states of the captures in the only ring of the test."""
    (ring,) = rings(path)
    with RingReader(ring) as reader:
        return [entry.state for entry in reader.captures]


def copy_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all deferred copies to the fence, so that a change before the fence is captured, too."""
    plan_of = CaptureSchedule.plan

    def late(self: CaptureSchedule, layout: PlanInput) -> Plan:
        plan = plan_of(self, layout)
        return dataclasses.replace(plan, release=tuple(NEVER if window >= 0 else window for window in plan.release))

    monkeypatch.setattr(CaptureSchedule, "plan", late)


def copy_of(value: object) -> object:
    """Return a copy of a state, in the form in which a store returns it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (dict, OrderedDict):
        pairs = [(key, copy_of(item)) for key, item in value.items()]  # type: ignore[attr-defined]  # a mapping
        copied = dict(pairs) if type(value) is dict else OrderedDict(pairs)
        if hasattr(value, "_metadata"):
            setattr(copied, "_metadata", copy_of(value._metadata))  # noqa: B010 - as state_dict() does
        return copied
    if type(value) in (list, tuple):
        return type(value)(copy_of(item) for item in value)  # type: ignore[call-arg, attr-defined]  # a sequence
    if isinstance(value, Stateful):
        return copy_of(value.state_dict())
    return copy.deepcopy(value)


@dataclasses.dataclass
class Loop:
    """A training loop: its state and one iteration."""

    state: dict[str, object]
    """State that is passed to the checkpointer."""
    iterate: Callable[[int], object]
    """One iteration, from the forward pass to the optimizer step."""
    between: Callable[[Checkpointer], object] = lambda _checkpointer: None
    """Function that runs between ``step()`` and the next iteration."""


def assert_every_step_is_right(store: Store, loop: Loop, steps: int, config: CaptureConfig) -> dict[int, object]:
    """Save every step during training, and compare each checkpoint with the state at the return of ``step()``."""
    expected: dict[int, object] = {}
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for step in range(steps):
            loop.iterate(step)
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
            loop.between(checkpointer)
    assert_stored(store, expected)
    return expected


def assert_stored(store: Store, expected: dict[int, object], run: str = "default") -> None:
    """Assert that exactly these steps are stored, bit for bit."""
    assert sorted(checkpoint.step for checkpoint in store.checkpoints(run)) == sorted(expected)
    for step, state in expected.items():
        assert_same(store.load(step, run=run), state, f"step {step}")


def linear_loop(width: int = 64) -> tuple[torch.nn.Linear, torch.optim.AdamW, Loop]:
    """Return the simplest loop whose parameters and moments are copied during training."""
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        model(torch.full((2, width), 1.0 + step)).square().mean().backward()
        optimizer.step()

    return model, optimizer, Loop({"model": model, "optimizer": optimizer}, iterate)
