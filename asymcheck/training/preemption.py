"""Preemption: the notice that a training will be killed, its deadline, and the last step of all ranks."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from asymcheck.capture.signals import INTERRUPTS
from asymcheck.config import SECONDS, Grace, check_number
from asymcheck.errors import InvalidInputError, Preempted, PreemptionWarning, warn_user
from asymcheck.executor import Thread, start
from asymcheck.training.interval_controller import AnnouncedSteps
from asymcheck.training.resume import ResumeCoordinator

_COPY_S = 2.0
"""Time in which further signals are copies of the first: torchrun forwards the signal that all processes receive."""
_EXIT_S = 0.5
"""Time that the end of the interpreter takes."""
_CHECK_S = 0.25
"""Time between two checks of several ranks for a notice."""
_NOTICED = "preempted"

_open: list[Preemption] = []


class Preemption:
    """Notice that the process of one Checkpointer will be killed. For the training thread, except where noted."""

    def __init__(self, run: str, grace: Grace, coordinator: ResumeCoordinator | None) -> None:
        """Wait for a notice; with ``coordinator``, all ranks end after the same step.

        Raises:
            InvalidInputError: signals are to be received, but this is not the main thread.
            StorageError: no thread can be started.
        """
        self._run, self._grace, self._coordinator = run, grace, coordinator
        self.signals = grace.signals
        self._announced = None if coordinator is None else AnnouncedSteps(partial(coordinator.broadcast, why="ends at"))
        self._deadline_s: float | None = None
        self._signalled_s: float | None = None
        self._numbers: list[int] = []
        self._is_told = False
        self._checks: list[tuple[int, float]] = []  # step and time of the first and of the last check
        self.step: int | None = None
        """The last step, once it is known."""
        self.is_over = False
        """Whether the training was ended."""
        # Its put() may interrupt itself, which other ways to wake a thread do not support.
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        if grace.signals and threading.current_thread() is not threading.main_thread():
            raise InvalidInputError(
                "save_on_signal: only the main thread receives signals. Create the Checkpointer there, or pass "
                "asymcheck.Grace(signals=()) and call its preempt() when the training has to end"
            )
        # First, because without the thread there is no Checkpointer, and the signals remain those of the program.
        start(Thread(self._watch, "asymcheck-preemption"))
        if grace.signals:
            INTERRUPTS.listen(self)
        _open.append(self)

    @property
    def is_noticed(self) -> bool:
        """Whether the end was announced to this process. On any thread."""
        return self._deadline_s is not None

    def left_s(self) -> float | None:
        """Return the seconds until the process should have ended; None without a notice. On any thread."""
        return None if self._deadline_s is None else max(self._deadline_s - _EXIT_S - time.monotonic(), 0.0)

    def received(self, number: int) -> bool:
        """Note a signal; return False for a second one, which ends the process at once."""
        now = time.monotonic()
        if self._signalled_s is not None:
            return now - self._signalled_s < _COPY_S
        self._signalled_s = now
        self._numbers.append(number)
        self.notice(self._grace.seconds, signal.Signals(number).name)
        return True

    def notice(self, seconds: float, why: str) -> None:
        """Note that the process will be killed in ``seconds``. On any thread, also in a signal handler.

        All Checkpointers of the process learn of it. Otherwise, a rank could end after the last step of one of them,
        and be missing in the last save of another one.
        """
        deadline_s = time.monotonic() + seconds
        for told in dict.fromkeys([self, *_open]):
            told._note(deadline_s, why)  # noqa: SLF001 - of the same class

    def _note(self, deadline_s: float, why: str) -> None:
        if self._deadline_s is None or deadline_s < self._deadline_s:
            self._deadline_s = deadline_s
            self._news.put(why)

    def ends_at(self, step: int) -> bool:
        """Return whether ``step`` is the last one, on all ranks.

        Raises:
            RanksError: rank 0 does not decide, or is at another step.
        """
        INTERRUPTS.renew()
        if self._coordinator is not None and self._announced is not None:
            self._tell(self._coordinator)
            verdict = self._announced.decide(step, partial(self._decide, step, self._coordinator))
            if verdict is None or verdict["step"] != step or verdict["left_s"] is None:
                return False
            if not self.is_noticed:
                self.notice(verdict["left_s"], "notice to another rank")
        if self.is_noticed:
            self.step = step
        return self.is_noticed

    def _tell(self, coordinator: ResumeCoordinator) -> None:
        """Tell rank 0 of a notice to this rank."""
        left_s = self.left_s()
        if left_s is not None and not self._is_told and not coordinator.is_first:
            coordinator.session().note(_NOTICED, str(left_s))
            self._is_told = True

    def _decide(self, step: int, coordinator: ResumeCoordinator) -> object:
        """Decide on rank 0 whether all ranks end at this step, and at which step to look again."""
        noted = coordinator.session().noted(_NOTICED)
        if noted is not None and not self.is_noticed:
            self.notice(float(noted), "notice to another rank")
        return {"step": step, "left_s": self.left_s(), "next": step + self._steps_until_check(step)}

    def _steps_until_check(self, step: int) -> int:
        """Return the number of steps until rank 0 looks again for a notice.

        A program may run ahead of its device for many steps, which then seem to take no time. The number follows from
        the slower of the newest pace and the mean pace, and at most doubles.
        """
        check = step, time.monotonic()
        if not self._checks or step <= self._checks[-1][0]:
            self._checks = [check, check]
            return 1
        step_s = max((check[1] - time_s) / (step - number) for number, time_s in self._checks)
        steps = 2 * (step - self._checks[-1][0])
        self._checks[-1] = check
        return max(int(min(steps, _CHECK_S / max(step_s, _CHECK_S / steps))), 1)

    def finish(self, *, waits: bool) -> None:
        """End the training once its checkpoint is durable. The program's handlers of the received signals come first.

        With ``waits``, return if another Checkpointer of this process has not saved its last step yet.

        Raises:
            Preempted: the training has ended, unless a handler raises another exception.
        """
        if waits and any(other.is_noticed for other in _open):
            return
        self.is_over = True
        while self._numbers:
            INTERRUPTS.call(self._numbers.pop(0))
        raise Preempted(self.step)

    def close(self) -> None:
        """Wait for no more notices. Closing twice is no error. On any thread."""
        self._news.put(None)
        if self in _open:
            _open.remove(self)
            INTERRUPTS.ignore(self)

    def _watch(self) -> None:
        """Warn of notices and a missed deadline, and ask the ``notice`` of the program. On a separate thread."""
        asks, is_failing = self._grace.notice, False
        while True:
            left_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
            try:
                why = self._news.get(timeout=self._grace.poll_s if left_s is None else max(left_s, 0))
            except queue.Empty:
                if left_s is not None:
                    what = "step() was not called" if self.step is None else f"the save of step {self.step} did not end"
                    return self._warn(f"{what} within the grace period; a restart may continue from an older step")
                if asks is not None:
                    is_failing = self._ask(asks, is_failing=is_failing)
                continue
            if why is None:
                return None
            self._warn(
                f"{why}, {(self._deadline_s or 0.0) - time.monotonic():.1f} s left: the next step() is saved and ends "
                "the training; a second signal ends the process at once"
            )

    def _ask(self, asks: Callable[[], float | None], *, is_failing: bool) -> bool:
        try:
            if (seconds := asks()) is not None:
                # The time may be over already.
                left_s = max(float(seconds), 0.0)
                check_number("notice()", left_s, *SECONDS)
                self.notice(left_s, "notice of the machine")
        except Exception as error:  # noqa: BLE001 - the training must go on
            if not is_failing:
                self._warn(f"no notice of the machine can be received: {error!r}")
            return True
        return False

    def _warn(self, message: str) -> None:
        # Warnings may be errors.
        with contextlib.suppress(PreemptionWarning):
            warn_user(f"run {self._run!r}: {message}", PreemptionWarning)
