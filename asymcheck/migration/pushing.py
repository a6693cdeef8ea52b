"""Pushing: checkpoints go to a remote location beside the training, as they become durable."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from asymcheck.errors import (
    AsymcheckError,
    ClosedStoreError,
    GivenUpError,
    InvalidInputError,
    RemoteUnreachableError,
    StorageError,
    UnreachableRemoteWarning,
    warn_user,
)
from asymcheck.migration.known import Known
from asymcheck.migration.prune_remote import RemotePruner
from asymcheck.migration.push import encoder_for, push
from asymcheck.pipeline.encoder import Encoder
from asymcheck.pipeline.manners import stand_back
from asymcheck.policies.pushing import Push, due, held
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteTier
from asymcheck.types import Checkpoint, CheckpointRef

_POLL_S = 0.5
_RETRY_S = 15.0
_GIVE_UP_S = 2.0


@dataclasses.dataclass(frozen=True)
class PushStatistics:
    """What pushing beside a training has done so far."""

    pushed: int = 0
    """Checkpoints that it has committed there."""
    backlog: int = 0
    """Checkpoints that are durable here, are to be pushed, and are not known to be there."""
    sent_bytes: int = 0
    """Payload bytes of the frames that were sent."""
    failures: int = 0
    """How often it failed; it tries again."""
    problem: str = ""
    """Why the last attempt failed; empty when it did not."""
    newest_step: int | None = None
    """The newest checkpoint on the line that is known to be there: what is left if this machine is lost now."""


class Pushing:
    """Pushes what a :class:`Push` chooses of a run, on a thread of its own. Close it, or use it in a ``with`` block.

    It never keeps the training waiting: a location that does not answer makes the backlog grow, and nothing else. The
    newest checkpoint goes first. One that is deleted here before its turn is not pushed.
    """

    def __init__(
        self, here: ReadTier, connect: Callable[[], RemoteTier], run: str, rules: Push, poll_s: float = _POLL_S
    ) -> None:
        """Push what ``rules`` choose of ``run`` from ``here`` to where ``connect`` leads; look every ``poll_s``."""
        self.rules = rules
        self._here = here
        self._connect = connect
        self._run = run
        self._poll_s = poll_s
        self._known = Known(here, run, metrics=rules.asks_for_metrics)
        self._there: RemoteTier | None = None
        self._encoder: Encoder | None = None
        self._pruner: RemotePruner | None = None
        self._sent: dict[str, Checkpoint] = {}
        self._hopeless: set[str] = set()
        self._sending: str | None = None
        self._newest: CheckpointRef | None = None
        self._now = PushStatistics()
        # One for what is known, which is asked on the thread that commits, too; never held while something is sent.
        self._looking = threading.Lock()
        self._turn = threading.Condition()
        self._begun = 0
        self._failure: Exception | None = None
        self._failed_in = 0
        self._is_called = False
        self._is_awaited = False
        self._closing = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="asymcheck-pushing", daemon=True)
        self._thread.start()

    def statistics(self) -> PushStatistics:
        """Return what it has done so far."""
        return self._now

    def look(self) -> None:
        """Count what waits, and send it soon. Called after a commit it makes the backlog true at once; never raises."""
        with contextlib.suppress(AsymcheckError):
            self._note(backlog=len(self._due()))
        self._call()

    def held(self) -> Mapping[str, str]:
        """Return the save ids that the retention of the store leaves alone, with the reasons. Speaks to nobody."""
        return held(self.rules, self._due(), self._sending)

    def failure(self) -> Exception | None:
        """Return why the last attempt failed; None when it did not."""
        return self._failure

    def wait(self) -> None:
        """Wait until all that is to be pushed now lies there.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: an attempt that began after the call has failed.
        """
        wanted = {one.save_id for one in self._due()}
        began = self._begun
        while wanted & {one.save_id for one in self._due()}:
            if not self._thread.is_alive():
                raise ClosedStoreError(f"run {self._run!r}: pushing to {self.rules.location} has ended")
            with self._turn:
                self._is_awaited = True
                self._turn.notify_all()
                self._turn.wait(_POLL_S)
                # One that was under way when it was called does not count.
                if self._failure is not None and self._failed_in > began:
                    raise self._failure

    def _call(self) -> None:
        with self._turn:
            self._is_called = True
            self._turn.notify_all()

    def _work(self) -> None:
        # What it starts inherits that: the threads that read, send and wait.
        stand_back()
        while not self._closing.is_set():
            failed = not self._round()
            if isinstance(self._failure, ClosedStoreError):
                return
            self._pause(failed=failed)
        # What became durable last.
        self._round()
        if self._there is not None:
            self._there.close()

    def _pause(self, *, failed: bool) -> None:
        with self._turn:
            # A commit does not cut the pause after a failure short: who has no answer now has none for each step.
            self._turn.wait_for(
                lambda: self._closing.is_set() or self._is_awaited or (self._is_called and not failed),
                _RETRY_S if failed else self._poll_s,
            )
            self._is_called = self._is_awaited = False

    def _round(self) -> bool:
        """Push what is due, the newest first; return False when that failed."""
        with self._turn:
            self._begun += 1
        failure: Exception | None = None
        try:
            while waiting := self._due():
                self._note(backlog=len(waiting))
                if self._there is None:
                    self._there = self._connected()
                    continue
                self._push(self._there, waiting[-1])
            self._note(backlog=0)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on, and the statistics say it
            failure = error
        with self._turn:
            self._failure, self._failed_in = failure, self._begun
            self._note_failure(failure)
            self._turn.notify_all()
        return failure is None

    def _due(self) -> list[Checkpoint]:
        with self._looking:
            here = self._known.look()
            there = self._there_by(here)
            self._newest = max((one.ref for one in there if one.on_line is not False), default=None)
            found = due(self.rules, here, there, time.time_ns())
            return [one for one in found if one.save_id not in self._hopeless]

    def _there_by(self, here: list[Checkpoint]) -> list[Checkpoint]:
        """Return what is there; whether it is on the line the store says, where training goes on."""
        own = {one.save_id: one for one in here}
        return [own.get(save_id, one) for save_id, one in self._sent.items()]

    def _connected(self) -> RemoteTier:
        there = self._connect()
        try:
            known = Known(there, self._run, metrics=self.rules.asks_for_metrics).look()
        except BaseException:
            there.close()
            raise
        with self._looking:
            self._sent.update((one.save_id, one) for one in known)
        self._encoder = encoder_for(there)
        if self.rules.keep is not None:
            self._pruner = RemotePruner(there, self._run, self.rules.keep)
        return there

    def _push(self, there: RemoteTier, one: Checkpoint) -> None:
        with self._looking:
            listing = self._known.listing(one)
            if listing is None:
                return
            self._sending = one.save_id
        try:
            moved = push(self._here, there, [listing], self._going_on, self._encoder)
        except (RemoteUnreachableError, StorageError, GivenUpError, InvalidInputError):
            # The last: another training has this name there. That is so of every checkpoint, until somebody mends it.
            raise
        except AsymcheckError:
            # Damaged here, or deleted meanwhile: another attempt would change nothing, and others have their turn.
            self._hopeless.add(one.save_id)
            if self._here.manifests.listing(self._run, one.ref).manifests:
                raise
        else:
            with self._looking:
                self._sent[one.save_id] = one
                self._newest = one.ref if self._newest is None else max(self._newest, one.ref)
            self._note(pushed=len(moved.committed), sent=moved.moved_bytes)
            if self._pruner is not None:
                self._pruner.prune(time.time_ns())
        finally:
            self._sending = None

    def _going_on(self, _done: int, _total: int) -> None:
        if self._stop.is_set():
            raise GivenUpError("the time for it at the end of the training was over")

    def _note(self, *, pushed: int = 0, backlog: int | None = None, sent: int = 0) -> None:
        now = self._now
        self._now = dataclasses.replace(
            now,
            pushed=now.pushed + pushed,
            backlog=now.backlog if backlog is None else backlog,
            sent_bytes=now.sent_bytes + sent,
            newest_step=None if self._newest is None else self._newest.step,
        )

    def _note_failure(self, failure: Exception | None) -> None:
        problem = "" if failure is None else f"{type(failure).__name__}: {failure}"
        failures = self._now.failures + (failure is not None)
        self._now = dataclasses.replace(self._now, failures=failures, problem=problem)

    def close(self, timeout_s: float | None = None) -> PushStatistics:
        """Push what is left, once, and end; return what was done in all. Closing twice is no error.

        Args:
            timeout_s: give up after so many seconds; None for ``close_s`` of the rules. What is left behind is sent by
                the next one that pushes this store there; what was sent of it is not sent again.

        Warns:
            UnreachableRemoteWarning: checkpoints are left that are not there.
        """
        first = not self._closing.is_set()
        self._closing.set()
        self._call()
        self._thread.join(self.rules.close_s if timeout_s is None else timeout_s)
        if self._thread.is_alive():
            self._stop.set()
            # One that waits for an answer ends with its deadline, or with the process.
            self._thread.join(_GIVE_UP_S)
        now = self._now
        if first and (now.backlog or now.problem):
            warn_user(
                f"run {self._run!r}: {now.backlog} checkpoints were not pushed to {self.rules.location} "
                f"({now.problem or 'no time was left'}); the next training that pushes there sends them, or asymcheck "
                "push --all does",
                UnreachableRemoteWarning,
            )
        return now

    def __enter__(self) -> Pushing:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; when the block failed, a warning must not hide why."""
        with contextlib.suppress(UnreachableRemoteWarning) if error is not None else contextlib.nullcontext():
            self.close()
