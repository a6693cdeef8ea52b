"""Read plan: the partitions to read, and the tensors that their bytes fill."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from asymcheck.errors import DamagedPartitionError, InvalidInputError, StateMismatchError
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.restore.frame_reader import fetch
from asymcheck.restore.reshard import ShardSet, StoredPiece, box_of, of_box
from asymcheck.restore.resolve import Resolved, needed_by
from asymcheck.restore.state_template import merge, read_shape, rows_in, select
from asymcheck.state.boxes import Box, Crossing, Region
from asymcheck.types import Digest, counted


class ByteTarget(Protocol):
    """Receiver of the bytes of one tensor."""

    def put(self, start: int, data: memoryview) -> None:
        """Receive the bytes from ``start`` on. Thread-safe; ``data`` must not be kept."""


class RegionTarget(ByteTarget, Protocol):
    """Receiver of the bytes of one tensor, contiguous or not."""

    def put_regions(self, regions: Iterable[Region], data: memoryview) -> None:
        """Receive regions of ``data``; as :meth:`put`."""


@dataclasses.dataclass(eq=False)
class Demand:
    """A requested box of a stored tensor."""

    row: TensorRow  # description of the box; ``pieces`` hold its bytes
    pieces: Sequence[StoredPiece]  # stored parts that overlap the box
    existing: list[torch.Tensor] = dataclasses.field(default_factory=list)  # tensors to fill in place

    @classmethod
    def of(cls, parts: ShardSet, number: int, box: Box) -> Demand:
        """Return the demand for a box of a tensor. Raises the errors of :meth:`ShardSet.pieces`."""
        pieces = parts.pieces(number, box)
        is_stored = len(pieces) == 1 and pieces[0].crossing is None
        return cls(pieces[0].row if is_stored else of_box(parts.row(number), box), pieces)

    @property
    def in_runs(self) -> bool:
        """Whether the bytes of each piece are contiguous in the box."""
        return all(piece.crossing is None or piece.crossing.is_run for piece in self.pieces)


class Fill(NamedTuple):
    """Range of a partition that fills a target."""

    target: RegionTarget
    crossing: Crossing | None  # intersection of the stored part and the target; None if they are the same
    start: int  # position in the stored part
    offset: int  # position in the partition
    length: int  # number of bytes


class ReadPlan:
    """Ranges of targets that the bytes of each partition fill."""

    def __init__(self, targets: Mapping[Demand, RegionTarget]) -> None:
        """Plan to fill the target of each demand."""
        self._targets = targets
        self.fills: dict[Digest, list[Fill]] = {}  # by partition
        for target, row, crossing in self._pieces():
            start = 0
            for extent in row.extents:
                if crossing is None or crossing.touches(start, start + extent.length):
                    fill = Fill(target, crossing, start, extent.offset, extent.length)
                    self.fills.setdefault(extent.digest, []).append(fill)
                start += extent.length

    def _pieces(self) -> Iterator[tuple[RegionTarget, TensorRow, Crossing | None]]:
        for demand, target in self._targets.items():
            for piece in demand.pieces:
                yield target, piece.row, piece.crossing

    def put_inline(self) -> None:
        """Fill the tensors whose bytes are stored in the manifest."""
        for target, row, crossing in self._pieces():
            if row.inline:
                _put(target, crossing, 0, memoryview(row.inline))

    def room(self, name: Digest) -> memoryview | None:  # noqa: ARG002 - overridden
        """Return memory for a direct read of a partition, with which :meth:`put` is called afterwards."""
        return None

    def put(self, name: Digest, data: memoryview) -> None:
        """Copy the bytes of a partition into its targets. Thread-safe."""
        for target, crossing, start, offset, length in self.fills[name]:
            _put(target, crossing, start, data[offset : offset + length])


def _put(target: RegionTarget, crossing: Crossing | None, start: int, data: memoryview) -> None:
    if crossing is None:
        target.put(start, data)
    else:
        target.put_regions(crossing.regions(start, start + len(data)), data)


def execute(plan: ReadPlan, resolved: Resolved) -> None:
    """Read, verify, decode and place all bytes of a plan.

    Raises:
        DamagedPartitionError: no copy of a partition is intact; names the tensors that need it.
    """
    with naming_tensors(resolved):
        fetch(resolved.sources, list(plan.fills), plan.put, resolved.sources.tier, plan.room)
    plan.put_inline()


@contextlib.contextmanager
def naming_tensors(resolved: Resolved) -> Iterator[None]:
    """Add the names of the tensors that need a damaged partition to the error."""
    try:
        yield
    except DamagedPartitionError as error:
        needed = needed_by(resolved.manifests, error.digest)
        raise DamagedPartitionError(f"{error}; {needed}", error.digest) from error


def execute_in_memory(plan: ReadPlan, payload: Callable[[Digest], memoryview]) -> None:
    """Place all bytes of a plan; ``payload`` returns the verified bytes of a partition."""
    for name in plan.fills:
        plan.put(name, payload(name))
    plan.put_inline()


def read_parts(manifests: Sequence[Manifest], rank: int | None, tensors: str) -> tuple[ShardSet, object]:
    """Return the tensors of a checkpoint and its shape, of one ``rank`` or of all ranks (None).

    Raises:
        InvalidInputError: the rank does not exist, or the glob ``tensors`` matches no name.
        FormatError, StateMismatchError: as :func:`asymcheck.restore.state_template.read_shape`.
    """
    if rank is not None and rank >= len(manifests):
        raise InvalidInputError(
            f"{manifests[0].header.ref} was saved by {counted(len(manifests), 'rank')}, so rank {rank} does not exist; "
            "with into=, any rank can read the checkpoint"
        )
    parts = ShardSet(manifests, rank or 0)
    return parts, select(merge(parts.shapes()) if rank is None else read_shape(manifests[rank]), tensors)


def demands_of(parts: ShardSet, shape: object, *, whole: bool) -> dict[int, Demand]:
    """Return the demands for all tensors of a shape, ``whole`` or as stored.

    Raises:
        StateMismatchError: some part was not saved.
    """
    demands: dict[int, Demand] = {}
    for number in rows_in(shape):
        row = parts.row(number)
        try:
            demands[number] = Demand.of(parts, number, parts.whole(number) if whole else box_of(row))
        except StateMismatchError as error:
            raise StateMismatchError(
                f"tensor {row.name} is incomplete in the checkpoint: {error}; pass rank= to read the shard of one rank"
            ) from error
    return demands
