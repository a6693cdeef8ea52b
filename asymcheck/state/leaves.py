"""Leaves: tensors of a state, and access to their bytes."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from asymcheck.errors import UnsupportedValueError
from asymcheck.executor import share
from asymcheck.format.digest import digest
from asymcheck.format.manifest_reader import DIMENSIONS_MAX
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.state.boxes import Box
from asymcheck.state.dtypes import TORCH_NAMES
from asymcheck.state.names import role_of
from asymcheck.state.numpy_dtypes import numpy_name
from asymcheck.state.partition_plan import Partition, Piece
from asymcheck.types import Digest


class TensorBytes(abc.ABC):
    """Tensor that is not in memory. Its bytes are read during the capture, for instance from a file."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Describe a tensor by the format's name of its dtype, and its shape."""
        self.dtype, self.shape = dtype, shape

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @abc.abstractmethod
    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``start`` on, in row-major order. Thread-safe."""


# Guards contiguous copies of strided tensors, of which threads share one.
_LOCKS = tuple(threading.Lock() for _ in range(16))

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of plain tensors. Subclasses may need more than their bytes."""

_STACKED = frozenset({"float32", "float64", "float16", "bfloat16", "int64", "int32", "bool"})
"""Dtypes of optimizer counters. Not every version of torch can stack tensors of other dtypes."""

_THREADS_MAX = 8
"""Number of threads that saturates the memory bandwidth of most machines."""
_BYTES_FOR_A_THREAD = 8 << 20
"""Bytes for which the start of another thread pays off."""

Source = torch.Tensor | np.ndarray | TensorBytes
FlatBytes = torch.Tensor | npt.NDArray[np.uint8]
"""Bytes of a tensor in row-major order: an array, unless they are on a device."""


@dataclasses.dataclass(slots=True)
class Leaf:
    """Tensor of a state, with all its names.

    Each step creates a leaf per tensor, which lives until the capture is durable. Many new objects trigger Python's
    garbage collector, which takes hundreds of milliseconds. Therefore leaves have slots, shared tuples, and no lock.
    """

    source: Source  # the tensor, whose bytes are read during the capture
    name: str  # dotted name of the first occurrence in the state
    dtype: str
    shape: tuple[int, ...]
    nbytes: int  # bytes of all elements
    group: str  # only tensors of the same group are bundled
    box: Box  # box in the whole tensor over all ranks
    aliases: tuple[str, ...] = ()  # further names
    key: tuple[object, ...] | None = None  # see :func:`identity_key`
    _flat: FlatBytes | None = None

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def role(self) -> str:
        """The role of the tensor, from its name."""
        return role_of(self.name)

    def copy_bytes(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``start`` on. Releases the GIL for large copies."""
        source = self.source
        if not isinstance(source, (torch.Tensor, np.ndarray)):
            source.read(start, target)
            return
        flat = self._bytes(source)[start : start + len(target)]
        if isinstance(flat, np.ndarray):
            # numpy calls memcpy once. torch would use a thread pool that competes with the training thread.
            np.copyto(np.frombuffer(target, dtype=np.uint8), flat)
        else:
            torch.frombuffer(target, dtype=torch.uint8).copy_(flat)

    def some_bytes(self, start: int, length: int) -> bytes:
        """Return a copy of a byte range."""
        data = bytearray(length)
        if data:
            self.copy_bytes(start, memoryview(data))
        return bytes(data)

    def bytes_in_place(self, start: int, length: int) -> memoryview | None:
        """Return the bytes without a copy; None unless they are in host memory in row-major order."""
        source = self.source
        if isinstance(source, np.ndarray):
            # flat_bytes() copies read-only arrays, because torch takes only writable memory.
            plain = source.flags.c_contiguous and source.flags.writeable
        elif isinstance(source, torch.Tensor):
            flags = source.is_conj() or source.is_neg()
            plain = source.device.type == "cpu" and source.is_contiguous() and not flags
        else:
            return None
        return flat_bytes(source)[start : start + length].numpy().data if plain else None

    def as_bytes(self) -> torch.Tensor:
        """Return the elements in row-major order as a uint8 tensor, on the device where they are."""
        if isinstance(self.source, TensorBytes):
            # Not a buffer of torch, which refuses one without bytes.
            data = np.empty(self.nbytes, dtype=np.uint8)
            self.source.read(0, data.data)
            return torch.from_numpy(data)
        # The cached copy is not used, because it may be in flight in another stream of the device.
        return flat_bytes(self.source)

    def release(self) -> None:
        """Release the contiguous copy of a strided tensor."""
        if self._flat is None:
            return
        with self._lock:
            self._flat = None

    @property
    def _lock(self) -> threading.Lock:
        return _LOCKS[id(self) // 64 % len(_LOCKS)]

    def _bytes(self, source: torch.Tensor | np.ndarray) -> FlatBytes:
        with self._lock:
            if self._flat is None:
                self._flat = on_host(flat_bytes(source))
            return self._flat


def whole_bytes(leaves: Sequence[Leaf]) -> list[bytes]:
    """Return the bytes of small tensors."""
    copies = [b""] * len(leaves)
    for alike in stacks(leaves, range(len(leaves))):
        data = stacked([leaves[number] for number in alike]).cpu().numpy().tobytes()
        for number, copy in zip(alike, equal_parts(data, len(alike)), strict=True):
            copies[number] = copy
    return copies


def stacks(leaves: Sequence[Leaf], rows: Iterable[int]) -> list[list[int]]:
    """Group tensors of equal device, dtype and shape for :func:`stacked`.

    Optimizers have hundreds of counters, and training waits for the copies. One stack takes a fifth of the time.
    """
    groups: dict[object, list[int]] = {}
    for row in rows:
        leaf, source = leaves[row], leaves[row].source
        key: object = row
        if isinstance(source, torch.Tensor) and leaf.dtype in _STACKED:
            key = source.device, leaf.dtype, leaf.shape
        groups.setdefault(key, []).append(row)
    return [*groups.values()]


def stacked(leaves: Sequence[Leaf]) -> torch.Tensor:
    """Return the bytes of a group of tensors, one after another, as a uint8 tensor on their device."""
    if len(leaves) == 1:
        return leaves[0].as_bytes()
    with torch.no_grad():
        return flat_bytes(torch.stack([cast("torch.Tensor", leaf.source) for leaf in leaves]))


def equal_parts(data: bytes, count: int) -> list[bytes]:
    """Split bytes into parts of equal length."""
    size = len(data) // count
    return [data[number * size : (number + 1) * size] for number in range(count)]


def flat_bytes(source: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Return the elements in row-major order as a uint8 tensor: a view of a contiguous source, otherwise a copy."""
    if isinstance(source, np.ndarray):
        contiguous = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        return torch.from_numpy(contiguous if contiguous.flags.writeable else contiguous.copy())
    plain = source.detach().resolve_conj().resolve_neg()
    # Torch cannot copy strided tensors of the newest dtypes.
    return as_bytes((plain.view(torch.uint8) if plain.itemsize == 1 else plain).contiguous())


def on_host(flat: torch.Tensor) -> FlatBytes:
    """Return the memory of flat bytes as an array, if it is in host memory.

    Threads slice an array many times: unlike numpy, each operation of torch releases the GIL, and then waits for it.
    """
    return flat.numpy() if flat.device.type == "cpu" else flat


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a uint8 tensor."""
    # reshape(-1) keeps the stride of a tensor with one element, which can make the view impossible.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def make_leaf(source: Source, path: str, group: str, box: Box | None = None) -> Leaf:
    """Describe a tensor or an array of a state; ``box`` is its box in a distributed tensor.

    Raises:
        UnsupportedValueError: the tensor cannot be stored; the error names ``path``.
    """
    # The most frequent type comes first.
    if isinstance(source, torch.Tensor):
        problem, dtype = _problem_of_tensor(source), TORCH_NAMES.get(source.dtype)
    elif isinstance(source, TensorBytes):
        problem, dtype = "", source.dtype
    else:
        problem, dtype = _problem_of_array(source), numpy_name(source.dtype)
    if not problem and len(source.shape) > DIMENSIONS_MAX:
        problem = f"tensors of more than {DIMENSIONS_MAX} dimensions are not supported"
    if problem or dtype is None:
        raise UnsupportedValueError(path, problem)
    shape = tuple(source.shape)
    if box is None:
        box = Box.of_whole(shape)
        shape = box.shape
    return Leaf(source, path, dtype, shape, source.nbytes, group, box)


def _problem_of_array(array: np.ndarray) -> str:
    if type(array) not in (np.ndarray, np.memmap):
        kind = type(array).__qualname__
        return f"numpy subclass {kind} is not supported; use numpy.asarray(), and store other attributes separately"
    if numpy_name(array.dtype) is None:
        return f"numpy arrays of dtype {array.dtype} have no portable bytes; convert them to numbers"
    return ""


def _problem_of_tensor(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "the tensor has no shape yet; call its module once before the save"
    if type(tensor) not in PLAIN_TENSORS:
        return f"tensor subclass {type(tensor).__qualname__} is not supported; store its plain tensors"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"tensors of layout {tensor.layout} are not supported; convert it to a dense tensor"
    if tensor.is_quantized:
        return "quantized tensors are not supported; store int_repr() with scale and zero point"
    if tensor.is_meta:
        return "the tensor is on the meta device and has no bytes"
    return "" if tensor.dtype in TORCH_NAMES else f"tensors of dtype {tensor.dtype} are not supported"


def identity_key(source: Source) -> tuple[object, ...] | None:
    """Return a key that two sources share only if they are the same view of the same memory; None for empty ones."""
    if not isinstance(source, torch.Tensor):
        return ("object", id(source))
    if source.numel() == 0:
        return None
    # A flat tuple, because the garbage collector would visit nested tuples.
    flags = 2 * source.is_conj() + source.is_neg()
    return (source.data_ptr(), source.dtype, source.device, flags, *source.shape, *source.stride())


def copy_partition(partition: Partition, leaves: Sequence[Leaf], payload: memoryview) -> None:
    """Copy the bytes of a partition from its tensors into ``payload``, which has the length of the partition."""
    for piece, target in partition.parts(payload):
        leaves[piece.row].copy_bytes(piece.start, target)


def digest_pieces(pieces: Sequence[Piece], leaves: Sequence[Leaf] | Mapping[int, Leaf]) -> list[Digest]:
    """Return the digests of pieces of tensors, computed by several threads because the training waits."""
    digests = [Digest(b"")] * len(pieces)

    def work(taken: Iterable[tuple[int, Piece]]) -> None:
        for number, piece in taken:
            leaf = leaves[piece.row]
            data = leaf.bytes_in_place(piece.start, piece.length)
            digests[number] = digest(leaf.some_bytes(piece.start, piece.length) if data is None else data)

    threads = sum(piece.length for piece in pieces) // _BYTES_FOR_A_THREAD
    share(enumerate(pieces), work, max(1, min(threads, _THREADS_MAX, len(os.sched_getaffinity(0)))), "digest")
    return digests
