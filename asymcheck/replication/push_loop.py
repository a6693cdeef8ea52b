"""The push loop, which pushes the checkpoints of a run as they become durable.

``asymcheck push --follow`` runs the loop, and so does the child process of a training
(:mod:`asymcheck.replication.background_push`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from asymcheck.commit.encoder import Encoder
from asymcheck.errors import (
    INCONCLUSIVE,
    AsymcheckError,
    ClosedStoreError,
    ForkedStoreError,
    FormatError,
    GivenUpError,
    HeadRecordError,
    InconsistentCheckpointError,
    InvalidInputError,
    OutOfSpaceError,
    RecoveryError,
    RunInUseError,
)
from asymcheck.events import Detail, Interval, timed, watch
from asymcheck.executor import NICE, begin
from asymcheck.policies.push_selection import Push, due
from asymcheck.policies.retention import Retention
from asymcheck.replication.checkpoint_cache import CheckpointCache, RemotePresence
from asymcheck.replication.collect_remote import RemotePruner
from asymcheck.replication.cross_node_dedup import SentParts
from asymcheck.replication.head_records import publish_heads
from asymcheck.replication.push import encoder_for, open_location, push
from asymcheck.replication.push_status import Failure, Mailbox, PushJob, PushRequest, PushStatus, decoded
from asymcheck.replication.run_lease import LeaseStatus, RunLease
from asymcheck.replication.transfer_stats import Moved
from asymcheck.storage import damaged_frames
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteTier, is_uri, parse_location
from asymcheck.types import Checkpoint, CheckpointRef, PackId

RETRY_S = 15.0
"""Seconds between a failure and the next attempt."""
GIVE_UP_S = 2.0
"""Seconds that a cancelled upload has to end."""
DAMAGED_RETRY_S = 600.0
"""Seconds until a damaged checkpoint is tried again, because a repair is not announced."""

_WAIT_S = 0.5
_WATCH_S = 5.0
"""Seconds between two looks, during an upload, for checkpoints that other machines have begun."""
_TICK_S = 0.05
_INTERVALS = 32
_WAITING = 256
_VERIFIED_MANIFESTS = 64
"""Approximate number of manifests, newest first, that are verified at the start: a killed push may have left one."""
_BLOCKING_ERRORS = (
    *(*INCONCLUSIVE, OutOfSpaceError, ClosedStoreError, ForkedStoreError),
    *(GivenUpError, HeadRecordError, InvalidInputError, RunInUseError),
)
"""Errors that every other checkpoint would raise as well. InvalidInputError: another training has the run name."""


class PushLoop:
    """Loop that pushes the checkpoints of one run that a :class:`Push` selects, newest first.

    One thread runs the loop; others read its :meth:`status` and :meth:`apply` requests. A checkpoint that was deleted
    before its upload is not pushed.
    """

    def __init__(self, local: ReadTier, job: PushJob) -> None:
        self._local, self._job, self._rules, self._run = local, job, job.rules, job.run
        self._known = CheckpointCache(local, job.run, metrics=job.rules.asks_for_metrics)
        self._remote: RemoteTier | None = None
        self._encoder: Encoder | None = None
        self._pruner: RemotePruner | None = None
        self._lease: RunLease | None = None
        self._heads: list[int] | None = None
        self._parts = SentParts(job.run)
        self.moved = Moved(job.rules.remote)
        """Sum of the uploads so far."""
        # Guards all that follows. Never held while the location is asked, so that requests are applied at once.
        self._turn = threading.Condition()
        self._request = PushRequest()
        self._status = job.before
        # Checkpoints that are or were at the location, by save id, and its newest generation when it was listed.
        self._sent: dict[str, Checkpoint] = {}
        self._generation = 0
        # Sent checkpoints that the retention of the location has deleted.
        self._pruned: set[str] = set()
        # Checkpoints of earlier listings that had to be pushed, and the first one that was deleted before.
        self._awaited: list[Checkpoint] = []
        self._missed: Checkpoint | None = None
        # Listed at the location, but not verified yet.
        self._unverified: dict[str, CheckpointFiles] = {}
        # Reasons why checkpoints cannot be read, and the times of the next attempts on the monotonic clock.
        self._damaged: dict[str, tuple[str, float]] = {}
        self._reasons: list[str] = []
        self._failure = job.before.failure
        self._prune_failure: Failure | None = None
        self._ended: Interval | None = None
        # Whether no further upload begins.
        self.is_ending = False
        # Time on the monotonic clock after which no upload goes on.
        self._cancelled_at = math.inf
        # Checkpoint whose upload is to be cancelled.
        self._dropped: str | None = None

    def apply(self, request: PushRequest) -> None:
        """Apply the present request of the training."""
        for pack_id, offset in request.damaged:
            damaged_frames.note(PackId(bytes.fromhex(pack_id)), offset)
        claim = request.claim
        if claim is not None and claim.token != self._status.lease.token:
            if self._lease is not None:
                self._lease.close()
            self._note_lease(LeaseStatus("undecided", claim.token))
            location, config = parse_location(self._rules.remote), self._job.config.remote
            self._lease = RunLease(location, config, self._run, claim, self._last_step, self._note_lease)
        with self._turn:
            is_awaited = request.waits > self._request.waits
            self._request = request
            if request.is_closing and request.close_s is not None:
                self._cancelled_at = min(self._cancelled_at, time.monotonic() + request.close_s)
            if is_awaited:
                # Damaged checkpoints may have been repaired. A running attempt adds its findings to the old mapping.
                self._damaged = {}
            self._turn.notify_all()
            with contextlib.suppress(AsymcheckError):
                first = self._due()[-1:]
                if request.sends_newest and first and first[0].save_id != self._status.sending:
                    self._dropped = self._status.sending

    def _last_step(self) -> int | None:
        with self._turn:
            newest = max((checkpoint.ref for checkpoint in self._known.refresh()), default=None)
        return None if newest is None else newest.step

    def _note_lease(self, lease: LeaseStatus) -> None:
        self._change(lease=lease)

    def end(self) -> None:
        """Finish the checkpoint that is being uploaded, begin no other, and end. A second call cancels the upload.

        The lease is not renewed any more, and ends by itself.
        """
        if self.is_ending:
            self._cancelled_at = min(self._cancelled_at, time.monotonic())
        self.is_ending = True
        if self._lease is not None:
            self._lease.abandon()
        self._change()

    @property
    def is_overdue(self) -> bool:
        """Whether a cancelled upload does not end: its thread waits for a response."""
        return time.monotonic() > self._cancelled_at + GIVE_UP_S

    def status(self) -> PushStatus:
        """Return the present state."""
        return self._status

    def _change(self, **changes: object) -> None:
        with self._turn:
            self._status = dataclasses.replace(self._status, **changes)  # type: ignore[arg-type]  # fields of the status
            self._turn.notify_all()

    def _note(self, **changes: float | None) -> None:
        """Set fields of the statistics."""
        with self._turn:
            statistics = dataclasses.replace(self._status.statistics, problem=self._problem(), **changes)  # type: ignore[arg-type]  # as named
            self._change(statistics=statistics)

    def _problem(self) -> str:
        if self._failure is None and self._reasons:
            return f"damaged checkpoint: {self._reasons[-1]}"
        problem = self._failure or self._prune_failure
        if problem is None and self._missed is not None:
            return (
                f"step {self._missed.step} was deleted from the store before it was pushed, and maybe later steps, "
                "because saves are faster than pushes. Choose a greater Push(every=…), or a greater Push(hold=…)"
            )
        return self._parts.late() if problem is None else str(problem)

    def add_interval(self, interval: Interval) -> None:
        """Keep an interval for the training. Intervals of single frames are dropped, as there may be thousands."""
        if interval.name == "push":
            # Shown together with the backlog after it.
            self._ended = dataclasses.replace(interval, thread=os.getpid())

    def _end_upload(self) -> None:
        with self._turn:
            ended, self._ended = self._ended, None
            now = self._status
            new = () if ended is None else (ended,)
            self._change(
                sending=None,
                statistics=now.statistics.between_uploads(),
                traced=now.traced + len(new),
                intervals=(*now.intervals, *new)[-_INTERVALS:],
            )

    def run(self) -> None:
        """Push until the request of the training, or :meth:`end`, ends the loop."""
        try:
            while not self._request.is_closing and not self.is_ending:
                before = self._request
                self._pause(before, is_well=self._round())
            # The last checkpoints may have become durable in the meantime.
            self._round()
        finally:
            if self._lease is not None:
                self._lease.close()
            if self._remote is not None:
                self._remote.close()

    def _pause(self, before: PushRequest, *, is_well: bool) -> None:
        """Wait after a round that began with the request ``before``."""

        def is_wanted() -> bool:
            now = self._request
            # A commit does not end the pause after a failure: an unreachable location is not tried at every step.
            is_commit = is_well and now is not before
            return is_commit or now.waits > before.waits or now.is_closing or self.is_ending

        with self._turn:
            self._turn.wait_for(is_wanted, self._job.poll_s if is_well else RETRY_S)

    def _round(self) -> bool:
        """Try each due checkpoint once, newest first, and answer the waits so far; return False after a failure."""
        waits = self._request.waits
        tried: set[str] = set()
        failed = False
        try:
            self._await_turn()
            while not self.is_ending and ((checkpoint := self._next(tried)) or self._unverified):
                if self._remote is None:
                    self._remote = self._connect()
                    self._change(is_connected=True)
                elif checkpoint is None:
                    self._verify_remote(self._remote)
                else:
                    tried.add(checkpoint.save_id)
                    failed |= not self._try(self._remote, checkpoint)
                    # While saves are faster than pushes, this round does not end.
                    self._failure = self._failure if failed else None
                    self._parts.refresh(self._remote)
            if self._remote is not None and not self.is_ending:
                self._push_heads(self._remote)
                self._parts.refresh(self._remote)
        except Exception as error:  # noqa: BLE001 - training must go on; the statistics report the error
            self._fail(error)
            failed = True
            if isinstance(error, OutOfSpaceError):
                # Otherwise a location that is full of checkpoints that its retention does not keep would stay full.
                self._prune()
        with self._turn:
            answer = self._failure = self._failure if failed else None
            if answer is None and self._reasons:
                message = (
                    f"run {self._run!r}: damaged checkpoints were not pushed to {self._rules.remote}. Run asymcheck "
                    "verify --repair, or delete them:"
                )
                answer = Failure.of(InconsistentCheckpointError(message, self._reasons))
            self._note()
            self._change(answered=waits, failure=answer)
        return not failed

    def _await_turn(self) -> None:
        """Wait until it is known whether another training has the lease of the run; raise if so."""
        self._check()
        while not self._status.lease.is_decided and not self.is_ending:
            with self._turn:
                self._turn.wait(_WAIT_S)
            self._check()

    def _check(self) -> None:
        if time.monotonic() >= self._cancelled_at:
            raise GivenUpError("upload cancelled at the end")
        if self._dropped is not None and self._dropped == self._status.sending:
            self._dropped = None
            raise GivenUpError("upload cancelled: the newest checkpoint goes first")
        self._status.lease.check(self._run, self._rules.remote)

    def _next(self, tried: set[str]) -> Checkpoint | None:
        untried = [checkpoint for checkpoint in reversed(self._due()) if checkpoint.save_id not in tried]
        listings = [self._known.listing(checkpoint) for checkpoint in untried]
        are_parts = not all(listing is None or listing.is_whole for listing in listings)
        if self._remote is not None and are_parts and not self._request.sends_newest:
            # Only complete checkpoints are useful.
            begun = self._begun(self._remote)
            untried.sort(key=lambda checkpoint: checkpoint.ref not in begun)
        return next(iter(untried), None)

    def _begun(self, remote: RemoteTier) -> set[CheckpointRef]:
        """Return the checkpoints at the location. Note the newest that this machine has to push, too."""
        begun = set(remote.manifests.refs(self._run))
        with self._turn:
            shared = [row.save_id for row in self._due() if row.ref in begun and row.save_id != self._status.sending]
            self._change(begun=shared[-1] if shared else None)
        return begun

    @contextlib.contextmanager
    def _watching(self, remote: RemoteTier, listing: CheckpointFiles) -> Iterator[None]:
        """Look for checkpoints that other machines begin, which the retention of this store has to keep.

        Otherwise, machines whose uploads take longer than a few saves may push different checkpoints for ever.
        """
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_WATCH_S):
                with contextlib.suppress(AsymcheckError):
                    self._begun(remote)

        if not listing.is_whole:
            begin(watch, "push-watch")
        try:
            yield
        finally:
            ended.set()

    def _due(self) -> list[Checkpoint]:
        """List the store, and return the checkpoints to upload, newest last, without damaged ones."""
        with self._turn:
            local = {checkpoint.save_id: checkpoint for checkpoint in self._known.refresh()}
            remote = self._remote_checkpoints(local)
            now_ns, present = time.time_ns(), list(local.values())
            selected = due(self._rules, present, remote, now_ns)
            if self._request.sends_newest:
                newest = due(Push(self._rules.remote, keep=Retention(keep_last=1)), present, remote, now_ns)
                selected += [row for row in newest if row not in selected]
            damaged, now = self._damaged, time.monotonic()
            self._reasons = [damaged[row.save_id][0] for row in selected if row.save_id in damaged]
            ready = [row for row in selected if row.save_id not in damaged or damaged[row.save_id][1] <= now]
            self._note_missed(local, remote, ready, now_ns)
            # Until this loop has listed the location, the findings of an earlier one remain valid.
            if self._remote is not None or not self._status.is_connected:
                there = [row.ref for row in remote if row.on_line is not False and row.ref not in self._parts]
                newest_step = max(there).step if there else None
                self._note(backlog=len(ready), damaged=len(self._reasons), newest_step=newest_step)
                waiting = tuple(row.save_id for row in ready[-max(_WAITING, self._rules.hold) :])
                self._change(newest_seen=max(local, default=""), waiting=waiting)
            return ready

    def _note_missed(
        self, local: Mapping[str, Checkpoint], remote: list[Checkpoint], ready: list[Checkpoint], now_ns: int
    ) -> None:
        """Count the checkpoints that were deleted from the store, although they still had to be pushed."""
        kept = {row.save_id for row in (*local.values(), *remote)}
        gone = [row for row in self._awaited if row.save_id not in kept]
        self._awaited = ready
        if self._remote is None or self._status.sending is not None:
            # The location may have them, or get one now.
            self._awaited = [*gone, *ready]
            return
        # The retention of the location would have deleted some by now.
        present = [*local.values(), *self._known.placed(gone, 0)]
        names = {row.save_id for row in gone}
        missed = [row for row in due(self._rules, present, remote, now_ns) if row.save_id in names]
        if missed:
            self._missed = self._missed or missed[0]
            self._note(missed=self._status.statistics.missed + len(missed))

    def _remote_checkpoints(self, local: Mapping[str, Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints that are or were at the location. The store decides whether they are on the line."""
        # A checkpoint that neither side has any more decides nothing. A long training would collect many.
        for save_id in self._pruned - local.keys():
            self._sent.pop(save_id, None)
        self._pruned &= local.keys()
        elsewhere = [checkpoint for save_id, checkpoint in self._sent.items() if save_id not in local]
        common = [local[save_id] for save_id in self._sent if save_id in local]
        return [*self._known.placed(elsewhere, self._generation), *common]

    def _connect(self) -> RemoteTier:
        remote = open_location(self._local, parse_location(self._rules.remote), self._job.config)
        try:
            known = CheckpointCache(remote, self._run, metrics=self._rules.asks_for_metrics)
            present = known.refresh()
            with self._turn:
                self._generation = known.generation
                local = {checkpoint.save_id for checkpoint in self._known.refresh()}
                self._sent = {checkpoint.save_id: checkpoint for checkpoint in present}
                count = 0
                for checkpoint in reversed([row for row in present if row.save_id in local]):
                    listing = known.listing(checkpoint)
                    if listing is not None and count < _VERIFIED_MANIFESTS:
                        count += len(listing.manifests)
                        self._unverified[checkpoint.save_id] = listing
        except BaseException:
            remote.close()
            raise
        self._encoder = encoder_for(remote)
        if self._rules.keep is not None and self._job.prunes:
            # With ``best``, this cache reads each manifest, which the retention may not need.
            shared = known if self._rules.best is None else None
            self._pruner = RemotePruner(remote, self._run, self._rules.keep, shared)
        return remote

    def _verify_remote(self, remote: RemoteTier) -> None:
        """Verify that listed checkpoints are whole. Checkpoints that are not whole become due again."""
        present = RemotePresence(remote)
        present.expect(self._unverified.values())
        while self._unverified and not self.is_ending:
            save_id = next(iter(self._unverified))
            self._check()
            is_whole = present.has(self._unverified[save_id])
            with self._turn:
                if not is_whole:
                    self._sent.pop(save_id, None)
                del self._unverified[save_id]

    def _push_heads(self, remote: RemoteTier) -> None:
        """Publish new head records. A rollback creates one, even if no checkpoint follows."""
        heads = self._local.manifests.heads(self._run)
        if heads != self._heads:
            remote.refuse_lost_location()
            publish_heads(self._local, remote, self._run)
            self._heads = heads

    def _try(self, remote: RemoteTier, checkpoint: Checkpoint) -> bool:
        """Push a checkpoint; return False after a failure that may not concern other checkpoints."""
        listing = self._known.listing(checkpoint)
        if listing is None:
            return True
        with self._turn:
            damaged, begun = self._damaged, self._status.begun
            self._change(sending=checkpoint.save_id, begun=None if begun == checkpoint.save_id else begun)
        try:
            moved = self._copy(remote, checkpoint, listing)
        except _BLOCKING_ERRORS:
            raise
        except (FormatError, RecoveryError) as error:
            # A checkpoint that was deleted in the meantime is no longer due.
            if self._local.manifests.listing(self._run, checkpoint.ref).manifests:
                damaged[checkpoint.save_id] = f"{checkpoint.ref}: {error}", time.monotonic() + DAMAGED_RETRY_S
                self._note(failures=self._status.statistics.failures + 1)
        except Exception as error:  # noqa: BLE001 - other checkpoints may succeed
            self._fail(error)
            return False
        else:
            with self._turn:
                self._sent[checkpoint.save_id] = checkpoint
                self.moved.add(moved)
                if not listing.is_whole:
                    self._parts.add(checkpoint.ref)
                now = self._status.statistics
                self._note(pushed=now.pushed + len(moved.committed), sent_bytes=now.sent_bytes + moved.moved_bytes)
                self._due()
            self._prune()
        finally:
            self._end_upload()
        return True

    def _copy(self, remote: RemoteTier, checkpoint: Checkpoint, listing: CheckpointFiles) -> Moved:
        moved: Moved | None = None
        began = time.monotonic()

        def details() -> Detail:
            sent = 0 if moved is None else moved.moved_bytes
            named: Detail = {"location": str(remote.location), "run": self._run, "save": checkpoint.save_id}
            return {**named, "step": checkpoint.step, "sent": sent}

        def note(done: int, total: int) -> None:
            self._check()
            speed = done / max(time.monotonic() - began, 1e-3)
            self._note(sending_step=checkpoint.step, done_bytes=done, total_bytes=total, bytes_per_s=speed)

        with timed("push", 0, details), self._watching(remote, listing):
            moved = push(
                self._local,
                remote,
                [listing],
                note,
                self._encoder,
                lambda: self.is_ending,
                lambda: self._request.is_alone,
            )
        return moved

    def _prune(self) -> None:
        """Apply the retention of the remote location. A failure does not block uploads."""
        if self._pruner is None:
            return
        try:
            deleted = self._pruner.prune(time.time_ns())
        except AsymcheckError as error:
            self._prune_failure = Failure.of(error)
        else:
            self._prune_failure = None if self._pruner.failure is None else Failure.of(self._pruner.failure)
            with self._turn:
                self._pruned.update(checkpoint.save_id for checkpoint in deleted)

    def _fail(self, error: Exception) -> None:
        with self._turn:
            self._failure = Failure.of(error)
            self._note(failures=self._status.statistics.failures + 1)


def follow(loop: PushLoop, tick: Callable[[PushStatus], None], *, lets_signals_end_it: bool = False) -> None:
    """Run the loop on a thread, and call ``tick`` with its status every 50 ms and once after its end.

    With ``lets_signals_end_it``, a first KeyboardInterrupt or SystemExit ends the loop after the present upload, and a
    second one cancels the upload.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(watch(loop.add_interval))
        done = begin(loop.run, "pushing")
        # If ``tick`` raises, the loop ends, too.
        held.callback(loop.end)
        while not done.done() and not loop.is_overdue:
            try:
                tick(loop.status())
                time.sleep(_TICK_S)
            except (KeyboardInterrupt, SystemExit):
                if not lets_signals_end_it:
                    raise
                loop.end()
        tick(loop.status())
        if done.done():
            done.result()


def serve(requests: int, statuses: int, parent: int) -> None:
    """Push for the process ``parent`` as the job on standard input says, until either ends.

    ``requests`` and ``statuses`` are descriptors of mailboxes. If the training is killed, the checkpoint that is being
    uploaded is finished, and no other is begun.
    """
    _lower_priority()
    # The training reports the problems of a push, so Python must not print each attempt.
    logging.getLogger("asymcheck").addHandler(logging.NullHandler())
    status = 1
    try:
        job = decoded(PushJob, sys.stdin.buffer.read())
        status = run_child(Mailbox(io.FileIO(requests)), Mailbox(io.FileIO(statuses, "r+")), job, parent)
    except Exception:  # noqa: BLE001 - the training sees the status
        traceback.print_exc()
    sys.stderr.flush()
    # A regular exit would wait for threads that wait for servers.
    os._exit(status)


def run_child(requests: Mailbox, statuses: Mailbox, job: PushJob, parent: int) -> int:
    """Push for the process ``parent``, which writes ``requests`` and reads ``statuses``; return the exit status."""
    try:
        local: ReadTier = (
            RemoteTier(parse_location(job.store), job.config)
            if is_uri(job.store)
            else NvmeTier(Path(job.store), job.config, read_only=True)
        )
        loop = PushLoop(local, job)
    except AsymcheckError as error:
        statuses.write(dataclasses.replace(job.before, answered=-1, failure=Failure.of(error)))
        return 1
    written: PushStatus | None = None
    is_orphaned = False

    def tick(status: PushStatus) -> None:
        """Apply a new request, and write the status if it has changed."""
        nonlocal written, is_orphaned
        if os.getppid() != parent:
            if not is_orphaned:
                is_orphaned = True
                loop.end()
            return
        request = requests.read(PushRequest)
        if request is not None:
            loop.apply(request)
        if status != written:
            statuses.write(status)
            written = status

    follow(loop, tick)
    return 0


def _lower_priority() -> None:
    """Lower the priority of all threads, including those of libraries."""
    for task in os.listdir("/proc/self/task"):
        # A thread may have ended in the meantime.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task), NICE)
