"""Transfers: the copies of one capture that a device carries out by itself, in the order of its queues.

A device works behind the program: when ``step()`` is called, the optimizer step may only be queued. Therefore copies
are not timed but ordered. They wait, on the device, for a mark that was set after the optimizer step (or, later, when a
window begins). The next optimizer step waits, on the device, for the last copy. The program itself waits for neither.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from asymcheck.state.leaves import Leaf, Source, whole_bytes
from asymcheck.state.partition_plan import Partition, Piece
from asymcheck.storage.gpu_staging import Link, Mark, Staging, StagingRegion, cuda_link

LinkOf = Callable[[Source], Link | None]
"""Says by which link the bytes of a tensor come; None for those in host memory, which the program copies itself."""


def link_of(source: Source) -> Link | None:
    """Return the link of a tensor on a CUDA device. Tensors on other devices are copied at once."""
    # Asked of every tensor in each step, where there is no such device, too.
    if isinstance(source, torch.Tensor) and source.is_cuda:
        return cuda_link(source.device)
    return None


_ASIDE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceQueue:
    """One device, and the buffers in its memory."""

    link: Link
    staging: Staging
    aside: Staging
    """For :class:`EagerCopies` alone: where they have no room, the program waits for the device."""


Give = Callable[[bytes], None]


class DeviceQueues:
    """The devices that a training uses."""

    def __init__(self, staging_bytes: int, find: LinkOf = link_of) -> None:
        """Take ``staging_bytes`` of each device when its first tensor is met."""
        self._staging_bytes = staging_bytes
        self._find = find
        self._lanes: dict[Link, DeviceQueue] = {}
        self.holds: deque[tuple[Mark, Mark]] = deque()
        """Before and after each point at which a device is to wait for copies, of which nothing is known yet."""

    def held_s(self) -> float:
        """Return how long devices have waited for copies, as far as that has become known since the last call."""
        seconds = 0.0
        while self.holds and self.holds[0][1].passed():
            before, after = self.holds.popleft()
            seconds += after.seconds_after(before)
        return seconds

    def of_all(self, sources: Sequence[Source]) -> list[DeviceQueue | None]:
        """Return the lane of each tensor; None for host memory."""
        links = [*map(self._find, sources)]
        return [None if link is None else self._of(link, source) for link, source in zip(links, sources, strict=True)]

    def _of(self, link: Link, source: Source) -> DeviceQueue:
        if link not in self._lanes:
            assert isinstance(source, torch.Tensor)  # noqa: S101 - only those have links; for mypy
            aside_bytes = min(_ASIDE_BYTES, self._staging_bytes // 4)
            self._lanes[link] = DeviceQueue(
                link, Staging(source.device, self._staging_bytes - aside_bytes), Staging(source.device, aside_bytes)
            )
        return self._lanes[link]


class Transfers:
    """The copies of one capture. The training thread and the capture thread call it, and copy at once.

    ``leaves`` are the tensors, by row; partitions are named by their pieces and their number in the plan.
    """

    def __init__(self, lanes: DeviceQueues, leaves: Sequence[Leaf], partitions: Sequence[Partition]) -> None:
        """Find out which device has what."""
        self._leaves = leaves
        self._partitions = partitions
        self._holds = lanes.holds
        self._lane_of = lanes.of_all([leaf.source for leaf in leaves])
        self._gates: dict[DeviceQueue, Mark] = {}
        self._clone_gates: dict[DeviceQueue, Mark] = {}
        self._last: dict[tuple[DeviceQueue, int], Mark] = {}
        self._ends: dict[int, list[Mark]] = {}
        self._regions: dict[int, tuple[DeviceQueue, StagingRegion]] = {}
        self.lanes = tuple(dict.fromkeys(lane for lane in self._lane_of if lane is not None))
        """Every device that has a tensor of this capture."""

    def lane_of(self, row: int) -> DeviceQueue | None:
        """The device that has a tensor; None for host memory."""
        return self._lane_of[row]

    def is_on_device(self, number: int) -> bool:
        """Tell whether a device has some of a partition."""
        return any(self._lane_of[piece.row] is not None for piece in self._partitions[number].pieces)

    def is_staged(self, number: int) -> bool:
        """Tell whether a partition has been cloned into a staging buffer."""
        return number in self._regions

    def stage(self, number: int) -> bool:
        """Clone a partition as it is now, on the device, so that its source may change; return whether there was room.

        Pieces in host memory are included, if other pieces of the partition are on one device.
        """
        partition = self._partitions[number]
        lanes = {lane for piece in partition.pieces if (lane := self._lane_of[piece.row]) is not None}
        if len(lanes) != 1:
            return False
        lane = lanes.pop()
        region = lane.staging.take(partition.length)
        if region is None:
            return False
        try:
            lane.link.run(partial(_gather, self._leaves, partition.pieces, region.memory))
        except torch.cuda.OutOfMemoryError:
            # A strided tensor needs a contiguous copy of itself for that.
            lane.staging.give_back(region)
            return False
        self._regions[number] = lane, region
        return True

    def catch_up(self, numbers: Iterable[int]) -> None:
        """Wait until devices have done what they were asked to do with partitions: the program may read them then."""
        rows = (piece.row for number in numbers for piece in self._partitions[number].pieces)
        for lane in {self._lane_of[row] for row in rows}:
            if lane is not None:
                lane.link.mark().wait()

    def begin(self) -> None:
        """Let all copies wait for what the device has been asked to do until now."""
        self.gate()
        for lane, gate in self._gates.items():
            # The gates of windows may lie in other queues of the training, which know nothing of this point.
            lane.link.queue(_nothing, gate)

    def gate(self) -> None:
        """Let copies of tensors that are queued from now on wait for what the device has been asked to do until now."""
        self._gates = {lane: lane.link.mark() for lane in self.lanes}

    def gate_clones(self) -> None:
        """Let copies of what has been staged wait for that, and no other ones."""
        self._clone_gates = {lane: lane.link.mark() for lane in self.lanes}

    @property
    def is_recorded(self) -> bool:
        """Tell whether what a device is asked to do now is only recorded, to be done later."""
        return any(lane.link.is_recorded() for lane in self.lanes)

    def copy(self, number: int, payload: memoryview) -> None:
        """Queue the copies of a partition; those of pieces in host memory are done when this returns."""
        ends = self._ends[number] = []
        if number in self._regions:
            lane, region = self._regions[number]
            gate = self._clone_gates.get(lane) or self._gates[lane]
            ends.append(lane.link.queue(partial(_fetch, region.memory, payload), gate))
            return
        position = 0
        by_lane: dict[DeviceQueue, list[tuple[Piece, memoryview]]] = {}
        for piece in self._partitions[number].pieces:
            target = payload[position : position + piece.length]
            position += piece.length
            lane_of_row = self._lane_of[piece.row]
            if lane_of_row is None:
                self._leaves[piece.row].copy_bytes(piece.start, target)
            else:
                by_lane.setdefault(lane_of_row, []).append((piece, target))
        for lane, parts in by_lane.items():
            is_whole = sum(piece.length for piece, _ in parts) == len(payload)
            work = self._work(number, lane, parts, payload if is_whole else None)
            try:
                mark = lane.link.queue(work, self._gates[lane])
            except BaseException:
                # Some of it may be under way: until then its place in the ring is not free.
                ends.append(lane.link.queue(_nothing, self._gates[lane]))
                raise
            # The training thread and the capture thread both come here, and only those of one thread are in order.
            self._last[lane, threading.get_ident()] = mark
            ends.append(mark)

    def _work(
        self, number: int, lane: DeviceQueue, parts: Sequence[tuple[Piece, memoryview]], payload: memoryview | None
    ) -> Callable[[], None]:
        """Return what brings pieces from a device to their places, which make up ``payload`` if that is given."""
        if payload is not None and len(parts) > 1:
            # One copy instead of hundreds of small ones, if the buffer has room for them side by side.
            region = lane.staging.take(len(payload))
            if region is not None:
                self._regions[number] = lane, region
                return partial(self._gather_and_fetch, [piece for piece, _ in parts], region.memory, payload)
        return partial(self._bring, parts)

    def _gather_and_fetch(self, pieces: Sequence[Piece], memory: torch.Tensor, payload: memoryview) -> None:
        _gather(self._leaves, pieces, memory)
        _fetch(memory, payload)

    def _bring(self, parts: Sequence[tuple[Piece, memoryview]]) -> None:
        for piece, target in parts:
            self._leaves[piece.row].copy_bytes(piece.start, target, wait=False)

    def queue(self, lane: DeviceQueue, work: Callable[[], None]) -> Mark:
        """Queue a copy that reads no tensor of the state."""
        return lane.link.queue(work, self._gates[lane])

    def hold(self) -> None:
        """Let what the device is asked to do from now on wait for the copies of tensors that were queued."""
        by_lane: dict[DeviceQueue, list[Mark]] = {}
        # A copy of the list: of a capture that was given up the other thread may still be queueing copies.
        for (lane, _), mark in list(self._last.items()):
            by_lane.setdefault(lane, []).append(mark)
        for lane, marks in by_lane.items():
            before = lane.link.mark()
            for mark in marks:
                lane.link.hold(mark)
            self._holds.append((before, lane.link.mark()))

    def have_passed(self, number: int) -> bool:
        """Tell whether the copies of a partition, if any was queued, are done."""
        return all(mark.passed() for mark in self._ends.get(number, ()))

    def wait(self, number: int) -> None:
        """Return when the copies of a partition, if any was queued, are done; free its part of the staging buffer."""
        try:
            for mark in self._ends.pop(number, ()):
                mark.wait()
        finally:
            if number in self._regions:
                lane, region = self._regions.pop(number)
                lane.staging.give_back(region)

    def drop(self) -> None:
        """Wait for what was queued, and free what is still taken of the staging buffers."""
        for number in {*self._ends, *self._regions}:
            self.wait(number)


class EagerCopies:
    """Small parts of tensors, as they are now: those in host memory are read at once.

    Those on a device are gathered in its staging buffer, and fetched together in one copy.
    """

    def __init__(self, transfers: Transfers, leaves: Sequence[Leaf]) -> None:
        """Begin with none; ``leaves`` are those of ``transfers``."""
        self._transfers, self._leaves = transfers, leaves
        self._wanted: dict[DeviceQueue, list[tuple[Piece, Give]]] = {}
        self._regions: dict[DeviceQueue, tuple[Staging, StagingRegion]] = {}
        self._fetched: list[tuple[DeviceQueue, memoryview, Mark]] = []

    def want(self, row: int, start: int, length: int, give: Give) -> None:
        """Ask for some bytes of a tensor; ``give`` gets them, at once or in :meth:`settle`."""
        lane = self._transfers.lane_of(row)
        if lane is None:
            self._read(Piece(row, start, length), give)
        else:
            self._wanted.setdefault(lane, []).append((Piece(row, start, length), give))

    def want_whole(self, rows: Iterable[int], give: Callable[[int, bytes], None]) -> None:
        """Ask for all bytes of some tensors, likewise; ``give`` gets the row, too."""
        here: list[int] = []
        for row in rows:
            if self._transfers.lane_of(row) is None:
                here.append(row)
            else:
                self.want(row, 0, self._leaves[row].nbytes, partial(give, row))
        for row, data in zip(here, whole_bytes([self._leaves[row] for row in here]), strict=True):
            give(row, data)

    def _read(self, piece: Piece, give: Give) -> None:
        give(self._leaves[piece.row].some_bytes(piece.start, piece.length))

    def gather(self) -> None:
        """Gather what was asked for; where the staging buffer has no room for it, the program waits and reads it."""
        for lane, wanted in list(self._wanted.items()):
            pieces = [piece for piece, _ in wanted]
            length = sum(piece.length for piece in pieces)
            buffer, region = lane.aside, lane.aside.take(length)
            if region is None:
                buffer, region = lane.staging, lane.staging.take(length)
            if region is None:
                lane.link.mark().wait()
                for piece, give in self._wanted.pop(lane):
                    self._read(piece, give)
                continue
            self._regions[lane] = buffer, region
            lane.link.run(partial(_gather, self._leaves, pieces, region.memory))

    def fetch(self, room: Callable[[int], memoryview]) -> None:
        """Queue the copies to host memory, which ``room`` gives: so many bytes for each device."""
        # A copy of the list: to make room for one, those before may be settled.
        for lane, (_, region) in list(self._regions.items()):
            target = room(len(region.memory))
            self._fetched.append((lane, target, self._transfers.queue(lane, partial(_fetch, region.memory, target))))

    def settle(self) -> None:
        """Wait for the copies, and hand out what was asked for. It may be called again."""
        while self._fetched:
            lane, data, end = self._fetched.pop()
            end.wait()
            start = 0
            for piece, give in self._wanted.pop(lane):
                give(bytes(data[start : start + piece.length]))
                start += piece.length
            buffer, region = self._regions.pop(lane)
            buffer.give_back(region)

    def drop(self) -> None:
        """Free what was gathered and never fetched."""
        while self._regions:
            _, (buffer, region) = self._regions.popitem()
            buffer.give_back(region)


def _nothing() -> None:
    """Nothing, in its turn."""


def _gather(leaves: Sequence[Leaf], pieces: Iterable[Piece], memory: torch.Tensor) -> None:
    """Copy pieces of tensors one after another into memory of the device."""
    views = [leaves[piece.row].as_bytes()[piece.start : piece.start + piece.length] for piece in pieces]
    if all(view.device == memory.device for view in views):
        # One call for hundreds of small ones.
        torch.cat(views, out=memory)
        return
    start = 0
    for view in views:
        memory[start : start + len(view)].copy_(view)
        start += len(view)


def _fetch(memory: torch.Tensor, target: memoryview) -> None:
    if not len(target):
        # torch makes no tensor of no bytes.
        return
    torch.frombuffer(target, dtype=torch.uint8).copy_(memory, non_blocking=True)
