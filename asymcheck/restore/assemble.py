"""Assemble: partitions into tensors."""

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
from asymcheck.state.leaves import as_bytes
from asymcheck.storage.gpu_staging import catch_up
from asymcheck.storage.pages import use_huge_pages
from asymcheck.types import Digest

_SHIFTED_MIN_BYTES = 1 << 20
"""New tensors of fewer bytes are not made at a certain address, which takes a block of memory more."""

_EXTENTS_ASKED = 16
"""Extents of a tensor that are asked for the address that most of them want."""


class Target:
    """One tensor to be filled, byte range by byte range, from worker threads."""

    def __init__(
        self,
        row: TensorRow,
        existing: Sequence[torch.Tensor],
        device: torch.device,
        *,
        in_runs: bool = True,
        shift: int | None = None,
    ) -> None:
        """Fill ``existing`` tensors of the row's shape and dtype in place.

        Allocate one on ``device`` when there is none, as :func:`allocate` does. Without ``in_runs``, bytes come that
        lie apart in it.
        """
        self.row = row
        self._existing = list(existing) or [allocate(row, device, shift)]
        self.in_place = bool(existing)
        self.touched = False
        self.shares_memory = False
        """Whether other tensors are filled that share some of its memory."""
        self._left = row.nbytes
        self._lock = threading.Lock()
        # What is strided, or not in host memory, cannot be filled in bits and pieces: its bytes are gathered first.
        self._gathers = any(
            not _is_plain(tensor) or (not in_runs and tensor.device.type != "cpu") for tensor in self._existing
        )
        self._staged: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The filled tensor."""
        return self._existing[0]

    @property
    def devices(self) -> set[torch.device]:
        """Where the tensors to be filled lie."""
        return {tensor.device for tensor in self._existing}

    def room(self, start: int, length: int) -> memoryview | None:
        """Return the memory of some bytes, to be filled by others who :meth:`count`; None if they cannot lie there."""
        if self.shares_memory or self._gathers or len(self._existing) > 1 or self.tensor.device.type != "cpu":
            return None
        return as_bytes(self.tensor.detach())[start : start + length].numpy().data

    def put(self, start: int, data: memoryview) -> None:
        """Copy ``data`` to the bytes from ``start`` on."""
        for flat in self._flats():
            _copy(flat[start : start + len(data)], data)
        self.count(len(data))

    def put_regions(self, regions: Iterable[Region], data: memoryview) -> None:
        """Copy regions of ``data`` to where they say."""
        flats, done = self._flats(), 0
        for region in regions:
            for flat in flats:
                if region.is_run:
                    count = region.nbytes
                    _copy(flat[region.target : region.target + count], data[region.source : region.source + count])
                else:
                    region.copy(data, flat.numpy())
            done += region.nbytes
        self.count(done)

    def _flats(self) -> list[torch.Tensor]:
        with self._lock:
            self.touched = True
            if not self._gathers:
                return [as_bytes(tensor.detach()) for tensor in self._existing]
            if self._staged is None:
                self._staged = torch.empty(self.row.nbytes, dtype=torch.uint8, device="cpu")
            return [self._staged]

    def count(self, done: int) -> None:
        """Take note that ``done`` bytes are in place; the last of them complete the tensor."""
        with self._lock:
            self._left -= done
            if self._left == 0 and self._staged is not None:
                whole = self._staged.view(TORCH_DTYPES[self.row.dtype]).reshape(self.row.shape)
                for tensor in self._existing:
                    tensor.detach().copy_(whole)
                self._staged = None


def allocate(row: TensorRow, device: torch.device, shift: int | None = None) -> torch.Tensor:
    """Return an uninitialised tensor for a row, in host memory at an address congruent to ``shift`` modulo a block.

    Raises:
        StateMismatchError: this torch has no such dtype.
        StorageError: torch refused to make it; it may be too large for the memory of ``device``.
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
        # The latter two are what torch says of a device for which it was not built.
        raise StorageError(
            f"tensor {row.name} ({row.nbytes} bytes, {row.dtype} {list(row.shape)}) cannot be made on {device}: {error}"
        ) from error
    if tensor.device.type == "cpu":
        # Nobody has touched it yet. Measured: 150 MB are filled in a quarter of the processor time, of memory that was
        # in use before; a virtual machine pays for memory that it touches for the first time, in pages of any size.
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
    # Not a view, which would behave otherwise where gradients are computed.
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    strides = torch.empty(row.shape, device="meta").stride()
    return tensor.set_(memory.untyped_storage(), start // dtype.itemsize, row.shape, strides)


class Assembly(ReadPlan):
    """Tensors to be filled with the bytes of stored parts."""

    def __init__(
        self, demands: Iterable[Demand], device: torch.device, sources: PartitionLocator | None = None
    ) -> None:
        """Prepare what is wanted; tensors that do not exist are made on ``device``.

        With ``sources``, partitions may be read from there into the memory of tensors before they are checked.
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
        self.overlapping = [existing[number] for number in overlapping([tensor for tensor, _ in existing])]
        """Existing tensors that share some of their memory, with what is wanted for them."""
        for _, demand in self.overlapping:
            self._filled[demand].shares_memory = True
        self._direct: dict[Digest, tuple[Target, memoryview]] = {}
        # What is made may lie where the device still reads what was freed: other threads fill it, in queues of theirs.
        catch_up(device for target in self._filled.values() for device in target.devices)
        super().__init__(self._filled)

    def tensor(self, demand: Demand) -> torch.Tensor:
        """Return the filled tensor."""
        return self._filled[demand].tensor

    def _shift_of(self, row: TensorRow, device: torch.device) -> int | None:
        """Return the address modulo a block that allows direct reads into a new tensor; None if any address will do."""
        if self._sources is None or device.type != "cpu" or row.nbytes < _SHIFTED_MIN_BYTES or not row.extents:
            return None
        # What was encoded on trial, and stored plain after all, was not written from the tensor's memory.
        some = row.extents[:: -(-len(row.extents) // _EXTENTS_ASKED)]
        shifts = Counter(self._sources.direct_shift(extent.digest, extent.length) for extent in some)
        return shifts.most_common(1)[0][0]

    def room(self, name: Digest) -> memoryview | None:
        """Return memory for a partition that is wanted once, as a whole, by a tensor that shares no memory."""
        fill, *others = self.fills[name]
        if self._sources is None or others or fill.crossing is not None or not isinstance(fill.target, Target):
            return None
        target = fill.target
        shift = self._sources.direct_shift(name, fill.length)
        memory = target.room(fill.start, fill.length) if shift is not None else None
        if memory is None or shift != np.frombuffer(memory, dtype=np.uint8).ctypes.data % BLOCK_BYTES:
            return None
        target.touched = True
        self._direct[name] = target, memory
        return memory

    def put(self, name: Digest, data: memoryview) -> None:
        """Copy one partition's bytes to where they belong, unless they are there."""
        target, memory = self._direct.pop(name, (None, None))
        if target is not None and memory is data:
            target.count(len(data))
        else:
            super().put(name, data)

    def overwritten(self) -> list[str]:
        """Return the names of existing tensors that hold restored bytes, wholly or in part."""
        return [target.row.name for target in self._filled.values() if target.in_place and target.touched]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(flat: torch.Tensor, data: memoryview) -> None:
    source = np.frombuffer(data, dtype=np.uint8)
    if flat.device.type == "cpu":
        np.copyto(flat.numpy(), source)
    else:
        # It has been read when this returns. torch takes no memory that may not be written to.
        flat.copy_(torch.from_numpy(source.copy() if data.readonly else source))


def overlapping(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of those that may share memory with another of them, in ascending order.

    Judged by the stretch from the first byte to the last: slices that lie between each other count, too.
    """
    stretches = sorted((str(one.device), *_stretch(one), number) for number, one in enumerate(tensors) if one.numel())
    found: set[int] = set()
    widest: tuple[str, int, int] | None = None
    """Of those so far the one that reaches furthest: what overlaps any of them overlaps it."""
    for device, start, end, number in stretches:
        if widest is not None and widest[0] == device and start < widest[1]:
            found |= {number, widest[2]}
        if widest is None or widest[0] != device or end > widest[1]:
            widest = device, end, number
    return sorted(found)


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def holds(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether a tensor has the bytes of another one of its dtype and shape."""
    return torch.equal(_bytes(tensor), _bytes(expected).to(tensor.device))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
