"""The report of one checkpoint that was saved in the background: what it cost, and what became of it."""

from __future__ import annotations

import dataclasses

from asymcheck.pipeline.capture import Capture
from asymcheck.types import readable_size

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
