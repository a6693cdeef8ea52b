"""Typed events: what happened, in order, and how long it took, for traces, tests and progress bars.

An :class:`Event` is a completed step. Its observers are called synchronously on the thread that does the work, right
after the step, and an observer that raises aborts that work. An :class:`Interval` is work with its beginning and its
end. Its watchers are called when it has ended, and cannot abort anything. Keep both short.
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
"""Events of one push in the order of SPEC.md §8.6, as far as they come the first time; likewise."""

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


Detail = Mapping[str, str | int]


@dataclasses.dataclass(frozen=True)
class Interval:
    """Some work, from its beginning to its end."""

    name: str
    """One of :data:`INTERVALS`, or a name of the caller of :func:`timed`."""
    start_s: float
    """When it began, in seconds of ``time.perf_counter()``."""
    seconds: float
    """How long it took."""
    thread: int
    """``threading.get_ident()`` of the thread that did it, or for a window and a checkpoint, that tells of it.

    For work of the pushing process, its process id.
    """
    thread_name: str
    """The name of that thread."""
    detail: Detail
    """Subject of the event, such as ``run``, ``step``, ``partition`` (its number), ``window`` and ``tensor``."""
    bytes: int
    """Payload bytes concerned; 0 when none are, or when they are not known."""


INTERVALS = {
    "step": "``Checkpointer.step()`` when it begins a checkpoint",
    "witness": "in ``step()``: digests of the source are taken",
    "compare": "in ``step()``: what no optimizer owns is digested, to find out what an earlier capture has already",
    "fence": "an optimizer step, or ``fence()``, waits until the state is copied",
    "room": "waiting for room in a full ring (back-pressure)",
    "wait": "``wait()``, and what begins with it: ``save()``, ``restore()`` and ``rollback()``",
    "close": "``close()``",
    "window": "training between two boundaries of modules; its ``phase`` is ``forward`` or ``backward``",
    "copy": "one partition is copied from its tensors",
    "proof": "witnesses of one partition are compared with its copy",
    "digest": "one partition is digested, and then complete in the ring",
    "encode": "a partition is encoded for the tier below",
    "write": "one frame is written to a pack, or found to be in the store already (``known``)",
    "sync": "one pack is made durable",
    "commit": "a checkpoint becomes visible: packs, catalog and manifest",
    "checkpoint": "from the beginning of ``step()`` until the checkpoint is durable, or lost",
    "save": "a save that the caller waits for",
    "restore": "a checkpoint is read back",
    "find": "in a restore: which checkpoint it is, its manifests, and where its partitions lie",
    "read": "one frame is read from its tier",
    "decode": "one partition is decoded",
    "verify": "the digest of one partition is compared with its name",
    "place": "one partition is copied to where its tensors are",
    "push": "checkpoints are copied to a remote location, by :meth:`asymcheck.Store.push` or beside a training",
    "pull": "checkpoints are copied from a remote location by :meth:`asymcheck.Store.pull`",
    "adopt": "what a killed process left in memory is made durable",
}
"""The names of intervals, and what each means."""

Watcher = Callable[[Interval], None]
_watchers: list[Watcher] = []


class _Timed(contextlib.AbstractContextManager[None]):
    __slots__ = ("_began", "_detail", "_name", "_size")

    def __init__(self, name: str, size: int, detail: Callable[[], Detail] | None) -> None:
        self._name, self._size, self._detail = name, size, detail
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        ended = time.perf_counter()
        detail = self._detail
        failed = {} if kind is None else {"failed": kind.__name__}
        report(self._name, self._began, ended, self._size, lambda: {**(detail() if detail else {}), **failed})


_UNWATCHED = contextlib.nullcontext()


def timed(
    name: str, size: int = 0, detail: Callable[[], Detail] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a ``with`` block that becomes an :class:`Interval`; costs one comparison when nobody watches.

    Args:
        name: what is done in it.
        size: payload bytes concerned.
        detail: called at the end, if somebody watches. An exception that leaves the block adds ``failed``, its class.
    """
    return _Timed(name, size, detail) if _watchers else _UNWATCHED


def is_watched() -> bool:
    """Tell whether anybody watches: else nothing need be gathered for :func:`report`."""
    return bool(_watchers)


def report(name: str, start_s: float, end_s: float, size: int = 0, detail: Callable[[], Detail] | None = None) -> None:
    """Tell every watcher of an interval that was measured otherwise; costs one comparison when there is none.

    A watcher that raises is removed, and ``threading.excepthook`` reports it as what ended a thread.
    """
    if not _watchers:
        return
    thread = threading.current_thread()
    found = {} if detail is None else detail()
    relay(Interval(name, start_s, end_s - start_s, threading.get_ident(), thread.name, found, size))


def relay(interval: Interval) -> None:
    """Tell every watcher of an interval, for instance of another process; as :func:`report`."""
    for watcher in tuple(_watchers):
        try:
            watcher(interval)
        except Exception:  # noqa: BLE001 - who only looks on must not break what it looks at
            _leave_out(watcher, threading.current_thread())


def _leave_out(watcher: Watcher, thread: threading.Thread) -> None:
    # Two threads may find out at once; and a hook that raises is of no more importance than a watcher.
    with contextlib.suppress(Exception):
        _watchers.remove(watcher)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))


@contextlib.contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` for every interval that ends inside the ``with`` block, on the thread that did the work."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _watchers.remove(watcher)
