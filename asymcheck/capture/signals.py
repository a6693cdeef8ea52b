"""Signal handling: defer handlers while a capture changes, and drain captures before the process ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import weakref

# signal.getsignal() converts each handler to an enum, which takes 60 times as long.
from _signal import getsignal  # type: ignore[import-not-found]  # typeshed has no _signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import ClassVar, Protocol

_Handler = Callable[[int, FrameType | None], object]

_DEFERRED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)
"""Signals with which terminals and schedulers interrupt a training."""
_SA_RESTART = 0x10000000


class _SigAction(ctypes.Structure):
    """``struct sigaction`` of Linux on x86-64 and AArch64, with glibc and with musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _install(number: int, handler: _Handler | signal.Handlers) -> None:
    """Set a handler, and keep the setting of ``signal.siginterrupt``, which ``signal.signal`` resets."""
    action = _SigAction()
    failed = ctypes.CDLL(None).sigaction(number, None, ctypes.byref(action))
    signal.signal(number, handler)
    if not failed and action.flags & _SA_RESTART:
        signal.siginterrupt(number, False)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def end_by_default(number: int) -> None:
    """End the process by a signal that ends it if the program has no handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    if os.getpid() == 1:
        # Linux ignores a signal without a handler that the first process of a container sends to itself.
        os._exit(128 + number)


class Listener(Protocol):
    """Receives signals in place of the program's handlers, on the main thread, between any two instructions."""

    signals: tuple[int, ...]

    def received(self, number: int) -> bool:
        """Note a signal; return False if the process is to end at once."""


class _Interrupts:
    """Context manager that defers the program's signal handlers on the main thread. Reentrant.

    A handler may raise KeyboardInterrupt between any two instructions of the main thread. Within a capture this would
    leave a partition that is in no queue, which the next fence awaits for ever, or space in the ring without an owner.

    The handlers of the program are replaced once, by one that calls them, and are put back when the last holder is
    released. Python runs handlers on the main thread alone.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, _Handler | None] = {}
        # After release(), a library may restore the deferring handler. The program then has these handlers.
        self._lasting: dict[int, _Handler | None] = {}
        self._due: list[Callable[[], object]] = []
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._listened: tuple[int, ...] = ()
        self._called: tuple[int, FrameType | None] | None = None
        self._pid = os.getpid()

    def hold(self, holder: object) -> None:
        """Keep the replaced handlers until ``holder`` is released, or is garbage."""
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Put the program's handlers back if nothing else holds them."""
        self._holders.discard(holder)
        if self._holders or self._depth or not _on_main_thread():
            return
        # The handlers stay known, because a library that saved the deferring handler may restore it later.
        for number in {*_DEFERRED, *self._handlers, *self._listened}:
            # The program may have set another handler since.
            if signal.getsignal(number) == self._on_signal:
                handler = self._handlers.get(number)
                _install(number, handler or signal.SIG_DFL)
                self._handlers[number] = self._lasting.get(number, handler)
        self._lasting.clear()

    def listen(self, listener: Listener) -> None:
        """Pass signals to ``listener`` until :meth:`ignore`, unless the program ignores them. For the main thread."""
        self._pid = os.getpid()
        self._listeners.add(listener)
        self.hold(listener)
        self.renew()

    def ignore(self, listener: Listener) -> None:
        """Stop passing signals to ``listener``."""
        self._listeners.discard(listener)
        self.release(listener)

    def renew(self) -> None:
        """Replace handlers that a library has set since :meth:`listen`."""
        if _on_main_thread():
            self._listened = tuple({number for listener in self._listeners for number in listener.signals})
            for number in self._listened:
                if getsignal(number) == signal.SIG_DFL:
                    self._handlers[number] = self._lasting[number] = None
                    _install(number, self._on_signal)
                else:
                    self._replace(number)

    def call(self, number: int, frame: FrameType | None = None) -> None:
        """Call the program's handler of a signal, if it has one."""
        before, self._called = self._called, (number, frame)
        try:
            # The handler may have been given back to the program already.
            if callable(handler := self.handler(number)):
                handler(number, frame)
        finally:
            self._called = before

    def handler(self, number: int) -> object:
        """Return the program's handler of a signal."""
        current = signal.getsignal(number)
        return self._handlers.get(number) if current == self._on_signal else current

    def set_handler(self, number: int, handler: _Handler | signal.Handlers) -> None:
        """Set the program's handler of a signal. A listener still receives the signal."""
        is_kept = callable(handler) or any(number in listener.signals for listener in self._listeners)
        if is_kept and signal.getsignal(number) == self._on_signal:
            self._handlers[number] = handler if callable(handler) else None
        else:
            _install(number, handler)

    def __enter__(self) -> None:
        """Defer handlers until :meth:`deliver` or the end of the block."""
        if not _on_main_thread():
            return
        self._depth += 1
        if self._depth > 1:
            return
        try:
            for number in _DEFERRED:
                self._replace(number)
        except BaseException:
            self._depth -= 1
            raise

    def __exit__(self, *_error: object) -> None:
        """Call the handlers of deferred signals, if this is the outermost block."""
        if _on_main_thread():
            self._depth -= 1
            if not self._depth:
                self._call()

    def deliver(self) -> None:
        """Call the handlers of deferred signals at a point where no change is half done."""
        if self._due and _on_main_thread():
            self._call()

    def _replace(self, number: int) -> None:
        handler = getsignal(number)
        if callable(handler) and handler != self._on_signal:
            before = self._handlers.get(number)
            if number not in self._lasting:
                self._lasting[number] = handler
            elif handler != before:
                # A library has set this handler, and may remove it at its end.
                self._lasting[number] = before
            self._handlers[number] = handler
            _install(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if (number, frame) == self._called:
            # The program's handler calls the handler that it has replaced.
            return
        listeners = [listener for listener in self._listeners if number in listener.signals]
        is_forked = os.getpid() != self._pid
        if listeners and not is_forked:
            # Every listener notes the signal, even if another listener ends the process.
            verdicts = [listener.received(number) for listener in listeners]
            if not all(verdicts):
                end_by_default(number)
            return
        if self._handlers.get(number) is not None:
            self._due.append(partial(self.call, number, frame))
            if not self._depth:
                self._call()
        elif not is_forked or number == signal.SIGTERM:
            # A worker of a data loader survives a notice to all processes of the job.
            end_by_default(number)

    def _call(self) -> None:
        with contextlib.ExitStack() as calls:
            # All handlers are called, even if one raises.
            while self._due:
                calls.callback(self._due.pop())


INTERRUPTS = _Interrupts()
"""Deferral of the process, which has one handler per signal."""


class _Closable(Protocol):
    def close(self) -> None: ...


class ExitHandler:
    """Drains one Checkpointer at exit and on SIGTERM. As a context manager, defers SIGTERM.

    All handlers of the process share the state of SIGTERM.
    """

    _armed: ClassVar[list[ExitHandler]] = []
    _armed_in: ClassVar[int] = 0
    """Process id of the last :meth:`arm`."""
    _depth: ClassVar[int] = 0
    """Number of active calls of the main thread."""
    _is_terminated: ClassVar[bool] = False
    """Whether SIGTERM was received."""

    def __init__(self, close: Callable[[], None]) -> None:
        """Drain by ``close``, a method of an object that is only weakly referenced."""
        self._close = weakref.WeakMethod(close)
        self._background: Callable[[], _Closable | None] = lambda: None
        self._pid = os.getpid()
        self.is_hurried = False
        """Whether the process is about to end without SIGTERM, and should not wait for other ranks."""

    def is_due(self) -> bool:
        """Return whether the process is about to end, so that active calls should return soon."""
        return self.is_hurried or self._is_terminated

    def __enter__(self) -> None:
        """Let SIGTERM wait."""
        if _on_main_thread():
            ExitHandler._depth += 1

    def __exit__(self, *_error: object) -> None:
        """Drain and end the process if SIGTERM was received and no other call of the main thread is active."""
        if _on_main_thread():
            ExitHandler._depth -= 1
            if self._is_terminated and not self._depth:
                self._terminate()

    def arm(self, background: _Closable) -> None:
        """Drain at exit, and on SIGTERM if this is the main thread and the program has no handler."""
        self.disarm()
        self._background = weakref.ref(background)
        self._pid = ExitHandler._armed_in = os.getpid()
        atexit.register(self.drain)
        if _on_main_thread():
            self._armed.append(self)
            if INTERRUPTS.handler(signal.SIGTERM) is signal.SIG_DFL:
                INTERRUPTS.set_handler(signal.SIGTERM, ExitHandler._received)

    def disarm(self) -> None:
        """Stop draining. Restore the default handler of SIGTERM if nothing is left to drain."""
        atexit.unregister(self.drain)
        if self in self._armed:
            self._armed.remove(self)
            is_last = not self._armed and not self._is_terminated
            # Other threads cannot restore the handler, but without anything to drain, it acts like the default.
            if is_last and _on_main_thread() and INTERRUPTS.handler(signal.SIGTERM) == ExitHandler._received:
                INTERRUPTS.set_handler(signal.SIGTERM, signal.SIG_DFL)

    @classmethod
    def _received(cls, _number: int, _frame: FrameType | None) -> None:
        """Drain and end the process, at once or after the active calls."""
        cls._is_terminated = True
        # A forked child inherits the handler, perhaps in the middle of a call of its parent.
        if not cls._depth or os.getpid() != cls._armed_in:
            cls._terminate()

    @classmethod
    def _terminate(cls) -> None:
        # Later calls must not terminate the process again.
        cls._depth += 1
        with contextlib.ExitStack() as stack:
            stack.callback(end_by_default, signal.SIGTERM)
            # All Checkpointers drain, even if one fails.
            for handler in cls._armed:
                stack.callback(handler.drain)

    def drain(self) -> None:
        """Make all captures durable."""
        if os.getpid() != self._pid:
            # A forked child, for instance of a data loader, has no threads; its parent drains.
            return
        # After an uncaught error, other ranks may have failed, too.
        self.is_hurried |= getattr(sys, "last_value", None) is not None
        close, background = self._close(), self._background()
        if close is not None:
            close()
        elif background is not None:
            # A training function may return without closing its Checkpointer.
            background.close()
