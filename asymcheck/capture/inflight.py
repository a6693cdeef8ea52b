"""State of a capture: in the ring, in flight to the store, and the final report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from asymcheck.capture.device_copy import Devices, EagerCopies, Transfers
from asymcheck.capture.tear_detection import SourceDigests
from asymcheck.commit.encoder import Contents, contents_of
from asymcheck.commit.save_request import SaveRequest, SaveRound
from asymcheck.commit.transaction import RingTransaction
from asymcheck.events import Detail, report
from asymcheck.format.manifest import Manifest
from asymcheck.policies.interval import TrainingPace, span
from asymcheck.state.names import role_of
from asymcheck.state.partition_plan import Originals, Partition, Plan
from asymcheck.state.walk import FlatState
from asymcheck.storage.shm.ring_writer import RingSlot
from asymcheck.types import CheckpointRef, Digest, counted, readable_size


@dataclasses.dataclass(eq=False)
class Capture:
    """Capture of one state, from the tensors to the ring and from the ring to the store.

    The lock of the :class:`CaptureEngine` guards the fields of the copy. The :class:`RingFlusher` guards those of the
    flush.
    """

    state: FlatState
    """The state; empty once all bytes were copied."""
    plan: Plan
    request: SaveRequest
    generation: int | None
    """The generation; None if the commit begins a new one."""
    devices: dataclasses.InitVar[Devices]
    began_s: float = dataclasses.field(default_factory=time.perf_counter)
    """Start time, by ``time.perf_counter()``."""
    complete_s: float | None = None
    """Time when the capture was complete in the ring, by the same clock; None before."""
    durable_s: float = 0.0
    """Time when the capture became durable or lost, by the same clock."""
    stalled_s: float = 0.0
    """Seconds that the training waited in ``step()`` and at the fence."""
    inline: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Bytes of the tensors that stay in the manifest, by row."""
    aside_slots: list[RingSlot] = dataclasses.field(default_factory=list)
    """Ring slots for the parts of :attr:`asides` that are copied from a device."""
    written_bytes: int = 0
    """Payload bytes written to the store, once the capture is settled."""
    new_bytes: int = 0
    """Plain bytes of the partitions written."""
    is_stale: bool = False
    """Whether every partition equals that of the previous capture."""
    save_round: SaveRound | None = None
    """The save of all ranks; None for a single process."""
    ref: CheckpointRef | None = None
    """The checkpoint, once it is committed, even if the capture failed afterwards."""
    paces: list[TrainingPace] = dataclasses.field(default_factory=list)
    """Rank 0: measurements of each rank, for the automatic interval."""
    diverged: list[str] = dataclasses.field(default_factory=list)
    """Messages about replicas that differ between ranks."""
    error: BaseException | None = None
    """The error of a failed capture."""
    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the source may change, or the capture has failed."""
    transaction: RingTransaction = dataclasses.field(init=False, repr=False)
    """The transaction of the flush, once it has begun."""
    manifest: Manifest = dataclasses.field(init=False, repr=False)
    """The manifest without generation and parent, once the capture is complete."""
    manifest_slot: RingSlot | None = None
    entry: int | None = None
    """Number of the entry in the ring, once the capture is complete there."""
    streams: bool = False
    """Whether partitions leave the ring while the capture is written."""
    writes: list[Future[bool]] = dataclasses.field(default_factory=list)
    stored: list[int] = dataclasses.field(default_factory=list)
    """Partitions that are written and still in the ring."""
    postponed: list[int] = dataclasses.field(default_factory=list)
    """Partitions that wait because they may be derived from others."""
    held: list[int] = dataclasses.field(default_factory=list)
    """Partitions that wait because another rank writes them, or may write them."""
    known: list[int] = dataclasses.field(default_factory=list)
    """Partitions that are equal to an earlier capture, and are looked up in the store at the commit."""
    readers: int = 0
    """Number of threads that read the frames to encode others. Frames are not freed while a thread reads."""
    complete: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the capture is complete in the ring, or has failed."""
    durable: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the checkpoint is durable or lost."""

    def __post_init__(self, devices: Devices) -> None:
        """Set up the columns of the tensors, by row, and the progress of the partitions, by number."""
        leaves, columns, count = self.state.leaves, self.state.columns, len(self.partitions)
        self.names, self.dtypes, self.shapes, self.boxes = columns.names, columns.dtypes, columns.shapes, columns.boxes
        self.state_bytes = sum(columns.sizes)
        self.slots: list[RingSlot | None] = [None] * count
        self.digests: list[Digest | None] = [None] * count
        self.reused: frozenset[int] = frozenset()
        """Partitions that share the frame of an earlier capture."""
        self.uncopied = count
        """Number of partitions that are not copied."""
        self.undigested = count
        """Number of partitions that are not complete in the ring."""
        self.transfers = Transfers(devices, leaves, self.partitions)
        self.asides = EagerCopies(self.transfers, leaves)
        self.source_digests = SourceDigests(self.names, self.partitions, self.transfers, self.digests)

    @property
    def partitions(self) -> Sequence[Partition]:
        """The partitions of the plan."""
        return self.plan.cut.partitions

    @functools.cached_property
    def originals(self) -> Originals:
        """Candidates for partitions that are rounded copies of others."""
        return Originals(self.partitions, self.dtypes, self.shapes)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Catch and keep the first error; the training loop raises it later."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - as above
            self.error = self.error or error

    def wait(self) -> None:
        """Wait until all queued partitions are written, and raise the first error."""
        failures = [error for write in self.writes if (error := write.exception()) is not None]
        if self.error is None and failures:
            self.error = failures[0]
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Report that the checkpoint is durable or lost."""
        self.durable_s = time.perf_counter()
        failed = {} if self.error is None else {"failed": type(self.error).__name__}
        detail = {"save": self.request.save_id.hex(), **failed}
        report("checkpoint", self.began_s, self.durable_s, self.state_bytes, lambda: {**self.named(), **detail})
        self.durable.set()

    def forget_sources(self) -> None:
        """Release the tensors once no more bytes will be copied."""
        # Cleared in place, because the transfers hold the same list.
        self.state.leaves.clear()
        self.state = dataclasses.replace(self.state, tree=None, leaves=[])

    def contents(self, number: int) -> Contents:
        """Return role and element types of a partition."""
        pieces = self.partitions[number].pieces
        return contents_of(pieces, role_of(self.names[pieces[0].row]), self.dtypes)

    def named(self) -> Detail:
        """Return the identity of the capture for a trace."""
        return {"run": self.request.run, "step": self.request.step}

    def named_partition(self, number: int) -> Detail:
        """Return the identity of a partition for a trace."""
        tensor = self.names[self.partitions[number].pieces[0].row]
        return {**self.named(), "partition": number, "window": self.plan.release[number], "tensor": tensor}


@dataclasses.dataclass(frozen=True)
class CheckpointReport:
    """Report on a checkpoint that is durable or lost. ``str()`` returns one line. Times count from ``step()``."""

    run: str
    step: int
    state_bytes: int
    """Bytes of all tensors."""
    partitions: int
    """Number of partitions."""
    stalled_s: float
    """Seconds that the training waited in ``step()`` and at the fence."""
    in_memory_s: float | None
    """Seconds until the checkpoint was complete in memory; None if it never was."""
    durable_s: float
    """Seconds until the checkpoint was durable or lost."""
    written_bytes: int
    """Encoded bytes written to the store."""
    new_bytes: int
    """Plain bytes of the partitions written."""
    known_bytes: int
    """Plain bytes of partitions that the store already had; 0 for a lost checkpoint."""
    error: BaseException | None
    """The reason of the loss; None for a durable checkpoint."""

    def __str__(self) -> str:
        size = f"step {self.step}: {readable_size(self.state_bytes)} in {counted(self.partitions, 'partition')}"
        stalled = f"{size}; stalled {span(self.stalled_s)}"
        if self.error is not None:
            return f"{stalled}, lost after {span(self.durable_s)}: {self.error}".replace("\n", " ")
        in_memory = "" if self.in_memory_s is None else f", in memory after {span(self.in_memory_s)}"
        encoded = "" if self.written_bytes == self.new_bytes else f" for {readable_size(self.new_bytes)}"
        moved = f"{readable_size(self.written_bytes)} written{encoded}, {readable_size(self.known_bytes)} known"
        return f"{stalled}{in_memory}, durable after {span(self.durable_s)}; {moved}"


def report_of(capture: Capture) -> CheckpointReport:
    """Return the report of a capture that is durable or lost."""
    plain_bytes = sum(partition.length for partition in capture.partitions)
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
        # A partition that a collection removed in the meantime was written twice.
        known_bytes=0 if capture.error else max(plain_bytes - capture.new_bytes, 0),
        error=capture.error,
    )
