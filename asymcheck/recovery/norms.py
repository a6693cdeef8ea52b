"""Norms: how far apart two tensors are, block by block, in float64 or complex128."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.partition.numpy_dtypes import NUMPY_DTYPES

_WIDE_INTEGERS = ("int64", "uint64")
_PACKED = "float4_e2m1fn_x2"
_RANDOM = "rng"

Numbers = npt.NDArray[np.float64] | npt.NDArray[np.complex128]


@dataclasses.dataclass(frozen=True)
class TensorNorms:
    """How far apart two tensors of one shape are.

    Numbers are compared as float64, complex ones as complex128, bool as 0 and 1. Sums leave out elements that are
    infinite or not a number, in either tensor for the difference.
    """

    l2_a: float | None
    l2_difference: float | None
    """L2 norm of B - A."""
    relative: float | None
    """``l2_difference / l2_a``; None when A is zero."""
    largest: float | None
    """The largest absolute difference of two elements."""
    differing: int
    """Elements that differ: in their bytes when the dtypes are equal, else in their value."""
    elements: int
    """Elements in all; of dtype float4_e2m1fn_x2, bytes with two numbers each."""
    nonfinite_a: int | None
    """Elements of A that are infinite or not a number."""
    nonfinite_b: int | None
    note: str
    """Why there are no norms (the fields that are None); empty when there are."""


class NormSums:
    """Sums up two tensors of one shape, block by block."""

    def __init__(self, dtype_a: str, dtype_b: str, role: str) -> None:
        """Compare tensors of these dtypes; ``role`` tells what their numbers mean."""
        self.dtypes = (dtype_a, dtype_b)
        self.note = _without_norms(self.dtypes, role)
        self._l2_a = self._l2_difference = self._largest = 0.0
        self._differing = self._elements = self._nonfinite_a = self._nonfinite_b = 0

    def add(self, a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> None:
        """Add the next block: the bytes of the same number of elements of A and of B."""
        count = len(a) // DTYPE_BYTES[self.dtypes[0]]
        self._elements += count
        same_dtype = self.dtypes[0] == self.dtypes[1]
        if same_dtype:
            self._differing += _count_differing(a, b, DTYPE_BYTES[self.dtypes[0]])
        if self.note and same_dtype:
            return
        # A value too large for the sum makes it infinite, which is the answer.
        with np.errstate(over="ignore"):
            numbers_a, numbers_b = _numbers(a, self.dtypes[0]), _numbers(b, self.dtypes[1])
            self._add_numbers(numbers_a, numbers_b)
            if not same_dtype:
                both_nan = np.isnan(numbers_a) & np.isnan(numbers_b)
                self._differing += int(((numbers_a != numbers_b) & ~both_nan).sum())
            elif self.dtypes[0] in _WIDE_INTEGERS:
                self._add_difference(_integer_difference(a, b, self.dtypes[0]))

    def _add_numbers(self, a: Numbers, b: Numbers) -> None:
        finite_a, finite_b = np.isfinite(a), np.isfinite(b)
        nonfinite = [len(finite) - int(np.count_nonzero(finite)) for finite in (finite_a, finite_b)]
        self._nonfinite_a += nonfinite[0]
        self._nonfinite_b += nonfinite[1]
        # Choosing elements costs a copy, which is saved where all are chosen.
        self._l2_a = math.hypot(self._l2_a, _l2(np.abs(a[finite_a] if nonfinite[0] else a)))
        if self.dtypes[0] != self.dtypes[1] or self.dtypes[0] not in _WIDE_INTEGERS:
            if any(nonfinite):
                a, b = a[finite_a & finite_b], b[finite_a & finite_b]
            self._add_difference(np.abs(b - a))

    def _add_difference(self, sizes: npt.NDArray[np.float64]) -> None:
        self._l2_difference = math.hypot(self._l2_difference, _l2(sizes))
        self._largest = max(self._largest, float(sizes.max(initial=0.0)))

    def result(self) -> TensorNorms:
        """Return the norms of what was added."""
        if self.note:
            return TensorNorms(None, None, None, None, self._differing, self._elements, None, None, self.note)
        l2_a, l2 = self._l2_a, self._l2_difference
        sums = l2_a, l2, (l2 / l2_a if l2_a else None), self._largest, self._differing, self._elements
        return TensorNorms(*sums, self._nonfinite_a, self._nonfinite_b, "")


def can_compare(dtype_a: str, dtype_b: str) -> bool:
    """Tell whether elements of two dtypes can be compared with each other: equal ones always, others as numbers."""
    return dtype_a == dtype_b or not _without_norms((dtype_a, dtype_b), "")


def _without_norms(dtypes: tuple[str, str], role: str) -> str:
    for dtype in dtypes:
        if dtype == _PACKED:
            return f"{dtype} packs two numbers into a byte"
        if dtype not in NUMPY_DTYPES and (lack := _lack_of_torch(dtype)):
            return lack
    # The state of a random number generator is a bit pattern: a distance between two says nothing.
    return "state of a random number generator" if role == _RANDOM else ""


def _lack_of_torch(dtype: str) -> str:
    import torch

    from asymcheck.partition.dtypes import TORCH_DTYPES

    return "" if dtype in TORCH_DTYPES else f"torch {torch.__version__} has no {dtype}"


def _numbers(data: npt.NDArray[np.uint8], dtype: str) -> Numbers:
    is_complex = dtype.startswith("complex")
    known = NUMPY_DTYPES.get(dtype)
    numbers: Numbers
    if known is not None:
        numbers = data.view(known).astype(np.complex128 if is_complex else np.float64)
    else:
        import torch

        from asymcheck.partition.dtypes import TORCH_DTYPES

        wide = torch.complex128 if is_complex else torch.float64
        numbers = torch.from_numpy(data).view(TORCH_DTYPES[dtype]).to(wide).numpy()
    return numbers


def _count_differing(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], size: int) -> int:
    """Count the elements of ``size`` bytes that are not the same bits."""
    words = f"u{min(size, 8)}"
    differ = a.view(words) != b.view(words)
    if size > 8:  # noqa: PLR2004 - the widest integer of numpy, in bytes
        differ = differ.reshape(-1, size // 8).any(axis=1)
    return int(np.count_nonzero(differ))


def _integer_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float64]:
    """Return absolute differences of 64-bit integers, subtracted before they are rounded to float64."""
    x, y = a.view(dtype), b.view(dtype)
    # Modulo 2^64 the difference of the larger and the smaller is exact.
    higher, lower = np.maximum(x, y).view(np.uint64), np.minimum(x, y).view(np.uint64)
    sizes: npt.NDArray[np.float64] = (higher - lower).astype(np.float64)
    return sizes


def _l2(sizes: npt.NDArray[np.float64]) -> float:
    """Return the L2 norm of absolute values, scaled so that no square overflows or vanishes."""
    largest = float(sizes.max(initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    # Not np.dot: the threads of a BLAS, and torch's beside them, wait for each other on few cores.
    return largest * math.sqrt(float(np.square(sizes / largest).sum()))
