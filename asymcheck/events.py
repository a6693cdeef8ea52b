"""Typed events: what happened, in order, for traces, tests and progress bars.

Observers are called synchronously on the thread that does the work, right after the step named by the event; an
observer that raises
aborts that work, so keep observers short.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Event:
    """One step of the way down or up."""

    name: str
    """A dotted name, for instance ``pack.sealed``; the commit order's names are listed in :data:`COMMIT_ORDER`."""
    detail: str = ""
    """What it concerns: a path, an id, a step."""
    bytes: int = 0
    """Payload bytes concerned."""


COMMIT_ORDER = (
    "pack.created",
    "frame.written",
    "pack.index_written",
    "pack.synced",
    "pack.renamed",
    "pack.sealed",
    "catalog.pinned",
    "manifest.directory_created",
    "manifest.written",
    "manifest.synced",
    "manifest.renamed",
    "manifest.committed",
    "catalog.committed",
)
"""Events of one save in the order of SPEC.md §8.1; crash tests stop the process at each."""

Observer = Callable[[Event], None]
_observers: list[Observer] = []


def emit(name: str, detail: str = "", size: int = 0) -> None:
    """Tell every observer; costs one comparison when there is none."""
    if _observers:
        event = Event(name, detail, size)
        for observer in tuple(_observers):
            observer(event)


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call ``observer`` for every event inside the ``with`` block, from whatever thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
