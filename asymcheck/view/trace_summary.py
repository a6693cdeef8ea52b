"""Summarise a trace file for the page: lanes of a time window, and the stall of each checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

from asymcheck.errors import FormatError, StorageError

LANES = {
    "training waits": ("step", "fence", "wait", "room", "close", "save", "restore"),
    "forward and backward": ("window",),
    "capture": ("source digest", "compare", "copy", "proof", "digest"),
    "flush": ("encode", "write", "sync", "commit"),
    "push and pull": ("push", "pull"),
}
"""Lanes of the timeline, with their intervals in :data:`asymcheck.events.INTERVALS`."""
_LANE_OF = {name: lane for lane, names in LANES.items() for name in names}
_RESOLUTION = 1000
"""Intervals whose distance is less than this fraction of the window are drawn as one."""
_US_PER_MS = 1e3


@dataclasses.dataclass
class Span:
    """One interval of a lane, or several that are close together. Times are milliseconds since the first event."""

    start_ms: float
    end_ms: float
    busy_ms: float
    """Sum of the durations. Intervals of several threads may overlap."""
    count: int
    name: str


@dataclasses.dataclass(frozen=True)
class Stall:
    """Time for which the checkpoint of one step held up the training."""

    step: int
    at_ms: float
    stall_ms: float
    """Sum of ``step()``, of the fence and of a synchronous save."""


@dataclasses.dataclass(frozen=True)
class TraceSummary:
    """Time window of a trace."""

    file: str
    from_ms: float
    to_ms: float
    end_ms: float
    """End of the last event."""
    lanes: dict[str, list[Span]]
    stalls: list[Stall]
    """All stalls of the trace, in the order of their ends."""


class TraceFile:
    """A trace file that may still be written. Threads may share it."""

    def __init__(self, path: Path) -> None:
        """Read ``path`` when a summary is requested."""
        self._path = path
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self._origin_us: float | None = None
        self._end_ms = 0.0
        self._events: list[tuple[str, Span]] = []
        self._stalls: list[Stall] = []

    def version(self) -> int:
        """Return the size of the file in bytes, or 0 if the file cannot be read."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def summary(self, from_ms: float = 0.0, to_ms: float | None = None) -> TraceSummary:
        """Return the summary of a time window; by default, of the whole trace.

        Raises:
            StorageError: the file cannot be read.
            FormatError: the file is no trace of asymcheck.
        """
        with self._lock:
            self._read_new_lines()
            end_ms = self._end_ms
            to_ms = end_ms if to_ms is None else to_ms
            lanes = {lane: self._lane(lane, from_ms, to_ms) for lane in LANES}
            return TraceSummary(str(self._path), from_ms, to_ms, end_ms, lanes, list(self._stalls))

    def _read_new_lines(self) -> None:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._start_over()
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    self._add(line.strip().rstrip(b","))
                    self._offset += len(line)
        except OSError as error:
            raise StorageError(f"cannot read trace {self._path}: {error.strerror}; check the path") from error

    def _add(self, line: bytes) -> None:
        if line in (b"", b"[", b"]"):
            return
        try:
            record: dict[str, Any] = json.loads(line)
            if record["ph"] != "X":
                return
            name, start_us, duration_us = str(record["cat"]), float(record["ts"]), float(record["dur"])
            step = record.get("args", {}).get("step")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{self._path} is not a trace of asymcheck (one event a line); pass a file of asymcheck.trace()"
            ) from error
        if name not in _LANE_OF:
            return
        # Events are written at their ends, so the first event may not be the earliest one.
        self._origin_us = start_us if self._origin_us is None else self._origin_us
        start_ms, length_ms = (start_us - self._origin_us) / _US_PER_MS, duration_us / _US_PER_MS
        self._end_ms = max(self._end_ms, start_ms + length_ms)
        self._events.append((_LANE_OF[name], Span(start_ms, start_ms + length_ms, length_ms, 1, name)))
        if name in ("step", "fence", "save") and isinstance(step, int):
            # A fence belongs to the newest checkpoint of its step. A step may be saved again after a restore.
            last = self._stalls[-1] if self._stalls else None
            if name == "fence" and last is not None and last.step == step:
                self._stalls[-1] = dataclasses.replace(last, stall_ms=last.stall_ms + length_ms)
            else:
                self._stalls.append(Stall(step, start_ms, length_ms))

    def _lane(self, lane: str, from_ms: float, to_ms: float) -> list[Span]:
        gap = (to_ms - from_ms) / _RESOLUTION
        inside = [
            span for name, span in self._events if name == lane and from_ms <= span.end_ms and span.start_ms <= to_ms
        ]
        merged: list[Span] = []
        for span in sorted(inside, key=lambda span: span.start_ms):
            last = merged[-1] if merged else None
            if last is not None and span.start_ms - last.end_ms < gap:
                last.end_ms = max(last.end_ms, span.end_ms)
                last.busy_ms += span.busy_ms
                last.count += 1
                last.name = last.name if last.name == span.name else lane
            else:
                merged.append(dataclasses.replace(span))
        return merged
