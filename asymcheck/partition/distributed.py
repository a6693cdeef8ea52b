"""Parts of a state that ranks hold together, and that know more of themselves than a state_dict() says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch

from asymcheck.format.tree import Key
from asymcheck.partition.shards import TensorShard
from asymcheck.types import Stateful


@runtime_checkable
class Distributed(Stateful, Protocol):
    """A part of which each rank has some; the engine of a library, for instance.

    Stored states have placeholders where tensors go.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What changes :meth:`owned`, and is fenced when it steps."""

    def owned(self) -> Iterable[torch.Tensor]:
        """Yield tensors of the state that nothing but a step of :attr:`optimizer` changes."""

    def misfits(self, stored: Mapping[Key, object]) -> Iterable[str]:
        """Yield what in a stored state the object will refuse."""

    def missing(self, stored: Mapping[Key, object]) -> Iterable[tuple[object, TensorShard]]:
        """Yield placeholders of tensors that are not there yet, each with one of the parts that is cut alike."""

    def settle(self) -> None:
        """Do what takes all ranks, when each has been restored."""
