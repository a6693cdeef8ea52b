"""What became of captures: noted as soon as it is known, told when that may interrupt the training loop."""

from __future__ import annotations

from collections.abc import Callable

from asymcheck.complaints import Complaints
from asymcheck.errors import InvalidInputError, LostCheckpointWarning, RanksError, warn_user
from asymcheck.last_step import LastStep
from asymcheck.migration.beside import Beside
from asymcheck.pipeline.background import Background
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.report import CheckpointReport, report_of
from asymcheck.pruning import Upkeep


class Outcomes:
    """The captures of one Checkpointer that are durable or lost, and of which the training loop has not heard yet."""

    def __init__(
        self, complaints: Complaints, last: LastStep, on_checkpoint: Callable[[CheckpointReport], object] | None
    ) -> None:
        """Tell by ``complaints`` and ``on_checkpoint``.

        Raises:
            InvalidInputError: that is no function.
        """
        if on_checkpoint is not None and not callable(on_checkpoint):
            raise InvalidInputError(f"on_checkpoint={on_checkpoint!r:.100}: give a function of one argument, or None")
        self._complaints, self._last, self._on_checkpoint = complaints, last, on_checkpoint
        self._untold: list[Capture] = []

    def wait(self, background: Background | None) -> int | None:
        """Wait until everything begun is durable or lost, and do as :meth:`note`; raises nothing of that."""
        if background is not None:
            background.wait("nvme")
        return self.note(background)

    def note(self, background: Background | None) -> int | None:
        """Count what has become durable, or was lost, and return the last step that is not; raises nothing."""
        settled = [] if background is None else background.settled()
        self._last.settle(settled)
        self._untold += settled
        return self._last.value

    def tell(self, upkeep: Upkeep | None, beside: Beside) -> None:
        """Tell each once, and what went wrong with what is removed and pushed.

        Raises:
            LostCheckpointError, PruneError: see :class:`Complaints`. And whatever the function of the caller raises.
        """
        untold, self._untold = self._untold, []
        try:
            if self._on_checkpoint is not None:
                for capture in untold:
                    self._on_checkpoint(report_of(capture))
        finally:
            # Also when the caller's function raises.
            self._complaints.tell(untold)
            self._complaints.tell_of_pruning(None if upkeep is None else upkeep.new_failure())
            beside.tell()

    def tell_of_ranks(self, run: str, step: int, error: RanksError) -> None:
        """Warn of a step that is not saved because other ranks do not come, or do something else."""
        warn_user(f"step {step} of run {run!r} was not saved: {error}", LostCheckpointWarning)
