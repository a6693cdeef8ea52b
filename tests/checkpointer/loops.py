"""Training loops that compare every step bit for bit with the store."""

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
from asymcheck.storage.shm import RingReader
from asymcheck.types import Stateful
from tests.store.equality import assert_same

CONFIG = StoreConfig(
    partition_bytes=8 * 1024,
    bundle_below_bytes=4 * 1024,
    # So little room in the manifest that also the counters of optimizers are captured in partitions.
    inline_bytes=16,
    inline_total_bytes=32,
    slots=2,
    catalog_map_bytes=64 << 20,
)
"""A store that cuts tensors of some KiB as others cut those of some MiB."""

NEVER = 1 << 30
"""A window that does not come: what it releases is copied by the fence."""


def folder_for_rings(path: Path) -> Path:
    """Return a folder of the test's own, where nothing but its rings lies."""
    folder = path / "memory"
    folder.mkdir(exist_ok=True)
    return folder


def rings(path: Path) -> list[Path]:
    """Return the rings that lie in the folder of the test."""
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
    """Leave all deferred copies to the fence, so that whatever changes before it is captured with its change."""
    plan_of = CaptureSchedule.plan

    def late(self: CaptureSchedule, layout: PlanInput) -> Plan:
        plan = plan_of(self, layout)
        return dataclasses.replace(plan, release=tuple(NEVER if window >= 0 else window for window in plan.release))

    monkeypatch.setattr(CaptureSchedule, "plan", late)


def copy_of(value: object) -> object:
    """Return a state as a store gives it back, with bytes of its own."""
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
    """A training loop: its state, and what one iteration does to it."""

    state: dict[str, object]
    """The state given to the checkpointer."""
    iterate: Callable[[int], object]
    """One iteration, from the forward pass to the optimizer step."""
    between: Callable[[Checkpointer], object] = lambda _checkpointer: None
    """What is done between ``step()`` and the next iteration."""


def assert_every_step_is_right(store: Store, loop: Loop, steps: int, config: CaptureConfig) -> dict[int, object]:
    """Save every step while training goes on, and compare each with what the state was when ``step()`` returned."""
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
    """Fail unless exactly these steps are stored, bit for bit."""
    assert sorted(checkpoint.step for checkpoint in store.checkpoints(run)) == sorted(expected)
    for step, state in expected.items():
        assert_same(store.load(step, run=run), state, f"step {step}")


def linear_loop(width: int = 64) -> tuple[torch.nn.Linear, torch.optim.AdamW, Loop]:
    """Return the simplest loop whose parameters and moments are copied beside the training."""
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        model(torch.full((2, width), 1.0 + step)).square().mean().backward()
        optimizer.step()

    return model, optimizer, Loop({"model": model, "optimizer": optimizer}, iterate)
