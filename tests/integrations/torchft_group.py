"""Run the example of docs/trainers.md for torchft as one replica group, which fails at chosen steps."""

import os
import runpy
import signal
import sys

import pytest
import torch
import torchft

from tests.checkpointer.loops import copy_late

_step = torchft.Optimizer.step


def fail(kill_at: int, miss: int) -> None:
    """Kill the process in one step. Let this group discard another step once, which the other group commits."""
    missed: list[int] = []

    def step(self: torchft.Optimizer, closure: object = None) -> None:
        upcoming = self.manager.current_step() + 1
        if upcoming == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if upcoming == miss and not missed:
            missed.append(upcoming)
            self.manager.report_error(RuntimeError("on purpose"))
        _step(self, closure)

    torchft.Optimizer.step = step


if __name__ == "__main__":
    torch.set_num_threads(1)
    copy_late(pytest.MonkeyPatch())
    fail(int(sys.argv.pop()), int(sys.argv.pop()))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
