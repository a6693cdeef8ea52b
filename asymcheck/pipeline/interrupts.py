"""Interrupts that wait: what a signal's handler raises comes between the steps of a capture, never inside of one.

A KeyboardInterrupt may come between any two instructions of the main thread. There it would leave a partition that is
in no queue, for which everything waits, or room in the ring that is nobody's.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)
"""Those by which terminals and schedulers interrupt a training. Handlers of Python run on the main thread alone."""


class _Interrupts:
    """As a context it makes handlers wait; it may be entered inside of itself, and on any thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._kept: dict[int, _Handler] = {}
        self._due: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        """Let them wait, until :meth:`come` or the end of the block."""
        if not _on_main_thread():
            return
        if not self._depth:
            try:
                for number in _SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._kept[number] = handler
                        signal.signal(number, self._note)
            except BaseException:
                self._give_back()
                raise
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        """Let come what has come meanwhile, if this is the outermost block."""
        if not _on_main_thread():
            return
        self._depth -= 1
        if not self._depth:
            try:
                self._give_back()
            finally:
                self._call()

    def come(self) -> None:
        """Let come now what has come meanwhile: where whoever waits may stop waiting."""
        if self._due and _on_main_thread():
            self._call()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._due.append(partial(self._kept[number], number, frame))

    def _call(self) -> None:
        with contextlib.ExitStack() as calls:
            # One that raises does not keep the others from being called.
            while self._due:
                calls.callback(self._due.pop())

    def _give_back(self) -> None:
        raised: BaseException | None = None
        while self._kept:
            number, handler = next(iter(self._kept.items()))
            try:
                # It calls first what is pending, which may raise.
                signal.signal(number, handler)
            except BaseException as error:  # noqa: BLE001 - raised when all are as they were
                raised = raised or error
            else:
                del self._kept[number]
        if raised is not None:
            raise raised


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


INTERRUPTS = _Interrupts()
"""A process has one main thread, and one handler for each signal."""
