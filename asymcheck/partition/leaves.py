"""Leaves: the tensors of a state, and access to their bytes."""

from __future__ import annotations

import abc
import dataclasses
import math
import threading

import numpy as np
import torch

from asymcheck.errors import UnsupportedValueError
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.partition.dtypes import TORCH_NAMES, numpy_name
from asymcheck.partition.roles import role_of


class TensorBytes(abc.ABC):
    """A tensor that is not in memory: its bytes are read when they are captured, for instance from a file."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Describe it: the format's name of the dtype, and the shape."""
        self.dtype = dtype
        self.shape = shape

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in row-major order."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @abc.abstractmethod
    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``start`` on; threads may call this together."""


Source = torch.Tensor | np.ndarray | TensorBytes


@dataclasses.dataclass
class Leaf:
    """One tensor of a state, with every name it has there."""

    source: Source
    """The tensor itself; its bytes are read when they are captured."""
    name: str
    """Dotted name of its first place in the state."""
    dtype: str
    """Name of the dtype in the format."""
    shape: tuple[int, ...]
    """Shape."""
    nbytes: int
    """Bytes of its elements in row-major order."""
    group: str
    """Tensors are bundled only with others of the same group."""
    aliases: list[str] = dataclasses.field(default_factory=list)
    """Its further names."""
    key: tuple[object, ...] | None = None
    """See :func:`identity_key`."""
    _flat: torch.Tensor | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def role(self) -> str:
        """The role of the tensor, from its name."""
        return role_of(self.name)

    def copy_bytes(self, start: int, target: memoryview) -> None:
        """Copy the bytes from ``start`` on into ``target``, filling it. Releases the GIL for large copies."""
        if isinstance(self.source, TensorBytes):
            self.source.read(start, target)
            return
        flat = self._bytes(self.source)[start : start + len(target)]
        if flat.device.type == "cpu":
            # numpy, not torch: one plain memcpy, no thread pool that would compete with the training thread's.
            np.copyto(np.frombuffer(target, dtype=np.uint8), flat.numpy())
        else:
            torch.frombuffer(target, dtype=torch.uint8).copy_(flat)

    def release(self) -> None:
        """Forget the contiguous copy that a strided tensor needed."""
        with self._lock:
            self._flat = None

    def _bytes(self, source: torch.Tensor | np.ndarray) -> torch.Tensor:
        with self._lock:
            if self._flat is None:
                self._flat = flat_bytes(source)
            return self._flat


def flat_bytes(source: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Return the elements in row-major order as a uint8 tensor: a view where the source is contiguous, else a copy."""
    if isinstance(source, np.ndarray):
        contiguous = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        return torch.from_numpy(contiguous if contiguous.flags.writeable else contiguous.copy())
    return as_bytes(source.detach().resolve_conj().resolve_neg().contiguous())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a uint8 tensor."""
    # Not reshape(-1): it keeps the stride of a tensor of one element, which may be any, and then there is no such view.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def make_leaf(source: Source, path: str, group: str) -> Leaf:
    """Describe a tensor or an array of a state.

    Raises:
        UnsupportedValueError: it has no bytes that could be stored; names ``path``.
    """
    if isinstance(source, TensorBytes):
        return Leaf(source, path, source.dtype, source.shape, source.nbytes, group)
    if isinstance(source, np.ndarray):
        if type(source) not in (np.ndarray, np.memmap):
            raise UnsupportedValueError(
                path,
                f"numpy subclass {type(source).__qualname__} is not supported; use numpy.asarray() and store the rest",
            )
        dtype = numpy_name(source.dtype)
        if dtype is None:
            raise UnsupportedValueError(
                path, f"numpy arrays of dtype {source.dtype} have no portable bytes; convert to numbers"
            )
        return Leaf(source, path, dtype, source.shape, source.nbytes, group)
    _check_tensor(source, path)
    name = TORCH_NAMES.get(source.dtype)
    if name is None:
        raise UnsupportedValueError(path, f"tensors of dtype {source.dtype} are not supported")
    return Leaf(source, path, name, tuple(source.shape), source.numel() * source.element_size(), group)


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedValueError(
            path,
            f"tensor subclass {type(tensor).__qualname__} is not supported; use its to_local() or full_tensor()",
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        raise UnsupportedValueError(
            path, f"tensors of layout {tensor.layout} are not supported; convert to a dense tensor"
        )
    if tensor.is_quantized:
        raise UnsupportedValueError(
            path, "quantized tensors are not supported; store int_repr() with scale and zero point"
        )
    if tensor.device.type == "meta":
        raise UnsupportedValueError(path, "the tensor is on the meta device and has no bytes")


def identity_key(source: Source) -> tuple[object, ...] | None:
    """Return what two sources of leaves share exactly when they are the same view of the same memory.

    None when nothing can be shared.
    """
    if isinstance(source, (np.ndarray, TensorBytes)):
        return ("object", id(source))
    if source.numel() == 0:
        return None
    flags = (source.is_conj(), source.is_neg())
    return (source.device, source.data_ptr(), tuple(source.shape), source.stride(), source.dtype, flags)
