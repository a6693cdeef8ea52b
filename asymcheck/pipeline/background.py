"""Saving in the background: ring, capture and flush of one run, wired together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from asymcheck.config import WRITER, CaptureConfig
from asymcheck.errors import AsymcheckError, CaptureWarning, warn_user
from asymcheck.format import registry
from asymcheck.format.frame import frame_length
from asymcheck.format.ring import RingHeader
from asymcheck.partition.schedule import Layout, Plan
from asymcheck.partition.state import flatten
from asymcheck.pipeline.capture import Capture, Capturer
from asymcheck.pipeline.ownership import Fences, deferred_rows, find
from asymcheck.pipeline.request import SaveRequest
from asymcheck.pipeline.ring_flush import Placing, RingFlusher
from asymcheck.pipeline.timing import Timing
from asymcheck.tiers.dram_ring import Ring
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.tiers.owners import this_process
from asymcheck.types import CheckpointRef, Digest

TierName = Literal["dram", "nvme"]
_MEMORY = Path("/proc/meminfo")
_ROOM_FOR_CAPTURES = 2
# Manifests, and what is lost between frames of different lengths.
_SLACK = 1.05
_SLACK_BYTES = 4 << 20


@dataclasses.dataclass
class Statistics:
    """What saving has cost the training thread so far."""

    captures: int = 0
    """Checkpoints begun."""
    durable: int = 0
    """Checkpoints that are durable."""
    lost: int = 0
    """Checkpoints that could not be stored, or were torn."""
    step_s: float = 0.0
    """Seconds inside ``step()``, the eager copies among them."""
    fence_s: float = 0.0
    """Seconds that optimizer steps waited for copies."""
    hooks_s: float = 0.0
    """Seconds in hooks of modules."""
    durable_s: list[float] = dataclasses.field(default_factory=list)
    """For each of the durable ones of the last 1,000, seconds from the beginning of ``step()`` until it was durable."""
    captured_bytes: int = 0
    """Bytes of the states of all captures."""
    written_bytes: int = 0
    """Bytes written to the store; the rest was there already."""
    ring_bytes: int = 0
    """Bytes of the ring."""


class Background:
    """Captures states of one run, and makes checkpoints of them. For the training thread."""

    def __init__(self, tier: NvmeTier, catalog: Catalog, placing: Placing, run: str, config: CaptureConfig) -> None:
        """Prepare; the ring is made when the first state is captured."""
        self._tier, self._catalog, self._placing = tier, catalog, placing
        self._run = run
        self._config = config
        self._pid = os.getpid()
        self._captures: list[Capture] = []
        self._ring: Ring | None = None
        self._flusher: RingFlusher | None = None
        self._capturer: Capturer | None = None
        self._fences: Fences | None = None
        self._timing: Timing | None = None
        self._modules: list[nn.Module] = []
        self.statistics = Statistics()
        self.held: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        """Entered while a fence waits, also one of an optimizer step: a signal handler that closes has to wait."""

    def begin(self, state: object, request: SaveRequest, generation: int | None) -> Capture:
        """Begin to capture a state; when this returns, everything but what optimizers own may change.

        Raises:
            UnsupportedValueError: something in the state cannot be stored; nothing was begun.
            AsymcheckError: it could not be copied; nothing is left of it.
        """
        began = time.perf_counter()
        flat = flatten(state)
        fences = self._fences or Fences(self.fence)
        self._fences = fences
        optimizers = fences.trusted(find(Optimizer, state))
        layout = Layout(
            tuple(leaf.nbytes for leaf in flat.leaves),
            tuple(leaf.group for leaf in flat.leaves),
            tuple(deferred_rows(flat.leaves, optimizers)),
        )
        timing = self._timed(state)
        plan = timing.plan(layout)
        capturer = self._started(plan)
        capture = Capture(flat, plan, request, generation)
        self.statistics.captures += 1
        self.statistics.captured_bytes += capture.state_bytes
        capturer.begin(capture)
        self._captures.append(capture)
        timing.began()
        self.statistics.step_s += time.perf_counter() - began
        self.statistics.hooks_s = timing.hooks_s
        return capture

    def _timed(self, state: object) -> Timing:
        if self._timing is None:
            self._timing = Timing(
                self._config, self._tier.config, newest_plan(self._tier, self._run), self._enter_window
            )
        modules = list(find(nn.Module, state))
        if modules != self._modules:
            self._timing.watch(modules)
            self._modules = modules
        return self._timing

    def _enter_window(self, number: int) -> None:
        if self._capturer is not None:
            self._capturer.enter_window(number)

    def _started(self, plan: Plan) -> Capturer:
        if self._capturer is None:
            needed = sum(frame_length(partition.length) for partition in plan.cut.partitions)
            self._ring = self._make_ring(needed)
            self._flusher = RingFlusher(self._ring, self._tier, self._catalog, self._placing)
            self._capturer = Capturer(
                self._ring,
                self._flusher.stored,
                self._flusher.finished,
                self._flusher.make_room_for,
                self._config.proof,
            )
        return self._capturer

    def _make_ring(self, needed: int) -> Ring:
        folder = Path(self._config.ring_folder)
        size = self._config.ring_bytes or _default_bytes(folder, needed)
        size = -(-size // registry.BLOCK_BYTES) * registry.BLOCK_BYTES
        if size < needed:
            warn_user(
                f"a ring of {size} bytes is smaller than the state ({needed} bytes of frames), so that checkpoints "
                "stream through it: none can be resumed from memory, and training waits for the store more often",
                CaptureWarning,
            )
        header = RingHeader(
            ring_id=os.urandom(16),
            store_id=self._tier.descriptor.store_id,
            store=str(self._tier.root),
            run=self._run,
            rank=0,
            owner=this_process(),
            data_bytes=size,
            created_ns=time.time_ns(),
            writer=WRITER,
        )
        ring = Ring(folder, header)
        self.statistics.ring_bytes = size
        return ring

    def fence(self) -> None:
        """Wait until nothing needs the state as it is any more: it may change when this returns."""
        if self._capturer is not None and self._timing is not None and not self._is_forked():
            with self.held:
                began = time.perf_counter()
                self._capturer.fence()
                waited = time.perf_counter() - began
                self._timing.fenced(began, waited)
                self.statistics.fence_s += waited
                self.statistics.hooks_s = self._timing.hooks_s

    def _is_forked(self) -> bool:
        """Tell whether this is a forked child, which has none of the threads; the ring is its parent's."""
        return os.getpid() != self._pid

    def settled(self) -> list[Capture]:
        """Return the captures that have become durable, or were lost, since the last call."""
        done = [capture for capture in self._captures if capture.durable.is_set()]
        for capture in done:
            self._captures.remove(capture)
            self.statistics.written_bytes += capture.written_bytes
            self.statistics.durable += capture.error is None
            if capture.error is None:
                self.statistics.durable_s = [*self.statistics.durable_s[-999:], capture.durable_s - capture.began_s]
            self.statistics.lost += capture.error is not None
        return done

    def wait(self, tier: TierName) -> None:
        """Wait until everything begun is complete in the ring, or durable in the store, or lost."""
        if self._capturer is None or self._is_forked():
            return
        self._capturer.settle()
        for capture in self._captures:
            (capture.complete if tier == "dram" else capture.durable).wait()

    def newest_in_ring(
        self, on_line: Callable[[CheckpointRef], bool]
    ) -> tuple[CheckpointRef, bytes, Callable[[Digest], memoryview]] | None:
        """Return the newest durable capture that is complete in the ring, and that ``on_line`` does not exclude.

        That is: the checkpoint, its manifest, and what gives the bytes of its partitions.
        """
        moving = None if self._flusher is None else self._flusher.newest(on_line)
        if moving is None or moving.ref is None or self._ring is None:
            return None
        slots = dict(zip(moving.capture.digests, moving.capture.slots, strict=True))
        ring = self._ring

        def payload(name: Digest) -> memoryview:
            slot = slots[name]
            # A capture that is complete in the ring has a place for each partition.
            return memoryview(b"") if slot is None else ring.payload(slot)

        return moving.ref, moving.manifest, payload

    def close(self) -> None:
        """Make everything durable and give the ring back; what could not be stored stays in it for the next start."""
        if self._is_forked():
            return
        if self._fences is not None:
            self._fences.remove()
        if self._timing is not None:
            self._timing.stop()
        if self._capturer is not None and self._flusher is not None and self._ring is not None:
            self._capturer.close()
            keep = not self._flusher.close()
            self._ring.close(keep=keep)
            self._capturer = self._flusher = self._ring = self._fences = None


def _default_bytes(folder: Path, needed: int) -> int:
    """Return room for two captures, but no more than half of the memory that is available."""
    wanted = int(needed * _SLACK * _ROOM_FOR_CAPTURES) + _SLACK_BYTES
    limits = [wanted]
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        limits.append(status.f_bavail * status.f_frsize * 9 // 10)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _MEMORY.read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(int(available.split()[1]) * 1024 // 2)
    return min(limits)


def newest_plan(tier: NvmeTier, run: str) -> object:
    """Return the plan record of the newest checkpoint of a run; None when there is none that can be read."""
    newest = max(tier.manifests.checkpoints(run), key=lambda listing: listing.ref, default=None)
    if newest is not None and newest.manifests:
        with contextlib.suppress(AsymcheckError):
            return tier.manifests.read(run, newest.ref, newest.manifests[0]).header.plan
    return None
