"""Assemble tensors from partitions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from asymcheck.errors import StateMismatchError, StorageError
from asymcheck.format.manifest import TensorRow
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.restore.partition_locator import PartitionLocator
from asymcheck.restore.read_plan import Demand, ReadPlan
from asymcheck.state.boxes import Region
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.state.leaves import FlatBytes, as_bytes, flat_bytes, on_host
from asymcheck.storage.gpu_staging import catch_up
from asymcheck.storage.pages import use_huge_pages
from asymcheck.types import Digest, readable_size

SHIFTED_MIN_BYTES = 1 << 20
"""Minimum size of a new tensor at a given address, which needs an additional block of memory."""

_EXTENTS_ASKED = 16
"""Number of extents of a tensor that vote on its address."""


class Target:
    """Tensor that worker threads fill, byte range by byte range."""

    def __init__(
        self,
        row: TensorRow,
        existing: Sequence[torch.Tensor],
        device: torch.device,
        *,
        in_runs: bool = True,
        shift: int | None = None,
    ) -> None:
        """Fill ``existing`` tensors of the row's shape and dtype in place, or a new tensor on ``device``.

        Without ``in_runs``, the bytes of a partition are not contiguous in the tensor.
        """
        self.row = row
        self._existing = list(existing) or [allocate(row, device, shift)]
        self.in_place = bool(existing)
        self.touched = False
        self.shares_memory = False  # with other tensors that are filled, or among its elements
        self._left = row.nbytes
        self._lock = threading.Lock()
        # Bytes for strided tensors, and for tensors on devices, are gathered first.
        self._gathers = any(
            not _is_plain(tensor) or (not in_runs and tensor.device.type != "cpu") for tensor in self._existing
        )
        self._flats: list[FlatBytes] = []
        self.is_direct = True  # whether the tier has read into the tensor whenever it was offered

    @property
    def tensor(self) -> torch.Tensor:
        """The filled tensor."""
        return self._existing[0]

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the tensors."""
        return {tensor.device for tensor in self._existing}

    def room(self, start: int, length: int) -> memoryview | None:
        """Return the memory of a byte range for a direct read, or None. The caller calls :meth:`count` afterwards."""
        if self.shares_memory or self._gathers or len(self._existing) > 1:
            return None
        flat = self._memory()[0]
        return flat[start : start + length].data if isinstance(flat, np.ndarray) else None

    def put(self, start: int, data: memoryview) -> None:
        """Copy ``data`` to the bytes from ``start`` on."""
        self.touched = True
        for flat in self._memory():
            _copy(flat[start : start + len(data)], data)
        self.count(len(data))

    def put_regions(self, regions: Iterable[Region], data: memoryview) -> None:
        """Copy regions of ``data`` into the tensor."""
        self.touched = True
        flats, done = self._memory(), 0
        for region in regions:
            for flat in flats:
                if region.is_run:
                    count = region.nbytes
                    _copy(flat[region.target : region.target + count], data[region.source : region.source + count])
                elif isinstance(flat, np.ndarray):
                    region.copy(data, flat)
            done += region.nbytes
        self.count(done)

    def _memory(self) -> list[FlatBytes]:
        """Return the memory that receives bytes: that of the tensors, or of a copy in which bytes are gathered."""
        with self._lock:
            if self._gathers and not self._flats:
                self._flats = [np.empty(self.row.nbytes, dtype=np.uint8)]
            elif not self._flats:
                self._flats = [on_host(as_bytes(tensor.detach())) for tensor in self._existing]
            return self._flats

    def count(self, done: int) -> None:
        """Note that ``done`` more bytes are in place; the last ones complete the tensor."""
        with self._lock:
            self._left -= done
            if self._left == 0 and self._gathers and self._flats:
                gathered = torch.as_tensor(self._flats[0], device="cpu")
                whole = gathered.view(TORCH_DTYPES[self.row.dtype]).reshape(self.row.shape)
                for tensor in self._existing:
                    tensor.detach().copy_(whole)
                # The copy into a strided tensor may still be queued in this thread's stream, which no other waits for.
                catch_up(self.devices)
                self._flats = []


def allocate(row: TensorRow, device: torch.device, shift: int | None = None) -> torch.Tensor:
    """Return an uninitialised tensor for a row, in host memory at an address congruent to ``shift`` modulo a block.

    Raises:
        StateMismatchError: this version of torch lacks the dtype.
        StorageError: torch cannot allocate the tensor, for instance because ``device`` has too little memory.
    """
    dtype = TORCH_DTYPES.get(row.dtype)
    if dtype is None:
        raise StateMismatchError(
            f"tensor {row.name} has dtype {row.dtype}, which torch {torch.__version__} lacks: install a newer torch"
        )
    try:
        tensor = torch.empty(row.shape, dtype=dtype, device=device)
        if shift is not None and tensor.device.type == "cpu" and (tensor.data_ptr() - shift) % BLOCK_BYTES:
            del tensor
            tensor = _allocate_shifted(row, dtype, shift)
    except (RuntimeError, AssertionError, ImportError) as error:
        # torch raises the latter two for a device for which it was not built.
        raise StorageError(
            f"tensor {row.name} ({readable_size(row.nbytes)}, {row.dtype} {list(row.shape)}) cannot be "
            f"allocated on {device}: {error}"
        ) from error
    if tensor.device.type == "cpu":
        # Filling reused memory takes a quarter of the CPU time (measured for 150 MB), because page faults of new
        # memory are expensive in a virtual machine.
        use_huge_pages(tensor.data_ptr(), row.nbytes)
    return tensor


def _allocate_shifted(row: TensorRow, dtype: torch.dtype, shift: int) -> torch.Tensor:
    """Return an uninitialised tensor in host memory whose address is congruent to ``shift`` modulo a block.

    Its storage is a block larger. The elements are at multiples of their size for every shift.
    """
    memory = torch.empty(row.nbytes + BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    start = (shift - memory.data_ptr()) % BLOCK_BYTES
    if start % dtype.itemsize:
        return torch.empty(row.shape, dtype=dtype, device="cpu")
    # Not a view, which would behave differently with autograd.
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    strides = torch.empty(row.shape, device="meta").stride()
    return tensor.set_(memory.untyped_storage(), start // dtype.itemsize, row.shape, strides)


class Assembly(ReadPlan):
    """Tensors that are filled from stored parts."""

    def __init__(
        self, demands: Iterable[Demand], device: torch.device, sources: PartitionLocator | None = None
    ) -> None:
        """Prepare tensors; missing ones are allocated on ``device``.

        With ``sources``, partitions may be read into the memory of tensors before they are verified.
        """
        self._sources = sources
        self._filled = {
            demand: Target(
                demand.row,
                demand.existing,
                device,
                in_runs=demand.in_runs,
                shift=None if demand.existing else self._shift_of(demand.row, device),
            )
            for demand in demands
        }
        existing = [(tensor, demand) for demand in self._filled for tensor in demand.existing]
        # Existing tensors that may share memory, with their demands.
        self.overlapping = [existing[number] for number in overlapping([tensor for tensor, _ in existing])]
        for _, demand in self.overlapping:
            self._filled[demand].shares_memory = True
        self._direct: dict[Digest, tuple[Target, memoryview]] = {}
        # Other threads fill new tensors in other streams, so pending reads of freed memory must end first.
        catch_up(device for target in self._filled.values() for device in target.devices)
        super().__init__(self._filled)

    def tensor(self, demand: Demand) -> torch.Tensor:
        """Return the filled tensor."""
        return self._filled[demand].tensor

    def _shift_of(self, row: TensorRow, device: torch.device) -> int | None:
        """Return the address, modulo a block, for direct reads into a new tensor; None for any address."""
        if self._sources is None or device.type != "cpu" or row.nbytes < SHIFTED_MIN_BYTES or not row.extents:
            return None
        # A partition that was encoded on trial, but stored plain, was not written from the memory of a tensor.
        some = row.extents[:: -(-len(row.extents) // _EXTENTS_ASKED)]
        shifts = Counter(self._sources.direct_shift(extent.digest, extent.length) for extent in some)
        return shifts.most_common(1)[0][0]

    def room(self, name: Digest) -> memoryview | None:
        """Return memory for a partition that one tensor needs as a whole, without shared memory.

        A plain partition is read there directly. An encoded one is only decoded into a new tensor, so that a damaged
        payload overwrites nothing.
        """
        fill, *more = self.fills[name]
        if self._sources is None or more or fill.crossing is not None or not isinstance(fill.target, Target):
            return None
        target, shift = fill.target, self._sources.direct_shift(name, fill.length)
        is_wanted = not target.in_place if shift is None else target.is_direct
        memory = target.room(fill.start, fill.length) if is_wanted else None
        if memory is None or shift not in (None, np.frombuffer(memory, dtype=np.uint8).ctypes.data % BLOCK_BYTES):
            return None
        target.touched = True
        self._direct[name] = target, memory
        return memory

    def put(self, name: Digest, data: memoryview) -> None:
        """Copy the bytes of a partition into its tensors, unless they were read directly."""
        target, memory = self._direct.pop(name, (None, None))
        if target is not None and memory is data:
            target.count(len(data))
            return
        if target is not None:
            # The tier would refuse the memory of the whole tensor, and each question takes time.
            target.is_direct = False
        super().put(name, data)

    def overwritten(self) -> list[str]:
        """Return the names of existing tensors that were overwritten at least in part."""
        return [target.row.name for target in self._filled.values() if target.in_place and target.touched]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(flat: FlatBytes, data: memoryview) -> None:
    source = np.frombuffer(data, dtype=np.uint8)
    if isinstance(flat, np.ndarray):
        np.copyto(flat, source)
    else:
        # The copy has ended on return. torch refuses read-only memory.
        flat.copy_(torch.from_numpy(source.copy() if data.readonly else source))


def overlapping(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the ascending positions of tensors that may share memory with another one, or among their elements.

    Compared by the range from the first byte to the last one, so interleaved slices count as well.
    """
    stretches = sorted(
        (str(tensor.device), *_stretch(tensor), number) for number, tensor in enumerate(tensors) if tensor.numel()
    )
    overlapping = {number for *_, number in stretches if _may_overlap_itself(tensors[number])}
    widest: tuple[str, int, int] | None = None
    """Tensor with the furthest end so far, which overlaps everything that any earlier tensor overlaps."""
    for device, start, end, number in stretches:
        if widest is not None and widest[0] == device and start < widest[1]:
            overlapping |= {number, widest[2]}
        if widest is None or widest[0] != device or end > widest[1]:
            widest = device, end, number
    return sorted(overlapping)


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor may share memory, as those of sliding windows do."""
    if tensor.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def holds(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two tensors of equal dtype and shape have equal bytes."""
    return torch.equal(flat_bytes(tensor), flat_bytes(expected).to(tensor.device))
