"""Read plans: the partitions that a load reads, and the tensors that their bytes fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from asymcheck.errors import DamagedPartitionError, InvalidInputError, StateMismatchError
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.restore.frame_reader import fetch
from asymcheck.restore.reshard import ShardSet, StoredPiece, box_of, of_box
from asymcheck.restore.resolve import Resolved, needed_by
from asymcheck.restore.state_template import merge, rows_in, select
from asymcheck.state.boxes import Box, Crossing, Region
from asymcheck.storage.interfaces import ReadTier
from asymcheck.types import CheckpointRef, Digest


class ByteTarget(Protocol):
    """Receiver of the bytes of one tensor."""

    def put(self, start: int, data: memoryview) -> None:
        """Take the bytes from ``start`` on; worker threads call this together, and ``data`` must not be kept."""


class RegionTarget(ByteTarget, Protocol):
    """Receiver of the bytes of one tensor, contiguous or not."""

    def put_regions(self, regions: Iterable[Region], data: memoryview) -> None:
        """Take regions of ``data``; as :meth:`put`."""


@dataclasses.dataclass(eq=False)
class Demand:
    """A box of a stored tensor that is wanted."""

    row: TensorRow
    """Description of the box; ``pieces`` say where its bytes are stored."""
    pieces: Sequence[StoredPiece]
    """Stored parts that overlap the box."""
    existing: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """Tensors to be filled in place."""

    @classmethod
    def of(cls, parts: ShardSet, number: int, box: Box) -> Demand:
        """Want a box of a tensor.

        Raises:
            StateMismatchError: as :meth:`ShardSet.pieces`.
        """
        pieces = parts.pieces(number, box)
        is_stored = len(pieces) == 1 and pieces[0].crossing is None
        return cls(pieces[0].row if is_stored else of_box(parts.row(number), box), pieces)

    @property
    def in_runs(self) -> bool:
        """Whether the bytes of each piece follow each other."""
        return all(piece.crossing is None or piece.crossing.is_run for piece in self.pieces)


class Fill(NamedTuple):
    """Bytes of a partition that a target takes."""

    target: RegionTarget
    """The target."""
    crossing: Crossing | None
    """Intersection of the stored part and the target; None if they are the same."""
    start: int
    """Position in the stored part."""
    offset: int
    """Position in the partition."""
    length: int
    """Number of bytes."""


class ReadPlan:
    """Ranges of targets that the bytes of each partition fill."""

    def __init__(self, targets: Mapping[Demand, RegionTarget]) -> None:
        """Plan to fill the target of each demand."""
        self._targets = targets
        self.fills: dict[Digest, list[Fill]] = {}
        """By partition."""
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

    def room(self, name: Digest) -> memoryview | None:  # noqa: ARG002 - for plans that have some
        """Return memory that a partition can be read into directly; :meth:`put` is called with it when that is done."""
        return None

    def put(self, name: Digest, data: memoryview) -> None:
        """Copy one partition's bytes to where they belong; worker threads call this together."""
        for target, crossing, start, offset, length in self.fills[name]:
            _put(target, crossing, start, data[offset : offset + length])


def _put(target: RegionTarget, crossing: Crossing | None, start: int, data: memoryview) -> None:
    if crossing is None:
        target.put(start, data)
    else:
        target.put_regions(crossing.regions(start, start + len(data)), data)


def execute(plan: ReadPlan, tier: ReadTier, resolved: Resolved) -> None:
    """Read, check, decode and place all bytes of a plan.

    Raises:
        DamagedPartitionError: no copy of a partition is intact; names the tensors that need it.
    """
    try:
        fetch(resolved.sources, list(plan.fills), plan.put, tier.slots, tier.config.slots, plan.room)
    except DamagedPartitionError as error:
        needed = needed_by(resolved.manifests, resolved.ref, error.digest)
        raise DamagedPartitionError(f"{error}; {needed}", error.digest) from error
    plan.put_inline()


def execute_in_memory(plan: ReadPlan, payload: Callable[[Digest], memoryview]) -> None:
    """Place all bytes of a plan; ``payload`` gives those of a partition, checked."""
    for name in plan.fills:
        plan.put(name, payload(name))
    plan.put_inline()


def read_parts(
    manifests: Sequence[Manifest], ref: CheckpointRef, rank: int | None, tensors: str
) -> tuple[ShardSet, object]:
    """Return the parts of a checkpoint and its shape, as ``rank`` saved it, or of all ranks when that is None.

    Raises:
        InvalidInputError: there was no such rank, or the glob ``tensors`` matches no name.
        FormatError, StateMismatchError: as :func:`asymcheck.restore.state_template.read_shape`.
    """
    if rank is not None and rank >= len(manifests):
        raise InvalidInputError(
            f"{ref} was saved by {len(manifests)} ranks, so rank {rank} saved nothing; with into= any rank may read it"
        )
    parts = ShardSet(manifests, rank or 0)
    return parts, select(merge(parts.shapes()) if rank is None else parts.own_shape, tensors)


def demands_of(parts: ShardSet, shape: object, *, whole: bool) -> dict[int, Demand]:
    """Want each tensor of a shape, ``whole`` or as it is numbered.

    Raises:
        StateMismatchError: some of it was not saved.
    """
    demands: dict[int, Demand] = {}
    for number in rows_in(shape):
        row = parts.row(number)
        try:
            demands[number] = Demand.of(parts, number, parts.whole(number) if whole else box_of(row))
        except StateMismatchError as error:
            raise StateMismatchError(
                f"tensor {row.name} is not whole in the checkpoint: {error}; rank= gives what one rank has of it"
            ) from error
    return demands
