"""Process that trains a run and pushes it to a location, until a file tells it to stop."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import torch

from asymcheck import Checkpointer, Push, Store
from asymcheck.errors import RunInUseError
from tests.remote.conftest import config


def train(folder: str, location: str, lease_s: float, *, takeover: bool) -> None:
    """Train with a store in ``folder`` until the file ``stop`` appears there, and print each step and the refusal."""
    stop = Path(folder) / "stop"
    configuration = config(lease_s=lease_s)
    push = Push(location, every=1)
    with Store.open(Path(folder) / "store", create=True, remote=location, config=configuration) as store:
        try:
            with Checkpointer(
                store, {"w": torch.zeros(8)}, every=1, keep=None, push=push, takeover=takeover
            ) as checkpointer:
                restored = checkpointer.restore()
                for step in itertools.count(restored.step + 1 if restored else 0):
                    checkpointer.step(step)
                    # Later uploads go on in the background, so that only step() can raise.
                    checkpointer.wait("remote" if step == 0 else "local")
                    print(json.dumps({"step": step}), flush=True)  # noqa: T201 - output for the test
                    if stop.exists():
                        return
                    time.sleep(0.1)
        except RunInUseError as error:
            print(json.dumps({"taken over": error.taken_over, "trainer": error.trainer}), flush=True)  # noqa: T201 - output for the test
