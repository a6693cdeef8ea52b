"""Flush from the ring: captures become checkpoints in the store, in order, on threads of their own."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

from asymcheck.events import emit, timed
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.manifest import encode, manifest_of
from asymcheck.format.registry import CODEC_DERIVED
from asymcheck.pipeline.bases import Bases
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.encoder import Base, Encoder
from asymcheck.pipeline.joint import Joint
from asymcheck.pipeline.moving import Moving
from asymcheck.pipeline.request import Place
from asymcheck.pipeline.rows import Rows, manifest_header
from asymcheck.pipeline.transaction import RingTransaction
from asymcheck.threads import Workers
from asymcheck.tiers.dram_ring import Ring, RingSlot
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.types import CheckpointRef, Digest

Placing = Callable[[Capture], Place]
"""Says where on the line a capture goes; asked when all but its manifest is durable."""

_WRITERS = 2
_PATIENCE_S = 0.2
"""How long frames of the next capture wait for a collection: freed packs are overwritten faster than new files."""


class RingFlusher:
    """Moves what is captured to the store, and knows what lies in the ring."""

    def __init__(
        self,
        ring: Ring,
        tier: NvmeTier,
        catalog: Catalog,
        encoder: Encoder,
        placing: Placing,
        joint: Joint | None = None,
        on_commit: Callable[[], object] | None = None,
    ) -> None:
        """Start the threads; with ``joint``, other ranks save with this one, and that says where a capture goes.

        ``on_commit`` is called on a thread of its own after each commit. It must not raise.
        """
        self._encoder, self._joint = encoder, joint
        self._ring, self._tier, self._catalog, self._placing = ring, tier, catalog, placing
        self._bases = Bases(ring)
        self._rows = Rows()
        self._moving: dict[Capture, Moving] = {}
        self._last = -math.inf, -math.inf
        """When the last capture was begun, and when it was durable or lost."""
        self._is_behind = False
        self._kept: list[Moving] = []
        self._last_contents: tuple[list[Digest], dict[int, bytes]] = [], {}
        self._lock = threading.Lock()
        self._writers = Workers("asymcheck-flush", _WRITERS)
        self._committer = Workers("asymcheck-commit")
        self._on_commit = on_commit or (lambda: None)
        self._upkeep = None if on_commit is None else Workers("asymcheck-upkeep")
        self._kept_up: list[Future[object]] = []

    def stored(self, capture: Capture, number: int) -> None:
        """Take a partition that is complete in the ring. On the capture thread."""
        self._committer.submit(self._go_on, self._of(capture), number)

    def finished(self, capture: Capture) -> None:
        """Take a capture that is complete, or was given up. On the capture thread."""
        with capture.failing():
            moving = self._of(capture)
            if capture.error is None:
                self._complete(moving)
        capture.complete.set()
        if capture in self._moving:
            self._committer.submit(self._go_on, self._moving[capture], None)
        else:
            capture.end()

    def _note_failure(self, moving: Moving, *writes: Future[bool]) -> None:
        """Give up a capture that streams when a write of it has failed; one that is all in the ring is kept."""
        with self._lock:
            failures = [write.exception() for write in writes or tuple(moving.writes) if write.done()]
            if moving.streams and moving.capture.error is None:
                moving.capture.error = next(filter(None, failures), None)

    def _of(self, capture: Capture) -> Moving:
        moving = self._moving.get(capture)
        if moving is None:
            bytes_in_ring = sum(frame_length(partition.length) for partition in capture.partitions)
            request = capture.request
            transaction = RingTransaction(self._tier, self._catalog, self._encoder, request.save_id, request.rank)
            shared = sum(frame_length(capture.partitions[number].length) for number in capture.reused)
            transaction.expect(bytes_in_ring - shared)
            moving = Moving(capture, transaction, streams=bytes_in_ring > self._ring.header.data_bytes)
            self._moving[capture] = moving
            self._is_behind = self._comes_soon(capture)
            self._writers.hurry(is_behind=self._is_behind)
            self._committer.hurry(is_behind=self._is_behind)
            if self._upkeep is not None:
                self._upkeep.hurry(is_behind=self._is_behind)
        return moving

    def _comes_soon(self, capture: Capture) -> bool:
        """Tell whether a capture was begun before the last one was durable, or nearly so: they come too fast."""
        began_s, durable_s = self._last
        # What was written in a hurry would take twice as long without.
        soon_s = durable_s - began_s if self._is_behind else 0.0
        return len(self._moving) > 1 or capture.began_s < durable_s + soon_s

    def _complete(self, moving: Moving) -> None:
        """Put the manifest into the ring, too: from now on the capture survives this process."""
        capture = moving.capture
        names = [name for name in capture.digests if name is not None]
        # Small tensors lie in the manifest itself.
        contents = (names, dict(capture.inline))
        capture.is_stale = bool(names) and contents == self._last_contents
        self._last_contents = contents
        columns = self._rows.columns(capture.state.columns, capture.plan.cut, names, capture.inline)
        ref = CheckpointRef(capture.generation or 1, capture.request.step, capture.request.save_id)
        header = manifest_header(capture.request, ref, None, (), capture.plan.record(), capture.state.tree)
        moving.manifest = manifest_of(header, columns)
        if not moving.streams:
            self._enter(moving)
        # Only what has an entry survives this process.
        capture.complete_s = None if moving.entry is None else time.perf_counter()
        emit("capture.copied" if moving.entry is None else "capture.complete", str(ref), capture.state_bytes)

    def _enter(self, moving: Moving) -> None:
        # One without a generation belongs to no line yet: who found it in the ring would not know where it goes.
        if moving.capture.generation is not None and not self._survives(moving):
            return
        with self._lock:
            self._kept.append(moving)

    def _survives(self, moving: Moving) -> bool:
        """Put the manifest into the ring, and enter the capture there, if there is room for both."""
        data = encode(moving.manifest)
        slot = self._take(len(data))
        if slot is None:
            return False
        self._ring.payload(slot)[:] = data
        self._ring.complete(slot, FrameDescriptor.identity(digest(data), slot.length))
        moving.entry = self._ring.enter(slot, moving.capture.request.save_id)
        if moving.entry is None:
            self._ring.give_back(slot)
            return False
        moving.manifest_slot = slot
        return True

    def _take(self, length: int) -> RingSlot | None:
        if frame_length(length) > self._ring.header.data_bytes:
            return None
        while (slot := self._ring.take(length)) is None and self.make_room():
            pass
        return slot

    def _go_on(self, moving: Moving, number: int | None) -> None:
        capture = moving.capture
        if number is not None:
            with capture.failing():
                self._queue_write(moving, number)
            return
        for task in (self._queue_postponed, self._settle, self._retire):
            with capture.failing():
                task(moving)
        capture.end()
        self._last = capture.began_s, capture.durable_s
        # An observer that raises has nothing to abort any more.
        with contextlib.suppress(Exception):
            emit("capture.durable" if capture.error is None else "capture.lost", str(moving.ref), capture.state_bytes)
        if capture.error is None:
            self._keep_up(moving)

    def _keep_up(self, moving: Moving) -> None:
        """Have done what follows a commit, on another thread, so that frames of the next capture are written meanwhile.

        The store gets at most one commit ahead, because what is to be removed takes room. A capture that has left the
        ring cannot write again what a collection takes away: where captures stream, the next one waits.
        """
        if self._upkeep is not None:
            wait(self._kept_up)
            self._kept_up = [self._upkeep.submit(self._on_commit)]
            # Most collections end soon, and the next capture overwrites what they free.
            wait(self._kept_up, None if moving.streams else _PATIENCE_S)

    def _queue_write(self, moving: Moving, number: int) -> None:
        with self._lock:
            if number in moving.capture.reused and not moving.streams:
                moving.put_off.append(number)
                return
            if self._joint is not None and not moving.streams and self._joint.holds(moving.capture, number):
                moving.held.append(number)
                return
            if not moving.streams and self._may_be_derived(moving.capture, number):
                moving.postponed.append(number)
                return
        self._write_soon(moving, number)

    def _may_be_derived(self, capture: Capture, number: int) -> bool:
        # In this order: the originals of a plan are not even looked for where no base is wanted.
        return (
            self._encoder.wants_bases
            and self._bases.may_be_derived(capture, number)
            and self._encoder.looks_for(CODEC_DERIVED, capture.contents(number))
        )

    def _queue_postponed(self, moving: Moving) -> None:
        with self._lock:
            numbers, moving.postponed = moving.postponed, []
        for number in numbers:
            self._write_soon(moving, number)

    def _write_soon(self, moving: Moving, number: int) -> None:
        write = self._writers.submit(self._write, moving, number)
        moving.writes.append(write)
        write.add_done_callback(lambda _: self._note_failure(moving, write))

    def _write(self, moving: Moving, number: int) -> bool:
        capture = moving.capture
        slot, name = capture.slots[number], capture.digests[number]
        if slot is None or name is None or (capture.error is not None and not moving.streams):
            return False
        is_new = True
        if capture.error is None:
            detail = lambda: {**capture.named_partition(number), "known": not is_new}  # noqa: E731 - told at the end
            with timed("write", slot.length, detail), self._bases_of(moving, number) as bases:
                frame, contents = self._ring.frame(slot), capture.contents(number)
                is_new = moving.transaction.add_frame(name, slot.length, frame, contents, bases, keep=False)
        with self._lock:
            if not moving.streams:
                moving.transaction.keep(name, slot.length, self._ring.frame(slot))
                moving.stored.append(number)
                return is_new
        capture.slots[number] = None
        self._ring.give_back(slot)
        return is_new

    @contextlib.contextmanager
    def _bases_of(self, moving: Moving, number: int) -> Iterator[list[Base]]:
        """Return what a partition may be decoded from, whose frames stay in the ring for a while."""
        with self._lock:
            kept = [one for one in self._kept if one.ref is not None and one is not moving and one.settled]
            reads = [moving, *kept[-1:]] if self._encoder.wants_bases and not moving.streams else []
            for one in reads:
                one.readers += 1
        try:
            older = reads[1].capture if len(reads) > 1 else None
            yield self._bases.of(moving.capture, number, older) if reads else []
        finally:
            with self._lock:
                for one in reads:
                    one.readers -= 1

    def let_stream(self, capture: Capture) -> bool:
        """Let a capture leave the ring as it is written, if it is alone there and so can wait for nothing else.

        One that would fit may find the free room in too small pieces. Returns whether that made room.
        """
        with self._lock:
            moving = self._moving.get(capture)
            if moving is None or moving.streams or moving.readers or self._kept:
                return False
            if any(one is not capture for one in tuple(self._moving)):
                return False
            moving.streams = True
            numbers, moving.stored = moving.stored, []
            put_off, moving.put_off, moving.held = [*moving.put_off, *moving.held], [], []
            moving.transaction.keep_none()
        self._queue_postponed(moving)
        self._note_failure(moving)
        for number in numbers:
            slot, capture.slots[number] = capture.slots[number], None
            if slot is not None:
                self._ring.give_back(slot)
        # Alone in the ring, it has no earlier capture to wait for.
        for number in put_off:
            self._queue_write(moving, number)
        return True

    def _settle(self, moving: Moving) -> None:
        """Commit a capture whose partitions have all been queued, or leave nothing of it in the store."""
        capture = moving.capture
        # An interrupt, too: it may have come while the training thread copied, and be why this was given up.
        with capture.failing():
            if self._joint is not None:
                with timed("commit", 0, capture.named):
                    self._joint.commit(moving, self)
            else:
                self._commit_alone(moving)
        if capture.error is not None:
            moving.transaction.abort()
        elif moving.entry is not None:
            self._ring.mark_durable(moving.entry)

    def _commit_alone(self, moving: Moving) -> None:
        capture = moving.capture
        self.wait(moving)
        for number in moving.put_off:
            self.now(moving, number)
        with timed("commit", 0, capture.named):
            moving.ref = moving.transaction.commit_capture(moving.manifest, lambda: self._placing(capture))

    def soon(self, moving: Moving, numbers: Sequence[int]) -> None:
        """Begin to write partitions of a capture. For the commit thread, as the next two."""
        for number in numbers:
            self._write_soon(moving, number)

    def wait(self, moving: Moving) -> None:
        """Wait until all that was begun is written.

        Raises:
            AsymcheckError: some of it could not be; the first reason.
        """
        failures = [error for write in moving.writes if (error := write.exception()) is not None]
        capture = moving.capture
        if capture.error is None and failures:
            capture.error = failures[0]
        if capture.error is not None:
            raise capture.error

    def now(self, moving: Moving, number: int) -> bool:
        """Write a partition; return whether the store did not have it."""
        return self._write(moving, number)

    def _retire(self, moving: Moving) -> None:
        """Give up what is not needed any more, and tell who waits."""
        capture = moving.capture
        capture.ref = None if capture.error is not None else moving.ref
        packing = moving.transaction.packing
        capture.written_bytes, capture.new_bytes = packing.written_bytes, packing.new_bytes
        del self._moving[capture]
        with self._lock:
            moving.settled = True
            # The newest durable one stays, for a rollback, also when one after it failed or is on its way, until room
            # is needed; so does the newest of all, and what waits in memory for the next start.
            durable = [kept for kept in self._kept if kept.settled and kept.capture.error is None]
            stays = (*durable[-1:], *self._kept[-1:])
            freed = [kept for kept in self._kept if kept.settled and not kept.readers and kept not in stays]
            if moving not in self._kept:
                freed.append(moving)
            self._kept = [kept for kept in self._kept if kept not in freed]
        for one in freed:
            self._free(one)

    def survives(self, capture: Capture) -> bool:
        """Tell whether a finished capture outlives this process: it has an entry in the ring, or is settled."""
        moving = self._moving.get(capture)
        return moving is None or moving.entry is not None

    def make_room_for(self, capture: Capture) -> bool:
        """Make room for more of a capture, at the cost of older ones or in the end of itself; return whether it did."""
        return self.make_room() or self.let_stream(capture)

    def make_room(self) -> bool:
        """Free the oldest capture that is durable, or could not be made so; return whether there was one."""
        with self._lock:
            settled = [kept for kept in self._kept if kept.settled and not kept.readers]
            settled.sort(key=lambda kept: kept.capture.error is not None)
            if not settled:
                return False
            self._kept.remove(settled[0])
        self._free(settled[0])
        return True

    def _free(self, moving: Moving) -> None:
        entry, moving.entry = moving.entry, None
        if entry is not None:
            self._ring.forget(entry)
        for slot in (*moving.capture.slots, moving.manifest_slot):
            if slot is not None:
                self._ring.give_back(slot)

    def newest(self, on_line: Callable[[CheckpointRef], bool]) -> Moving | None:
        """Return the newest capture that is complete in the ring, committed, and on the line."""
        with self._lock:
            kept = reversed(self._kept)
            return next((one for one in kept if one.ref is not None and on_line(one.ref)), None)

    def close(self) -> bool:
        """Commit what is queued, and end the threads; return whether every complete capture is durable."""
        self._committer.close()
        self._writers.close()
        if self._upkeep is not None:
            self._upkeep.close()
        with self._lock:
            return all(kept.capture.error is None for kept in self._kept)
