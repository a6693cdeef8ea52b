"""Child processes that push, and are killed at a given step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from asymcheck import Store, events
from tests.remote.conftest import CONFIG


def push_and_die(store: str, location: str, step: int, event: str, count: int) -> None:
    """Push a step; die when ``event`` has occurred ``count`` times, or exit normally."""
    left = [count]

    def observe(found: events.Event) -> None:
        if found.name == event:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    with Store.open(Path(store), read_only=True, config=CONFIG) as opened, events.observe(observe):
        opened.push(location, step)


def push_and_lose(store: str, location: str, step: int) -> None:
    """Push a step, and die at the commit, after a collection that did not see the step has removed its packs."""

    def observe(found: events.Event) -> None:
        if found.name == "remote.manifest_renamed":
            for pack in (Path(location.removeprefix("file://")) / "packs").iterdir():
                pack.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    with Store.open(Path(store), read_only=True, config=CONFIG) as opened, events.observe(observe):
        opened.push(location, step)


def push(store: str, location: str, step: int) -> None:
    """Push a step."""
    push_and_die(store, location, step, "", 0)
