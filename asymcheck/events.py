"""Typed events and intervals, for traces, tests and progress bars.

An :class:`Event` is a completed step. Observers are called synchronously, on the thread that does the work. An observer
that raises aborts the work. An :class:`Interval` is work with a start and a duration. Watchers are called at its end,
and cannot abort anything. Observers and watchers must be short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Event:
    """A completed step of a save, a restore or a transfer."""

    name: str
    """Dotted name, for instance ``pack.sealed``. :data:`COMMIT_ORDER` lists the names of a commit."""
    detail: str = ""
    """Path, id or step that the event concerns."""
    bytes: int = 0
    """Payload bytes that the event concerns."""


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
"""Events of a save in the order of SPEC.md §B2. Crash tests kill the process at each."""

REMOTE_ORDER = (
    "remote.pack_begun",
    "remote.piece_sent",
    "remote.pack_closed",
    "remote.pack_checked",
    "remote.pack_renamed",
    "remote.small_closed",
    "remote.head_renamed",
    "remote.manifest_renamed",
)
"""Events of a push in the order of their first occurrence (SPEC.md §C2). Crash tests kill the process at each."""

Observer = Callable[[Event], None]
_observers: list[Observer] = []


def emit(name: str, detail: str = "", size: int = 0) -> None:
    """Report an event to all observers; without observers, this is one comparison."""
    if _observers:
        event = Event(name, detail, size)
        for observer in tuple(_observers):
            observer(event)


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call ``observer`` for every event of any thread inside the ``with`` block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


Detail = Mapping[str, str | int]


@dataclasses.dataclass(frozen=True)
class Interval:
    """Work with a start and a duration."""

    name: str
    """Key of :data:`INTERVALS`, or a name from the caller of :func:`timed`."""
    start_s: float
    """Start, in seconds of ``time.perf_counter()``."""
    seconds: float
    """How long it took."""
    thread: int
    """``threading.get_ident()`` of the thread that did or reported the work.

    For work of a push process, its process id.
    """
    thread_name: str
    """Name of the thread."""
    detail: Detail
    """Subject of the work, such as ``run``, ``step``, ``partition`` (its number), ``window`` and ``tensor``."""
    bytes: int
    """Payload bytes; 0 if unknown."""


INTERVALS = {
    "step": "``Checkpointer.step()`` that begins a checkpoint",
    "source digest": "in ``step()``: source digests are computed",
    "compare": "in ``step()``: tensors that no optimizer owns are compared with an earlier capture",
    "fence": "an optimizer step, or ``fence()``, waits until the state is copied",
    "room": "wait for space in a full ring (backpressure)",
    "wait": "``wait()``, also at the start of ``save()``, ``restore()`` and ``rollback()``",
    "close": "``close()``",
    "window": "training between two module boundaries; ``phase`` is ``forward`` or ``backward``",
    "copy": "a partition is copied from its tensors",
    "proof": "the copy of a partition is compared with its source digests",
    "digest": "a partition is digested, and is then complete in the ring",
    "encode": "a partition is encoded for a slower tier",
    "write": "a frame is written to a pack, or the store already has it (``known``)",
    "sync": "a pack is made durable",
    "commit": "a checkpoint becomes visible: packs, catalog and manifest",
    "checkpoint": "from the start of ``step()`` until the checkpoint is durable or lost",
    "save": "a synchronous save",
    "restore": "a checkpoint is restored",
    "find": "in a restore: the checkpoint, its manifests and the locations of its partitions are determined",
    "read": "a frame is read from its tier",
    "decode": "a partition is decoded",
    "verify": "a partition is compared with its digest",
    "place": "a partition is copied into its tensors",
    "push": "checkpoints are copied to a remote location, by ``Store.push()`` or in the background",
    "pull": "checkpoints are copied from a remote location by ``Store.pull()``",
    "adopt": "captures of a killed process are recovered from memory",
}
"""Names of intervals and their meanings."""

Watcher = Callable[[Interval], None]
_watchers: list[Watcher] = []


@contextlib.contextmanager
def _timed(name: str, size: int, detail: Callable[[], Detail] | None) -> Iterator[None]:
    began, failed = time.perf_counter(), dict[str, str]()
    try:
        yield
    except BaseException as error:
        failed["failed"] = type(error).__name__
        raise
    finally:
        report(name, began, time.perf_counter(), size, lambda: {**(detail() if detail else {}), **failed})


_UNWATCHED = contextlib.nullcontext()


def timed(
    name: str, size: int = 0, detail: Callable[[], Detail] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that reports an :class:`Interval`; without watchers, this is one comparison.

    Args:
        name: name of the interval.
        size: payload bytes.
        detail: called at the end if there are watchers. An exception in the block adds ``failed``, its class.
    """
    return _timed(name, size, detail) if _watchers else _UNWATCHED


def is_watched() -> bool:
    """Tell whether there are watchers."""
    return bool(_watchers)


def report(name: str, start_s: float, end_s: float, size: int = 0, detail: Callable[[], Detail] | None = None) -> None:
    """Report an interval that the caller has measured; without watchers, this is one comparison.

    A watcher that raises is removed, and ``threading.excepthook`` reports its error.
    """
    if not _watchers:
        return
    thread = threading.current_thread()
    details = {} if detail is None else detail()
    relay(Interval(name, start_s, end_s - start_s, threading.get_ident(), thread.name, details, size))


def relay(interval: Interval) -> None:
    """Report an interval, for instance of another process, to all watchers."""
    for watcher in tuple(_watchers):
        try:
            watcher(interval)
        except Exception:  # noqa: BLE001 - a watcher must not abort the work
            # Two threads may remove it at the same time, and the hook may raise as well.
            with contextlib.suppress(Exception):
                _watchers.remove(watcher)
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


@contextlib.contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` for every interval that ends inside the ``with`` block, on the thread that did the work."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _watchers.remove(watcher)
