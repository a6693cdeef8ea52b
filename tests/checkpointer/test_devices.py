"""Test that device tensors are captured as of their step, although the device runs behind the host."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.autograd.graph import increment_version

import asymcheck
from asymcheck.capture import background_saver
from asymcheck.capture.background_saver import Statistics
from asymcheck.capture.device_copy import Devices
from asymcheck.capture.engine import CaptureEngine
from asymcheck.capture.inflight import Capture
from asymcheck.config import MIB, CaptureConfig
from asymcheck.storage.gpu_staging import Staging
from asymcheck.storage.shm.ring_writer import Ring
from tests.capture.simulated_device import SimulatedDevice

STEPS = 12


class Queued(torch.optim.Optimizer):
    """An optimizer whose step only queues changes of parameters and state, like an optimizer on a GPU."""

    def __init__(self, parameters: list[torch.nn.Parameter], device: SimulatedDevice) -> None:
        """Keep moments on the device, and every other count."""
        super().__init__(parameters, {})
        self._device = device
        for number, parameter in enumerate(parameters):
            moment = torch.full_like(parameter, 0.5)
            count = torch.zeros(())
            device.own(moment, *([count] if number % 2 else []))
            self.state[parameter] = {"moment": moment, "count": count}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # closures are not used
        """Queue the update."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moments = [self.state[parameter]["moment"] for parameter in parameters]

        def update() -> None:
            # The device does not increase version counters. The host does, as soon as it has queued the update.
            for parameter, moment in zip(parameters, moments, strict=True):
                parameter.data.add_(1)
                moment.data.mul_(1.5)

        self._device.run(update)
        increment_version([*parameters, *moments])
        for entry in self.state.values():
            if self._device.link_of(entry["count"]):
                self._device.run(functools.partial(entry["count"].data.add_, 1))
            else:
                entry["count"].add_(1)


@pytest.fixture(params=[(0, 0), (0.01, 0), (0, 0.005)], ids=["in time", "late training", "late copies"])
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice]:
    """Return a device that is never late, or one of two that are late at random."""
    device = SimulatedDevice(*request.param)
    yield device
    device.close()


def train(
    location: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, capture: CaptureConfig
) -> Statistics:
    """Train on the device with one checkpoint a step; buffers change in the forward pass."""
    monkeypatch.setattr(background_saver, "Devices", functools.partial(Devices, find=device.link_of))
    large = torch.nn.Parameter(torch.zeros(700_000))
    strided = torch.nn.Parameter(torch.zeros(600, 500).t())
    small = [torch.nn.Parameter(torch.zeros(3 + number)) for number in range(6)]
    buffer, big_buffer, on_host = torch.zeros(5), torch.zeros(400_000), torch.zeros(7)
    device.own(large, strided, *small, buffer, big_buffer)
    optimizer = Queued([large, strided, *small], device)
    state: dict[str, object] = {
        "model": {"large": large, "strided": strided, **{f"small{n}": one for n, one in enumerate(small)}},
        "optimizer": optimizer,
        "buffers": {"small": buffer, "big": big_buffer, "host": on_host},
    }
    with (
        asymcheck.Store.open(location, create=True) as store,
        asymcheck.Checkpointer(store, state, capture=capture, every=1, keep=None) as ckpt,
    ):
        for step in range(STEPS):
            for changing in (buffer, big_buffer):
                device.run(functools.partial(changing.add_, 1))
            on_host.add_(1)
            optimizer.step()
            ckpt.step(step)
        ckpt.wait()
        return ckpt.statistics()


def check(location: Path) -> None:
    """Assert that every checkpoint has the values of its step."""
    with asymcheck.Store.open(location, create=True) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == list(range(STEPS))
        for step in range(STEPS):
            state = store.load(step=step)
            for name, tensor in state["model"].items():
                assert tensor.eq(step + 1).all(), f"{name} of step {step}: {tensor.unique()}"
            for number, entry in state["optimizer"]["state"].items():
                assert entry["moment"].eq(0.5 * 1.5 ** (step + 1)).all(), f"moment {number} of step {step}"
                assert entry["count"] == step + 1
            for name, tensor in state["buffers"].items():
                assert tensor.eq(step + 1).all(), f"buffer {name} of step {step}: {tensor.unique()}"


@pytest.mark.slow(
    quick=["in time-default", "late copies-default"],
    # Each capture is tested with one delay, and each delay with the default.
    long=["in time-[!d]*", "late copies-[rsfte]*"],
)
@pytest.mark.filterwarnings("ignore:the ring of:asymcheck.errors.CaptureWarning")
@pytest.mark.parametrize(
    "capture",
    [
        CaptureConfig(),
        CaptureConfig(staging_bytes=64 * MIB, proof="off"),
        CaptureConfig(staging_bytes=64 * 1024),
        CaptureConfig(staging_bytes=2 * MIB, ring_bytes=11 * MIB),
        CaptureConfig(staging_bytes=2 * MIB, ring_bytes=4 * MIB),
        CaptureConfig(proof="full", staging_bytes=2 * MIB),
        CaptureConfig(schedule="asymmetric"),
        CaptureConfig(schedule="symmetric"),
        CaptureConfig(schedule="eager"),
    ],
    ids=["default", "roomy", "tight", "small ring", "stream", "full proof", "asymmetric", "symmetric", "eager"],
)
def test_each_checkpoint_has_the_bytes_of_its_step(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, capture: CaptureConfig
) -> None:
    """Test deferred and eager state, with and without staging, with rings of all sizes, and with delays."""
    statistics = train(tmp_path, device, monkeypatch, capture)
    check(tmp_path)
    assert statistics.durable == STEPS
    assert device.pinned == 0, "the ring's memory was given back pinned"


@pytest.mark.slow
def test_all_of_the_staging_buffer_is_free_in_the_end(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that every region of the staging buffer is released, and that the end frees the buffer."""
    made: list[Staging] = []

    class Watched(Staging):
        def __init__(self, on: torch.device, size: int) -> None:
            super().__init__(on, size)
            made.append(self)

    monkeypatch.setattr("asymcheck.capture.device_copy.Staging", Watched)
    train(tmp_path, device, monkeypatch, CaptureConfig(staging_bytes=8 * MIB))
    assert [staging._allocator.free_bytes for staging in made] == [7 * MIB, MIB]
    assert [staging._buffer.nbytes for staging in made] == [0, 0]


def late_capture_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the capture thread begin when the training waits for space in the ring, or after five seconds."""
    is_full = threading.Event()
    run, wait_for_room = CaptureEngine._run, Ring.wait_for_room

    def run_late(engine: CaptureEngine) -> None:
        is_full.wait(5)
        run(engine)

    def wait(ring: Ring, seconds: float) -> None:
        is_full.set()
        wait_for_room(ring, seconds)

    monkeypatch.setattr(CaptureEngine, "_run", run_late)
    monkeypatch.setattr(Ring, "wait_for_room", wait)


def test_captures_complete_although_the_capture_thread_is_late(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that captures do not fill the ring with all their partitions but the staged ones, so that none completes."""
    late_capture_thread(monkeypatch)
    train(tmp_path, device, monkeypatch, CaptureConfig(staging_bytes=8 * MIB))
    check(tmp_path)


@pytest.mark.parametrize("device", [(0, 0)], ids=["in time"], indirect=True)
def test_a_partition_that_waits_for_space_goes_first(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a capture copies no partitions early while one of an earlier capture has no space yet."""
    copy_early = CaptureEngine._copy_early
    early: list[tuple[int, int]] = []

    def copy(engine: CaptureEngine, capture: Capture, numbers: list[int]) -> list[int]:
        if early:
            return copy_early(engine, capture, numbers)
        # The capture thread has not begun, so it does not see this partition.
        engine._to_copy.append((cast(Capture, types.SimpleNamespace(slots=[None])), 0))
        behind = copy_early(engine, capture, numbers)
        engine._to_copy.pop()
        left = copy_early(engine, capture, numbers)
        early.append((len(numbers) - len(behind), len(numbers) - len(left)))
        return left

    late_capture_thread(monkeypatch)
    monkeypatch.setattr(CaptureEngine, "_copy_early", copy)
    train(tmp_path, device, monkeypatch, CaptureConfig(staging_bytes=8 * MIB))
    check(tmp_path)
    assert early == [(0, 4)]


@pytest.mark.slow
def test_a_device_without_room_for_a_staging_buffer_is_captured_all_the_same(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the host waits for the device and reads the tensors without a staging buffer."""
    train(tmp_path, device, monkeypatch, CaptureConfig(staging_bytes=0))
    check(tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("schedule", ["immediate", "asymmetric", "eager"])
@pytest.mark.parametrize("proof", ["full", "sampled", "off"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_on_cuda_each_checkpoint_has_the_bytes_of_its_step(
    tmp_path: Path, schedule: str, proof: str, own_stream: bool
) -> None:
    """Test a real device with batch norm, strided weights and a fused optimizer, and compare all tensors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(8, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Conv2d(64, 8, 3)),
        *(torch.nn.Flatten(), torch.nn.Linear(8 * 12 * 12, 2048), torch.nn.Linear(2048, 512)),
    ).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    expected = []
    config = CaptureConfig(proof=proof, schedule=schedule)  # type: ignore[arg-type]  # of the literals
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with (
        torch.cuda.stream(stream),
        asymcheck.Store.open(tmp_path, create=True) as store,
        asymcheck.Checkpointer(store, state, capture=config, every=1, keep=None) as ckpt,
    ):
        for step in range(STEPS):
            images = torch.randn(64, 8, 16, 16, device="cuda").to(memory_format=torch.channels_last)
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            expected.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        ckpt.wait()
        for step in range(STEPS):
            loaded = store.load(step=step, tensors="model.*")["model"]
            for name, tensor in expected[step].items():
                assert torch.equal(loaded[name], tensor.cpu()), f"{name} of step {step}"
