"""The training loop's side: save every so many steps, restore at the start."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    CheckpointNotFoundError,
    InvalidInputError,
    SkippedCheckpointWarning,
    warn_user,
)
from asymcheck.store import Store
from asymcheck.types import Checkpoint


class Checkpointer:
    """Saves a state every so many steps, and brings it back.

    Use it so::

        ckpt = asymcheck.Checkpointer(
            store, {"model": model, "optimizer": optimizer, "rng": asymcheck.RngState()}, every=50
        )
        restored = ckpt.restore()
        for step in range(restored.step + 1 if restored else 0, steps):
            ...
            ckpt.step(step, metrics={"loss": loss.item()})

    Saves are synchronous: when :meth:`step` returns, the checkpoint is durable. Not thread-safe.
    """

    def __init__(self, store: Store, state: dict[str, object], *, every: int = 1, run: str = DEFAULT_RUN) -> None:
        """Watch ``state``, whose objects and tensors stay the caller's; save to ``store`` under the name ``run``."""
        if not isinstance(store, Store):
            raise InvalidInputError(f"store {store!r:.100}: give what Store.open(location) returned")
        if type(state) is not dict:
            raise InvalidInputError(f"state: give a dict such as {{'model': model}}, not {type(state).__name__}")
        if type(every) is not int or every < 1:
            raise InvalidInputError(f"every={every}: give the number of steps between two checkpoints, 1 or more")
        self._store = store
        self._state = state
        self._every = every
        self._run = run
        self._generation: int | None = None
        self._last: int | None = None

    def restore(self, step: int | None = None) -> Checkpoint | None:
        """Bring the state back from the newest consistent checkpoint, or from that of ``step``.

        Returns None when there is none yet.

        Opens a new generation before it returns: what lies after the restored checkpoint is abandoned from now on.

        Raises:
            CheckpointNotFoundError: ``step`` was given and is not there.
            InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: see
                :meth:`Store.load`.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was passed over.
        """
        try:
            restored = self._store.restore(step, into=self._state, run=self._run, fall_back=True)
        except CheckpointNotFoundError:
            if step is not None:
                raise
            self._warn_of_abandoned("all are abandoned, so none is restored; restore(step=…) goes on from one of them")
            return None
        for reason in restored.skipped:
            warn_user(f"run {self._run!r}: passed over {reason}", SkippedCheckpointWarning)
        self._generation = self._store.begin_generation(restored.checkpoint, run=self._run)
        self._last = restored.checkpoint.step
        return restored.checkpoint

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint | None:
        """Say that training step ``step`` is done.

        Saves when it is a multiple of ``every`` and returns the checkpoint, else None.
        """
        return self.save(step, metrics) if step % self._every == 0 else None

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Save now, whatever ``every`` says."""
        # The line of training is left only for a checkpoint that is all but committed, never for one that fails.
        generation = self._first_generation if self._generation is None else self._generation
        checkpoint = self._store.save(self._state, step=step, metrics=metrics, run=self._run, generation=generation)
        self._last = checkpoint.step
        return checkpoint

    def _first_generation(self) -> int:
        """Training begins without a restore: on a run that has checkpoints already, that is a new line from nothing."""
        self._warn_of_abandoned("they are abandoned by this save; call restore() first to go on from the newest")
        self._generation = self._store.begin_generation(None, run=self._run)
        return self._generation

    def _warn_of_abandoned(self, what: str) -> None:
        steps = [checkpoint.step for checkpoint in self._store.checkpoints(self._run)]
        if steps:
            message = f"run {self._run!r} has {len(steps)} checkpoints up to step {max(steps)}: {what}"
            warn_user(message, AbandonedCheckpointsWarning)

    @property
    def last_step(self) -> int | None:
        """The step saved or restored last; None before either."""
        return self._last

    def close(self) -> None:
        """Finish. The store stays open: it is the caller's."""

    def __enter__(self) -> Checkpointer:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish."""
        self.close()
