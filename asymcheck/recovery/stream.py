"""Stream: the bytes of a checkpoint handed on as they are read, so that memory stays bounded however large it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from asymcheck.format.manifest import TensorRow
from asymcheck.recovery.assemble import ByteTarget, Placement
from asymcheck.recovery.load import Finish, Loaded, fetch_all, read_first, the_manifest
from asymcheck.recovery.resolve import Resolved
from asymcheck.recovery.shape import read_shape, rows_in, select
from asymcheck.tiers.nvme import NvmeTier
from asymcheck.types import Digest, Progress


@dataclasses.dataclass(frozen=True)
class Outline:
    """A checkpoint without its bytes."""

    shape: object
    """The state, with a :class:`asymcheck.recovery.shape.RowRef` in the place of each tensor."""
    tensors: Mapping[int, TensorRow]
    """The tensors of the shape, by row."""


class Sink(Protocol):
    """Takes one checkpoint, for instance into a file of another format."""

    def begin(self, outline: Outline) -> Mapping[int, ByteTarget]:
        """Prepare for a checkpoint; return what takes the bytes of each tensor that is wanted, by row."""

    def finish(self) -> object:
        """Complete it, all bytes have come; return the result."""

    def abandon(self) -> None:
        """Remove what was begun: the checkpoint is damaged, or reading it failed. Another may begin."""


def stream(
    tier: NvmeTier, run: str, step: int | None, tensors: str, sink: Sink, progress: Progress | None = None
) -> Loaded:
    """Read a checkpoint, every byte verified, and hand it to ``sink``.

    A damaged candidate gives way to the next older one, as in :func:`asymcheck.recovery.load.load`.

    Raises:
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as there.
    """
    return read_first(tier, run, step, partial(_stream_one, tier, tensors=tensors, sink=sink, progress=progress))


def _stream_one(tier: NvmeTier, resolved: Resolved, *, tensors: str, sink: Sink, progress: Progress | None) -> Finish:
    manifest = the_manifest(resolved)
    shape = select(read_shape(manifest), tensors)
    rows = rows_in(shape)
    try:
        targets = sink.begin(Outline(shape, dict(zip(rows, manifest.rows(rows), strict=True))))
        placement = _Counting(targets, progress)
        fetch_all(tier, resolved, placement)
    except BaseException:
        sink.abandon()
        raise
    return sink.finish


class _Counting(Placement):
    """A placement that says how far it is."""

    def __init__(self, targets: Mapping[int, ByteTarget], progress: Progress | None) -> None:
        super().__init__(targets.values())
        self._progress = progress
        self._done = 0

    def put(self, name: Digest, data: memoryview) -> None:
        """Place one partition's bytes, and report."""
        super().put(name, data)
        if self._progress is not None:
            # Not exact when threads meet here; it is for the eye.
            self._done += sum(length for *_, length in self._places[name])
            self._progress(min(self._done, self.total_bytes), self.total_bytes)
