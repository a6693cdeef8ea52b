"""Outlook: what is seen of a checkpoint without a state to be filled: one rank's state, or those of all merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from asymcheck.errors import InvalidInputError, StateMismatchError
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.partition.boxes import Box
from asymcheck.partition.shards import TensorShard
from asymcheck.recovery.assemble import Demand
from asymcheck.recovery.parts import Parts, box_of, of_box
from asymcheck.recovery.shape import merge, rows_in, select
from asymcheck.types import CheckpointRef


@dataclasses.dataclass(frozen=True)
class Outlook:
    """A state without its bytes."""

    shape: object
    """The state, with placeholders for its tensors."""
    numbers: Sequence[int]
    """The tensors in it."""
    is_merged: bool
    """Whether it is that of all ranks: parts are put together to whole tensors."""
    parts: Parts
    """Where the bytes of the tensors are."""

    def box(self, number: int) -> Box:
        """Return which part of a tensor is seen."""
        return self.parts.whole(number) if self.is_merged else box_of(self.parts.row(number))

    def row(self, number: int) -> TensorRow:
        """Describe what is seen of a tensor."""
        return of_box(self.parts.row(number), self.box(number))

    def demand(self, number: int) -> Demand:
        """Want a tensor.

        Raises:
            StateMismatchError: some of it was not saved.
        """
        try:
            return Demand.of(self.parts, number, self.box(number))
        except StateMismatchError as error:
            name = self.parts.row(number).name
            raise StateMismatchError(
                f"tensor {name} is not whole in the checkpoint: {error}; rank= gives what one rank has of it"
            ) from error

    def present(self, number: int, tensor: torch.Tensor) -> object:
        """Return a tensor as it stands in the state: a part of a whole says so."""
        box = self.box(number)
        return tensor if box.is_whole else TensorShard(tensor, box.whole, box.offset)


def read_outlook(manifests: Sequence[Manifest], ref: CheckpointRef, rank: int | None, tensors: str) -> Outlook:
    """Look at a checkpoint, as ``rank`` saved it, or at all ranks when that is None.

    Raises:
        InvalidInputError: there was no such rank, or the glob ``tensors`` matches no name.
        FormatError, StateMismatchError: as :func:`asymcheck.recovery.shape.read_shape`.
    """
    if rank is not None and rank >= len(manifests):
        raise InvalidInputError(
            f"{ref} was saved by {len(manifests)} ranks, so rank {rank} saved nothing; with into= any rank may read it"
        )
    parts = Parts(manifests, rank or 0)
    shape = select(merge(parts.shapes()) if rank is None else parts.own_shape, tensors)
    return Outlook(shape, rows_in(shape), rank is None, parts)
