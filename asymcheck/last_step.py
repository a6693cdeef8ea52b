"""The last step of a training that was saved, as far as is known: one that is lost counts no more."""

from __future__ import annotations

from collections.abc import Iterable

from asymcheck.pipeline.capture import Capture


class LastStep:
    """Which step was saved or restored last."""

    def __init__(self) -> None:
        """Begin with none."""
        self.value: int | None = None
        """The step, also one that is still on its way; None before any."""
        self._kept: int | None = None

    def begun(self, step: int) -> None:
        """Take a step that is being saved."""
        self.value = step

    def kept(self, step: int) -> None:
        """Take a step that is durable."""
        self.value = self._kept = step

    def settle(self, captures: Iterable[Capture]) -> None:
        """Take what became of steps that were on their way."""
        for capture in captures:
            if capture.error is None:
                self._kept = capture.request.step
            elif capture.request.step == self.value:
                self.value = self._kept
