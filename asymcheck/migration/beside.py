"""Beside: what pushing means to a training loop. It starts and ends with it, and says once what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asymcheck.errors import AsymcheckError, UnreachableRemoteWarning, warn_user
from asymcheck.migration.pushing import Pushing
from asymcheck.migration.statistics import PushStatistics
from asymcheck.policies.pushing import Push, check_push
from asymcheck.pruning import Pruner, Upkeep
from asymcheck.ranks import Ranks


def begun(make: Callable[..., Pushing], push: Push | None, ranks: Ranks | None) -> Beside:
    """Push as ``push`` says, if it does, with what ``make`` returns.

    Of several ranks those that are to push know it when they have met; what lies there is removed by rank 0 alone.

    Raises:
        InvalidInputError: ``push`` is no such thing.
    """
    if push is None:
        return Beside(None)
    return Beside(partial(make, check_push(push), prunes=ranks is None or ranks.rank == 0), begins=ranks is None)


class Beside:
    """The pushing of one Checkpointer, or nothing. For the training thread, where nothing else is said."""

    def __init__(self, make: Callable[[], Pushing] | None, *, begins: bool = True) -> None:
        """Push with what ``make`` returns, from now on: what the last training has left is sent first.

        Unless it ``begins`` now, from :meth:`start` on.
        """
        self._make = make
        self._pushing: Pushing | None = None
        self._is_open = False
        self._told: set[str] = set()
        if begins:
            self.start()

    @property
    def pushes(self) -> bool:
        """Whether anything is pushed, here or by another rank of this store."""
        return self._make is not None

    def start(self) -> None:
        """Begin, or go on after :meth:`close`."""
        if self._make is not None and not self._is_open:
            self._pushing = self._make()
            self._is_open = True

    def after_commit(self, upkeep: Upkeep | None) -> None:
        """Prune, then look what is to be sent; called on a thread of its own; never raises."""
        if upkeep is not None:
            upkeep.after_commit()
        if self._pushing is not None and self._is_open:
            self._pushing.look()

    def holding(self, make: Callable[[], Pruner]) -> Callable[[], Pruner]:
        """Return what makes a pruner that leaves alone what is still to be pushed."""

        def held() -> dict[str, str]:
            return {} if self._pushing is None or not self._is_open else dict(self._pushing.held())

        def made() -> Pruner:
            pruner = make()
            pruner.held = held
            return pruner

        return made

    def statistics(self) -> PushStatistics:
        """Return what was done so far, and count what waits now."""
        if self._pushing is None:
            return PushStatistics()
        if self._is_open:
            self._pushing.look()
        return self._pushing.statistics()

    def wait(self, *, raises: bool) -> None:
        """Wait until all that is to be pushed now lies there; where that fails, raise, or warn.

        Raises:
            RemoteUnreachableError, StorageError, AsymcheckError: why it does not.
        """
        if self._pushing is None or not self._is_open:
            return
        try:
            self._pushing.wait()
        except AsymcheckError:
            if raises:
                raise
            self.tell()

    def tell(self) -> None:
        """Warn of what is wrong with pushing: once for each kind of it, until all is well again."""
        if self._pushing is None:
            return
        now = self._pushing.statistics()
        if not now.problem:
            self._told.clear()
            return
        # What is damaged here may be so for long, and must not keep quiet what comes on top of it.
        kind = now.problem.split(":", 1)[0]
        if kind not in self._told:
            self._told.add(kind)
            waits = f"{now.backlog} checkpoint{' waits' if now.backlog == 1 else 's wait'} to be pushed, "
            warn_user(
                f"{self._pushing.rules.location}: {waits if now.backlog else ''}training goes on: {now.problem}",
                UnreachableRemoteWarning,
            )

    def close(self) -> None:
        """End it, in bounded time.

        Warns:
            UnreachableRemoteWarning: checkpoints are left that are not there.
        """
        if self._pushing is not None and self._is_open:
            self._is_open = False
            self._pushing.close()
