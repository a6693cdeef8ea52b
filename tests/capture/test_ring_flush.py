"""Test the flush from the ring: concurrent requests of two threads are each done once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

from asymcheck.capture.inflight import Capture
from asymcheck.capture.ring_flush import RingFlusher


class _Overtaken(list[Future[bool]]):
    """A list to which another thread appends during the first append."""

    def __init__(self, other: Callable[[], object]) -> None:
        self._others = [other]

    def append(self, future: Future[bool]) -> None:
        """Append, and let the other thread append the first time."""
        super().append(future)
        if self._others:
            self._others.pop()()


def test_writes_that_two_threads_queue_at_once_have_a_future_each() -> None:
    """Test the commit thread and a thread that frees space, which queue writes at the same time."""
    queued: dict[int, Future[bool]] = {}

    def submit(_write: object, _capture: Capture, number: int) -> Future[bool]:
        queued[number] = Future()
        return queued[number]

    flusher = RingFlusher.__new__(RingFlusher)
    vars(flusher)["_writers"] = SimpleNamespace(submit=submit)
    capture = cast(Capture, SimpleNamespace())
    capture.writes = _Overtaken(lambda: flusher.write_soon(capture, 1))
    flusher.write_soon(capture, 0)
    assert sorted(queued) == [0, 1]
    assert {id(done) for done in queued.values()} == {id(done) for done in capture.writes}
