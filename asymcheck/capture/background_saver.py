"""Background saver: connects the ring, the capture engine and the flusher of one run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from asymcheck.capture.device_copy import Devices
from asymcheck.capture.engine import CaptureEngine
from asymcheck.capture.inflight import Capture
from asymcheck.capture.optimizer_fence import OptimizerFences, OptimizerOwnership, distributed, find
from asymcheck.capture.ring_flush import Placing, RingFlusher
from asymcheck.capture.schedule import CaptureSchedule
from asymcheck.capture.signals import INTERRUPTS
from asymcheck.capture.tear_detection import TearDetector
from asymcheck.capture.two_phase_commit import TwoPhaseCommit
from asymcheck.commit.encoder import Encoder
from asymcheck.commit.save_request import SaveRequest
from asymcheck.config import WRITER, CaptureConfig, StoreConfig
from asymcheck.distributed import Session
from asymcheck.errors import AsymcheckError, CaptureWarning, warn_user
from asymcheck.events import is_watched, report, timed
from asymcheck.format import registry
from asymcheck.format.frame import frame_length
from asymcheck.format.manifest import Manifest
from asymcheck.format.ring_records import RingHeader
from asymcheck.measurement import ring_limits
from asymcheck.policies.interval import TrainingPace
from asymcheck.state.flattener import Flattener
from asymcheck.state.partition_plan import Plan, PlanInput
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.process_identity import this_process
from asymcheck.storage.shm.ring_writer import Ring
from asymcheck.types import CheckpointRef, Digest, readable_size

WaitTarget = Literal["memory", "local"]
_REPLACE_FACTOR = 1.25
"""A ring is replaced if the new ring is larger by this factor."""


@dataclasses.dataclass
class Statistics:
    """Costs of saving so far."""

    captures: int = 0
    """Number of captures begun."""
    durable: int = 0
    """Number of durable checkpoints."""
    lost: int = 0
    """Number of captures that could not be stored, or were torn."""
    step_s: float = 0.0
    """Seconds inside ``step()``, including eager copies."""
    fence_s: float = 0.0
    """Seconds that optimizer steps waited for copies. Waits of a device count once they are measured."""
    hooks_s: float = 0.0
    """Seconds in hooks of modules."""
    durable_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds from the start of ``step()`` to durability, for the last 1,000 durable checkpoints."""
    captured_bytes: int = 0
    """Bytes of the states of all captures."""
    eager_bytes: int = 0
    """Bytes of these that ``step()`` copied or compared itself, such as tensors of no optimizer."""
    written_bytes: int = 0
    """Bytes written to the store, without partitions that it already had."""
    ring_bytes: int = 0
    """Size of the ring."""
    paces: list[TrainingPace] = dataclasses.field(default_factory=list)
    """Rank 0, with several ranks and ``every="auto"``: measurements of each rank before the newest durable capture."""


class BackgroundSaver:
    """Captures states of one run, and flushes them to the store. For the training thread."""

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
        """Prepare. The first capture creates the ring; a larger state replaces it.

        With ``session``, its ranks save together.
        """
        self._session = session
        self._two_phase = None if session is None else TwoPhaseCommit(session, placing, tier.manifests, run)
        self._tier, self._catalog, self._encoder, self._placing = tier, catalog, encoder, placing
        self._run = run
        self._config = config
        self._pid, self._thread = os.getpid(), threading.current_thread()
        self._place = os.path.realpath(tier.root), run
        self._captures: list[Capture] = []
        self._engine: CaptureEngine | None = None
        self._processes = 1 if session is None else session.local_size
        store = cut_for_ring(tier.config, config.ring_bytes, Path(config.ring_folder), self._processes)
        self._schedule = CaptureSchedule(config, store, newest_plan(tier, run), self._enter_window)
        self._modules: list[nn.Module] = []
        self._flattener, self._ownership = Flattener(), OptimizerOwnership(config.deferred)
        self._devices = Devices(config.staging_bytes)
        self._unfenced: Capture | None = None
        self._short: Ring | None = None
        self.statistics = Statistics()
        self.detector = TearDetector(config.proof)
        """Detector of torn captures."""
        self.held: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        """Context in which hooks of optimizers and modules run. A signal handler waits for its end before it closes."""
        self.on_commit: Callable[[bool], object] | None = None
        """Callback after each commit, and with True after a loss on a full drive; see :class:`RingFlusher`."""
        self.on_close: Callable[[BackgroundSaver], None] = lambda _closed: None
        """Callback after :meth:`close`."""
        self.is_closed = False
        # With a compiled optimizer step, the compiler must not trace the fence.
        self._fences = OptimizerFences(torch.compiler.disable(self.fence))
        INTERRUPTS.hold(self)

    def begin(self, state: object, request: SaveRequest, generation: int | None) -> Capture:
        """Begin to capture a state. On return, everything that no optimizer owns may change.

        Raises:
            UnsupportedValueError: the state contains a value that cannot be stored; no capture was begun.
            AsymcheckError: the copy failed; the capture was discarded.
        """
        began, self._thread = time.perf_counter(), threading.current_thread()
        if self._engine is not None:
            # An interrupt during this wait must come before the ranks agree on a number.
            self._engine.fence()
        with contextlib.nullcontext(0) if self._two_phase is None else self._two_phase.beginning() as number:
            capture, engine = self._prepared(state, request, generation, number)
        capture.began_s = began
        link = capture.transfers.devices[0].link if capture.transfers.devices else None
        if link is not None:
            engine.ring.pin(link)
        with INTERRUPTS:
            engine.begin(capture)
            # Only a begun capture becomes durable or lost.
            self.statistics.captures += 1
            self.statistics.captured_bytes += capture.state_bytes
            self.statistics.eager_bytes += capture.plan.eager_bytes
            self._captures.append(capture)
        self._schedule.began(link)
        self._unfenced = capture
        ended = time.perf_counter()
        capture.stalled_s += ended - began
        self.statistics.step_s += ended - began
        self.statistics.hooks_s = self._schedule.hooks_s
        report("step", began, ended, 0, capture.named)
        return capture

    def _prepared(
        self, state: object, request: SaveRequest, generation: int | None, number: int
    ) -> tuple[Capture, CaptureEngine]:
        """Return a new capture of a state, and the engine that copies it."""
        if self._two_phase is not None:
            request = dataclasses.replace(request, store_ranks=self._two_phase.store_ranks)
        flat = self._flattener.flatten(state)
        fences, schedule, two_phase = self._fences, self._schedule, self._two_phase
        fences.come_first()
        optimizers = fences.trusted(find(Optimizer, state))
        parts = [part for part in distributed(state) if fences.trusted([part.optimizer])]
        columns = flat.columns
        modules = list(find(nn.Module, state))
        if modules != self._modules:
            schedule.watch(modules)
            self._modules = modules
        owned = self._ownership.deferred_rows(flat, optimizers, parts, self._modules)
        changing = self.detector.changing
        deferred = tuple(
            [is_owned and name not in changing for is_owned, name in zip(owned, columns.names, strict=True)]
        )
        layout = PlanInput(columns.sizes, columns.groups, deferred, columns.widths)
        if two_phase is None or two_phase.is_first:
            plan = schedule.plan(layout)
            save_round = None if two_phase is None else two_phase.lead(number, request, generation, plan)
        else:
            save_round = two_phase.follow(request)
            plan = schedule.plan(layout, save_round.plan)
            request, generation = dataclasses.replace(request, save_id=save_round.save_id), save_round.generation
        engine = self._started(plan)
        return Capture(flat, plan, request, generation, self._devices, save_round=save_round), engine

    def _enter_window(self, number: int) -> None:
        # A forked child captures nothing, and its copies of locks may be held for ever.
        if self._engine is not None and not self._is_forked():
            with self.held:
                self._engine.enter_window(number)

    def _started(self, plan: Plan) -> CaptureEngine:
        """Return the engine, with a ring that is large enough for a plan."""
        needed = sum(frame_length(partition.length) for partition in plan.cut.partitions)
        folder, given = Path(self._config.ring_folder), self._config.ring_bytes
        if self._engine is not None and self._engine.ring.is_removed():
            path = self._engine.ring.path
            self._end_ring()
            # The warning comes last, because warnings may be errors.
            warn_user(
                f"ring {path} was removed by another program, for example by systemd at a logout (RemoveIPC in "
                "logind.conf). A kill would have lost the captures in it. A new ring replaces it",
                CaptureWarning,
            )
        size = 0 if self._engine is None else self._engine.ring.header.data_bytes
        is_short = 0 < size < ROOM_FOR_CAPTURES * needed and given is None
        if is_short and default_bytes(folder, needed, size, self._processes) >= _REPLACE_FACTOR * size:
            # Optimizers have no state before the first step. The captures in the old ring become durable first.
            self._end_ring()
        if self._engine is None:
            with contextlib.ExitStack() as opened:
                ring = self._make_ring(folder, given or default_bytes(folder, needed, 0, self._processes), needed)
                opened.callback(ring.close)
                flusher = RingFlusher(
                    ring, self._tier, self._catalog, self._encoder, self._placing, self._two_phase, self.on_commit
                )
                opened.callback(flusher.close)
                self._engine = CaptureEngine(ring, flusher, self.detector)
                opened.pop_all()
        ring = self._engine.ring
        if ring.refused is not None and ring is not self._short:
            self._short = ring
            effect = "fewer checkpoints can be resumed from memory, and training waits for the drive more often"
            warn_user(f"{ring.refused}; until then, {effect}", CaptureWarning)
        return self._engine

    def _make_ring(self, folder: Path, size: int, needed: int) -> Ring:
        size = -(-size // registry.BLOCK_BYTES) * registry.BLOCK_BYTES
        if size < needed:
            larger = f"enlarge {folder} (in a container: docker run --shm-size=…), or free memory"
            if self._config.ring_bytes is not None:
                larger = "give a larger CaptureConfig(ring_bytes=…)"
            warn_user(
                f"the ring of {readable_size(size)} in {folder} is smaller than the state ({readable_size(needed)}). "
                "Checkpoints are streamed through it: none can be resumed from memory, and training waits for the "
                f"drive more often. For a ring of two states, {larger}",
                CaptureWarning,
            )
        header = RingHeader(
            ring_id=os.urandom(16),
            store_id=self._tier.descriptor.store_id,
            # The next training may start in another directory.
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

    def fence(self) -> None:
        """Wait until the state was copied, so that it may change."""
        engine, schedule = self._engine, self._schedule
        if engine is not None and not self._is_forked():
            with self.held:
                began, compared_s = time.perf_counter(), self.detector.compared_s
                if not engine.fence():
                    return
                compared_s = self.detector.compared_s - compared_s
                # The wait of a device is measured later, and counts for a later iteration.
                waited = time.perf_counter() - began + self._devices.held_s()
                iteration = schedule.fenced(began, waited - compared_s)
                self.statistics.fence_s += waited
                self.statistics.hooks_s = schedule.hooks_s
                if iteration is not None and self._unfenced is not None:
                    self._unfenced.stalled_s += waited
                    for number, (phase, start, end) in enumerate(iteration.windows if is_watched() else ()):
                        detail = {**self._unfenced.named(), "window": number, "phase": phase}
                        report("window", start, end, 0, partial(dict, detail))
                self._unfenced = None

    def _is_forked(self) -> bool:
        """Tell whether this is a forked child, which has no threads and does not own the ring."""
        return os.getpid() != self._pid

    def is_replaced_by(self, another: BackgroundSaver | None, tier: NvmeTier, run: str) -> bool:
        """Tell whether this thread now trains ``run`` with ``another`` saver, so that this saver is unused."""
        is_in_use = self._thread.is_alive() and self._thread is not threading.current_thread()
        is_same_run = self._place == (os.path.realpath(tier.root), run)
        return self is not another and is_same_run and self._session is None and not is_in_use

    def settled(self) -> list[Capture]:
        """Return the captures that became durable or lost since the last call."""
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
        """Wait until each capture is durable or lost; with ``"memory"``, until each is complete in the ring."""
        if self._engine is None or self._is_forked():
            return
        self._engine.settle()
        if self._captures:
            with timed("wait", 0, lambda: {"run": self._run, "target": target}):
                for capture in self._captures:
                    capture.complete.wait()
                    if target == "local" or not self._engine.flusher.survives(capture):
                        capture.durable.wait()
        # A capture whose outcome was reported is not in the list, but may still await its fence.
        self._engine.fence()
        self.detector.settle()

    def in_ring(self) -> dict[CheckpointRef, tuple[Manifest, Callable[[Digest], memoryview]]]:
        """Return the durable captures that are complete in the ring, newest first.

        Each has its manifest, and a function that returns the bytes of a partition.
        """
        return {} if self._engine is None else self._engine.flusher.committed()

    def close(self) -> None:
        """Make everything durable and remove the ring, unless it holds captures that could not be stored."""
        if self._is_forked():
            return
        self._fences.remove()
        self._schedule.stop()
        self._end_ring()
        # Now, because only the garbage collector frees this object, which refers to itself.
        self._devices.free()
        self._unfenced = None
        INTERRUPTS.release(self)
        self.on_close(self)
        self.is_closed = True

    def _end_ring(self) -> None:
        if self._engine is not None:
            with timed("close", 0, lambda: {"run": self._run}):
                self._engine.close()
                keep = not self._engine.flusher.close()
                self._engine.ring.close(keep=keep)
            self._engine = self._short = None


def newest_plan(tier: NvmeTier, run: str) -> object:
    """Return the plan record of the newest checkpoint of a run; None if none can be read."""
    # The newest one alone is listed, because a run may have thousands.
    for ref in reversed(tier.manifests.refs(run)):
        for name in tier.manifests.listing(run, ref).manifests[:1]:
            with contextlib.suppress(AsymcheckError):
                return tier.manifests.read(run, ref, name).header.plan
            return None
    return None


ROOM_FOR_CAPTURES = 2
# Manifests, and gaps between frames of different lengths.
_SLACK = 1.05
_SLACK_BYTES = 4 << 20
_RING_BYTES_MIN = 4 * registry.BLOCK_BYTES


def default_bytes(folder: Path, needed: int, freed: int = 0, processes: int = 1) -> int:
    """Return the bytes for two captures of ``needed`` bytes, within :func:`~asymcheck.measurement.ring_limits`."""
    wanted = int(needed * _SLACK * ROOM_FOR_CAPTURES) + _SLACK_BYTES
    return max(min([wanted, *ring_limits(folder, freed, processes)]), _RING_BYTES_MIN)


def cut_for_ring(config: StoreConfig, ring_bytes: int | None, folder: Path, processes: int) -> StoreConfig:
    """Return a configuration whose deferred partitions are small enough that two fit into the ring.

    ``ring_bytes`` is None for a ring of automatic size. Sizes are powers of two, so that they rarely change between
    starts with different available memory: partitions that stay the same are not written again.
    """
    limits = ring_limits(folder, 0, processes) if ring_bytes is None else [ring_bytes]
    if not limits:
        return config
    half = max(min(limits) // 2 - registry.BLOCK_BYTES, _RING_BYTES_MIN)
    largest = 1 << half.bit_length() - 1
    if largest >= config.deferred_bytes_max:
        return config
    smallest = min(config.deferred_bytes_min, largest // 4)
    return dataclasses.replace(config, deferred_bytes_max=largest, deferred_bytes_min=smallest)
