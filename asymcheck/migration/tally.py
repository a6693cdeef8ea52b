"""Tally: what a push or a pull has moved."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Moved:
    """What a push or a pull did."""

    location: str
    """The remote location."""
    committed: tuple[str, ...]
    """Checkpoints that are there now and were not before, as ``<run> <checkpoint>``."""
    present: int
    """Checkpoints that were there already."""
    packs: int
    """Packs that were written."""
    moved_bytes: int
    """Payload bytes of the frames in them."""
    moved_partitions: int
    """How many frames that are."""
    reused_partitions: int
    """Partitions that were there already."""
    plain_bytes: int
    """Payload bytes that these frames had where they came from: more, where they were encoded on the way."""


@dataclasses.dataclass
class Tally:
    """The same while it grows."""

    committed: list[str] = dataclasses.field(default_factory=list)
    present: int = 0
    packs: int = 0
    moved_bytes: int = 0
    moved_partitions: int = 0
    reused_partitions: int = 0
    plain_bytes: int = 0

    def result(self, location: str) -> Moved:
        """Return it as a value."""
        counts = (self.packs, self.moved_bytes, self.moved_partitions, self.reused_partitions, self.plain_bytes)
        return Moved(location, tuple(self.committed), self.present, *counts)
