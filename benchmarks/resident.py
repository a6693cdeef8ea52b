"""Measure the memory of a process during an operation, beyond its memory before."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

SAMPLE_S = 0.003
BEGIN = b"begin\n"


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak memory during an operation minus the memory before it, in bytes."""

    resident: int
    """All pages in memory, from the kernel's peak (VmHWM), including pages of mapped files."""
    private: int
    """Anonymous and shared memory without pages of files. It is sampled, so a short peak may be missed."""


class Sampler:
    """A thread that watches a process."""

    def __init__(self, pid: int) -> None:
        """Watch the process ``pid`` from the call of :meth:`start`."""
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler")
        self.private = 0
        """Maximum of the sampled anonymous and shared memory."""
        self.resident = 0
        """Maximum of all pages."""

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            ended = self._stop.is_set()
            status = status_of(self._pid)
            self.private = max(self.private, status.get("RssAnon", 0) + status.get("RssShmem", 0))
            self.resident = max(self.resident, status.get("VmHWM", 0))
            if ended:
                return
            self._stop.wait(SAMPLE_S)


def status_of(pid: int) -> dict[str, int]:
    """Return the amounts of memory in ``/proc/<pid>/status`` in bytes; none if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(amount) * 1024 for name, amount, _ in pairs}


def reset_peak() -> dict[str, int]:
    """Reset the peak of this process (VmHWM) to its present memory; return the amounts of :func:`status_of`."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_of(os.getpid())


def peak_since(before: dict[str, int]) -> int:
    """Return the bytes by which the peak of this process exceeds its memory at :func:`reset_peak`."""
    return max(0, status_of(os.getpid())["VmHWM"] - before["VmRSS"])


def of_operation(arguments: Sequence[object]) -> Peak:
    """Run ``benchmarks.memory_child`` with ``arguments`` in a separate process; return the memory of its operation."""
    command = [sys.executable, "-m", "benchmarks.memory_child", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()) as child:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("no pipes to the child")
        # The child is prepared and has reset its peak, so its current memory is the baseline.
        before = json.loads(child.stdout.readline())
        sampler = Sampler(child.pid)
        sampler.start()
        child.stdin.write(BEGIN)
        child.stdin.flush()
        done = child.stdout.readline()
        sampler.stop()
    if child.returncode or done != b"done\n":
        raise RuntimeError(f"{' '.join(command)} failed with status {child.returncode}")
    private = before["RssAnon"] + before["RssShmem"]
    return Peak(max(0, sampler.resident - before["VmRSS"]), max(0, sampler.private - private))


def of_command(command: Sequence[object]) -> Peak:
    """Run a command of asymcheck; return its memory beyond the memory of the same program when it prints its help."""
    idle, busy = (_command_peak(arguments) for arguments in (["--help"], command))
    return Peak(max(0, busy.resident - idle.resident), max(0, busy.private - idle.private))


def _command_peak(arguments: Sequence[object]) -> Peak:
    command = [sys.executable, "-m", "asymcheck", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_environment()) as child:
        sampler = Sampler(child.pid)
        sampler.start()
        child.wait()
        sampler.stop()
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {child.returncode}")
    return Peak(sampler.resident, sampler.private)


def _environment() -> dict[str, str]:
    """Return variables with which a child process finds these modules in any working directory."""
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
