"""Traces of failures that have really come, to be played in place of chance: when machines were taken away.

Two kinds of file are read. JSON as `skypilot-org/spot-traces` publishes it, ``{"metadata": {"gap_seconds": 300},
"data": [16, 16, 15, …]}``: how many instances there were, tick by tick; a job on all of them fails whenever there are
fewer than before. And text: the times of failures in seconds, one in a line.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import UnreadableReportError


def read_trace(path: Path) -> list[float]:
    """Return the seconds from each failure to the next, the first counted from the beginning.

    Raises:
        UnreadableReportError: it is no such file, or nothing fails in it.
    """
    try:
        text = path.read_text("utf-8")
        times = _of_counts(json.loads(text)) if text.lstrip().startswith("{") else [float(one) for one in text.split()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableReportError(f"trace {path} cannot be read: {type(error).__name__}: {error}") from error
    times = sorted(set(times))
    if not times or times[0] < 0 or not all(map(math.isfinite, times)):
        raise UnreadableReportError(f"trace {path} has no failures, or times that are none")
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *times]) if later > earlier]


def _of_counts(document: dict[str, dict[str, float] | list[float]]) -> list[float]:
    metadata, counts = document["metadata"], document["data"]
    if not isinstance(metadata, dict) or not isinstance(counts, list):
        raise TypeError("metadata is to be an object, and data a list")
    gap_s = float(metadata["gap_seconds"])
    return [tick * gap_s for tick, (before, now) in enumerate(itertools.pairwise(counts), 1) if now < before]


def repeated(uptimes: Sequence[float], seed: int) -> Iterator[float]:
    """Yield the times between failures for ever, begun at another one for each seed."""
    start = seed * len(uptimes) // 3 % len(uptimes)
    return itertools.cycle([*uptimes[start:], *uptimes[:start]])
