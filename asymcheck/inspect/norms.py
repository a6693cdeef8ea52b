"""Compute norms of two tensors and of their difference, block by block in float64 or complex128."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES

_WIDE_INTEGERS = ("int64", "uint64")
_PACKED = "float4_e2m1fn_x2"
_RANDOM = "rng"

Numbers = npt.NDArray[np.float64] | npt.NDArray[np.complex128]


@dataclasses.dataclass(frozen=True)
class TensorNorms:
    """Norms of the difference of two tensors of one shape.

    Numbers are compared as float64, complex numbers as complex128, bool as 0 and 1. Norms skip elements that are
    infinite or not a number. Norms of the difference skip elements that are so in either tensor.
    """

    l2_a: float | None
    l2_difference: float | None
    """L2 norm of B - A."""
    relative: float | None
    """``l2_difference / l2_a``; None if A is zero."""
    largest: float | None
    """The largest absolute difference of two elements."""
    differing: int
    """Number of different elements: by bytes if the dtypes are equal, otherwise by value."""
    elements: int
    """Number of elements. An element of dtype float4_e2m1fn_x2 is a byte with two numbers."""
    nonfinite_a: int | None
    """Number of elements of A that are infinite or not a number."""
    nonfinite_b: int | None
    note: str
    """Reason why the norms are None; empty if they exist."""


class NormSums:
    """Accumulates the norms of two tensors of one shape, block by block."""

    def __init__(self, dtype_a: str, dtype_b: str, role: str) -> None:
        """Compare tensors of these dtypes. The state of a random number generator (by ``role``) has no norms."""
        self.dtypes = (dtype_a, dtype_b)
        self.note = without_norms(self.dtypes, role)
        self._l2_a = self._l2_difference = self._largest = 0.0
        self._differing = self._elements = self._nonfinite_a = self._nonfinite_b = 0

    def add(self, a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> None:
        """Add the next block: the bytes of the same number of elements of A and of B."""
        dtype_a, dtype_b = self.dtypes
        self._elements += len(a) // DTYPE_BYTES[dtype_a]
        if dtype_a == dtype_b:
            self._differing += _count_differing(a, b, DTYPE_BYTES[dtype_a])
            if self.note:
                return
        # A sum that overflows is infinite, which is the correct result.
        with np.errstate(over="ignore", invalid="ignore"):
            numbers_a, numbers_b = numbers_of(a, dtype_a), numbers_of(b, dtype_b)
            finite_a, finite_b = np.isfinite(numbers_a), np.isfinite(numbers_b)
            sizes = np.abs(numbers_b - numbers_a)[finite_a & finite_b]
            if dtype_a != dtype_b:
                both_nan = np.isnan(numbers_a) & np.isnan(numbers_b)
                self._differing += int(((numbers_a != numbers_b) & ~both_nan).sum())
            elif dtype_a in _WIDE_INTEGERS:
                sizes = _integer_difference(a, b, dtype_a)
            self._nonfinite_a += int(np.count_nonzero(~finite_a))
            self._nonfinite_b += int(np.count_nonzero(~finite_b))
            self._l2_a = math.hypot(self._l2_a, _l2(np.abs(numbers_a[finite_a])))
            self._l2_difference = math.hypot(self._l2_difference, _l2(sizes))
            self._largest = max(self._largest, float(sizes.max(initial=0.0)))

    def result(self) -> TensorNorms:
        """Return the norms of all added blocks."""
        if self.note:
            return TensorNorms(None, None, None, None, self._differing, self._elements, None, None, self.note)
        l2_a, l2 = self._l2_a, self._l2_difference
        sums = l2_a, l2, (l2 / l2_a if l2_a else None), self._largest, self._differing, self._elements
        return TensorNorms(*sums, self._nonfinite_a, self._nonfinite_b, "")


def without_norms(dtypes: tuple[str, str], role: str = "") -> str:
    """Return the reason why tensors of these dtypes have no norms, or an empty string."""
    for dtype in dtypes:
        if dtype == _PACKED:
            return f"{dtype} packs two numbers into a byte"
        if dtype not in NUMPY_DTYPES and (problem := _unsupported_by_torch(dtype)):
            return problem
    # The state of a random number generator is a bit pattern, so that norms have no meaning.
    return "state of a random number generator" if role == _RANDOM else ""


def _unsupported_by_torch(dtype: str) -> str:
    import torch

    from asymcheck.state.dtypes import TORCH_DTYPES

    return "" if dtype in TORCH_DTYPES else f"torch {torch.__version__} has no {dtype}"


def numbers_of(data: npt.NDArray[np.uint8], dtype: str) -> Numbers:
    """Return the values of stored elements, exactly except for large integers."""
    is_complex = dtype.startswith("complex")
    numpy_dtype = NUMPY_DTYPES.get(dtype)
    if numpy_dtype is not None:
        return data.view(numpy_dtype).astype(np.complex128 if is_complex else np.float64)
    import torch

    from asymcheck.state.dtypes import TORCH_DTYPES

    wide = torch.complex128 if is_complex else torch.float64
    numbers: Numbers = torch.from_numpy(data).view(TORCH_DTYPES[dtype]).to(wide).numpy()
    return numbers


def _count_differing(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], size: int) -> int:
    words = f"u{min(size, 8)}"
    differ = a.view(words) != b.view(words)
    if size > 8:  # noqa: PLR2004 - the widest integer of numpy, in bytes
        differ = differ.reshape(-1, size // 8).any(axis=1)
    return int(np.count_nonzero(differ))


def _integer_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float64]:
    """Return absolute differences of 64-bit integers, rounded to float64 after the subtraction."""
    x, y = a.view(dtype), b.view(dtype)
    # The larger minus the smaller integer is exact modulo 2^64.
    higher, lower = np.maximum(x, y).view(np.uint64), np.minimum(x, y).view(np.uint64)
    sizes: npt.NDArray[np.float64] = (higher - lower).astype(np.float64)
    return sizes


def _l2(sizes: npt.NDArray[np.float64]) -> float:
    """Return the L2 norm of absolute values, scaled to avoid overflow and underflow."""
    largest = float(sizes.max(initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    # Avoid np.dot: on few cores, BLAS threads and torch threads wait for each other.
    return largest * math.sqrt(float(np.square(sizes / largest).sum()))
