"""Flush from the ring: captures become checkpoints in the store, in order, on threads of their own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from asymcheck.events import emit
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor, frame_length
from asymcheck.format.manifest import encode_manifest
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.drain import Drain
from asymcheck.pipeline.manners import stand_back
from asymcheck.pipeline.request import Place
from asymcheck.pipeline.rows import manifest_header, manifest_rows
from asymcheck.tiers.dram_ring import Ring, RingSlot
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.types import CheckpointRef, Digest

Placing = Callable[[Capture], Place]
"""Says where on the line a capture goes; asked when all but its manifest is durable."""

_WRITERS = 2


class Moving:
    """One capture between ring and store."""

    def __init__(self, capture: Capture, drain: Drain, *, streams: bool) -> None:
        """Begin to move; one that ``streams`` leaves the ring as it is written, and is never complete in it."""
        self.capture = capture
        self.drain = drain
        self.streams = streams
        self.writes: list[Future[None]] = []
        self.manifest = b""
        self.manifest_slot: RingSlot | None = None
        self.entry: int | None = None
        """Number of its entry in the ring, once it is complete there."""
        self.ref: CheckpointRef | None = None
        """The checkpoint that it became."""
        self.stored: list[int] = []
        """Partitions, by number, that are written and still in the ring."""
        self.settled = False
        """Whether it is durable, or will never be."""


class RingFlusher:
    """Moves what is captured to the store, and knows what lies in the ring."""

    def __init__(self, ring: Ring, tier: NvmeTier, catalog: Catalog, placing: Placing) -> None:
        """Start the threads."""
        self._ring, self._tier, self._catalog, self._placing = ring, tier, catalog, placing
        self._queue: queue.SimpleQueue[tuple[Moving, int | None] | None] = queue.SimpleQueue()
        self._moving: dict[Capture, Moving] = {}
        self._kept: list[Moving] = []
        self._last_names: list[Digest] = []
        self._lock = threading.Lock()
        self._writes: queue.SimpleQueue[tuple[Future[None], Moving, int] | None] = queue.SimpleQueue()
        # No executor: Python ends those before it calls what is registered to be done at exit, and that flushes.
        self._writers = [
            threading.Thread(target=self._run_writes, name=f"asymcheck-flush-{number}", daemon=True)
            for number in range(_WRITERS)
        ]
        for writer in self._writers:
            writer.start()
        self._thread = threading.Thread(target=self._run, name="asymcheck-commit", daemon=True)
        self._thread.start()

    def stored(self, capture: Capture, number: int) -> None:
        """Take a partition that is complete in the ring. On the capture thread."""
        self._queue.put((self._of(capture), number))

    def finished(self, capture: Capture) -> None:
        """Take a capture that is complete, or was given up. On the capture thread."""
        try:
            moving = self._of(capture)
            if capture.error is None:
                self._complete(moving)
        except BaseException as error:  # noqa: BLE001 - kept in the capture, and raised in the training loop
            capture.error = capture.error or error
        capture.complete.set()
        if capture in self._moving:
            self._queue.put((self._moving[capture], None))
        else:
            capture.durable.set()

    def _note_failure(self, moving: Moving) -> None:
        """Give up a capture that streams when a write of it has failed; one that is all in the ring is kept."""
        with self._lock:
            failures = [write.exception() for write in tuple(moving.writes) if write.done()]
            if moving.streams and moving.capture.error is None:
                moving.capture.error = next(filter(None, failures), None)

    def _of(self, capture: Capture) -> Moving:
        moving = self._moving.get(capture)
        if moving is None:
            bytes_in_ring = sum(frame_length(partition.length) for partition in capture.partitions)
            drain = Drain(self._tier, self._catalog, self._tier.slots, capture.save_id, capture.request.rank)
            drain.expect(bytes_in_ring)
            moving = Moving(capture, drain, streams=bytes_in_ring > self._ring.header.data_bytes)
            self._moving[capture] = moving
        return moving

    def _complete(self, moving: Moving) -> None:
        """Put the manifest into the ring, too: from now on the capture survives this process."""
        capture = moving.capture
        names = [name for name in capture.digests if name is not None]
        capture.is_stale = bool(names) and names == self._last_names
        self._last_names = names
        rows = manifest_rows(capture.state.leaves, capture.plan.cut, names, capture.inline)
        ref = CheckpointRef(capture.generation or 1, capture.request.step, capture.save_id)
        header = manifest_header(capture.request, ref, None, (), capture.plan.record(), capture.state.tree)
        moving.manifest = encode_manifest(header, rows)
        if not moving.streams:
            self._enter(moving)
        # Only what has an entry survives this process.
        emit("capture.copied" if moving.entry is None else "capture.complete", str(ref), capture.state_bytes)

    def _enter(self, moving: Moving) -> None:
        # One without a generation belongs to no line yet: who found it in the ring would not know where it goes.
        if moving.capture.generation is not None and not self._survives(moving):
            return
        with self._lock:
            self._kept.append(moving)

    def _survives(self, moving: Moving) -> bool:
        """Put the manifest into the ring, and enter the capture there, if there is room for both."""
        slot = self._take(len(moving.manifest))
        if slot is None:
            return False
        self._ring.payload(slot)[:] = moving.manifest
        self._ring.complete(slot, FrameDescriptor.identity(digest(moving.manifest), slot.length))
        moving.entry = self._ring.enter(slot, moving.capture.save_id)
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

    def _run(self) -> None:
        stand_back()
        while (item := self._queue.get()) is not None:
            moving, number = item
            if number is not None:
                moving.writes.append(Future())
                self._writes.put((moving.writes[-1], moving, number))
                continue
            try:
                self._settle(moving)
            except BaseException as error:  # noqa: BLE001 - kept in the capture, and raised in the training loop
                moving.capture.error = moving.capture.error or error
            self._retire(moving)
            name = "capture.durable" if moving.capture.error is None else "capture.lost"
            # An observer that raises has nothing to abort any more, and must not end this thread.
            with contextlib.suppress(Exception):
                emit(name, str(moving.ref), moving.capture.state_bytes)

    def _run_writes(self) -> None:
        stand_back()
        while (item := self._writes.get()) is not None:
            done, moving, number = item
            try:
                self._write(moving, number)
            except BaseException as error:  # noqa: BLE001 - carried to the commit thread
                done.set_exception(error)
                self._note_failure(moving)
            else:
                done.set_result(None)

    def _write(self, moving: Moving, number: int) -> None:
        capture = moving.capture
        slot, name = capture.slots[number], capture.digests[number]
        if slot is None or name is None or (capture.error is not None and not moving.streams):
            return
        if capture.error is None:
            moving.drain.add(name, slot.length, self._ring.frame(slot), keep=False)
        with self._lock:
            if not moving.streams:
                moving.drain.keep(name, slot.length, self._ring.frame(slot))
                moving.stored.append(number)
                return
        capture.slots[number] = None
        self._ring.give_back(slot)

    def let_stream(self, capture: Capture) -> bool:
        """Let a capture leave the ring as it is written, if it is alone there and so can wait for nothing else.

        One that would fit may find the free room in too small pieces. Returns whether that made room.
        """
        with self._lock:
            moving = self._moving.get(capture)
            if moving is None or moving.streams or self._kept or any(one is not capture for one in tuple(self._moving)):
                return False
            moving.streams = True
            numbers, moving.stored = moving.stored, []
            moving.drain.keep_none()
        self._note_failure(moving)
        for number in numbers:
            slot, capture.slots[number] = capture.slots[number], None
            if slot is not None:
                self._ring.give_back(slot)
        return True

    def _settle(self, moving: Moving) -> None:
        """Commit a capture whose partitions have all been queued, or leave nothing of it in the store."""
        capture = moving.capture
        failures = [error for write in moving.writes if (error := write.exception()) is not None]
        if capture.error is None and failures:
            capture.error = failures[0]
        try:
            if capture.error is None:
                moving.ref = moving.drain.commit(moving.manifest, lambda _header: self._placing(capture))
        except Exception as error:  # noqa: BLE001 - kept in the capture, and raised in the training loop
            capture.error = error
        if capture.error is not None:
            moving.drain.abandon()
        elif moving.entry is not None:
            self._ring.mark_durable(moving.entry)

    def _retire(self, moving: Moving) -> None:
        """Give up what is not needed any more, and tell who waits."""
        capture = moving.capture
        capture.written_bytes = moving.drain.written_bytes
        del self._moving[capture]
        with self._lock:
            moving.settled = True
            # The newest complete capture stays, for a rollback; so does what waits in memory for the next start.
            freed = [kept for kept in self._kept[:-1] if kept.settled]
            if moving not in self._kept:
                freed.append(moving)
            self._kept = [kept for kept in self._kept if kept not in freed]
        for one in freed:
            self._free(one)
        capture.durable_s = time.perf_counter()
        capture.durable.set()

    def make_room_for(self, capture: Capture) -> bool:
        """Make room for more of a capture, at the cost of older ones or in the end of itself; return whether it did."""
        return self.make_room() or self.let_stream(capture)

    def make_room(self) -> bool:
        """Free the oldest capture that is durable, or could not be made so; return whether there was one."""
        with self._lock:
            settled = [kept for kept in self._kept if kept.settled]
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
        self._queue.put(None)
        self._thread.join()
        for _ in self._writers:
            self._writes.put(None)
        for writer in self._writers:
            writer.join()
        with self._lock:
            return all(kept.capture.error is None for kept in self._kept)
