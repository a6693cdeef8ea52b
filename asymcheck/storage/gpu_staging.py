"""GPU staging: a bounded buffer in device memory, and copies from the device to the ring on a separate stream.

A device has two queues: the stream of the training, and a stream for copies. A *mark* is a point in either queue, such
as a CUDA event. Only :meth:`Mark.wait` blocks the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable

import torch

from asymcheck.errors import CaptureWarning, warn_user
from asymcheck.storage.allocator import Allocator
from asymcheck.types import readable_size

_ALIGNED_TO = 512
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of the process."""


@dataclasses.dataclass(frozen=True, eq=False)
class StagingRegion:
    """Allocated range of a staging buffer."""

    memory: torch.Tensor
    """uint8 tensor of the requested length."""
    start: int
    """Bytes from the start of the buffer."""
    taken: int
    """Allocated bytes, rounded up to the alignment."""


class Staging:
    """Staging buffer on one device. Thread-safe."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Allocate ``size`` bytes. The buffer stays empty if the device does not have enough memory."""
        try:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._allocator = Allocator(0, self._buffer.numel())
        self._lock = threading.Lock()

    def take(self, length: int) -> StagingRegion | None:
        """Allocate ``length`` bytes; None if no free range is long enough."""
        taken = max(1, -(-length // _ALIGNED_TO)) * _ALIGNED_TO
        with self._lock:
            start = self._allocator.take(taken)
        return None if start is None else StagingRegion(self._buffer[start : start + length], start, taken)

    def give_back(self, region: StagingRegion) -> None:
        """Free a region once. Queued work may still write to the region only if nothing reads it."""
        with self._lock:
            self._allocator.give_back(region.start, region.taken)

    def free(self) -> None:
        """Free the memory, when no region is needed any more."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")


class Mark:
    """Point in a queue of a CUDA device: an event with timing, so that windows can be measured on the device."""

    def __init__(self, device: torch.device) -> None:
        """Record the current point of the calling thread's queue."""
        self._device = device
        # Blocking: a waiting thread sleeps, instead of spinning on a core that the training needs.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Tell whether the device has reached the mark."""
        with _on(self._device):
            return bool(self.event.query())

    def wait(self) -> None:
        """Block until the device has reached the mark. Releases the GIL."""
        with _on(self._device):
            self.event.synchronize()

    def seconds_after(self, earlier: Mark) -> float:
        """Return the seconds between an earlier mark and this one. The device must have reached both."""
        return float(earlier.event.elapsed_time(self.event)) / 1000


class Link:
    """Queues and pinned memory of a CUDA device. Copies run on a stream of the lowest priority: training comes first.

    Tests replace both classes by a simulated device.
    """

    def __init__(self, device: torch.device) -> None:
        """Create the stream for copies."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=0)

    def mark(self) -> Mark:
        """Return a mark at the current end of the calling thread's training queue."""
        return Mark(self._device)

    def queue(self, work: Callable[[], None], after: Mark) -> Mark:
        """Run ``work`` on the copy queue after a mark; return the mark of its end."""
        with _on(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            work()
            return Mark(self._device)

    def is_recorded(self) -> bool:
        """Tell whether the calling thread is recording a CUDA graph instead of running operations."""
        return torch.cuda.is_current_stream_capturing()

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the training's queue."""
        work()

    def hold(self, until: Mark) -> None:
        """Make later work in the training's queue wait for a mark, without blocking the host."""
        torch.cuda.current_stream(self._device).wait_event(until.event)

    def pin(self, memory: memoryview) -> bool:
        """Pin host memory for fast asynchronous copies; return whether the memory is pinned."""
        reason: object
        with _on(self._device):
            try:
                reason = int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), _PORTABLE))
            except RuntimeError as error:
                reason = error
            if reason:
                with contextlib.suppress(RuntimeError):
                    # CUDA keeps the error until it is read. Torch reads it after the next kernel launch, and would
                    # blame that kernel. Launch a kernel here to clear the error.
                    torch.zeros(1, device=self._device).add_(1)
        if reason:
            warn_user(
                f"the ring of {readable_size(len(memory))} could not be pinned (cudaHostRegister: {reason}). Copies "
                "from the GPU block the training for longer. Raise the limit of locked memory (ulimit -l), or reduce "
                "ring_bytes",
                CaptureWarning,
            )
        return not reason

    def unpin(self, memory: memoryview) -> None:
        """Undo :meth:`pin`."""
        # A device that has failed may raise its error again, but the ring must be closed nevertheless.
        with contextlib.suppress(RuntimeError), _on(self._device):
            torch.cuda.cudart().cudaHostUnregister(_address(memory))


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make ``device`` the current device of this thread.

    Threads begin with device 0. Using that device would create a context of hundreds of MiB on it.
    """
    guard: contextlib.AbstractContextManager[None] = torch.cuda.device(device)
    return guard


@functools.cache
def cuda_link(device: torch.device) -> Link:
    """Return the link of a CUDA device, one per device and process."""
    return Link(device)


def catch_up(devices: Iterable[torch.device]) -> None:
    """Wait for the CUDA work that this thread has queued, so that other threads may use its tensors."""
    for device in set(devices):
        if device.type == "cuda":
            cuda_link(device).mark().wait()


def outlast_queue(tensor: torch.Tensor) -> None:
    """Delay the reuse of a CUDA tensor's memory, once it is freed, until this thread's queued work has ended."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
