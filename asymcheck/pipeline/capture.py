"""Captures: a state on its way into the ring, then in flight to the store, and the report of what that cost."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from asymcheck.events import Detail, tell
from asymcheck.format.manifest import Manifest
from asymcheck.partition.plan import Partition, Plan
from asymcheck.partition.roles import role_of
from asymcheck.partition.state import FlatState
from asymcheck.pipeline.encoder import Contents, contents_of
from asymcheck.pipeline.proof import Witnesses
from asymcheck.pipeline.request import SaveRequest, Turn
from asymcheck.pipeline.transaction import RingTransaction
from asymcheck.pipeline.transfers import Asides, Lanes, Transfers
from asymcheck.policies.interval import Pace
from asymcheck.tiers.dram_ring import RingSlot
from asymcheck.types import CheckpointRef, Digest, readable_size


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


class InFlight:
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


_WHOLE_MS_S = 1.0


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """One checkpoint, once it is durable or lost; ``str()`` of it is one line. Times count from ``step()`` on."""

    run: str
    """The run."""
    step: int
    """The training step."""
    state_bytes: int
    """Bytes of all tensors."""
    partitions: int
    """Partitions that they were cut into."""
    stalled_s: float
    """Seconds that ``step()`` and the fence after it held the training."""
    in_memory_s: float | None
    """Seconds until it was complete in memory, where it survives the process; None when it never was."""
    durable_s: float
    """Seconds until it was durable, or given up."""
    written_bytes: int
    """Bytes of payload written to the store, as they are stored."""
    new_bytes: int
    """Bytes of the partitions that these are, before encoding."""
    known_bytes: int
    """Bytes of partitions that the store had already; 0 for one that was lost."""
    error: BaseException | None
    """Why it was lost; None when it is durable."""

    def __str__(self) -> str:
        """Return one line without an end."""
        size = f"step {self.step}: {readable_size(self.state_bytes)} in {_count(self.partitions)}"
        stalled = f"{size}; stalled {_span(self.stalled_s)}"
        if self.error is not None:
            return f"{stalled}, lost after {_span(self.durable_s)}: {self.error}".replace("\n", " ")
        in_memory = "" if self.in_memory_s is None else f", in memory after {_span(self.in_memory_s)}"
        encoded = "" if self.written_bytes == self.new_bytes else f" for {readable_size(self.new_bytes)}"
        moved = f"{readable_size(self.written_bytes)} written{encoded}, {readable_size(self.known_bytes)} known"
        return f"{stalled}{in_memory}, durable after {_span(self.durable_s)}; {moved}"


def report_of(capture: Capture) -> CheckpointReport:
    """Report on a capture that is durable or lost."""
    cut = sum(partition.length for partition in capture.partitions)
    return CheckpointReport(
        run=capture.request.run,
        step=capture.request.step,
        state_bytes=capture.state_bytes,
        partitions=len(capture.partitions),
        stalled_s=capture.stalled_s,
        in_memory_s=None if capture.complete_s is None else capture.complete_s - capture.began_s,
        durable_s=capture.durable_s - capture.began_s,
        written_bytes=capture.written_bytes,
        new_bytes=capture.new_bytes,
        # What collection took away meanwhile is written twice.
        known_bytes=0 if capture.error else max(cut - capture.new_bytes, 0),
        error=capture.error,
    )


def _count(partitions: int) -> str:
    return "1 partition" if partitions == 1 else f"{partitions} partitions"


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= _WHOLE_MS_S else f"{seconds * 1e3:.1f} ms"
