"""Capture engine: copy a consistent snapshot of a state into the ring while training continues.

*Eager* tensors may change at any time. They are copied before :meth:`CaptureEngine.begin` returns, unless their bytes
equal an earlier capture (see :mod:`asymcheck.capture.dirty_check`). *Deferred* tensors only change in an optimizer
step. The capture thread copies them when the plan releases them, and at the latest at the *fence* before that step.
Tear detection compares the captured bytes with digests of the source from the start of the capture.

Devices copy their tensors in the same order (see :mod:`asymcheck.capture.device_copy`). Eager tensors are cloned at
once and fetched later. The fence blocks the device, but not the program.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

from asymcheck.capture.dirty_check import DirtyCheck
from asymcheck.capture.inflight import Capture
from asymcheck.capture.ring_flush import RingFlusher
from asymcheck.capture.signals import INTERRUPTS
from asymcheck.capture.tear_detection import TearDetector
from asymcheck.events import emit, timed
from asymcheck.executor import Thread, start
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.state.leaves import copy_partition
from asymcheck.storage.shm.ring_writer import Ring, RingSlot

_ROOM_POLL_S = 0.05
_FENCE_POLL_S = 0.1
_WINDOW_PATIENCE_S = 10.0
"""Time without a copy after which the rest is copied before its windows."""
_DEVICE_POLL_S = 0.002
"""Pause between two queries whether a device copy is done, long enough not to slow down the training thread."""


class CaptureEngine:
    """Copies captures into a ring, with the help of a capture thread. Captures begin on one training thread."""

    def __init__(self, ring: Ring, flusher: RingFlusher, detector: TearDetector) -> None:
        """Start the capture thread. ``flusher`` writes partitions from the ring; ``detector`` finds torn captures."""
        self.ring, self.flusher, self._detector = ring, flusher, detector
        self._unchanged = DirtyCheck(ring)
        self._changed = threading.Condition()
        self._unreleased: deque[tuple[Capture, int]] = deque()
        self._to_copy: deque[tuple[Capture, int]] = deque()
        self._to_complete: deque[tuple[Capture, int | None]] = deque()
        self._open: Capture | None = None
        self._training = threading.get_ident()
        self._settling = threading.Lock()
        self._stopping = self._is_copying = False
        self._thread = Thread(self._run, "asymcheck-capture")
        start(self._thread)

    def begin(self, capture: Capture) -> None:
        """Copy eager tensors, and queue deferred ones for the windows of the plan.

        If the flush fails in the meantime, the capture counts as begun and lost.

        Raises:
            AsymcheckError: the copy failed; the capture was discarded.
        """
        self._training = threading.get_ident()
        self.fence()
        eager = [number for number, window in enumerate(capture.plan.release) if window < 0]
        deferred = [number for number, window in enumerate(capture.plan.release) if window >= 0]
        later = sorted(deferred, key=lambda number: capture.plan.release[number])
        try:
            # This comes first, because making room frees frames of earlier captures.
            unchanged = self._unchanged.take(capture, eager)
            with self._changed:
                capture.reused = frozenset(unchanged)
                capture.uncopied -= len(unchanged)
            capture.transfers.begin()
            later = self._copy_early(capture, later)
            with timed("source digest", 0, capture.named):
                self._set_aside(capture, deferred)
            for number in unchanged:
                eager.remove(number)
                self._to_be_completed(capture, number)
            staged = [number for number in eager if self._stage(capture, number)]
            others = [number for number in eager if number not in staged]
            rows = {piece.row for number in others for piece in capture.partitions[number].pieces}
            leaves = [capture.state.leaves[row] for row in rows]
            for number in others:
                self._copy_now(capture, number)
                # Completed at once, so that a small ring can flush it before the next copy.
                self._to_be_completed(capture, number)
            for leaf in leaves:
                # The next forward pass may need the memory of its contiguous copy.
                leaf.release()
            # Clones are fetched after they are complete.
            capture.transfers.gate()
        except BaseException as error:
            is_lost = error is capture.error
            self._fail(capture, error)
            capture.asides.is_fetched = True
            self._to_be_completed(capture, None)
            if is_lost:
                return
            raise
        with self._changed:
            self._open = capture
            self._to_copy.extend((capture, number) for number in staged)
            self._unreleased.extend((capture, number) for number in later)
            if not capture.slots:
                self._to_complete.append((capture, None))
            self._release(0)
            self._check_copied(capture)
            self._changed.notify_all()

    def _copy_early(self, capture: Capture, numbers: list[int]) -> list[int]:
        """Queue device copies of the first window, and return the other partitions.

        The link is then busy while this thread computes source digests. If the capture thread queued the copies, both
        threads would wait for the GIL at each operation of torch. In a small ring, eager copies come first, because
        the training waits for them. Partitions of earlier captures that wait for space come first, too.
        """
        transfers, release = capture.transfers, capture.plan.release
        with self._changed:
            others_wait = any(earlier.slots[number] is None for earlier, number in self._to_copy)
        if not transfers.devices or others_wait or self.ring.header.data_bytes < 2 * capture.state_bytes:
            return numbers
        early: set[int] = set()
        for number in numbers:
            if release[number] == 0 and transfers.is_on_device(number):
                slot = self.ring.take(capture.partitions[number].length)
                if slot is None:
                    # The capture thread waits for space.
                    break
                capture.slots[number] = slot
                self._copy_released(capture, number)
                early.add(number)
        return [number for number in numbers if number not in early]

    def enter_window(self, number: int) -> None:
        """Begin a window of the plan, and release the partitions of this and earlier windows."""
        if self._unreleased:
            with INTERRUPTS, self._changed:
                # During the recording of a CUDA graph, no window begins, because copies would become part of the graph.
                if self._open is not None and not self._open.transfers.is_recorded and self._release(number):
                    # The device reaches this point later.
                    self._open.transfers.gate()

    def _release(self, window: int | None) -> bool:
        released = False
        while self._unreleased:
            capture, number = self._unreleased[0]
            if window is not None and capture.plan.release[number] > window:
                break
            self._to_copy.append(self._unreleased.popleft())
            released = True
        if released:
            self._changed.notify_all()
        return released

    def fence(self) -> bool:
        """Copy all remaining partitions, or wait for them, so that the source may change.

        Any thread that runs an optimizer may call this. Returns whether this is the thread that begins captures.
        """
        capture, is_training = self._open, self._training == threading.get_ident()
        if capture is not None:
            with INTERRUPTS, timed("fence", 0, capture.named):
                self._wait_until_copied(capture)
                self._detector.fence(capture.source_digests)
            if is_training:
                # On another thread, the next capture may have begun in the meantime.
                self._open = None
        return is_training

    def _wait_until_copied(self, capture: Capture) -> None:
        with self._changed:
            if capture.transfers.devices:
                self._stage_late(capture)
            self._release(None)
        while not capture.copied.is_set():
            # After an interrupt, the capture thread copies the queued partitions.
            INTERRUPTS.deliver()
            if self._is_copying and capture.transfers.devices:
                # Two threads would not queue device copies faster, because only one can hold the GIL.
                capture.copied.wait(_FENCE_POLL_S)
                continue
            with self._changed:
                if not self._to_copy:
                    self._changed.wait_for(lambda: self._to_copy or capture.copied.is_set(), _FENCE_POLL_S)
                    continue
                task = self._to_copy.popleft()
            if self._has_room(*task):
                self._copy_released(*task)
                continue
            # Only the capture thread waits for space, because an interrupt of this wait must not cost the capture.
            with self._changed:
                self._to_copy.appendleft(task)
                self._changed.notify_all()
            self.ring.wait_for_room(_ROOM_POLL_S)
        if self._thread.is_alive():
            # Otherwise, all copies are done. A device that has failed would refuse to wait for them.
            capture.transfers.hold()

    def _has_room(self, capture: Capture, number: int) -> bool:
        """Allocate the slot of a partition without a wait; return True also if the capture has failed."""
        with capture.failing():
            capture.slots[number] = capture.slots[number] or self.flusher.take(capture.partitions[number].length)
        return capture.slots[number] is not None or capture.error is not None

    def _stage(self, capture: Capture, number: int) -> bool:
        """Clone a partition on its device so that its source may change; return False without space for the clone."""
        if not capture.transfers.is_on_device(number) or not capture.transfers.stage(number):
            return False
        # Later captures must not take this space: if each in the ring lacked a partition, none could be completed.
        if capture.slots[number] is None:
            capture.slots[number] = self.ring.take(capture.partitions[number].length)
        with self._changed:
            capture.uncopied -= 1
        return True

    def _stage_late(self, capture: Capture) -> None:
        """Clone partitions whose copies are not queued, because a clone is faster than a copy to the host.

        The last partitions come first, because the device waits for all copies before the last one without a clone. Do
        not search for smaller ones in a full staging buffer.
        """
        waiting = [number for queued, number in (*self._to_copy, *self._unreleased) if queued is capture]
        late = [number for number in reversed(waiting) if not capture.transfers.is_staged(number)]
        if [*takewhile(partial(self._stage, capture), filter(capture.transfers.is_on_device, late))]:
            capture.transfers.gate_clones()
            self._check_copied(capture)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: self._to_copy or self._to_complete or self._stopping, _WINDOW_PATIENCE_S
                ):
                    # An evaluation reaches no window, and must not keep the newest checkpoint from the store.
                    self._release(None)
                    continue
                # Copies come first, because training may be waiting for them.
                queue = self._to_copy or self._to_complete
                if not queue:
                    return
                self._is_copying = is_copy = queue is self._to_copy
                if not is_copy and not _has_arrived(*queue[0]):
                    self._changed.wait(_DEVICE_POLL_S)
                    continue
                capture, number = queue.popleft()
            if is_copy and number is not None:
                self._copy_released(capture, number)
            else:
                self._complete_or_finish(capture, number)
            # Otherwise, this thread would keep the capture and its tensors alive until the next one.
            del capture

    def _complete_or_finish(self, capture: Capture, number: int | None) -> None:
        if number is not None:
            self._digest(capture, number)
            return
        if capture.complete.is_set():
            # It failed in begin(), after all of its partitions were queued.
            return
        try:
            self._settle_aside(capture)
            capture.transfers.drop()
            capture.asides.drop()
            capture.error = capture.error or self._detector.verdict(capture.source_digests, capture.request.step)
        except BaseException as error:  # noqa: BLE001 - kept in the capture, and raised in the training loop
            capture.error = capture.error or error
        self.flusher.finished(capture)
        capture.forget_sources()

    def _settle_aside(self, capture: Capture) -> None:
        # Either thread may be the first to need the asides or their space.
        with self._settling:
            capture.asides.settle()
            while capture.aside_slots:
                self.ring.give_back(capture.aside_slots.pop())

    def _to_be_completed(self, capture: Capture, number: int | None) -> None:
        with self._changed:
            self._to_complete.append((capture, number))
            self._check_copied(capture)
            self._changed.notify_all()
        self.ring.wake()

    def _copy_released(self, capture: Capture, number: int) -> None:
        try:
            if capture.error is None:
                self._copy(capture, number)
        except BaseException as error:
            # The capture keeps the error for the training loop. KeyboardInterrupt is raised at once.
            self._fail(capture, error)
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise
        finally:
            self._to_be_completed(capture, number)

    def _copy_now(self, capture: Capture, number: int) -> None:
        partition, payload = capture.partitions[number], self._payload(capture, number)
        with timed("copy", partition.length, lambda: capture.named_partition(number)):
            capture.transfers.catch_up(number)
            copy_partition(partition, capture.state.leaves, payload)
        with self._changed:
            capture.uncopied -= 1

    def _copy(self, capture: Capture, number: int) -> None:
        """Copy a partition, or queue its device copy."""
        was_staged = capture.transfers.is_staged(number)
        payload = self._payload(capture, number)
        with timed("copy", len(payload), lambda: capture.named_partition(number)):
            capture.transfers.copy(number, payload)
            capture.source_digests.check_marks(number)
        with self._changed:
            capture.uncopied -= not was_staged

    def _payload(self, capture: Capture, number: int) -> memoryview:
        slot = capture.slots[number] or self._take(capture, capture.partitions[number].length)
        capture.slots[number] = slot
        return self.ring.payload(slot)

    def _room_aside(self, capture: Capture, length: int) -> memoryview:
        slot = self.flusher.take(length)
        if slot is None:
            # Without these copies, early ones cannot leave the ring, so the wait for space might never end.
            return memoryview(bytearray(length))
        capture.aside_slots.append(slot)
        return self.ring.payload(slot)

    def _take(self, capture: Capture, length: int) -> RingSlot:
        slot = self.ring.take(length)
        if slot is None:
            with timed("room", length, capture.named):
                while slot is None:
                    INTERRUPTS.deliver()
                    if capture.error is not None:
                        raise capture.error
                    emit("ring.full", str(capture.request.step), length)
                    self._settle_aside(capture)
                    if not (self.flusher.make_room() or self.flusher.let_stream(capture) or self._complete_one()):
                        self.ring.wait_for_room(_ROOM_POLL_S)
                    slot = self.ring.take(length)
        return slot

    def _complete_one(self) -> bool:
        """Complete an earlier copy so that it can leave the ring. Only the capture thread does so."""
        if threading.current_thread() is not self._thread:
            return False
        with self._changed:
            if not self._to_complete or not self._to_complete[0][0].asides.is_fetched:
                return False
            task = self._to_complete.popleft()
        self._complete_or_finish(*task)
        return True

    def _check_copied(self, capture: Capture) -> None:
        if (capture.uncopied == 0 or capture.error is not None) and not capture.copied.is_set():
            for leaf in capture.state.leaves:
                leaf.release()
            capture.copied.set()

    def _digest(self, capture: Capture, number: int) -> None:
        try:
            # This includes failed captures, because the device may still write to their slots.
            capture.transfers.wait(number)
            if capture.transfers.is_on_device(number):
                capture.source_digests.check_marks(number)
            if capture.error is None:
                self._complete(capture, number)
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(capture, error)
        with self._changed:
            capture.undigested -= 1
            if capture.undigested == 0:
                self._to_complete.append((capture, None))

    def _complete(self, capture: Capture, number: int) -> None:
        slot = capture.slots[number]
        if slot is None:
            return
        self._settle_aside(capture)
        if number in capture.reused:
            self.flusher.stored(capture, number)
            return
        payload = self.ring.payload(slot)
        if number in capture.source_digests:
            with timed("proof", slot.length, lambda: capture.named_partition(number)):
                capture.source_digests.check(number, payload)
        with timed("digest", slot.length, lambda: capture.named_partition(number)):
            name = digest(payload)
            self.ring.complete(slot, FrameDescriptor.identity(name, slot.length))
        capture.digests[number] = name
        self.flusher.stored(capture, number)

    def _fail(self, capture: Capture, error: BaseException) -> None:
        with self._changed:
            if capture.error is None:
                capture.error = error
            # Unreleased partitions pass through the queues as well, and are counted there.
            self._release(None)
            capture.copied.set()
            self._changed.notify_all()

    def _set_aside(self, capture: Capture, deferred: Sequence[int]) -> None:
        """Read the small tensors of the manifest, and the source digests of the tear detection."""
        asides = capture.asides
        asides.want_whole(capture.plan.cut.inline, capture.inline.__setitem__)
        save_id, leaves = capture.request.save_id, capture.state.leaves
        self._detector.begin(capture.source_digests, save_id, leaves, deferred, asides)
        asides.gather()
        # The copies to host memory follow the gathered parts.
        capture.transfers.gate()
        asides.fetch(partial(self._room_aside, capture))

    def settle(self) -> None:
        """Release all partitions, so that the capture completes without another window or fence."""
        with INTERRUPTS, self._changed:
            self._release(None)

    def close(self) -> None:
        """Complete the current capture, and end the thread."""
        with INTERRUPTS, self._changed:
            self._release(None)
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self.fence()


def _has_arrived(capture: Capture, number: int | None) -> bool:
    """Tell whether a partition can be completed: its device copies are done, and the asides can be settled.

    Host copies are done before they are queued.
    """
    try:
        return capture.asides.is_fetched and (number is None or capture.transfers.have_passed(number))
    except Exception:  # noqa: BLE001 - the wait for the copy raises the error of the device again
        return True
