"""Pull: copy checkpoints from a remote location into a store on a local drive, in the order of SPEC.md §B2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from asymcheck.commit.encoder import Encoder
from asymcheck.commit.transaction import CommitTransaction
from asymcheck.errors import (
    AsymcheckError,
    CatalogError,
    ClosedStoreError,
    ForkedStoreError,
    FormatError,
    InconsistentCheckpointError,
    InvalidInputError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    RecoveryError,
    RemoteUnreachableError,
    StorageError,
    TooManyFilesError,
    UnsupportedFormatError,
    result_or_error,
)
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.manifest import Manifest, encode
from asymcheck.replication.head_records import pull_heads
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.frame_reader import fetch
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.restore.resolve import read_manifests, resolve_one
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import Catalog, NvmeTier, PackWriter
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Digest, Progress, ProgressMeter

if TYPE_CHECKING:
    from asymcheck.replication.partial_copy import Selection

_BLOCKING_ERRORS = (
    OutOfSpaceError,
    ReadOnlyStoreError,
    TooManyFilesError,
    CatalogError,
    ClosedStoreError,
    ForkedStoreError,
)
"""Errors that every other checkpoint would raise as well."""


def check_derived_run(tier: ReadTier, run: str) -> None:
    """Raise InvalidInputError if a training would find merged or partial checkpoints of a run in its line."""
    newest = next(reversed(tier.manifests.checkpoints(run)), None)
    if newest is not None and tier.manifests.read(run, newest.ref, newest.manifests[0]).header.merged is None:
        raise InvalidInputError(
            f"run {run!r} of {tier.root} has checkpoints of a training; give another run for the result"
        )


def pull(
    remote: RemoteTier,
    local: NvmeTier,
    catalog: Catalog,
    listings: Sequence[CheckpointFiles],
    progress: Progress | None = None,
    selection: Selection | None = None,
) -> Moved:
    """Copy checkpoints into a store, and verify every byte; skip checkpoints that are whole there.

    A checkpoint that cannot be copied does not stop the others, and raises at the end. ``progress`` is called with the
    plain bytes read and to be read, for the current checkpoint. With ``selection``, only some tensors are copied.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: a checkpoint is damaged.
        InvalidInputError: another training has used the run name in the store.
        RemoteUnreachableError, StorageError: the location or the drive failed; committed checkpoints stay.
    """
    moved = Moved(str(remote.location))
    # The packs are listed once. A collection keeps those that a listed checkpoint needs.
    copier = CheckpointCopier(remote.listed(), local, catalog, progress, moved)
    # Once per run; a call that raises is repeated.
    copy_heads = functools.cache(partial(pull_heads, remote, local))

    def copy(listing: CheckpointFiles) -> None:
        run, ref = (listing.run, listing.ref) if selection is None else (selection.run, selection.ref(listing))
        # With one store per node, this store may have only the part of its node.
        present = local.manifests.listing(run, ref)
        if present.is_whole and _has_packs(local, present):
            moved.present += 1
            return
        if selection is None:
            copy_heads(run)
        try:
            copier.copy(listing, selection)
        except (FormatError, RecoveryError):
            # A training may delete a checkpoint at the location before its turn.
            if len(listings) == 1 or not remote.manifests.is_deleted(listing):
                raise

    if selection is not None:
        check_derived_run(local, selection.run)
    failed = each(remote, listings, copy)
    if failed:
        raise _failure(failed, len(listings), remote)
    return moved


def _has_packs(local: NvmeTier, listing: CheckpointFiles) -> bool:
    """Tell whether the manifests of a checkpoint are intact and all its partitions are in packs."""
    found = result_or_error(resolve_one, local, listing)
    if isinstance(found, AsymcheckError):
        return isinstance(found, UnsupportedFormatError)
    found.sources.close()
    return True


def each(
    remote: RemoteTier, listings: Sequence[CheckpointFiles], copy: Callable[[CheckpointFiles], None]
) -> dict[str, AsymcheckError]:
    """Copy checkpoints one by one; return the errors of those that could not be copied.

    Raises:
        RemoteUnreachableError, StorageError: every other checkpoint would fail, too.
    """
    failed: dict[str, AsymcheckError] = {}
    for listing in listings:
        try:
            copy(listing)
        except _BLOCKING_ERRORS:
            raise
        except AsymcheckError as error:
            if isinstance(error, RemoteUnreachableError):
                remote.manifests.runs()  # Raises if the whole location is unreachable.
            failed[f"run {listing.run}, {listing.ref}"] = error
    return failed


def _failure(failed: Mapping[str, AsymcheckError], count: int, remote: RemoteTier) -> AsymcheckError:
    errors = list(failed.values())
    if count == 1:
        return errors[0]
    message = f"{len(failed)} of {count} checkpoints could not be copied from {remote.location}, all others were:"
    reasons = [f"{name}: {error}" for name, error in failed.items()]
    for kind in (RemoteUnreachableError, StorageError, InvalidInputError):
        if any(isinstance(error, kind) for error in errors):
            return kind("\n  ".join([message, *reasons]))
    return InconsistentCheckpointError(message, reasons)


@dataclasses.dataclass(frozen=True)
class CheckpointCopier:
    """Copies checkpoints from a remote location into a store."""

    remote: RemoteTier
    local: NvmeTier
    catalog: Catalog
    progress: Progress | None
    moved: Moved
    """Sum of the copies so far."""

    def copy(self, listing: CheckpointFiles, selection: Selection | None = None) -> None:
        """Copy the missing or damaged parts of one checkpoint, or only some tensors.

        Raises:
            AsymcheckError: the copy failed; the store keeps everything that it had.
        """
        manifests = read_manifests(self.remote, listing)
        if selection is not None:
            manifests = selection.cut(self.remote, listing, manifests)
        header = manifests[0].header
        present = self.local.manifests.listing(header.run, header.ref)
        for name, wanted in zip(listing.manifests, manifests, strict=True):
            own = next((own for own in present.manifests if own.rank == name.rank), None)
            manifest = wanted
            if selection is None:
                data = self.remote.manifests.read_bytes(listing.run, listing.ref, name)
            elif own is None:
                data = encode(wanted)
            else:
                # An earlier attempt, of another version or with another URI of the location, wrote other bytes. A rank
                # with two manifests could not be read.
                manifest = self.local.manifests.read(header.run, header.ref, own)
                data = self.local.manifests.read_bytes(header.run, header.ref, own)
            self._copy_rank(manifest, data)
        self.moved.committed += (f"run {header.run}, {header.ref}",)

    def _copy_rank(self, manifest: Manifest, data: bytes) -> None:
        """Fetch the missing partitions of one rank, and commit the manifest."""
        run, ref, rank = manifest.header.run, manifest.header.ref, manifest.header.rank
        # Only saves encode frames.
        encoder = Encoder("off", "nvme")
        with CommitTransaction(self.local, self.catalog, encoder, ref.save_id, rank) as transaction:
            with PartitionLocator.of_manifests(self.remote, [manifest]) as sources:
                fetch_missing = partial(self._fetch_missing, transaction, sources, manifest.partitions())
                fetch_missing(names := list(manifest.partitions()))
                transaction.seal(names, lambda lost: fetch_missing(sorted(lost)))
            # An existing manifest stays: parts of its checkpoint may be readable if this copy fails.
            transaction.publish(run, ref, manifest.header.world_size, data, keep_existing=True)
        packing = transaction.packing
        self.moved.packs += len(packing.packs)
        self.moved.moved_bytes += packing.written_bytes
        self.moved.plain_bytes += packing.written_bytes
        self.moved.moved_partitions += len(packing.written)
        self.moved.reused_partitions += len(packing.reused)

    def _fetch_missing(
        self,
        transaction: CommitTransaction,
        sources: PartitionLocator,
        lengths: Mapping[Digest, int],
        names: Sequence[Digest],
    ) -> None:
        missing = [name for name in names if transaction.claim(name)]
        meter = ProgressMeter(self.progress, sum(lengths[name] for name in missing))
        transaction.expect(sum(frame_length(lengths[name]) for name in missing))

        def place(name: Digest, data: memoryview) -> None:
            transaction.write(FrameDescriptor.identity(name, len(data)), partial(self._write, data))
            meter.add(len(data))

        if missing:
            fetch(sources, missing, place, self.local)

    def _write(self, data: memoryview, writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with self.local.slots.slot(len(data)) as slot:
            slot.payload(len(data))[:] = data
            writer.write(slot, descriptor)
