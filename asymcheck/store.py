"""The store: what users open, save to and load from.

It wires the ways down and up to a tier and holds no engine of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from asymcheck.arguments import check_kinds, check_location, check_step
from asymcheck.captures import warn_of_order
from asymcheck.config import DEFAULT_RUN, CaptureConfig, StoreConfig
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError, RemoteUnreachableError
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.format.record import HeadRecord
from asymcheck.pipeline.collect_rings import CollectedRing, collect_rings
from asymcheck.pipeline.commit import remove
from asymcheck.pipeline.request import Place, SaveRequest
from asymcheck.policies.retention import Retention
from asymcheck.pruning import Pruned
from asymcheck.recovery.describe import describe, is_on_line, known_line
from asymcheck.recovery.line import begin_generation, intact_heads
from asymcheck.recovery.rebuild import Rebuilt, reconcile
from asymcheck.recovery.resolve import check_run_exists, what_is_there
from asymcheck.restores import Restores
from asymcheck.tiers.nvme import NvmeTier
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteTier, is_uri, parse_location
from asymcheck.tiers.spanning import Far
from asymcheck.types import Checkpoint, Part

_T = TypeVar("_T")


class Store(Restores):
    """A checkpoint store in a directory on a local drive.

    Open it with :meth:`open`; threads may share it, forked children may not.
    """

    def __init__(self, tier: ReadTier) -> None:
        """Wrap an opened tier; use :meth:`open`."""
        super().__init__(tier)
        # Of these runs the location behind this store was asked.
        self._has_taken_heads: set[str] = set()

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        *,
        read_only: bool = False,
        config: StoreConfig | None = None,
        remote: str | None = None,
    ) -> Store:
        """Open the store at ``location``, a directory; create it when it is missing or empty, unless ``read_only``.

        A URI, such as ``hdfs://namenode:8020/checkpoints`` or ``file:///mnt/checkpoints``, names what :meth:`push` has
        sent there: it is read like a store, and never created or written to here. The same URI as ``remote`` of a store
        on a local drive stands behind that: what is missing or damaged here is read from there, with a warning, and
        :meth:`repair` brings it back.

        Raises:
            StoreNotFoundError: there is none and ``read_only``, or the directory holds something else.
            UnsupportedFileSystemError: the directory is on a network file system.
            FormatError: the store is damaged, or of a version or with a feature that this program does not know.
            InvalidInputError: ``location`` or a value of ``config`` cannot be used, or ``remote`` of a URI was given.
            RemoteUnreachableError: a remote location did not answer.
        """
        config = check_kinds(config)
        if is_uri(location):
            if remote is not None:
                raise InvalidInputError(
                    f"remote {remote!r:.100} of {location!s:.100}: only a store on a local drive has one; leave it out"
                )
            return cls(RemoteTier(parse_location(location), config))
        behind = None if remote is None else parse_location(remote)
        store = cls(NvmeTier(check_location(location), config, read_only=read_only))
        if behind is not None:
            store._stand_behind(behind)
        return store

    def __repr__(self) -> str:
        """Name the directory and how it was opened."""
        mode = "" if isinstance(self._tier, NvmeTier) and not self._tier.read_only else ", read-only"
        return f"<asymcheck.Store {self.location!r}{mode}>"

    def save(
        self,
        state: object,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        run: str = DEFAULT_RUN,
        generation: int | Callable[[], int] | None = None,
        part: Part | None = None,
    ) -> Checkpoint:
        """Store a state durably: when this returns, the checkpoint survives power loss.

        Args:
            state: nested dict, list, tuple of tensors, arrays and plain values; objects with ``state_dict`` and
                ``load_state_dict`` take part.
            step: the training step, 0 or more.
            metrics: named numbers, for instance ``{"loss": 3.2}``.
            run: whose checkpoint it is.
            generation: the line of training; the present one by default. A function is asked when all but the
                manifest is durable. :class:`asymcheck.Checkpointer` keeps it for you.
            part: this rank's part, when several save one checkpoint: each calls this for itself, all with the same
                save id. It is complete when the last one has returned, and is restored only then.

        Raises:
            UnsupportedValueError: something in the state cannot be stored; nothing was written.
            InvalidInputError: another argument cannot be used; nothing was written.
            StorageError: the disk is full or refused; nothing was committed, earlier checkpoints are untouched.
        """
        from asymcheck.partition.state import flatten
        from asymcheck.pipeline.save import save

        tier = self._writable()
        request = self.request(run, step, metrics, part)
        flat = flatten(state)
        placing = self._placing(request, generation)
        with timed("save", 0, lambda: {"run": run, "step": request.step}):
            done = save(tier, self._catalog(), self._encoder, flat, request, placing)
        return Checkpoint(
            run=run,
            step=done.ref.step,
            generation=done.ref.generation,
            save_id=done.ref.save_id.hex(),
            world_size=request.world_size,
            complete=part is None or tier.manifests.listing(run, done.ref).is_complete,
            on_line=generation is None or is_on_line(self._tier, run, done.ref),
            created_ns=int.from_bytes(done.ref.save_id[:8], "big"),
            state_bytes=done.state_bytes,
            written_bytes=done.written_bytes,
            metrics=request.metrics,
        )

    def _placing(self, request: SaveRequest, generation: int | Callable[[], int] | None) -> Callable[[], Place]:
        run, step = request.run, request.step
        before = request.save_id if request.world_size > 1 else None
        if callable(generation):
            return lambda: self._place(run, generation(), before)
        # At once: what is wrong with it is an error before anything is written.
        place = self._place(run, generation, before)
        if place.parent is not None and place.parent.generation == place.generation and place.parent.step > step:
            warn_of_order(run, place.parent.step, step)
        return lambda: place

    def delete(self, step: int, *, run: str = DEFAULT_RUN, generation: int | None = None) -> list[Checkpoint]:
        """Delete the checkpoints of a step, of one generation or of all, durably; return them.

        :meth:`gc` gives the room back.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        tier = self._tier if isinstance(self._tier, RemoteTier) else self._writable()
        tier.check_usable()
        step = check_step(step)
        listings = [
            listing for listing in tier.manifests.checkpoints(layout.check_run(run)) if listing.ref.step == step
        ]
        listings = [listing for listing in listings if generation in (None, listing.ref.generation)]
        if not listings:
            there = what_is_there(self._tier, run, self._tier.manifests.checkpoints(run))
            raise CheckpointNotFoundError(
                f"store {self.location} has no checkpoint of step {step} of run {run!r}{there}"
            )
        line = known_line(self._tier, run)
        described = [describe(self._tier, listing, line) for listing in listings]
        catalog = self._catalog() if isinstance(tier, NvmeTier) else None
        for listing in listings:
            if catalog is not None and isinstance(tier, NvmeTier):
                remove(tier, catalog, listing)
            else:
                tier.manifests.remove(run, listing.ref)
        return described

    def prune(self, retention: Retention, *, run: str = DEFAULT_RUN, dry_run: bool = False) -> Pruned:
        """Delete the checkpoints of a run that no rule of ``retention`` keeps, durably, and do as :meth:`gc` does.

        The newest consistent checkpoint stays, and so does one that somebody reads. Safe beside saves and loads of
        other processes. With ``dry_run`` only what would be done is returned.

        Raises:
            CheckpointNotFoundError: the store has no such run.
            InconsistentCheckpointError: a manifest is damaged, so that nothing could be freed; what goes was deleted.
        """
        self._writable()
        check_run_exists(self.location, layout.check_run(run), self.runs())
        pruner = self.pruner(run, retention)
        pruner.held = partial(self._may_be_lacking, run)
        return pruner.prune(time.time_ns(), dry_run=dry_run, always_collect=True)

    def _may_be_lacking(self, run: str) -> dict[str, str]:
        """Return the newest two where machines have a store each: the others may not have theirs of the newest yet."""
        newest = [one for one in self.checkpoints(run) if one.complete and one.on_line][-2:]
        return {one.save_id: "other machines may lack a newer one" for one in newest if one.store_ranks}

    def collect_rings(
        self,
        ring_folder: str | os.PathLike[str] = CaptureConfig.ring_folder,
        *,
        discard: bool = False,
        dry_run: bool = False,
    ) -> list[CollectedRing]:
        """Remove the rings of killed processes from memory that nobody can need any more, and name those that stay.

        Rings of this store, and of stores that are not where they were any more. A ring goes when every capture in it
        is durable, or none is complete; with ``discard`` also when captures would be lost, or nobody can tell. Rings of
        living processes and of other users are left alone, and not named.

        Raises:
            StorageError: a ring could not be removed.
        """
        return collect_rings(self._writable(), Path(ring_folder), discard=discard, dry_run=dry_run)

    def rebuild(self) -> Rebuilt:
        """Make the catalog again from packs and manifests alone; pins of living processes are kept.

        Where no process has the catalog open, a new file takes its place; else its entries are corrected.

        Raises:
            ReadOnlyStoreError: the store was opened with ``read_only=True``, or cannot be written.
            CatalogError: it is damaged and in use by other processes; the message names them.
        """
        return self._with_catalog(lambda catalog, made: made or reconcile(self._nvme, catalog), anew=True)

    def begin_generation(self, parent: Checkpoint | None, *, run: str = DEFAULT_RUN) -> int:
        """Say, durably, that training goes on from ``parent`` (None: from nothing).

        Returns the number of the new generation.

        What was saved after ``parent`` stays, but is no longer on the line of training.

        Raises:
            InvalidInputError: ``parent`` is no checkpoint.
        """
        tier = self._writable()
        layout.check_run(run)
        if parent is not None and not isinstance(parent, Checkpoint):
            raise InvalidInputError(f"parent {parent!r:.100}: give one of checkpoints(), or None")
        # Once is enough: what comes there while this store is open is of other trainings, and a rollback must not wait.
        if self._far is not None and run not in self._has_taken_heads:
            with contextlib.suppress(RemoteUnreachableError):
                # Who begins from nothing where checkpoints are is of another training, and takes nothing from that.
                if parent is not None or not self._far.ask(lambda there: there.manifests.refs(run)):
                    self._take_heads_behind(run)
                    self._has_taken_heads.add(run)
        return begin_generation(tier, run, None if parent is None else parent.ref)

    def _take_heads_behind(self, run: str) -> None:
        """Have the head records that the location behind this store has.

        Their numbers are taken, and the line may lead through generations that only it knows.
        """
        for head in self.heads(run, behind=True):
            self.take_head(head)

    def heads(self, run: str, *, behind: bool = False) -> list[HeadRecord]:
        """Return the head records of a run, oldest first; one that is damaged is not among them.

        With those ``behind`` this store, in the location that was given as ``remote``, if that is of the same training.

        Raises:
            RemoteUnreachableError: nobody knows what that has.
        """
        own = intact_heads(self._tier, run, self._tier.manifests.heads(layout.check_run(run)))
        if behind and self._far is not None:
            own += self._heads_behind(self._far, run, {head.generation: head for head in own})
        return sorted(own, key=lambda head: head.generation)

    def _heads_behind(self, far: Far, run: str, own: Mapping[int, HeadRecord]) -> list[HeadRecord]:
        """Return those head records that only the location has."""

        def ask(there: RemoteTier) -> list[HeadRecord]:
            numbers = there.manifests.heads(run)
            newest_common = [number for number in numbers if number in own][-1:]
            return intact_heads(there, run, [*newest_common, *(number for number in numbers if number not in own)])

        found = far.ask(ask)
        pairs = [(head, own[head.generation]) for head in found if head.generation in own]
        if not all(one.is_same(other) for one, other in pairs):
            return []
        return [head for head in found if head.generation not in own]

    def take_head(self, head: HeadRecord) -> None:
        """Begin a generation as the store of another machine of the same job has.

        Raises:
            HeadRecordError: it is another one here.
        """
        self._writable().manifests.take_head(head)

    def close(self) -> None:
        """Finish what is being saved in the background, and close the store; closing twice is no error."""
        self.finish()
        self._tier.close()
        if self._far is not None:
            self._far.close()

    def __enter__(self) -> Store:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()
