"""Test that CUDA calls use the device of the link, regardless of the current device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from asymcheck.errors import CaptureWarning
from asymcheck.storage.gpu_staging import cuda_link

DEVICE = torch.device("cuda", 1)


class Runtime:
    """The part of CUDA that pins memory, with a current device for each thread."""

    def __init__(self) -> None:
        """Begin with device 0, as each thread does."""
        self.device = torch.device("cuda", 0)
        self.calls: list[tuple[str, torch.device]] = []
        self.answer: int | Exception = 0

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Change the current device temporarily."""
        before, self.device = self.device, device
        yield
        self.device = before

    def _call(self, what: str) -> int:
        self.calls.append((what, self.device))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cudart(self) -> Runtime:
        """Create a context, if none exists."""
        self.calls.append(("context", self.device))
        return self

    def cudaHostRegister(self, _address: int, _length: int, _flags: int) -> int:  # noqa: N802 - as CUDA has it
        """Record the pinned memory."""
        return self._call("pin")

    def cudaHostUnregister(self, _address: int) -> int:  # noqa: N802 - as CUDA has it
        """Record the unpinned memory."""
        return self._call("unpin")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Replace CUDA by the simulated runtime."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "device", runtime.on)
    monkeypatch.setattr(torch.cuda, "cudart", runtime.cudart)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device, priority: priority)
    zeros = torch.zeros

    def kernel(count: int, *, device: torch.device) -> torch.Tensor:
        runtime.calls.append(("kernel", device))
        return zeros(count)

    monkeypatch.setattr(torch, "zeros", kernel)
    cuda_link.cache_clear()
    yield runtime
    cuda_link.cache_clear()


def test_memory_is_pinned_on_the_device_of_the_link(runtime: Runtime) -> None:
    """Test that the first device gets no context, which would use hundreds of MiB."""
    link, memory = cuda_link(DEVICE), memoryview(bytearray(64))
    assert link.pin(memory)
    link.unpin(memory)
    assert [what for what, _ in runtime.calls] == ["context", "pin", "context", "unpin"]
    assert {device for _, device in runtime.calls} == {DEVICE}
    assert runtime.device == torch.device("cuda", 0)


def test_memory_of_a_device_that_has_failed_is_unpinned_without_an_error(runtime: Runtime) -> None:
    """Test that the ring can be closed after the failure."""
    link, memory = cuda_link(DEVICE), memoryview(bytearray(64))
    assert link.pin(memory)
    runtime.answer = RuntimeError("CUDA error: an illegal memory access was encountered")
    link.unpin(memory)


@pytest.mark.parametrize("answer", [2, RuntimeError("out of memory")])
def test_unpinnable_memory_is_reported(runtime: Runtime, answer: int | Exception) -> None:
    """Test that the error state of the device is cleared."""
    runtime.answer = answer
    with pytest.warns(CaptureWarning, match="could not be pinned"):
        assert not cuda_link(DEVICE).pin(memoryview(bytearray(64)))
    assert [what for what, _ in runtime.calls] == ["context", "pin", "kernel"]
    assert {device for _, device in runtime.calls} == {DEVICE}
