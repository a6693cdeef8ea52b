"""Proof: what the source was when a capture began, to be compared with what was captured.

Bytes are compared by digests. Tensors whose bytes are not compared have marks: the version counter, which in-place
operations raise, and the address. Writes through ``.data``, a numpy view or another process leave marks as they are.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch

from asymcheck.errors import TornCaptureError
from asymcheck.format.digest import digest
from asymcheck.partition.leaves import Leaf, copy_partition
from asymcheck.partition.plan import Partition
from asymcheck.pipeline.transfers import Asides, Transfers
from asymcheck.types import Digest

Proof = Literal["full", "sampled", "off"]
"""How much of the source is digested when a capture begins, to be compared with what was captured."""

_WITNESSES = 16
_WITNESS_BYTES = 4096
_NAMED = 3
"""Tensors that a message names."""


@dataclasses.dataclass(frozen=True)
class _Witness:
    """What some bytes of a partition were when the capture began."""

    start: int
    length: int
    digest: Digest


class Witnesses:
    """What the deferred tensors were when one capture began. The training thread and the capture thread call it."""

    def __init__(self, names: Sequence[str], partitions: Sequence[Partition], leaves: Sequence[Leaf]) -> None:
        """Begin without any; ``names`` and ``leaves`` are those of the tensors by row."""
        self._names = names
        self._partitions = partitions
        self._leaves = leaves
        self._found: dict[int, _Witness] = {}
        self._marks: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._torn: dict[int, None] = {}
        self._is_fenced = False

    def mark(self, numbers: Iterable[int]) -> None:
        """Note versions and addresses of the tensors of partitions."""
        for row in {piece.row for number in numbers for piece in self._partitions[number].pieces}:
            source = self._leaves[row].source
            if isinstance(source, torch.Tensor):
                self._marks[row] = (source, *_mark_of(source))

    def look(self, number: int) -> None:
        """Note that a partition is torn if a tensor of it has another mark, unless the fence has let it change."""
        moved = [] if self._is_proven(number) else self._moved(piece.row for piece in self._partitions[number].pieces)
        # Asked after the marks were: the fence is noted before anything may change.
        if moved and not self._is_fenced:
            self._torn.update(dict.fromkeys(moved))

    def _is_proven(self, number: int) -> bool:
        """Tell whether all bytes are compared: content decides then, and what changed and was put back is as it was."""
        witness = self._found.get(number)
        return witness is not None and witness.length == self._partitions[number].length

    def _moved(self, rows: Iterable[int]) -> list[int]:
        marks = self._marks
        return [row for row in rows if row in marks and marks[row][1:] != _mark_of(marks[row][0])]

    def fence(self, uncopied: Callable[[int], bool]) -> None:
        """Let the tensors change; ``uncopied`` tells whether a device may still be copying a partition."""
        self._is_fenced = True
        moved = {*self._moved(self._marks)}
        for number, partition in enumerate(self._partitions if moved else ()):
            rows = [piece.row for piece in partition.pieces if piece.row in moved]
            if rows and not self._is_proven(number) and uncopied(number):
                self._torn.update(dict.fromkeys(rows))
        # Not cleared: the other thread may be looking.
        self._marks = {}

    def take_all(self, numbers: Iterable[int]) -> None:
        """Digest whole partitions."""
        for number in numbers:
            data = bytearray(self._partitions[number].length)
            copy_partition(self._partitions[number], self._leaves, memoryview(data))
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

    def check(self, number: int, payload: memoryview) -> None:
        """Compare what was captured of a partition, and note that it is torn if it is not what was there."""
        witness = self._found.get(number)
        if witness is not None and digest(payload[witness.start :][: witness.length]) != witness.digest:
            position = 0
            for piece in self._partitions[number].pieces:
                if position < witness.start + witness.length and witness.start < position + piece.length:
                    self._torn[piece.row] = None
                position += piece.length

    def error(self, step: int) -> TornCaptureError | None:
        """Return why the capture of ``step`` is given up; None when nothing of it was seen to be torn."""
        if not self._torn:
            return None
        names = [self._names[row] for row in self._torn]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return TornCaptureError(
            f"tensor {', '.join(names[:_NAMED])}{more} changed while step {step} was being captured, so that this "
            "checkpoint was given up. Only optimizers may change parameters and their state between two calls of "
            "step(); what changes them otherwise must come before step(), or call fence() first"
        )


class Prover:
    """Takes the witnesses of captures."""

    def __init__(self, proof: Proof) -> None:
        """Take as much as ``proof`` says."""
        self._proof = proof
        # Not the module's own generator, whose state belongs to the training.
        self._chance = random.Random()  # noqa: S311 - nothing secret is chosen

    def begin(self, witnesses: Witnesses, numbers: Sequence[int], transfers: Transfers, asides: Asides) -> None:
        """Take those of a capture of which partitions ``numbers`` are deferred."""
        if self._proof == "off":
            return
        witnesses.mark(numbers)
        if self._proof == "full":
            transfers.catch_up(numbers)
            witnesses.take_all(numbers)
        else:
            witnesses.take_samples(asides, numbers, self._chance)


def _mark_of(source: torch.Tensor) -> tuple[int, int]:
    # Tensors that were made in inference mode count no versions.
    return 0 if source.is_inference() else source._version, source.data_ptr()
