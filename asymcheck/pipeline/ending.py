"""The end of a process that saves in the background: it drains at exit and on SIGTERM, but never inside a call."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType

from asymcheck.pipeline.background import Background


class _Termination:
    """SIGTERM for all that saves in the background on the main thread: a process has one handler, and ends once."""

    def __init__(self) -> None:
        self._armed: list[Ending] = []
        self._pid = os.getpid()
        self._depth = 0
        self._is_due = False

    @property
    def is_due(self) -> bool:
        """Whether SIGTERM has come."""
        return self._is_due

    def enter(self) -> None:
        """Let SIGTERM wait, until :meth:`leave`."""
        if _on_main_thread():
            self._depth += 1

    def leave(self) -> None:
        """Drain and end now if SIGTERM has come, and no other call is under way."""
        # Calls on other threads do not count: the signal interrupts the main thread, and ends the process from there.
        if _on_main_thread():
            self._depth -= 1
            if self._is_due and not self._depth:
                self._terminate()

    def arm(self, ending: Ending) -> None:
        """Drain it on SIGTERM, unless the program has a handler of its own."""
        self._pid = os.getpid()
        self._armed.append(ending)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_signal)

    def disarm(self, ending: Ending) -> None:
        """Leave SIGTERM as it was, when nothing is left to drain."""
        if ending in self._armed:
            self._armed.remove(ending)
            is_last = not self._armed and not self._is_due
            # On another thread it cannot be taken back; with nothing to drain it ends the process as the default does.
            if is_last and _on_main_thread() and signal.getsignal(signal.SIGTERM) is _on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def signalled(self) -> None:
        """Drain and end, at once or when the calls under way have returned."""
        self._is_due = True
        # A forked child has the handler, and may have been forked in the middle of a call of its parent's.
        if not self._depth or os.getpid() != self._pid:
            self._terminate()

    def _terminate(self) -> None:
        # What is held from now on does not end in another termination.
        self._depth += 1
        with contextlib.ExitStack() as stack:
            stack.callback(_end_by_default)
            # One that fails does not keep the others from draining.
            for ending in self._armed:
                stack.callback(ending.drain)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    _TERMINATION.signalled()


def _end_by_default() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


_TERMINATION = _Termination()


class Ending:
    """What one Checkpointer does at exit and on SIGTERM. As a context it makes SIGTERM wait."""

    def __init__(self, close: Callable[[], None]) -> None:
        """Drain by ``close``, a method of an object that this does not keep alive."""
        self._close = weakref.WeakMethod(close)
        self._background: Callable[[], Background | None] = lambda: None
        self._pid = os.getpid()
        self._is_armed = False
        self.is_hurried = False
        """Whether the process is about to end for another reason than SIGTERM, and should not wait for others."""

    def is_due(self) -> bool:
        """Tell whether the process is to end: what is under way should be brought to an end soon."""
        return self.is_hurried or _TERMINATION.is_due

    def __enter__(self) -> None:
        """Let SIGTERM wait."""
        _TERMINATION.enter()

    def __exit__(self, *_error: object) -> None:
        """Let it wait no longer."""
        _TERMINATION.leave()

    def arm(self, background: Background) -> None:
        """Drain at exit; on the main thread on SIGTERM too, unless the program has a handler of its own."""
        self._background = weakref.ref(background)
        self._pid = os.getpid()
        atexit.register(self.drain)
        self._is_armed = True
        if _on_main_thread():
            _TERMINATION.arm(self)

    def disarm(self) -> None:
        """Leave exit and SIGTERM as they were."""
        if self._is_armed:
            atexit.unregister(self.drain)
            self._is_armed = False
            _TERMINATION.disarm(self)

    def drain(self) -> None:
        """Make durable what was begun."""
        if os.getpid() != self._pid:
            # A forked child, for instance of a data loader, has none of the threads; what is under way is its parent's.
            return
        # An error that nobody caught has ended the program, and that of another rank may have been the cause.
        self.is_hurried |= getattr(sys, "last_value", None) is not None
        close, background = self._close(), self._background()
        if close is not None:
            close()
        elif background is not None:
            # A function that trains may have returned without closing; what it began is still under way.
            background.close()
