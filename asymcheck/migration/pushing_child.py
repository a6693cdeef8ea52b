"""The process that pushes for a training: what it is asked comes by a socket, and it ends with who asks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import traceback
from collections import deque
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, cast

from asymcheck.errors import AsymcheckError, GivenUpError
from asymcheck.events import Interval, watch
from asymcheck.migration.pushing_process import Close, Failed, Look, News, Order, Wait, Waited
from asymcheck.store import Store
from asymcheck.threads import NICE, begin
from asymcheck.types import Checkpoint

if TYPE_CHECKING:
    from asymcheck.migration.pushing_thread import PushingThread

_POLL_S = 0.05


def main(descriptor: int, parent: int) -> None:
    """Do what the process ``parent`` asks for by the socket ``descriptor``, until it has enough or is gone."""
    _stand_back()
    training: Connection[Any, Any] = Connection(descriptor)
    status = 1
    try:
        # When the training is gone, what was sent stays, and the next one goes on from there.
        with contextlib.suppress(EOFError, ConnectionError):
            status = _serve(training, parent)
    except Exception:  # noqa: BLE001 - the training sees the status
        traceback.print_exc()
    # Not by the interpreter's own end, which would wait for threads that wait for servers.
    os._exit(status)


def _stand_back() -> None:
    """Take what the training leaves, with all threads that libraries have begun.

    Not before all is imported: with that priority it took more than a minute beside two busy loops on two cores.
    """
    for task in os.listdir("/proc/self/task"):
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task), NICE)


def _serve(training: Connection[Any, Any], parent: int) -> int:
    while not training.poll(_POLL_S):
        if os.getppid() != parent:
            return 1
    order: Order = training.recv()
    rules = dataclasses.replace(order.rules, own_process=False)
    try:
        store = Store.open(order.location, config=order.config, read_only=True)
        # By a thread, as the rules say.
        pushing = cast("PushingThread", store.pushing(rules, run=order.run, poll_s=order.poll_s, prunes=order.prunes))
    except AsymcheckError as error:
        training.send(Failed(_portable(error)))
        return 1
    serving = _Serving(training, parent, pushing)
    with watch(serving.note):
        serving.serve()
    return 0


class _Serving:
    """One training that is served."""

    def __init__(self, training: Connection[Any, Any], parent: int, pushing: PushingThread) -> None:
        self._training, self._parent, self._pushing = training, parent, pushing
        self._told: object = None
        self._told_sent: dict[str, Checkpoint] = {}
        self._waited: list[Waited] = []
        self._intervals: deque[Interval] = deque()
        self._closed = threading.Event()

    def serve(self) -> None:
        """Return when it has been closed, or the training has ended.

        Raises:
            EOFError, ConnectionError: so it has.
        """
        while True:
            has_looked = self._training.poll(_POLL_S) and self._obey(self._training.recv())
            if os.getppid() != self._parent:
                # A process that the training has forked may hold its end of the socket.
                return
            # In this order what is told is no older than the answers, and no newer than the end.
            is_over = self._closed.is_set()
            waited, self._waited = self._waited, []
            self._tell(has_looked=has_looked)
            for one in waited:
                self._training.send(one)
            if is_over:
                return

    def note(self, interval: Interval) -> None:
        """Keep what the training may want to know of: not of each frame, there may be many thousands."""
        if interval.name == "push":
            self._intervals.append(dataclasses.replace(interval, thread=os.getpid()))

    def _obey(self, message: object) -> bool:
        """Do what is asked, or begin it; return whether it was to look."""
        if isinstance(message, Wait):
            begin(partial(self._wait, message.number), "push-wait")
        elif isinstance(message, Close):
            begin(partial(self._close, message.limit_s), "push-close")
        else:
            self._pushing.look()
        return isinstance(message, Look)

    def _wait(self, number: int) -> None:
        error: Exception | None = None
        try:
            self._pushing.wait()
        except Exception as found:  # noqa: BLE001 - raised where it was asked for
            error = _portable(found)
        self._waited.append(Waited(number, error))

    def _close(self, limit_s: float | None) -> None:
        try:
            self._pushing.close_in(limit_s)
        finally:
            self._closed.set()

    def _tell(self, *, has_looked: bool) -> None:
        """Send what is new. First the numbers: what is counted as pushed is then among what is known to be there."""
        pushing, queue = self._pushing, self._pushing.queue
        facts = pushing.statistics(), pushing.sending, pushing.is_connected, pushing.is_well
        with queue.lock:
            state = *facts, queue.generation, dict(queue.damaged)
            told = state, len(queue.sent)
            if told == self._told and not has_looked and not self._intervals:
                return
            sent = dict(queue.sent)
        before, self._told, self._told_sent = self._told_sent, told, sent
        new = {save_id: one for save_id, one in sent.items() if save_id not in before}
        intervals = [self._intervals.popleft() for _ in range(len(self._intervals))]
        self._training.send(News(*state, new, before.keys() - sent.keys(), has_looked, intervals))


def _portable(error: Exception) -> Exception:
    """Return an error that arrives as it is: not every class can be made again from its words."""
    try:
        found: Exception = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        return GivenUpError(f"{type(error).__name__}: {error}")
    return found
