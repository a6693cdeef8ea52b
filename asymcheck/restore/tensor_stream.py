"""Stream a checkpoint to a sink in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.restore.load import Loaded, read_first
from asymcheck.restore.read_plan import ByteTarget, Demand, ReadPlan, demands_of, execute, read_parts
from asymcheck.restore.resolve import Resolved
from asymcheck.state.boxes import Region
from asymcheck.storage.interfaces import ReadTier
from asymcheck.types import Progress, ProgressMeter

_GATHERED_BYTES = 256 << 20
"""Maximum bytes of tensors that are assembled in memory at once. A larger tensor is assembled alone."""


class Sink(Protocol):
    """Receiver of a checkpoint, for instance a file of another format."""

    def begin(self, shape: object, tensors: Mapping[int, TensorRow]) -> Mapping[int, ByteTarget]:
        """Prepare for a checkpoint; return the targets of tensor bytes by row. Tensors without a target are skipped.

        ``shape`` has placeholders (RowRef) instead of tensors, and ``tensors`` describes them by their numbers.
        """

    def finish(self) -> object:
        """Finish after all bytes have arrived; return the result."""

    def abandon(self) -> None:
        """Discard an unfinished checkpoint. Another one may begin."""


def stream(
    tier: ReadTier,
    run: str,
    step: int | str | None,
    tensors: str,
    sink: Sink,
    progress: Progress | None,
    *,
    rank: int | None,
) -> Loaded:
    """Read a checkpoint, verify every byte, and pass it to ``sink``.

    With ``rank``, stream the shards of that rank; otherwise, whole tensors of all ranks. A damaged candidate is skipped
    as in :func:`asymcheck.restore.load.load`, which raises the same errors if no candidate can be read.
    """

    def read(resolved: Resolved) -> object:
        read_plan = partial(execute, resolved=resolved)
        return hand_on(resolved.manifests, rank, tensors, sink, progress, read_plan)

    return read_first(tier, run, step, read)


def hand_on(
    manifests: Sequence[Manifest],
    rank: int | None,
    tensors: str,
    sink: Sink,
    progress: Progress | None,
    read: Callable[[ReadPlan], None],
) -> object:
    """Pass tensors to ``sink`` with plans that ``read`` executes; finish the sink, or discard its data on failure."""
    parts, shape = read_parts(manifests, rank, tensors)
    demands = demands_of(parts, shape, whole=rank is None)
    try:
        targets = sink.begin(shape, {number: demand.row for number, demand in demands.items()})
        wanted = {demands[number]: target for number, target in targets.items()}
        # Tensors whose bytes arrive out of order are assembled in memory, in batches.
        direct = [demand for demand in wanted if demand.in_runs]
        rounds = [direct, *_batches([demand for demand in wanted if not demand.in_runs])]
        meter = ProgressMeter(progress, sum(demand.row.nbytes for demand in wanted))
        for batch in filter(None, rounds):
            read(ReadPlan({demand: _Whole(wanted[demand], demand, meter) for demand in batch}))
    except BaseException:
        sink.abandon()
        raise
    return sink.finish()


def _batches(demands: Sequence[Demand]) -> Iterator[list[Demand]]:
    batch: list[Demand] = []
    nbytes = 0
    for demand in demands:
        if batch and nbytes + demand.row.nbytes > _GATHERED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(demand)
        nbytes += demand.row.nbytes
    if batch:
        yield batch


class _Whole:
    """Target that passes a tensor to a sink, in pieces or as a whole."""

    def __init__(self, target: ByteTarget, demand: Demand, meter: ProgressMeter) -> None:
        self._target = target
        self._meter = meter
        self._gathered = None if demand.in_runs else np.empty(demand.row.nbytes, dtype=np.uint8)
        self._left = demand.row.nbytes
        self._lock = threading.Lock()

    def put(self, start: int, data: memoryview) -> None:
        self._target.put(start, data)
        self._meter.add(len(data))

    def put_regions(self, regions: Iterable[Region], data: memoryview) -> None:
        done = 0
        for region in regions:
            if self._gathered is not None:
                region.copy(data, self._gathered)
            else:
                self._target.put(region.target, data[region.source : region.source + region.nbytes])
            done += region.nbytes
        with self._lock:
            self._left -= done
            is_complete = self._left == 0
        if is_complete and self._gathered is not None:
            self._target.put(0, self._gathered.data)
            self._gathered = None
        self._meter.add(done)
