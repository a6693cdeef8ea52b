"""Our reimplementations of published schemes without a package, written from their papers, with their full overlap.

All schemes copy the state to host buffers during the next forward and backward pass, hold the optimizer until the copy
is done, and write in the background. They differ in the number of in-flight checkpoints and in the write path.

- CheckFreq (Mohan et al., FAST 2021): a copy, then its flush, one in-flight checkpoint.

- DataStates-LLM (Maurya et al., HPDC 2024): two host buffers. Copied bytes are written while the rest is copied.

- PCcheck (Strati et al., ASPLOS 2025): several in-flight checkpoints, each written by several threads into a separate
  slot. A pointer moves to a slot when that slot is durable, never backwards.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.async_peers import Saver
from benchmarks.peers import fsync

CHECKFREQ: dict[str, Any] = {"in_flight": 1, "writers": 1, "streams": False}
DATASTATES: dict[str, Any] = {"in_flight": 2, "writers": 2, "streams": True}
PCCHECK: dict[str, Any] = {"in_flight": 2, "writers": 3, "streams": True}
"""Options of :class:`Buffered` for each scheme."""

_CHUNK = 8 << 20
_POINTER = "newest"


class Fenced(Saver):
    """Copies the state in the background, and blocks the optimizer until the copy is complete."""

    def __init__(self, state: dict[str, Any], where: Path) -> None:
        """Begin without a copy in progress."""
        super().__init__(state, where)
        self._copied = threading.Event()
        self._copied.set()

    def before_optimizer(self) -> None:
        """Wait until the state has been copied."""
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self.stalls[-1] += time.perf_counter() - began


class Buffered(Fenced):
    """Copies into host buffers in the background, and writes from these buffers."""

    def __init__(
        self, state: dict[str, Any], where: Path, name: str, *, in_flight: int, writers: int, streams: bool
    ) -> None:
        """Allow ``in_flight`` checkpoints with ``writers`` threads each; if ``streams``, write while copying."""
        super().__init__(state, where)
        self.name = name
        self._writers, self._streams = writers, streams
        self._names = list(self.tensors())
        sizes = [tensor.nbytes for tensor in self.tensors().values()]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._free: queue.Queue[np.ndarray[Any, Any]] = queue.Queue()
        for _ in range(in_flight):
            self._free.put(np.zeros(self._starts[-1], dtype=np.uint8))
        # Use one slot more than checkpoints in flight, so that the newest durable checkpoint is never overwritten.
        self._slots: queue.Queue[int] = queue.Queue()
        for slot in range(in_flight + 1):
            self._slots.put(slot)
        self._pointed: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def save(self, step: int) -> None:
        """Wait for a free buffer, take it, and begin to copy."""
        began = time.perf_counter()
        buffer = self._free.get()
        self._copied = threading.Event()
        thread = threading.Thread(target=self._run, args=(step, buffer, self.tensors(), self._copied, began))
        thread.start()
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        self.stalls.append(time.perf_counter() - began)

    def drain(self) -> None:
        """Wait for all checkpoints."""
        for thread in self._threads:
            thread.join()

    def _run(
        self,
        step: int,
        buffer: np.ndarray[Any, Any],
        tensors: dict[str, torch.Tensor],
        copied: threading.Event,
        began: float,
    ) -> None:
        slot = self._slots.get()
        ready: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        descriptor = os.open(self.where / f"slot-{slot}", os.O_RDWR | os.O_CREAT, 0o600)
        writers = [threading.Thread(target=_write, args=(descriptor, buffer, ready)) for _ in range(self._writers)]
        if self._streams:
            _start(writers)
        for name, start in zip(self._names, self._starts, strict=False):
            source = tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy()
            buffer[start : start + len(source)] = source
            for at in range(start, start + len(source), _CHUNK):
                ready.put((at, min(at + _CHUNK, start + len(source))))
        copied.set()
        if not self._streams:
            _start(writers)
        for _ in writers:
            ready.put(None)
        for writer in writers:
            writer.join()
        os.fsync(descriptor)
        os.close(descriptor)
        self._point(step, slot, tensors)
        self._free.put(buffer)
        self.durable.append(time.perf_counter() - began)

    def _point(self, step: int, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Make a slot the newest, durably, unless a newer slot is durable already."""
        with self._lock:
            if self._pointed is not None and self._pointed[0] > step:
                self._slots.put(slot)
                return
            if self._pointed is not None:
                self._slots.put(self._pointed[1])
            self._pointed = step, slot
            described = [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
            ]
            text = json.dumps({"step": step, "slot": slot, "tensors": described})
            temporary = self.where / "newest.tmp"
            temporary.write_text(text)
            fsync(temporary)
            temporary.replace(self.where / _POINTER)
            fsync(self.where)


def _start(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()


def _write(descriptor: int, buffer: np.ndarray[Any, Any], ready: queue.SimpleQueue[tuple[int, int] | None]) -> None:
    while (part := ready.get()) is not None:
        first, behind = part
        os.pwrite(descriptor, buffer[first:behind].data, first)


def read_newest(where: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the step and the tensors of the slot that the pointer names; -1 and none without a pointer."""
    if not (where / _POINTER).exists():
        return -1, {}
    pointer = json.loads((where / _POINTER).read_text())
    data = np.fromfile(where / f"slot-{pointer['slot']}", dtype=np.uint8)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for name, dtype, shape in pointer["tensors"]:
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        flat = torch.from_numpy(data[start : start + empty.nbytes])
        tensors[name] = flat.view(empty.dtype).reshape(shape) if empty.nbytes else empty
        start += empty.nbytes
    return pointer["step"], tensors
