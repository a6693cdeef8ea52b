"""The Store: the interface to save, load, inspect, verify and copy checkpoints.

It validates arguments and calls the packages that do the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asymcheck.commit.save_request import LineagePosition, SaveRequest, new_save_id
from asymcheck.commit.transaction import remove
from asymcheck.config import DEFAULT_RUN, PARTIAL_RUN, StoreConfig, check_type
from asymcheck.errors import CheckpointNotFoundError, InvalidInputError, StepOrderWarning, warn_user
from asymcheck.events import timed
from asymcheck.format import layout
from asymcheck.fsck.repair import Repaired, repair
from asymcheck.fsck.verify import Finding, verify
from asymcheck.gc.collect import Collected, collect
from asymcheck.gc.retention_runner import Pruned, Pruner
from asymcheck.inspect.diff import CheckpointDiff, compare
from asymcheck.inspect.disk_usage import DiskUsage, account
from asymcheck.inspect.history import History, describe, is_on_line, known_line, read_history
from asymcheck.inspect.inventory import StoredTensor, StoredValue, inventory, values
from asymcheck.opened_store import OpenedStore
from asymcheck.policies.retention import Retention
from asymcheck.replication.collect_remote import RemoteSweep
from asymcheck.replication.heal import can_be_healed, heal
from asymcheck.replication.pull import pull
from asymcheck.replication.push import open_location, push
from asymcheck.replication.transfer_plan import selected
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.resolve import available, check_run_exists, named_checkpoint, warn_of_skipped
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteLocation, RemoteTier, is_uri, parse_location
from asymcheck.training_services import TrainingServices, place
from asymcheck.types import Checkpoint, CheckpointRef, Part, Progress, Restored
from asymcheck.validation import (
    check_device,
    check_flag,
    check_glob,
    check_location,
    check_rank,
    check_which,
    metric_and_sign,
)

if TYPE_CHECKING:
    import torch


class Store(contextlib.AbstractContextManager["Store"]):
    """A checkpoint store in a directory on a local drive.

    Open it with :meth:`open`; threads may share it, forked children may not.
    """

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        *,
        create: bool = False,
        read_only: bool = False,
        config: StoreConfig | None = None,
        remote: str | None = None,
    ) -> Store:
        """Open a store.

        Args:
            location: a directory on a local drive, or the URI of a remote location, such as
                ``hdfs://namenode:8020/checkpoints`` or ``file:///mnt/checkpoints``. A remote location is read like a
                store. Only :meth:`push` creates it and writes to it.
            create: create the store if the directory is missing or empty.
            read_only: open without the right to write; the drive may be mounted read-only.
            config: configuration of the store.
            remote: URI of a remote location to which this store is pushed. Data that is missing or damaged in a local
                store is read from there, with a warning, and :meth:`repair` restores it.

        Raises:
            StoreNotFoundError: the directory is no store, and ``create`` is False or the directory is not empty.
            UnsupportedFileSystemError: the directory is on a network file system, or on one without hard links.
            FormatError: the store is damaged, or needs a version or feature that this program does not know.
            InvalidInputError: ``location``, or a combination of arguments, is invalid.
            RemoteUnreachableError: a remote location did not answer.
        """
        if check_flag("create", create) and check_flag("read_only", read_only):
            raise InvalidInputError("create=True with read_only=True: give one of them")
        config = StoreConfig() if config is None else check_type("config", config, StoreConfig)
        if is_uri(location):
            if remote is not None:
                raise InvalidInputError(
                    f"remote {remote!r:.100} of {location!s:.100}: only a store on a local drive has one; leave it out"
                )
            return cls(RemoteTier(parse_location(location), config))
        behind = None if remote is None else parse_location(remote)
        return cls(NvmeTier(check_location(location), config, create=create, read_only=read_only), behind)

    def __init__(self, tier: StoreTier, behind: RemoteLocation | None = None) -> None:
        """Wrap an open tier; use :meth:`open` instead."""
        if not isinstance(tier, (NvmeTier, RemoteTier)):
            raise InvalidInputError(f"Store({tier!r:.100}): use Store.open(location)")
        self._tier: StoreTier = tier
        self.resources = OpenedStore(tier, behind)
        """Internal: the tier, the catalog and the remote location, for other modules of asymcheck."""
        self.training = TrainingServices(self.resources)
        """Internal: services of :class:`asymcheck.Checkpointer`."""

    def __repr__(self) -> str:
        """Return the location and the mode."""
        mode = "" if isinstance(self._tier, NvmeTier) and not self._tier.read_only else ", read-only"
        return f"<asymcheck.Store {self.location!r}{mode}>"

    @property
    def location(self) -> str:
        """The path or URI of the store."""
        return str(self._tier.root)

    @property
    def path(self) -> Path:
        """The store's directory.

        Raises:
            InvalidInputError: the store is at a remote location, see :attr:`location`.
        """
        return self.resources.nvme.root

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
        """Save a state durably: after the return, the checkpoint survives power loss.

        Args:
            state: nested dict, list or tuple of tensors, arrays, plain values, and objects with ``state_dict`` and
                ``load_state_dict``. The reference of the state lists all supported values.
            step: the training step, 0 or more.
            metrics: named numbers, for instance ``{"loss": 3.2}``.
            run: name of the run.
            generation: the generation of the run, by default the current one. A function is called just before the
                commit. :class:`asymcheck.Checkpointer` manages generations for you.
            part: the part of this rank, if several ranks save one checkpoint. Each rank calls this method, all with the
                same save id. The checkpoint is complete, and can be restored, when all ranks have saved.

        Raises:
            UnsupportedValueError: the state contains a value that cannot be stored; nothing was written.
            InvalidInputError: another argument is invalid; nothing was written.
            StorageError: the drive is full or failed; nothing was committed, and earlier checkpoints are untouched.
        """
        from asymcheck.commit.synchronous_save import save
        from asymcheck.state.walk import flatten

        tier = self.resources.writable()
        request = self.training.request(run, step, metrics, part)
        flat = flatten(state)
        request, placing = self._placing(tier, request, generation)
        with timed("save", 0, lambda: {"run": run, "step": request.step}):
            saved = save(tier, self.resources.catalog(), self.resources.encoder, flat, request, placing)
        return Checkpoint.of(
            run,
            saved.ref,
            request.world_size,
            request.metrics,
            saved.state_bytes,
            written_bytes=saved.written_bytes,
            complete=part is None or tier.manifests.listing(run, saved.ref).is_complete,
            on_line=generation is None or is_on_line(tier, run, saved.ref),
        )

    def _placing(
        self, tier: NvmeTier, request: SaveRequest, generation: int | Callable[[], int] | None
    ) -> tuple[SaveRequest, Callable[[], LineagePosition]]:
        run, step = request.run, request.step
        before = request.save_id if request.world_size > 1 else None
        if callable(generation):
            return request, lambda: place(tier, run, generation(), before)
        # Now, so that an invalid generation is an error before anything is written.
        placed = place(tier, run, generation, before)
        parent = placed.parent
        if parent is not None and parent.generation == placed.generation and parent.step > step:
            warn_user(
                f"run {run!r} already has step {parent.step}, so step {step} will not be its newest checkpoint. If it "
                "is an import or of another training, choose another run. To continue a training from an earlier "
                "step, restore that step with a Checkpointer first",
                StepOrderWarning,
            )
        elif parent is not None and parent > CheckpointRef(placed.generation, step, request.save_id):
            # The clock was set back since this step was saved before.
            request = dataclasses.replace(request, save_id=new_save_id(parent.save_id))
        return request, lambda: placed

    def load(
        self,
        step: int | str | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
        rank: int | None = None,
        strict: bool = False,
    ) -> object:
        """Load the state of a checkpoint, and verify every byte.

        Any number of ranks can load a checkpoint that several ranks saved. Each tensor of ``into`` is assembled from
        the saved shards, so a ``DTensor`` may have another mesh and other placements. Plain values and states of random
        number generators are not sharded: those of ``rank`` modulo the saved number of ranks are loaded. Without
        ``into`` and ``rank``, the states of all ranks are merged: mappings by key, sequences of equal length by item,
        shards into whole tensors. Where plain values differ between ranks, rank 0 wins.

        Args:
            step: the step; None for the newest consistent checkpoint. ``"save:"`` and the first digits of a save id
                select one of several saves of a step; ``"best:loss"`` the lowest value of this metric among complete
                checkpoints on the line of training, and ``"best:accuracy:max"`` the highest.
            tensors: a glob of dotted names, for instance ``"model.*"``; only matching tensors are read and returned.
            into: a state whose tensors are filled in place, without a second copy in memory. Its objects receive
                ``load_state_dict``. It may be a part of the stored state, for instance ``{"model": model}``.
            device: device of new tensors, by default the CPU.
            run: name of the run.
            rank: with ``into``, the rank of the current job that loads, by default 0. Without ``into``, load the state
                that this rank saved, with its shards as :class:`asymcheck.TensorShard`.
            strict: raise StateMismatchError instead of a StateDifferenceWarning.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, StateMismatchError, PartialRestoreError,
            HeadRecordError

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was skipped.
            StateDifferenceWarning: ``into`` differs from the checkpoint in a way that torch accepts in silence, for
                instance another dtype or other hyperparameters.
        """
        restored = self.restore(step, tensors=tensors, into=into, device=device, run=run, rank=rank, strict=strict)
        warn_of_skipped(self.location, run, restored.skipped)
        return restored.state

    def restore(  # noqa: PLR0913 - the arguments of load(), and two more
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
        strict: bool = False,
        world_size: int | None = None,
    ) -> Restored:
        """Load a state as :meth:`load` does, and return it with the checkpoint and the reasons for skipped ones.

        The other arguments are those of :meth:`load`. With ``fall_back``, if damage is detected after a part of
        ``into`` was overwritten, load the next older checkpoint instead of raising PartialRestoreError. With ``grows``,
        also restore entries that mappings inside ``into`` lack, because the training added them later. ``world_size``
        is the number of ranks that continue the training; None stands for a single process.
        """
        from asymcheck.restore.load import LoadRequest, load

        step = self.resources.checked(run, step, tensors)
        device, rank, world_size = check_device(device), check_rank(rank), check_rank(world_size, "world_size", 1)
        wanted = LoadRequest(tensors, into, device, fall_back, rank, grows, strict, world_size)
        if into is not None:
            self.training.fence()
        with timed("restore", 0, lambda: {"run": run}):
            return self.resources.read(lambda source: load(source, run, step, wanted), is_newest=step is None)

    def delete(
        self, step: int | str, *, run: str = DEFAULT_RUN, generation: int | None = None, dry_run: bool = False
    ) -> list[Checkpoint]:
        """Delete the checkpoints of a step, or one of them, durably, and return them.

        :meth:`gc` frees their space.

        Args:
            step: the step; ``"save:"`` and the first digits of a save id select one of several saves of a step.
            run: name of the run.
            generation: the generation; None for all.
            dry_run: only return the checkpoints that would be deleted.

        Raises:
            CheckpointNotFoundError: the run has no such checkpoint.
            InvalidInputError: several checkpoints match the digits, or ``step`` is ``best:METRIC``.
        """
        tier = self._tier if dry_run or isinstance(self._tier, RemoteTier) else self.resources.writable()
        tier.check_usable()
        which = check_which(step)
        if generation is not None and not isinstance(generation, int):
            raise InvalidInputError(f"generation {generation!r:.100}: give an integer, or None for all generations")
        listed = tier.manifests.checkpoints(layout.check_run(run))
        if isinstance(which, str):
            if metric_and_sign(which) is not None:
                raise InvalidInputError(f"{which} may soon be another checkpoint; give the step or save id to delete")
            of_step = [named_checkpoint(tier, run, which)]
        else:
            of_step = [listing for listing in listed if listing.ref.step == which]
        listings = [listing for listing in of_step if generation in (None, listing.ref.generation)]
        if not listings:
            name = which if isinstance(which, str) else f"step {which}"
            missing = f"store {self.location} has no checkpoint of {name} of run {run!r}"
            if of_step:
                numbers = ", ".join(map(str, sorted({listing.ref.generation for listing in of_step})))
                raise CheckpointNotFoundError(
                    f"{missing} in generation {generation}; it has that step in generation {numbers}"
                )
            raise CheckpointNotFoundError(f"{missing}{available(tier, run, listed)}")
        line = known_line(tier, run)
        described = [describe(tier, listing, line) for listing in listings]
        for listing in () if dry_run else listings:
            if isinstance(tier, RemoteTier):
                tier.manifests.remove(run, listing.ref)
            else:
                remove(self.resources.nvme, self.resources.catalog(), listing)
        return described

    def prune(self, retention: Retention, *, run: str = DEFAULT_RUN, dry_run: bool = False) -> Pruned:
        """Delete the checkpoints of a run that no rule of ``retention`` keeps, and collect garbage.

        Keeps the newest consistent checkpoint, and checkpoints that a process is reading. Other processes may save and
        load at the same time.

        Args:
            retention: the rules.
            run: name of the run.
            dry_run: only return what would be deleted.

        Raises:
            CheckpointNotFoundError: the store has no such run.
            InconsistentCheckpointError: checkpoints were deleted, but a damaged manifest prevents garbage collection.
        """
        tier = self.resources.writable()
        check_run_exists(self.location, layout.check_run(run), self.runs())
        check_type("retention", retention, Retention)
        pruner = Pruner(tier, self.resources.catalog(), run, retention, partial(self._may_be_lacking, run))
        return pruner.prune(time.time_ns(), dry_run=dry_run, always_collect=True)

    def _may_be_lacking(self, run: str) -> dict[str, str]:
        """Return the newest two checkpoints if each node has a store: other nodes may lack the newest one."""
        newest = [checkpoint for checkpoint in self.checkpoints(run) if checkpoint.complete and checkpoint.on_line][-2:]
        reason = "other machines may lack a newer checkpoint"
        return {checkpoint.save_id: reason for checkpoint in newest if checkpoint.store_ranks}

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Collect garbage: free the packs that no checkpoint needs. Later saves overwrite them.

        Other processes may save and load at the same time. In a remote location, unneeded packs and remains of
        interrupted uploads are removed once they are older than ``RemoteConfig.grace_s``.
        """
        self._tier.check_usable()
        if isinstance(self._tier, RemoteTier):
            return RemoteSweep(self._tier, dry_run=dry_run).carry_out()
        return collect(self.resources.writable(), self.resources.catalog(), dry_run=dry_run)

    def repair(self, progress: Progress | None = None) -> Repaired:
        """Repair damaged files from intact copies; delete no checkpoint. Reads every byte of the packs.

        Lost partitions are fetched from the ``remote`` of :meth:`open`, if there is one. Other processes may save, load
        and collect garbage at the same time. The result lists damage that cannot be repaired, with advice. Repeating a
        repair changes nothing.

        Raises:
            ReadOnlyStoreError: the store was opened with ``read_only=True``, or cannot be written.
            StorageError: the drive is full or failed; nothing is lost, and the next repair continues.
            RemoteUnreachableError: partitions are lost, and the remote location does not answer.
        """
        opened = self.resources

        def repaired() -> Repaired:
            return opened.with_catalog(lambda catalog, made: repair(opened.nvme, catalog, progress, made))

        first = repaired()
        remote = opened.remote.tier() if opened.remote is not None and can_be_healed(first.left) else None
        if remote is None:
            return first
        healed = heal(remote, opened.writable(), opened.catalog(), first.left, progress)
        copied, nbytes = first.copied_partitions, first.copied_bytes
        if not healed.done:
            return Repaired(first.done, healed.with_reasons(first.left), copied, nbytes)
        second = repaired()  # Remove the damaged frames that were replaced.
        return Repaired((*first.done, *healed.done, *second.done), healed.with_reasons(second.left), copied, nbytes)

    def push(
        self,
        remote: str | os.PathLike[str],
        step: int | str | None = None,
        *,
        run: str | None = None,
        everything: bool = False,
        create: bool = False,
        progress: Progress | None = None,
    ) -> Moved:
        """Copy a checkpoint to a remote location, where it survives the loss of this machine.

        Partitions that the location already has are not sent again, and an interrupted push continues. Other processes
        may save to this store and push to the location at the same time.

        Args:
            remote: URI, such as ``hdfs://namenode:port/path``, ``s3://bucket/prefix`` or ``file:///path``. The first
                push of a store creates it.
            step: a step, ``save:DIGITS`` or ``best:METRIC``; None for the newest consistent checkpoint.
            run: name of the run; by default ``"default"``, or all runs with ``everything``.
            everything: copy all complete checkpoints on the line instead of one ``step``.
            create: create the location again if it was emptied since an earlier push.
            progress: callback, run with the bytes sent and the total bytes of the current checkpoint.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, DamagedPartitionError, MissingPartitionError,
            FormatError: the checkpoint cannot be copied.
            RemoteUnreachableError: the location did not answer in time, or an earlier push created it and it is missing
                now; its content is unknown.
            StorageError: the location failed. Committed checkpoints stay there.
            InvalidInputError: the location has another training job with that run name, or no client supports its URI.
        """
        self._tier.check_usable()
        step = _selected_step(step, everything=everything)
        listings = selected(self._tier, _known_run(run), step, everything=everything)
        far = open_location(self._tier, parse_location(remote), self._tier.config, create=check_flag("create", create))
        with contextlib.closing(far), timed("push", 0, lambda: {"location": str(far.location)}):
            return push(self._tier, far, listings, progress)

    def pull(
        self,
        remote: str | os.PathLike[str],
        step: int | str | None = None,
        *,
        run: str | None = None,
        everything: bool = False,
        tensors: str | None = None,
        to_run: str = PARTIAL_RUN,
        progress: Progress | None = None,
    ) -> Moved:
        """Copy a checkpoint from a remote location into this store, and verify every byte; see :meth:`push`.

        With ``everything``, a checkpoint that cannot be copied does not stop the others; the final error lists all.
        With ``tensors``, a glob, only matching tensors and plain values are requested and copied. They become a
        checkpoint of the run ``to_run``, from which no training can continue.

        Raises:
            StoreNotFoundError: nothing was pushed to ``remote``.
            CheckpointNotFoundError, InconsistentCheckpointError, DamagedPartitionError, MissingPartitionError,
            FormatError, RemoteUnreachableError, StorageError, InvalidInputError: as for :meth:`push`.
        """
        tier = self.resources.writable()
        step = _selected_step(step, everything=everything)
        selection, config = None, tier.config
        if tensors is not None:
            from asymcheck.replication.partial_copy import Selection

            check_glob(tensors)
            selection = Selection(tensors, layout.check_run(to_run))
            # A gap between needed frames may hold frames of other tensors.
            config = dataclasses.replace(config, remote=dataclasses.replace(config.remote, gap_bytes=0))
        far = RemoteTier(parse_location(remote), config)
        with contextlib.closing(far), timed("pull", 0, lambda: {"location": str(far.location)}):
            listings = selected(far, _known_run(run), step, everything=everything)
            return pull(far, tier, self.resources.catalog(), listings, progress, selection)

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        self._tier.check_usable()
        return self._tier.manifests.runs()

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all runs, oldest first, from their manifest names.

        Does not check tensor bytes; :meth:`verify` does.
        """
        self._tier.check_usable()
        described = []
        for name in self._tier.manifests.runs() if run is None else [layout.check_run(run)]:
            line = known_line(self._tier, name)
            described += [describe(self._tier, listing, line) for listing in self._tier.manifests.checkpoints(name)]
        return described

    def tensors(
        self, step: int | str | None = None, pattern: str = "*", *, run: str = DEFAULT_RUN
    ) -> tuple[Checkpoint, list[StoredTensor]]:
        """Return a checkpoint, by default the newest readable one, and its tensors that match a glob.

        Reads no tensor bytes.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint is unfinished or damaged.
        """
        ref, tensors = inventory(self._tier, run, self.resources.checked(run, step, pattern), pattern)
        return self._described(run, ref), tensors

    def values(
        self, step: int | str | None = None, pattern: str = "*", *, run: str = DEFAULT_RUN
    ) -> tuple[Checkpoint, list[StoredValue]]:
        """Return a checkpoint, by default the newest readable one, and its plain values that match a glob, as texts.

        Warns:
            SkippedCheckpointWarning: a newer checkpoint is unfinished or damaged.
        """
        ref, plain_values = values(self._tier, run, self.resources.checked(run, step, pattern), pattern)
        return self._described(run, ref), plain_values

    def _described(self, run: str, ref: CheckpointRef) -> Checkpoint:
        return describe(self._tier, self._tier.manifests.listing(run, ref), known_line(self._tier, run))

    def history(self, run: str = DEFAULT_RUN, *, everything: bool = False) -> History:
        """Return the lineage of a run: its checkpoints, newest first, and where training continued from an earlier one.

        Reads no tensor bytes.

        Args:
            run: name of the run.
            everything: include abandoned, incomplete and damaged checkpoints.

        Raises:
            CheckpointNotFoundError: the store has other runs, but not this one.
            HeadRecordError: the lineage is broken; with ``everything``, the result says so instead.
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
        """Return the differences between two checkpoints, and verify every byte that is read.

        Args:
            a: a step, ``"save:"`` and the first digits of a save id, or ``"best:METRIC"``, optionally after
                ``"<run>@"``.
            b: likewise.
            run: name of the run, unless ``a`` and ``b`` contain it.
            tensors: a glob of the dotted names to compare.
            norms: read changed tensors and measure the change; otherwise read only manifests.
            progress: callback, run with the bytes compared and the total bytes.

        Raises:
            InvalidInputError, CheckpointNotFoundError, InconsistentCheckpointError, MissingPartitionError,
            DamagedPartitionError, FormatError, HeadRecordError
        """
        self._tier.check_usable()
        check_glob(tensors)
        return compare(self._tier, a, b, run=run, tensors=tensors, norms=norms, progress=progress)

    def disk_usage(self, run: str | None = None) -> DiskUsage:
        """Return the disk usage per checkpoint and tensor role, and the bytes that :meth:`gc` would free.

        Reads only manifests and pack indexes.

        Raises:
            CheckpointNotFoundError: the store has other runs, but not this one.
        """
        self._tier.check_usable()
        return account(self.resources.nvme, _known_run(run))

    def verify(
        self,
        step: int | None = None,
        *,
        run: str | None = None,
        progress: Progress | None = None,
        deep: bool = True,
    ) -> list[Finding]:
        """Read and check every byte of the store, or those that one step needs.

        Args:
            step: the step; None for the whole store.
            run: name of the run; None for all runs or, with ``step``, the default run.
            progress: callback, run with the bytes checked and the total bytes.
            deep: read every frame. Otherwise check manifests, records, and the header, index and length of each pack,
                and that each partition is in a pack; damage inside frames is not detected.

        Returns:
            The findings; empty if the store is intact.

        Raises:
            CheckpointNotFoundError: the store has no such step or run.
        """
        self._tier.check_usable()
        return verify(self._tier, run, step, progress, deep=deep)[0]

    def close(self) -> None:
        """Finish background saves, and close the store. Closing twice is allowed.

        Raises:
            StorageError: the drive is full or failed. Checkpoints that were reported durable are not affected.
        """
        self.training.close()
        self.resources.close()

    def __exit__(self, *_error: object) -> None:
        self.close()


def _selected_step(step: int | str | None, *, everything: bool) -> int | str | None:
    if everything and step is not None:
        raise InvalidInputError(f"step {step!r:.100} with everything=True, which copies every step: give one of them")
    return None if step is None else check_which(step)


def _known_run(run: str | None) -> str | None:
    return None if run is None else layout.check_run(run)
