"""Save reporting: what became of captures, noted when it is known, and raised or warned of in the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    RanksError,
    SilentDivergenceWarning,
    SkippedCheckpointWarning,
    StaleStateWarning,
    StepOrderWarning,
    warn_user,
)
from asymcheck.gc.retention_runner import MaintenanceThread
from asymcheck.replication.background_push import BackgroundPush
from asymcheck.store import Store
from asymcheck.types import Checkpoint


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Call ``close``; warn of its error when another one has ended the training: it is that which a loop must see.

    Raises:
        AsymcheckError: what went wrong, when there is no other error.
    """
    try:
        close()
    except AsymcheckError as lost:
        if error is None:
            raise
        warn_user(f"{type(lost).__name__}: {lost}", LostCheckpointWarning)


class SaveReporting:
    """Knows what became of the captures of one run, and reports it when that may interrupt the training loop."""

    def __init__(
        self,
        run: str,
        on_checkpoint: Callable[[CheckpointReport], object] | None = None,
        *,
        raises: bool,
    ) -> None:
        """Report on ``run`` to ``on_checkpoint``, and by errors if it ``raises``, else by warnings.

        Raises:
            InvalidInputError: ``on_checkpoint`` is no function.
        """
        if on_checkpoint is not None and not callable(on_checkpoint):
            raise InvalidInputError(f"on_checkpoint={on_checkpoint!r:.100}: give a function of one argument, or None")
        self._run, self._on_checkpoint = run, on_checkpoint
        self.raises = raises
        """Whether it raises."""
        self.last_step: int | None = None
        """The step saved or restored last, also one that is still on its way; None before any."""
        self._kept: int | None = None
        self._untold: list[Capture] = []

    def begun(self, step: int) -> None:
        """Take a step that is being saved."""
        self.last_step = step

    def kept(self, step: int) -> None:
        """Take a step that is durable."""
        self.last_step = self._kept = step

    def note(self, settled: Iterable[Capture]) -> int | None:
        """Take captures that have become durable, or were lost; return the last step that is not lost."""
        for capture in settled:
            self._untold.append(capture)
            if capture.error is None:
                self._kept = capture.request.step
            elif capture.request.step == self.last_step:
                self.last_step = self._kept
        return self.last_step

    def tell(self, upkeep: MaintenanceThread | None, beside: BackgroundPush) -> None:
        """Tell each once, and what went wrong with what is removed and pushed.

        Raises:
            LostCheckpointError, PruneError: something was lost, or could not be removed, and that is not only warned
                of. And whatever the function of the caller raises.
        """
        untold, self._untold = self._untold, []
        try:
            if self._on_checkpoint is not None:
                for capture in untold:
                    self._on_checkpoint(report_of(capture))
        finally:
            # Also when the caller's function raises.
            self._tell(untold)
            self._tell_of_pruning(None if upkeep is None else upkeep.new_failure())
            beside.tell()

    def _tell(self, settled: Sequence[Capture]) -> None:
        """Speak of captures that are durable or lost.

        Raises:
            LostCheckpointError: some are lost.

        Warns:
            SilentDivergenceWarning: what several ranks had equally is not equal any more.
            StaleStateWarning: one is equal to the one before.
            LostCheckpointWarning: one is lost, and that is not raised.
        """
        for capture in settled:
            if capture.is_stale:
                what = f"step {capture.request.step} of run {self._run!r} has the tensors of the checkpoint before it"
                warn_user(
                    f"{what}, bit for bit: is the state that is trained the one that is saved?", StaleStateWarning
                )
            for text in capture.diverged:
                warn_user(text, SilentDivergenceWarning)
        lost = [capture for capture in settled if capture.error is not None]
        if lost and self.raises:
            raise LostCheckpointError(self._lost(lost)) from lost[0].error
        for capture in lost:
            warn_user(self._lost([capture]), LostCheckpointWarning)

    def _tell_of_pruning(self, failure: BaseException | None) -> None:
        """Speak of checkpoints that could not be removed.

        Raises:
            PruneError: there is a ``failure``, and that is not only warned of.
        """
        if failure is None:
            return
        message = f"old checkpoints of run {self._run!r} could not be removed: {failure}"
        if self.raises:
            raise PruneError(message) from failure
        warn_user(message, PruneWarning)

    def tell_of_skipped(self, reasons: Iterable[str]) -> None:
        """Warn of newer checkpoints that a restore passed over."""
        for reason in reasons:
            warn_user(f"run {self._run!r}: passed over {reason}", SkippedCheckpointWarning)

    def tell_of_adopted(self, found: Iterable[RecoveredCapture]) -> None:
        """Warn of captures in the memory that a killed process left which did not become checkpoints."""
        for adopted in found:
            if adopted.ref is None:
                what = "a checkpoint" if adopted.step is None else f"step {adopted.step}"
                of_run = "" if adopted.run is None else f" of run {adopted.run!r}"
                message = f"passed over {what}{of_run}, which lay in memory: {adopted.problem}"
                warn_user(message, SkippedCheckpointWarning)

    def tell_of_order(self, newest: int | None, step: int) -> None:
        """Warn of a step that is lower than the ``newest``, the one that was saved or restored before it, if any."""
        if newest is not None and step < newest:
            what = f"run {self._run!r}: step {step} is saved after step {newest}, so a later state has the lower number"
            warn_user(f"{what}; to train on from an earlier step, restore that first", StepOrderWarning)

    def tell_of_abandoned(self, checkpoints: Sequence[Checkpoint], what: str) -> bool:
        """Warn when there are checkpoints, of which ``what`` becomes; return whether there are."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        if steps:
            number = "1 checkpoint" if len(steps) == 1 else f"{len(steps)} checkpoints"
            message = f"run {self._run!r} has {number} up to step {max(steps)}: {what}"
            warn_user(message, AbandonedCheckpointsWarning)
        return bool(steps)

    def leave_suspects(self, store: Store, suspects: set[str], *, stay: bool) -> int | None:
        """Abandon the checkpoints that may be torn, with what comes after them; return the generation that this opens.

        With ``stay``, only warn of them.

        Raises:
            StorageError: the device refused.
        """
        line = sorted((one for one in store.checkpoints(self._run) if one.on_line), key=lambda one: one.ref)
        first = next((number for number, one in enumerate(line) if one.save_id in suspects), None)
        if first is None:
            return None
        parent = line[first - 1] if first else None
        opened = None if stay else store.begin_generation(parent, run=self._run)
        since = "" if parent is None else f", and training goes on from step {parent.step}"
        what = "delete them, or a restore may choose them" if stay else f"they are abandoned{since}"
        warn_user(
            f"run {self._run!r}: the checkpoints of steps {', '.join(str(one.step) for one in line[first:])} may be "
            f"torn, for a tensor changed outside an optimizer in a way that no version counter shows: {what}",
            AbandonedCheckpointsWarning,
        )
        return opened

    def tell_of_ranks(self, step: int, error: RanksError) -> None:
        """Warn of a step that is not saved because other ranks do not come, or do something else."""
        warn_user(f"step {step} of run {self._run!r} was not saved: {error}", LostCheckpointWarning)

    def _lost(self, captures: Sequence[Capture]) -> str:
        """Say which checkpoints were lost, and why."""
        if len(captures) == 1:
            return f"step {captures[0].request.step} of run {self._run!r} was not saved: {_reason(captures[0])}"
        each = [f"step {capture.request.step}: {_reason(capture)}" for capture in captures]
        return "\n  ".join([f"{len(captures)} steps of run {self._run!r} were not saved:", *each])


def _reason(capture: Capture) -> str:
    # That of an interrupt has no words.
    return str(capture.error) or type(capture.error).__name__
