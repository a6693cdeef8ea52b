"""Pushing on a thread of its own, in this process."""

from __future__ import annotations

import contextlib
import threading
import time

from asymcheck.commit.encoder import Encoder
from asymcheck.errors import (
    AsymcheckError,
    ClosedStoreError,
    FormatError,
    GivenUpError,
    HeadRecordError,
    InconsistentCheckpointError,
    RecoveryError,
)
from asymcheck.events import Detail, timed
from asymcheck.executor import stand_back
from asymcheck.replication.background_push import SO_IS_ALL, PushJob, PushWorker, add_damaged
from asymcheck.replication.checkpoint_cache import CheckpointCache, RemotePresence
from asymcheck.replication.collect_remote import RemotePruner
from asymcheck.replication.cross_node_dedup import SentParts, begun_first
from asymcheck.replication.push import encoder_for, publish_heads, push
from asymcheck.replication.transfer_stats import Moved, PushStatistics
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.types import Checkpoint, CheckpointRef

RETRY_S = 15.0
"""Seconds between a failure and the next attempt."""
GIVE_UP_S = 2.0
"""Seconds that an upload has to end after it was given up."""
_WAIT_S = 0.5
_LOOKED_AT = 64
"""About so many manifests of those that are there by name are read, the newest: a push that was killed left one."""


class PushThread(PushWorker):
    """Pushes on a thread of its own, in this process."""

    def __init__(self, here: ReadTier, order: PushJob) -> None:
        """Push from ``here`` as ``order`` says."""
        super().__init__(here, order)
        self._here = here
        self._there: RemoteTier | None = None
        self._encoder: Encoder | None = None
        self._pruner: RemotePruner | None = None
        # Found there by name: whether they are whole is still to be seen.
        self._claimed: dict[str, CheckpointFiles] = {}
        self._heads: list[int] | None = None
        # Why some of those that are to be pushed cannot be.
        self._damaged: list[str] = []
        self.is_well = False
        """Whether the last round has done what there was to do, and nothing was in its way."""
        self._newest: CheckpointRef | None = None
        self._parts = SentParts(order.run)
        self._now = PushStatistics()
        # For what is known, which is asked on the thread that commits, too; never held while something is sent.
        self._looking = self.queue.lock
        self._begun = self._failed_in = 0
        self._untidy: Exception | None = None
        self._is_called = self._is_awaited = False
        self._closing, self._stop = threading.Event(), threading.Event()
        self._thread.start()

    def statistics(self) -> PushStatistics:
        """Return what it has done so far."""
        return self._now

    def look(self) -> None:
        """Count what waits, and send it soon; see :meth:`PushWorker.look`."""
        with contextlib.suppress(AsymcheckError):
            self._note(backlog=len(self._due()))
        self._call()

    @property
    def is_connected(self) -> bool:
        """Whether it has listed the location."""
        return self._there is not None

    def wait(self) -> None:
        """Wait until all that is to be pushed now lies there; see :meth:`PushWorker.wait`."""
        with self._looking:
            # They may have been repaired. An attempt that is under way notes what it finds in the old one.
            self.queue.damaged = {}
        wanted = self._unsure()
        began = self._begun
        while wanted & self._unsure():
            if not self._thread.is_alive():
                raise ClosedStoreError(f"run {self._run!r}: pushing to {self.rules.remote} has ended")
            with self._turn:
                self._is_awaited = True
                self._turn.notify_all()
                self._turn.wait(_WAIT_S)
                # One that was under way when it was called does not count.
                if self._failure is not None and self._failed_in > began:
                    raise self._failure
        if self._damaged:
            raise InconsistentCheckpointError(
                f"run {self._run!r}: not pushed to {self.rules.remote}, because they are damaged here; run asymcheck "
                "verify --repair, or delete them:",
                self._damaged,
            )

    def _unsure(self) -> set[str]:
        """Return what is to be pushed and is not known to be there."""
        with self._looking:
            return {one.save_id for one in self._due()} | self._claimed.keys()

    def _call(self) -> None:
        with self._turn:
            self._is_called = True
            self._turn.notify_all()

    def _work(self) -> None:
        # What it starts inherits that: the threads that read, send and wait.
        stand_back()
        try:
            while not self._closing.is_set():
                failed = not self._round()
                if isinstance(self._failure, ClosedStoreError):
                    return
                self._pause(failed=failed)
            # What became durable last.
            self._round()
        finally:
            if self._there is not None:
                self._there.close()

    def _pause(self, *, failed: bool) -> None:
        with self._turn:
            # A commit does not cut the pause after a failure short: who has no answer now has none for each step.
            self._turn.wait_for(
                lambda: self._closing.is_set() or self._is_awaited or (self._is_called and not failed),
                RETRY_S if failed else self._order.poll_s,
            )
            self._is_called = self._is_awaited = False

    def _round(self) -> bool:
        """Push what is due, the newest first, each once; return False when one of them failed."""
        with self._turn:
            self._begun += 1
        tried: set[str] = set()
        failed = False
        try:
            while (one := self._next(tried)) is not None or self._claimed:
                if self._there is None:
                    self._there = self._connected()
                elif one is None:
                    self._look_again(self._there)
                else:
                    tried.add(one.save_id)
                    failed |= not self._try(self._there, one)
            if self._there is not None:
                self._push_heads(self._there)
                self._parts.look(self._there)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on, and the statistics say it
            self._fail(error)
            failed = True
        with self._turn:
            self.is_well = not failed
            if not failed:
                self._failure = None
            self._note()
            self._turn.notify_all()
        return not failed

    def _next(self, tried: set[str]) -> Checkpoint | None:
        waiting = self._due()
        self._note(backlog=len(waiting))
        left = [one for one in reversed(waiting) if one.save_id not in tried]
        if self._there is not None and not all(map(self._is_whole, left)):
            left = begun_first(self._there, self._run, left)
        return next(iter(left), None)

    def _is_whole(self, one: Checkpoint) -> bool:
        listing = self.queue.known.listing(one)
        return listing is None or listing.is_whole

    def _try(self, there: RemoteTier, one: Checkpoint) -> bool:
        """Push one; return False when it failed for a reason that another one may not have."""
        try:
            self._push(there, one)
        except SO_IS_ALL:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others have their turn
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        with self._turn:
            self._failure, self._failed_in = error, self._begun
            self._note(failures=1)
            self._turn.notify_all()

    def _due(self) -> list[Checkpoint]:
        with self._looking:
            found = self.queue.look()
            whole = [one for one in found.there if one.on_line is not False and one.ref not in self._parts]
            self._newest = max((one.ref for one in whole), default=None)
            self._damaged = found.damaged
            return found.due

    def _connected(self) -> RemoteTier:
        there = RemoteTier(parse_location(self.rules.remote), self._order.config, create=True)
        try:
            known = CheckpointCache(there, self._run, metrics=self.rules.asks_for_metrics)
            found = known.look()
            with self._looking:
                self.queue.generation = known.generation
                here = {one.save_id for one in self.queue.known.look()}
                self.queue.sent.update((one.save_id, one) for one in found)
                count = 0
                for one in reversed([one for one in found if one.save_id in here]):
                    listing = known.listing(one)
                    if listing is not None and count < _LOOKED_AT:
                        count += len(listing.manifests)
                        self._claimed[one.save_id] = listing
        except BaseException:
            there.close()
            raise
        self._encoder = encoder_for(there)
        if self.rules.keep is not None and self._order.prunes:
            self._pruner = RemotePruner(there, self._run, self.rules.keep)
        return there

    def _look_again(self, there: RemoteTier) -> None:
        """See whether those that were there by name are whole; one that is not is to be sent."""
        present = RemotePresence(there)
        while self._claimed:
            save_id = next(iter(self._claimed))
            self._going_on(0, 0)
            is_whole = present.has(self._claimed[save_id])
            with self._looking:
                if not is_whole:
                    self.queue.sent.pop(save_id, None)
                del self._claimed[save_id]

    def _push_heads(self, there: RemoteTier) -> None:
        """Let the location know the line also when no checkpoint goes there: training may have gone back."""
        heads = self._here.manifests.heads(self._run)
        if heads != self._heads:
            publish_heads(self._here, there, self._run)
            self._heads = heads

    def _push(self, there: RemoteTier, one: Checkpoint) -> None:
        with self._looking:
            listing = self.queue.known.listing(one)
            if listing is None:
                return
            self.sending = one.save_id
        damaged = self.queue.damaged
        try:
            moved = self._copy(there, one, listing)
        except HeadRecordError:
            raise
        except (FormatError, RecoveryError) as error:
            # One that was deleted meanwhile is due no more.
            if self._here.manifests.listing(self._run, one.ref).manifests:
                add_damaged(damaged, one, error)
                self._note(failures=1)
        else:
            with self._looking:
                self.queue.sent[one.save_id] = one
                if not listing.is_whole:
                    self._parts.add(one.ref)
                elif self._newest is None or self._newest < one.ref:
                    self._newest = one.ref
            self._note(pushed=len(moved.committed), sent=moved.moved_bytes)
            self._tidy()
        finally:
            self.sending = None

    def _copy(self, there: RemoteTier, one: Checkpoint, listing: CheckpointFiles) -> Moved:
        moved: Moved | None = None

        def about() -> Detail:
            sent = 0 if moved is None else moved.moved_bytes
            what = {"location": str(there.location), "run": self._run, "save": one.save_id}
            return {**what, "step": one.step, "sent": sent}

        with timed("push", 0, about):
            moved = push(self._here, there, [listing], self._going_on, self._encoder)
        return moved

    def _tidy(self) -> None:
        """Remove checkpoints at the location that are not kept. A failure does not block uploads."""
        if self._pruner is None:
            return
        try:
            self._pruner.prune(time.time_ns())
        except AsymcheckError as error:
            self._untidy = error
        else:
            self._untidy = self._pruner.failure

    def _going_on(self, _done: int, _total: int) -> None:
        if self._stop.is_set():
            raise GivenUpError("the time for it at the end of the training was over")

    def _note(self, *, pushed: int = 0, backlog: int | None = None, sent: int = 0, failures: int = 0) -> None:
        with self._turn:
            now = self._now
            self._now = PushStatistics(
                pushed=now.pushed + pushed,
                backlog=now.backlog if backlog is None else backlog,
                damaged=len(self._damaged),
                sent_bytes=now.sent_bytes + sent,
                failures=now.failures + failures,
                problem=self._problem(),
                newest_step=None if self._newest is None else self._newest.step,
            )

    def _problem(self) -> str:
        if self._failure is None and self._damaged:
            return f"damaged here: {self._damaged[-1]}"
        problem = self._failure or self._untidy
        return self._parts.late() if problem is None else f"{type(problem).__name__}: {problem}"

    def _end(self, limit_s: float | None) -> bool:
        first = not self._closing.is_set()
        self.close_in(limit_s)
        return first

    def close_in(self, limit_s: float | None) -> None:
        """End, in so many seconds, or None for as long as it takes; what is left is not told."""
        self._closing.set()
        self._call()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._stop.set()
            # One that waits for an answer ends with its deadline, or with the process.
            self._thread.join(GIVE_UP_S)
