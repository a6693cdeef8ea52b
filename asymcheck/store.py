"""The store: what users open, save to and load from.

It wires the ways down and up to a tier and holds no engine of its own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from asymcheck.config import StoreConfig
from asymcheck.errors import (
    AsymcheckError,
    CatalogError,
    CheckpointNotFoundError,
    HeadRecordError,
    InvalidInputError,
    SkippedCheckpointWarning,
    StepOrderWarning,
)
from asymcheck.format import layout, registry
from asymcheck.format.catalog import manifest_key
from asymcheck.partition.state import flatten
from asymcheck.pipeline.collect import Collected, collect
from asymcheck.pipeline.save import SaveRequest, save
from asymcheck.recovery.inventory import StoredTensor, inventory
from asymcheck.recovery.line import Line, begin_generation, read_line
from asymcheck.recovery.load import load
from asymcheck.recovery.rebuild import Rebuilt, rebuild, reconcile
from asymcheck.recovery.repair import repair
from asymcheck.recovery.repaired import Repaired
from asymcheck.recovery.resolve import candidates, read_manifests
from asymcheck.tiers.nvme import Catalog, CheckpointFiles, NvmeTier, Transaction
from asymcheck.types import Checkpoint, CheckpointRef, Restored, Usage
from asymcheck.verify import Finding, verify
from asymcheck.verify.checker import Progress

DEFAULT_RUN = "default"
_T = TypeVar("_T")


class Store:
    """A checkpoint store in a directory on a local drive.

    Open it with :meth:`open`; threads may share it, forked children may not.
    """

    def __init__(self, tier: NvmeTier) -> None:
        """Wrap an opened tier; use :meth:`open`."""
        self._tier = tier

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
        text = os.fspath(location)
        if "://" in text:
            raise InvalidInputError(
                f"location {text!r}: this version stores in directories of a local drive; give a path"
            )
        return cls(NvmeTier(Path(text), config or StoreConfig(), read_only=read_only))

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._tier.root

    def save(
        self,
        state: object,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        run: str = DEFAULT_RUN,
        generation: int | None = None,
    ) -> Checkpoint:
        """Store a state durably: when this returns, the checkpoint survives power loss.

        Args:
            state: nested dict, list, tuple of tensors, arrays and plain values; objects with ``state_dict`` and
                ``load_state_dict`` take part.
            step: the training step, 0 or more.
            metrics: named numbers, for instance ``{"loss": 3.2}``.
            run: whose checkpoint it is.
            generation: the line of training; the present one by default. :class:`asymcheck.Checkpointer` keeps it for
                you.

        Raises:
            UnsupportedValueError: something in the state cannot be stored; nothing was written.
            InvalidInputError: another argument cannot be used; nothing was written.
            StorageError: the disk is full or refused; nothing was committed, earlier checkpoints are untouched.
        """
        self._tier.check_writable()
        layout.check_run(run)
        numbers = _check_metrics(metrics or {})
        if type(step) is not int or not 0 <= step <= registry.STEP_MAX:
            raise InvalidInputError(f"step {step!r}: give an integer from 0 to {registry.STEP_MAX}")
        if generation is not None:
            self._check_generation(run, generation)
        flat = flatten(state)
        catalog = self._catalog()
        present = read_line(self._tier, run).generation if generation is None else generation
        parent = self._newest_before(run, present, step)
        request = SaveRequest(run, present, step, parent, numbers)
        done = save(self._tier, catalog, flat, request)
        return Checkpoint(
            run=run,
            step=step,
            generation=present,
            save_id=done.ref.save_id.hex(),
            world_size=1,
            complete=True,
            on_line=generation is None or done.ref in self._line(run),
            created_ns=int.from_bytes(done.ref.save_id[:8], "big"),
            state_bytes=done.state_bytes,
            written_bytes=done.written_bytes,
            metrics=numbers,
        )

    def _check_generation(self, run: str, generation: int) -> None:
        """Refuse a generation without a head record: a checkpoint of it would hide which one is newest."""
        if type(generation) is not int or generation not in (1, *self._tier.manifests.heads(run)):
            raise InvalidInputError(
                f"generation {generation!r} of run {run!r} was never opened; see begin_generation()"
            )

    def _newest_before(self, run: str, generation: int, step: int) -> CheckpointRef | None:
        newest = self._tier.manifests.newest(run, generation)
        if newest is None:
            head = self._tier.manifests.read_head(run, generation)
            return head[0].parent if head is not None else None
        if newest.step > step:
            warnings.warn(
                f"run {run!r} already has step {newest.step}, so step {step} will not be its newest checkpoint; "
                "to train on from an earlier step, restore it with a Checkpointer first",
                StepOrderWarning,
                stacklevel=3,
            )
        return newest

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
            warnings.warn(f"run {run!r}: passed over {reason}", SkippedCheckpointWarning, stacklevel=2)
        return restored.state

    def restore(
        self,
        step: int | None = None,
        *,
        tensors: str = "*",
        into: object = None,
        device: str | torch.device | None = None,
        run: str = DEFAULT_RUN,
    ) -> Restored:
        """Do as :meth:`load` does, and also say which checkpoint was read and what was passed over."""
        self._tier.check_usable()
        layout.check_run(run)
        loaded = load(self._tier, run, step, tensors, into, torch.device(device or "cpu"))
        header = loaded.manifest.header
        checkpoint = Checkpoint(
            run=run,
            step=loaded.ref.step,
            generation=loaded.ref.generation,
            save_id=loaded.ref.save_id.hex(),
            world_size=header.world_size,
            complete=True,
            on_line=step is None or loaded.ref in self._line(run),
            created_ns=int.from_bytes(loaded.ref.save_id[:8], "big"),
            state_bytes=loaded.manifest.total_bytes,
            metrics=header.metrics,
        )
        return Restored(loaded.state, checkpoint, loaded.skipped)

    def _line(self, run: str) -> Line:
        """Return the line of a run; an empty one when a head record is lost, for then nobody knows."""
        try:
            return read_line(self._tier, run)
        except HeadRecordError:
            return Line(0, {})

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all runs, oldest first, by their names.

        Tensor bytes are not checked, :meth:`verify` does that.
        """
        self._tier.check_usable()
        found = []
        for name in self._tier.manifests.runs() if run is None else [layout.check_run(run)]:
            line = self._line(name)
            found += [self._describe(listing, line) for listing in self._tier.manifests.checkpoints(name)]
        return found

    def _describe(self, listing: CheckpointFiles, line: Line) -> Checkpoint:
        state_bytes = 0
        metrics: dict[str, float] = {}
        try:
            for manifest in read_manifests(self._tier, listing):
                state_bytes += manifest.total_bytes
                metrics.update(manifest.header.metrics)
            complete = True
        except AsymcheckError:
            complete = False
        return Checkpoint(
            run=listing.run,
            step=listing.ref.step,
            generation=listing.ref.generation,
            save_id=listing.ref.save_id.hex(),
            world_size=listing.world_size,
            complete=complete,
            on_line=listing.ref in line,
            created_ns=int.from_bytes(listing.ref.save_id[:8], "big"),
            state_bytes=state_bytes,
            metrics=metrics,
        )

    def tensors(
        self, step: int | None = None, pattern: str = "*", *, run: str = DEFAULT_RUN
    ) -> tuple[Checkpoint, list[StoredTensor]]:
        """Return a checkpoint, the newest by default, and its tensors that match a glob; reads no tensor bytes."""
        self._tier.check_usable()
        ref, tensors = inventory(self._tier, layout.check_run(run), step, pattern)
        return self._describe(self._tier.manifests.listing(run, ref), self._line(run)), tensors

    def usage(self) -> Usage:
        """Return the bytes that the store takes on disk."""
        self._tier.check_usable()
        return Usage(self._tier.descriptor.store_id.hex(), *self._tier.usage())

    def verify(
        self, step: int | None = None, *, run: str | None = None, progress: Progress | None = None
    ) -> list[Finding]:
        """Read and check every byte of the store, or what one step needs.

        Returns what is wrong; nothing when all is well.
        """
        self._tier.check_usable()
        if step is not None:
            candidates(self._tier, run or DEFAULT_RUN, step)
            run = run or DEFAULT_RUN
        return verify(self._tier, run, step, progress)

    def delete(self, step: int, *, run: str = DEFAULT_RUN, generation: int | None = None) -> list[Checkpoint]:
        """Delete the checkpoints of a step, of one generation or of all, durably; return them.

        :meth:`gc` gives the room back.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        self._tier.check_writable()
        listings = [
            listing for listing in self._tier.manifests.checkpoints(layout.check_run(run)) if listing.ref.step == step
        ]
        listings = [listing for listing in listings if generation in (None, listing.ref.generation)]
        if not listings:
            raise CheckpointNotFoundError(f"store {self.path} has no checkpoint of step {step} of run {run!r}")
        line = self._line(run)
        described = [self._describe(listing, line) for listing in listings]
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

    def _catalog(self) -> Catalog:
        return self._tier.open_catalog(self._populate)

    def _populate(self, transaction: Transaction) -> None:
        rebuild(self._tier, transaction)

    def close(self) -> None:
        """Close the store; closing twice is no error."""
        self._tier.close()

    def __enter__(self) -> Store:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()


def _check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    if len(metrics) > registry.METRICS_MAX:
        raise InvalidInputError(f"{len(metrics)} metrics: at most {registry.METRICS_MAX} fit")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidInputError(f"metric {name!r} is {value!r}, which is not a number") from error
    return numbers
