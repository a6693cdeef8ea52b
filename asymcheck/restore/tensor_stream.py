"""Stream: the bytes of a checkpoint handed on as they are read, so that memory stays bounded however large it is."""

from __future__ import annotations

import dataclasses
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
from asymcheck.types import Progress

_GATHERED_BYTES = 256 << 20
"""Most bytes of tensors that are put together in memory at once; one of more is alone."""


@dataclasses.dataclass(frozen=True)
class CheckpointOutline:
    """A checkpoint without its bytes."""

    shape: object
    """The state, with a :class:`asymcheck.restore.state_template.RowRef` in the place of each tensor."""
    tensors: Mapping[int, TensorRow]
    """The tensors of the shape, by row."""


class Sink(Protocol):
    """Takes one checkpoint, for instance into a file of another format."""

    def begin(self, outline: CheckpointOutline) -> Mapping[int, ByteTarget]:
        """Prepare for a checkpoint; return what takes the bytes of each tensor that is wanted, by row."""

    def finish(self) -> object:
        """Complete it, all bytes have come; return the result."""

    def abandon(self) -> None:
        """Remove what was begun: the checkpoint is damaged, or reading it failed. Another may begin."""


def stream(
    tier: ReadTier,
    run: str,
    step: int | str | None,
    tensors: str,
    sink: Sink,
    progress: Progress | None = None,
    *,
    rank: int | None = None,
) -> Loaded:
    """Read a checkpoint, every byte verified, and hand it to ``sink``.

    With ``rank``, what that rank saved; else what all ranks have together, parts put together to whole tensors.

    A damaged candidate gives way to the next older one, as in :func:`asymcheck.restore.load.load`.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as there.
    """

    def read(resolved: Resolved) -> object:
        read_plan = partial(execute, tier=tier, resolved=resolved)
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
    """Hand tensors to ``sink`` by plans that ``read`` executes, and finish it; when one fails, it keeps nothing."""
    parts, shape = read_parts(manifests, manifests[0].header.ref, rank, tensors)
    demands = demands_of(parts, shape, whole=rank is None)
    try:
        targets = sink.begin(CheckpointOutline(shape, {number: demand.row for number, demand in demands.items()}))
        wanted = {demands[number]: target for number, target in targets.items()}
        # Bytes of a tensor that lie apart in it are put together in memory, some tensors at a time.
        direct = [demand for demand in wanted if demand.in_runs]
        rounds = [direct, *_batches([demand for demand in wanted if not demand.in_runs])]
        report = _reporter(progress, sum(demand.row.nbytes for demand in wanted))
        for batch in filter(None, rounds):
            read(ReadPlan({demand: _Whole(wanted[demand], demand, report) for demand in batch}))
    except BaseException:
        sink.abandon()
        raise
    return sink.finish()


def _batches(demands: Sequence[Demand]) -> Iterator[list[Demand]]:
    batch: list[Demand] = []
    for demand in demands:
        if batch and sum(one.row.nbytes for one in (*batch, demand)) > _GATHERED_BYTES:
            yield batch
            batch = []
        batch.append(demand)
    if batch:
        yield batch


class _Whole:
    """Hands a tensor on to a sink: as its bytes come, or all at once where they lie apart."""

    def __init__(self, target: ByteTarget, demand: Demand, report: Callable[[int], None]) -> None:
        self._target = target
        self._report = report
        self._gathered = None if demand.in_runs else np.empty(demand.row.nbytes, dtype=np.uint8)
        self._left = demand.row.nbytes
        self._lock = threading.Lock()

    def put(self, start: int, data: memoryview) -> None:
        self._target.put(start, data)
        self._report(len(data))

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
        self._report(done)


def _reporter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds bytes, and tells ``progress`` how many of ``total`` were read."""
    done = 0

    def report(count: int) -> None:
        nonlocal done
        if progress is not None:
            # Not exact when threads meet here; it is for the eye.
            done += count
            progress(min(done, total), total)

    return report
