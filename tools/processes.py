"""Start and measure processes of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import sys
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


def installed(name: str) -> str | None:
    """Return the path of a program, preferably beside this interpreter; None if it is not installed."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that no process uses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
