"""Pushing: checkpoints go to a remote location beside the training, as they become durable."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping

from asymcheck.errors import UnreachableRemoteWarning, warn_user
from asymcheck.migration.statistics import PushStatistics
from asymcheck.policies.pushing import Push


class Pushing(abc.ABC):
    """Pushes what a :class:`Push` chooses of a run. Close it, or use it in a ``with`` block.

    It never keeps the training waiting: a location that does not answer makes the backlog grow, and nothing else. The
    newest checkpoint goes first. One that is deleted here before its turn is not pushed.
    """

    def __init__(self, run: str, rules: Push) -> None:
        """Push what ``rules`` choose of ``run``."""
        self.rules = rules
        self._run = run

    @abc.abstractmethod
    def statistics(self) -> PushStatistics:
        """Return what it has done so far."""

    @abc.abstractmethod
    def look(self) -> None:
        """Count what waits, and send it soon. Called after a commit it makes the backlog true at once; never raises."""

    @abc.abstractmethod
    def held(self) -> Mapping[str, str]:
        """Return the save ids that the retention of the store leaves alone, with the reasons. Speaks to nobody."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until all that is to be pushed now lies there.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: an attempt that began after the call has failed.
            InconsistentCheckpointError: some are damaged here; the others lie there.
        """

    @abc.abstractmethod
    def close(self, timeout_s: float | None = None) -> PushStatistics:
        """Push what is left, once, and end; return what was done in all. Closing twice is no error.

        Args:
            timeout_s: give up after so many seconds; None for ``close_s`` of the rules. What is left behind is sent by
                the next one that pushes this store there; what was sent of it is not sent again.

        Raises:
            InvalidInputError: no thread can wait for so long; nothing was ended.

        Warns:
            UnreachableRemoteWarning: checkpoints are left that are not there, or something else is wrong.
        """

    def _warn_of_left(self) -> None:
        """Say at the end what is not there, or what else is wrong."""
        now = self.statistics()
        if now.backlog:
            warn_user(
                f"run {self._run!r}: {now.backlog} checkpoints were not pushed to {self.rules.location} "
                f"({now.problem or 'no time was left'}); the next training that pushes there sends them, or asymcheck "
                "push --all does",
                UnreachableRemoteWarning,
            )
        elif now.problem:
            warn_user(f"run {self._run!r}, pushed to {self.rules.location}: {now.problem}", UnreachableRemoteWarning)

    def __enter__(self) -> Pushing:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close it; when the block failed, a warning must not hide why."""
        with contextlib.suppress(UnreachableRemoteWarning) if error is not None else contextlib.nullcontext():
            self.close()
