"""Device copies: asynchronous copies from devices to the ring, ordered by the queues (streams) of each device.

A device executes operations later than the program queues them: when ``step()`` is called, the optimizer step may only
be queued. Therefore copies are ordered by marks in the queues. They wait for a mark after the optimizer step, or at the
start of a window. The next optimizer step waits for the last copy. The program itself waits for neither.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from asymcheck.state.leaves import Leaf, Source, equal_parts, stacked, stacks, whole_bytes
from asymcheck.state.partition_plan import Partition, Piece
from asymcheck.storage.gpu_staging import Link, Mark, Staging, StagingRegion, cuda_link

LinkOf = Callable[[Source], Link | None]
"""Return the link to the device of a tensor; None for tensors in host memory, which the program copies."""


def link_of(source: Source) -> Link | None:
    """Return the link of a tensor on a CUDA device. Tensors on other devices are copied at once."""
    # This is called for every tensor in each step, even without a device.
    if isinstance(source, torch.Tensor) and source.is_cuda:
        return cuda_link(source.device)
    return None


_ASIDE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Device:
    """A device and its staging buffers."""

    link: Link
    staging: Staging
    aside: Staging
    """Buffer for :class:`EagerCopies`. Without space in the buffer, the program waits for the device."""


Give = Callable[[bytes], None]
Leaves = Sequence[Leaf] | Mapping[int, Leaf]
"""Tensors by row."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Wanted:
    """Requested bytes on a device."""

    length: int
    compute: Callable[[], torch.Tensor]
    give: Give


class Devices:
    """All devices of a training."""

    def __init__(self, staging_bytes: int, find: LinkOf = link_of) -> None:
        """Reserve ``staging_bytes`` on each device at its first tensor."""
        self._staging_bytes = staging_bytes
        self._find = find
        self._devices: dict[Link, Device] = {}
        self.holds: deque[tuple[Mark, Mark]] = deque()
        """Marks before and after each unmeasured wait of a device for copies."""

    def held_s(self) -> float:
        """Return the seconds that devices have waited for copies, as measured since the last call."""
        seconds = 0.0
        # While a CUDA graph is recorded, each query is an error, and invalidates the graph.
        while self.holds and not any(link.is_recorded() for link in self._devices) and self.holds[0][1].passed():
            before, after = self.holds.popleft()
            seconds += after.seconds_after(before)
        return seconds

    def of_all(self, sources: Sequence[Source]) -> list[Device | None]:
        """Return the device of each tensor; None for host memory."""
        links = [*map(self._find, sources)]
        return [None if link is None else self._of(link, source) for link, source in zip(links, sources, strict=True)]

    def free(self) -> None:
        """Free the staging buffers."""
        for device in self._devices.values():
            device.staging.free()
            device.aside.free()

    def _of(self, link: Link, source: Source) -> Device:
        if link not in self._devices:
            assert isinstance(source, torch.Tensor)  # noqa: S101 - only tensors have links
            aside_bytes = min(_ASIDE_BYTES, self._staging_bytes // 4)
            self._devices[link] = Device(
                link, Staging(source.device, self._staging_bytes - aside_bytes), Staging(source.device, aside_bytes)
            )
        return self._devices[link]


class Transfers:
    """Copies of one capture, used by the training thread and the capture thread.

    ``leaves`` are the tensors, by row. Partitions are identified by their number in the plan.
    """

    def __init__(self, devices: Devices, leaves: Sequence[Leaf], partitions: Sequence[Partition]) -> None:
        self._leaves, self._partitions, self._holds = leaves, partitions, devices.holds
        self.device_of_row = devices.of_all([leaf.source for leaf in leaves])
        """Device of each tensor; None for host memory."""
        self._gates: dict[Device, Mark] = {}
        self._clone_gates: dict[Device, Mark] = {}
        self._last: dict[tuple[Device, int], Mark] = {}
        self._ends: dict[int, list[Mark]] = {}
        self._regions: dict[int, tuple[Device, StagingRegion]] = {}
        self._views: dict[int, torch.Tensor] = {}
        self.devices = tuple(dict.fromkeys(device for device in self.device_of_row if device is not None))
        """All devices with tensors of this capture."""

    def devices_of(self, number: int) -> list[Device | None]:
        """Return the distinct devices of the pieces of a partition; None stands for host memory."""
        return list({self.device_of_row[piece.row]: None for piece in self._partitions[number].pieces})

    def is_on_device(self, number: int) -> bool:
        """Tell whether a part of a partition is on a device."""
        return any(device is not None for device in self.devices_of(number))

    def is_staged(self, number: int) -> bool:
        """Tell whether a partition has been cloned into a staging buffer."""
        return number in self._regions

    def stage(self, number: int) -> bool:
        """Clone a partition on its device so that its source may change; return False without space for the clone.

        Pieces in host memory are included, if other pieces of the partition are on one device.
        """
        devices = [device for device in self.devices_of(number) if device is not None]
        if len(devices) != 1:
            return False
        (device,), partition = devices, self._partitions[number]
        region = device.staging.take(partition.length)
        if region is None:
            return False
        try:
            device.link.run(lambda: _gather(_views(self._leaves, partition.pieces), region.memory))
        except torch.cuda.OutOfMemoryError:
            # A strided tensor needs a contiguous copy first.
            device.staging.give_back(region)
            return False
        self._regions[number] = device, region
        return True

    def catch_up(self, number: int) -> None:
        """Wait until the devices have computed a partition, so that the program may read it."""
        for device in self.devices_of(number):
            if device is not None:
                device.link.mark().wait()

    def begin(self) -> None:
        """Order all copies after the operations that are queued now."""
        self.gate()
        for device, gate in self._gates.items():
            # Gates of windows may be in other streams of the training, which are not ordered with this point.
            device.link.queue(_nothing, gate)

    def gate(self) -> None:
        """Order later copies of tensors after the operations that are queued now."""
        self._gates = {device: device.link.mark() for device in self.devices}

    def gate_clones(self) -> None:
        """Order copies of clones after the clones, without effect on other copies."""
        self._clone_gates = {device: device.link.mark() for device in self.devices}

    @property
    def is_recorded(self) -> bool:
        """Tell whether a device records operations into a graph instead of executing them."""
        return any(device.link.is_recorded() for device in self.devices)

    def copy(self, number: int, payload: memoryview) -> None:
        """Queue the device copies of a partition, and copy its pieces in host memory."""
        ends = self._ends[number] = []
        if number in self._regions:
            device, region = self._regions[number]
            gate = self._clone_gates.get(device) or self._gates[device]
            ends.append(device.link.queue(partial(_fetch, region.memory, payload), gate))
            return
        partition = self._partitions[number]
        by_device: dict[Device, list[tuple[Piece, memoryview]]] = {}
        for piece, target in partition.parts(payload):
            device_of_piece = self.device_of_row[piece.row]
            if device_of_piece is None:
                self._leaves[piece.row].copy_bytes(piece.start, target)
            else:
                by_device.setdefault(device_of_piece, []).append((piece, target))
        for device, parts in by_device.items():
            work = partial(self._copy_pieces, parts)
            if len(parts) == len(partition.pieces) > 1 and (buffer := device.staging.take(len(payload))) is not None:
                # With space in the staging buffer, one copy replaces hundreds of small ones.
                self._regions[number] = device, buffer
                work = partial(self._gather_and_fetch, partition.pieces, buffer.memory, payload)
            try:
                mark = device.link.queue(work, self._gates[device])
            except BaseException:
                # A queued copy may still write to the slot.
                ends.append(device.link.queue(_nothing, self._gates[device]))
                raise
            # Both threads queue copies, but copies are ordered only within a thread.
            self._last[device, threading.get_ident()] = mark
            ends.append(mark)

    def _gather_and_fetch(self, pieces: Sequence[Piece], memory: torch.Tensor, payload: memoryview) -> None:
        _gather(_views(self._leaves, pieces), memory)
        _fetch(memory, payload)

    def _copy_pieces(self, parts: Sequence[tuple[Piece, memoryview]]) -> None:
        for piece, target in parts:
            _fetch(self._bytes_of(piece.row)[piece.start : piece.start + piece.length], target)

    def _bytes_of(self, row: int) -> torch.Tensor:
        """Return the bytes of a tensor on a device.

        The views of contiguous tensors are kept. Each operation of torch releases the GIL, and then waits for the
        training thread.
        """
        if (view := self._views.get(row)) is None:
            source, view = self._leaves[row].source, self._leaves[row].as_bytes()
            # A contiguous copy of a strided tensor belongs to the current stream, which frees its memory in order.
            if isinstance(source, torch.Tensor) and source.data_ptr() == view.data_ptr():
                self._views[row] = view
        return view

    def queue(self, device: Device, work: Callable[[], None]) -> Mark:
        """Queue a copy from a staging buffer."""
        return device.link.queue(work, self._gates[device])

    def hold(self) -> None:
        """Order later operations of the device after the queued copies of tensors."""
        by_device: dict[Device, list[Mark]] = {}
        # Copied, because the capture thread may still queue copies of a failed capture.
        for (device, _), mark in list(self._last.items()):
            by_device.setdefault(device, []).append(mark)
        for device, marks in by_device.items():
            before = device.link.mark()
            for mark in marks:
                device.link.hold(mark)
            self._holds.append((before, device.link.mark()))

    def have_passed(self, number: int) -> bool:
        """Tell whether all queued copies of a partition are done."""
        return all(mark.passed() for mark in self._ends.get(number, ()))

    def wait(self, number: int) -> None:
        """Wait for the queued copies of a partition, and free its part of the staging buffer."""
        try:
            for mark in self._ends.pop(number, ()):
                mark.wait()
        finally:
            if number in self._regions:
                device, region = self._regions.pop(number)
                device.staging.give_back(region)

    def drop(self) -> None:
        """Wait for all queued copies, and free the staging buffers and views."""
        for number in {*self._ends, *self._regions}:
            self.wait(number)
        self._views.clear()


class EagerCopies:
    """Reads small parts of tensors in their current state.

    Parts in host memory are read at once. Parts on a device are gathered in its staging buffer and fetched in one copy.
    """

    def __init__(self, transfers: Transfers, leaves: Sequence[Leaf]) -> None:
        """Start without requests; ``leaves`` are those of ``transfers``."""
        self._transfers, self._leaves = transfers, leaves
        self._wanted: dict[Device, list[_Wanted]] = {}
        self._regions: dict[Device, tuple[Staging, StagingRegion]] = {}
        self._fetched: list[tuple[Device, memoryview, Mark]] = []
        self.is_fetched = False
        """Whether :meth:`fetch` has queued all copies, so that :meth:`settle` delivers everything."""

    def want_computed(self, device: Device, length: int, compute: Callable[[], torch.Tensor], give: Give) -> None:
        """Request ``length`` bytes that ``compute`` returns as a uint8 tensor of a device, after its queued work."""
        self._wanted.setdefault(device, []).append(_Wanted(length, compute, give))

    def want_whole(self, rows: Iterable[int], give: Callable[[int, bytes], None]) -> None:
        """Request all bytes of tensors. ``give`` receives row and bytes, at once or in :meth:`settle`."""
        on_host: list[int] = []
        by_device: dict[Device, list[int]] = {}
        for row in rows:
            device = self._transfers.device_of_row[row]
            (on_host if device is None else by_device.setdefault(device, [])).append(row)
        for row, data in zip(on_host, whole_bytes([self._leaves[row] for row in on_host]), strict=True):
            give(row, data)
        for there, on_device in by_device.items():
            for alike in stacks(self._leaves, on_device):
                leaves = [self._leaves[row] for row in alike]
                length = sum(leaf.nbytes for leaf in leaves)
                self.want_computed(there, length, partial(stacked, leaves), partial(_give_each, give, alike))

    def gather(self) -> None:
        """Gather the requested parts on each device; without space in a buffer, wait and read directly."""
        for device, wanted in list(self._wanted.items()):
            length = sum(one.length for one in wanted)
            buffer, region = device.aside, device.aside.take(length)
            if region is None:
                buffer, region = device.staging, device.staging.take(length)
            if region is None:
                device.link.mark().wait()
                for one in self._wanted.pop(device):
                    one.give(one.compute().cpu().numpy().tobytes())
                continue
            self._regions[device] = buffer, region
            device.link.run(partial(_gather_computed, wanted, region.memory))

    def fetch(self, room: Callable[[int], memoryview]) -> None:
        """Queue the copies to host memory, which ``room`` allocates for each device."""
        for device, (_, region) in self._regions.items():
            target = room(len(region.memory))
            end = self._transfers.queue(device, partial(_fetch, region.memory, target))
            self._fetched.append((device, target, end))
        self.is_fetched = True

    def settle(self) -> None:
        """Wait for the copies, and deliver the requested bytes. May be called again."""
        while self._fetched:
            device, data, end = self._fetched.pop()
            end.wait()
            start = 0
            for one in self._wanted.pop(device):
                one.give(bytes(data[start : start + one.length]))
                start += one.length
            buffer, region = self._regions.pop(device)
            buffer.give_back(region)

    def drop(self) -> None:
        """Free buffers that were gathered but never fetched."""
        while self._regions:
            _, (buffer, region) = self._regions.popitem()
            buffer.give_back(region)


def _nothing() -> None:
    """Do nothing."""


def gathered(leaves: Leaves, pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the bytes of pieces of tensors on one device: a view of a single piece, otherwise a copy."""
    views = _views(leaves, pieces)
    return views[0] if len(views) == 1 else torch.cat(views)


def _views(leaves: Leaves, pieces: Iterable[Piece]) -> list[torch.Tensor]:
    return [leaves[piece.row].as_bytes()[piece.start : piece.start + piece.length] for piece in pieces]


def _give_each(give: Callable[[int, bytes], None], rows: Sequence[int], data: bytes) -> None:
    for row, part in zip(rows, equal_parts(data, len(rows)), strict=True):
        give(row, part)


def _gather_computed(wanted: Iterable[_Wanted], memory: torch.Tensor) -> None:
    _gather([one.compute() for one in wanted], memory)


def _gather(views: list[torch.Tensor], memory: torch.Tensor) -> None:
    """Copy uint8 tensors into contiguous memory of the device."""
    if all(view.device == memory.device for view in views):
        # One call replaces hundreds of small ones.
        torch.cat(views, out=memory)
        return
    start = 0
    for view in views:
        memory[start : start + len(view)].copy_(view)
        start += len(view)


def _fetch(memory: torch.Tensor, target: memoryview) -> None:
    """Queue a copy to host memory on the current stream."""
    if not len(target):
        # torch.frombuffer() refuses empty buffers.
        return
    torch.frombuffer(target, dtype=torch.uint8).copy_(memory, non_blocking=True)
