"""Stop a process before each of its file operations in a folder, until a scheduler lets it go on.

Time and random numbers of the process come from the scheduler and a seed, so that a schedule can be repeated. Use a
gate only in a child process that has one thread: its audit hook and its patches stay until the process ends. Threads
that the process starts afterwards run one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import random
import re
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from asymcheck.storage.nvme.catalog import Catalog, Transaction
from asymcheck.storage.shm.ring_reader import RingReader
from asymcheck.storage.shm.ring_writer import Ring
from tests.interleaving.threads import Threads

_MARK = re.compile(r"open/[0-9]+-\S+")
"""Mark of a process in the catalog, with its PID."""
_ANSWER = struct.Struct("dI")
EPOCH_S = 4_100_000_000
"""Start of the simulated clock, after all times of the real clock."""
_TICK_S = 1e-6
"""Time between two looks at the clock, so that no measured duration is zero."""


class Operation(NamedTuple):
    """A file operation, an access to a ring, a transaction of the catalog (with the path of its folder), or a wait."""

    name: str
    path: str
    target: str = ""
    """New path of a rename or a link."""
    wait_s: float = 0.0
    """Duration of a sleep."""

    def __str__(self) -> str:
        """Return the operation and its paths."""
        return " ".join(filter(None, (self.name, self.path, self.target)))


_AUDITED: dict[str, str] = {
    "os.rename": "rename",
    "os.link": "link",
    "os.remove": "unlink",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.listdir": "list",
    "os.scandir": "list",
    "os.truncate": "truncate",
}
_BY_DESCRIPTOR = {"pwritev": "write", "pwrite": "write", "preadv": "read", "fsync": "sync", "fdatasync": "sync"}
"""Functions of ``os`` without an audit event."""
_RING = (
    (Ring, "take", "write ring"),
    (Ring, "complete", "write ring"),
    (Ring, "_write_entry", "write ring"),
    (Ring, "forget", "write ring"),
    (RingReader, "_read_header", "read ring"),
    (RingReader, "payload_at", "read ring"),
)
"""Functions that access the memory of a ring."""


class Gate:
    """Reports operations over a socket, and waits for the answer."""

    def __init__(self, channel: socket.socket, folder: str, seed: int) -> None:
        """Report operations in ``folder`` once :attr:`is_open` is set; ``seed`` replaces randomness."""
        self._channel = channel
        self._folder = folder + "/"
        self._now_s = 0.0
        self.is_open = False
        self.has_paused = False
        """Whether the scheduler has let more time pass than locks wait."""
        self._dice = random.Random(seed)
        self._threads = Threads(self._ask, self._clock, Operation("wait", ""))
        self._patch()
        sys.addaudithook(self._audit)

    def send(self, word: str, content: object) -> None:
        """Send a message that needs no answer."""
        self._channel.send(pickle.dumps((word, content)))

    def stop(self, name: str, path: str, target: str = "", wait_s: float = 0.0) -> None:
        """Report an operation, and wait until the scheduler lets it go on."""
        if not self.is_open:
            return
        short = [_MARK.sub("open/MARK", text.removeprefix(self._folder)) for text in (path, target)]
        self._threads.stop(Operation(name, *short, wait_s), self._now_s + wait_s if wait_s else 0.0)

    def _ask(self, stopped: Mapping[str, tuple[object, float]]) -> str:
        """Report the operations of all stopped threads, and the times at which they wake; return the chosen thread."""
        if not stopped:
            stacks = ("".join(traceback.format_stack(frame)) for frame in sys._current_frames().values())
            self.send("end", "\n\n".join(["all threads wait for each other", *stacks]))
            os._exit(3)
        self.send("stop", dict(stopped))
        answer = self._channel.recv(_ANSWER.size)
        if not answer:
            # The scheduler has ended.
            os._exit(3)
        now_s, number = _ANSWER.unpack(answer)
        self.has_paused |= now_s > self._now_s + 10
        self._now_s = max(self._now_s, now_s)
        return [*stopped][number]

    def open(self) -> None:
        """Stop here, and from now on before each operation."""
        self.is_open = True
        self.stop("start", "")

    def _is_inside(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._folder)

    def _stop_at(self, name: str, *paths: object) -> None:
        if any(map(self._is_inside, paths)):
            first, target = [*(str(path) for path in paths), ""][:2]
            self.stop(name, first, target)

    def _stop_at_descriptor(self, name: str, descriptor: int) -> None:
        if self.is_open:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self._stop_at(name, path.removesuffix(" (deleted)"))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_open:
            return
        if event == "open":
            path, _, flags = arguments
            # Directories are opened to sync them, or to lock them.
            self._stop_at("create" if flags & os.O_CREAT else "open", path)
        elif event == "fcntl.flock":
            descriptor, flags = arguments
            kind = {fcntl.LOCK_EX: "lock", fcntl.LOCK_SH: "lock shared", fcntl.LOCK_UN: "unlock"}
            self._stop_at_descriptor(kind[flags & ~fcntl.LOCK_NB], descriptor)
        elif event in _AUDITED:
            name = _AUDITED[event]
            if isinstance(arguments[0], int):
                self._stop_at_descriptor(name, arguments[0])
            else:
                self._stop_at(name, *arguments[: 2 if name in ("rename", "link") else 1])

    def _patch(self) -> None:
        for function, name in _BY_DESCRIPTOR.items():
            setattr(os, function, self._by_descriptor(name, getattr(os, function)))
        for function in ("stat", "lstat"):
            setattr(os, function, self._by_path("stat", getattr(os, function)))
        os.urandom = self._dice.randbytes
        random.seed(self._dice.random())
        for function in ("monotonic", "perf_counter"):
            setattr(time, function, self._clock)
        time.time = lambda: EPOCH_S + self._clock()
        for function in ("time_ns", "monotonic_ns", "perf_counter_ns"):
            setattr(time, function, lambda: EPOCH_S * 10**9 + int(self._clock() * 1e9))
        time.sleep = self._sleep
        Catalog._transaction = self._transaction(Catalog._transaction)  # type: ignore[method-assign]  # this process
        for owner, function, name in _RING:
            setattr(owner, function, self._of_ring(name, getattr(owner, function)))

    def _by_descriptor(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stopping(descriptor: int, *arguments: object) -> object:
            self._stop_at_descriptor(name, descriptor)
            return function(descriptor, *arguments)

        return stopping

    def _by_path(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stopping(path: object, **options: object) -> object:
            if self.is_open:
                self._stop_at(name, path)
            return function(path, **options)

        return stopping

    def _of_ring(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stopping(ring: Ring | RingReader, *arguments: object) -> object:
            self.stop(name, str(ring.path))
            return function(ring, *arguments)

        return stopping

    def _transaction(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def stopping(catalog: Catalog, *, write: bool) -> Iterator[Transaction]:
            self.stop("begin write" if write else "begin read", str(catalog.path))
            with function(catalog, write=write) as transaction:
                yield transaction
                if write:
                    self.stop("commit", str(catalog.path))

        return stopping

    def _clock(self) -> float:
        self._now_s += _TICK_S
        return self._now_s

    def _sleep(self, seconds: float) -> None:
        if self.is_open:
            self.stop("sleep", "", wait_s=seconds)


def answer(now_s: float, number: int) -> bytes:
    """Return the message that lets a stopped thread of a process go on at a time [s]."""
    return _ANSWER.pack(now_s, number)


def received(channel: socket.socket) -> tuple[str, Any]:
    """Return the next message of a process."""
    message: tuple[str, Any] = pickle.loads(channel.recv(1 << 20) or _DEAD)
    return message


_DEAD = pickle.dumps(("end", "the process ended without a message"))
