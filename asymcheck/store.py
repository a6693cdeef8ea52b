"""The store: what users open, save to and load from.

It checks what callers pass and wires the ways down and up to a tier; it holds no engine of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from asymcheck.commit.save_request import LineagePosition, SaveRequest
from asymcheck.commit.transaction import remove
from asymcheck.config import DEFAULT_RUN, StoreConfig, ring_folder_of
from asymcheck.errors import (
    CheckpointNotFoundError,
    InvalidInputError,
    SkippedCheckpointWarning,
    StepOrderWarning,
    warn_user,
)
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.fsck.rebuild_catalog import Rebuilt, reconcile
from asymcheck.fsck.repair import Repaired, repair
from asymcheck.fsck.verify import Finding, verify
from asymcheck.gc.collect import Collected, CollectedRing, collect, collect_rings
from asymcheck.gc.retention_runner import Pruned, Pruner
from asymcheck.inspect.diff import CheckpointDiff, compare
from asymcheck.inspect.disk_usage import DiskUsage, account
from asymcheck.inspect.history import History, describe, describe_loaded, is_on_line, known_line, read_history
from asymcheck.inspect.inventory import StoredTensor, StoredValue, inventory, values
from asymcheck.inspect.sample import sample
from asymcheck.measurement import NOISE, measure, noise_samples
from asymcheck.opened_store import OpenedStore
from asymcheck.policies.advice import Facts
from asymcheck.policies.push_selection import Push, check_seconds
from asymcheck.policies.retention import Retention
from asymcheck.replication.background_push import PushJob, PushWorker
from asymcheck.replication.collect_remote import collect_remote
from asymcheck.replication.heal import can_be_healed, heal
from asymcheck.replication.pull import pull
from asymcheck.replication.push import push
from asymcheck.replication.push_process import PushProcess
from asymcheck.replication.push_thread import PushThread
from asymcheck.replication.transfer_plan import selected
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.lineage import begin_generation
from asymcheck.restore.resolve import Resolved, candidates, check_run_exists, what_is_there
from asymcheck.storage.interfaces import ReadTier, StoreTier
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteLocation, RemoteTier, is_uri, parse_location
from asymcheck.storage.shm import RingCapture, RingFile, newer_than_stored, survey_rings
from asymcheck.training_services import TrainingServices, place
from asymcheck.types import Checkpoint, CheckpointRef, Part, Progress, Restored, Usage
from asymcheck.validation import (
    check_device,
    check_glob,
    check_kinds,
    check_location,
    check_rank,
    check_step,
    check_which,
)

if TYPE_CHECKING:
    import torch

    from asymcheck.restore.load import Loaded
    from asymcheck.restore.tensor_stream import Sink

_SAMPLE_BYTES = 8 << 20
_QUICK_SAMPLE_BYTES = 1 << 20


class Store:
    """A checkpoint store in a directory on a local drive.

    Open it with :meth:`open`; threads may share it, forked children may not.
    """

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
        return cls(NvmeTier(check_location(location), config, read_only=read_only), behind)

    def __init__(self, tier: StoreTier, behind: RemoteLocation | None = None) -> None:
        """Wrap an opened tier; use :meth:`open`."""
        if not isinstance(tier, (NvmeTier, RemoteTier)):
            raise InvalidInputError(f"Store({tier!r:.100}): use Store.open(location)")
        self._tier: StoreTier = tier
        self._opened = OpenedStore(tier, behind)
        self.training = TrainingServices(self._opened)
        """Services for :class:`asymcheck.Checkpointer`, beside the methods of this class."""

    def __repr__(self) -> str:
        """Name the directory and how it was opened."""
        mode = "" if isinstance(self._tier, NvmeTier) and not self._tier.read_only else ", read-only"
        return f"<asymcheck.Store {self.location!r}{mode}>"

    @property
    def location(self) -> str:
        """Where the store lies: a path, or a URI."""
        return str(self._tier.root)

    @property
    def path(self) -> Path:
        """The store's directory.

        Raises:
            InvalidInputError: the store is at a remote location, see :attr:`location`.
        """
        return self._opened.nvme.root

    @property
    def store_id(self) -> str:
        """The store's id: 32 hexadecimal digits, the same wherever it is opened."""
        return self._tier.descriptor.store_id.hex()

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
        from asymcheck.commit.synchronous_save import save
        from asymcheck.state.walk import flatten

        tier = self._opened.writable()
        request = self.training.request(run, step, metrics, part)
        flat = flatten(state)
        placing = self._placing(tier, request, generation)
        with timed("save", 0, lambda: {"run": run, "step": request.step}):
            ref, state_bytes, written_bytes = save(
                tier, self._opened.catalog(), self._opened.encoder, flat, request, placing
            )
        return Checkpoint.of(
            run,
            ref,
            request.world_size,
            request.metrics,
            state_bytes,
            written_bytes=written_bytes,
            complete=part is None or tier.manifests.listing(run, ref).is_complete,
            on_line=generation is None or is_on_line(tier, run, ref),
        )

    def _placing(
        self, tier: NvmeTier, request: SaveRequest, generation: int | Callable[[], int] | None
    ) -> Callable[[], LineagePosition]:
        run, step = request.run, request.step
        before = request.save_id if request.world_size > 1 else None
        if callable(generation):
            return lambda: place(tier, run, generation(), before)
        # At once: what is wrong with it is an error before anything is written.
        placed = place(tier, run, generation, before)
        parent = placed.parent
        if parent is not None and parent.generation == placed.generation and parent.step > step:
            warn_user(
                f"run {run!r} already has step {parent.step}, so step {step} will not be its newest checkpoint; "
                "to train on from an earlier step, restore it with a Checkpointer first",
                StepOrderWarning,
            )
        return lambda: placed

    def load(
        self,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
        rank: int | None = None,
    ) -> object:
        """Return a stored state, every byte verified: that of ``step``, or the newest consistent one on the line.

        A checkpoint that several ranks saved can be read by any number of them. Every tensor of ``into`` gets its bytes
        from the saved parts, so that a ``DTensor`` may have another mesh and other placements. Data that is not cut
        (plain values, states of random number generators) is that of ``rank``, taken modulo the number of ranks that
        saved. Without ``into`` and ``rank`` the states of all ranks are merged: mappings by key, sequences of one
        length by item, and parts into whole tensors. Values that differ between ranks are those of rank 0.

        Args:
            step: which one; None for the newest. ``"save:"`` and the first digits of a save id name one of several
                saves of a step.
            tensors: a glob of dotted names, for instance ``"model.*"``; only what matches is read and returned.
            into: a state whose tensors are filled in place, without a second copy in memory; objects in it get
                ``load_state_dict``. It may be a part of the stored state, for instance ``{"model": model}``.
            device: where new tensors are made; CPU by default.
            run: name of the run.
            rank: which rank of the present job reads; 0 by default with ``into``. Without it: return what this rank
                saved, its parts of whole tensors as :class:`asymcheck.TensorShard`.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, StateMismatchError, PartialRestoreError,
            HeadRecordError

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was passed over.
        """
        restored = self.restore(step, tensors=tensors, into=into, device=device, run=run, rank=rank)
        for reason in restored.skipped:
            warn_user(f"run {run!r}: passed over {reason}", SkippedCheckpointWarning)
        return restored.state

    def restore(
        self,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
        rank: int | None = None,
        fall_back: bool = False,
        grows: bool = False,
    ) -> Restored:
        """Do as :meth:`load` does, and also say which checkpoint was read and what was passed over.

        An ``into`` that ``grows`` gets back what the mappings inside it lack: what a training has put there meanwhile.

        With ``fall_back``, a newest checkpoint whose damage shows only when some of ``into`` is overwritten gives way
        to the next older one, which overwrites it again; without, that is a PartialRestoreError.
        """
        from asymcheck.restore.load import LoadRequest, load

        step = self._checked(run, step, tensors)
        wanted = LoadRequest(tensors, into, check_device(device), fall_back, check_rank(rank), grows)
        if into is not None:
            self.training.fence()
        with timed("restore", 0, lambda: {"run": run}), self._opened.source() as source:
            return self._restored(load(source, run, step, wanted), step)

    def read(
        self,
        read: Callable[[ReadTier, Resolved], object],
        step: int | str | None = None,
        *,
        run: str = DEFAULT_RUN,
    ) -> Restored:
        """Have ``read`` make what it likes of a consistent checkpoint, for interfaces that this class does not have.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as :meth:`load`.
        """
        from asymcheck.restore.load import read_first

        step = self._checked(run, step)
        with timed("restore", 0, lambda: {"run": run}), self._opened.source() as source:
            return self._restored(read_first(source, run, step, partial(read, source)), step)

    def stream(
        self,
        sink: Sink,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        run: str = DEFAULT_RUN,
        rank: int | None = None,
        progress: Progress | None = None,
    ) -> Restored:
        """Hand a checkpoint to ``sink`` as it is read, every byte verified, in bounded memory however large it is.

        A checkpoint of several ranks is merged, with whole tensors, unless ``rank`` selects the part of one rank. The
        state of the result is the return value of ``sink.finish()``.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as :meth:`load`.
        """
        from asymcheck.restore.tensor_stream import stream

        step = self._checked(run, step, tensors)
        with self._opened.source() as source:
            return self._restored(stream(source, run, step, tensors, sink, progress, rank=check_rank(rank)), step)

    def stream_from_memory(
        self,
        sink: Sink,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        run: str = DEFAULT_RUN,
        ring_folder: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> Restored:
        """Do as :meth:`stream` does with captures that killed processes left complete in memory, durable or not.

        Only the rings in ``ring_folder`` are read, and they are left as they are. A damaged capture gives way to an
        older one, unless a step was named.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError: as :meth:`stream`, for captures in memory.
            LockTimeoutError: the ring is in use, and to read it would race with its process.
        """
        from asymcheck.restore.ring_stream import stream_from_rings

        step = self._checked(run, step, tensors)
        loaded = stream_from_rings(self._tier, ring_folder_of(ring_folder), run, step, tensors, sink, progress)
        return self._restored(loaded, step=loaded.ref.step)

    def _restored(self, loaded: Loaded, step: int | str | None) -> Restored:
        return Restored(loaded.state, describe_loaded(self._tier, loaded, is_newest=step is None), loaded.skipped)

    def begin_generation(self, parent: Checkpoint | None, *, run: str = DEFAULT_RUN) -> int:
        """Record durably that training goes on from ``parent`` (None: from nothing).

        Returns the number of the new generation.

        Checkpoints saved after ``parent`` stay, but are no longer on the line of training.

        Raises:
            InvalidInputError: ``parent`` is no checkpoint.
        """
        tier = self._opened.writable()
        layout.check_run(run)
        if parent is not None and not isinstance(parent, Checkpoint):
            raise InvalidInputError(f"parent {parent!r:.100}: give one of checkpoints(), or None")
        self.training.take_heads_behind(run, is_new=parent is None)
        return begin_generation(tier, run, None if parent is None else parent.ref)

    def delete(
        self, step: int, *, run: str = DEFAULT_RUN, generation: int | None = None, dry_run: bool = False
    ) -> list[Checkpoint]:
        """Delete the checkpoints of a step, of one generation or of all, durably; return them.

        :meth:`gc` gives the room back. With ``dry_run`` only what would be deleted is returned.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        tier = self._tier if dry_run or isinstance(self._tier, RemoteTier) else self._opened.writable()
        tier.check_usable()
        step = check_step(step)
        there = tier.manifests.checkpoints(layout.check_run(run))
        of_step = [listing for listing in there if listing.ref.step == step]
        listings = [listing for listing in of_step if generation in (None, listing.ref.generation)]
        if not listings:
            what = f"store {self.location} has no checkpoint of step {step} of run {run!r}"
            if of_step:
                numbers = ", ".join(map(str, sorted({listing.ref.generation for listing in of_step})))
                raise CheckpointNotFoundError(
                    f"{what} in generation {generation}; it has that step in generation {numbers}"
                )
            raise CheckpointNotFoundError(f"{what}{what_is_there(tier, run, there)}")
        line = known_line(tier, run)
        described = [describe(tier, listing, line) for listing in listings]
        for listing in () if dry_run else listings:
            if isinstance(tier, RemoteTier):
                tier.manifests.remove(run, listing.ref)
            else:
                remove(self._opened.nvme, self._opened.catalog(), listing)
        return described

    def prune(self, retention: Retention, *, run: str = DEFAULT_RUN, dry_run: bool = False) -> Pruned:
        """Delete the checkpoints of a run that no rule of ``retention`` keeps, durably, and do as :meth:`gc` does.

        The newest consistent checkpoint stays, and so does one that somebody reads. Safe beside saves and loads of
        other processes. With ``dry_run`` only what would be done is returned.

        Raises:
            CheckpointNotFoundError: the store has no such run.
            InconsistentCheckpointError: a manifest is damaged, so that nothing could be freed; what goes was deleted.
        """
        tier = self._opened.writable()
        check_run_exists(self.location, layout.check_run(run), self.runs())
        if not isinstance(retention, Retention):
            raise InvalidInputError(f"retention {retention!r:.100}: give asymcheck.Retention(keep_last=…)")
        pruner = Pruner(tier, self._opened.catalog(), run, retention, partial(self._may_be_lacking, run))
        return pruner.prune(time.time_ns(), dry_run=dry_run, always_collect=True)

    def _may_be_lacking(self, run: str) -> dict[str, str]:
        """Return the newest two where machines have a store each: the others may not have theirs of the newest yet."""
        newest = [one for one in self.checkpoints(run) if one.complete and one.on_line][-2:]
        return {one.save_id: "other machines may lack a newer one" for one in newest if one.store_ranks}

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Free the packs that no checkpoint needs, for new checkpoints to overwrite.

        Safe beside saves and loads of other processes. In a remote location such packs, and what interrupted uploads
        have left, are removed when they are older than ``RemoteConfig.grace_s``.
        """
        self._tier.check_usable()
        if isinstance(self._tier, RemoteTier):
            return collect_remote(self._tier, dry_run=dry_run)
        return collect(self._opened.writable(), self._opened.catalog(), dry_run=dry_run)

    def collect_rings(
        self,
        ring_folder: str | os.PathLike[str] | None = None,
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
        return collect_rings(self._opened.writable(), ring_folder_of(ring_folder), discard=discard, dry_run=dry_run)

    def rebuild(self) -> Rebuilt:
        """Make the catalog again from packs and manifests alone; pins of living processes are kept.

        Where no process has the catalog open, a new file takes its place; else its entries are corrected.

        Raises:
            ReadOnlyStoreError: the store was opened with ``read_only=True``, or cannot be written.
            CatalogError: it is damaged and in use by other processes; the message names them.
        """
        return self._opened.with_catalog(lambda catalog, made: made or reconcile(self._opened.nvme, catalog), anew=True)

    def repair(self, progress: Progress | None = None) -> Repaired:
        """Repair damaged files from intact copies; delete no checkpoint. Reads every byte of the packs.

        Lost partitions are fetched from the location that was given as ``remote`` to :meth:`open`, if any; one that
        the location lacks stops nothing else. Safe beside saves, loads and collections of other processes. The result
        names damage that cannot be repaired, with advice. A second repair in a row does nothing.

        Raises:
            ReadOnlyStoreError: the store was opened with ``read_only=True``, or cannot be written.
            StorageError: the disk is full or refused; nothing is lost, and the next repair goes on.
            RemoteUnreachableError: something is lost here, and the remote location does not answer.
        """
        first = self._opened.with_catalog(lambda catalog, made: repair(self._opened.nvme, catalog, progress, made))
        there = self._opened.far.tier() if self._opened.far is not None and can_be_healed(first.left) else None
        if there is None:
            return first
        healed = heal(there, self._opened.writable(), self._opened.catalog(), first.left, progress)
        copied, nbytes = first.copied_partitions, first.copied_bytes
        if not healed.done:
            return Repaired(first.done, healed.told(first.left), copied, nbytes)
        # What is damaged here and was brought is of no use any more.
        second = self._opened.with_catalog(lambda catalog, made: repair(self._opened.nvme, catalog, progress, made))
        return Repaired((*first.done, *healed.done, *second.done), healed.told(second.left), copied, nbytes)

    def push(
        self,
        location: str | os.PathLike[str],
        step: int | str | None = None,
        *,
        run: str | None = None,
        everything: bool = False,
        progress: Progress | None = None,
    ) -> Moved:
        """Copy a checkpoint to a remote location, where it survives the loss of this machine.

        Partitions that are there already are not sent again, and a push that was interrupted goes on where it was.
        Other processes may save here, and push there, at the same time.

        Args:
            location: ``hdfs://namenode:port/path``, ``file:///path``, or another URI that pyarrow knows; created
                if it is missing.
            step: which checkpoint: a step, or ``save:DIGITS``; None for the newest consistent one.
            run: name of the run; ``"default"`` by default.
            everything: all complete checkpoints on the line, of ``run`` or of all runs; then no ``step`` is given.
            progress: called with bytes sent and to be sent, for the checkpoint that is being copied.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, DamagedPartitionError, MissingPartitionError,
            FormatError: it cannot be copied.
            RemoteUnreachableError: the location did not answer in time; its content is unknown.
            StorageError: the location refused. Committed checkpoints stay there.
            InvalidInputError: the location has another training with that run name, or there is no client for it.
        """
        self._tier.check_usable()
        step = _selected_step(step, everything=everything)
        listings = selected(self._tier, _known_run(run), step, everything=everything)
        there = RemoteTier(parse_location(location), self._tier.config, create=True)
        with contextlib.closing(there), timed("push", 0, lambda: {"location": str(there.location)}):
            return push(self._tier, there, listings, progress)

    def pull(
        self,
        location: str | os.PathLike[str],
        step: int | str | None = None,
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
        tier = self._opened.writable()
        step = _selected_step(step, everything=everything)
        there = RemoteTier(parse_location(location), tier.config)
        with contextlib.closing(there), timed("pull", 0, lambda: {"location": str(there.location)}):
            listings = selected(there, _known_run(run), step, everything=everything)
            return pull(there, tier, self._opened.catalog(), listings, progress)

    def pushing(
        self,
        location: str | os.PathLike[str] | Push,
        *,
        run: str = DEFAULT_RUN,
        every: int | None = None,
        poll_s: float = 0.5,
        prunes: bool = True,
    ) -> PushWorker:
        """Push checkpoints in the background, as they become durable.

        Use the result in a ``with`` block around a training. The checkpoints of ``run`` are pushed whose step is a
        multiple of ``every``, by default all, or that a :class:`Push` chooses. Checkpoints that are in the store
        already are included. A push goes on by itself after an interruption, and :meth:`PushWorker.statistics` has the
        number that is still to be sent. Close it before the store. ``Checkpointer(push=…)`` manages one for you. If
        several stores push one run to one location, only one of them ``prunes`` it, which removes checkpoints there
        that ``Push.keep`` does not keep.

        Raises:
            InvalidInputError: ``location``, ``every`` or ``poll_s`` cannot be used. The location is not contacted.
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
        parse_location(location.location)  # Refused now, not on another thread.
        here = self.location if isinstance(self._tier, RemoteTier) else os.path.abspath(self.location)
        order = PushJob(here, self._tier.config, location, run, poll_s, prunes)
        # A frozen program has no interpreter: what it calls so is itself.
        if location.own_process and sys.executable and not getattr(sys, "frozen", False):
            return PushProcess(self._tier, order)
        return PushThread(self._tier, order)

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        self._tier.check_usable()
        return self._tier.manifests.runs()

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all runs, oldest first, by their names.

        Tensor bytes are not checked, :meth:`verify` does that.
        """
        self._tier.check_usable()
        found = []
        for name in self._tier.manifests.runs() if run is None else [layout.check_run(run)]:
            line = known_line(self._tier, name)
            found += [describe(self._tier, listing, line) for listing in self._tier.manifests.checkpoints(name)]
        return found

    def tensors(
        self, step: int | str | None = None, pattern: str = "*", *, run: str = DEFAULT_RUN
    ) -> tuple[Checkpoint, list[StoredTensor]]:
        """Return a checkpoint, the newest by default, and its tensors that match a glob; reads no tensor bytes."""
        ref, tensors = inventory(self._tier, run, self._checked(run, step, pattern), pattern)
        return self._described(run, ref), tensors

    def values(
        self, step: int | str | None = None, pattern: str = "*", *, run: str = DEFAULT_RUN
    ) -> tuple[Checkpoint, list[StoredValue]]:
        """Return a checkpoint, the newest by default, and its plain values that match a glob, as texts."""
        ref, found = values(self._tier, run, self._checked(run, step, pattern), pattern)
        return self._described(run, ref), found

    def _checked(self, run: str, step: int | str | None, pattern: str = "*") -> int | str | None:
        """Check what names a checkpoint and tensors of it; return the step as an int."""
        self._tier.check_usable()
        layout.check_run(run)
        check_glob(pattern)
        return None if step is None else check_which(step)

    def _described(self, run: str, ref: CheckpointRef) -> Checkpoint:
        return describe(self._tier, self._tier.manifests.listing(run, ref), known_line(self._tier, run))

    def history(self, run: str = DEFAULT_RUN, *, everything: bool = False) -> History:
        """Return the checkpoints along the line of training, newest first, and where training went back.

        With ``everything`` also those that are abandoned, incomplete or damaged. Reads no tensor bytes.

        Raises:
            CheckpointNotFoundError: the store has other runs, but not this one.
            HeadRecordError: the line cannot be followed; with ``everything`` the result says so instead.
        """
        self._tier.check_usable()
        return read_history(self._tier, layout.check_run(run), everything=everything)

    def diff(
        self,
        a: int | str,
        b: int | str,
        *,
        run: str = DEFAULT_RUN,
        tensors: str = "*",
        norms: bool = True,
        progress: Progress | None = None,
    ) -> CheckpointDiff:
        """Return what changed between two checkpoints, every byte that was read verified.

        Args:
            a: a step, or ``"save:"`` and the first digits of a save id; either may have ``"<run>@"`` before it.
            b: likewise.
            run: name of the run, unless the names contain it.
            tensors: a glob of the dotted names to compare.
            norms: whether to read what changed and say by how much; without, only manifests are read.
            progress: called with bytes compared so far and total bytes.

        Raises:
            InvalidInputError, CheckpointNotFoundError, InconsistentCheckpointError, MissingPartitionError,
            DamagedPartitionError, FormatError, HeadRecordError
        """
        self._tier.check_usable()
        return compare(self._tier, a, b, run=run, tensors=tensors, norms=norms, progress=progress)

    def accounting(self, run: str | None = None) -> DiskUsage:
        """Return which checkpoint and which role needs how many bytes, and what :meth:`gc` would free.

        Reads manifests and the indexes of packs only.

        Raises:
            CheckpointNotFoundError: the store has other runs, but not this one.
        """
        self._tier.check_usable()
        return account(self._opened.nvme, _known_run(run))

    def rings(
        self,
        run: str | None = None,
        *,
        ring_folder: str | os.PathLike[str] | None = None,
        check: bool = True,
    ) -> list[RingFile]:
        """Return the rings of this store in memory, of living and of killed processes, with their captures.

        With ``check``, every frame in rings of killed processes is read and verified. Nothing is changed.
        """
        self._tier.check_usable()
        return survey_rings(self._tier, ring_folder_of(ring_folder), _known_run(run), check=check)

    def only_in_memory(
        self, run: str | None = None, *, ring_folder: str | os.PathLike[str] | None = None
    ) -> list[RingCapture]:
        """Return, of each run, the newest capture that killed processes left complete in memory.

        Only of runs in which it is newer than every checkpoint of the store. Its frames are not checked.
        """
        return newer_than_stored(self._tier, self.rings(run, ring_folder=ring_folder, check=False))

    def usage(self) -> Usage:
        """Return the bytes that the store takes on disk."""
        self._tier.check_usable()
        return Usage(self._tier.descriptor.store_id.hex(), *self._tier.usage())

    def verify(
        self,
        step: int | None = None,
        *,
        run: str | None = None,
        progress: Progress | None = None,
        deep: bool = True,
    ) -> list[Finding]:
        """Read and check every byte of the store, or what one step needs.

        Without ``deep`` no frame is read. Manifests, records, and header, index and length of each pack are checked,
        and every partition must be in a pack. Damage inside frames is not seen then.

        Returns the findings; none if the store is sound.

        Raises:
            CheckpointNotFoundError: there is no such step or run.
        """
        self._tier.check_usable()
        if step is not None:
            step = check_step(step)
            run = run or DEFAULT_RUN
            candidates(self._tier, run, step)
        elif run is not None:
            check_run_exists(self.location, layout.check_run(run), self.runs())
        return verify(self._tier, run, step, progress, deep=deep)

    def measure(self, *, quick: bool = False, ring_folder: str | os.PathLike[str] | None = None) -> Facts:
        """Measure memory, codecs and the drive, in some ten seconds; with ``quick`` less well, in about one.

        Codecs are measured on tensors of the newest checkpoint. It writes some hundred MB into a file inside the store
        and removes it; what a kill leaves of it, :meth:`gc` removes. Checkpoints are left as they are.

        Raises:
            OutOfSpaceError: there is too little room to measure in.
            ReadOnlyStoreError, StorageError: the store cannot be written.
        """
        tier = self._opened.nvme
        tier.check_writable()
        found = sample(tier, _QUICK_SAMPLE_BYTES if quick else _SAMPLE_BYTES)
        if found is None or not found.samples:
            samples, described = noise_samples(_QUICK_SAMPLE_BYTES if quick else _SAMPLE_BYTES), NOISE
        else:
            samples, described = found.samples, f"step {found.ref.step} of run {found.run}"
        state_bytes = None if found is None else found.state_bytes
        return measure(tier, samples, described, state_bytes, ring_folder_of(ring_folder), quick=quick)

    def close(self) -> None:
        """Finish what is being saved in the background, and close the store; closing twice is no error."""
        self.training.close()
        self._opened.close()

    def __enter__(self) -> Store:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()


def _selected_step(step: int | str | None, *, everything: bool) -> int | str | None:
    if everything and step is not None:
        raise InvalidInputError(f"step {step!r:.100} with everything=True, which copies every step: give one of them")
    return None if step is None else check_which(step)


def _known_run(run: str | None) -> str | None:
    return None if run is None else layout.check_run(run)
