"""A job: ranks in separate processes, with a key-value store that outlives them, as with torchrun."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.zygote import Child, Zygote

LIMIT_S = 240.0
"""Timeout in seconds; a busy machine may need minutes instead of seconds."""


@dataclasses.dataclass
class Job:
    """The ranks of one launch."""

    folder: Path
    processes: list[Child]

    def wait(self) -> list[dict[str, object]]:
        """Wait for all ranks; return their reports."""
        for rank, process in enumerate(self.processes):
            if not process.has_ended(LIMIT_S):
                self.kill()
                pytest.fail(f"rank {rank} hangs:\n{self.output(rank)}")
            if process.wait():
                self.kill()
                pytest.fail(f"rank {rank} ended with {process.status}:\n{self.output(rank)}")
        return [self.report(rank) for rank in range(len(self.processes))]

    def report(self, rank: int) -> dict[str, object]:
        """Return the last report of a rank."""
        found: dict[str, object] = json.loads((self.folder / f"report-{rank}.json").read_text())
        return found

    def output(self, rank: int) -> str:
        """Return the output of a rank."""
        return self.processes[rank].output.read_text(errors="replace")[-6000:]

    def kill(self, *ranks: int) -> None:
        """Kill some or all ranks, and wait until they have ended."""
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].kill()
            self.processes[rank].wait()

    def until(self, rank: int, name: str) -> None:
        """Wait until a rank has created a file of this name."""
        began = time.monotonic()
        while not (self.folder / name).exists():
            if self.processes[rank].has_ended() or time.monotonic() - began > LIMIT_S:
                self.kill()
                pytest.fail(f"rank {rank} never came to {name}:\n{self.output(rank)}")
            time.sleep(0.005)


class Meeting:
    """The rendezvous of ranks, launch after launch, and their launcher."""

    def __init__(self, zygote: Zygote) -> None:
        """Open the rendezvous; ``zygote`` starts the ranks."""
        self._zygote = zygote
        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)

    def launch(
        self,
        scenario: str,
        world_size: int,
        folder: Path,
        *arguments: str,
        program: str = "tests.distributed.scenarios",
    ) -> Job:
        """Start the ranks of a scenario of :mod:`tests.distributed.scenarios`, or of another program."""
        folder.mkdir(exist_ok=True)
        (folder / "memory").mkdir(exist_ok=True)
        processes = []
        for rank in range(world_size):
            names = {"RANK": rank, "WORLD_SIZE": world_size, "MEETING": self.store.port, "OMP_NUM_THREADS": 1}
            environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
            output = folder / f"output-{rank}.txt"
            processes.append(self._zygote.start_program(program, [scenario, folder, *arguments], environment, output))
        return Job(folder, processes)
