"""One state on its way into the ring."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

from asymcheck.events import Detail, tell
from asymcheck.partition.plan import Partition, Plan
from asymcheck.partition.roles import role_of
from asymcheck.partition.state import FlatState
from asymcheck.pipeline.encoder import Contents, contents_of
from asymcheck.pipeline.proof import Witnesses
from asymcheck.pipeline.request import SaveRequest
from asymcheck.pipeline.transfers import Asides, Lanes, Transfers
from asymcheck.pipeline.turn import Turn
from asymcheck.policies.interval import Pace
from asymcheck.tiers.dram_ring import RingSlot
from asymcheck.types import CheckpointRef, Digest


@dataclasses.dataclass(eq=False)
class Capture:
    """One state on its way into the ring. Its fields are guarded by the lock of the :class:`Capturer`."""

    state: FlatState
    """What is captured; empty when no byte of it is needed any more."""
    plan: Plan
    """How it is cut and released."""
    request: SaveRequest
    """What it is to be called."""
    generation: int | None
    """Its line of training; None when the commit will open it."""
    lanes: dataclasses.InitVar[Lanes]
    """The devices of the training."""
    began_s: float = dataclasses.field(default_factory=time.perf_counter)
    """When it was begun, by ``time.perf_counter()``."""
    complete_s: float | None = None
    """When it was complete in the ring, by the same clock; None while, or because, it is not."""
    durable_s: float = 0.0
    """When it was durable or given up, by the same clock."""
    stalled_s: float = 0.0
    """How long ``step()`` and the fence after it held the training."""
    inline: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Bytes of the tensors that stay in the manifest, by row."""
    aside_slots: list[RingSlot] = dataclasses.field(default_factory=list)
    """Where parts of :attr:`asides` that lie on a device come to lie in the ring."""
    written_bytes: int = 0
    """Payload bytes written to the store, once it is settled."""
    new_bytes: int = 0
    """Bytes of the partitions that these are, before encoding."""
    is_stale: bool = False
    """Whether every partition is equal to the one of the capture before."""
    turn: Turn | None = None
    """The save of all ranks that it is part of; None where one saves alone."""
    ref: CheckpointRef | None = None
    """The checkpoint that it became, once it is durable."""
    paces: list[Pace] = dataclasses.field(default_factory=list)
    """On rank 0 of several: what each rank had measured when it began, where an interval is chosen from that."""
    diverged: list[str] = dataclasses.field(default_factory=list)
    """What ranks have differently in it that was the same."""
    error: BaseException | None = None
    """Why it was given up."""
    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the source may change, or the capture was given up."""
    complete: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when it is complete in the ring, or was given up."""
    durable: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when it is committed in the store, or was given up."""

    def __post_init__(self, lanes: Lanes) -> None:
        """Derive the rest."""
        leaves, columns, count = self.state.leaves, self.state.columns, len(self.partitions)
        self.names = columns.names
        """Names of the tensors, by row."""
        self.dtypes = columns.dtypes
        """Names of their dtypes, by row."""
        self.shapes = columns.shapes
        """Their shapes, by row."""
        self.boxes = columns.boxes
        """Which parts of whole tensors they are."""
        self.state_bytes = sum(columns.sizes)
        """Bytes of all tensors."""
        self.slots: list[RingSlot | None] = [None] * count
        """Where each partition lies in the ring."""
        self.digests: list[Digest | None] = [None] * count
        """The digest of each partition, once it is known."""
        self.reused: frozenset[int] = frozenset()
        """Partitions that have the frame of an earlier capture."""
        self.uncopied = count
        """Partitions whose source is still needed."""
        self.undigested = count
        """Partitions that are not complete in the ring."""
        self.transfers = Transfers(lanes, leaves, self.partitions)
        """Its copies from devices."""
        self.asides = Asides(self.transfers, leaves)
        """What is read in small parts."""
        self.witnesses = Witnesses(self.names, self.partitions, self.transfers, self.digests)
        """What deferred tensors have to be."""

    @property
    def partitions(self) -> Sequence[Partition]:
        """The partitions of the plan."""
        return self.plan.cut.partitions

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Keep the first error, which is raised in the training loop."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - as above
            self.error = self.error or error

    def end(self) -> None:
        """Say that the checkpoint is durable, or lost."""
        self.durable_s = time.perf_counter()
        failed = {} if self.error is None else {"failed": type(self.error).__name__}
        detail = {"save": self.request.save_id.hex(), **failed}
        tell("checkpoint", self.began_s, self.durable_s, self.state_bytes, lambda: {**self.named(), **detail})
        self.durable.set()

    def forget_sources(self) -> None:
        """Keep the tensors alive no longer, when all their bytes are in the ring, or none will be."""
        # Its transfers have the same list.
        self.state.leaves.clear()
        self.state = dataclasses.replace(self.state, tree=None, leaves=[])

    def contents(self, number: int) -> Contents:
        """Say what the bytes of a partition mean."""
        pieces = self.partitions[number].pieces
        return contents_of(pieces, role_of(self.names[pieces[0].row]), self.dtypes)

    def named(self) -> Detail:
        """Say for a trace which one it is."""
        return {"run": self.request.run, "step": self.request.step}

    def named_partition(self, number: int) -> Detail:
        """Say for a trace which partition of it is meant."""
        tensor = self.names[self.partitions[number].pieces[0].row]
        return {**self.named(), "partition": number, "window": self.plan.release[number], "tensor": tensor}
