"""Split the time of a restore from each tier into phases: find, read, decode, verify, place.

Several threads read, so all phases except ``find`` are summed over threads and exceed the total. *From memory* is a
restore after a SIGKILL: a checkpoint was complete in the ring, most of it not yet on the drive. The process that
resumes first makes the checkpoint durable (*adopt*), then reads it like any other. *From a location* is a restore on a
machine without a store, from a folder that represents a shared file system.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import asymcheck
from asymcheck.events import Interval, watch
from benchmarks import coldness, peers, states
from benchmarks.report import Row, rotated, row

_PARTS = ("adopt", "find", "read", "decode", "verify", "place")
_TIMEOUT_S = 600
_MEMORY = Path("/dev/shm")

Restore = Callable[[], object]


def measure(store: Path, into: object, rounds: int) -> list[Row]:
    """Restore step 1 of a store from each tier repeatedly, into existing tensors; the store gets one more step."""
    remote = store.with_name("location")
    with asymcheck.Store.open(store, create=True) as opened:
        opened.push(remote.as_uri())
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=_MEMORY) as rings:
        tiers = {
            "from memory": partial(_from_memory, store, into, Path(rings)),
            "from NVMe": partial(_from_store, str(store), store, into),
            "from a location": partial(_from_store, remote.as_uri(), remote, into),
        }
        for number in range(rounds + 1):
            for name, restore in rotated(list(tiers.items()), number):
                parts = restore()
                # The first round is a warm-up.
                for part, seconds in parts.items() if number > 0 else ():
                    found.setdefault(name, {}).setdefault(part, []).append(seconds)
    peers.remove(remote)
    return [
        row(f"asymcheck {tier}", part, "ms", [one * 1e3 for one in values])
        for tier, parts in found.items()
        for part, values in parts.items()
    ]


def _from_store(location: str, where: Path, into: object) -> dict[str, float]:
    coldness.make_cold(peers.files_in(where))
    with asymcheck.Store.open(location, read_only=True) as opened:
        return _timed(lambda: opened.load(1, into=into))


def _from_memory(store: Path, into: object, rings: Path) -> dict[str, float]:
    process = multiprocessing.get_context("spawn").Process(target=_leave_in_memory, args=(store, rings))
    process.start()
    process.join(_TIMEOUT_S)
    if process.exitcode != -signal.SIGKILL:
        raise SystemExit(f"a process that was to be killed ended with status {process.exitcode}")
    coldness.make_cold(peers.files_in(store))
    capture = asymcheck.CaptureConfig(ring_folder=str(rings))
    with asymcheck.Store.open(store, create=True) as opened:
        with asymcheck.Checkpointer(
            opened, {"state": into}, run="killed", capture=capture, every=1, keep=None
        ) as checkpointer:
            parts = _timed(checkpointer.restore)
        opened.delete(1, run="killed")
        opened.gc()
    return parts


def _leave_in_memory(store: Path, rings: Path) -> None:
    """Make a checkpoint, and get killed when it is complete in memory."""
    with asymcheck.Store.open(store, create=True) as opened:
        state = opened.load(1)
        assert isinstance(state, dict)  # noqa: S101 - it is what the workload saved; for mypy
        states.change_everything(state)
        capture = asymcheck.CaptureConfig(ring_folder=str(rings))
        checkpointer = asymcheck.Checkpointer(
            opened, {"state": state}, run="killed", capture=capture, every=1, keep=None
        )
        # Captures in memory belong to the line only after this call.
        checkpointer.restore()
        checkpointer.step(1)
        checkpointer.fence()
        checkpointer.wait("memory")
        os.kill(os.getpid(), signal.SIGKILL)


def _timed(restore: Restore) -> dict[str, float]:
    """Return the duration of a restore, and the thread seconds of each phase."""
    seen: list[Interval] = []
    with watch(seen.append):
        began = time.perf_counter()
        restore()
        total = time.perf_counter() - began
    return {"restore, whole": total} | dict(_sums(seen))


def _sums(seen: list[Interval]) -> Iterator[tuple[str, float]]:
    for part in _PARTS:
        seconds = [interval.seconds for interval in seen if interval.name == part]
        if seconds:
            yield f"restore, {part}", sum(seconds)
