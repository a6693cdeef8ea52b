"""What a store does with remote locations: checkpoints go there, and come back."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from asymcheck.arguments import check_step
from asymcheck.captures import Captures
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import CatalogError, InvalidInputError, RemoteCopyWarning, UnreachableRemoteWarning, warn_user
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.migration.collect_remote import collect_remote
from asymcheck.migration.heal import can_be_healed, heal
from asymcheck.migration.messages import Order
from asymcheck.migration.pull import pull
from asymcheck.migration.push import push
from asymcheck.migration.pushing import Pushing
from asymcheck.migration.pushing_process import PushingProcess
from asymcheck.migration.pushing_thread import PushingThread
from asymcheck.migration.selection import selected
from asymcheck.migration.tally import Moved
from asymcheck.pipeline.collect import Collected, collect
from asymcheck.policies.pushing import Push, check_seconds
from asymcheck.recovery.rebuild import Rebuilt, rebuild
from asymcheck.recovery.repair import repair
from asymcheck.recovery.repaired import Repaired
from asymcheck.recovery.resolve import candidates, resolve_each
from asymcheck.tiers.at_hand import AtHand
from asymcheck.tiers.nvme import Catalog, Transaction
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteLocation, RemoteTier, parse_location
from asymcheck.tiers.spanning import Far, SpanningTier
from asymcheck.types import CheckpointRef, Progress

_T = TypeVar("_T")


class Remotes(Captures):
    """An opened store, as far as its checkpoints go elsewhere; :class:`asymcheck.Store` adds the rest."""

    _far: Far | None = None

    def _stand_behind(self, location: RemoteLocation) -> None:
        """Read from ``location`` what is missing or damaged here."""
        self._far = Far(str(location), lambda: RemoteTier(location, self._tier.config))

    @contextlib.contextmanager
    def _source(self) -> Iterator[ReadTier]:
        """Yield what checkpoints are read from: memory, the store, and the location that stands behind it.

        Warns:
            RemoteCopyWarning: something was read from there.
        """
        if self._far is None:
            yield self._with_memory(self._tier)
            return
        spanning = SpanningTier(self._nvme, self._far)
        yield self._with_memory(spanning)
        # That parts of other machines lie there is as it should be.
        if spanning.far_packs and not spanning.manifests.has_parts:
            warn_user(
                f"store {self.location}: some of it is missing or damaged and was read from {self._far.name}; "
                f"asymcheck verify {self.location} --repair --remote {self._far.name} brings it back",
                RemoteCopyWarning,
            )

    def _with_memory(self, tier: ReadTier) -> ReadTier:
        return AtHand(tier, self._at_hand) if self._at_hand else tier

    def warn_of_empty_remote(self) -> None:
        """Say that there is nothing in the location behind the store, for a training that begins from nothing.

        Warns:
            UnreachableRemoteWarning: nothing is there, which can be a mount point without its file system.
        """
        if self._far is not None and self._far.tier() is None:
            warn_user(
                f"nothing is restored: nothing was pushed to {self._far.name} yet. If something was, stop this "
                "training and see whether the name is right and the file system is mounted",
                UnreachableRemoteWarning,
            )

    def restorable(self, run: str, step: int | None, skipped: list[str]) -> Iterator[CheckpointRef]:
        """Yield the consistent checkpoints of a run, or of a step of it, in the order in which to try them.

        Appends to ``skipped`` why others are passed over.

        Raises:
            CheckpointNotFoundError, HeadRecordError, UnsupportedFormatError: as :meth:`asymcheck.Store.load`.
        """
        with self._source() as source:
            for resolved in resolve_each(source, candidates(source, run, step), skipped):
                resolved.sources.close()
                yield resolved.ref

    def repair(self, progress: Progress | None = None) -> Repaired:
        """Make whole what is damaged, from what is intact; delete no checkpoint. Reads every byte of the packs.

        What is lost here is fetched from the location that was given as ``remote`` to :meth:`open`, if any; what cannot
        be had there stops nothing else. Safe beside saves, loads and collections of other processes. What it cannot
        repair it names, with what can be done about it.
        A second repair in a row does nothing.

        Raises:
            ReadOnlyStoreError: the store was opened with ``read_only=True``, or cannot be written.
            StorageError: the disk is full or refused; nothing is lost, and the next repair goes on.
            RemoteUnreachableError: something is lost here, and the remote location does not answer.
        """
        first = self._with_catalog(lambda catalog, made: repair(self._nvme, catalog, progress, made))
        there = self._far.tier() if self._far is not None and can_be_healed(first.left) else None
        if there is None:
            return first
        healed = heal(there, self._writable(), self._catalog(), first.left, progress)
        copied, nbytes = first.copied_partitions, first.copied_bytes
        if not healed.done:
            return Repaired(first.done, healed.told(first.left), copied, nbytes)
        # What is damaged here and was brought is of no use any more.
        second = self._with_catalog(lambda catalog, made: repair(self._nvme, catalog, progress, made))
        return Repaired((*first.done, *healed.done, *second.done), healed.told(second.left), copied, nbytes)

    def _with_catalog(self, use: Callable[[Catalog, Rebuilt | None], _T], *, anew: bool = False) -> _T:
        """Open the catalog and use it; once more when it turns out damaged, for to open it again sets it aside."""
        tier, made = self._writable(), list[Rebuilt]()

        def populate(transaction: Transaction) -> None:
            made[:] = [rebuild(tier, transaction)]

        try:
            return use(tier.open_catalog(populate, anew=anew), made[0] if made else None)
        except CatalogError:
            tier.leave_catalog()
            return use(tier.open_catalog(populate, anew=anew), made[0] if made else None)

    def push(
        self,
        location: str | os.PathLike[str],
        step: int | None = None,
        *,
        run: str | None = None,
        everything: bool = False,
        progress: Progress | None = None,
    ) -> Moved:
        """Copy a checkpoint to a remote location: what survives the loss of this machine.

        Partitions that are there already are not sent again, and a push that was interrupted goes on where it was.
        Other processes may save here, and push there, at the same time.

        Args:
            location: ``hdfs://namenode:port/path``, ``file:///path``, or another URI that pyarrow knows; made when
                nothing is there.
            step: which checkpoint; None for the newest consistent one.
            run: whose; ``"default"`` by default.
            everything: all complete checkpoints on the line, of ``run`` or of all runs; then no ``step`` is given.
            progress: called with bytes sent and to be sent, for the checkpoint that is being copied.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, DamagedPartitionError, MissingPartitionError,
            FormatError: it cannot be copied.
            RemoteUnreachableError: the location did not answer in time; nothing is known of what lies there.
            StorageError: the location refused. What was committed there stays.
            InvalidInputError: there is another training of that run name, or no client for the location.
        """
        self._tier.check_usable()
        step = _checked_step(step, everything=everything)
        listings = selected(self._tier, _checked(run), step, everything=everything)
        there = RemoteTier(parse_location(location), self._tier.config, create=True)
        with contextlib.closing(there), timed("push", 0, lambda: {"location": str(there.location)}):
            return push(self._tier, there, listings, progress)

    def pushing(
        self,
        location: str | os.PathLike[str] | Push,
        *,
        run: str = DEFAULT_RUN,
        every: int | None = None,
        poll_s: float = 0.5,
        prunes: bool = True,
    ) -> Pushing:
        """Push checkpoints beside a training, as they become durable; use the result in a ``with`` block around it.

        Those of ``run`` whose step is a multiple of ``every``, by default all, or that a :class:`Push` chooses, also
        those that are in the store already. It goes on by itself after an interruption, and :meth:`Pushing.statistics`
        says how many are still to be sent. Close it before the store. ``Checkpointer(push=…)`` keeps one for you. Of
        several stores that push one run to one location, only one ``prunes`` it: removes there what ``Push.keep`` does
        not keep.

        Raises:
            InvalidInputError: ``location``, ``every`` or ``poll_s`` cannot be used. Nobody is asked there.
        """
        self._tier.check_usable()
        layout.check_run(run)
        if not isinstance(location, Push):
            location = Push(os.fspath(location), every=1 if every is None else every, close_s=None)
        elif every is not None:
            raise InvalidInputError(
                f"every={every!r:.100} beside a Push: give Push(…, every=…), which says what is chosen"
            )
        if not check_seconds("poll_s", poll_s):
            raise InvalidInputError("poll_s=0: give seconds between two looks, more than 0")
        where = parse_location(location.location)
        config = self._tier.config
        # A frozen program has no interpreter: what it calls so is itself.
        if location.own_process and sys.executable and not getattr(sys, "frozen", False):
            here = self.location if isinstance(self._tier, RemoteTier) else os.path.abspath(self.location)
            return PushingProcess(self._tier, Order(here, config, location, run, poll_s, prunes))
        return PushingThread(
            self._tier, partial(RemoteTier, where, config, create=True), run, location, poll_s, prunes=prunes
        )

    def pull(
        self,
        location: str | os.PathLike[str],
        step: int | None = None,
        *,
        run: str | None = None,
        everything: bool = False,
        progress: Progress | None = None,
    ) -> Moved:
        """Copy a checkpoint from a remote location into this store, every byte verified; see :meth:`push`.

        With ``everything``, one that cannot be copied stops no other; at the end the error names all of them.

        Raises:
            StoreNotFoundError: nothing was pushed to ``location``.
            CheckpointNotFoundError, InconsistentCheckpointError, DamagedPartitionError, MissingPartitionError,
            FormatError, RemoteUnreachableError, StorageError, InvalidInputError: as for :meth:`push`.
        """
        tier = self._writable()
        step = _checked_step(step, everything=everything)
        there = RemoteTier(parse_location(location), tier.config)
        with contextlib.closing(there), timed("pull", 0, lambda: {"location": str(there.location)}):
            listings = selected(there, _checked(run), step, everything=everything)
            return pull(there, tier, self._catalog(), listings, progress)

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Free the packs that no checkpoint needs, for new checkpoints to overwrite.

        Safe beside saves and loads of other processes. In a remote location such packs, and what interrupted uploads
        have left, are removed when they are older than ``RemoteConfig.grace_s``.
        """
        self._tier.check_usable()
        if isinstance(self._tier, RemoteTier):
            return collect_remote(self._tier, dry_run=dry_run)
        return collect(self._writable(), self._catalog(), dry_run=dry_run)


def _checked_step(step: int | None, *, everything: bool) -> int | None:
    if everything and step is not None:
        raise InvalidInputError(f"step {step!r:.100} with everything=True, which copies every step: give one of them")
    return None if step is None else check_step(step)


def _checked(run: str | None) -> str | None:
    return None if run is None else layout.check_run(run)
