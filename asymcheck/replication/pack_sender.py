"""Upload of the packs of one checkpoint, in large pieces (SPEC.md §C2)."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import PurePosixPath

import numpy as np

from asymcheck.config import WRITER
from asymcheck.errors import FormatError, GivenUpError, StorageError
from asymcheck.events import emit
from asymcheck.executor import begin, together
from asymcheck.format import layout, registry
from asymcheck.format.frame import check_frame, frame_length
from asymcheck.format.pack import (
    ENTRY_DTYPE,
    Entries,
    PackHeader,
    encode_index,
    encode_pack_header,
    entry_length,
    frame_lengths,
)
from asymcheck.policies.batching import FlushFacts, stream_batch_bytes
from asymcheck.replication.reencoder import Reencoder
from asymcheck.replication.transfer_plan import Frame
from asymcheck.replication.transfer_stats import Moved
from asymcheck.storage.pack_index import PackIndex
from asymcheck.storage.remote import RemoteTier
from asymcheck.storage.remote.pack_reader import read_pack_index
from asymcheck.storage.remote.remote_files import Content
from asymcheck.storage.slots import Slot
from asymcheck.storage.throughput import RateLimit
from asymcheck.types import PackId, Progress, ProgressMeter

_PACK_BYTES_MIN = 64 << 20
"""Packs are not made smaller than this to use more streams."""
_OBJECT_BYTES = 48 << 20
"""Maximum size of a pack in an object store, because each upload has a whole pack in memory."""
_PROBE_BYTES = 32 << 20
"""Bytes that are sent first to measure the speed of the location, which decides whether the rest is encoded."""
_MAKE_BYTES_PER_S = 1e9
"""Assumed speed of reading frames for one stream, until it was measured."""


class PackSender:
    """Uploads the packs of one checkpoint."""

    def __init__(
        self,
        remote: RemoteTier,
        prefix: bytes,
        total: int,
        moved: Moved,
        progress: Progress,
        reencoder: Reencoder | None,
    ) -> None:
        """Send ``total`` bytes of payload to ``remote``, encoded by ``reencoder`` if given.

        The ids of the packs begin with ``prefix``.
        """
        self._remote = remote
        self._prefix = prefix
        self._config = remote.config.remote
        self._reencoder = reencoder
        self._moved = moved
        # Bytes that are sent again after a failure count twice.
        self._meter = ProgressMeter(progress, total)
        self._rate = RateLimit(self._config.bytes_per_s)
        self._lock = threading.Lock()
        self._probe_written = threading.Event()
        self._in_memory = threading.Semaphore(self._config.uploads)
        self._streams = threading.Semaphore(self._config.uploads)
        self._stopped = False

    def send(self, frames: Sequence[Frame]) -> set[PackId]:
        """Upload frames in several packs at the same time; return the ids of the packs."""
        # While some packs are written, as many others wait until HDFS completes them.
        threads = self._config.uploads * (2 if self._remote.files.renames else 1)
        return self._send_groups(self._groups(frames), min(threads, len(frames)))

    def send_in_order(self, frames: Sequence[Frame]) -> set[PackId]:
        """Upload frames in packs, one after the other; return the ids of the packs."""
        return self._send_groups(iter(_cut(frames, self._pack_bytes(frames, 1))), min(1, len(frames)))

    def _groups(self, frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
        """Split frames into packs. The first one may be a probe."""
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

    def _check_stopped(self) -> None:
        if self._stopped:
            raise GivenUpError("upload cancelled: another upload of the same push has failed")

    def _send_pack(self, group: Sequence[Frame]) -> PackId:
        """Encode and upload the frames of one pack; return its id."""
        with contextlib.ExitStack() as held:
            if self._reencoder is not None:
                held.enter_context(self._in_memory)
            began = time.perf_counter()
            frames = self._encoded(group)
            if all(map(operator.is_, frames, group)):
                held.close()
            spent = [time.perf_counter() - began]
            plain, stored = (sum(frame.stored for frame in part) for part in (group, frames))
            with self._lock:
                self._meter.total -= plain - stored
            pack_id = self._upload(frames, spent)
        self._remote.pace.making.note(stored, sum(spent))
        with self._lock:
            self._moved.packs += 1
            self._moved.moved_bytes += stored
            self._moved.plain_bytes += plain
            self._moved.moved_partitions += len(frames)
        return pack_id

    def _encoded(self, group: Sequence[Frame]) -> Sequence[Frame]:
        if self._reencoder is None:
            return group
        slot = Slot(max(frame.stored for frame in group))
        frames = []
        for frame in group:
            self._check_stopped()
            frames.append(self._reencoder.encoded(frame, slot))
        return frames

    def _upload(self, frames: Sequence[Frame], spent: list[float]) -> PackId:
        """Write, check and publish one pack; return its id. The seconds of reading frames are added to ``spent``.

        At most ``uploads`` packs are written at the same time. The next upload starts after the last write of a pack,
        because HDFS needs half a second to complete a file.

        Raises:
            StorageError: all attempts failed.
            FormatError, MissingPartitionError: a frame could not be read.
        """
        index = _new_pack(frames, self._prefix)
        final = self._remote.packs / layout.pack_name(index.header.pack_id)

        @contextlib.contextmanager
        def content(path: PurePosixPath) -> Iterator[Content]:
            emit("remote.pack_begun", path.name)
            with contextlib.ExitStack() as turn:
                turn.enter_context(self._streams)
                turn.callback(self._probe_written.set)
                # Read ahead, so that the drive and the location work at the same time.
                with contextlib.closing(_ahead(self._pieces(index, frames, spent))) as pieces:
                    yield pieces, turn.close

        # An existing file with this random name is this pack, put by an attempt whose answer was lost.
        self._remote.files.put(final, content, partial(self._check, index))
        emit("remote.pack_renamed", final.name, index.header.pack_length)
        # The next push need not read it.
        self._remote.keep_index(index)
        return index.header.pack_id

    def _pieces(self, index: PackIndex, frames: Sequence[Frame], spent: list[float]) -> Iterator[bytes]:
        """Yield the bytes of a pack in pieces. Frames are read into the buffer of a piece, which is copied once."""
        pack_id = index.header.pack_id
        last = encode_index(pack_id, index.entries)
        lengths: list[int] = frame_lengths(index.entries).tolist()
        groups = _cut_lengths(lengths, self._config.piece_bytes, registry.BLOCK_BYTES)
        # The first piece includes the header. The index follows the last piece.
        memory = Slot(registry.BLOCK_BYTES + max(sum(lengths[group.start : group.stop]) for group in groups)).memory
        memory[: registry.BLOCK_BYTES] = encode_pack_header(index.header)
        offset = registry.BLOCK_BYTES
        for sequences in groups:
            for sequence in sequences:
                self._check_stopped()
                frame = frames[sequence]
                slot = Slot.inside(memory[offset : offset + lengths[sequence]], frame.stored)
                began = time.perf_counter()
                descriptor = frame.read(slot)
                spent.append(time.perf_counter() - began)
                slot.stamp_header(descriptor, pack_id, sequence)
                offset += lengths[sequence]
                self._meter.add(frame.stored)
            is_last = sequences.stop == len(frames)
            piece = b"".join((memory[:offset], last)) if is_last else bytes(memory[:offset])
            self._rate.wait(len(piece))
            yield piece
            offset = 0

    def _check(self, index: PackIndex, path: PurePosixPath, written: int) -> None:
        """Check length, header and index of an uploaded pack; with ``read_back``, also every frame."""
        emit("remote.pack_closed", path.name, written)
        files, header = self._remote.files, index.header
        where = files.url(path)
        entry = files.stat(path)
        size = None if entry is None else entry.size
        if size != written or written != header.pack_length:
            raise StorageError(f"{where}: the file has {size} of {header.pack_length} bytes after the upload")
        try:
            stored = read_pack_index(files, path, header.pack_id)
            if stored.damage or stored.header != header or stored.entries.tobytes() != index.entries.tobytes():
                raise StorageError(f"{where}: header and index read back differ from those written")
            for sequence, frame in enumerate(index.entries if self._config.read_back else ()):
                data, _ = files.read_range(path, int(frame["offset"]), entry_length(frame))
                check_frame(data, header.pack_id, sequence, f"frame {sequence} of {where}")
        except FormatError as error:
            raise StorageError(f"{where}: the uploaded pack is damaged: {error}") from error
        emit("remote.pack_checked", path.name)


def _new_pack(frames: Sequence[Frame], prefix: bytes) -> PackIndex:
    """Lay out a new pack, so that header and index are known before the first byte is sent."""
    entries: Entries = np.array([frame.entry for frame in frames], dtype=ENTRY_DTYPE)
    entries["offset"] = np.cumsum([registry.BLOCK_BYTES, *frame_lengths(entries)[:-1].tolist()])
    end = int(entries[-1]["offset"]) + entry_length(entries[-1])
    pack_id = PackId((prefix + os.urandom(16))[:16])
    return PackIndex(PackHeader(pack_id, len(entries), end, time.time_ns(), WRITER), entries, None)


def _cut(frames: Sequence[Frame], size: int) -> list[Sequence[Frame]]:
    """Split frames into groups of at most ``size`` bytes, or of one frame; return none for no frames."""
    groups = _cut_lengths([frame_length(frame.stored) for frame in frames], size)
    return [frames[group.start : group.stop] for group in groups]


def _cut_lengths(lengths: Sequence[int], size: int, used: int = 0) -> list[range]:
    """Cut frames into groups of at most ``size`` bytes, or of one frame. The first group has ``used`` bytes before."""
    groups: list[range] = []
    start = 0
    for number, length in enumerate(lengths):
        if number > start and used + length > size:
            groups.append(range(start, number))
            start, used = number, 0
        used += length
    return [*groups, range(start, len(lengths))] if lengths else []


def _ahead(pieces: Iterator[bytes]) -> Generator[bytes, None, None]:
    """Yield pieces, each made ahead by a thread. Close the generator to stop the thread.

    Raises:
        AsymcheckError: ``pieces`` raised this error.
    """
    making = begin(partial(next, pieces, None), "push-read")
    try:
        while (piece := making.result()) is not None:
            making = begin(partial(next, pieces, None), "push-read")
            yield piece
    finally:
        wait([making])
