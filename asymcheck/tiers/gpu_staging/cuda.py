"""CUDA: the link is a stream of its own, marks are events, and the ring's memory is pinned where it lies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

import torch

from asymcheck.errors import CaptureWarning, warn_user
from asymcheck.tiers.gpu_staging.link import Link, Mark

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of the process."""


class _CudaMark:
    """An event. It keeps time, so that windows can be measured as the device sees them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Blocking: who waits sleeps, and does not spin on a core that the training needs.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    @property
    def event(self) -> torch.cuda.Event:
        return self._event

    def passed(self) -> bool:
        with _on(self._device):
            return bool(self._event.query())

    def wait(self) -> None:
        with _on(self._device):
            self._event.synchronize()

    def seconds_after(self, earlier: Mark) -> float:
        return float(_event_of(earlier).elapsed_time(self._event)) / 1000


class _CudaLink:
    """Copies on a stream with the lowest priority: where both want the device, training goes first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=0)

    def mark(self) -> Mark:
        return _CudaMark(self._device)

    def queue(self, work: Callable[[], None], after: Mark) -> Mark:
        with _on(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(_event_of(after))
            work()
            return _CudaMark(self._device)

    def is_recorded(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def run(self, work: Callable[[], None]) -> None:
        work()

    def hold(self, until: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(_event_of(until))

    def pin(self, memory: memoryview) -> bool:
        reason: object
        with _on(self._device):
            try:
                reason = int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), _PORTABLE))
            except RuntimeError as error:
                reason = error
            if reason:
                with contextlib.suppress(RuntimeError):
                    # CUDA remembers the error until somebody asks, and torch asks after the next kernel, which is then
                    # taken for what failed. It has no other way to ask.
                    torch.zeros(1, device=self._device).add_(1)
        if reason:
            warn_user(
                f"the ring of {len(memory)} bytes could not be pinned (cudaHostRegister: {reason}): copies from the "
                "GPU hold the training for longer; raise the limit of locked memory (ulimit -l), or give fewer "
                "ring_bytes",
                CaptureWarning,
            )
        return not reason

    def unpin(self, memory: memoryview) -> None:
        with _on(self._device):
            torch.cuda.cudart().cudaHostUnregister(_address(memory))


def _event_of(mark: Mark) -> torch.cuda.Event:
    assert isinstance(mark, _CudaMark), "marks of one link do not meet those of another"  # noqa: S101 - for the reader and mypy
    return mark.event


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a device the thread's own for a while.

    Threads begin with device 0, where a process that trains on another one would get a context of hundreds of MiB.
    """
    guard: contextlib.AbstractContextManager[None] = torch.cuda.device(device)
    return guard


@functools.cache
def cuda_link(device: torch.device) -> Link:
    """Return the link of a CUDA device: the same one as long as the process lives."""
    return _CudaLink(device)


def catch_up(devices: Iterable[torch.device]) -> None:
    """Wait until CUDA devices have done what this thread asked of them, so that other threads may use its tensors."""
    for device in set(devices):
        if device.type == "cuda":
            cuda_link(device).mark().wait()


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
