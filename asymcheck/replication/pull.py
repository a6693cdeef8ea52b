"""Pull: a checkpoint copied from a remote location into a store on a local drive, in the order of SPEC.md §8.1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from asymcheck.commit.encoder import Encoder
from asymcheck.commit.transaction import CommitTransaction
from asymcheck.errors import (
    AsymcheckError,
    CatalogError,
    ClosedStoreError,
    ForkedStoreError,
    InconsistentCheckpointError,
    InvalidInputError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    StorageError,
    TooManyFilesError,
)
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.replication.head_records import pull_heads
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.frame_reader import fetch
from asymcheck.restore.partition_locator import PartitionLocator, PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.nvme import Catalog, NvmeTier, PackWriter
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import Digest, Progress

_NO_OTHER_EITHER = (
    OutOfSpaceError,
    ReadOnlyStoreError,
    TooManyFilesError,
    CatalogError,
    ClosedStoreError,
    ForkedStoreError,
)
"""What stops all copying: another checkpoint would fail for the same reason."""


def pull(
    there: RemoteTier,
    here: NvmeTier,
    catalog: Catalog,
    listings: Sequence[CheckpointFiles],
    progress: Progress | None = None,
) -> Moved:
    """Copy checkpoints into a store, every byte verified. Those that are in it already are passed over.

    One that cannot be copied stops no other; at the end it is an error.

    Args:
        there: where they lie.
        here: the store.
        catalog: its catalog.
        listings: which ones.
        progress: called with plain bytes read and to be read, for the checkpoint that is being copied.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: one cannot be copied.
        InvalidInputError: the store has another training of that run name.
        RemoteUnreachableError, StorageError: the location, or the device, refused; what was committed stays.
    """
    tally = Moved(str(there.location))
    with_heads = set[str]()

    def copy(listing: CheckpointFiles) -> None:
        # A store of several of one job may have its part, and nothing of the others.
        if here.manifests.listing(listing.run, listing.ref).is_whole:
            tally.present += 1
            return
        if listing.run not in with_heads:
            pull_heads(there, here, listing.run)
            with_heads.add(listing.run)
        copy_one(there, here, catalog, listing, tally, progress)

    failed = each(there, listings, copy)
    if failed:
        raise _failure(failed, len(listings), there)
    return tally


def each(
    there: RemoteTier, listings: Sequence[CheckpointFiles], copy: Callable[[CheckpointFiles], None]
) -> dict[str, AsymcheckError]:
    """Copy checkpoints one by one; return what could not be copied, and why.

    Raises:
        RemoteUnreachableError, StorageError: no other could be copied, either.
    """
    failed: dict[str, AsymcheckError] = {}
    for listing in listings:
        try:
            copy(listing)
        except _NO_OTHER_EITHER:
            raise
        except AsymcheckError as error:
            if isinstance(error, RemoteUnreachableError):
                there.manifests.runs()  # An error when nobody answers, whatever is asked.
            failed[f"{listing.run} {listing.ref}"] = error
    return failed


def _failure(failed: Mapping[str, AsymcheckError], count: int, there: RemoteTier) -> AsymcheckError:
    """Return one error for all."""
    errors = list(failed.values())
    if count == 1:
        return errors[0]
    message = f"{len(failed)} of {count} checkpoints could not be copied from {there.location}, the others are here:"
    reasons = [f"{name}: {error}" for name, error in failed.items()]
    for kind in (RemoteUnreachableError, StorageError, InvalidInputError):
        if any(isinstance(error, kind) for error in errors):
            return kind("\n  ".join([message, *reasons]))
    return InconsistentCheckpointError(message, reasons)


def copy_one(
    there: RemoteTier,
    here: NvmeTier,
    catalog: Catalog,
    listing: CheckpointFiles,
    tally: Moved,
    progress: Progress | None,
) -> None:
    """Copy one checkpoint, or what the store lacks of it: it may be there already, and damaged.

    Raises:
        AsymcheckError: it cannot be copied; what was here before is here still.
    """
    manifests = read_manifests(there, listing)
    for name, manifest in zip(listing.manifests, manifests, strict=True):
        _Pull(there, here, catalog, tally, progress).carry_out(listing, name, manifest)
    tally.committed += (f"{listing.run} {listing.ref}",)


class _Pull:
    """Copies one rank's part of a checkpoint."""

    def __init__(
        self, there: RemoteTier, here: NvmeTier, catalog: Catalog, tally: Moved, progress: Progress | None
    ) -> None:
        self._there, self._here, self._catalog = there, here, catalog
        self._tally, self._progress = tally, progress
        self._done = 0
        self._lock = threading.Lock()

    def carry_out(self, listing: CheckpointFiles, name: ManifestName, manifest: Manifest) -> None:
        """Fetch what the store lacks, and commit."""
        run, ref = listing.run, listing.ref
        # Frames are stored as they come: to encode them is for a save.
        encoder = Encoder("off", "nvme")
        with CommitTransaction(self._here, self._catalog, encoder, ref.save_id, name.rank) as transaction:
            data = self._there.manifests.read_bytes(run, ref, name)
            with PartitionLocator(self._there, PartitionSet.of_manifests([manifest]), manifest.header.packs) as sources:
                fetch_lacking = partial(self._fetch_lacking, transaction, sources, manifest.partitions())
                fetch_lacking(names := list(manifest.partitions()))
                transaction.seal(names, lambda lost: fetch_lacking(sorted(lost)))
            # A manifest that was here before stays, whatever becomes of this: parts of it may be sound.
            transaction.publish(run, ref, name.world_size, data, keep_existing=True)
        packing = transaction.packing
        self._tally.packs += len(packing.packs)
        self._tally.moved_bytes += packing.written_bytes
        self._tally.plain_bytes += packing.written_bytes
        self._tally.moved_partitions += len(packing.written)
        self._tally.reused_partitions += len(packing.reused)

    def _fetch_lacking(
        self,
        transaction: CommitTransaction,
        sources: PartitionLocator,
        lengths: Mapping[Digest, int],
        names: Sequence[Digest],
    ) -> None:
        lacking = [name for name in names if transaction.claim(name)]
        total = sum(lengths[name] for name in lacking)
        transaction.expect(sum(frame_length(lengths[name]) for name in lacking))
        self._done = 0

        def place(name: Digest, data: memoryview) -> None:
            transaction.write(FrameDescriptor.identity(name, len(data)), partial(self._write, data))
            if self._progress is not None:
                with self._lock:
                    self._done += len(data)
                    self._progress(self._done, total)

        if lacking:
            fetch(sources, lacking, place, self._here.slots, self._here.config.slots)

    def _write(self, data: memoryview, writer: PackWriter, descriptor: FrameDescriptor) -> None:
        with self._here.slots.slot(len(data)) as slot:
            slot.payload(len(data))[:] = data
            writer.write(slot, descriptor)
