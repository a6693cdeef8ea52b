"""Lock of a run, so that only one training at a time continues it (SPEC.md §B2)."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from asymcheck.errors import RunInUseError, StructureError
from asymcheck.format import layout
from asymcheck.format.catalog_records import owner_from_json
from asymcheck.storage import process_identity
from asymcheck.storage.local_files import DESCRIPTORS, Files, create_locked, is_same_file, locked
from asymcheck.storage.nvme.manifests import removed_store
from asymcheck.types import Owner

_logger = logging.getLogger(__name__)
_POLL_S = 0.05
_BYTES_MAX = 4096
_NS_MAX = 1 << 63


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Process that trains a run."""

    owner: Owner
    host: str
    started_ns: int
    """Time at which it took the lock [ns since 1970 UTC]."""

    @classmethod
    def this(cls) -> Trainer:
        """Return the calling process."""
        return cls(process_identity.this_process(), socket.gethostname(), time.time_ns())

    def encode(self, **facts: str | int | None) -> bytes:
        """Return the content of a lock file, or of a lease with further ``facts``."""
        entry = {**dataclasses.asdict(self.owner), "host": self.host, "started_ns": self.started_ns, **facts}
        return json.dumps(entry).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Trainer | None:
        """Return the trainer that a lock file or a lease names; None if the content cannot be read."""
        try:
            entry = json.loads(data or b"")
            trainer = cls(owner_from_json(entry, "trainer"), str(entry["host"]), int(entry["started_ns"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, StructureError):
            return None
        # A hostile lease may have a time without a date, or a host name that controls the terminal.
        return trainer if trainer.host.isprintable() and 0 <= trainer.started_ns < _NS_MAX else None

    def __str__(self) -> str:
        """Return process, host and start for a message."""
        if self.owner == process_identity.this_process():
            return "another Checkpointer of this process"
        start = dt.datetime.fromtimestamp(self.started_ns / 1e9, dt.timezone.utc)
        return f"{process_identity.describe(self.owner)} on host {self.host} since {start:%Y-%m-%d %H:%M:%S} UTC"


class RunLock:
    """Lock of one run, held until :meth:`close` or the end of the process."""

    def __init__(self, files: Files, root: Path, run: str, last_step: Callable[[], int | None]) -> None:
        """Prepare the lock of ``run`` in the store at ``root``; :meth:`take` takes it.

        ``last_step`` returns the step of the newest checkpoint, for messages.
        """
        self._files = files
        self._last_step = last_step
        self._run = run
        self._root = root
        self._path = root / layout.LOCKS / layout.lock_name(run)
        self._descriptor: int | None = None

    def take(self, timeout_s: float, *, takeover: bool) -> None:
        """Take the lock. The lock of a dead process, and of this process, is taken over at once.

        Wait up to ``timeout_s`` seconds for a living process. With ``takeover``, take the lock over from it at once.

        Raises:
            RunInUseError: another process trains the run.
            StorageError: the directory of the store is gone.
        """
        if self._descriptor is not None and is_same_file(self._descriptor, self._path):
            return
        try:
            self._files.make_directory(self._path.parent)
            self._wait(timeout_s, takeover=takeover)
        except FileNotFoundError as error:
            raise removed_store(self._root) from error

    def _wait(self, timeout_s: float, *, takeover: bool) -> None:
        deadline = time.monotonic() + timeout_s
        is_logged = False
        while True:
            # Otherwise, a training that holds the file of a dead one to replace it looks like a leftover of that one.
            with locked(self._files.open_read, self._path.parent) as alone, locked(self._open, self._path) as free:
                trainer = self._trainer()
                if alone is not None and (free is not None or takeover or _may_replace(trainer)):
                    self._replace()
                    return
            if time.monotonic() >= deadline:
                raise RunInUseError(self._run, str(trainer or "another process"), self._last_step())
            if alone is not None and not is_logged:
                _logger.warning("run %s is in use by %s; waiting up to %g s", self._run, trainer, timeout_s)
                is_logged = True
            time.sleep(_POLL_S)

    def _open(self, path: Path) -> int:
        # The file may belong to another user, and is only locked, not written.
        try:
            return self._files.open_read(path)
        except FileNotFoundError:
            return self._files.open_lock(path)

    def _replace(self) -> None:
        """Replace the file by a new, locked one. A trainer that holds the old file notices in :meth:`check`."""
        temporary = self._path.with_name(f"{os.urandom(8).hex()}{layout.TEMPORARY}")
        descriptor = create_locked(self._files, temporary)
        try:
            self._files.pwrite(descriptor, [memoryview(Trainer.this().encode())], 0, temporary)
            self._files.rename(temporary, self._path)
        except BaseException:
            self._files.unlink(temporary)
            DESCRIPTORS.close(descriptor)
            raise
        # Not before the wait: if the wait fails, check() must still notice that the run was taken over.
        self.close()
        self._descriptor = descriptor

    def check(self) -> None:
        """Raise if another training has taken the run over. A removed lock file is no reason.

        Raises:
            RunInUseError: another training trains the run now.
        """
        descriptor = self._descriptor
        # XFS refuses every access after an error of its drive. The next save reports that.
        with contextlib.suppress(OSError):
            if descriptor is not None and not is_same_file(descriptor, self._path) and self._path.exists():
                trainer = str(self._trainer() or "another process")
                raise RunInUseError(self._run, trainer, self._last_step(), taken_over=True)

    def _trainer(self) -> Trainer | None:
        return Trainer.decode(self._files.read_small(self._path, _BYTES_MAX))

    def close(self) -> None:
        """Release the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            DESCRIPTORS.close(descriptor)


def _may_replace(trainer: Trainer | None) -> bool:
    """Tell whether a locked file belongs to this process, or only to a descriptor that outlived its process."""
    if trainer is None:
        return False
    return trainer.owner == process_identity.this_process() or process_identity.has_ended(trainer.owner)
