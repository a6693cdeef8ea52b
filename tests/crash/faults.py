"""File operations that kill the process, or fail, at a chosen operation."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, cast

from asymcheck.storage.local_files import Files, translated
from asymcheck.storage.nvme.catalog import Transaction

CHANGES = (
    "open_new",
    "open_existing",
    "pwrite",
    "sync",
    "sync_directory",
    "truncate",
    "rename",
    "link",
    "unlink",
    "make_directory",
    "remove_directory",
)
"""Operations of :class:`Files` that write, or open for writing."""

LOOKS = ("open_read", "pread", "list")
"""Operations of :class:`Files` that only read."""

CATALOG_CHANGES = (
    "put_location",
    "put_pack",
    "put_pin",
    "put_manifest",
    "put_store_id",
    "delete",
)
"""Changes inside a catalog transaction, before it is committed."""

Watch = Callable[[str, Path], None]


def kill_this_process() -> NoReturn:
    """Kill this process as the out-of-memory killer would: no handler runs, and no data is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL does not return")


class WatchedFiles(Files):
    """Calls ``before`` with the name and the path of every operation before the operation."""

    def __init__(self, before: Watch) -> None:
        """Call ``before`` for every operation. If it raises, the operation does not happen."""
        self._before = before


def _watched(name: str) -> Callable[..., object]:
    """Return an operation that notifies with its path: its own, the source of a rename, or the target of a link."""
    parameters = list(inspect.signature(getattr(Files, name)).parameters)
    at = parameters.index("target" if name == "link" else "source" if name == "rename" else "path") - 1

    def method(self: WatchedFiles, *arguments: object) -> object:
        self._before(name, cast(Path, arguments[at]))
        return getattr(super(WatchedFiles, self), name)(*arguments)

    return method


for _name in (*CHANGES, *LOOKS):
    setattr(WatchedFiles, _name, _watched(_name))


class Counter:
    """Counts certain operations, and acts when the number is reached."""

    def __init__(
        self, operations: tuple[str, ...], at: int = 0, act: Callable[[str, Path], None] | None = None
    ) -> None:
        """Call ``act`` at the ``at``-th operation, from 1; with 0 never."""
        self.seen: list[str] = []
        """Names of the counted operations."""
        self._operations = operations
        self._at = at
        self._act = act
        self._lock = threading.Lock()

    def __call__(self, operation: str, path: Path) -> None:
        """Count one operation."""
        if operation in self._operations:
            with self._lock:
                self.seen.append(operation)
                reached = len(self.seen) == self._at
            if reached and self._act is not None:
                self._act(operation, path)


def refuse(number: int) -> Callable[[str, Path], None]:
    """Return a function that fails an operation with an ``errno``, as the operating system would."""

    def act(operation: str, path: Path) -> None:
        with translated(f"{operation} (injected)", path):
            raise OSError(number, os.strerror(number), str(path))

    return act


@contextlib.contextmanager
def watched_catalog(before: Watch) -> Iterator[None]:
    """Call ``before`` before every change inside a catalog transaction of this process."""
    originals = {name: getattr(Transaction, name) for name in CATALOG_CHANGES}

    def watch(name: str) -> Callable[..., None]:
        def method(self: Transaction, *arguments: object) -> None:
            before(name, Path())
            originals[name](self, *arguments)

        return method

    for name in CATALOG_CHANGES:
        setattr(Transaction, name, watch(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Transaction, name, original)
