"""Measure processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def processor_s(pids: Iterable[int]) -> float:
    """Return the processor time in seconds that running processes have used."""
    ticks = 0
    for pid in pids:
        # The process name may contain any character. State and ten numbers follow it, then user and system time.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
