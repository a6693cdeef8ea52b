"""Flush from the ring: background threads write captures to the store and commit them in order."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial

from asymcheck.capture.inflight import Capture
from asymcheck.capture.two_phase_commit import TwoPhaseCommit
from asymcheck.commit.encoder import Base, Encoder, original_of
from asymcheck.commit.manifest_builder import ManifestBuilder, manifest_header
from asymcheck.commit.save_request import LineagePosition
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import OutOfSpaceError, RankFailedError
from asymcheck.events import emit, timed
from asymcheck.executor import Workers
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.manifest import Manifest, encode, manifest_of
from asymcheck.format.registry import CODEC_DELTA
from asymcheck.storage.nvme import Catalog, NvmeTier
from asymcheck.storage.shm.ring_writer import Ring, RingSlot
from asymcheck.types import CheckpointRef, Digest

Placing = Callable[[Capture], LineagePosition]
"""Return the position of a capture on the line of training, once everything except its manifest is durable."""

_WRITERS = 2
_PATIENCE_S = 0.2
"""Seconds that the next capture waits for a collection, because freed packs are overwritten faster than new files."""


class RingFlusher:
    """Writes captures to the store, and tracks the captures in the ring."""

    def __init__(
        self,
        ring: Ring,
        tier: NvmeTier,
        catalog: Catalog,
        encoder: Encoder,
        placing: Placing,
        two_phase: TwoPhaseCommit | None = None,
        on_commit: Callable[[bool], object] | None = None,
    ) -> None:
        """Start the threads.

        With ``two_phase``, other ranks save with this one. ``on_commit`` is called after each commit on a separate
        thread, and must not raise. It is also called, with True, after a capture that was lost on a full drive, or that
        another rank has lost.
        """
        self._encoder, self._two_phase = encoder, two_phase
        self._ring, self._tier, self._catalog, self._placing = ring, tier, catalog, placing
        self._rows = ManifestBuilder()
        self._inflight: set[Capture] = set()
        self._last = -math.inf, -math.inf
        """Times of the start and the end of the last capture."""
        self._is_behind = False
        self._kept: list[Capture] = []
        self._last_contents: tuple[list[Digest], dict[int, bytes]] = [], {}
        self._lock = threading.Lock()
        self._on_commit = on_commit
        with contextlib.ExitStack() as started:
            self._writers = Workers("asymcheck-flush", _WRITERS)
            started.callback(self._writers.close)
            self._committer = Workers("asymcheck-commit")
            started.callback(self._committer.close)
            self._upkeep = [] if on_commit is None else [Workers("asymcheck-upkeep")]
            started.pop_all()
        self._after_commit: list[Future[object]] = []

    def stored(self, capture: Capture, number: int) -> None:
        """Accept a partition that is complete in the ring. Capture thread."""
        self._begin(capture)
        self._committer.submit(self._advance, capture, number)

    def finished(self, capture: Capture) -> None:
        """Accept a capture that is complete, or has failed with ``error``. Never raises. Capture thread."""
        with capture.failing():
            self._begin(capture)
            if capture.error is None:
                self._complete(capture)
        capture.complete.set()
        if capture in self._inflight:
            self._committer.submit(self._advance, capture, None)
        else:
            capture.end()

    def _note_failure(self, capture: Capture, *writes: Future[bool]) -> None:
        """Fail a streaming capture after a failed write. Other captures stay in the ring."""
        with self._lock:
            failures = [write.exception() for write in writes or tuple(capture.writes) if write.done()]
            if capture.streams and capture.error is None:
                capture.error = next(filter(None, failures), None)

    def _begin(self, capture: Capture) -> None:
        """Begin the flush with the first partition of a capture."""
        if capture in self._inflight:
            return
        bytes_in_ring = sum(frame_length(partition.length) for partition in capture.partitions)
        request = capture.request
        capture.transaction = RingTransaction(self._tier, self._catalog, self._encoder, request.save_id, request.rank)
        shared = sum(frame_length(capture.partitions[number].length) for number in capture.reused)
        capture.transaction.expect(bytes_in_ring - shared)
        capture.streams = bytes_in_ring > self._ring.header.data_bytes
        self._inflight.add(capture)
        self._is_behind = self._is_next_soon(capture)
        for workers in (self._writers, self._committer, *self._upkeep):
            workers.hurry(is_behind=self._is_behind)

    def _is_next_soon(self, capture: Capture) -> bool:
        """Tell whether a capture began before, or soon after, the last one was durable."""
        began_s, durable_s = self._last
        # At low priority, the last capture would have taken about twice as long.
        soon_s = durable_s - began_s if self._is_behind else 0.0
        return len(self._inflight) > 1 or capture.began_s < durable_s + soon_s

    def _complete(self, capture: Capture) -> None:
        """Put the manifest into the ring, so that the capture survives this process."""
        names = [name for name in capture.digests if name is not None]
        # The manifest contains small tensors.
        contents = (names, dict(capture.inline))
        capture.is_stale = bool(names) and contents == self._last_contents
        self._last_contents = contents
        columns = self._rows.columns(capture.state.columns, capture.plan.cut, names, capture.inline)
        header = manifest_header(capture.request, capture.generation or 1, capture.plan.record(), capture.state.tree)
        capture.manifest = manifest_of(header, columns)
        # Without a generation, a recovery could not place the capture on a line of training.
        if not capture.streams and (capture.generation is None or self._survives(capture)):
            with self._lock:
                self._kept.append(capture)
        # Only captures with an entry survive this process.
        capture.complete_s = None if capture.entry is None else time.perf_counter()
        emit("capture.copied" if capture.entry is None else "capture.complete", str(header.ref), capture.state_bytes)

    def _survives(self, capture: Capture) -> bool:
        """Put the manifest and an entry into the ring; return whether both fit."""
        data = encode(capture.manifest)
        slot = self.take(len(data))
        if slot is None:
            return False
        self._ring.payload(slot)[:] = data
        self._ring.complete(slot, FrameDescriptor.identity(digest(data), slot.length))
        capture.entry = self._ring.enter(slot, capture.request.save_id)
        if capture.entry is None:
            self._ring.give_back(slot)
            return False
        capture.manifest_slot = slot
        return True

    def take(self, length: int) -> RingSlot | None:
        """Allocate a slot without a wait, and free settled captures for it; None without space. Thread-safe."""
        if frame_length(length) > self._ring.header.data_bytes:
            return None
        while (slot := self._ring.take(length)) is None and self.make_room():
            pass
        return slot

    def _advance(self, capture: Capture, number: int | None) -> None:
        if number is not None:
            with capture.failing():
                self._queue_write(capture, number)
            return
        for task in (self._queue_postponed, self._settle, self._retire):
            with capture.failing():
                task(capture)
        capture.end()
        self._last = capture.began_s, capture.durable_s
        # The capture is finished, so errors of observers are ignored.
        with contextlib.suppress(Exception):
            emit("capture.durable" if capture.error is None else "capture.lost", str(capture.ref), capture.state_bytes)
        # Another rank may have failed on the full drive, and only the first rank of a store prunes.
        is_full = isinstance(capture.error, (OutOfSpaceError, RankFailedError))
        if capture.error is None or is_full:
            self._run_after_commit(capture, is_full=is_full)

    def _run_after_commit(self, capture: Capture, *, is_full: bool) -> None:
        """Call ``on_commit`` on another thread, while the next capture is written.

        At most one call is pending, because pruning frees space. After a streaming capture, the next one waits for the
        end of the call: a streaming capture cannot write partitions again that a collection removes.
        """
        if self._on_commit is not None:
            wait(self._after_commit)
            self._after_commit = [workers.submit(self._on_commit, is_full) for workers in self._upkeep]
            # Most collections are short, and the next capture can overwrite freed packs.
            wait(self._after_commit, None if capture.streams else _PATIENCE_S)

    def _queue_write(self, capture: Capture, number: int) -> None:
        with self._lock:
            waiting = None if capture.streams else self._waiting(capture, number)
            if waiting is not None:
                waiting.append(number)
                return
        self.write_soon(capture, number)

    def _waiting(self, capture: Capture, number: int) -> list[int] | None:
        """Return the list in which a partition waits; None for a partition that can be written."""
        if number in capture.reused:
            return capture.known
        if self._two_phase is not None and self._two_phase.holds(capture, number):
            return capture.held
        # Ordered by cost.
        may_be_derived = (
            self._encoder.wants_bases
            and next(capture.originals.candidates(number), None) is not None
            and self._encoder.searches_original(capture.contents(number))
        )
        return capture.postponed if may_be_derived else None

    def _queue_postponed(self, capture: Capture) -> None:
        with self._lock:
            numbers, capture.postponed = capture.postponed, []
        for number in numbers:
            self.write_soon(capture, number)

    def write_soon(self, capture: Capture, number: int) -> None:
        """Queue the write of a partition."""
        write = self._writers.submit(self.write, capture, number)
        capture.writes.append(write)
        write.add_done_callback(lambda _: self._note_failure(capture, write))

    def write(self, capture: Capture, number: int) -> bool:
        """Write a partition; return whether the store did not have it."""
        slot, name = capture.slots[number], capture.digests[number]
        if slot is None or name is None or (capture.error is not None and not capture.streams):
            return False
        is_new = True
        if capture.error is None:
            detail = lambda: {**capture.named_partition(number), "known": not is_new}  # noqa: E731 - evaluated at the end
            with timed("write", slot.length, detail), self._bases_of(capture, number) as bases:
                frame, contents = self._ring.frame(slot), capture.contents(number)
                is_new = capture.transaction.add_frame(name, slot.length, frame, contents, bases)
        with self._lock:
            if not capture.streams:
                capture.transaction.keep(name, slot.length, self._ring.frame(slot))
                capture.stored.append(number)
                return is_new
        capture.slots[number] = None
        self._ring.give_back(slot)
        return is_new

    @contextlib.contextmanager
    def _bases_of(self, capture: Capture, number: int) -> Iterator[list[Base]]:
        """Yield possible bases of a partition, and keep their frames in the ring during the block."""
        with self._lock:
            kept = [other for other in self._settled() if other.ref is not None and other is not capture]
            reads = [capture, *kept[-1:]] if self._encoder.wants_bases and not capture.streams else []
            for read in reads:
                read.readers += 1
        try:
            yield self._find_bases(number, *reads) if reads else []
        finally:
            with self._lock:
                for read in reads:
                    read.readers -= 1

    def _find_bases(self, number: int, capture: Capture, older: Capture | None = None) -> list[Base]:
        """Return possible bases of a partition that is complete in the ring; ``older`` is an earlier capture."""
        own = self._read(capture, number)
        if own is None:
            return []
        _, plain = own
        dtype = capture.dtypes[capture.partitions[number].pieces[0].row]
        original = original_of(plain, dtype, number, capture.originals, partial(self._read, capture))
        bases = [] if original is None else [original]
        if older is not None and older.plan is capture.plan:
            previous = self._read(older, number)
            if previous is not None and len(previous[1]) == len(plain):
                bases.append(Base(CODEC_DELTA, *previous))
        return bases

    def _read(
        self, capture: Capture, number: int, start: int = 0, length: int | None = None
    ) -> tuple[Digest, memoryview] | None:
        name, slot = capture.digests[number], capture.slots[number]
        if name is None or slot is None:
            return None
        return name, self._ring.payload(slot)[start : None if length is None else start + length]

    def let_stream(self, capture: Capture) -> bool:
        """Switch a capture to streaming if it is alone in the ring; return whether that made room.

        A capture that fits may not find enough contiguous space.
        """
        with self._lock:
            if capture not in self._inflight or capture.streams or capture.readers or self._kept:
                return False
            if any(other is not capture for other in tuple(self._inflight)):
                return False
            capture.streams = True
            numbers, capture.stored = capture.stored, []
            pending = [*capture.known, *capture.held]
            capture.known, capture.held = [], []
            capture.transaction.keep_none()
        self._queue_postponed(capture)
        self._note_failure(capture)
        for number in numbers:
            slot, capture.slots[number] = capture.slots[number], None
            if slot is not None:
                self._ring.give_back(slot)
        # No earlier capture is left to wait for.
        for number in pending:
            self._queue_write(capture, number)
        return True

    def _settle(self, capture: Capture) -> None:
        """Commit a capture, or remove its traces from the store."""
        # Interrupts are kept, too: the capture may have failed with one on the training thread.
        with capture.failing():
            if self._two_phase is not None:
                with timed("commit", 0, capture.named):
                    self._two_phase.commit(capture, self)
            else:
                capture.wait()
                for number in capture.known:
                    self.write(capture, number)
                with timed("commit", 0, capture.named):
                    position = partial(self._placing, capture)
                    capture.ref = capture.transaction.commit_capture(capture.manifest, position)
        if capture.error is not None:
            capture.transaction.abort()
        elif capture.entry is not None:
            self._ring.mark_durable(capture.entry)

    def _retire(self, capture: Capture) -> None:
        """Free captures that are no longer needed."""
        packing = capture.transaction.packing
        capture.written_bytes, capture.new_bytes = packing.written_bytes, packing.new_bytes
        with self._lock:
            self._inflight.discard(capture)
            # The newest durable capture stays for a rollback, and the newest capture for a recovery after a crash,
            # until their space is needed. With several ranks, so do lost captures after the newest durable one: the
            # newest capture may be incomplete on a rank that was killed.
            settled = self._settled()
            durable = [kept for kept in settled if kept.error is None]
            lost = settled[settled.index(durable[-1]) :] if durable else settled
            stays = (*durable[-1:], *self._kept[-1:], *(lost if self._two_phase is not None else ()))
            freed = [kept for kept in settled if not kept.readers and kept not in stays]
            if capture not in self._kept:
                freed.append(capture)
            self._kept = [kept for kept in self._kept if kept not in freed]
        for unneeded in freed:
            self._free(unneeded)
        # The training keeps the capture until its outcome is reported, but no frame must outlive the ring.
        del capture.transaction
        capture.writes.clear()

    def _settled(self) -> list[Capture]:
        """Return the captures in the ring that are durable or lost, oldest first. The caller holds the lock."""
        return [kept for kept in self._kept if kept not in self._inflight]

    def survives(self, capture: Capture) -> bool:
        """Tell whether a finished capture survives this process, because it has an entry in the ring or is settled."""
        return capture not in self._inflight or (capture.entry is not None and not self._ring.is_removed())

    def make_room(self) -> bool:
        """Free the oldest settled capture, durable ones first; return whether there was one. Thread-safe."""
        with self._lock:
            settled = [kept for kept in self._settled() if not kept.readers]
            settled.sort(key=lambda kept: kept.error is not None)
            if not settled:
                return False
            self._kept.remove(settled[0])
        self._free(settled[0])
        return True

    def _free(self, capture: Capture) -> None:
        entry, capture.entry = capture.entry, None
        if entry is not None:
            self._ring.forget(entry)
        for slot in (*capture.slots, capture.manifest_slot):
            if slot is not None:
                self._ring.give_back(slot)

    def committed(self) -> dict[CheckpointRef, tuple[Manifest, Callable[[Digest], memoryview]]]:
        """Return the committed captures that are complete in the ring, newest first: manifests and payloads."""
        with self._lock:
            return {
                kept.ref: (kept.manifest, self._reader(kept)) for kept in reversed(self._kept) if kept.ref is not None
            }

    def _reader(self, capture: Capture) -> Callable[[Digest], memoryview]:
        pairs = zip(capture.digests, capture.slots, strict=True)
        slots = {name: slot for name, slot in pairs if slot is not None}
        return lambda name: self._ring.payload(slots[name])

    def close(self) -> bool:
        """Commit all queued captures, and end the threads; return whether every complete capture is durable."""
        for workers in (self._committer, self._writers, *self._upkeep):
            workers.close()
        with self._lock:
            return all(kept.error is None for kept in self._kept)
