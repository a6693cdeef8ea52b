"""Captures: a state on its way into the ring, then in flight to the store, and the report of what that cost."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from asymcheck.capture.device_copy import DeviceQueues, EagerCopies, Transfers
from asymcheck.capture.tear_detection import SourceDigests
from asymcheck.commit.encoder import Contents, contents_of
from asymcheck.commit.save_request import SaveRequest, SaveRound
from asymcheck.commit.transaction import RingTransaction
from asymcheck.events import Detail, tell
from asymcheck.format.manifest import Manifest
from asymcheck.policies.interval import TrainingPace
from asymcheck.state.partition_plan import Partition, Plan
from asymcheck.state.roles import role_of
from asymcheck.state.walk import FlatState
from asymcheck.storage.shm import RingSlot
from asymcheck.types import CheckpointRef, Digest, readable_size


@dataclasses.dataclass(eq=False)
class Capture:
    """One state on its way into the ring. The lock of the :class:`Capturer` guards the fields."""

    state: FlatState
    """The state; empty when no byte of it is needed any more."""
    plan: Plan
    request: SaveRequest
    generation: int | None
    """The generation; None when the commit opens it."""
    lanes: dataclasses.InitVar[DeviceQueues]
    began_s: float = dataclasses.field(default_factory=time.perf_counter)
    """Time of the beginning, by ``time.perf_counter()``."""
    complete_s: float | None = None
    """Time when the capture was complete in the ring, by the same clock; None when it is not."""
    durable_s: float = 0.0
    """Time when the capture was durable or given up, by the same clock."""
    stalled_s: float = 0.0
    """Seconds for which ``step()`` and the fence after it held the training."""
    inline: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Bytes of the tensors that stay in the manifest, by row."""
    aside_slots: list[RingSlot] = dataclasses.field(default_factory=list)
    """Slots of the ring for those parts of :attr:`asides` that are copied from a device."""
    written_bytes: int = 0
    """Payload bytes written to the store, once the capture is settled."""
    new_bytes: int = 0
    """Plain bytes of the partitions written."""
    is_stale: bool = False
    """Whether every partition equals that of the previous capture."""
    turn: SaveRound | None = None
    """The save of all ranks; None where one process saves alone."""
    ref: CheckpointRef | None = None
    """The checkpoint, once it is committed; a capture that failed after that has it, too."""
    paces: list[TrainingPace] = dataclasses.field(default_factory=list)
    """On rank 0: the measurements of each rank, from which the interval is chosen."""
    diverged: list[str] = dataclasses.field(default_factory=list)
    """Messages about replicas that differ between ranks."""
    error: BaseException | None = None
    """The reason for which the capture was given up."""
    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the source may change, or the capture was given up."""
    complete: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the capture is complete in the ring, or was given up."""
    durable: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the checkpoint is committed, or was given up."""

    def __post_init__(self, lanes: DeviceQueues) -> None:
        """Derive the columns of the tensors, by row, and the progress of the partitions, by number."""
        leaves, columns, count = self.state.leaves, self.state.columns, len(self.partitions)
        self.names, self.dtypes, self.shapes, self.boxes = columns.names, columns.dtypes, columns.shapes, columns.boxes
        self.state_bytes = sum(columns.sizes)
        self.slots: list[RingSlot | None] = [None] * count
        self.digests: list[Digest | None] = [None] * count
        self.reused: frozenset[int] = frozenset()
        """Partitions that share the frame of an earlier capture."""
        self.uncopied = count
        """Number of partitions whose source is still needed."""
        self.undigested = count
        """Number of partitions that are not complete in the ring."""
        self.transfers = Transfers(lanes, leaves, self.partitions)
        self.asides = EagerCopies(self.transfers, leaves)
        self.witnesses = SourceDigests(self.names, self.partitions, self.transfers, self.digests)

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
        """Begin; a capture that ``streams`` leaves the ring as it is written, and is never complete in it."""
        self.capture = capture
        self.transaction = transaction
        self.streams = streams
        self.writes: list[Future[bool]] = []
        self.manifest: Manifest
        """The manifest without generation and parent, once the capture is complete."""
        self.manifest_slot: RingSlot | None = None
        self.entry: int | None = None
        """Number of the entry in the ring, once the capture is complete there."""
        self.stored: list[int] = []
        """Partitions that are written and still in the ring."""
        self.postponed: list[int] = []
        """Partitions that may be derived from others, and wait for these."""
        self.readers = 0
        """Number of threads that read the frames to encode others. Until they are done, no frame is freed."""
        self.put_off: list[int] = []
        """Partitions of an earlier capture, too: looked up in the store when that capture is committed."""
        self.held: list[int] = []
        """Partitions that another rank has, too, or may have: they wait until that rank has written them."""

    def wait(self) -> None:
        """Wait until all that was begun is written.

        Raises:
            AsymcheckError: some of it could not be; the first reason.
        """
        failures = [error for write in self.writes if (error := write.exception()) is not None]
        if self.capture.error is None and failures:
            self.capture.error = failures[0]
        if self.capture.error is not None:
            raise self.capture.error


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
