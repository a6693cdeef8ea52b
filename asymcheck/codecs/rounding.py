"""Rounding of float32 to the nearest 2-byte float, ties to even, bit for bit (SPEC.md §12.4)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BFLOAT16 = 1
FLOAT16 = 2
DTYPES = {BFLOAT16: "bfloat16", FLOAT16: "float16"}
"""The target dtypes by their number in a payload."""

_Rounded = npt.NDArray[np.uint16]
_Bits = npt.NDArray[np.uint32]


def rounded(bits: _Bits, dtype: int) -> _Rounded:
    """Round float32 elements, given by their bits, to the dtype of this number; return the bits."""
    return _to_bfloat16(bits) if dtype == BFLOAT16 else _to_float16(bits)


def _is_nan(bits: _Bits) -> npt.NDArray[np.bool_]:
    result: npt.NDArray[np.bool_] = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return result


def _to_bfloat16(bits: _Bits) -> _Rounded:
    # What the lower half is worth is added to the upper half: more than a half of it carries, and so does exactly a
    # half when the upper half is odd. A carry out of the fraction raises the exponent, up to infinity.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    result: _Rounded = (odd >> np.uint32(16)).astype(np.uint16)
    result[_is_nan(bits)] = 0x7FC0
    return result


def _to_float16(bits: _Bits) -> _Rounded:
    with np.errstate(all="ignore"):
        result: _Rounded = bits.view(np.dtype("<f4")).astype(np.dtype("<f2")).view(np.uint16)
    nan = _is_nan(bits)
    result[nan] = 0x7E00 | ((bits[nan] >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)
    return result
