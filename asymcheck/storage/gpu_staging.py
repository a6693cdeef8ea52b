"""The GPU staging tier: a bounded buffer in the memory of a device, and the link that copies from there to the ring.

A device works off two queues beside the program. One queue is the training's own, the other only copies. A *mark* is a
point in either queue: everything that was queued before it. Only :meth:`Mark.wait` waits for a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from asymcheck.errors import CaptureWarning, warn_user
from asymcheck.storage.allocator import Allocator

_ALIGNED_TO = 512
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of the process."""


@dataclasses.dataclass(frozen=True, eq=False)
class StagingRegion:
    """Bytes of a staging buffer."""

    memory: torch.Tensor
    """uint8, as long as was asked for."""
    start: int
    """Bytes from the start of the buffer."""
    taken: int
    """Bytes of the buffer that it keeps."""


class Staging:
    """A buffer on one device. Thread-safe."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Allocate ``size`` bytes now, and never more; none at all if the device has not got them."""
        try:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._room = Allocator(0, self._buffer.numel())
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes that are free."""
        with self._lock:
            return self._room.free_bytes

    def take(self, length: int) -> StagingRegion | None:
        """Return ``length`` bytes of the buffer; None when it has no such piece free."""
        taken = max(1, -(-length // _ALIGNED_TO)) * _ALIGNED_TO
        with self._lock:
            start = self._room.take(taken)
        return None if start is None else StagingRegion(self._buffer[start : start + length], start, taken)

    def give_back(self, region: StagingRegion) -> None:
        """Free a region, once. Queued work may still write to it only if nothing reads it."""
        with self._lock:
            self._room.give_back(region.start, region.taken)


class Mark(Protocol):
    """A point in a queue of a device."""

    def passed(self) -> bool:
        """Tell whether the device has got there."""

    def wait(self) -> None:
        """Return when the device has got there. Releases the GIL."""

    def seconds_after(self, earlier: Mark) -> float:
        """Return the seconds from an earlier mark to this one, when both have passed."""


class Link(Protocol):
    """One device."""

    def mark(self) -> Mark:
        """Return the present point in the training's queue, of the calling thread."""

    def queue(self, work: Callable[[], None], after: Mark) -> Mark:
        """Let what ``work`` asks of the device go to the queue for copies, after a mark; return the mark of its end."""

    def is_recorded(self) -> bool:
        """Tell whether what the calling thread queues now is only recorded, to be done later: a CUDA graph."""

    def run(self, work: Callable[[], None]) -> None:
        """Let what ``work`` asks of the device go to the training's queue."""

    def pin(self, memory: memoryview) -> bool:
        """Pin host memory, for copies at full speed and beside the program; return whether it is pinned."""

    def unpin(self, memory: memoryview) -> None:
        """Undo :meth:`pin`."""

    def hold(self, until: Mark) -> None:
        """Let nothing that is queued from now on in the training's queue begin before a mark; the program goes on."""


class _CudaMark:
    """An event. It keeps time, so that windows can be measured as the device sees them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Blocking: who waits sleeps, and does not spin on a core that the training needs.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        with _on(self._device):
            return bool(self.event.query())

    def wait(self) -> None:
        with _on(self._device):
            self.event.synchronize()

    def seconds_after(self, earlier: Mark) -> float:
        return float(_event_of(earlier).elapsed_time(self.event)) / 1000


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
