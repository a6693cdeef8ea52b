"""Services of a store for a Checkpointer: background saves and pushes, recovery of captures, and generations."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from asymcheck.commit.save_request import LineagePosition, SaveRequest
from asymcheck.config import DEFAULT_RUN, CaptureConfig, check_type, ring_folder_of
from asymcheck.errors import InvalidInputError, RemoteUnreachableError
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.format.manifest import ManifestHeader
from asymcheck.format.record import HeadRecord
from asymcheck.opened_store import OpenedStore
from asymcheck.policies.interval import TrainingPace
from asymcheck.policies.push_selection import Push
from asymcheck.replication.background_push import BackgroundPush
from asymcheck.replication.push_loop import PushLoop
from asymcheck.replication.push_status import PushJob
from asymcheck.restore.lineage import begin_generation, intact_heads, read_line
from asymcheck.storage.fallback_tier import RemoteFallback
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.nvme.run_lock import RunLock
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.types import Checkpoint, Part, SaveId
from asymcheck.validation import check_metrics, check_part, check_step

if TYPE_CHECKING:
    from asymcheck.capture.background_saver import BackgroundSaver
    from asymcheck.capture.inflight import Capture
    from asymcheck.commit.orphan_recovery import Agree, RecoveredCapture
    from asymcheck.distributed import Session

_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()
"""The background savers of all stores of this process."""

_savers_lock = threading.Lock()


def _all_savers() -> tuple[BackgroundSaver, ...]:
    with _savers_lock:
        return tuple(_savers)


def place(tier: NvmeTier, run: str, generation: int | None, before: SaveId | None = None) -> LineagePosition:
    """Return the position of a new checkpoint on the line of training; ``generation`` is by default the current one.

    With several ranks, ``before`` is the save id of the checkpoint, because other ranks may have saved later ones.

    Raises:
        InvalidInputError: the generation was never begun, so a checkpoint of it would hide the newest one.
    """
    if generation is None:
        generation = read_line(tier, run).generation
    elif type(generation) is not int or generation not in (1, *tier.manifests.heads(run)):
        raise InvalidInputError(f"generation {generation!r} of run {run!r} was never begun")
    parent = tier.manifests.newest(run, generation, before)
    if parent is None:
        head = tier.manifests.read_head(run, generation)
        parent = None if head is None else head[0].parent
    return LineagePosition(generation, parent)


class TrainingServices:
    """Background saves, background pushes and generations of an opened store."""

    def __init__(self, opened: OpenedStore) -> None:
        self.opened = opened
        """The opened store."""
        self._backgrounds: set[BackgroundSaver] = set()
        self._run_locks: list[RunLock] = []
        # Runs whose head records were read from the remote location.
        self._has_taken_heads: set[str] = set()

    def request(
        self,
        run: str,
        step: int,
        metrics: Mapping[str, float] | None,
        part: Part | None = None,
        pace: TrainingPace | None = None,
    ) -> SaveRequest:
        """Validate a save, and return its request.

        Raises:
            InvalidInputError: an argument is invalid.
            ClosedStoreError, ReadOnlyStoreError: the store cannot be written.
        """
        self.opened.writable()
        request = SaveRequest(layout.check_run(run), check_step(step), check_metrics(metrics or {}), pace=pace)
        if part is None:
            return request
        check_part(part)
        return dataclasses.replace(
            request, rank=part.rank, world_size=part.world_size, save_id=SaveId(bytes.fromhex(part.save_id))
        )

    def background(
        self, run: str, config: CaptureConfig, generation: Callable[[], int], session: Session | None = None
    ) -> BackgroundSaver:
        """Return a background saver for a run.

        ``generation`` is called once everything except the manifest is durable. With ``session``, rank 0 calls it.
        """
        from asymcheck.capture.background_saver import BackgroundSaver

        tier = self.opened.writable()

        def placing(capture: Capture) -> LineagePosition:
            return place(tier, run, generation(), None if session is None else capture.request.save_id)

        background = BackgroundSaver(tier, self.opened.catalog(), self.opened.encoder, placing, run, config, session)
        self._backgrounds.add(background)
        with _savers_lock:
            _savers.add(background)
        background.on_close = self._backgrounds.discard
        return background

    def end_replaced(self, run: str, own: BackgroundSaver | None) -> None:
        """Close the savers of earlier Checkpointers of a run, for instance of a notebook cell that is run again.

        Their captures become durable, and their memory is freed. ``own`` is the saver of the new Checkpointer.
        """
        for saver in _all_savers():
            if saver.is_replaced_by(own, self.opened.writable(), run):
                saver.close()

    def begin_generation(self, parent: Checkpoint | None, *, run: str = DEFAULT_RUN) -> int:
        """Record durably that training continues from ``parent``, or from nothing if that is None.

        Checkpoints saved after ``parent`` stay in the store, but are abandoned.

        Returns:
            The number of the new generation.
        """
        tier = self.opened.writable()
        layout.check_run(run)
        self.take_remote_heads(run, is_new=parent is None)
        return begin_generation(tier, run, None if parent is None else parent.ref)

    def push_in_background(
        self, rules: Push | None, *, run: str = DEFAULT_RUN, poll_s: float = 0.5, prunes: bool = True
    ) -> BackgroundPush:
        """Return a push of checkpoints as they become durable, in a child process. Start it, and close it.

        Checkpoints that are in the store already are pushed, too. An interrupted push continues by itself. Without
        ``rules``, the push does nothing. Every ``poll_s`` seconds, it looks for checkpoints of other processes. With
        ``prunes``, it removes checkpoints at the location that ``Push.keep`` does not keep. If several stores push one
        run to one location, only one of them may prune.

        Raises:
            InvalidInputError: the run or the URI is invalid, or the program has no Python interpreter for the child.
                The location is not contacted.
        """
        tier = self.opened.tier
        if rules is None:
            return BackgroundPush(tier, None)
        # In a frozen program, sys.executable is the program itself instead of an interpreter.
        if not sys.executable or getattr(sys, "frozen", False):
            raise InvalidInputError(
                "push=… starts a Python interpreter, but this program has none (sys.executable). Leave out push, and "
                f"run asymcheck push {tier.root} {rules.remote} --follow beside the training"
            )
        return BackgroundPush(tier, self._push_job(rules, run, poll_s, prunes=prunes))

    def push_loop(self, rules: Push, *, run: str = DEFAULT_RUN) -> PushLoop:
        """Return the loop that pushes a run in the foreground; :func:`follow` runs it."""
        return PushLoop(self.opened.tier, self._push_job(rules, run, 0.5, prunes=True))

    def _push_job(self, rules: Push, run: str, poll_s: float, *, prunes: bool) -> PushJob:
        tier = self.opened.tier
        tier.check_usable()
        parse_location(check_type("push", rules, Push).remote)  # Refuse an invalid URI now, not in the child.
        source = str(tier.root) if isinstance(tier, RemoteTier) else os.path.abspath(tier.root)
        return PushJob(source, tier.config, rules, layout.check_run(run), poll_s, prunes)

    def run_lock(self, run: str) -> RunLock:
        """Return the lock of a run; :meth:`RunLock.take` takes it, and :meth:`close` releases it."""
        tier = self.opened.writable()

        def last_step() -> int | None:
            newest = max((listing.ref for listing in tier.manifests.checkpoints(run)), default=None)
            return None if newest is None else newest.step

        lock = RunLock(tier.files, tier.root, layout.check_run(run), last_step)
        self._run_locks.append(lock)
        return lock

    def fence(self) -> None:
        """Wait until states of background saves may change, because a restore may fill them.

        Includes the saves into other stores of this process, because the state may be the same.
        """
        for background in _all_savers():
            background.fence()

    def settle(self) -> None:
        """Wait until all background saves are durable or lost."""
        for background in tuple(self._backgrounds):
            background.wait("local")

    def close(self) -> None:
        """Wait until all background saves are durable or lost, close the savers, and release the locks of runs."""
        try:
            # After an interrupt, another call closes the rest.
            for background in tuple(self._backgrounds):
                background.close()
        finally:
            while self._run_locks:
                self._run_locks.pop().close()

    @contextlib.contextmanager
    def adopting(
        self,
        ring_folder: str | os.PathLike[str] | None = None,
        *,
        run: str | None = None,
        agree: Agree | None = None,
        raises: bool = True,
    ) -> Iterator[list[RecoveredCapture]]:
        """Commit the checkpoints of this store that killed processes left complete in memory.

        A restore in the ``with`` block reads from that memory as far as possible. The memory is released after the
        block. Captures of ``run``, which is about to resume, come first. If another process is recovering them, this
        waits. If the job has other stores, ``agree`` selects the captures of ``run`` that all of them can complete.

        Raises:
            LockTimeoutError: the other process does not finish; the message names it.
            OutOfSpaceError: a capture of ``run`` does not fit on the drive; without ``raises``, its outcome says so.
            StorageError: the drive failed; the captures stay in memory.
        """
        from asymcheck.commit.orphan_recovery import adopting

        opened, folder = self.opened, ring_folder_of(ring_folder)
        tier = opened.writable()

        def placing(header: ManifestHeader) -> LineagePosition:
            before = header.ref.save_id if header.world_size > 1 else None
            return place(tier, header.run, header.ref.generation, before)

        adoption = adopting(tier, opened.catalog, opened.encoder, folder, placing, run, agree, raises=raises)
        with contextlib.ExitStack() as held:
            with timed("adopt"):
                adopted, packs = held.enter_context(adoption)
            self.opened.in_memory = packs
            # The list is cleared before the memory is released.
            held.callback(self.opened.in_memory.clear)
            yield adopted

    def heads(self, run: str, *, behind: bool = False) -> list[HeadRecord]:
        """Return the intact head records of a run, oldest first.

        With ``behind``, include those of the remote location, if both belong to the same training.

        Raises:
            RemoteUnreachableError: the remote location does not respond.
        """
        own = intact_heads(self.opened.tier, run, self.opened.tier.manifests.heads(layout.check_run(run)))
        if behind and self.opened.remote is not None:
            own += self._remote_heads(self.opened.remote, run, {head.generation: head for head in own})
        return sorted(own, key=lambda head: head.generation)

    def _remote_heads(self, fallback: RemoteFallback, run: str, own: Mapping[int, HeadRecord]) -> list[HeadRecord]:
        """Return the head records that only the remote location has."""

        def read(remote: RemoteTier) -> list[HeadRecord]:
            numbers = remote.manifests.heads(run)
            newest_common = [number for number in numbers if number in own][-1:]
            return intact_heads(remote, run, [*newest_common, *(number for number in numbers if number not in own)])

        heads = fallback.ask(read) or []
        pairs = [(head, own[head.generation]) for head in heads if head.generation in own]
        if not all(head.is_same(other) for head, other in pairs):
            return []
        return [head for head in heads if head.generation not in own]

    def take_remote_heads(self, run: str, *, is_new: bool) -> None:
        """Copy head records that only the remote location has, before a generation begins.

        Their generation numbers are used, and the line may lead through them. A training that starts from scratch
        (``is_new``) copies nothing if the location has checkpoints, because these belong to another training.
        """
        # Once per run: later records belong to other trainings, and a rollback must not wait for the network.
        if self.opened.remote is None or run in self._has_taken_heads:
            return
        with contextlib.suppress(RemoteUnreachableError):
            if not (is_new and self.opened.remote.ask(lambda remote: bool(remote.manifests.refs(run)))):
                for head in self.heads(run, behind=True):
                    self.opened.writable().manifests.take_head(head)
                self._has_taken_heads.add(run)
