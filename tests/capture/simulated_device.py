"""Simulate a GPU with tensors in host memory, two queues, and a thread for each queue.

The simulation keeps the properties that matter for correctness: the host runs ahead, each queue runs in order and late,
and only marks order the queues. It simulates neither speed nor pinned memory.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable

import torch

from asymcheck.state.leaves import Source
from asymcheck.storage.gpu_staging import Link, Mark


class SimulatedMark(Mark):
    """A point in one of the queues."""

    def __init__(self) -> None:
        """Begin before the point."""
        self.event = threading.Event()
        self.at_s = 0.0

    def passed(self) -> bool:
        """Return whether the queue has passed the point."""
        return self.event.is_set()

    def wait(self) -> None:
        """Wait for the point."""
        assert self.event.wait(30), "a mark that the device never passes"

    def seconds_after(self, earlier: Mark) -> float:
        """Return the seconds between two marks."""
        assert isinstance(earlier, SimulatedMark)
        return self.at_s - earlier.at_s


class SimulatedDevice(Link):
    """A link whose queues wait for a random delay before each operation, up to the given maximum."""

    def __init__(self, training_s: float, copies_s: float, seed: int = 0) -> None:
        """Start both queues."""
        self._chance = random.Random(seed)
        self._training: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._copies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_device: set[int] = set()
        self.pinned = 0
        self.held = 0
        self._threads = [
            threading.Thread(target=self._work_off, args=arguments, daemon=True)
            for arguments in ((self._training, training_s), (self._copies, copies_s))
        ]
        for thread in self._threads:
            thread.start()

    def _work_off(self, work: queue.SimpleQueue[Callable[[], None] | None], delay_s: float) -> None:
        while (item := work.get()) is not None:
            time.sleep(self._chance.random() * delay_s)
            item()

    def own(self, *tensors: torch.Tensor) -> None:
        """Declare that tensors are on this device."""
        self._on_device |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def link_of(self, source: Source) -> Link | None:
        """Return this link for tensors on this device."""
        is_here = isinstance(source, torch.Tensor) and source.untyped_storage().data_ptr() in self._on_device
        return self if is_here else None

    @staticmethod
    def _set(mark: SimulatedMark) -> None:
        mark.at_s = time.perf_counter()
        mark.event.set()

    def mark(self) -> Mark:
        """Set a mark. For all methods below see Link."""
        mark = SimulatedMark()
        self._training.put(lambda: self._set(mark))
        return mark

    def queue(self, work: Callable[[], None], after: Mark) -> Mark:
        """Queue a copy."""
        end = SimulatedMark()
        for item in (after.wait, work, lambda: self._set(end)):
            self._copies.put(item)
        return end

    def is_recorded(self) -> bool:
        """Return False, because this device has no graphs."""
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Queue work of the training."""
        self._training.put(work)

    def hold(self, until: Mark) -> None:
        """Make the training's queue wait."""
        self.held += 1
        self._training.put(until.wait)

    def pin(self, memory: memoryview) -> bool:
        """Count a pinned ring."""
        self.pinned += len(memory)
        return True

    def unpin(self, memory: memoryview) -> None:
        """Uncount a pinned ring."""
        self.pinned -= len(memory)

    def catch_up(self) -> None:
        """Wait until the training's queue is empty, for a program that changes tensors on the host."""
        self.mark().wait()

    def close(self) -> None:
        """End both queues."""
        for work in (self._training, self._copies):
            work.put(None)
        for thread in self._threads:
            thread.join()
