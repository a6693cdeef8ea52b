"""The store: what users open, save to and load from.

It wires the ways down and up to a tier and holds no engine of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TypeVar

import torch

from asymcheck.arguments import check_device, check_glob, check_location, check_step
from asymcheck.captures import Captures, warn_of_order
from asymcheck.config import DEFAULT_RUN, StoreConfig
from asymcheck.errors import (
    CatalogError,
    CheckpointNotFoundError,
    SkippedCheckpointWarning,
    warn_user,
)
from asymcheck.format import layout
from asymcheck.format.catalog import manifest_key
from asymcheck.partition.state import flatten
from asymcheck.pipeline.collect import Collected, collect
from asymcheck.pipeline.request import Place
from asymcheck.pipeline.save import save
from asymcheck.recovery.describe import describe, describe_loaded, is_on_line, known_line
from asymcheck.recovery.line import begin_generation
from asymcheck.recovery.load import Loaded, Wanted, load
from asymcheck.recovery.rebuild import Rebuilt, rebuild, reconcile
from asymcheck.recovery.repair import repair
from asymcheck.recovery.repaired import Repaired
from asymcheck.recovery.resolve import what_is_there
from asymcheck.recovery.stream import Sink, stream
from asymcheck.tiers.nvme import Catalog, NvmeTier, Transaction
from asymcheck.types import Checkpoint, Progress, Restored

_T = TypeVar("_T")


class Store(Captures):
    """A checkpoint store in a directory on a local drive.

    Open it with :meth:`open`; threads may share it, forked children may not.
    """

    @classmethod
    def open(
        cls, location: str | os.PathLike[str], *, read_only: bool = False, config: StoreConfig | None = None
    ) -> Store:
        """Open the store at ``location``, a directory; create it when it is missing or empty, unless ``read_only``.

        Raises:
            StoreNotFoundError: there is none and ``read_only``, or the directory holds something else.
            UnsupportedFileSystemError: the directory is on a network file system.
            FormatError: the store is damaged, or of a version or with a feature that this program does not know.
            InvalidInputError: ``location`` or a value of ``config`` cannot be used.
        """
        return cls(NvmeTier(check_location(location), config or StoreConfig(), read_only=read_only))

    def __repr__(self) -> str:
        """Name the directory and how it was opened."""
        mode = ", read-only" if self._tier.read_only else ""
        return f"<asymcheck.Store {str(self.path)!r}{mode}>"

    def save(
        self,
        state: object,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        run: str = DEFAULT_RUN,
        generation: int | Callable[[], int] | None = None,
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

        Raises:
            UnsupportedValueError: something in the state cannot be stored; nothing was written.
            InvalidInputError: another argument cannot be used; nothing was written.
            StorageError: the disk is full or refused; nothing was committed, earlier checkpoints are untouched.
        """
        self._tier.check_writable()
        request = self.request(run, step, metrics)
        flat = flatten(state)
        placing = self._placing(run, generation, request.step)
        done = save(self._tier, self._catalog(), flat, request, placing)
        return Checkpoint(
            run=run,
            step=done.ref.step,
            generation=done.ref.generation,
            save_id=done.ref.save_id.hex(),
            world_size=1,
            complete=True,
            on_line=generation is None or is_on_line(self._tier, run, done.ref),
            created_ns=int.from_bytes(done.ref.save_id[:8], "big"),
            state_bytes=done.state_bytes,
            written_bytes=done.written_bytes,
            metrics=request.metrics,
        )

    def _placing(self, run: str, generation: int | Callable[[], int] | None, step: int) -> Callable[[], Place]:
        if callable(generation):
            return lambda: self._place(run, generation())
        # At once: what is wrong with it is an error before anything is written.
        place = self._place(run, generation)
        if place.parent is not None and place.parent.generation == place.generation and place.parent.step > step:
            warn_of_order(run, place.parent.step, step)
        return lambda: place

    def load(
        self,
        step: int | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
    ) -> object:
        """Return a stored state, every byte verified: that of ``step``, or the newest consistent one on the line.

        Args:
            step: which one; None for the newest.
            tensors: a glob of dotted names, for instance ``"model.*"``; only what matches is read and returned.
            into: a state whose tensors are filled in place, without a second copy in memory; objects in it get
                ``load_state_dict``. It may be a part
                of what is stored, for instance ``{"model": model}``.
            device: where new tensors are made; CPU by default.
            run: whose checkpoint.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, StateMismatchError, PartialRestoreError,
            HeadRecordError

        Warns:
            SkippedCheckpointWarning: a newer checkpoint was passed over.
        """
        restored = self.restore(step, tensors=tensors, into=into, device=device, run=run)
        for reason in restored.skipped:
            warn_user(f"run {run!r}: passed over {reason}", SkippedCheckpointWarning)
        return restored.state

    def restore(
        self,
        step: int | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
        fall_back: bool = False,
    ) -> Restored:
        """Do as :meth:`load` does, and also say which checkpoint was read and what was passed over.

        With ``fall_back``, a newest checkpoint whose damage shows only when some of ``into`` is overwritten gives way
        to the next older one, which overwrites it again; without, that is a PartialRestoreError.
        """
        self._tier.check_usable()
        layout.check_run(run)
        step = None if step is None else check_step(step)
        check_glob(tensors)
        wanted = Wanted(tensors, into, check_device(device), fall_back)
        return self._restored(load(self._tier, run, step, wanted), step)

    def stream(
        self,
        sink: Sink,
        step: int | None = None,
        *,
        tensors: str = "*",
        run: str = DEFAULT_RUN,
        progress: Progress | None = None,
    ) -> Restored:
        """Hand a checkpoint to ``sink`` as it is read, every byte verified, in bounded memory however large it is.

        The state of the result is what ``sink.finish()`` returned.

        Raises:
            CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: as :meth:`load`.
        """
        self._tier.check_usable()
        layout.check_run(run)
        step = None if step is None else check_step(step)
        check_glob(tensors)
        return self._restored(stream(self._tier, run, step, tensors, sink, progress), step)

    def _restored(self, loaded: Loaded, step: int | None) -> Restored:
        return Restored(loaded.state, describe_loaded(self._tier, loaded, is_newest=step is None), loaded.skipped)

    def delete(self, step: int, *, run: str = DEFAULT_RUN, generation: int | None = None) -> list[Checkpoint]:
        """Delete the checkpoints of a step, of one generation or of all, durably; return them.

        :meth:`gc` gives the room back.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        self._tier.check_writable()
        step = check_step(step)
        listings = [
            listing for listing in self._tier.manifests.checkpoints(layout.check_run(run)) if listing.ref.step == step
        ]
        listings = [listing for listing in listings if generation in (None, listing.ref.generation)]
        if not listings:
            there = what_is_there(self._tier, run, self._tier.manifests.checkpoints(run))
            raise CheckpointNotFoundError(f"store {self.path} has no checkpoint of step {step} of run {run!r}{there}")
        line = known_line(self._tier, run)
        described = [describe(self._tier, listing, line) for listing in listings]
        catalog = self._catalog()
        for listing in listings:
            self._tier.manifests.remove(run, listing.ref)
            with catalog.write() as transaction:
                for name in listing.manifests:
                    transaction.delete_manifest(manifest_key(run, listing.ref, name))
        return described

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Free the packs that no checkpoint needs, for new checkpoints to overwrite.

        Safe beside saves and loads of other processes.
        """
        self._tier.check_writable()
        return collect(self._tier, self._catalog(), dry_run=dry_run)

    def repair(self, progress: Progress | None = None) -> Repaired:
        """Make whole what is damaged, from what is intact; delete no checkpoint. Reads every byte of the packs.

        Safe beside saves, loads and collections of other processes. What it cannot repair it names, with what can be
        done about it. A second repair in a row does nothing.

        Raises:
            ReadOnlyStoreError: the store was opened with ``read_only=True``, or cannot be written.
            StorageError: the disk is full or refused; nothing is lost, and the next repair goes on.
        """
        return self._with_catalog(lambda catalog, made: repair(self._tier, catalog, progress, made))

    def rebuild(self) -> Rebuilt:
        """Make the catalog again from packs and manifests alone; pins of living processes are kept.

        Where no process has the catalog open, a new file takes its place; else its entries are corrected.

        Raises:
            ReadOnlyStoreError: the store was opened with ``read_only=True``, or cannot be written.
            CatalogError: it is damaged and in use by other processes; the message names them.
        """
        return self._with_catalog(lambda catalog, made: made or reconcile(self._tier, catalog), anew=True)

    def _with_catalog(self, use: Callable[[Catalog, Rebuilt | None], _T], *, anew: bool = False) -> _T:
        """Open the catalog and use it; once more when it turns out damaged, for to open it again sets it aside."""
        made: list[Rebuilt] = []

        def populate(transaction: Transaction) -> None:
            made[:] = [rebuild(self._tier, transaction)]

        try:
            return use(self._tier.open_catalog(populate, anew=anew), made[0] if made else None)
        except CatalogError:
            self._tier.leave_catalog()
            return use(self._tier.open_catalog(populate, anew=anew), made[0] if made else None)

    def begin_generation(self, parent: Checkpoint | None, *, run: str = DEFAULT_RUN) -> int:
        """Say, durably, that training goes on from ``parent`` (None: from nothing).

        Returns the number of the new generation.

        What was saved after ``parent`` stays, but is no longer on the line of training.
        """
        self._tier.check_writable()
        return begin_generation(self._tier, layout.check_run(run), None if parent is None else parent.ref)

    def close(self) -> None:
        """Finish what is being saved in the background, and close the store; closing twice is no error."""
        self.finish()
        self._tier.close()

    def __enter__(self) -> Store:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()
