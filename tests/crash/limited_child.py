"""Trains under a limit of the operating system; prints the durable steps and the warnings."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from pathlib import Path

import torch

from asymcheck import CaptureConfig, Checkpointer, Store, events
from asymcheck.errors import AsymcheckError
from asymcheck.events import Event
from tests.crash.faults import kill_this_process

DAY_S = 86_400


def state_of(step: int) -> torch.Tensor:
    """Return the weight of a step."""
    return torch.full((60_000,), float(step))


def main(folder: Path, limit: str, value: int) -> None:
    """Restore, and save four steps while the limit applies.

    Args:
        folder: folder with the store, in ``store``, and the rings, in ``rings``.
        limit: ``files``, ``memory`` (address space beyond the current one), ``size`` (of a file), ``clock`` (set back
            after the restore), ``killed`` (as ``clock``, and killed with a capture in memory), or ``none``.
        value: number of open files, MiB of address space, or MiB of a file.
    """
    state = {"weight": state_of(-1)}
    if limit == "memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (value << 20),) * 2)
    if limit == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (value << 20, value << 20))
    if limit == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (value, value))

    def kill_when_complete(event: Event) -> None:
        if limit == "killed" and event.name == "capture.complete":
            kill_this_process()

    trained, error = -1, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = CaptureConfig(ring_bytes=2 << 20, ring_folder=str(folder / "rings"))
            with (
                Store.open(folder / "store") as store,
                Checkpointer(store, state, every=1, keep=None, on_error="warn", capture=config) as checkpointer,
            ):
                restored = checkpointer.restore()
                first = 0 if restored is None else restored.step + 1
                if limit in ("clock", "killed"):
                    os.environ["FAULT_CLOCK_S"] = str(-DAY_S)
                with events.observe(kill_when_complete):
                    for step in range(first, first + 4):
                        state["weight"].copy_(state_of(step))
                        checkpointer.step(step)
                        trained = step
                    checkpointer.wait()
        except AsymcheckError as raised:
            error = f"{type(raised).__name__}: {raised}"
    found = {"trained": trained, "error": error, "warnings": [str(warning.message) for warning in caught]}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
