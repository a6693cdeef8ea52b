"""Push: copy checkpoints to a remote location, in the order of SPEC.md §C2."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import PurePosixPath

from asymcheck.commit.encoder import Encoder
from asymcheck.errors import (
    INCONCLUSIVE,
    AsymcheckError,
    ClosedStoreError,
    DamagedPartitionError,
    ForkedStoreError,
    FormatError,
    GivenUpError,
    HeadRecordError,
    InconsistentCheckpointError,
    InvalidInputError,
    MissingPartitionError,
    RecoveryError,
    StorageError,
)
from asymcheck.executor import begin, together
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.policies.batching import FlushFacts, stream_batch_bytes
from asymcheck.replication.checkpoint_cache import RemotePresence
from asymcheck.replication.cross_node_dedup import held_back, wait_for_others
from asymcheck.replication.head_records import publish_heads
from asymcheck.replication.transfer_plan import (
    Frame,
    Older,
    PartitionIndex,
    Reencoder,
    TransferPlanner,
    all_needs,
    older_of,
)
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.partition_locator import PartitionLocator, PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier, cut, plan_pack
from asymcheck.storage.slots import Slot
from asymcheck.types import CheckpointRef, Digest, PackId, Progress, ProgressMeter

_ATTEMPTS = 8
_OLDER_TRIED = 8
_PACK_BYTES_MIN = 64 << 20
"""Packs are not made smaller than this to use more streams."""
_OBJECT_BYTES = 64 << 20
"""Maximum size of a pack in an object store, because each upload has a whole pack in memory."""
_PROBE_BYTES = 32 << 20
"""Bytes that are sent first to measure the speed of the location, which decides whether the rest is encoded."""
_MAKE_BYTES_PER_S = 1e9
"""Assumed speed of reading frames for one stream, until it was measured."""


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
) -> Moved:
    """Copy checkpoints of ``local`` to a location in the given order; skip checkpoints that are whole there.

    The head records of their runs are published, too. A checkpoint that cannot be copied does not stop the others.
    ``progress`` is called with the payload bytes sent and to be sent for the current checkpoint, and may raise to stop.
    ``encoder`` is that of an earlier push to the same location. ``is_ending`` tells that the process should end soon.

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
    for listing in listings:
        run = listing.run
        if run in failures:
            continue
        try:
            there = runs(run)
            part = there.part(listing, listing.ref)
            if part.is_complete and present.has(part):
                moved.present += 1
                continue
            there.check()
            older = _older(local, there, listing) if encoder.wants_bases else None
            _Push(local, remote, listing, part, moved, progress, encoder, older, publish, is_ending).carry_out()
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

    def refs(self) -> list[CheckpointRef]:
        """Return the checkpoints, oldest first."""
        return self._remote.manifests.refs(self._run) if self._listed is None else sorted(self._listed)

    def part(self, listing: CheckpointFiles, ref: CheckpointRef) -> CheckpointFiles:
        """Return the manifests of the ranks of ``listing``: each store of a job pushes only what its ranks saved."""
        if self._listed is None:
            found = self._remote.manifests.listing(self._run, ref)
        else:
            found = self._listed.get(ref, CheckpointFiles(self._run, ref, ()))
        return found.of_ranks(listing.store_ranks)

    def check(self) -> None:
        """Raise RemoteUnreachableError if the location was emptied, unless a listing shows that it was not."""
        if not self._listed:
            self._remote.refuse_lost_location()

    def note(self, listing: CheckpointFiles) -> None:
        """Add manifests that were published."""
        if self._listed is not None:
            self._listed[listing.ref] = listing


def _older(local: ReadTier, there: _RemoteRun, listing: CheckpointFiles) -> CheckpointFiles | None:
    """Return the newest older checkpoint that exists on both sides."""
    refs = [ref for ref in there.refs() if ref < listing.ref]
    for ref in reversed(refs[-_OLDER_TRIED:]):
        older = local.manifests.listing(listing.run, ref)
        if older.is_complete and there.part(listing, ref).is_complete:
            return older
    return None


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
    publish_heads: Callable[[str], object]
    is_ending: Callable[[], bool]
    damaged: set[Digest] = dataclasses.field(default_factory=set)
    reported: tuple[int, ...] = (0, 0)
    # Temporary names of uploaded manifests.
    staged: dict[ManifestName, PurePosixPath] = dataclasses.field(default_factory=dict)

    def carry_out(self) -> None:
        """Upload missing packs, then head records, then manifests; repeat if a collection removes needed packs."""
        run, ref = self.listing.run, self.listing.ref
        try:
            manifests = read_manifests(self.local, self.listing)
            data = {name: self.local.manifests.read_bytes(run, ref, name) for name in self.listing.manifests}
        except (ClosedStoreError, ForkedStoreError, *INCONCLUSIVE):
            raise
        except StorageError as error:
            raise InconsistentCheckpointError(f"its manifests cannot be read: {error}") from error
        # Closing a file takes half a second, so manifests are uploaded beside the packs and renamed at the end.
        names, threads = list(data), min(self.remote.config.remote.uploads, len(data))
        shares = [names[start::threads] for start in range(threads)]
        staging = [begin(partial(self._stage, data, share), "push-manifest") for share in shares]
        try:
            self._send_and_commit(manifests, data, staging)
        except BaseException:
            wait(staging)
            # A collection removes staged manifests that cannot be removed now.
            with contextlib.suppress(Exception):
                for path in self.staged.values():
                    self.remote.manifests.unstage(path)
            raise

    def _stage(self, data: Mapping[ManifestName, bytes], names: Sequence[ManifestName]) -> None:
        """Upload manifests under temporary names."""
        for name in names:
            path = self.remote.manifests.stage(self.listing.run, self.listing.ref, name, data[name])
            if path is not None:
                self.staged[name] = path

    def _send_and_commit(
        self, manifests: Sequence[Manifest], data: Mapping[ManifestName, bytes], staging: Sequence[Future[None]]
    ) -> None:
        run, ref = self.listing.run, self.listing.ref
        committed = False
        held = held_back(manifests, self.listing)
        if held:
            # Other stores send these partitions. Partitions that do not arrive are sent with the rest.
            self._send(manifests, held)
            wait_for_others(self.remote, self.listing, held, self._report, self.is_ending)
        for _ in range(_ATTEMPTS):
            relied = self._send(manifests)
            for upload in staging:
                upload.result()
            if self.remote.reprieve(relied):
                continue
            if not committed:
                self.publish_heads(run)
                self._remove_damaged(data)
                for name in data:
                    self.remote.manifests.publish(run, ref, name, data[name], self.staged.pop(name, None))
                committed = True
            # A collection that listed the manifests earlier may have removed a pack by now. A collection that begins
            # later sees the manifest, and reprieves the pack.
            if not self.remote.reprieve(relied):
                self.moved.committed += (f"run {run}, {ref}",)
                return
        raise StorageError(
            f"cannot push {ref} to {self.remote.location}: collections removed its packs {_ATTEMPTS} times; push again"
        )

    def _remove_damaged(self, data: Mapping[ManifestName, bytes]) -> None:
        """Remove unreadable manifests with the names of this checkpoint, because a publish never replaces a file."""
        run, ref = self.listing.run, self.listing.ref
        for name in data.keys() & set(self.found.manifests):
            try:
                self.remote.manifests.read_bytes(run, ref, name)
            except MissingPartitionError:
                continue
            except INCONCLUSIVE:
                raise
            except (FormatError, StorageError):
                self.remote.files.delete(self.remote.manifests.directory(run, ref) / str(name))

    def _report(self, *progress: int) -> None:
        """Report the progress to the caller; without ``progress``, report the last one again."""
        self.reported = progress or self.reported
        if self.progress is not None:
            self.progress(*self.reported)

    def _send(self, manifests: Sequence[Manifest], excluded: Collection[Digest] = ()) -> set[PackId]:
        """Send missing partitions except ``excluded``; return the old and new packs that the checkpoint relies on."""
        hints = dict.fromkeys(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        needs = PartitionSet.of_manifests(manifests)
        with (
            PartitionLocator(self.local, needs, hints) as local,
            older_of(self.local, self.older) as older,
        ):
            names = local.in_reading_order([needs.digests[number] for number in range(len(needs.digests))])
            names = [name for name in names if name not in excluded]
            while True:
                try:
                    return self._send_from(local, names, manifests, older)
                except DamagedPartitionError as error:
                    # The partition is sent decoded from another copy. Without another copy, the next attempt raises.
                    if error.digest is None or error.digest in self.damaged:
                        raise
                    self.damaged.add(Digest(error.digest))

    def _send_from(
        self, local: PartitionLocator, names: Sequence[Digest], manifests: Sequence[Manifest], older: Older
    ) -> set[PackId]:
        # Listed at each attempt, to find the packs of earlier attempts.
        needs = all_needs(local, manifests, older[0])
        kept = self.remote.listed()
        kept.read_indexes(kept.pack_ids())
        with PartitionLocator(kept, needs, (), must_be_complete=False) as remote:
            planner = TransferPlanner(local, remote, self.damaged)
            planner.choose(names)
            reencoder = None
            if self.remote.config.remote.compression != "off":
                reencoder = Reencoder(self.encoder, PartitionIndex(manifests, older[0]), planner, older[1])
            uploader = PackSender(self.remote, planner.stored, self.moved, self._report, reencoder)
            # The base of a frame arrives before the frame.
            new = uploader.send(planner.full) | uploader.send_in_order(planner.based)
            self.moved.reused_partitions += planner.reused
            return planner.relied | new


class PackSender:
    """Uploads the packs of one checkpoint."""

    def __init__(
        self, remote: RemoteTier, total: int, moved: Moved, progress: Progress, reencoder: Reencoder | None
    ) -> None:
        """Send ``total`` bytes of payload to ``remote``, encoded by ``reencoder`` if given."""
        self._remote = remote
        self._config = remote.config.remote
        self._packs = remote.uploader()
        self._reencoder = reencoder
        self._moved = moved
        # Bytes that are sent again after a failure count twice.
        self._meter = ProgressMeter(progress, total)
        self._lock = threading.Lock()
        self._probe_written = threading.Event()
        self._in_memory = threading.Semaphore(self._config.uploads)
        self._stopped = False

    def send(self, frames: Sequence[Frame]) -> set[PackId]:
        """Upload frames in several packs at the same time; return the ids of the packs."""
        # While some packs are written, as many others wait until the location completes them.
        return self._send_groups(self._groups(frames), min(2 * self._config.uploads, len(frames)))

    def send_in_order(self, frames: Sequence[Frame]) -> set[PackId]:
        """Upload frames in packs, one after the other; return the ids of the packs."""
        return self._send_groups(iter(_cut(frames, self._pack_bytes(frames, 1))), min(1, len(frames)))

    def _groups(self, frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
        """Split frames into packs. If the speed of the location is unknown, the first pack is a probe."""
        uploads = self._config.uploads
        count = 0
        if self._config.compression == "auto" and self._remote.pace.writing.bytes_per_s is None:
            count = len(next(iter(_cut(frames, min(_PROBE_BYTES, self._pack_bytes(frames, uploads)))), ()))
        if 0 < count < len(frames):
            yield frames[:count]
            frames = frames[count:]
            self._probe_written.wait()
        yield from _cut(frames, self._pack_bytes(frames, uploads))

    def _pack_bytes(self, frames: Sequence[Frame], uploads: int) -> int:
        """Return the pack size for which the last byte arrives soonest."""
        pace, piece = self._remote.pace, self._config.piece_bytes
        limit = self._config.pack_bytes if self._remote.files.renames else min(self._config.pack_bytes, _OBJECT_BYTES)
        if self._reencoder is not None:
            # Encoded frames stay in memory until they are sent.
            limit = min(limit, max(self._config.encoded_bytes // uploads, 1))
        facts = FlushFacts(
            volume_bytes=sum(frame_length(frame.stored) for frame in frames),
            latency_s=pace.close_s,
            chunk_bytes=piece,
            chunk_s=piece / (pace.making.bytes_per_s or _MAKE_BYTES_PER_S),
            write_bytes_per_s=pace.writing.bytes_per_s or _MAKE_BYTES_PER_S,
        )
        return stream_batch_bytes(facts, uploads, _PACK_BYTES_MIN, limit)

    def _send_groups(self, groups: Iterator[Sequence[Frame]], threads: int) -> set[PackId]:
        taking, made = threading.Lock(), list[PackId]()

        def work() -> None:
            while not self._stopped:
                with taking:
                    group = next(groups, None)
                if group is None:
                    return
                made.append(self._send_pack(group))

        # A location that does not respond must not block the exit of the process.
        together(work, threads, "push", self._stop)
        return set(made)

    def _stop(self) -> None:
        self._stopped = True
        # Wake the thread that waits for the probe.
        self._probe_written.set()

    def _send_pack(self, group: Sequence[Frame]) -> PackId:
        with contextlib.ExitStack() as held:
            if self._reencoder is not None:
                held.enter_context(self._in_memory)
            began = time.perf_counter()
            frames = self._encoded(group)
            if all(map(operator.is_, frames, group)):
                held.close()
            return self._upload(group, frames, time.perf_counter() - began)

    def _encoded(self, group: Sequence[Frame]) -> Sequence[Frame]:
        if self._reencoder is None:
            return group
        slot = Slot(max(frame.stored for frame in group))
        frames = []
        for frame in group:
            self._check_stopped()
            frames.append(self._reencoder.encoded(frame, slot))
        return frames

    def _check_stopped(self) -> None:
        if self._stopped:
            raise GivenUpError("upload cancelled: another upload of the same push has failed")

    def _upload(self, group: Sequence[Frame], frames: Sequence[Frame], encoding_s: float) -> PackId:
        """Upload ``frames``, the encoded form of ``group``."""
        plain, stored = (sum(frame.stored for frame in part) for part in (group, frames))
        with self._lock:
            self._meter.total -= plain - stored
        spent = [encoding_s]

        def read(number: int, slot: Slot) -> FrameDescriptor:
            self._check_stopped()
            began = time.perf_counter()
            descriptor = frames[number].read(slot)
            spent.append(time.perf_counter() - began)
            return descriptor

        plan = plan_pack([frame.entry for frame in frames])
        pack_id = self._packs.upload(plan, read, self._meter.add, self._probe_written.set)
        self._remote.pace.making.note(stored, sum(spent))
        with self._lock:
            self._moved.packs += 1
            self._moved.moved_bytes += stored
            self._moved.plain_bytes += plain
            self._moved.moved_partitions += len(frames)
        return pack_id


def _cut(frames: Sequence[Frame], size: int) -> list[Sequence[Frame]]:
    """Split frames into groups of at most ``size`` bytes, or of one frame; return none for no frames."""
    if not frames:
        return []
    return [frames[group.start : group.stop] for group in cut([frame_length(frame.stored) for frame in frames], size)]
