"""Test captures and restores on a real GPU. All tests are skipped without a CUDA device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.config import MIB, CaptureConfig
from asymcheck.errors import CaptureWarning, LostCheckpointWarning
from tests.checkpointer import cuda_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 10


def _training(width: int = 1024) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 2 * width)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()


def _copies(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [entry[name] for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *moments)]


def _check(store: asymcheck.Store, step: int, expected: list[torch.Tensor]) -> None:
    """Assert that a checkpoint, loaded onto the GPU, has these tensors."""
    loaded = store.load(step=step, device="cuda")
    entries = loaded["optimizer"]["state"].values()
    moments = [entry[name] for entry in entries for name in ("exp_avg", "exp_avg_sq", "step")]
    found = [*loaded["model"].values(), *moments]
    assert len(found) == len(expected)
    for number, (tensor, original) in enumerate(zip(found, expected, strict=True)):
        assert tensor.device.type == "cuda"
        assert torch.equal(tensor, original.cuda()), f"tensor {number} of step {step}"


@pytest.mark.filterwarnings("ignore:the ring of:asymcheck.errors.CaptureWarning")
@pytest.mark.parametrize(
    "capture",
    [
        CaptureConfig(),
        CaptureConfig(staging_bytes=0),
        CaptureConfig(staging_bytes=64 * 1024),
        CaptureConfig(staging_bytes=2 * MIB, ring_bytes=11 * MIB),
        CaptureConfig(proof="full"),
        CaptureConfig(schedule="asymmetric"),
        CaptureConfig(schedule="symmetric"),
        CaptureConfig(schedule="eager"),
    ],
    ids=["default", "no staging", "little staging", "small ring", "full proof", "asymmetric", "symmetric", "eager"],
)
def test_cuda_checkpoints_have_the_bytes_of_their_steps(tmp_path: Path, capture: CaptureConfig) -> None:
    """Test weights, moments, counters and buffers of each step, for all sizes of staging buffer and ring."""
    model, optimizer = _training()
    state = {"model": model, "optimizer": optimizer}
    expected = []
    with (
        asymcheck.Store.open(tmp_path, create=True) as store,
        asymcheck.Checkpointer(store, state, capture=capture, every=1, keep=None) as checkpointer,
    ):
        for step in range(STEPS):
            _update(model, optimizer)
            checkpointer.step(step)
            expected.append(_copies(model, optimizer))
        checkpointer.wait()
        for step in range(STEPS):
            _check(store, step, expected[step])


def test_a_change_before_the_fence_is_never_part_of_a_cuda_checkpoint(tmp_path: Path) -> None:
    """Test weight clipping, which raises version counters, after ``step()``: kept checkpoints are exact."""
    model, optimizer = _training()
    state = {"model": model, "optimizer": optimizer}
    expected = []
    with (
        warnings.catch_warnings(action="ignore"),
        asymcheck.Store.open(tmp_path, create=True) as store,
        asymcheck.Checkpointer(store, state, on_error="warn", every=1, keep=None) as checkpointer,
    ):
        for step in range(STEPS):
            _update(model, optimizer)
            checkpointer.step(step)
            expected.append(_copies(model, optimizer))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.01, 0.01)
        checkpointer.wait()
        kept = [checkpoint.step for checkpoint in store.checkpoints() if checkpoint.on_line]
        assert len(kept) >= STEPS - 2
        for step in kept:
            _check(store, step, expected[step])


def test_unversioned_change_on_cuda_is_detected_in_the_first_captures(tmp_path: Path) -> None:
    """Test a write of one element through ``.data`` after each ``step()``."""
    model, optimizer = _training()
    state = {"model": model, "optimizer": optimizer}
    weight = next(model.parameters())
    expected = []
    with (
        warnings.catch_warnings(record=True, action="always") as told,
        asymcheck.Store.open(tmp_path, create=True) as store,
        asymcheck.Checkpointer(store, state, on_error="warn", every=1, keep=None) as checkpointer,
    ):
        for step in range(4):
            _update(model, optimizer)
            checkpointer.step(step)
            expected.append(_copies(model, optimizer))
            weight.data.view(-1)[12_345] += 1
        checkpointer.wait()
        kept = [checkpoint.step for checkpoint in store.checkpoints() if checkpoint.on_line]
        for step in kept:
            _check(store, step, expected[step])
    assert any(issubclass(one.category, CaptureWarning | LostCheckpointWarning) for one in told)


@pytest.mark.parametrize("recorded_at", [0, 1], ids=["before the first step", "after a wait"])
def test_cuda_graph_replays_are_captured_after_a_fence(tmp_path: Path, recorded_at: int) -> None:
    """Test a graph with forward pass, backward pass and optimizer step, replayed without any hook."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 2048).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    batch = torch.randn(64, 512, device="cuda")

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    state = {"model": model, "optimizer": optimizer}
    expected = []
    with (
        asymcheck.Store.open(tmp_path, create=True) as store,
        asymcheck.Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        for step in range(STEPS):
            if step == recorded_at:
                checkpointer.wait()
                optimizer.zero_grad(set_to_none=True)
                with torch.cuda.graph(graph):
                    update()
            batch.copy_(torch.randn(64, 512, device="cuda"))
            checkpointer.fence()
            if step < recorded_at:
                update()
            else:
                graph.replay()
            checkpointer.step(step)
            expected.append(_copies(model, optimizer))
        checkpointer.wait()
        for step in range(STEPS):
            _check(store, step, expected[step])


def test_a_full_gpu_is_captured_without_a_staging_buffer(tmp_path: Path) -> None:
    """Test a training that has left no memory on the device when the first capture begins."""
    model, optimizer = _training()
    _update(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    expected = []
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        with (
            asymcheck.Store.open(tmp_path, create=True) as store,
            asymcheck.Checkpointer(store, state, every=1, keep=None) as checkpointer,
        ):
            for step in range(4):
                _update(model, optimizer)
                checkpointer.step(step)
                expected.append([tensor.cpu() for tensor in _copies(model, optimizer)])
            checkpointer.wait()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with asymcheck.Store.open(tmp_path) as store:
        for step in range(4):
            _check(store, step, expected[step])


def test_a_killed_cuda_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Test mixed precision, dropout, a scaler, an averaged model and a scheduler, against an uninterrupted run."""
    steps = 60

    def train(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", cuda_trainer.__name__, str(tmp_path / name), str(tmp_path / f"{name}.txt")]
        return subprocess.Popen([*command, str(steps)])

    assert train("whole").wait() == 0
    killed = train("killed")
    losses = tmp_path / "killed.txt"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not losses.exists() or len(losses.read_text().splitlines()) < 12):
        time.sleep(0.001)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    before = len(losses.read_text().splitlines())
    assert train("killed").wait() == 0
    whole = (tmp_path / "whole.txt").read_text().splitlines()
    resumed = losses.read_text().splitlines()
    assert 12 <= before < steps
    assert len(resumed) > before
    assert set(resumed) == set(whole), "a loss differs from the uninterrupted run"


def test_generators_of_cuda_devices_are_restored(tmp_path: Path) -> None:
    """Test random numbers on the GPU after a restore of ``RngState``."""
    state = {"rng": asymcheck.RngState()}
    with (
        asymcheck.Store.open(tmp_path, create=True) as store,
        asymcheck.Checkpointer(store, state, every=1) as checkpointer,
    ):
        torch.rand(7, device="cuda")
        checkpointer.step(1)
        checkpointer.wait()
        first = torch.rand(1000, device="cuda")
        assert checkpointer.restore() is not None
        assert torch.equal(torch.rand(1000, device="cuda"), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_cuda_tensors_of_all_kinds_survive_a_synchronous_save(tmp_path: Path, dtype: torch.dtype) -> None:
    """Test large, strided, expanded, empty and scalar tensors."""
    base = torch.randn(2100, 2100, device="cuda").to(dtype)
    state = {
        "large": base,
        "strided": base.t(),
        "part": base[3:100, 5:77],
        "expanded": base[0, 0].expand(4, 5),
        "empty": base[:0],
        "scalar": base[1, 1],
    }
    with asymcheck.Store.open(tmp_path, create=True) as store:
        store.save(state, step=1)
        for device in ("cpu", "cuda"):
            loaded = store.load(device=device)
            for name, tensor in state.items():
                assert loaded[name].device.type == device
                found, original = (one.cpu().contiguous().view(-1).view(torch.uint8) for one in (loaded[name], tensor))
                assert torch.equal(found, original), name


def test_fsdp2_shards_on_a_gpu_are_saved_and_restored(tmp_path: Path) -> None:
    """Test one rank with NCCL: the Checkpointer saves DTensors of the device, and fills them in place."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs NCCL")
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        model, optimizer = _training()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        state = {"model": model, "optimizer": optimizer}
        with (
            asymcheck.Store.open(tmp_path / "store", create=True) as store,
            asymcheck.Checkpointer(store, state, every=1, keep=None) as checkpointer,
        ):
            for step in range(4):
                _update(model, optimizer)
                checkpointer.step(step)
            expected = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]  # a DTensor
            checkpointer.wait()
            _update(model, optimizer)
            assert checkpointer.restore() is not None
            for parameter, original in zip(model.parameters(), expected, strict=True):
                assert torch.equal(parameter.to_local(), original)  # type: ignore[attr-defined]  # a DTensor
    finally:
        torch.distributed.destroy_process_group()
