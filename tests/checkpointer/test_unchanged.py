"""Test that unchanged tensors that no optimizer owns are neither copied nor written again."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store, events
from asymcheck.capture import dirty_check, engine
from asymcheck.config import CaptureConfig
from asymcheck.errors import LostCheckpointWarning
from asymcheck.format.digest import digest
from tests.checkpointer.disks import Disk
from tests.checkpointer.loops import (
    CONFIG,
    Loop,
    assert_every_step_is_right,
    assert_stored,
    copy_of,
    entries,
    rings,
    sized,
)
from tests.checkpointer.optimizers import WIDTH, simple
from tests.store.equality import assert_same

BASE = 6
SIDE = 96
BASE_BYTES = BASE * SIDE * SIDE * 4


class Adapted(torch.nn.Module):
    """A frozen base, with a small trained layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        frozen = [torch.nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False) for _ in range(BASE)]
        self.base = torch.nn.ParameterList(frozen)
        self.adapter = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run only the adapter."""
        return torch.as_tensor(self.adapter(batch))


@pytest.fixture
def model() -> Adapted:
    """Return a model that is mostly frozen."""
    return Adapted()


def _loop(model: Adapted) -> Loop:
    return simple(model, torch.optim.SGD(model.adapter.parameters(), 0.1))


class Costs:
    """Copied and compared bytes of each step."""

    def __init__(self) -> None:
        self.copied: list[int] = []
        self.digested: list[int] = []

    def watch(self, interval: events.Interval) -> None:
        """Count a copy or a comparison."""
        if interval.name == "compare":
            self.digested[-1] += interval.bytes
        if interval.name == "copy" and str(interval.detail["tensor"]).startswith("model.base"):
            self.copied[int(interval.detail["step"])] += interval.bytes

    def begin(self) -> None:
        """Begin a step."""
        self.copied.append(0)
        self.digested.append(0)


@pytest.fixture
def costs() -> Costs:
    """Return empty counters."""
    return Costs()


def _train(
    checkpointer: Checkpointer,
    loop: Loop,
    costs: Costs,
    steps: int,
    change: Callable[[int], object] = lambda _step: None,
) -> dict[int, object]:
    """Train; return the state of each step."""
    expected: dict[int, object] = {}
    with events.watch(costs.watch):
        for step in range(len(costs.copied), len(costs.copied) + steps):
            loop.iterate(step)
            change(step)
            costs.begin()
            checkpointer.step(step)
            expected[step] = copy_of(loop.state)
            _complete(checkpointer)
    return expected


def _complete(checkpointer: Checkpointer) -> None:
    background = checkpointer._background
    assert background is not None
    for capture in background._captures:
        assert capture.complete.wait(60)


def test_a_frozen_base_is_copied_and_written_once(
    store: Store, disk: Disk, config: CaptureConfig, model: Adapted, costs: Costs
) -> None:
    """Test also while the first checkpoint waits for the disk, and the others wait for the first."""
    loop = _loop(model)
    disk.opened.clear()
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        expected = _train(checkpointer, loop, costs, 5)
        assert costs.copied == [BASE_BYTES, 0, 0, 0, 0]
        assert costs.digested == [0, *([BASE_BYTES] * 4)]
        disk.opened.set()
        checkpointer.wait()
        written = checkpointer.statistics().written_bytes
        assert BASE_BYTES < written < BASE_BYTES + 5 * 2 * 4 * (WIDTH + 1) * WIDTH
    assert_stored(store, expected)
    assert store.verify() == []


@pytest.mark.slow
def test_shared_frame_is_not_written_again_before_the_commit(
    store: Store, disk: Disk, config: CaptureConfig, model: Adapted, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a shared partition is ready before the last partitions of the capture that copied it."""
    goes_on, left = threading.Event(), [0]

    def held(data: memoryview) -> bytes:
        left[0] -= 1
        assert left[0] >= 0 or goes_on.wait(60)
        return digest(data)

    loop = _loop(model)
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        _train(checkpointer, loop, costs, 1)
        checkpointer.wait()
        for value in model.base:
            value.data.add_(1)
        background = checkpointer._background
        assert background is not None
        assert background._schedule._plan is not None
        # Every tensor is copied and digested, except tensors of the optimizer.
        left[0] = sum(window < 0 for window in background._schedule._plan.release)
        monkeypatch.setattr(engine, "digest", held)
        before = checkpointer.statistics().written_bytes
        costs.begin()
        disk.opened.clear()
        checkpointer.step(1)
        while left[0] >= 0:
            time.sleep(0.001)
        # Restore the counters, as if the change had been there before.
        assert background._engine is not None
        background._engine._unchanged._earlier.pop()
        loop.iterate(2)
        costs.begin()
        with events.watch(costs.watch):
            checkpointer.step(2)
        assert costs.digested[2] == BASE_BYTES
        goes_on.set()
        disk.opened.set()
        checkpointer.wait()
        written = checkpointer.statistics().written_bytes - before
    assert BASE_BYTES <= written < BASE_BYTES + 2 * 2 * 4 * (WIDTH + 1) * WIDTH
    assert store.verify() == []


def test_shared_frame_between_gaps_is_freed(store: Store, config: CaptureConfig) -> None:
    """Test gaps before and after the frame that are only together large enough."""
    state: dict[str, object] = {"front": torch.zeros(1024), "frozen": torch.randn(7 * 2048)}
    loop = Loop(state, lambda _step: None)

    def grow(step: int) -> None:
        state["front"] = torch.full((1024 * (1 + step % 2),), float(step))

    loop.iterate = grow
    assert_every_step_is_right(store, loop, 6, sized(config, 8192 + 7 * 12288 + 8192))


def _flip(model: Adapted) -> None:
    memory = model.base[2].untyped_storage()
    memory[len(memory) - 1] = memory[len(memory) - 1] ^ 1


def _set(model: Adapted) -> None:
    array = model.base[2].detach().numpy()
    array[5, 7] = 3


def _exchange(model: Adapted) -> None:
    model.base[2].data = model.base[2].data + 1


CHANGES: dict[str, Callable[[Adapted], object]] = {
    "data": lambda model: model.base[2].data.add_(1),
    "array": _set,
    "bit of the storage": _flip,
    "other memory": _exchange,
}


@pytest.mark.slow(quick=["array"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_that_no_counter_sees_is_captured(
    store: Store, config: CaptureConfig, model: Adapted, costs: Costs, how: str
) -> None:
    """Test that the change is captured in its step, and that only the changed part of the tensor is copied."""
    loop = _loop(model)
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        expected = _train(checkpointer, loop, costs, 6, lambda step: CHANGES[how](model) if step == 3 else None)
    changed = expected[2], expected[3]
    with pytest.raises(AssertionError):
        assert_same(changed[0]["model"]["base.2"], changed[1]["model"]["base.2"])  # type: ignore[index]  # a dict
    assert_stored(store, expected)
    assert costs.copied[:3] == [BASE_BYTES, 0, 0]
    assert 0 < costs.copied[3] <= BASE_BYTES // BASE
    # Digest once more, until it is known that the tensor has not changed again.
    assert costs.copied[4:] == [costs.copied[3], 0]


def test_changing_tensor_is_compared_once(store: Store, config: CaptureConfig, model: Adapted, costs: Costs) -> None:
    """Test tensors such as averages of weights, for which a digest would only add cost."""
    loop = _loop(model)
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        expected = _train(checkpointer, loop, costs, 5, lambda _step: [value.data.mul_(0.9) for value in model.base])
    assert costs.digested == [0, BASE_BYTES, 0, 0, 0]
    assert costs.copied == [BASE_BYTES] * 5
    assert_stored(store, expected)


def test_lost_checkpoint_does_not_affect_later_ones(
    store: Store, disk: Disk, config: CaptureConfig, model: Adapted, costs: Costs
) -> None:
    """Test that later checkpoints write the shared frames, because the store lacks them."""
    loop = _loop(model)
    with Checkpointer(store, loop.state, capture=config, on_error="warn", every=1, keep=None) as checkpointer:
        disk.full = "packs"
        _train(checkpointer, loop, costs, 1)
        with pytest.warns(LostCheckpointWarning):
            checkpointer.wait()
        disk.full = None
        expected = _train(checkpointer, loop, costs, 2)
    assert costs.copied == [BASE_BYTES, 0, 0]
    assert_stored(store, expected)
    assert store.verify() == []


def test_deleted_checkpoint_does_not_affect_later_ones(
    store: Store, config: CaptureConfig, model: Adapted, costs: Costs
) -> None:
    """Test that the frames are still in the ring after garbage collection freed their packs."""
    loop = _loop(model)
    expected = {}
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        for _ in range(4):
            expected = _train(checkpointer, loop, costs, 1)
            checkpointer.wait()
            for checkpoint in store.checkpoints()[:-1]:
                store.delete(checkpoint.step)
            store.gc()
        store.delete(3)
        store.gc()
        expected = _train(checkpointer, loop, costs, 1)
    assert costs.copied == [BASE_BYTES, 0, 0, 0, 0]
    assert_stored(store, expected)
    assert store.verify() == []


def test_shared_frames_are_recovered_after_a_crash(
    store: Store, disk: Disk, config: CaptureConfig, model: Adapted, costs: Costs, tmp_path: Path
) -> None:
    """Test that the frames belong to the newest capture, although a deleted capture wrote them."""
    loop = _loop(model)
    checkpointer = Checkpointer(store, loop.state, capture=config, on_error="warn", every=1, keep=None)
    _train(checkpointer, loop, costs, 3)
    checkpointer.wait()
    disk.full = "packs"
    expected = _train(checkpointer, loop, costs, 1)
    with pytest.warns(LostCheckpointWarning):
        checkpointer.close()
    assert costs.copied == [BASE_BYTES, 0, 0, 0]
    disk.full = None
    for checkpoint in store.checkpoints():
        store.delete(checkpoint.step)
    store.gc()
    assert 1 in entries(tmp_path)
    again = _loop(Adapted())
    restored = Checkpointer(store, again.state, capture=config, every=1, keep=None).restore()
    assert restored is not None
    assert restored.step == 3
    assert_stored(store, expected)
    assert_same(copy_of(again.state), expected[3])
    assert rings(tmp_path) == []


def test_a_rollback_brings_shared_frames_back(
    store: Store, config: CaptureConfig, model: Adapted, costs: Costs
) -> None:
    """Test a rollback after the captures that wrote the frames were freed."""
    loop = _loop(model)
    with Checkpointer(store, loop.state, capture=config, every=1, keep=None) as checkpointer:
        expected = _train(checkpointer, loop, costs, 6)
        checkpointer.wait()
        for value in model.parameters():
            value.data.zero_()
        assert checkpointer.rollback().step == 5
        assert_same(copy_of(loop.state), expected[5])


@pytest.mark.slow(long=["0.6"])
@pytest.mark.parametrize("part", [1.05, 0.6, 0.2])
def test_rings_of_any_size_serve(
    store: Store, disk: Disk, config: CaptureConfig, model: Adapted, costs: Costs, part: float
) -> None:
    """Test that no capture waits forever for ranges with shared frames, and that every step is correct."""
    loop = _loop(model)
    disk.delay_s = 0.001
    extra = [torch.randn(7000 + 100 * number) for number in range(3)]

    def change(step: int) -> None:
        loop.state["extra"] = [tensor[: 2000 + 1000 * (step % 5)] + step for tensor in extra]

    size = int(part * 1.3 * (BASE_BYTES + 4 * 3 * 7000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(store, loop.state, capture=sized(config, size), every=1, keep=None) as checkpointer:
            expected = _train(checkpointer, loop, costs, 12, change)
    assert_stored(store, expected)
    assert store.verify() == []


def test_a_comparison_that_fails_takes_no_room(
    store: Store, config: CaptureConfig, model: Adapted, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that ``step()`` raises the error, and that the shared frames are released."""
    loop = _loop(model)
    with Checkpointer(store, loop.state, capture=config, on_error="warn", every=1, keep=None) as checkpointer:
        expected = _train(checkpointer, loop, costs, 2)
        checkpointer.wait()
        background = checkpointer._background
        assert background is not None
        assert background._engine is not None
        before = len(background._engine.ring._taken)
        with monkeypatch.context() as patch:
            patch.setattr(dirty_check, "digest_pieces", lambda _pieces, _leaves: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                checkpointer.step(2)
        background.wait("local")
        assert len(background._engine.ring._taken) == before
    assert_stored(store, expected)


def test_these_tests_use_split_tensors() -> None:
    """Test that the tensors of these tests consist of several partitions."""
    assert CONFIG.bundle_below_bytes < CONFIG.partition_bytes < SIDE * SIDE * 4
