"""Push: a checkpoint copied to a remote location, in the order of SPEC.md §8.6."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from asymcheck.commit.encoder import Encoder
from asymcheck.errors import (
    UNKNOWING,
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
    UnsupportedFormatError,
)
from asymcheck.executor import begin, together
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.layout import ManifestName
from asymcheck.format.manifest import Manifest
from asymcheck.policies.batching import FlushFacts, stream_batch_bytes
from asymcheck.replication.checkpoint_cache import RemotePresence
from asymcheck.replication.cross_node_dedup import held_back, wait_for_others
from asymcheck.replication.transfer_plan import (
    Frame,
    PartitionIndex,
    Reencoder,
    SharedCheckpoint,
    TransferPlanner,
    all_needs,
    older_of,
)
from asymcheck.replication.transfer_stats import Moved
from asymcheck.restore.partition_locator import PartitionLocator, PartitionSet
from asymcheck.restore.resolve import read_manifests
from asymcheck.storage.interfaces import ReadTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier, plan_pack
from asymcheck.storage.slots import Slot
from asymcheck.types import CheckpointRef, Digest, PackId, Progress

_ATTEMPTS = 8
_OLDER_LOOKED_AT = 8
_LEAST_BYTES = 64 << 20
"""Smaller packs are not made for the sake of more streams."""
_PROBE_BYTES = 32 << 20
"""Bytes that are sent first to measure the location's speed, which decides whether the rest is encoded."""
_MAKE_BYTES_PER_S = 1e9
"""Speed at which frames are read for one stream, until it was measured."""


def encoder_for(there: RemoteTier) -> Encoder:
    """Return what decides how frames are stored in a location; who keeps it, keeps what it has measured."""
    config = there.config.remote
    return Encoder(config.compression, "hdfs", lambda: there.pace.writing.bytes_per_s)


def push(
    here: ReadTier,
    there: RemoteTier,
    listings: Sequence[CheckpointFiles],
    progress: Progress | None = None,
    encoder: Encoder | None = None,
) -> Moved:
    """Copy checkpoints to a remote location, in the order given. Those that are whole there are passed over.

    The head records of their runs go there, too, also when no checkpoint does. One that cannot be copied keeps no
    other from it.

    Args:
        here: where they lie.
        there: where they shall lie, too.
        listings: which ones.
        progress: called with payload bytes sent and to be sent, for the checkpoint that is being copied.
        encoder: of an earlier push to the same location.

    Raises:
        InconsistentCheckpointError, MissingPartitionError, DamagedPartitionError, FormatError: one cannot be copied,
            because it is damaged here; of several the error names all, and the others are there.
        HeadRecordError: a head record of a run is damaged, here or there.
        InvalidInputError: the location has another training of that run name.
        RemoteUnreachableError, StorageError: the location refused; what was committed stays, and the next push
            goes on from there.
    """
    moved = Moved(str(there.location))
    encoder = encoder or encoder_for(there)
    present = RemotePresence(there)
    # Of each run once; an error is not kept.
    publish = functools.cache(partial(publish_heads, here, there))
    failures: dict[str, AsymcheckError] = {}
    committed: dict[str, dict[CheckpointRef, CheckpointFiles]] = {}
    for listing in listings:
        run = listing.run
        if run in failures:
            continue
        if run not in committed:
            committed[run] = {found.ref: found for found in there.manifests.checkpoints(run)}
        try:
            # Of several stores of one job each brings what its ranks saved.
            parts = {ref: found.of_ranks(listing.store_ranks) for ref, found in committed[run].items()}
            found = parts.get(listing.ref)
            if found is not None and found.is_complete and present.has(found):
                moved.present += 1
                continue
            older = _older(here, listing, [ref for ref, part in parts.items() if part.is_complete])
            _Push(here, there, listing, moved, progress, encoder, older, publish).carry_out()
            committed[run][listing.ref] = listing
        except (HeadRecordError, InvalidInputError) as error:
            # So it is with every checkpoint of the run.
            failures[run] = error
        except (FormatError, RecoveryError) as error:
            failures[f"{run} {listing.ref}"] = error
    for run in [run for run in committed if run not in failures]:
        try:
            publish(run)
        except (HeadRecordError, InvalidInputError) as error:
            failures[run] = error
    _raise_any(failures, len(listings), there)
    return moved


def _raise_any(failures: Mapping[str, AsymcheckError], asked: int, there: RemoteTier) -> None:
    if not failures:
        return
    first = next(iter(failures.values()))
    if asked == 1 or (len(failures) == 1 and isinstance(first, (HeadRecordError, InvalidInputError))):
        raise first
    raise InconsistentCheckpointError(
        f"{there.location}: these could not be copied, all else is there; run asymcheck verify:",
        [f"{name}: {error}" for name, error in failures.items()],
    ) from first


def publish_heads(here: ReadTier, there: RemoteTier, run: str) -> None:
    """Publish the head records of a run that are not there.

    Raises:
        HeadRecordError: one is damaged, here or there.
        InvalidInputError: the location has another training of that run name.
        RemoteUnreachableError, StorageError: the location refused.
    """
    try:
        found = [here.manifests.read_head(run, generation) for generation in here.manifests.heads(run)]
    except FormatError as error:
        raise HeadRecordError(f"{here.root}: {error}; run asymcheck verify {here.root}") from error
    try:
        there.manifests.publish_heads([one[0] for one in found if one is not None])
    except UnsupportedFormatError as error:
        raise HeadRecordError(f"{there.location}: {error}") from error
    except FormatError as error:
        raise HeadRecordError(f"{there.location}: {error}; remove that file there, and push again") from error


_Staging = Callable[[], dict[ManifestName, PurePosixPath]]
"""Waits for manifests that are written under temporary names, and returns those names."""


def _older(here: ReadTier, listing: CheckpointFiles, there: Iterable[CheckpointRef]) -> CheckpointFiles | None:
    """Return the newest older checkpoint that exists on both sides."""
    for ref in sorted((ref for ref in there if ref < listing.ref), reverse=True)[:_OLDER_LOOKED_AT]:
        found = here.manifests.listing(listing.run, ref)
        if found.is_complete:
            return found
    return None


@dataclasses.dataclass
class _Push:
    """One checkpoint on its way."""

    here: ReadTier
    there: RemoteTier
    listing: CheckpointFiles
    moved: Moved
    progress: Progress | None
    encoder: Encoder
    older: CheckpointFiles | None
    publish_heads: Callable[[str], object]
    damaged: set[Digest] = dataclasses.field(default_factory=set)
    reported: tuple[int, int] = (0, 0)

    def carry_out(self) -> None:
        """Send what is missing, then heads, then manifests; again while collection takes away what is relied upon."""
        run, ref = self.listing.run, self.listing.ref
        try:
            manifests = read_manifests(self.here, self.listing)
            data = {name: self.here.manifests.read_bytes(run, ref, name) for name in self.listing.manifests}
        except (ClosedStoreError, ForkedStoreError, *UNKNOWING):
            raise
        except StorageError as error:
            raise InconsistentCheckpointError(f"its manifests cannot be read: {error}") from error
        # Their bytes travel beside the packs: to close a file takes half a second there. The rename comes last.
        names, threads = list(data), min(self.there.config.remote.uploads, len(data))
        shares = [{name: data[name] for name in names[start::threads]} for start in range(threads)]
        staging: list[_Staging] = [begin(partial(self._stage, share), "push-manifest").result for share in shares]
        staged: dict[ManifestName, PurePosixPath] = {}
        try:
            self._send_and_commit(manifests, data, staging, staged)
        except BaseException:
            self._unstage(staging, staged)
            raise

    def _stage(self, data: Mapping[ManifestName, bytes]) -> dict[ManifestName, PurePosixPath]:
        """Write manifests under temporary names, one after the other; those are all there, or none."""
        staged: dict[ManifestName, PurePosixPath] = {}
        try:
            for name, content in data.items():
                staged[name] = self.there.manifests.stage(self.listing.run, self.listing.ref, name, content)
        except BaseException:
            self._unstage([], staged)
            raise
        return staged

    def _send_and_commit(
        self,
        manifests: Sequence[Manifest],
        data: Mapping[ManifestName, bytes],
        staging: list[_Staging],
        staged: dict[ManifestName, PurePosixPath],
    ) -> None:
        run, ref = self.listing.run, self.listing.ref
        committed = False
        held = held_back(manifests, self.listing)
        if held:
            # Other stores bring them. What does not come after all is sent with the rest.
            self._send(manifests, held)
            wait_for_others(self.there, self.listing, held, self._report)
        for _ in range(_ATTEMPTS):
            relied = self._send(manifests)
            while staging:
                staged.update(staging.pop()())
            if not self._lasts(relied):
                continue
            if not committed:
                self.publish_heads(run)
                self._make_room(data)
                for name in data:
                    self.there.manifests.publish(run, ref, name, data[name], staged.pop(name))
                committed = True
            # A collection that had not seen the manifest may have taken a pack a moment ago. One that takes it from
            # now on has seen it, and puts it back.
            if self._lasts(relied):
                self.moved.committed += (f"{run} {ref}",)
                return
        raise StorageError(
            f"{self.there.location}: collection took packs away {_ATTEMPTS} times during the push of {ref}; push again"
        )

    def _make_room(self, data: Mapping[ManifestName, bytes]) -> None:
        """Remove manifests whose bytes are not what their name says: they would keep the sound ones out."""
        run, ref = self.listing.run, self.listing.ref
        for name in data.keys() & set(self.there.manifests.listing(run, ref).manifests):
            try:
                self.there.manifests.read_bytes(run, ref, name)
            except MissingPartitionError:
                continue
            except FormatError:
                self.there.files.delete(self.there.manifests.directory(run, ref) / str(name))

    def _unstage(self, staging: Sequence[_Staging], staged: Mapping[ManifestName, PurePosixPath]) -> None:
        """Remove what will not be published, as far as that can be done; collection removes the rest."""
        for wait in (lambda: staged, *staging):
            with contextlib.suppress(Exception):
                for path in wait().values():
                    self.there.manifests.unstage(path)

    def _lasts(self, relied: set[PackId]) -> bool:
        """Tell whether all packs are there to stay; a collection that was killed may have announced their removal."""
        return not self.there.reprieve(relied)

    def _report(self) -> None:
        """Report the progress to a caller, which may stop the push."""
        if self.progress is not None:
            self.progress(*self.reported)

    def _note(self, done: int, total: int) -> None:
        self.reported = done, total
        self._report()

    def _send(self, manifests: Sequence[Manifest], but: Collection[Digest] = ()) -> set[PackId]:
        """Send what is missing, ``but`` for some; return the packs there that are relied upon, new ones too."""
        hints = dict.fromkeys(pack_id for manifest in manifests for pack_id in manifest.header.packs)
        needs = PartitionSet.of_manifests(manifests)
        with (
            PartitionLocator(self.here, needs, hints) as here,
            older_of(self.here, self.older, self.encoder) as older,
        ):
            names = here.in_reading_order([needs.digests[number] for number in range(len(needs.digests))])
            names = [name for name in names if name not in but]
            while True:
                try:
                    return self._send_from(here, names, manifests, older)
                except DamagedPartitionError as error:
                    # Then another copy of it is decoded, and sent as that; if there is none, that says so.
                    if error.digest is None or error.digest in self.damaged:
                        raise
                    self.damaged.add(Digest(error.digest))

    def _send_from(
        self, here: PartitionLocator, names: Sequence[Digest], manifests: Sequence[Manifest], older: SharedCheckpoint
    ) -> set[PackId]:
        # Looked for each time: what another attempt has sent is there.
        needs = all_needs(here, manifests, older.manifests)
        self.there.read_indexes(self.there.pack_ids())
        with PartitionLocator(self.there, needs, (), must_be_complete=False) as there:
            chooser = TransferPlanner(here, there, self.damaged)
            chooser.choose(names)
            reencoder = None
            if self.there.config.remote.compression != "off":
                partitions = PartitionIndex(manifests, older.manifests)
                reencoder = Reencoder(self.encoder, partitions, chooser, older.sources)
            uploader = Uploader(self.there, chooser.stored, self.moved, self._note, reencoder)
            # A frame never arrives before its base.
            new = uploader.send(chooser.full) | uploader.send_in_order(chooser.based)
            self.moved.reused_partitions += chooser.reused
            return chooser.relied | new


class Uploader:
    """Uploads the packs of one checkpoint."""

    def __init__(
        self, there: RemoteTier, total: int, moved: Moved, progress: Progress | None, reencoder: Reencoder | None
    ) -> None:
        """Send ``total`` bytes of payload to ``there``, encoded by ``reencoder`` if there is one."""
        self._there = there
        self._config = there.config.remote
        self._packs = there.uploader()
        self._reencoder = reencoder
        self._total = total
        self._moved = moved
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._one_was_written = threading.Event()
        self._in_memory = threading.Semaphore(self._config.uploads)
        self._stopped = False

    def send(self, frames: Sequence[Frame]) -> set[PackId]:
        """Write packs with these frames, several at the same time; return their ids."""
        # Beside those that are written, as many wait for the location to complete them.
        return self._send_groups(self._groups(frames), min(2 * self._config.uploads, len(frames)))

    def send_in_order(self, frames: Sequence[Frame]) -> set[PackId]:
        """Write packs with these frames, one after the other; return their ids."""
        return self._send_groups(iter(_cut(frames, self._pack_bytes(frames, 1))), min(1, len(frames)))

    def _groups(self, frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
        """Cut frames into packs; while nobody knows what the location takes, the second waits for the first."""
        uploads = self._config.uploads
        count = 0
        if self._config.compression == "auto" and self._there.pace.writing.bytes_per_s is None:
            count = len(next(iter(_cut(frames, min(_PROBE_BYTES, self._pack_bytes(frames, uploads)))), ()))
        if 0 < count < len(frames):
            yield frames[:count]
            frames = frames[count:]
            self._one_was_written.wait()
        yield from _cut(frames, self._pack_bytes(frames, uploads))

    def _pack_bytes(self, frames: Sequence[Frame], uploads: int) -> int:
        """Return the size of packs for which all of it is there soonest."""
        pace, piece = self._there.pace, self._config.piece_bytes
        limit = self._config.pack_bytes
        if self._reencoder is not None:
            # What is encoded lies in memory until it is sent.
            limit = min(limit, max(self._config.encoded_bytes // uploads, 1))
        facts = FlushFacts(
            volume_bytes=sum(frame_length(frame.stored) for frame in frames),
            latency_s=pace.close_s,
            chunk_bytes=piece,
            chunk_s=piece / (pace.making.bytes_per_s or _MAKE_BYTES_PER_S),
            write_bytes_per_s=pace.writing.bytes_per_s or _MAKE_BYTES_PER_S,
        )
        return stream_batch_bytes(facts, uploads, _LEAST_BYTES, limit)

    def _send_groups(self, groups: Iterator[Sequence[Frame]], threads: int) -> set[PackId]:
        taking, made = threading.Lock(), list[PackId]()

        def work() -> None:
            while not self._stopped:
                with taking:
                    group = next(groups, None)
                if group is None:
                    return
                made.append(self._send_pack(group))

        # The threads end with the process, whatever the location does: a missing answer must not hold the exit.
        together(work, threads, "push", self._stop)
        return set(made)

    def _stop(self) -> None:
        self._stopped = True
        # Whoever waits for that looks whether it goes on.
        self._one_was_written.set()

    def _send_pack(self, group: Sequence[Frame]) -> PackId:
        with contextlib.ExitStack() as held:
            if self._reencoder is not None:
                held.enter_context(self._in_memory)
            began = time.perf_counter()
            frames = self._encoded(group)
            if all(map(operator.is_, frames, group)):
                held.close()
            return self._upload(group, frames, time.perf_counter() - began)

    def _upload(self, group: Sequence[Frame], frames: Sequence[Frame], encoding_s: float) -> PackId:
        """Send a group, as its ``frames`` are to be sent."""
        spent = [encoding_s]
        plan = plan_pack([frame.entry for frame in frames])
        header, _ = self._packs.upload(plan, partial(self._read, frames, spent), self._sent, self._one_was_written.set)
        stored = sum(frame.stored for frame in frames)
        self._there.pace.making.note(stored, sum(spent))
        with self._lock:
            self._moved.packs += 1
            self._moved.moved_bytes += stored
            self._moved.plain_bytes += sum(frame.stored for frame in group)
            self._moved.moved_partitions += len(frames)
        return header.pack_id

    def _encoded(self, group: Sequence[Frame]) -> Sequence[Frame]:
        if self._reencoder is None:
            return group
        slot = Slot(max(frame.stored for frame in group))
        frames = []
        for frame in group:
            self._check_going_on()
            frames.append(self._reencoder.encoded(frame, slot))
        with self._lock:
            self._total -= sum(frame.stored for frame in group) - sum(frame.stored for frame in frames)
        return frames

    def _check_going_on(self) -> None:
        if self._stopped:
            raise GivenUpError("another upload of the same push has failed")

    def _read(self, frames: Sequence[Frame], spent: list[float], number: int, slot: Slot) -> FrameDescriptor:
        self._check_going_on()
        began = time.perf_counter()
        descriptor = frames[number].read(slot)
        spent.append(time.perf_counter() - began)
        return descriptor

    def _sent(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                # What is sent again after a failure counts again; it is for the eye.
                self._done = min(self._done + count, self._total)
                self._progress(self._done, self._total)


def _cut(frames: Sequence[Frame], size: int) -> list[list[Frame]]:
    """Cut frames into packs of at most ``size`` bytes, or one frame."""
    groups: list[list[Frame]] = []
    room = 0
    for frame in frames:
        length = frame_length(frame.stored)
        if not groups or length > room:
            groups.append([])
            room = size
        groups[-1].append(frame)
        room -= length
    return groups
