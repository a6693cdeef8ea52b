"""Trace files of captures, flushes and commits, for Perfetto and ``chrome://tracing``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import threading
import time
from collections import deque
from pathlib import Path

from asymcheck.errors import InvalidInputError, StorageError
from asymcheck.events import Event, Interval, observe, watch

_MICRO = 1e6
_GIGA = 1e9
_SHOWN_AS_INSTANTS = "capture."
_SEPARATE = {"window": "forward and backward", "checkpoint": "checkpoints"}

_Lines = tuple[str, str | int, list[dict[str, object]]]
"""Name and key of a track, and its lines."""


def trace(path: str | os.PathLike[str]) -> Trace:
    """Write a trace of this process to ``path`` until the ``with`` block ends, or until :meth:`Trace.close`.

    ::

        with asymcheck.trace("trace.json"):
            train()

    Raises:
        StorageError: the file cannot be written, or another process writes its trace there.
        InvalidInputError: ``path`` is not a path.
    """
    return Trace(path)


def _opened(path: Path) -> int:
    """Open and truncate a file exclusively.

    Raises:
        StorageError: another process writes a trace to it.
        OSError
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Devices and pipes are not truncated or locked.
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            try:
                # With flock(), a forked child, such as a data loader worker, would keep the lock of a dead parent.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Otherwise, the file system has no locks.
                if isinstance(error, (BlockingIOError, PermissionError)):
                    problem = f"trace {path} is being written by another process"
                    raise StorageError(f"{problem}; give each rank its own file") from error
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Trace(contextlib.AbstractContextManager["Trace"]):
    """Trace file in Chrome's trace event format, with one JSON object per line; see :func:`trace`.

    Tracks, from the top: windows and checkpoints of each run, the training thread, and each background thread. Times
    are in microseconds of ``time.perf_counter()``. Each line is written at once. The trace of a killed process lacks
    only the closing bracket, which is optional. A forked child adds nothing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Start the trace, and overwrite ``path``. Raises the errors of :func:`trace`."""
        self._pid = os.getpid()
        # A signal handler may interrupt this thread while it writes a line, and wait for other threads. Therefore no
        # thread waits for this lock: if the lock is held, the holder writes the line.
        self._lock = threading.RLock()
        self._waiting: deque[_Lines] = deque()
        self._training = threading.get_ident()
        self._tracks: dict[tuple[str, str | int], int] = {}
        self._ends_at = 0
        self._failure: OSError | None = None
        try:
            self._path = Path(path)
            self._descriptor: int | None = _opened(self._path)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"trace {path!r:.100}: give the path of a file") from error
        except OSError as error:
            raise StorageError(f"trace {self._path}: {error.strerror}; give a writable file") from error
        self._subscriptions = contextlib.ExitStack()
        self._subscriptions.enter_context(watch(self._on_interval))
        self._subscriptions.enter_context(observe(self._on_event))
        with self._lock:
            self._write({"ph": "M", "name": "process_name", "tid": 0, "args": {"name": "asymcheck"}})

    def close(self) -> None:
        """End the trace. Closing twice is no error.

        Raises:
            StorageError: a write failed. The trace up to the failure can be opened.
        """
        self._subscriptions.close()
        with self._lock:
            if os.getpid() == self._pid:
                self._write_waiting()
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None:
                return
            try:
                if self._failure is None and os.getpid() == self._pid:
                    os.write(descriptor, b"\n]\n")
            except OSError as error:
                self._failure = error
            finally:
                os.close(descriptor)
        if self._failure is not None:
            message = f"trace {self._path} ends early: {self._failure.strerror}; free disk space, or use another file"
            raise StorageError(message) from self._failure

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _on_interval(self, interval: Interval) -> None:
        if os.getpid() != self._pid:
            return
        start, end = round(interval.start_s * _MICRO, 3), round((interval.start_s + interval.seconds) * _MICRO, 3)
        about: dict[str, object] = dict(interval.detail)
        if interval.bytes:
            about["bytes"] = interval.bytes
            if interval.name != "checkpoint" and interval.seconds > 0 and not about.get("known"):
                about["GB/s"] = round(interval.bytes / interval.seconds / _GIGA, 3)
        title = str(about.get("phase", interval.name))
        described = {"name": title, "cat": interval.name}
        if interval.name == "checkpoint":
            # These intervals may overlap, so they cannot be nested slices. An id has 64 bits.
            described["id"] = f"0x{about.get('save', '')!s:.16}"
            lines = [{"ph": "b", **described, "ts": start, "args": about}, {"ph": "e", **described, "ts": end}]
        else:
            lines = [{"ph": "X", **described, "ts": start, "dur": round(end - start, 3), "args": about}]
        self._write_track(*self._track_of(interval), lines)

    def _on_event(self, event: Event) -> None:
        if not event.name.startswith(_SHOWN_AS_INSTANTS) or os.getpid() != self._pid:
            return
        now = round(time.perf_counter() * _MICRO, 3)
        thread = threading.current_thread()
        about = {"of": event.detail, "bytes": event.bytes}
        line = {"ph": "i", "s": "t", "name": event.name, "cat": "event", "ts": now, "args": about}
        self._write_track(thread.name, threading.get_ident(), [line])

    def _track_of(self, interval: Interval) -> tuple[str, str | int]:
        if interval.name in _SEPARATE:
            run = interval.detail.get("run")
            return f"{_SEPARATE[interval.name]} of run {run}", interval.name
        is_training = interval.thread == self._training
        return "training thread" if is_training else interval.thread_name, interval.thread

    def _write_track(self, name: str, key: str | int, lines: list[dict[str, object]]) -> None:
        """Write lines of a track, or leave them to the thread that holds the lock."""
        self._waiting.append((name, key, lines))
        # Repeated after a release, because other threads may have added lines just before.
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                self._write_waiting()
            finally:
                self._lock.release()

    def _write_waiting(self) -> None:
        while True:
            try:
                name, key, lines = self._waiting.popleft()
            except IndexError:
                return
            tid = self._track(name, key)
            for line in lines:
                self._write({**line, "tid": tid})

    def _track(self, name: str, key: str | int) -> int:
        """Return the number of a track, and name the track at its first use. Thread ids may be reused."""
        number = self._tracks.get((name, key))
        if number is None:
            number = self._tracks[name, key] = len(self._tracks) + 1
            place = list(_SEPARATE).index(key) if key in _SEPARATE else 2 if key == self._training else 2 + number
            self._write({"ph": "M", "name": "thread_name", "tid": number, "args": {"name": name}})
            self._write({"ph": "M", "name": "thread_sort_index", "tid": number, "args": {"sort_index": place}})
        return number

    def _write(self, record: dict[str, object]) -> None:
        """Append an object. After a failure, write nothing more."""
        if self._descriptor is None or self._failure is not None:
            return
        line = ("[\n" if not self._ends_at else ",\n") + json.dumps({"pid": self._pid, **record}, separators=(",", ":"))
        data = line.encode()
        try:
            if os.write(self._descriptor, data) == len(data):
                self._ends_at += len(data)
                return
            self._failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._failure = error
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._ends_at)
