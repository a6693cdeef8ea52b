"""Proof: what some bytes of the source were when a capture began, to be compared with what was captured."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import partial
from typing import Literal

from asymcheck.errors import TornCaptureError
from asymcheck.format.digest import digest
from asymcheck.partition.leaves import Leaf, copy_partition
from asymcheck.partition.plan import Partition
from asymcheck.pipeline.transfers import Asides
from asymcheck.types import Digest

Proof = Literal["full", "sampled", "off"]
"""How much of the source is digested when a capture begins, to be compared with what was captured."""

_WITNESSES = 16
_WITNESS_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class _Witness:
    """What some bytes of a partition were when the capture began."""

    start: int
    length: int
    digest: Digest


class Witnesses:
    """The witnesses of one capture."""

    def __init__(self, names: Sequence[str], partitions: Sequence[Partition]) -> None:
        """Begin without any; ``names`` are those of the tensors by row, and partitions are known by their numbers."""
        self._names = names
        self._partitions = partitions
        self._found: dict[int, _Witness] = {}

    def take_all(self, leaves: Sequence[Leaf], numbers: Sequence[int]) -> None:
        """Digest whole partitions."""
        for number in numbers:
            data = bytearray(self._partitions[number].length)
            copy_partition(self._partitions[number], leaves, memoryview(data))
            self._found[number] = _Witness(0, len(data), digest(data))

    def take_samples(self, asides: Asides, numbers: Sequence[int], chance: random.Random) -> None:
        """Ask for a few KiB anywhere in the first piece of some of the partitions."""
        for number in chance.sample(numbers, min(_WITNESSES, len(numbers))):
            piece = self._partitions[number].pieces[0]
            length = min(_WITNESS_BYTES, piece.length)
            start = chance.randrange(piece.length - length + 1)
            asides.want(piece.row, piece.start + start, length, partial(self._keep, number, start))

    def _keep(self, number: int, start: int, data: bytes) -> None:
        self._found[number] = _Witness(start, len(data), digest(data))

    def __contains__(self, number: int) -> bool:
        """Whether there is one of a partition."""
        return number in self._found

    def check(self, number: int, payload: memoryview, step: int) -> None:
        """Compare what was captured of a partition.

        Raises:
            TornCaptureError: it is not what was there.
        """
        witness = self._found.get(number)
        if witness is not None and digest(payload[witness.start :][: witness.length]) != witness.digest:
            raise TornCaptureError(self._torn(number, witness, step))

    def _torn(self, number: int, witness: _Witness, step: int) -> str:
        names, position = [], 0
        for piece in self._partitions[number].pieces:
            if position < witness.start + witness.length and witness.start < position + piece.length:
                names.append(self._names[piece.row])
            position += piece.length
        return (
            f"tensor {', '.join(names[:3])} changed while step {step} was being captured, so that this checkpoint was "
            "given up. Only optimizers may change parameters and their state between two calls of step(); what "
            "changes them otherwise must come before step(), or call fence() first"
        )
