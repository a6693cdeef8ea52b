"""Programs that publish and follow for ever, to be killed at random moments."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import torch

from asymcheck import Publish, Publisher, Store, Subscriber
from tests.publish.models import check, model, train_to


def publish_for_ever(folder: str, location: str, full_every: int) -> None:
    """Publish step after step, each later than every step that was ever begun."""
    steps = Path(folder) / "steps"
    trained = model()
    rules = Publish(location, full_every=full_every, keep=2, dtype=torch.bfloat16)
    with Store.open(Path(folder) / "spool", create=True) as spool, Publisher(rules, spool) as publisher:
        while True:
            step = (steps.stat().st_size if steps.exists() else 0) + 1
            append(steps, b"x")
            train_to(trained, step)
            release = publisher.publish({"model": trained}, step)
            append(Path(folder) / "published", f"{release.number}\n".encode())


def follow_for_ever(folder: str, location: str, seen: str, prefetch: bool, buffering: str) -> None:
    """Follow the releases, check every weight after each update, and note the numbers in the file ``seen``."""
    served = model(torch.bfloat16)
    with Subscriber(
        location,
        served,
        prefetch=prefetch,
        buffering=buffering,  # type: ignore[arg-type]  # a literal
        poll_s=0.005,
    ) as subscriber:
        while True:
            if not subscriber.wait(1):
                continue
            update = subscriber.update()
            if update is not None:
                check(served, update.step)
                append(Path(folder) / seen, f"{update.number}\n".encode())


def append(path: Path, data: bytes) -> None:
    """Append to a file in one write, which a kill does not divide."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, data)
    os.close(descriptor)


def run_script(folder: str, name: str) -> None:
    """Run a program in its folder."""
    os.chdir(folder)
    runpy.run_path(name, run_name="__main__")
