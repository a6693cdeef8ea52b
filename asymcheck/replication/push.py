"""Push: copy checkpoints to a remote location, in the order of SPEC.md §C2."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import PurePosixPath

from asymcheck.commit.encoder import Encoder
from asymcheck.config import StoreConfig
from asymcheck.errors import (
    AsymcheckError,
    ClosedStoreError,
    DamagedPartitionError,
    ForkedStoreError,
    FormatError,
    HeadRecordError,
    InconsistentCheckpointError,
    InvalidInputError,
    MissingPartitionError,
    ReadOnlyStoreError,
    RecoveryError,
    RemoteUnreachableError,
    StorageError,
    StoreNotFoundError,
    TooManyFilesError,
    result_or_error,
)
from asymcheck.executor import begin, share
from asymcheck.format import layout
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.replication.checkpoint_cache import RemotePresence
from asymcheck.replication.cross_node_dedup import held_back, wait_for_others
from asymcheck.replication.decodable_frames import DecodableFrames
from asymcheck.replication.head_records import publish_heads
from asymcheck.replication.pack_sender import PackSender
from asymcheck.replication.reencoder import Older, Reencoder, older_of
from asymcheck.replication.transfer_plan import TransferPlanner
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles, batches
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote import RemoteLocation, RemoteTier
from asymcheck.storage.remote.tier import lost_location
from asymcheck.types import CheckpointRef, Digest, PackId, Progress

_ATTEMPTS = 8
_OLDER_TRIED = 8


def open_location(
    local: ReadTier, location: RemoteLocation, config: StoreConfig, *, create: bool = False
) -> RemoteTier:
    """Open the location of a push. Create it, unless the store ``local`` was pushed there before.

    With ``create``, also create a location of earlier pushes.

    Raises:
        RemoteUnreachableError: the location of earlier pushes is missing or empty, or does not answer. A mount point
            without its file system looks like that.
        StoreNotFoundError, FormatError, InvalidInputError: as for :class:`RemoteTier`.
    """
    store = local if isinstance(local, NvmeTier) else None
    is_known = store is not None and store.was_pushed_to(str(location))
    try:
        remote = RemoteTier(location, config, create=create or not is_known)
    except StoreNotFoundError as error:
        raise (lost_location(location) if error.is_empty else error) from error
    if store is not None and not is_known:
        store.note_push_to(str(location))
    return remote


def encoder_for(remote: RemoteTier) -> Encoder:
    """Return the encoder of a location. Reuse it to keep its measurements."""
    config = remote.config.remote
    return Encoder(config.compression, "hdfs", lambda: remote.pace.writing.bytes_per_s)


def push(
    local: ReadTier,
    remote: RemoteTier,
    listings: Sequence[CheckpointFiles],
    progress: Progress | None = None,
    encoder: Encoder | None = None,
    is_ending: Callable[[], bool] = lambda: False,
    is_alone: Callable[[], bool] = lambda: False,
) -> Moved:
    """Copy checkpoints of ``local`` to a location in the given order; skip checkpoints that are whole there.

    The head records of their runs are published, too. A checkpoint that cannot be copied does not stop the others.
    ``progress`` is called with the payload bytes sent and to be sent for the current checkpoint, and may raise to stop.
    ``encoder`` is that of an earlier push to the same location. ``is_ending`` tells that the process should end soon,
    and ``is_alone`` that the other machines of the job may send nothing more.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: a checkpoint of the
            source is damaged. For several, the error names all; the others were copied.
        HeadRecordError: a head record of a run is damaged.
        InvalidInputError: another training has used the run name at the location.
        RemoteUnreachableError, StorageError: the location failed; committed checkpoints stay, and the next push
            continues.
    """
    moved = Moved(str(remote.location))
    encoder = encoder or encoder_for(remote)
    present = RemotePresence(remote)
    # Once per run; a call that raises is repeated.
    publish = functools.cache(partial(publish_heads, local, remote))
    runs = functools.cache(partial(_RemoteRun, remote))
    failures: dict[str, AsymcheckError] = {}
    for listing, part in _looked_up(listings, runs, present):
        run = listing.run
        if run in failures:
            continue
        there = runs(run)
        try:
            if part.is_complete and present.has(part):
                moved.present += 1
                continue
            there.check()
            older = there.older(local, listing) if encoder.wants_bases else None
            one = _Push(local, remote, listing, part, moved, progress, encoder, older, publish, is_ending, is_alone)
            one.carry_out()
            there.note(listing)
        except (HeadRecordError, InvalidInputError) as error:
            # Every other checkpoint of the run would fail, too.
            failures[run] = error
        except (FormatError, RecoveryError) as error:
            # A training may delete a checkpoint before its turn.
            if len(listings) == 1 or not local.manifests.is_deleted(listing):
                failures[f"run {run}, {listing.ref}"] = error
    for run in {listing.run: None for listing in listings if listing.run not in failures}:
        try:
            publish(run)
        except (HeadRecordError, InvalidInputError) as error:
            failures[run] = error
    _raise_any(failures, len(listings), remote)
    return moved


def _looked_up(
    listings: Sequence[CheckpointFiles], runs: Callable[[str], _RemoteRun], present: RemotePresence
) -> Iterator[tuple[CheckpointFiles, CheckpointFiles]]:
    """Yield each checkpoint with its part at the location. The packs there are listed once for many checkpoints."""
    for batch in batches(listings):
        parts = [runs(listing.run).part(listing, listing.ref) for listing in batch]
        present.expect(part for part in parts if part.is_complete)
        yield from zip(batch, parts, strict=True)


def _raise_any(failures: Mapping[str, AsymcheckError], asked: int, remote: RemoteTier) -> None:
    if not failures:
        return
    first = next(iter(failures.values()))
    if asked == 1 or (len(failures) == 1 and isinstance(first, (HeadRecordError, InvalidInputError))):
        raise first
    raise InconsistentCheckpointError(
        f"some checkpoints could not be copied to {remote.location}, all others were. Run asymcheck verify:",
        [f"{name}: {error}" for name, error in failures.items()],
    ) from first


class _RemoteRun:
    """Checkpoints of a run at a location. One request lists them all in an object store, and one in a file system."""

    def __init__(self, remote: RemoteTier, run: str) -> None:
        self._remote, self._run = remote, run
        self._listed: dict[CheckpointRef, CheckpointFiles] | None = None
        if not remote.files.renames:
            self._listed = {listing.ref: listing for listing in remote.manifests.checkpoints(run)}

    def part(self, listing: CheckpointFiles, ref: CheckpointRef) -> CheckpointFiles:
        """Return the manifests of the ranks of ``listing``: each store of a job pushes only what its ranks saved."""
        if self._listed is None:
            found = self._remote.manifests.listing(self._run, ref)
        else:
            found = self._listed.get(ref, CheckpointFiles(self._run, ref, ()))
        return found.of_ranks(listing.store_ranks)

    def older(self, local: ReadTier, listing: CheckpointFiles) -> CheckpointFiles | None:
        """Return the newest older checkpoint that exists on both sides."""
        refs = self._remote.manifests.refs(self._run) if self._listed is None else sorted(self._listed)
        for ref in reversed([ref for ref in refs if ref < listing.ref][-_OLDER_TRIED:]):
            older = local.manifests.listing(listing.run, ref)
            if older.is_complete and self.part(listing, ref).is_complete:
                return older
        return None

    def check(self) -> None:
        """Raise RemoteUnreachableError if the location was emptied, unless a listing shows that it was not."""
        if not self._listed:
            self._remote.refuse_lost_location()

    def note(self, listing: CheckpointFiles) -> None:
        """Add manifests that were published."""
        if self._listed is not None:
            self._listed[listing.ref] = listing


@dataclasses.dataclass
class _Push:
    """Push of one checkpoint."""

    local: ReadTier
    remote: RemoteTier
    listing: CheckpointFiles
    found: CheckpointFiles  # its manifests at the location
    moved: Moved
    progress: Progress | None
    encoder: Encoder
    older: CheckpointFiles | None
    publish_heads: Callable[[str], set[int]]
    is_ending: Callable[[], bool]
    is_alone: Callable[[], bool]
    damaged: set[Digest] = dataclasses.field(default_factory=set)
    reported: tuple[int, ...] = (0, 0)
    # Temporary names of uploaded manifests.
    staged: dict[ManifestName, PurePosixPath] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with the packs of this store: others hold parts of other ranks, and may be thousands."""
        self.prefix = layout.pack_prefix(self.listing.first_rank)
        self.sought = (self.prefix,)

    def carry_out(self) -> None:
        """Upload missing packs, then head records, then manifests; repeat if a collection removes needed packs."""
        run, ref = self.listing.run, self.listing.ref
        try:
            manifests = read_manifests(self.local, self.listing)
            data = {name: self.local.manifests.read_bytes(run, ref, name) for name in self.listing.manifests}
        except (ClosedStoreError, ForkedStoreError, RemoteUnreachableError, TooManyFilesError):
            raise
        except StorageError as error:
            raise InconsistentCheckpointError(f"its manifests cannot be read: {error}") from error
        # Closing a file takes half a second, so manifests are uploaded beside the packs and renamed at the end.
        staged = list(data) if self.remote.files.renames else []
        threads = min(self.remote.config.remote.uploads, len(staged))
        staging = begin(partial(share, staged, partial(self._stage, data), threads, "push-manifest"), "push-manifests")
        try:
            held = held_back(manifests, self.listing)
            if held:
                self.sought = (b"",)
                # Other stores send these partitions. Partitions that do not arrive are sent with the rest.
                self._send(manifests, held)
                wait_for_others(self.remote, self.listing, held, self._report, self.is_ending, self.is_alone)
            relied = self._send_all(manifests, staging)
            if ref.generation > max(self.publish_heads(run), default=1):
                raise HeadRecordError(
                    f"cannot push {ref} of run {run!r}: store {self.local.root} has lost the head record of this "
                    f"generation, or is being removed. Without the record, no reader of {self.remote.location} would "
                    f"know the newest checkpoint. Run asymcheck verify {self.local.root}"
                )
            self._remove_damaged(data)
            for name, content in data.items():
                self.remote.manifests.publish(run, ref, name, content, self.staged.pop(name, None))
        except BaseException:
            wait([staging])
            # A collection removes staged manifests that cannot be removed now.
            with contextlib.suppress(Exception):
                for path in self.staged.values():
                    self.remote.manifests.unstage(path)
            raise
        # A collection that listed the manifests earlier may have removed a pack by now. A collection that begins later
        # sees the manifest, and reprieves the pack.
        if not self._packs_remain(relied):
            self._send_all(manifests, staging)
        self.moved.committed += (f"run {run}, {ref}",)

    def _stage(self, data: Mapping[ManifestName, bytes], names: Iterable[ManifestName]) -> None:
        """Upload manifests under temporary names."""
        for name in names:
            self.staged[name] = self.remote.manifests.stage(self.listing.run, self.listing.ref, data[name])

    def _send_all(self, manifests: Sequence[Manifest], staging: Future[None]) -> set[PackId]:
        """Send missing partitions, and wait for the manifests; return the packs that the checkpoint relies on."""
        for _ in range(_ATTEMPTS):
            relied = self._send(manifests)
            staging.result()
            if self._packs_remain(relied):
                return relied
        raise StorageError(
            f"cannot push {self.listing.ref} to {self.remote.location}: collections removed its packs {_ATTEMPTS} "
            "times; push again"
        )

    def _packs_remain(self, relied: set[PackId]) -> bool:
        """Withdraw announced removals of packs; return whether all packs are there."""
        return not self.remote.reprieve(relied)

    def _remove_damaged(self, data: Mapping[ManifestName, bytes]) -> None:
        """Remove unreadable manifests with the names of this checkpoint, because a publish never replaces a file."""
        run, ref = self.listing.run, self.listing.ref
        for name in data.keys() & set(self.found.manifests):
            problem = result_or_error(self.remote.manifests.read_bytes, run, ref, name)
            if isinstance(problem, AsymcheckError) and not isinstance(problem, MissingPartitionError):
                self.remote.files.delete(self.remote.manifests.directory(run, ref) / str(name))

    def _report(self, *progress: int) -> None:
        """Report the progress to the caller; without ``progress``, report the last one again."""
        self.reported = progress or self.reported
        if self.progress is not None:
            self.progress(*self.reported)

    def _send(self, manifests: Sequence[Manifest], excluded: Collection[Digest] = ()) -> set[PackId]:
        """Send missing partitions except ``excluded``; return the old and new packs that the checkpoint relies on."""
        needed = dict.fromkeys(name for manifest in manifests for name in manifest.partitions() if name not in excluded)
        with (
            self._located(manifests) as local,
            older_of(self.local, self.older) as older,
        ):
            names = local.in_reading_order(list(needed))
            while True:
                try:
                    return self._send_from(local, names, manifests, older)
                except DamagedPartitionError as error:
                    # The partition is sent decoded from another copy. Without another copy, the next attempt raises.
                    if error.digest is None or error.digest in self.damaged:
                        raise
                    self.damaged.add(Digest(error.digest))

    def _located(self, manifests: Sequence[Manifest]) -> PartitionLocator:
        try:
            return PartitionLocator.of_manifests(self.local, manifests)
        except ReadOnlyStoreError as error:
            # The store refuses, and not the location, so other checkpoints may be readable.
            raise InconsistentCheckpointError(f"its packs cannot be read: {error}") from error

    def _send_from(
        self, local: PartitionLocator, names: Sequence[Digest], manifests: Sequence[Manifest], older: Older
    ) -> set[PackId]:
        # Listed at each attempt, to find the packs of earlier attempts.
        indexes = self.remote.read_indexes(self.remote.reliable_packs(self.sought))
        planner = TransferPlanner(local, DecodableFrames(indexes.values()), self.damaged)
        planner.choose(names)
        reencoder = None
        if self.remote.config.remote.compression != "off":
            reencoder = Reencoder(self.encoder, planner, manifests, older)
        sender = PackSender(self.remote, self.prefix, planner.stored, self.moved, self._report, reencoder)
        # The base of a frame arrives before the frame.
        new = sender.send(planner.full) | sender.send_in_order(planner.based)
        self.moved.reused_partitions += planner.reused
        return planner.relied | new
