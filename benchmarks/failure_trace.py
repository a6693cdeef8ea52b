"""Read traces of real failures, such as preemptions of spot instances.

Two formats are supported. The JSON format of `skypilot-org/spot-traces`, ``{"metadata": {"gap_seconds": 300}, "data":
[16, 16, 15, …]}``, lists the number of instances at each tick. A job on all instances fails whenever the number
decreases. The text format lists the times of failures in seconds, one a line.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import UnreadableReportError


def read_trace(path: Path) -> list[float]:
    """Return the seconds from each failure to the next, starting at time 0.

    Raises:
        UnreadableReportError: the file has no supported format, or contains no failure.
    """
    try:
        text = path.read_text("utf-8")
        times = _of_counts(json.loads(text)) if text.lstrip().startswith("{") else [float(one) for one in text.split()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableReportError(f"trace {path} cannot be read: {type(error).__name__}: {error}") from error
    times = sorted(set(times))
    if not times or times[0] < 0 or not all(map(math.isfinite, times)):
        raise UnreadableReportError(f"trace {path} has no failures, or values that are not times")
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *times]) if later > earlier]


def _of_counts(document: dict[str, dict[str, float] | list[float]]) -> list[float]:
    metadata, counts = document["metadata"], document["data"]
    if not isinstance(metadata, dict) or not isinstance(counts, list):
        raise TypeError("metadata must be an object, and data a list")
    gap_s = float(metadata["gap_seconds"])
    return [tick * gap_s for tick, (before, now) in enumerate(itertools.pairwise(counts), 1) if now < before]


def repeated(uptimes: Sequence[float], seed: int) -> Iterator[float]:
    """Yield the times between failures endlessly, starting at a different failure for each seed."""
    start = seed * len(uptimes) // 3 % len(uptimes)
    return itertools.cycle([*uptimes[start:], *uptimes[:start]])
