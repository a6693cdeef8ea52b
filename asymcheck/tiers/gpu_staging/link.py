"""The link between a device and the host: two queues that the device works off beside the program.

One queue is the training's own, the other only copies. A *mark* is a point in either of them: what was queued before
it. Nothing here waits for a device but :meth:`Link.wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Mark(Protocol):
    """A point in a queue of a device."""

    def passed(self) -> bool:
        """Tell whether the device has got there."""

    def wait(self) -> None:
        """Return when the device has got there. Releases the GIL."""

    def seconds_after(self, earlier: Mark) -> float:
        """Return the seconds from an earlier mark to this one, when both have passed."""


class Link(Protocol):
    """One device."""

    def mark(self) -> Mark:
        """Return the present point in the training's queue, of the calling thread."""

    def queue(self, work: Callable[[], None], after: Mark) -> Mark:
        """Let what ``work`` asks of the device go to the queue for copies, after a mark; return the mark of its end."""

    def is_recorded(self) -> bool:
        """Tell whether what the calling thread queues now is only recorded, to be done later: a CUDA graph."""

    def run(self, work: Callable[[], None]) -> None:
        """Let what ``work`` asks of the device go to the training's queue."""

    def pin(self, memory: memoryview) -> bool:
        """Pin host memory, for copies at full speed and beside the program; return whether it is pinned."""

    def unpin(self, memory: memoryview) -> None:
        """Undo :meth:`pin`."""

    def hold(self, until: Mark) -> None:
        """Let nothing that is queued from now on in the training's queue begin before a mark; the program goes on."""
