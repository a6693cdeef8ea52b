"""Lease of a run at a remote location, so that only one training at a time continues the run (SPEC.md §C7)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from asymcheck.config import RemoteConfig
from asymcheck.errors import AsymcheckError, RunInUseError
from asymcheck.format import layout
from asymcheck.storage import process_identity
from asymcheck.storage.nvme.run_lock import Trainer
from asymcheck.storage.remote import RemoteLocation
from asymcheck.storage.remote.remote_files import RemoteFiles
from asymcheck.storage.remote.tier import lost_location

_BYTES_MAX = 4096
_POLL_S = 1.0
_RELEASE_S = 2.0
"""Seconds that a release may take. A lease that stays ends by itself."""

LeasePhase = Literal["none", "undecided", "watching", "unguarded", "held", "refused", "lost"]


@dataclasses.dataclass(frozen=True)
class LeaseClaim:
    """Request of a training for the lease of its run."""

    trainer: Trainer
    """The process that trains. Another process may push, and renew the lease."""
    store_id: str
    """Id of the store of the training, in hexadecimal digits."""
    folder: str
    """Device and inode of the directory of the store. A copy of the store has the same id in another directory."""
    token: str
    """Random name of this claim."""
    takeover: bool
    """Whether to take the run over from a living training."""
    was_held: bool = False
    """Whether an earlier process that pushed has held the lease for this claim."""


@dataclasses.dataclass(frozen=True)
class LeaseStatus:
    """State of a claim."""

    phase: LeasePhase = "none"
    """none: not claimed; unguarded: nothing to guard yet, or ``problem``; lost: another training took the run over."""
    token: str = ""
    """Token of the claim."""
    other: Trainer | None = None
    """Training that holds the lease; None if unknown."""
    last_step: int | None = None
    """Step of the newest checkpoint of that training."""
    until: float = 0.0
    """While watching: time on the monotonic clock at which a silent holder counts as dead."""
    problem: str = ""
    """Reason why the lease could not be taken."""

    @property
    def is_decided(self) -> bool:
        """Whether the training may begin, or must not."""
        return self.phase not in ("undecided", "watching")

    @property
    def is_taken(self) -> bool:
        """Whether another training holds the lease."""
        return self.phase in ("refused", "lost")

    def check(self, run: str, remote: str) -> None:
        """Raise if another training holds the lease of ``run`` at ``remote``.

        Raises:
            RunInUseError: another training trains the run, or has taken it over.
        """
        if self.is_taken:
            trainer = f"{self.other or 'another process'}, which pushes to {remote}"
            raise RunInUseError(run, trainer, self.last_step, taken_over=self.phase == "lost")


class _Lease(NamedTuple):
    """Content of a lease file. A lease that cannot be read has no trainer and no token."""

    trainer: Trainer | None
    token: str
    store: tuple[str, str]  # id and folder
    last_step: int | None

    @classmethod
    def decode(cls, data: bytes | None) -> _Lease:
        trainer = Trainer.decode(data)
        if trainer is None:
            return cls(None, "", ("", ""), None)
        entry = json.loads(data or b"")
        step = entry.get("last_step")
        store = str(entry.get("store_id")), str(entry.get("folder"))
        return cls(trainer, str(entry.get("token")), store, step if type(step) is int else None)


class RunLease:
    """Lease of one run. A thread takes and renews the lease until :meth:`close`, or until another training has it."""

    def __init__(
        self,
        location: RemoteLocation,
        config: RemoteConfig,
        run: str,
        claim: LeaseClaim,
        last_step: Callable[[], int | None],
        report: Callable[[LeaseStatus], None],
    ) -> None:
        """Begin to take the lease of ``run``. The thread calls ``last_step`` for each lease, and ``report``."""
        self._location, self._config, self._run, self._claim = location, config, run, claim
        self._last_step, self._report = last_step, report
        self._files: RemoteFiles | None = None
        self._status = LeaseStatus("undecided", claim.token)
        self._watched = self._own = 0
        self._renewed = time.monotonic()
        self._ended = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name="asymcheck-lease", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Stop renewing the lease, which ends by itself."""
        self._is_abandoned = True
        self._ended.set()

    def close(self) -> None:
        """Release the lease."""
        self._ended.set()
        self._thread.join(_RELEASE_S)

    def _work(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            try:
                self._advance()
            except AsymcheckError as error:
                # A holder could not renew its lease during an outage, so a newcomer starts its watch again.
                self._watched = 0
                if self._status.phase != "held":
                    self._note("unguarded", problem=str(error))
            if self._status.is_taken:
                return
            pause_s = self._config.lease_s / 3
            if not self._status.is_decided:
                pause_s = min(_POLL_S, pause_s / 3)
        if self._own and self._files is not None and not self._is_abandoned:
            with contextlib.suppress(AsymcheckError):
                self._files.delete(self._folder(self._files) / layout.lease_name(self._own))

    def _advance(self) -> None:
        """Take, renew or watch the lease, as its present holder requires."""
        files = self._files = self._files or RemoteFiles(self._location, self._config)
        numbers = [number for name in files.list(self._folder(files)) if (number := layout.parse_lease_name(name))]
        newest = max(numbers, default=0)
        path = self._folder(files) / layout.lease_name(newest)
        lease = _Lease.decode(files.read_small(path, _BYTES_MAX) if newest else None)
        now = time.monotonic()
        was_held = bool(self._own) or self._claim.was_held
        if not newest and not self._has_run(files):
            if was_held:
                # A mount point without its file system looks empty. A lease there would be on another drive.
                raise lost_location(self._location)
            self._note("unguarded")
            return
        if lease.token != self._claim.token and was_held:
            # A lease that was removed by hand is no reason to end a training.
            if newest or now - self._renewed > self._config.lease_s:
                self._note("lost", lease)
                return
        elif newest and not self._may_replace(lease):
            if newest != self._watched:
                is_alive, self._watched = self._watched > 0, newest
                self._note("refused" if is_alive else "watching", lease, until=now + self._config.lease_s)
            if self._status.is_taken or now < self._status.until:
                return
        self._publish(files, newest + 1, numbers)

    def _has_run(self, files: RemoteFiles) -> bool:
        return any(files.list(files.top / folder / self._run) for folder in (layout.MANIFESTS, layout.HEADS))

    def _may_replace(self, lease: _Lease) -> bool:
        """Tell whether a lease needs no watch: its training is dead, or this one excludes it in another way."""
        claim, trainer = self._claim, lease.trainer
        if claim.takeover or lease.token == claim.token:
            return True
        if trainer is None or not process_identity.is_of_this_boot(trainer.owner):
            return False
        # The claim follows the lock of the store, so a training of the same store has ended, and pushes the rest.
        is_excluded = lease.store == (claim.store_id, claim.folder) or trainer.owner == claim.trainer.owner
        return is_excluded or process_identity.is_dead(trainer.owner)

    def _publish(self, files: RemoteFiles, number: int, older: list[int]) -> None:
        """Publish a lease. If another training has published this number, the next look finds it."""
        claim = self._claim
        facts = {"run": self._run, "store_id": claim.store_id, "folder": claim.folder, "token": claim.token}
        data = claim.trainer.encode(**facts, last_step=self._last_step())
        path = self._folder(files) / layout.lease_name(number)
        # A process may be stopped during the upload, so the time before the upload counts.
        began = time.monotonic()
        if not files.put_small(path, data, event="remote.lease_closed"):
            return
        self._own, self._renewed = number, began
        if self._status.phase != "held":
            self._note("held")
        for old in older:
            files.delete(path.with_name(layout.lease_name(old)))

    def _folder(self, files: RemoteFiles) -> PurePosixPath:
        return files.top / layout.LOCKS / self._run

    def _note(self, phase: LeasePhase, lease: _Lease | None = None, *, until: float = 0.0, problem: str = "") -> None:
        other, last_step = (None, None) if lease is None else (lease.trainer, lease.last_step)
        self._status = LeaseStatus(phase, self._claim.token, other, last_step, until, problem)
        if not self._ended.is_set():
            self._report(self._status)
