"""Saving in the background: ring, capture and flush of one run, wired together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from asymcheck.capture.device_copy import DeviceQueues
from asymcheck.capture.engine import CaptureEngine
from asymcheck.capture.inflight import Capture
from asymcheck.capture.optimizer_fence import OptimizerFences, OptimizerOwnership, distributed, find
from asymcheck.capture.ring_flush import Placing, RingFlusher
from asymcheck.capture.schedule import CaptureSchedule, WindowTimer
from asymcheck.capture.signals import INTERRUPTS
from asymcheck.capture.tear_detection import TearDetector
from asymcheck.capture.two_phase_commit import TwoPhaseCommit
from asymcheck.commit.encoder import Encoder
from asymcheck.commit.save_request import SaveRequest
from asymcheck.config import WRITER, CaptureConfig, StoreConfig
from asymcheck.distributed import Session
from asymcheck.errors import AsymcheckError, CaptureWarning, warn_user
from asymcheck.events import is_watched, tell, timed
from asymcheck.format import registry
from asymcheck.format.frame import frame_length
from asymcheck.format.manifest import Manifest
from asymcheck.format.ring_records import RingHeader
from asymcheck.policies.interval import TrainingPace
from asymcheck.state.flattener import Flattener
from asymcheck.state.iteration_profile import Iteration
from asymcheck.state.partition_plan import Plan, PlanInput
from asymcheck.storage.available_memory import available_bytes
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.process_identity import this_process
from asymcheck.storage.shm import Ring
from asymcheck.types import CheckpointRef, Digest

WaitTarget = Literal["memory", "local"]
_WORTH_IT = 1.25
"""A ring is replaced if the new ring is larger by this factor."""


@dataclasses.dataclass
class Statistics:
    """Costs of saving for the training thread so far."""

    captures: int = 0
    """Checkpoints begun."""
    durable: int = 0
    """Checkpoints that are durable."""
    lost: int = 0
    """Checkpoints that could not be stored, or were torn."""
    step_s: float = 0.0
    """Seconds inside ``step()``, the eager copies among them."""
    fence_s: float = 0.0
    """Seconds that optimizer steps waited for copies; those of a device count when it has got there."""
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
    paces: list[TrainingPace] = dataclasses.field(default_factory=list)
    """On rank 0 of several, with ``every="auto"``: what each rank had measured when the newest durable one began."""


class BackgroundSaver:
    """Captures states of one run, and makes checkpoints of them. For the training thread."""

    def __init__(
        self,
        tier: NvmeTier,
        catalog: Catalog,
        encoder: Encoder,
        placing: Placing,
        run: str,
        config: CaptureConfig,
        session: Session | None = None,
    ) -> None:
        """Prepare; the ring is made when the first state is captured, and anew when it is outgrown.

        With ``session`` its ranks save together.
        """
        self._session = session
        self._joint = None if session is None else TwoPhaseCommit(session, placing, tier.manifests, run)
        self._tier, self._catalog, self._encoder, self._placing = tier, catalog, encoder, placing
        self._run = run
        self._config = config
        self._pid = os.getpid()
        self._captures: list[Capture] = []
        self._ring: Ring | None = None
        self._flusher: RingFlusher | None = None
        self._capturer: CaptureEngine | None = None
        self._fences: OptimizerFences | None = None
        self._timing: CaptureSchedule | None = None
        self._processes = 1 if session is None else session.local_size
        self._timer = WindowTimer(self._enter_timed)
        self._modules: list[nn.Module] = []
        self._flattener, self._ownership = Flattener(), OptimizerOwnership()
        self._lanes = DeviceQueues(config.staging_bytes)
        self._unfenced: Capture | None = None
        self._short: Ring | None = None
        self.statistics = Statistics()
        self.prover = TearDetector(config.proof)
        """Knows which captures may be torn."""
        self.held: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        """Entered by what hooks of optimizers and modules do: a signal handler that closes has to wait."""
        self.on_commit: Callable[[], object] | None = None
        """Called on a thread of its own after each commit; must not raise."""
        self.on_close: Callable[[BackgroundSaver], None] = lambda _closed: None
        """Called with this when it has been closed."""
        INTERRUPTS.hold(self)

    def begin(self, state: object, request: SaveRequest, generation: int | None) -> Capture:
        """Begin to capture a state; when this returns, everything but what optimizers own may change.

        Raises:
            UnsupportedValueError: something in the state cannot be stored; nothing was begun.
            AsymcheckError: it could not be copied; nothing is left of it.
        """
        began = time.perf_counter()
        if self._capturer is not None:
            # An interrupt that ends the waiting here leaves no number that other ranks wait for.
            self._capturer.fence()
        with contextlib.nullcontext(0) if self._joint is None else self._joint.beginning() as number:
            capture, capturer = self._prepared(state, request, generation, number)
        capture.began_s = began
        if self._ring is not None and capture.transfers.lanes:
            self._ring.pin(capture.transfers.lanes[0].link)
        with INTERRUPTS:
            capturer.begin(capture)
            # Not before: of one that was not begun, nobody hears that it is durable or lost.
            self.statistics.captures += 1
            self.statistics.captured_bytes += capture.state_bytes
            self._captures.append(capture)
        timing = self._timed(state)
        timing.began(capture.transfers.lanes[0].link if capture.transfers.lanes else None)
        self._unfenced = capture
        ended = time.perf_counter()
        capture.stalled_s += ended - began
        self.statistics.step_s += ended - began
        self.statistics.hooks_s = timing.hooks_s
        tell("step", began, ended, 0, capture.named)
        return capture

    def _prepared(
        self, state: object, request: SaveRequest, generation: int | None, number: int
    ) -> tuple[Capture, CaptureEngine]:
        """Return a capture of a state, of which nothing is copied yet, and what is to copy it."""
        if self._joint is not None:
            request = dataclasses.replace(request, store_ranks=self._joint.store_ranks)
        flat = self._flattener.flatten(state)
        # The compiler of a compiled optimizer step must not look into the fence: it would compile the copies, too.
        fences = self._fences or OptimizerFences(torch.compiler.disable(self.fence))
        self._fences = fences
        fences.come_first()
        optimizers = fences.trusted(find(Optimizer, state))
        parts = [part for part in distributed(state) if fences.trusted([part.optimizer])]
        columns = flat.columns
        timing, joint, turn = self._timed(state), self._joint, None
        owned = self._ownership.deferred_rows(flat.leaves, optimizers, parts, self._modules)
        changing = self.prover.changing
        deferred = tuple(
            [is_owned and name not in changing for is_owned, name in zip(owned, columns.names, strict=True)]
        )
        layout = PlanInput(columns.sizes, columns.groups, deferred, columns.widths)
        if joint is None:
            plan = timing.plan(layout)
        elif joint.is_first:
            plan = timing.plan(layout)
            turn = joint.lead(number, request, generation, plan)
        else:
            turn = joint.follow(request)
            plan = timing.plan(layout, turn.plan)
            request, generation = dataclasses.replace(request, save_id=turn.save_id), turn.generation
        capturer = self._started(plan)
        capture = Capture(flat, plan, request, generation, self._lanes)
        capture.turn = turn
        return capture, capturer

    def _timed(self, state: object) -> CaptureSchedule:
        if self._timing is None:
            config, folder = self._config, Path(self._config.ring_folder)
            self._timing = CaptureSchedule(
                config,
                cut_for_ring(self._tier.config, config.ring_bytes, folder, self._processes),
                newest_plan(self._tier, self._run),
                self._enter_window,
                self._timer,
            )
        modules = list(find(nn.Module, state))
        if modules != self._modules:
            self._timing.watch(modules)
            self._modules = modules
        return self._timing

    def _enter_window(self, number: int) -> None:
        # What a forked child runs is not captured, and who held a lock at the fork is not in it.
        if self._capturer is not None and not self._is_forked():
            with self.held:
                self._capturer.enter_window(number)

    def _enter_timed(self, number: int) -> None:
        if self._capturer is not None and not self._is_forked():
            self._capturer.enter_timed(number)

    def _started(self, plan: Plan) -> CaptureEngine:
        needed = sum(frame_length(partition.length) for partition in plan.cut.partitions)
        if self._ring is not None and self._is_outgrown(self._ring.header.data_bytes, needed):
            # Optimizers have their state only after a step. All that is in the old one becomes durable first.
            self._end_ring()
        if self._capturer is None:
            self._ring = self._make_ring(needed)
            self._flusher = RingFlusher(
                self._ring, self._tier, self._catalog, self._encoder, self._placing, self._joint, self.on_commit
            )
            self._capturer = CaptureEngine(self._ring, self._flusher, self.prover)
        self._warn_of_short_ring()
        return self._capturer

    def _is_outgrown(self, size: int, needed: int) -> bool:
        """Tell whether a ring of a size of our own choice has too little room by now, and a new one would have more."""
        if self._config.ring_bytes is not None or ROOM_FOR_CAPTURES * needed <= size:
            return False
        return default_bytes(Path(self._config.ring_folder), needed, size, self._processes) >= _WORTH_IT * size

    def _make_ring(self, needed: int) -> Ring:
        folder = Path(self._config.ring_folder)
        size = self._config.ring_bytes or default_bytes(folder, needed, 0, self._processes)
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
            # Whoever finds the ring looks from another directory.
            store=str(self._tier.root.absolute()),
            run=self._run,
            rank=0 if self._session is None else self._session.rank,
            owner=this_process(),
            data_bytes=size,
            created_ns=time.time_ns(),
            writer=WRITER,
        )
        ring = Ring(folder, header)
        self.statistics.ring_bytes = size
        return ring

    def _warn_of_short_ring(self) -> None:
        ring = self._ring
        if ring is not None and ring.refused is not None and ring is not self._short:
            self._short = ring
            what = "fewer checkpoints can be resumed from memory, and training waits for the store more often"
            warn_user(f"{ring.refused}; as long as that is so, {what}", CaptureWarning)

    def fence(self) -> None:
        """Wait until nothing needs the state as it is any more: it may change when this returns."""
        capturer, timing = self._capturer, self._timing
        if capturer is not None and timing is not None and not self._is_forked():
            with self.held:
                began, compared_s = time.perf_counter(), self.prover.compared_s
                if not capturer.fence():
                    return
                compared_s = self.prover.compared_s - compared_s
                # Of a device it is known when it has got there: it counts for the iteration in which that shows.
                waited = time.perf_counter() - began + self._lanes.held_s()
                iteration = timing.fenced(began, waited - compared_s)
                self.statistics.fence_s += waited
                self.statistics.hooks_s = timing.hooks_s
                if iteration is not None and self._unfenced is not None:
                    self._unfenced.stalled_s += waited
                    _tell_of_windows(iteration, self._unfenced)
                self._unfenced = None

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
            self.statistics.paces = capture.paces or self.statistics.paces
        return done

    def wait(self, target: WaitTarget) -> None:
        """Wait until each capture is durable or lost; with ``"memory"``, until it is complete in the ring."""
        if self._capturer is None or self._flusher is None or self._is_forked():
            return
        self._capturer.settle()
        if self._captures:
            with timed("wait", 0, lambda: {"run": self._run, "target": target}):
                for capture in self._captures:
                    capture.complete.wait()
                    if target == "local" or not self._flusher.survives(capture):
                        capture.durable.wait()
            # Nothing needs the state any more: it may change.
            self._capturer.fence()

    def newest_in_ring(
        self, on_line: Callable[[CheckpointRef], bool]
    ) -> tuple[CheckpointRef, Manifest, Callable[[Digest], memoryview]] | None:
        """Return the newest durable capture that is complete in the ring, and that ``on_line`` does not exclude.

        That is: the checkpoint, its manifest, and what gives the bytes of its partitions.
        """
        committed = () if self._flusher is None else self._flusher.committed()
        found = ((ref, one) for one in committed if (ref := one.capture.ref) is not None and on_line(ref))
        ref, inflight = next(found, (None, None))
        if ref is None or inflight is None or self._ring is None:
            return None
        slots = dict(zip(inflight.capture.digests, inflight.capture.slots, strict=True))
        ring = self._ring

        def payload(name: Digest) -> memoryview:
            slot = slots[name]
            # A capture that is complete in the ring has a place for each partition.
            return memoryview(b"") if slot is None else ring.payload(slot)

        return ref, inflight.manifest, payload

    def in_ring(self) -> list[CheckpointRef]:
        """Return the durable captures that are complete in the ring, newest first."""
        committed = () if self._flusher is None else self._flusher.committed()
        return [one.capture.ref for one in committed if one.capture.ref is not None]

    def close(self) -> None:
        """Make everything durable and give the ring back; what could not be stored stays in it for the next start."""
        if self._is_forked():
            return
        if self._fences is not None:
            self._fences.remove()
        if self._timing is not None:
            self._timing.stop()
        self._timer.stop()
        self._end_ring()
        self._fences = self._unfenced = None
        INTERRUPTS.release(self)
        self.on_close(self)

    def _end_ring(self) -> None:
        if self._capturer is not None and self._flusher is not None and self._ring is not None:
            with timed("close", 0, lambda: {"run": self._run}):
                self._capturer.close()
                keep = not self._flusher.close()
                self._ring.close(keep=keep)
            self._capturer = self._flusher = self._ring = self._short = None


def _tell_of_windows(iteration: Iteration, capture: Capture) -> None:
    """Report to watchers the times of the windows in which a capture was copied."""
    for number, (phase, start, end) in enumerate(iteration.windows if is_watched() else ()):
        detail = {**capture.named(), "window": number, "phase": phase}
        tell("window", start, end, 0, partial(dict, detail))


def newest_plan(tier: NvmeTier, run: str) -> object:
    """Return the plan record of the newest checkpoint of a run; None when there is none that can be read."""
    newest = max(tier.manifests.checkpoints(run), key=lambda listing: listing.ref, default=None)
    if newest is not None and newest.manifests:
        with contextlib.suppress(AsymcheckError):
            return tier.manifests.read(run, newest.ref, newest.manifests[0]).header.plan
    return None


ROOM_FOR_CAPTURES = 2
# Manifests, and what is lost between frames of different lengths.
_SLACK = 1.05
_SLACK_BYTES = 4 << 20
_LEAST_BYTES = 4 * registry.BLOCK_BYTES


def default_bytes(folder: Path, needed: int, freed: int = 0, processes: int = 1) -> int:
    """Return room for two captures, but no more than half of the memory that is available when ``freed`` is.

    The result is divided by the number of ``processes`` that create a ring at the same time.
    """
    wanted = int(needed * _SLACK * ROOM_FOR_CAPTURES) + _SLACK_BYTES
    return max(min([wanted, *_limits(folder, freed, processes)]), _LEAST_BYTES)


def _limits(folder: Path, freed: int, processes: int) -> list[int]:
    limits = []
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        limits.append((status.f_bavail * status.f_frsize // processes + freed) * 9 // 10)
    available = available_bytes()
    if available is not None:
        limits.append((available // processes + freed) // 2)
    return limits


def cut_for_ring(config: StoreConfig, ring_bytes: int | None, folder: Path, processes: int) -> StoreConfig:
    """Return a configuration whose deferred partitions go through a ring, one being copied while another is written.

    ``ring_bytes`` is None for a ring of automatic size. Sizes are powers of two: the available memory differs from
    start to start, and a run that cuts as before writes less.
    """
    limits = _limits(folder, 0, processes) if ring_bytes is None else [ring_bytes]
    if not limits:
        return config
    half = max(min(limits) // 2 - registry.BLOCK_BYTES, _LEAST_BYTES)
    most = 1 << half.bit_length() - 1
    if most >= config.deferred_bytes_max:
        return config
    least = min(config.deferred_bytes_min, most // 4)
    return dataclasses.replace(config, deferred_bytes_max=most, deferred_bytes_min=least)
