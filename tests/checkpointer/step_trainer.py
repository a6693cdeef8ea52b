"""Process that trains a run, one step for each line that it reads."""

from __future__ import annotations

from pathlib import Path

import torch

from asymcheck import Checkpointer, Store
from asymcheck.errors import RunInUseError


def train(store: str, run: str, requests: str, answers: str) -> None:
    """Train a step for each line of ``requests``, and write the step or the refusal to ``answers``; both are pipes."""
    with (
        Path(requests).open() as lines,
        Path(answers).open("w", buffering=1) as told,
        Store.open(store, create=True) as opened,
        Checkpointer(opened, {"w": torch.zeros(8)}, run=run, every=1) as checkpointer,
    ):
        checkpointer.restore()
        for step, _ in enumerate(lines, 7):
            try:
                checkpointer.step(step)
                checkpointer.wait()
                told.write(f"{step}\n")
            except RunInUseError as error:
                told.write("taken over\n" if error.taken_over else "refused\n")
