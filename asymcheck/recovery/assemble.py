"""Assemble: partitions into tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from asymcheck.errors import StateMismatchError, StorageError
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.partition.dtypes import TORCH_DTYPES
from asymcheck.partition.leaves import as_bytes
from asymcheck.types import Digest


class Target:
    """One tensor to be filled, byte range by byte range, from worker threads."""

    def __init__(self, row: TensorRow, existing: Sequence[torch.Tensor], device: torch.device) -> None:
        """Fill ``existing`` tensors of the row's shape and dtype in place.

        Allocate one on ``device`` when there is none.
        """
        self.row = row
        self._existing = list(existing) or [allocate(row, device)]
        self.in_place = bool(existing)
        self.touched = False
        self._left = row.nbytes
        self._lock = threading.Lock()
        self._staged: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The filled tensor."""
        return self._existing[0]

    def put(self, start: int, data: memoryview) -> None:
        """Copy ``data`` to the bytes from ``start`` on."""
        with self._lock:
            self.touched = True
            if self._staged is None and any(not _is_plain(tensor) for tensor in self._existing):
                # A strided tensor cannot be filled by byte ranges: its bytes are gathered first.
                self._staged = torch.empty(self.row.nbytes, dtype=torch.uint8)
        flats = [self._staged] if self._staged is not None else [as_bytes(tensor.detach()) for tensor in self._existing]
        for flat in flats:
            _copy(flat[start : start + len(data)], data)
        with self._lock:
            self._left -= len(data)
            if self._left == 0 and self._staged is not None:
                whole = self._staged.view(TORCH_DTYPES[self.row.dtype]).reshape(self.row.shape)
                for tensor in self._existing:
                    tensor.detach().copy_(whole)
                self._staged = None


def allocate(row: TensorRow, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor for a row.

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
        return torch.empty(row.shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise StorageError(
            f"tensor {row.name} ({row.nbytes} bytes, {row.dtype} {list(row.shape)}) cannot be made on {device}: {error}"
        ) from error


class ByteTarget(Protocol):
    """What takes the bytes of one tensor."""

    @property
    def row(self) -> TensorRow:
        """The tensor, as the manifest has it."""

    def put(self, start: int, data: memoryview) -> None:
        """Take the bytes from ``start`` on; worker threads call this together, and ``data`` must not be kept."""


class Placement:
    """Where the bytes of every wanted partition go."""

    def __init__(self, targets: Iterable[ByteTarget]) -> None:
        """Prepare for ``targets`` to be filled."""
        self._targets = list(targets)
        self._places: dict[Digest, list[tuple[ByteTarget, int, int, int]]] = {}
        for target in self._targets:
            start = 0
            for extent in target.row.extents:
                self._places.setdefault(extent.digest, []).append((target, start, extent.offset, extent.length))
                start += extent.length

    @property
    def wanted(self) -> list[Digest]:
        """The partitions to fetch."""
        return list(self._places)

    @property
    def total_bytes(self) -> int:
        """Bytes that the targets take in all."""
        return sum(target.row.nbytes for target in self._targets)

    def put_inline(self) -> None:
        """Fill the tensors whose bytes lie in the manifest itself."""
        for target in self._targets:
            if target.row.inline:
                target.put(0, memoryview(target.row.inline))

    def put(self, name: Digest, data: memoryview) -> None:
        """Copy one partition's bytes to where they belong; worker threads call this together."""
        for target, start, offset, length in self._places[name]:
            target.put(start, data[offset : offset + length])


class Assembly(Placement):
    """Tensors to be filled with the bytes of rows of a manifest."""

    def __init__(
        self,
        manifest: Manifest,
        rows: Sequence[int],
        existing: Mapping[int, Sequence[torch.Tensor]],
        device: torch.device,
    ) -> None:
        """Prepare ``rows`` of a manifest; ``existing`` gives tensors to be filled in place, by row."""
        values = manifest.rows(rows)
        self.targets = {
            row: Target(value, existing.get(row, ()), device) for row, value in zip(rows, values, strict=True)
        }
        super().__init__(self.targets.values())

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the filled tensors by row."""
        return {row: target.tensor for row, target in self.targets.items()}

    def overwritten(self) -> list[str]:
        """Return the names of existing tensors that hold restored bytes, wholly or in part."""
        return [target.row.name for target in self.targets.values() if target.in_place and target.touched]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(flat: torch.Tensor, data: memoryview) -> None:
    source = np.frombuffer(data, dtype=np.uint8)
    if flat.device.type == "cpu":
        np.copyto(flat.numpy(), source)
    else:
        # A private copy: the slot is reused as soon as this returns, and the device copy may still run.
        flat.copy_(torch.from_numpy(source.copy()))
