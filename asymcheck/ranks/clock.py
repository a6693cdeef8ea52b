"""Waiting for other ranks: by looking, ever less often, up to a limit; and what is said when they do not come."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

from asymcheck.errors import RanksMissingError

_POLL_S = (0.0002, 0.05)
"""How long is slept between two looks, at first and in the end …"""
_POLL_OF_EACH_S = 50e-6
"""… and more for each that looks at the same time: all of them ask one server."""
ENDING_S = 10.0
"""How long is waited in a process that is to end; likewise less for a rank that was missing the last time."""
_LATE_SHARE = 0.1
"""What part of the time a rank is waited for that was missing the last time: it may be dead, and saves queue up."""
_SHOWN = 8


class Clock:
    """Waits for something by looking at it, ever less often, up to a limit; so do ``lookers`` at the same time."""

    def __init__(
        self, timeout_s: float, lookers: int, is_ending: Callable[[], bool], is_gone: Callable[[], bool] | None = None
    ) -> None:
        """Begin to wait; ``is_ending``: this process is to end.

        With ``is_gone`` a small part of both limits is waited, and all of them if it says then that nobody is gone.
        """
        self._began = time.monotonic()
        self._timeout_s = timeout_s
        self._is_ending, self._is_gone = is_ending, is_gone
        self._ending_since: float | None = None
        self._pause_s, self._pause_max_s = _POLL_S[0], _POLL_S[1] + lookers * _POLL_OF_EACH_S

    @property
    def waited_s(self) -> float:
        """How long it has waited."""
        return time.monotonic() - self._began

    def wait(self, is_there: Callable[[], bool]) -> bool:
        """Return whether it was there in time."""
        while not is_there():
            if self._is_over():
                # Once more: this process may have stood still for all of the time.
                return is_there()
            time.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 1.2, self._pause_max_s)
        return True

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._ending_since is None and self._is_ending():
            self._ending_since = now
        if self._is_gone is not None and self._is_past(now, _LATE_SHARE) and not self._is_gone():
            self._is_gone = None
        return self._is_past(now, 1.0 if self._is_gone is None else _LATE_SHARE)

    def _is_past(self, now: float, share: float) -> bool:
        return now - self._began > self._timeout_s * share or (
            self._ending_since is not None and now - self._ending_since > ENDING_S * share
        )


class Remedy(enum.Enum):
    """The advice about missing ranks, by what they were missed in."""

    MEETING = (
        "each rank has to make its Checkpointer and call the same methods in the same order; pass ranks=None to save "
        "one rank alone"
    )
    ROUND = "look there for what ended or held it up"


def missing_error(
    missing: Sequence[int], what: str, waited_s: float, remedy: Remedy = Remedy.ROUND
) -> RanksMissingError:
    """Return the error that names the missing ranks, what they were missed in, and the remedy."""
    ranks = ", ".join(map(str, missing[:_SHOWN]))
    if len(missing) > _SHOWN:
        ranks += f" and {len(missing) - _SHOWN} more"
    noun = "rank" if len(missing) == 1 else "ranks"
    return RanksMissingError(f"{what}: {noun} {ranks} did not answer within {waited_s:.1f} s; {remedy.value}", missing)
