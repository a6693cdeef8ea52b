"""Capture: a state is copied into the ring while training goes on, and never torn.

What a forward pass may change is *eager*: it is copied before :meth:`Capturer.begin` returns. The rest is *deferred*:
it is copied by a thread of its own as the plan releases it, and at the latest at the *fence*, before the next optimizer
step changes it. The *proof* compares what was captured with digests of the source that were taken at the beginning.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from asymcheck.errors import TornCaptureError
from asymcheck.events import emit
from asymcheck.format.digest import digest
from asymcheck.format.frame import FrameDescriptor
from asymcheck.partition.plan import Partition
from asymcheck.partition.schedule import Plan
from asymcheck.partition.state import FlatState
from asymcheck.pipeline.flush import copy_partition
from asymcheck.pipeline.request import SaveRequest, new_save_id
from asymcheck.pipeline.rows import inline_bytes
from asymcheck.tiers.dram_ring import Ring, RingSlot
from asymcheck.types import Digest

Proof = Literal["full", "sampled", "off"]
"""How much of the source is digested when a capture begins, to be compared with what was captured."""

_WITNESSES = 16
_WITNESS_BYTES = 4096
_ROOM_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class _Witness:
    """What some bytes of a partition were when the capture began."""

    start: int
    length: int
    digest: Digest


class Capture:
    """One state on its way into the ring. Its fields are guarded by the lock of the :class:`Capturer`."""

    def __init__(self, state: FlatState, plan: Plan, request: SaveRequest, generation: int | None) -> None:
        """Describe a capture; ``generation`` is None when the commit will open it."""
        self.state = state
        self.plan = plan
        self.request = request
        self.generation = generation
        self.save_id = new_save_id()
        self.began_s = time.perf_counter()
        """When it was begun, by ``time.perf_counter()``."""
        self.durable_s = 0.0
        """When it was durable, by the same clock."""
        self.inline: dict[int, bytes] = {}
        """Bytes of the tensors that stay in the manifest, by row."""
        self.slots: list[RingSlot | None] = [None] * len(plan.cut.partitions)
        """Where each partition lies in the ring."""
        self.digests: list[Digest | None] = [None] * len(plan.cut.partitions)
        """The digest of each partition, once it is known."""
        self.witnesses: dict[int, _Witness] = {}
        """What some bytes of partitions, by number, have to be."""
        self.uncopied = len(self.slots)
        """Partitions whose source is still needed."""
        self.undigested = len(self.slots)
        """Partitions that are not complete in the ring."""
        self.written_bytes = 0
        """Payload bytes written to the store, once it is settled."""
        self.is_stale = False
        """Whether every partition is equal to the one of the capture before."""
        self.error: BaseException | None = None
        """Why it was given up."""
        self.copied = threading.Event()
        """Set when the source may change, or the capture was given up."""
        self.complete = threading.Event()
        """Set when it is complete in the ring, or was given up."""
        self.durable = threading.Event()
        """Set when it is committed in the store, or was given up."""

    @property
    def partitions(self) -> Sequence[Partition]:
        """The partitions of the plan."""
        return self.plan.cut.partitions

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.nbytes for leaf in self.state.leaves)


class Capturer:
    """Copies captures into a ring, with one thread beside the training thread. Begin and fence on one thread only."""

    def __init__(
        self,
        ring: Ring,
        stored: Callable[[Capture, int], None],
        finished: Callable[[Capture], None],
        make_room: Callable[[Capture], bool],
        proof: Proof,
    ) -> None:
        """Start the thread.

        Args:
            ring: where to.
            stored: called on it when a partition, by number, is complete in the ring.
            finished: called on it when all are, or when the capture was given up: ``error`` says so. Must not raise.
            make_room: called on any thread when the ring is full for a capture; returns whether it made room.
            proof: how much is compared.
        """
        self._ring = ring
        self._stored, self._finished, self._make_room = stored, finished, make_room
        self._proof = proof
        self._changed = threading.Condition()
        self._unreleased: deque[tuple[Capture, int]] = deque()
        self._to_copy: deque[tuple[Capture, int]] = deque()
        self._to_complete: deque[tuple[Capture, int | None]] = deque()
        # Not the module's own generator, whose state belongs to the training.
        self._chance = random.Random()  # noqa: S311 - nothing secret is chosen
        self._open: Capture | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="asymcheck-capture", daemon=True)
        self._thread.start()

    def begin(self, capture: Capture) -> None:
        """Copy what is eager, and queue the rest for the windows that the plan names.

        Raises:
            AsymcheckError: it could not be copied; the capture was given up.
        """
        self.fence()
        eager = [number for number, window in enumerate(capture.plan.release) if window < 0]
        later = sorted(
            (number for number, window in enumerate(capture.plan.release) if window >= 0),
            key=lambda number: capture.plan.release[number],
        )
        try:
            capture.inline = inline_bytes(capture.state.leaves, capture.plan.cut)
            self._take_witnesses(capture, later)
            for number in eager:
                self._copy(capture, number)
                # At once: where the ring is small, they have to leave it for the next.
                self._to_be_completed(capture, number)
        except BaseException as error:
            self._give_up(capture, error)
            self._to_be_completed(capture, None)
            raise
        with self._changed:
            self._open = capture
            self._unreleased.extend((capture, number) for number in later)
            if not capture.slots:
                self._to_complete.append((capture, None))
            self._release(0)
            self._check_copied(capture)
            self._changed.notify_all()

    def enter_window(self, number: int) -> None:
        """Say that a window of the plan begins: what it and those before it release is copied from now on."""
        if self._unreleased:
            with self._changed:
                self._release(number)

    def _release(self, window: int | None) -> None:
        released = False
        while self._unreleased:
            capture, number = self._unreleased[0]
            if window is not None and capture.plan.release[number] > window:
                break
            self._to_copy.append(self._unreleased.popleft())
            released = True
        if released:
            self._changed.notify_all()

    def fence(self) -> None:
        """Return when the source may change: everything has been copied, or given up. This thread helps."""
        capture = self._open
        if capture is None:
            return
        with self._changed:
            self._release(None)
        while not capture.copied.is_set():
            with self._changed:
                if not self._to_copy:
                    self._changed.wait_for(lambda: self._to_copy or capture.copied.is_set())
                    continue
                task = self._to_copy.popleft()
            self._copy_released(*task)
        self._open = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_copy or self._to_complete or self._stopping)
                # Copies first: training may be waiting for them.
                queue = self._to_copy or self._to_complete
                if not queue:
                    return
                is_copy = queue is self._to_copy
                capture, number = queue.popleft()
            if is_copy and number is not None:
                self._copy_released(capture, number)
            else:
                self._complete_or_finish(capture, number)
            # Else the last one would be kept alive, with all its tensors, until the next one comes.
            del capture

    def _complete_or_finish(self, capture: Capture, number: int | None) -> None:
        if number is None:
            self._finished(capture)
        else:
            self._digest(capture, number)

    def _to_be_completed(self, capture: Capture, number: int | None) -> None:
        with self._changed:
            self._to_complete.append((capture, number))
            self._check_copied(capture)
            self._changed.notify_all()
        self._ring.wake()

    def _copy_released(self, capture: Capture, number: int) -> None:
        try:
            if capture.error is None:
                self._copy(capture, number)
        except BaseException as error:  # noqa: BLE001 - kept in the capture, and raised in the training loop
            self._give_up(capture, error)
        self._to_be_completed(capture, number)

    def _copy(self, capture: Capture, number: int) -> None:
        partition = capture.partitions[number]
        slot = self._take(capture, partition.length)
        capture.slots[number] = slot
        copy_partition(partition, capture.state.leaves, self._ring.payload(slot))
        with self._changed:
            capture.uncopied -= 1

    def _take(self, capture: Capture, length: int) -> RingSlot:
        while True:
            slot = self._ring.take(length)
            if slot is not None:
                return slot
            if capture.error is not None:
                raise capture.error
            emit("ring.full", str(capture.request.step), length)
            if not self._make_room(capture) and not self._complete_one():
                self._ring.wait_for_room(_ROOM_POLL_S)

    def _complete_one(self) -> bool:
        """Complete what was copied before, so that it can leave the ring; only the capture thread does so."""
        if threading.current_thread() is not self._thread:
            return False
        with self._changed:
            if not self._to_complete:
                return False
            task = self._to_complete.popleft()
        self._complete_or_finish(*task)
        return True

    def _check_copied(self, capture: Capture) -> None:
        if capture.uncopied == 0 or capture.error is not None:
            for leaf in capture.state.leaves:
                leaf.release()
            capture.copied.set()

    def _digest(self, capture: Capture, number: int) -> None:
        try:
            if capture.error is None:
                self._complete(capture, number)
        except BaseException as error:  # noqa: BLE001 - as above
            self._give_up(capture, error)
        with self._changed:
            capture.undigested -= 1
            if capture.undigested == 0:
                self._to_complete.append((capture, None))

    def _complete(self, capture: Capture, number: int) -> None:
        slot = capture.slots[number]
        if slot is None:
            return
        payload = self._ring.payload(slot)
        witness = capture.witnesses.get(number)
        if witness is not None and digest(payload[witness.start :][: witness.length]) != witness.digest:
            raise TornCaptureError(_torn(capture, number, witness))
        name = digest(payload)
        self._ring.complete(slot, FrameDescriptor.identity(name, slot.length))
        capture.digests[number] = name
        self._stored(capture, number)

    def _give_up(self, capture: Capture, error: BaseException) -> None:
        with self._changed:
            if capture.error is None:
                capture.error = error
            # What was not released yet passes through the queues, too, and is counted there.
            self._release(None)
            capture.copied.set()
            self._changed.notify_all()

    def _take_witnesses(self, capture: Capture, deferred: Sequence[int]) -> None:
        if self._proof == "off":
            return
        chosen = deferred if self._proof == "full" else self._chance.sample(deferred, min(_WITNESSES, len(deferred)))
        for number in chosen:
            partition = capture.partitions[number]
            data = bytearray(partition.length if self._proof == "full" else 0)
            if data:
                copy_partition(partition, capture.state.leaves, memoryview(data))
                capture.witnesses[number] = _Witness(0, len(data), digest(data))
            else:
                capture.witnesses[number] = _sample(capture, partition, self._chance)

    def settle(self) -> None:
        """Release everything, so that what was begun is completed without another window or fence."""
        with self._changed:
            self._release(None)

    def close(self) -> None:
        """Complete what was begun, and end the thread."""
        self.fence()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()


def _sample(capture: Capture, partition: Partition, chance: random.Random) -> _Witness:
    """Digest a few KiB anywhere in the first piece of a partition."""
    piece = partition.pieces[0]
    length = min(_WITNESS_BYTES, piece.length)
    start = chance.randrange(piece.length - length + 1)
    data = bytearray(length)
    capture.state.leaves[piece.row].copy_bytes(piece.start + start, memoryview(data))
    return _Witness(start, length, digest(data))


def _torn(capture: Capture, number: int, witness: _Witness) -> str:
    names, position = [], 0
    for piece in capture.partitions[number].pieces:
        if position < witness.start + witness.length and witness.start < position + piece.length:
            names.append(capture.state.leaves[piece.row].name)
        position += piece.length
    return (
        f"tensor {', '.join(names[:3])} changed while step {capture.request.step} was being captured, so that this "
        "checkpoint was given up. Only optimizers may change parameters and their state between two calls of step(); "
        "what changes them otherwise must come before step(), or call fence() first"
    )
