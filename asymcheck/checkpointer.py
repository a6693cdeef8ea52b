"""The training loop's side: save every so many steps in the background, restore at the start."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from asymcheck.capture.background_saver import BackgroundSaver, Statistics, TierName
from asymcheck.capture.inflight import Capture, CheckpointReport
from asymcheck.capture.signals import ExitHandler
from asymcheck.config import DEFAULT_RUN, CaptureConfig
from asymcheck.distributed.ranks import RanksGiven, find_ranks
from asymcheck.errors import InvalidInputError, RanksError, UnreachableRemoteWarning, warn_user
from asymcheck.gc.retention_runner import MaintenanceThread, Pruner
from asymcheck.policies.interval import AutoInterval, ChosenInterval
from asymcheck.policies.push_selection import Push
from asymcheck.policies.retention import Retention, check_retention
from asymcheck.replication.background_push import BackgroundPush
from asymcheck.replication.transfer_stats import PushStatistics
from asymcheck.store import Store
from asymcheck.training.interval_controller import pacer_of
from asymcheck.training.resume import ResumeCoordinator, ResumePoint, restored_alone, rolled_back_alone, saved
from asymcheck.training.save_reporting import SaveReporting, close_after
from asymcheck.types import Checkpoint
from asymcheck.validation import check_capture, check_on_error, check_state, check_step, check_tier

OnError = Literal["raise", "warn"]
_NONE_RESTORED = "all are abandoned, so none is restored; restore(step=…) goes on from one of them"
_POLL_S = 2.0  # Commits of this process are seen at once; those of other ranks by looking.
_RESTORE_FIRST = "call restore() first to go on from the newest"


class Checkpointer:
    """Saves a state every so many steps while training goes on, and brings it back.

    Use it so::

        with asymcheck.Checkpointer(
            store, {"model": model, "optimizer": optimizer, "rng": asymcheck.RngState()}, every=50
        ) as ckpt:
            restored = ckpt.restore()
            for step in range(restored.step + 1 if restored else 0, steps):
                ...
                ckpt.step(step, metrics={"loss": loss.item()})

    :meth:`step` copies what the next forward pass may change, and returns. Parameters and optimizer state are copied
    to memory beside the training, at the latest before the next optimizer step, and go to the store from there. A
    process that is killed leaves complete captures in memory; :meth:`restore` of the next one takes them up. One
    thread, the training thread, calls the methods.
    """

    def __init__(  # noqa: PLR0913 - a training loop makes one, and says everything there
        self,
        store: Store,
        state: dict[str, object],
        *,
        every: int | Literal["auto"] | AutoInterval = 1,
        keep: Retention | None = None,
        push: Push | None = None,
        run: str = DEFAULT_RUN,
        on_error: OnError = "raise",
        capture: CaptureConfig | None = None,
        on_checkpoint: Callable[[CheckpointReport], object] | None = None,
        ranks: RanksGiven = "auto",
    ) -> None:
        """Watch ``state``, whose objects and tensors stay the caller's; save to ``store`` under the name ``run``.

        Args:
            store: an opened, writable store, which stays the caller's.
            state: as :meth:`Store.save` takes it. Optimizers given as objects make saving cheap: their
                parameters and state are copied in the background.
            every: number of steps between two checkpoints. ``"auto"`` measures the costs and chooses, see
                :attr:`interval`; an :class:`asymcheck.AutoInterval` sets the goals. With several ranks, rank 0 chooses
                for the slowest.
            keep: which checkpoints of the run are kept; None, the default, keeps everything. After each commit, a
                background thread deletes the others and frees their packs, for later saves to overwrite.
            push: which checkpoints go to a remote location, in the background; see :attr:`pushed`. ``keep`` deletes no
                checkpoint that is still to be sent, up to ``Push.hold`` of them.
            run: name of the run.
            on_error: what happens in the training loop when a checkpoint could not be stored, or those that ``keep``
                does not keep could not be removed.
            capture: configuration of background captures.
            on_checkpoint: called with a report of each background checkpoint, once it is durable or lost. The next
                :meth:`step`, :meth:`wait`, :meth:`save` or :meth:`close` calls it, before it raises an error.
                ``print`` prints one line each.
            ranks: the ranks that save the state together, or a function without arguments that returns them.
                ``"auto"`` takes the ranks of ``torch.distributed`` if it is initialised. Otherwise, and with None, this
                process saves alone. Each rank makes a Checkpointer like this one and calls the same methods with the
                same steps.
        """
        if not isinstance(store, Store):
            raise InvalidInputError(f"store {store!r:.100}: give what Store.open(location) returned")
        self._store, self._state, self._run = store, check_state(state), run
        keep = None if keep is None else check_retention(keep)
        self._reporting = SaveReporting(run, on_checkpoint, raises=check_on_error(on_error))
        self._config = check_capture(capture)
        self._generation: int | None = None
        self._background: BackgroundSaver | None = None
        self._statistics = Statistics()
        self._ending = ExitHandler(self.close)
        found = find_ranks(ranks)
        self._together = None if found is None else ResumeCoordinator(store, run, found, self._ending.is_due, push)
        self._pacer = pacer_of(every, None if self._together is None else self._together.told)
        # Last: from here on what the training before has left is pushed.
        self._beside = BackgroundPush(partial(store.pushing, run=run, poll_s=_POLL_S), push, found)
        self._upkeep = None if keep is None else MaintenanceThread(partial(self._pruner, keep))

    def _pruner(self, keep: Retention) -> Pruner:
        opened = self._store.training.opened
        return Pruner(opened.writable(), opened.catalog(), self._run, keep, self._beside.held)

    def restore(self, step: int | None = None) -> Checkpoint | None:
        """Bring the state back from the newest consistent checkpoint, or from that of ``step``.

        Returns None if there is no checkpoint yet. First, captures that a killed process left in memory are made
        durable.

        Opens a new generation before it returns: checkpoints after the restored one are abandoned from now on.

        Raises:
            CheckpointNotFoundError: ``step`` was given and is not there.
            LostCheckpointError, PruneError: of earlier checkpoints, unless ``on_error`` is ``"warn"``. The state is
                nevertheless that of :attr:`last_step`; with several ranks, only after the next call.
            InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: see
                :meth:`Store.load`.
            LockTimeoutError: another process is recovering this run's captures from memory, and does not end.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was passed over.
            UnreachableRemoteWarning: the ``remote`` of the store has no checkpoint of the run, either.
        """
        with contextlib.ExitStack() as held:
            if self._together is not None:
                held.enter_context(self._ending)
                self._store.training.settle()
                returned = self._together.restore(step, self._state, partial(self._adopt, held), self._report)
                if self._together.session().is_first_here:
                    self._beside.start()
                return self._went_back(returned)
            with self._ending:
                self._note(waits=True)
            self._store.training.settle()
            self._adopt(held)
            tell = self._reporting.tell_of_skipped
            checkpoint = self._went_back(restored_alone(self._store, self._run, step, self._state, tell))
        # What was lost before is told when the state is back: a loop may well go back because of that.
        self._report()
        return checkpoint

    def _note(self, *, waits: bool = False) -> int | None:
        """Note which captures have become durable, or were lost; return the last step that is not lost.

        With ``waits``, everything begun is one of these when this returns.

        Raises:
            StorageError: some may be torn, and could not be taken off the line.
        """
        background = self._background
        if background is None:
            return self._reporting.last_step
        if waits:
            background.wait("nvme")
        if suspects := background.prover.take_suspects():
            # What is still on its way would be committed on the new line.
            background.wait("nvme")
            opened = self._reporting.leave_suspects(self._store, suspects, stay=self._together is not None)
            self._generation = opened or self._generation
        return self._reporting.note(background.settled())

    def _adopt(self, held: contextlib.ExitStack) -> None:
        """Make durable what a killed process left in memory, which is then read until ``held`` ends."""
        if self._upkeep is not None:
            held.enter_context(self._upkeep.still())
        adopting = self._store.training.adopting(self._config.ring_folder, run=self._run)
        self._reporting.tell_of_adopted(held.enter_context(adopting))

    def _went_back(self, returned: ResumePoint | None) -> Checkpoint | None:
        if returned is None:
            self._tell_of_none()
            return None
        self._generation = returned.generation
        self._reporting.kept(returned.checkpoint.step)
        self._pacer.restart(returned.checkpoint.step)
        self._reporting.tell_of_skipped(returned.skipped)
        return returned.checkpoint

    def _tell_of_none(self) -> None:
        if (self._together is None or self._together.is_first) and not self._warn_of_abandoned(_NONE_RESTORED):
            self._warn_of_empty_remote()

    def _warn_of_empty_remote(self) -> None:
        """Warn when the location behind the store is empty, which can be a mount point without its file system."""
        far = self._store.training.opened.far
        if far is not None and far.tier() is None:
            warn_user(
                f"nothing is restored: nothing was pushed to {far.name} yet. If something was, stop this training and "
                "see whether the name is right and the file system is mounted",
                UnreachableRemoteWarning,
            )

    def rollback(self) -> Checkpoint:
        """Bring the state back from the newest checkpoint on the line that is complete in memory.

        No byte of it is read from a disk. Opens a new generation, as :meth:`restore` does.

        Raises:
            CheckpointNotFoundError: none is in memory.
            LostCheckpointError, PruneError: as :meth:`restore`.
            StateMismatchError, DigestMismatchError
        """
        with self._ending:
            if self._together is not None:
                self._store.training.settle()
                returned = self._together.rollback(self._background, self._state, self._report)
            else:
                self._note(waits=True)
                returned = rolled_back_alone(self._store, self._run, self._background, self._state)
            self._went_back(returned)
            # As restore() does.
            self._report()
            return returned.checkpoint

    @property
    def interval(self) -> ChosenInterval:
        """After how many steps the next checkpoint is begun, and why; ``str()`` of it is a sentence."""
        return self._pacer.chosen

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Say that training step ``step`` is done; return whether a checkpoint of it was begun.

        One is begun when ``step`` is a multiple of ``every`` or has passed one, or when the chosen interval is over.

        Raises:
            LostCheckpointError: an earlier one was not stored, unless ``on_error`` is ``"warn"``; this one is begun.
            PruneError: those that ``keep`` does not keep could not be removed, likewise. Once for each reason.
            RanksError: other ranks do not come, or do something else, likewise once the first was begun.
            UnsupportedValueError, InvalidInputError: something in the state, or an argument, cannot be stored.
        """
        step = check_step(step)
        with self._ending:
            # What one rank alone has to tell must not keep it from what all do.
            newest = self._note()
            try:
                is_begun = self._pacer.is_due(step, time.perf_counter(), self.statistics())
                if is_begun:
                    self._begin(step, metrics)
                    self._pacer.began(step)
            except RanksError as error:
                # Ranks that never found each other are no lost checkpoint.
                if self._reporting.raises or self._background is None:
                    raise
                is_begun = False
                self._reporting.tell_of_ranks(step, error)
            if is_begun:
                self._reporting.tell_of_order(newest, step)
            self._report()
            return is_begun

    def _begin(self, step: int, metrics: Mapping[str, float] | None) -> Capture:
        try:
            if self._background is None:
                self._background = self._started()
            part = None if self._together is None else self._together.part()
            request = self._store.training.request(self._run, step, metrics, part, self._pacer.facts(self.statistics()))
        except BaseException as error:
            if self._together is not None:
                self._together.give_up(error)
            raise
        capture = self._background.begin(self._state, request, self._generation)
        if self._together is not None and capture.generation is not None:
            # As rank 0 has it.
            self._generation = capture.generation
        self._reporting.begun(step)
        return capture

    def _started(self) -> BackgroundSaver:
        session = None if self._together is None else self._together.session()
        if (
            self._generation is None
            and (session is None or session.is_first)
            and not self._warn_of_abandoned(f"they are abandoned by the next checkpoint; {_RESTORE_FIRST}")
        ):
            # At once: nothing is abandoned, and what is in memory can be resumed only on a line that is there.
            self._opened()
        background = self._store.training.background(self._run, self._config, self._opened, session)
        background.statistics = self._statistics
        background.held = self._ending
        if session is None or session.is_first_here:
            # Of the ranks that save into one store, the first removes and pushes, when all have committed.
            if self._upkeep is not None or self._beside.pushes:
                background.on_commit = partial(self._beside.after_commit, self._upkeep)
            self._beside.start()
        self._ending.arm(background)
        return background

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Save now, whatever ``every`` says; when this returns, the checkpoint is durable, and what goes is gone.

        Args:
            step: the training step, 0 or more.
            metrics: named numbers, for instance ``{"loss": 3.2}``.

        Raises:
            UnsupportedValueError, InvalidInputError, StorageError: see :meth:`Store.save`; it was not saved.
            LostCheckpointError, PruneError: as :meth:`step`, of earlier ones; of several ranks also of this one.
            RanksError: other ranks do not come, or do something else.

        Warns:
            StepOrderWarning: the step that was saved or restored last is a later one.
        """
        with self._ending:
            if self._together is not None:
                newest = self._note()
                # By the way of step(), which shares the work among the ranks.
                capture = self._begin(step, metrics)
                self._reporting.tell_of_order(newest, step)
                self.wait()
                return saved(capture)
            # What of that was lost is told at the end: this one is saved all the same.
            newest = self._note(waits=True)
            # The line of training is left only for a checkpoint that is all but committed, never for one that fails.
            generation = self._opened_by_save if self._generation is None else self._opened
            checkpoint = self._store.save(self._state, step=step, metrics=metrics, run=self._run, generation=generation)
            self._reporting.kept(checkpoint.step)
            self._beside.after_commit(self._upkeep)
            self._reporting.tell_of_order(newest, checkpoint.step)
            self._report()
            return checkpoint

    def _opened(self) -> int:
        """Return the generation of this training; one without a restore opens its own, a line from nothing."""
        if self._generation is None:
            self._generation = self._store.begin_generation(None, run=self._run)
        return self._generation

    def _opened_by_save(self) -> int:
        self._warn_of_abandoned(f"they are abandoned by this save; {_RESTORE_FIRST}")
        return self._opened()

    def _warn_of_abandoned(self, what: str) -> bool:
        """Warn when the run has checkpoints; return whether it has."""
        return self._reporting.tell_of_abandoned(self._store.checkpoints(self._run), what)

    def fence(self) -> None:
        """Wait until the state may be changed by something else than an optimizer of it."""
        if self._background is not None:
            with self._ending:
                self._background.fence()

    def wait(self, tier: TierName | Literal["hdfs"] = "nvme") -> None:
        """Wait until every checkpoint begun is durable (``"nvme"``), or survives this process (``"dram"``).

        With ``"hdfs"``, wait until all checkpoints that ``push`` chooses are at the remote location, too. The first
        rank of each store pushes, and it alone waits for that. The other ranks return when all is durable.

        A checkpoint survives as soon as it is complete in memory, where :meth:`restore` of the next process finds it.
        In three cases :meth:`restore` could not find it, and this method waits until it is durable: the ring is smaller
        than the state, more than 64 checkpoints wait for the store, or training began without :meth:`restore` on a run
        that has checkpoints.

        Raises:
            LostCheckpointError: one could not be stored, unless ``on_error`` is ``"warn"``.
            RemoteUnreachableError, StorageError: one could not be pushed, likewise.
            InvalidInputError: ``tier`` is none of these, or ``"hdfs"`` and nothing is pushed, for want of ``push``.
        """
        check_tier(tier, pushes=self._beside.pushes)
        with self._ending:
            if self._background is not None:
                self._background.wait("dram" if tier == "dram" else "nvme")
                self._report()
            if tier == "hdfs":
                self._beside.wait(raises=self._reporting.raises)

    def _report(self) -> None:
        """Bring what went wrong in the background to the training loop."""
        self._note()
        self._reporting.tell(self._upkeep, self._beside)

    def statistics(self) -> Statistics:
        """Return what saving has cost so far."""
        return self._statistics

    @property
    def pushed(self) -> PushStatistics:
        """Statistics of ``push``, and its backlog; with several ranks, on the first rank of each store."""
        with self._ending:
            return self._beside.statistics()

    @property
    def last_step(self) -> int | None:
        """The step saved or restored last, without those that are known to be lost; None before either."""
        return self._reporting.last_step

    def close(self) -> None:
        """Make everything durable and give the memory back. The store stays open: it is the caller's.

        Pending uploads of ``push`` continue for at most ``Push.close_s``.

        Raises:
            LostCheckpointError: a checkpoint could not be stored, unless ``on_error`` is ``"warn"``.

        Warns:
            UnreachableRemoteWarning: some were not pushed; the next training sends them.
        """
        try:
            with self._ending:
                self._ending.disarm()
                try:
                    if self._background is not None:
                        self._background.close()
                        try:
                            self._report()
                        finally:
                            self._background = None
                finally:
                    if self._together is not None:
                        self._together.close()
        finally:
            # Everything is durable here: a signal may end that.
            self._beside.close()

    def __enter__(self) -> Checkpointer:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Finish; when training has failed, do not wait for long for ranks that may have ended."""
        self._ending.is_hurried = error is not None
        close_after(error, self.close)
