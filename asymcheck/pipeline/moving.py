"""One capture between ring and store."""

from __future__ import annotations

from concurrent.futures import Future

from asymcheck.format.manifest import Manifest
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.transaction import RingTransaction
from asymcheck.tiers.dram_ring import RingSlot
from asymcheck.types import CheckpointRef


class Moving:
    """One capture between ring and store."""

    def __init__(self, capture: Capture, transaction: RingTransaction, *, streams: bool) -> None:
        """Begin to move; one that ``streams`` leaves the ring as it is written, and is never complete in it."""
        self.capture = capture
        self.transaction = transaction
        self.streams = streams
        self.writes: list[Future[bool]] = []
        self.manifest: Manifest
        """What it contains, once it is complete; of a checkpoint without a place on the line."""
        self.manifest_slot: RingSlot | None = None
        self.entry: int | None = None
        """Number of its entry in the ring, once it is complete there."""
        self.ref: CheckpointRef | None = None
        """The checkpoint that it became."""
        self.stored: list[int] = []
        """Partitions, by number, that are written and still in the ring."""
        self.postponed: list[int] = []
        """Partitions, by number, that wait for others, from which they may be derived."""
        self.readers = 0
        """How many read its frames to encode others: until they are done, none is given up."""
        self.put_off: list[int] = []
        """Partitions that an earlier capture has, too: looked for in the store when that one is in it."""
        self.held: list[int] = []
        """Partitions that another rank has, too, or may have: they wait until it has written them."""
        self.settled = False
        """Whether it is durable, or will never be."""
