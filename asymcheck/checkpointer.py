"""The Checkpointer: save a training state in the background at regular steps, and restore it at the start."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, get_args

from asymcheck.capture.background_saver import BackgroundSaver, Statistics
from asymcheck.capture.inflight import Capture, CheckpointReport
from asymcheck.capture.signals import ExitHandler
from asymcheck.commit.orphan_recovery import Agree
from asymcheck.config import DEFAULT_RUN, SECONDS, CaptureConfig, Grace, check_choice, check_number, check_type
from asymcheck.distributed.ranks import RanksGiven, find_ranks
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    ClosedStoreError,
    ForkedStoreError,
    InvalidInputError,
    OutOfSpaceError,
    PartialRestoreError,
    Preempted,
    RanksError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    RunInUseError,
    StorageError,
    UnreachableRemoteWarning,
    listed,
    warn_user,
)
from asymcheck.format import layout
from asymcheck.gc.retention_runner import MaintenanceThread, Pruner
from asymcheck.policies.interval import AutoInterval, ChosenInterval
from asymcheck.policies.push_selection import Push, mismatch
from asymcheck.policies.retention import Retention
from asymcheck.publish.background import BackgroundPublisher
from asymcheck.publish.release import Publish
from asymcheck.replication.transfer_stats import PushStatistics
from asymcheck.restore.resolve import warn_of_skipped
from asymcheck.store import Store
from asymcheck.training.interval_controller import interval_controller
from asymcheck.training.preemption import Preemption
from asymcheck.training.resume import ResumeCoordinator, ResumePoint, restored_alone, rolled_back_alone, saved
from asymcheck.training.save_reporting import SaveReporting, close_after
from asymcheck.types import Checkpoint
from asymcheck.validation import check_capture, check_flag, check_grace, check_state, check_step, check_which

OnError = Literal["raise", "warn"]
WaitTarget = Literal["memory", "local", "remote"]
KEEP_NEWEST = Retention(keep_last=3)
"""Default retention of a Checkpointer: a bounded number of checkpoints, with older ones to fall back to."""

_NONE_RESTORED = "all are abandoned, so none is restored; call restore(step=…) to continue from one of them"
_POLL_S = 2.0  # Commits of other ranks are found by polling; those of this process are pushed at once.
_LASTING = (ReadOnlyStoreError, ClosedStoreError, ForkedStoreError)
"""Errors of the store that no later step can be free of."""
_RESTORE_FIRST = "call restore() first to continue from the newest"
_logger = logging.getLogger(__name__)


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Save a training state in the background at regular steps, and restore it.

    Example::

        with asymcheck.Checkpointer(
            store, {"model": model, "optimizer": optimizer, "rng": asymcheck.RngState()}, save_on_exit=True
        ) as checkpointer:
            restored = checkpointer.restore()
            for step in range(restored.step + 1 if restored else 0, steps):
                ...
                checkpointer.step(step, metrics={"loss": loss.item()})

    :meth:`step` copies the parts of the state that the next forward pass may change, and returns. A background thread
    copies parameters and optimizer state to memory before the next optimizer step changes them, and flushes them to the
    store. If the process is killed, complete captures survive in memory, and :meth:`restore` of the next process
    recovers them. Call all methods on one thread, the training thread.
    """

    def __init__(  # noqa: PLR0913 - all options of a training loop
        self,
        store: Store,
        state: dict[str, Any],
        *,
        every: int | Literal["auto"] | AutoInterval = "auto",
        keep: Retention | None = KEEP_NEWEST,
        push: Push | None = None,
        publish: Publish | None = None,
        run: str = DEFAULT_RUN,
        save_on_exit: bool = False,
        save_on_signal: bool | Grace = False,
        on_error: OnError = "raise",
        capture: CaptureConfig | None = None,
        on_checkpoint: Callable[[CheckpointReport], object] | None = None,
        ranks: RanksGiven = "auto",
        takeover: bool = False,
    ) -> None:
        """Save ``state`` to ``store`` under the name ``run``.

        Args:
            store: an open, writable store. The caller closes it.
            state: a state as :meth:`Store.save` takes it. If optimizers are given as objects, their parameters and
                state are copied in the background, which makes saving cheap.
            every: number of steps between two checkpoints. ``"auto"`` measures the cost of a checkpoint and chooses,
                see :attr:`interval`; an :class:`asymcheck.AutoInterval` sets its goals. With several ranks, rank 0
                chooses for the slowest.
            keep: the checkpoints of the run to keep, by default the newest three. None keeps all. After each commit, a
                background thread deletes the others and frees their packs, which later saves overwrite. Checkpoints
                that a restore of an older step abandoned stay, unless ``Retention(keep_abandoned=False)``.
            push: the checkpoints to copy to a remote location in the background, see :meth:`push_statistics`. ``keep``
                deletes no checkpoint that waits to be pushed, up to ``Push.hold`` of them.
            publish: the weights to publish to inference processes in the background, and how often. With several ranks,
                rank 0 publishes its own tensors.
            run: name of the run.
            save_on_exit: save the last step at the end of the ``with`` block, unless it was saved already or an
                exception ends the block. With ``push``, also push it, even if no rule selects it.
            save_on_signal: on SIGTERM or SIGUSR1, the next :meth:`step` saves its step, waits until it is durable, and
                raises :class:`asymcheck.errors.Preempted`, which ends the program with status 143. With ``push``, the
                rest of the 30 seconds is for the upload. An :class:`asymcheck.Grace` sets the time and the signals.
            on_error: ``"raise"`` raises an error in the training loop if a checkpoint could not be stored or old ones
                could not be removed. ``"warn"`` only warns.
            capture: configuration of background captures.
            on_checkpoint: callback, run with a report of each background checkpoint once it is durable or lost. The
                next :meth:`step`, :meth:`wait`, :meth:`save` or :meth:`close` calls it, before raising an error.
                ``print`` prints one line for each checkpoint.
            ranks: the ranks that save the state together, or a function without arguments that returns them.
                ``"auto"`` takes the ranks of ``torch.distributed`` if it is initialised. Otherwise, and with None, this
                process saves alone. Each rank creates a Checkpointer with the same arguments and calls the same methods
                with the same steps.
            takeover: continue the run even if another process trains it. That training ends with an error at its next
                step. By default, this training waits up to ``StoreConfig.lock_timeout_s`` seconds for its end, and
                then raises an error. With ``push``, the same holds for a process on another machine, for which this
                training waits up to ``RemoteConfig.lease_s`` seconds.

        Raises:
            InvalidInputError: an argument is invalid.
            ReadOnlyStoreError, ClosedStoreError, ForkedStoreError: the store cannot be written.
        """
        if not isinstance(store, Store):
            raise InvalidInputError(f"store {store!r:.100}: give what Store.open(location) returned")
        self._store, self._state, self._run = store, check_state(state), run
        if keep is not None:
            check_type("keep", keep, Retention)
        raises = check_choice("on_error", on_error, get_args(OnError)) == "raise"
        self._reporting = SaveReporting(store.location, run, on_checkpoint, raises=raises)
        self._config = check_capture(capture)
        self._save_on_exit = check_flag("save_on_exit", save_on_exit)
        self._unsaved: tuple[int, Mapping[str, float] | None] | None = None
        # The capture of that step, which may be lost.
        self._begun: Capture | None = None
        self._generation: int | None = None
        self._partial_restore: PartialRestoreError | None = None
        self._background: BackgroundSaver | None = None
        self._run_lock = store.training.run_lock(run)
        self._takeover = check_flag("takeover", takeover)
        self._is_closed = False
        self._statistics = Statistics()
        self._exit_handler = ExitHandler(self._close)
        grace = check_grace(save_on_signal)
        found = find_ranks(ranks)
        self._coordinator = (
            None if found is None else ResumeCoordinator(store, run, found, self._exit_handler.is_due, push)
        )
        self._interval_controller = interval_controller(
            every, None if self._coordinator is None else self._coordinator.broadcast
        )
        is_first = self._coordinator is None or self._coordinator.is_first
        self._publisher = BackgroundPublisher(store, publish, publishes=is_first, raises=self._reporting.raises)
        self._pusher = store.training.push_in_background(push, run=run, poll_s=_POLL_S, prunes=is_first)
        fixed = every if isinstance(every, int) else None
        self._push_mismatch = None if push is None or not is_first else mismatch(push, fixed)
        self._maintenance = None if keep is None else MaintenanceThread(partial(self._pruner, keep))
        self._preemption = None if grace is None else Preemption(run, grace, self._coordinator)
        if self._preemption is not None:
            # A Checkpointer that is dropped without close() must not keep signals from the program.
            weakref.finalize(self, self._preemption.close)
        # Nor must its push and its handler of SIGTERM stay until the end of the program, for instance of a notebook.
        weakref.finalize(self, self._pusher.abandon).atexit = False
        weakref.finalize(self, self._exit_handler.disarm).atexit = False
        if found is None:
            # With several ranks, the rendezvous decides which ranks push. This is last, because no close() follows a
            # refused argument, and the push of the checkpoints that an earlier training left begins at once.
            self._pusher.start()

    def __repr__(self) -> str:
        """Return run, latest step, interval and store."""
        latest = "no step yet" if self.latest_step is None else f"latest step {self.latest_step}"
        every = self.interval.steps
        interval = "interval not chosen yet" if not every else f"every {'step' if every == 1 else f'{every} steps'}"
        pushes = ", pushed" if self._pusher.pushes else ""
        return f"<Checkpointer of run {self._run!r} in {self._store.location}: {latest}, {interval}{pushes}>"

    def _pruner(self, keep: Retention) -> Pruner:
        opened = self._store.resources
        return Pruner(opened.writable(), opened.catalog(), self._run, keep, self._pusher.held)

    def restore(self, step: int | str | None = None, *, strict: bool = False) -> Checkpoint | None:
        """Restore the state from the newest consistent checkpoint, or from the checkpoint of ``step``.

        Complete captures that a killed process left in memory are committed first. Opens a new generation before it
        returns: checkpoints after the restored one are abandoned from then on.

        Args:
            step: the step; None for the newest consistent checkpoint. ``"save:DIGITS"`` and ``"best:METRIC"`` select as
                in :meth:`Store.load`, for instance an abandoned checkpoint.
            strict: raise StateMismatchError instead of a StateDifferenceWarning.

        Returns:
            The restored checkpoint, or None if the run has no checkpoint yet.

        Raises:
            CheckpointNotFoundError: the run has no checkpoint of ``step``.
            LostCheckpointError, PruneError: an earlier checkpoint failed, unless ``on_error`` is ``"warn"``. The state
                is nevertheless that of :attr:`latest_step`; with several ranks, only after the next call.
            InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: see
                :meth:`Store.load`.
            RunInUseError: another process trains the run.
            ClosedStoreError: the Checkpointer or the store was closed.
            LockTimeoutError: another process is recovering this run's captures from memory, and does not end.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was skipped.
            StateDifferenceWarning: the state differs from the checkpoint in a way that torch accepts in silence: a
                stored part that it lacks, converted tensors, other hyperparameters, or values whose class is unknown.
            UnreachableRemoteWarning: the run has no checkpoint, and the ``remote`` of the store is empty.
            AbandonedCheckpointsWarning: the run has no checkpoint in the store, but at the location of ``push``.
        """
        self._check_open()
        which = None if step is None else check_which(step)
        with self._noting_partial_restore():
            return self._restore(which, strict=check_flag("strict", strict))

    @contextlib.contextmanager
    def _noting_partial_restore(self) -> Iterator[None]:
        """Let the next saves fail if the block leaves a mixture; :meth:`_resumed` permits saves again."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, PartialRestoreError):
                self._partial_restore = error
            elif overwritten := getattr(error, "overwritten", ()):
                # For instance, the remote location has failed, or the user has interrupted the restore.
                self._partial_restore = PartialRestoreError(str(error), overwritten, None)
            raise

    def _restore(self, step: int | str | None, *, strict: bool) -> Checkpoint | None:
        with contextlib.ExitStack() as held:
            if self._coordinator is not None:
                held.enter_context(self._exit_handler)
                self._store.training.settle()
                adopt = partial(self._adopt, held)
                returned = self._coordinator.restore(step, self._state, adopt, self._report, strict=strict)
                if self._coordinator.session().is_first_here:
                    if returned is None:
                        self._pusher.warn_of_new_start()
                    self._pusher.start()
                return self._resumed(returned)
            with self._exit_handler:
                self._collect_outcomes(waits=True)
            self._store.training.settle()
            self._adopt(held)
            checkpoint = self._resumed(restored_alone(self._store, self._run, step, self._state, strict=strict))
        # Report losses only now: a loop may call restore() because of them.
        self._report()
        if checkpoint is None:
            self._pusher.warn_of_new_start()
        return checkpoint

    def _lock_run(self) -> None:
        """Lock the run for this training: on the first rank of each store there, on rank 0 at the remote location.

        Raises:
            RunInUseError: another process trains the run.
        """
        nvme = self._store.resources.nvme
        self._run_lock.take(nvme.config.lock_timeout_s, takeover=self._takeover)
        self._store.training.end_replaced(self._run, self._background)
        self._pusher.guard(nvme.descriptor.store_id.hex(), takeover=self._takeover)
        self._takeover = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedStoreError(
                f"the Checkpointer of run {self._run!r} was closed; call close() after the last step, or create "
                "another Checkpointer and call its restore()"
            )
        # A forked process has no descriptor of the lock of the run.
        self._store.resources.tier.check_usable()

    def _check_may_change_run(self, *, saves: bool = True) -> None:
        """Raise, on all ranks, if another training has taken the run over.

        With ``saves``, also raise if the last restore failed halfway.
        """
        try:
            self._check_open()
            self._run_lock.check()
            self._pusher.check()
            if saves and self._partial_restore is not None:
                raise PartialRestoreError(
                    f"the state of run {self._run} is not saved, because a restore failed after it had overwritten "
                    "tensors. Restore an intact step, or create the state and the Checkpointer again",
                    self._partial_restore.overwritten,
                    self._partial_restore.next_step,
                )
        except (ClosedStoreError, RunInUseError, PartialRestoreError) as error:
            if self._coordinator is not None:
                self._coordinator.give_up(error)
            raise

    def _collect_outcomes(self, *, waits: bool = False) -> int | None:
        """Record which captures are durable or lost, and return the latest step that is not lost.

        With ``waits``, wait until each capture is durable or lost.

        Raises:
            StorageError: torn checkpoints could not be abandoned.
        """
        background = self._background
        if background is None:
            return self._reporting.latest_step
        if waits:
            background.wait("local")
        if suspects := background.detector.suspects:
            # Otherwise captures in flight would be committed to the new generation.
            background.wait("local")
            stay = self._coordinator is not None
            opened, warning = self._reporting.abandon_suspects(self._store, suspects, stay=stay)
            self._generation = opened or self._generation
            # After an error, the next step() tries again.
            background.detector.forget(suspects)
            if warning:
                # The warning comes last, because warnings may be errors.
                warn_user(warning, AbandonedCheckpointsWarning)
        return self._reporting.note(background.settled())

    def _adopt(self, held: contextlib.ExitStack, agree: Agree | None = None) -> None:
        """Commit captures that a killed process left in memory; keep them readable until ``held`` closes."""
        self._lock_run()
        if self._maintenance is not None:
            held.enter_context(self._maintenance.still())
        adopting = self._store.training.adopting(
            self._config.ring_folder, run=self._run, agree=agree, raises=self._reporting.raises
        )
        self._reporting.warn_of_unrecovered(held.enter_context(adopting))

    def _resumed(self, returned: ResumePoint | None) -> Checkpoint | None:
        self._unsaved = None
        if returned is None:
            self._warn_of_none()
            return None
        self._partial_restore = None
        self._generation = returned.generation
        self._reporting.saved(returned.checkpoint.step)
        self._interval_controller.restart(returned.checkpoint.step)
        warn_of_skipped(self._store.location, self._run, returned.skipped)
        _logger.info("restored %s", returned.checkpoint)
        return returned.checkpoint

    def _warn_of_none(self) -> None:
        """Log the new start, and warn of checkpoints that are not restored, else of an empty remote.

        The name of the run may be mistyped, and an empty remote may be a mount point.
        """
        remote = self._store.resources.remote
        if self._coordinator is not None and not self._coordinator.is_first:
            return
        others: list[str] = []
        has_begun = False
        # The other ranks start, so an outage of the remote is no reason to fail now.
        with contextlib.suppress(RemoteUnreachableError), self._store.resources.source() as source:
            others = [run for run in source.manifests.runs() if run != self._run]
            has_begun = bool(source.manifests.heads(self._run)) and not source.manifests.checkpoints(self._run)
        there = f", which has other runs: {listed(others)}" if others else ""
        if has_begun:
            there = (
                f", where an earlier training began the run. If its directory {layout.MANIFESTS}/{self._run} was lost, "
                "stop, and restore it before new checkpoints overwrite the data"
            )
        # A new run beside others is usual, so this is no warning that a program may turn into an error.
        message = "no checkpoint of run %s in %s%s: starting from scratch"
        _logger.log(logging.WARNING if there else logging.INFO, message, self._run, self._store.location, there)
        if not self._warn_of_abandoned(_NONE_RESTORED) and remote is not None and remote.tier() is None:
            warn_user(
                f"remote {remote.name} is empty; starting a new run. If you expected checkpoints there, stop and check "
                "the URI and the mount",
                UnreachableRemoteWarning,
            )

    def rollback(self) -> Checkpoint:
        """Restore the state from the newest checkpoint of this run that is complete in memory.

        Reads nothing from the drive. Opens a new generation, as :meth:`restore` does. Removes plain values that were
        added to the state after the checkpoint, such as entries of a history.

        Raises:
            CheckpointNotFoundError: no checkpoint is complete in memory.
            LostCheckpointError, PruneError: as :meth:`restore`.
            StateMismatchError, DigestMismatchError
            RunInUseError: another process has taken the run over.
            ClosedStoreError: the Checkpointer or the store was closed.
        """
        with self._exit_handler, self._noting_partial_restore():
            self._check_may_change_run(saves=False)
            # Other Checkpointers may be capturing the same tensors.
            self._store.training.fence()
            if self._coordinator is not None:
                self._store.training.settle()
                returned = self._coordinator.rollback(self._background, self._state, self._report)
            else:
                self._collect_outcomes(waits=True)
                returned = rolled_back_alone(self._store, self._run, self._background, self._state)
            self._resumed(returned)
            self._report()
            return returned.checkpoint

    @property
    def interval(self) -> ChosenInterval:
        """The number of steps between two checkpoints, and the reason; ``str()`` of it is a sentence."""
        return self._interval_controller.chosen

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Record that training step ``step`` is complete; begin a checkpoint of it if one is due.

        A checkpoint is due when ``step`` reaches or passes a multiple of ``every``, or when the chosen interval ends.

        Args:
            step: the training step, 0 or more.
            metrics: named numbers, for instance ``{"loss": 3.2}``.

        Returns:
            Whether a checkpoint was begun.

        Raises:
            LostCheckpointError: an earlier checkpoint could not be stored, unless ``on_error`` is ``"warn"``. This one
                is begun nevertheless.
            PublishError: an earlier step could not be published, unless ``on_error`` is ``"warn"``.
            PruneError: old checkpoints could not be removed, unless ``on_error`` is ``"warn"``; once for each reason.
            RanksError: other ranks are missing or at another step; after the first checkpoint, unless ``on_error`` is
                ``"warn"``.
            RunInUseError: another process trains the run, or has taken it over.
            ClosedStoreError: the Checkpointer or the store was closed.
            PartialRestoreError: the last :meth:`restore` failed halfway, so the state is a mixture.
            Preempted: ``save_on_signal`` is set, a signal was received, and this step is durable.
            UnsupportedValueError, InvalidInputError: the state or an argument cannot be stored.
        """
        step = check_step(step)
        if self._is_closed and self._preemption is not None and self.preempted:
            self._preemption.finish(waits=False)
        ends = False
        with self._exit_handler:
            self._check_may_change_run()
            problem, self._push_mismatch = self._push_mismatch, None
            if problem is not None:
                # Not in the constructor, because a program that only calls save() chooses its steps itself.
                warn_user(problem, UnreachableRemoteWarning)
            # An error of this rank alone must not keep it from a save of all ranks: it is raised at the end.
            newest = self._collect_outcomes()
            # First, because after an error the state is no longer that of the step before.
            self._unsaved, self._begun = (step, metrics), None
            try:
                is_due = self._interval_controller.is_due(step, time.perf_counter(), self._statistics)
                ends = self._preemption is not None and self._preemption.ends_at(step)
                is_begun = is_due or ends
                if is_begun:
                    self._begun = self._begin(step, metrics)
                    self._interval_controller.began(step)
            except RanksError as error:
                # If the ranks never met, no checkpoint was lost: the set-up is wrong.
                if self._reporting.raises or self._background is None:
                    raise
                is_begun = False
                self._reporting.warn_of_step(step, error)
            except StorageError as error:
                # For instance a full drive at the start. Some errors stay, and ranks that never met would wait.
                has_met = self._coordinator is None or self._background is not None
                if self._reporting.raises or not has_met or isinstance(error, _LASTING):
                    raise
                is_begun = False
                self._reporting.warn_of_step(step, error)
            if not ends:
                self._publisher.step(step, self._state)
            if is_begun:
                self._reporting.warn_of_order(newest, step)
            if not ends:
                self._report()
        if ends and self._preemption is not None:
            # An error is only warned of: the next start continues from an older checkpoint.
            close_after(Preempted(step), self._close)
            self._preemption.finish(waits=True)
        return is_begun

    def preempt(self, seconds_left: float) -> None:
        """Announce that this process will be killed in ``seconds_left``; for notices that are not signals.

        The next :meth:`step` then ends the training, as after a signal. All Checkpointers of the process learn of it.
        Any thread may call this method.

        Raises:
            InvalidInputError: ``seconds_left`` is no number of seconds, or ``save_on_signal`` is not set.
        """
        if self._preemption is None:
            raise InvalidInputError("preempt() needs Checkpointer(…, save_on_signal=True), on all ranks")
        check_number("seconds_left", seconds_left, *SECONDS)
        self._preemption.notice(seconds_left, "preempt() was called")

    @property
    def preempted(self) -> bool:
        """Whether a signal or another notice has announced the end of this process; on several ranks, to this rank."""
        return self._preemption is not None and self._preemption.is_noticed

    def _begin(self, step: int, metrics: Mapping[str, float] | None) -> Capture:
        try:
            # Another Checkpointer of the run may have closed it, before this one restored again.
            if self._background is None or self._background.is_closed:
                self._background = self._started()
            pace = self._interval_controller.facts(self._statistics)
            request = self._store.training.request(self._run, step, metrics, pace=pace)
        except BaseException as error:
            if self._coordinator is not None:
                self._coordinator.give_up(error)
            raise
        if self._coordinator is not None:
            ranks = self._coordinator
            request = dataclasses.replace(request, rank=ranks.rank, world_size=ranks.world_size)
        capture = self._background.begin(self._state, request, self._generation)
        if self._coordinator is not None and capture.generation is not None:
            # Rank 0 has opened it.
            self._generation = capture.generation
        self._reporting.latest_step = request.step
        return capture

    def _started(self) -> BackgroundSaver:
        session = None if self._coordinator is None else self._coordinator.session()
        if session is None or session.is_first_here:
            self._lock_run()
        if (
            self._generation is None
            and (session is None or session.is_first)
            and not self._warn_of_abandoned(f"they are abandoned by the next checkpoint; {_RESTORE_FIRST}")
        ):
            # Before the first commit: captures in memory can be recovered only for an existing generation.
            self._opened()
        background = self._store.training.background(self._run, self._config, self._opened, session)
        background.statistics = self._statistics
        background.held = self._exit_handler
        if session is None or session.is_first_here:
            # The first rank of each store prunes and pushes, after all its ranks have committed.
            if self._maintenance is not None or self._pusher.pushes:
                background.on_commit = partial(self._pusher.after_commit, self._maintenance)
            self._pusher.start()
        self._exit_handler.arm(background)
        return background

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Save a checkpoint now and wait until it is durable.

        Retention and push of ``keep`` and ``push`` follow as for background checkpoints.

        Args:
            step: the training step, 0 or more.
            metrics: named numbers, for instance ``{"loss": 3.2}``.

        Raises:
            UnsupportedValueError, InvalidInputError, StorageError: this checkpoint was not saved, see
                :meth:`Store.save`.
            LostCheckpointError, PruneError: an earlier checkpoint failed, see :meth:`step`; with several ranks, also
                this one.
            RanksError: other ranks are missing or at another step.

        Warns:
            StepOrderWarning: the latest step saved or restored is greater than ``step``.
        """
        with self._exit_handler:
            self._check_may_change_run()
            if self._coordinator is not None:
                newest = self._collect_outcomes()
                # A background save, because it divides the work among the ranks.
                capture = self._begin(step, metrics)
                self._unsaved = None
                self._reporting.warn_of_order(newest, step)
                self.wait()
                return saved(capture)
            # Losses of earlier checkpoints are reported at the end: this checkpoint is saved nevertheless.
            newest = self._collect_outcomes(waits=True)
            self._lock_run()
            # A new generation is opened just before the commit, so that a failed save abandons nothing.
            generation = self._opened_by_save if self._generation is None else self._opened
            try:
                checkpoint = self._store.save(
                    self._state, step=step, metrics=metrics, run=self._run, generation=generation
                )
            except OutOfSpaceError:
                self._pusher.after_commit(self._maintenance, is_full=True)
                raise
            self._unsaved = None
            self._reporting.saved(checkpoint.step)
            self._pusher.after_commit(self._maintenance)
            self._reporting.warn_of_order(newest, checkpoint.step)
            self._report()
            return checkpoint

    def _opened(self) -> int:
        """Return the generation of this training; without a restore, open one that has no parent."""
        if self._generation is None:
            self._generation = self._store.training.begin_generation(None, run=self._run)
        return self._generation

    def _opened_by_save(self) -> int:
        self._warn_of_abandoned(f"they are abandoned by this save; {_RESTORE_FIRST}")
        return self._opened()

    def _warn_of_abandoned(self, what: str) -> bool:
        """Warn if the run has checkpoints; return whether it has."""
        return self._reporting.warn_of_abandoned(self._store.checkpoints(self._run), what)

    def fence(self) -> None:
        """Wait until the state is copied; call it before you change parameters outside an optimizer step."""
        if self._background is not None:
            with self._exit_handler:
                self._background.fence()

    def wait(self, target: WaitTarget = "local") -> None:
        """Wait until every checkpoint in flight has reached ``target``.

        Args:
            target: ``"local"``: durable in the store. ``"memory"``: complete in memory that survives this process,
                where :meth:`restore` of the next process finds it. ``"remote"``: durable, and all checkpoints that
                ``push`` chooses are at the remote location. The first rank of each store pushes and waits for that; the
                other ranks return when all checkpoints are durable.

        ``"memory"`` waits for durability where the next process could not find the capture in memory: the ring is
        smaller than the state, more than 64 checkpoints wait for the store, or training began without :meth:`restore`
        on a run that has checkpoints.

        Raises:
            LostCheckpointError: a checkpoint could not be stored, unless ``on_error`` is ``"warn"``.
            RemoteUnreachableError, StorageError: a checkpoint could not be pushed, unless ``on_error`` is ``"warn"``.
            InvalidInputError: ``target`` is none of these, or ``"remote"`` without ``push``.
        """
        check_choice("target", target, get_args(WaitTarget))
        if target == "remote" and not self._pusher.pushes:
            raise InvalidInputError("wait('remote'): nothing is pushed; give Checkpointer(…, push=asymcheck.Push(…))")
        with self._exit_handler:
            if self._background is not None:
                self._background.wait("memory" if target == "memory" else "local")
                self._report()
            if target == "remote":
                self._pusher.wait(raises=self._reporting.raises, is_ending=self._exit_handler.is_due)

    def _report(self) -> None:
        """Report errors of background work to the training loop."""
        self._collect_outcomes()
        self._reporting.report(self._maintenance, self._pusher)

    def statistics(self) -> Statistics:
        """Return the costs of saving so far."""
        return dataclasses.replace(self._statistics)

    def push_statistics(self) -> PushStatistics:
        """Return the statistics and the backlog of ``push``; with several ranks, on the first rank of each store."""
        with self._exit_handler:
            return self._pusher.statistics()

    @property
    def latest_step(self) -> int | None:
        """The latest step saved or restored, except steps known to be lost; None before the first."""
        return self._reporting.latest_step

    def close(self) -> None:
        """Wait until all checkpoints are durable, and free the memory. The caller closes the store.

        After that, the Checkpointer neither saves nor restores.

        Pending uploads of ``push`` continue for at most ``Push.close_s``, and a release in flight for at most
        ``Publish.close_s``.

        Raises:
            LostCheckpointError: a checkpoint could not be stored, unless ``on_error`` is ``"warn"``.
            PublishError: the last release failed or took too long, unless ``on_error`` is ``"warn"``.
            Preempted: the end of the process was announced, and no :meth:`step` has ended the training since.

        Warns:
            UnreachableRemoteWarning: some checkpoints were not pushed; the next training sends them.
        """
        self._close()
        if self._preemption is not None and self.preempted and not self._preemption.is_over:
            self._preemption.finish(waits=True)

    def _close(self) -> None:
        self._is_closed = True
        try:
            with self._exit_handler, contextlib.ExitStack() as ending:
                # Last, because SIGTERM has to wait until all checkpoints are durable.
                ending.callback(self._exit_handler.disarm)
                if self._coordinator is not None:
                    ending.callback(self._coordinator.close)
                ending.callback(self._run_lock.close)
                if self._background is not None:
                    self._background.close()
                    ending.callback(setattr, self, "_background", None)
                    self._report()
        except BaseException as error:
            close_after(error, self._close_uploads)
            raise
        self._close_uploads()

    def _close_uploads(self) -> None:
        """End uploads. All checkpoints are durable now, so a signal may interrupt them."""
        with contextlib.ExitStack() as ending:
            left_s = None
            if self._preemption is not None:
                ending.callback(self._preemption.close)
                left_s = self._preemption.left_s()
            # The checkpoint comes first, because a release in flight may take long.
            ending.callback(self._publisher.close)
            if left_s is None:
                self._pusher.close(
                    is_alone=self._coordinator is not None and self._coordinator.lacks_ranks,
                    sends_newest=self._save_on_exit and not self._exit_handler.is_hurried,
                )
            else:
                self._pusher.close_before_kill(left_s)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Save the last step if ``save_on_exit``, and close; after an error, do not wait for ranks that have ended."""
        self._exit_handler.is_hurried = error is not None
        close_after(error, self._close if error is not None else self._save_and_close)

    def _save_and_close(self) -> None:
        try:
            if self._save_on_exit and self._unsaved is not None and self._is_unsaved():
                (step, metrics), self._reporting.repeated = self._unsaved, self._begun
                try:
                    self.save(step, metrics)
                except StorageError as error:
                    if self._reporting.raises or isinstance(error, _LASTING):
                        raise
                    self._reporting.warn_of_step(step, error)
        finally:
            self.close()

    def _is_unsaved(self) -> bool:
        """Tell whether the last step has no checkpoint, because none was due, or because the checkpoint was lost."""
        if self._begun is None or self._is_closed or self._coordinator is not None:
            # A loss on one of several ranks is no reason for a save, in which all ranks have to take part.
            return self._begun is None
        with self._exit_handler:
            self._collect_outcomes(waits=True)
        return self._begun.error is not None
