"""Reports of background saves: record the outcome of each capture, and raise or warn in the training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Sequence

from asymcheck.capture.inflight import Capture, CheckpointReport, report_of
from asymcheck.commit.orphan_recovery import RecoveredCapture
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    AsymcheckError,
    InvalidInputError,
    LostCheckpointError,
    LostCheckpointWarning,
    PruneError,
    PruneWarning,
    SilentDivergenceWarning,
    SkippedCheckpointWarning,
    StaleStateWarning,
    StepOrderWarning,
    warn_user,
)
from asymcheck.gc.retention_runner import MaintenanceThread
from asymcheck.replication.background_push import BackgroundPush
from asymcheck.store import Store
from asymcheck.types import Checkpoint, counted

_logger = logging.getLogger(__name__)


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Call ``close``; if ``error`` has ended the training, only warn of an error of ``close`` or ``on_checkpoint``.

    Raises:
        AsymcheckError: ``close`` failed, and there is no other error. Errors of ``on_checkpoint`` are raised, too.
    """
    try:
        close()
    except Exception as lost:
        if error is None:
            raise
        warn_user(f"{type(lost).__name__}: {lost}", LostCheckpointWarning)


class SaveReporting:
    """Outcomes of the captures of one run, reported where an error may interrupt the training loop."""

    def __init__(
        self, store: str, run: str, on_checkpoint: Callable[[CheckpointReport], object] | None, *, raises: bool
    ) -> None:
        """Report on ``run`` of the store at ``store`` to ``on_checkpoint``; raise errors if ``raises``, else warn.

        Raises:
            InvalidInputError: ``on_checkpoint`` is not callable.
        """
        if on_checkpoint is not None and not callable(on_checkpoint):
            raise InvalidInputError(f"on_checkpoint={on_checkpoint!r:.100}: give a function of one argument, or None")
        self._store, self._run, self._on_checkpoint = store, run, on_checkpoint
        self.raises = raises
        """Whether failures are raised; otherwise they are warnings."""
        self.latest_step: int | None = None
        """The latest step saved, restored or in flight; None before the first."""
        self.repeated: Capture | None = None
        """A lost capture whose step is saved again, which reports the outcome."""
        self._saved: int | None = None
        self._unreported: list[Capture] = []

    def saved(self, step: int) -> None:
        """Record a step that is durable."""
        self.latest_step = self._saved = step

    def note(self, settled: Iterable[Capture]) -> int | None:
        """Record captures that are durable or lost; return the latest step that is not lost."""
        for capture in settled:
            self._unreported.append(capture)
            if capture.error is None:
                self._saved = capture.request.step
            elif capture.request.step == self.latest_step:
                self.latest_step = self._saved
        return self.latest_step

    def report(self, maintenance: MaintenanceThread | None, pusher: BackgroundPush) -> None:
        """Report each new outcome once, and failures of pruning and pushing.

        Raises:
            LostCheckpointError, PruneError: a checkpoint was lost or could not be removed, and failures are raised.
                Exceptions of ``on_checkpoint`` are raised, too.
        """
        unreported, self._unreported = self._unreported, []
        try:
            if _logger.isEnabledFor(logging.INFO):
                for capture in unreported:
                    _logger.info("run %s: %s", self._run, report_of(capture))
            # Each checkpoint is reported, even if the report of an earlier one raises.
            with contextlib.ExitStack() as calls:
                for capture in reversed(unreported):
                    if self._on_checkpoint is not None:
                        calls.callback(self._on_checkpoint, report_of(capture))
        finally:
            # Also if on_checkpoint raises.
            self._report_settled(unreported)
            if maintenance is not None and (failure := maintenance.new_failure()) is not None:
                message = f"cannot remove old checkpoints of run {self._run!r}: {failure}"
                if self.raises:
                    raise PruneError(message) from failure
                warn_user(message, PruneWarning)
            pusher.warn()

    def _report_settled(self, settled: Sequence[Capture]) -> None:
        """Raise or warn of lost checkpoints, and warn of suspicious ones."""
        for capture in settled:
            if capture.is_stale:
                warn_user(
                    f"step {capture.request.step} of run {self._run!r}: the tensors are identical to those of the "
                    "previous checkpoint. Did you pass the live model and optimizer?",
                    StaleStateWarning,
                )
            for text in capture.diverged:
                warn_user(text, SilentDivergenceWarning)
        lost = [capture for capture in settled if capture.error is not None and capture is not self.repeated]
        if lost and self.raises:
            raise LostCheckpointError(self._lost(lost)) from lost[0].error
        for capture in lost:
            warn_user(self._lost([capture]), LostCheckpointWarning)

    def warn_of_unrecovered(self, captures: Iterable[RecoveredCapture]) -> None:
        """Warn of captures of killed processes that could not be committed."""
        for capture in captures:
            if capture.ref is None:
                what = "a checkpoint" if capture.step is None else f"step {capture.step}"
                of_run = "" if capture.run is None else f" of run {capture.run!r}"
                message = f"store {self._store}: skipped {what}{of_run} in memory: {capture.problem}"
                warn_user(message, SkippedCheckpointWarning)

    def warn_of_order(self, newest: int | None, step: int) -> None:
        """Warn if ``step`` is lower than ``newest``, the latest step saved or restored."""
        if newest is not None and step < newest:
            warn_user(
                f"run {self._run!r}: step {step} is saved after step {newest}. A restore still chooses step {newest}, "
                f"and keep_last deletes step {step} first. To continue from an earlier step, restore that step first. "
                "To count steps from 0 again, use another run",
                StepOrderWarning,
            )

    def warn_of_abandoned(self, checkpoints: Sequence[Checkpoint], consequence: str) -> bool:
        """Warn if there are ``checkpoints``, with the ``consequence`` for them; return whether there are."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        if steps:
            message = (
                f"run {self._run!r} has {counted(len(steps), 'checkpoint')} up to step {max(steps)}: {consequence}"
            )
            warn_user(message, AbandonedCheckpointsWarning)
        return bool(steps)

    def abandon_suspects(self, store: Store, suspects: Container[str], *, stay: bool) -> tuple[int | None, str]:
        """Abandon checkpoints that may be torn (save ids ``suspects``), and those after them, unless ``stay``.

        Returns:
            The generation that this opens, or None, and a warning, or an empty text.

        Raises:
            StorageError: the new generation could not be recorded.
        """
        checkpoints = [checkpoint for checkpoint in store.checkpoints(self._run) if checkpoint.on_line]
        lineage = sorted(checkpoints, key=lambda checkpoint: checkpoint.ref)
        first = next((index for index, checkpoint in enumerate(lineage) if checkpoint.save_id in suspects), None)
        if first is None:
            return None, ""
        parent = lineage[first - 1] if first else None
        opened = None if stay else store.training.begin_generation(parent, run=self._run)
        since = "" if parent is None else f", and training continues from step {parent.step}"
        consequence = "Delete them, or a restore may choose them" if stay else f"They are abandoned{since}"
        steps = ", ".join(str(checkpoint.step) for checkpoint in lineage[first:])
        return opened, (
            f"run {self._run!r}: the checkpoints of steps {steps} may be torn, because a tensor changed outside an "
            f"optimizer step without a change of its version counter. {consequence}"
        )

    def warn_of_step(self, step: int, error: AsymcheckError) -> None:
        """Warn of a step that is not saved because its save could not begin."""
        warn_user(f"step {step} of run {self._run!r} was not saved: {error}", LostCheckpointWarning)

    def _lost(self, captures: Sequence[Capture]) -> str:
        """Return which checkpoints were lost, and why."""
        if len(captures) == 1:
            return f"step {captures[0].request.step} of run {self._run!r} was not saved: {_reason(captures[0])}"
        each = [f"step {capture.request.step}: {_reason(capture)}" for capture in captures]
        return "\n  ".join([f"{len(captures)} steps of run {self._run!r} were not saved:", *each])


def _reason(capture: Capture) -> str:
    # A KeyboardInterrupt has an empty text.
    return str(capture.error) or type(capture.error).__name__
