"""Test checksums of device memory: equal on host and device, and different after each kind of change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.capture import background_saver
from asymcheck.capture.device_copy import Devices
from asymcheck.capture.device_sums import _device_checksum, checksum
from asymcheck.errors import AbandonedCheckpointsWarning, CaptureWarning
from tests.capture.simulated_device import SimulatedDevice

ROW = 8 * 1024
STEPS = 24


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """Return a device without delays."""
    device = SimulatedDevice(0, 0)
    yield device
    device.close()


def _sums(data: torch.Tensor) -> tuple[int, ...]:
    return tuple(_device_checksum(data).tolist())


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, ROW - 1, ROW, ROW + 8, 3 * ROW + 21])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_checksums_of_host_and_device_are_equal(length: int, offset: int) -> None:
    """Test lengths around words and rows, and data that is not aligned to words."""
    data = torch.randint(256, (length + offset,), dtype=torch.uint8)[offset:]
    assert _sums(data) == checksum(memoryview(data.numpy().tobytes()))


def test_a_checksum_shows_changes_and_swaps() -> None:
    """Test changes of each bit of some bytes, and swaps within a row, within a column, and of whole rows."""
    data = torch.randint(256, (5 * ROW + 13,), dtype=torch.uint8)
    original = _sums(data)
    for place in (0, 7, ROW, ROW + 8, ROW + 15, 3 * ROW + 17, 5 * ROW + 3, 5 * ROW + 12):
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            assert _sums(changed) != original, (place, bit)
    words = data[: 5 * ROW].view(torch.int64)
    for one, other in ((0, 1), (5, 1029), (3, 2050)):
        swapped = data.clone()
        swapped[: 5 * ROW].view(torch.int64)[[one, other]] = words[[other, one]]
        assert _sums(swapped) != original, (one, other)
    for place in (1, 1025, 3 * 1024 + 7):
        flipped = data.clone()
        flipped[: 5 * ROW].view(torch.int64)[[place, place + 2]] ^= -(2**63)
        assert _sums(flipped) != original, place
    for place in (1, 511, 1024 * 511 % 5000):
        inverted = data.clone()
        inverted[: 5 * ROW].view(torch.int64)[place] = ~words[place]
        assert _sums(inverted) != original, place
    # Both halves differ in the same high bit, at a distance that is a power of two.
    pair = torch.tensor([1.5, -2.5, 3.0, -5.0]).view(torch.int64)
    halves = data.clone()
    halves[: 5 * ROW].view(torch.int64)[[7, 519]] = pair
    exchanged = halves.clone()
    exchanged[: 5 * ROW].view(torch.int64)[[519, 7]] = pair
    assert _sums(exchanged) != _sums(halves)
    numbers = torch.randn(5 * 1024, dtype=torch.float64)
    assert _sums(numbers.view(torch.uint8)) != _sums(numbers.neg().view(torch.uint8))
    rows = data.clone()
    rows[: 5 * ROW] = data[: 5 * ROW].view(5, ROW).flip(0).reshape(-1)
    assert _sums(rows) != original


@pytest.mark.parametrize("begins", [0, 5])
def test_unversioned_changes_after_the_copy_on_a_device_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, begins: int
) -> None:
    """Test a loop that writes through ``.data`` once each capture is complete, from the first step or later on.

    The captures are exact, and only the checksums of the fence differ. From then on, ``step()`` copies the tensor.
    """
    monkeypatch.setattr(background_saver, "Devices", lambda size: Devices(size, device.link_of))
    weight = torch.nn.Parameter(torch.zeros(700_000))
    device.own(weight)
    optimizer = torch.optim.SGD([weight], foreach=False)
    state = {"weight": weight, "optimizer": optimizer}
    expected, detected = {}, None
    with (
        asymcheck.Store.open(tmp_path, create=True) as store,
        warnings.catch_warnings(record=True, action="always") as told,
        asymcheck.Checkpointer(store, state, on_error="warn", every=1, keep=None) as checkpointer,
    ):
        for step in range(begins + 2 * STEPS):
            weight.grad = torch.ones_like(weight)
            device.catch_up()
            optimizer.step()
            checkpointer.step(step)
            expected[step] = weight.detach().clone()
            # Without a fence: wait() would count as one.
            assert checkpointer._background is not None
            checkpointer._background._engine.settle()  # type: ignore[union-attr]  # as after the last window
            for capture in checkpointer._background._captures:
                assert capture.durable.wait(30)
            if step >= begins:
                device.run(lambda: weight.data[123_456].add_(1))
            if detected is None and any("tensor weight changed" in str(one.message) for one in told):
                detected = step
        checkpointer.wait()
        assert detected is not None
        assert detected <= begins + (2 if begins == 0 else 2 * 16)
        assert {one.category for one in told} <= {CaptureWarning, AbandonedCheckpointsWarning}
        for checkpoint in store.checkpoints():
            assert torch.equal(store.load(step=checkpoint.step)["weight"], expected[checkpoint.step])  # type: ignore[index]  # a dict
