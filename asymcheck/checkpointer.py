"""The training loop's side: save every so many steps in the background, restore at the start."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Literal

from asymcheck.captures import warn_of_order
from asymcheck.config import DEFAULT_RUN, CaptureConfig
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    CheckpointNotFoundError,
    InvalidInputError,
    LostCheckpointError,
    LostCheckpointWarning,
    SkippedCheckpointWarning,
    StaleStateWarning,
    warn_user,
)
from asymcheck.pipeline.background import Background, Statistics, TierName
from asymcheck.store import Store
from asymcheck.types import Checkpoint

OnError = Literal["raise", "warn"]
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

    def __init__(
        self,
        store: Store,
        state: dict[str, object],
        *,
        every: int = 1,
        run: str = DEFAULT_RUN,
        on_error: OnError = "raise",
        capture: CaptureConfig | None = None,
    ) -> None:
        """Watch ``state``, whose objects and tensors stay the caller's; save to ``store`` under the name ``run``.

        Args:
            store: an opened, writable store, which stays the caller's.
            state: as :meth:`Store.save` takes it. Optimizers given as objects make saving cheap: what they own is
                copied beside the training.
            every: number of steps between two checkpoints.
            run: whose checkpoints.
            on_error: what happens in the training loop when a checkpoint could not be stored.
            capture: knobs of the background.
        """
        if not isinstance(store, Store):
            raise InvalidInputError(f"store {store!r:.100}: give what Store.open(location) returned")
        if type(state) is not dict:
            raise InvalidInputError(f"state: give a dict such as {{'model': model}}, not {type(state).__name__}")
        if type(every) is not int or every < 1:
            raise InvalidInputError(f"every={every}: give the number of steps between two checkpoints, 1 or more")
        if on_error not in ("raise", "warn"):
            raise InvalidInputError(f"on_error={on_error!r}: give 'raise' or 'warn'")
        self._store = store
        self._state = state
        self._every = every
        self._run = run
        self._on_error = on_error
        self._config = capture or CaptureConfig()
        self._generation: int | None = None
        self._last: int | None = None
        self._background: Background | None = None
        self._statistics = Statistics()
        self._ending = _Ending(self)

    def restore(self, step: int | None = None) -> Checkpoint | None:
        """Bring the state back from the newest consistent checkpoint, or from that of ``step``.

        Returns None when there is none yet. What a killed process of this store left in memory is made durable first.

        Opens a new generation before it returns: what lies after the restored checkpoint is abandoned from now on.

        Raises:
            CheckpointNotFoundError: ``step`` was given and is not there.
            InconsistentCheckpointError, StateMismatchError, PartialRestoreError, HeadRecordError: see
                :meth:`Store.load`.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was passed over.
        """
        self.wait()
        self._store.settle()
        for adopted in self._store.adopt(self._config.ring_folder):
            if adopted.ref is None:
                what = "a checkpoint" if adopted.step is None else f"step {adopted.step}"
                of_run = "" if adopted.run is None else f" of run {adopted.run!r}"
                message = f"passed over {what}{of_run}, which lay in memory: {adopted.problem}"
                warn_user(message, SkippedCheckpointWarning)
        try:
            restored = self._store.restore(step, into=self._state, run=self._run, fall_back=True)
        except CheckpointNotFoundError:
            if step is not None:
                raise
            self._warn_of_abandoned("all are abandoned, so none is restored; restore(step=…) goes on from one of them")
            return None
        for reason in restored.skipped:
            warn_user(f"run {self._run!r}: passed over {reason}", SkippedCheckpointWarning)
        self._go_on_from(restored.checkpoint)
        return restored.checkpoint

    def rollback(self) -> Checkpoint:
        """Bring the state back from the newest checkpoint on the line that is complete in memory.

        No byte of it is read from a disk.

        Opens a new generation, as :meth:`restore` does.

        Raises:
            CheckpointNotFoundError: none is in memory.
            StateMismatchError, DigestMismatchError
        """
        self.wait()
        on_line = self._store.line(self._run)
        found = None if self._background is None else self._background.newest_in_ring(on_line)
        if found is None:
            raise CheckpointNotFoundError(f"no checkpoint of run {self._run!r} is in memory; restore() reads the store")
        checkpoint = self._store.load_captured(*found, into=self._state)
        self._go_on_from(checkpoint)
        return checkpoint

    def _go_on_from(self, checkpoint: Checkpoint) -> None:
        self._generation = self._store.begin_generation(checkpoint, run=self._run)
        self._last = checkpoint.step

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Say that training step ``step`` is done; return whether a checkpoint of it was begun.

        One is begun when ``step`` is a multiple of ``every``.

        Raises:
            LostCheckpointError: an earlier checkpoint could not be stored, unless ``on_error`` is ``"warn"``.
            UnsupportedValueError, InvalidInputError: something in the state, or an argument, cannot be stored.
        """
        with self._ending.held():
            self._report()
            if step % self._every:
                return False
            if self._last is not None and step < self._last:
                warn_of_order(self._run, self._last, step)
            if self._background is None:
                if self._generation is None and not self._warn_of_abandoned(
                    f"they are abandoned by the next checkpoint; {_RESTORE_FIRST}"
                ):
                    # At once: nothing is abandoned, and what is in memory can be resumed only on a line that is there.
                    self._opened()
                self._background = self._store.background(self._run, self._config, self._opened)
                self._background.statistics = self._statistics
                self._background.held = self._ending.held()
                self._ending.arm(self._background)
            self._background.begin(self._state, self._store.request(self._run, step, metrics), self._generation)
            self._last = step
            return True

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Save now, whatever ``every`` says; when this returns, the checkpoint is durable."""
        with self._ending.held():
            self.wait()
            # The line of training is left only for a checkpoint that is all but committed, never for one that fails.
            generation = self._opened_by_save if self._generation is None else self._generation
            checkpoint = self._store.save(self._state, step=step, metrics=metrics, run=self._run, generation=generation)
            self._last = checkpoint.step
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
        steps = [checkpoint.step for checkpoint in self._store.checkpoints(self._run)]
        if steps:
            message = f"run {self._run!r} has {len(steps)} checkpoints up to step {max(steps)}: {what}"
            warn_user(message, AbandonedCheckpointsWarning)
        return bool(steps)

    def fence(self) -> None:
        """Wait until the state may be changed by something else than an optimizer of it."""
        if self._background is not None:
            with self._ending.held():
                self._background.fence()

    def wait(self, tier: TierName = "nvme") -> None:
        """Wait until every checkpoint begun is durable (``"nvme"``), or complete in memory (``"dram"``).

        Raises:
            LostCheckpointError: one could not be stored, unless ``on_error`` is ``"warn"``.
        """
        if tier not in ("dram", "nvme"):
            raise InvalidInputError(f"tier {tier!r}: give 'dram' or 'nvme'")
        if self._background is not None:
            with self._ending.held():
                self._background.wait(tier)
                self._report()

    def _report(self) -> None:
        """Bring what went wrong in the background to the training loop."""
        settled = [] if self._background is None else self._background.settled()
        for capture in settled:
            if capture.is_stale:
                what = f"step {capture.request.step} of run {self._run!r} has the tensors of the checkpoint before it"
                warn_user(
                    f"{what}, bit for bit: is the state that is trained the one that is saved?", StaleStateWarning
                )
        lost = [capture for capture in settled if capture.error is not None]
        for capture in lost:
            message = f"step {capture.request.step} of run {self._run!r} was not saved: {capture.error}"
            if self._on_error == "raise":
                raise LostCheckpointError(message) from capture.error
            warn_user(message, LostCheckpointWarning)

    def statistics(self) -> Statistics:
        """Return what saving has cost so far."""
        return self._statistics if self._background is None else self._background.statistics

    @property
    def last_step(self) -> int | None:
        """The step saved or restored last; None before either."""
        return self._last

    def close(self) -> None:
        """Make everything durable and give the memory back. The store stays open: it is the caller's.

        Raises:
            LostCheckpointError: a checkpoint could not be stored, unless ``on_error`` is ``"warn"``.
        """
        with self._ending.held():
            self._ending.disarm()
            if self._background is not None:
                self._background.close()
                try:
                    self._report()
                finally:
                    self._statistics = self._background.statistics
                    self._background = None

    def __enter__(self) -> Checkpointer:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish."""
        self.close()


class _Ending:
    """Drains at exit and on SIGTERM, but never in the middle of a call."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = weakref.ref(checkpointer)
        self._background: Callable[[], Background | None] = lambda: None
        self._pid = os.getpid()
        self._depth = 0
        self._terminating = False
        self._armed = False

    def held(self) -> _Ending:
        """Return a context in which SIGTERM waits."""
        return self

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        if self._terminating and not self._depth:
            self._terminate()

    def arm(self, background: Background) -> None:
        """Drain at exit; on SIGTERM too, unless the program has a handler of its own."""
        self._background = weakref.ref(background)
        atexit.register(self._close)
        self._armed = True
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def disarm(self) -> None:
        """Leave exit and SIGTERM as they were."""
        if self._armed:
            atexit.unregister(self._close)
            self._armed = False
            # A bound method is a new object each time it is looked up, but equal.
            if signal.getsignal(signal.SIGTERM) == self._on_signal and not self._terminating:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _close(self) -> None:
        if os.getpid() != self._pid:
            # A forked child, for instance of a data loader, has none of the threads; what is under way is its parent's.
            return
        checkpointer, background = self._checkpointer(), self._background()
        if checkpointer is not None:
            checkpointer.close()
        elif background is not None:
            # A function that trains may have returned without closing; what it began is still under way.
            background.close()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._terminating = True
        if not self._depth or os.getpid() != self._pid:
            self._terminate()

    def _terminate(self) -> None:
        # What is held from now on does not end in another termination.
        self._depth += 1
        try:
            self._close()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
