"""Rounding of float32 to the nearest 2-byte float, ties to even, bit for bit (SPEC.md §12.4)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

BFLOAT16 = 1
FLOAT16 = 2
DTYPES = {BFLOAT16: "bfloat16", FLOAT16: "float16"}
"""The target dtypes by their number in a payload."""

_Rounded = npt.NDArray[np.uint16]
_Bits = npt.NDArray[np.uint32]
_BLOCK = 1 << 18
"""Elements that one call works on. Measured: fewer, and threads wait for each other more often than they compute."""
_own = threading.local()


def rounded(bits: _Bits, dtype: int) -> _Rounded:
    """Round float32 elements, given by their bits, to the dtype of this number; return the bits."""
    result: _Rounded = np.empty(len(bits), dtype=np.uint16)
    for start in range(0, len(bits), _BLOCK):
        _TO[dtype](bits[start : start + _BLOCK], result[start : start + _BLOCK])
    return result


def is_rounded(words: _Rounded, bits: _Bits, dtype: int) -> bool:
    """Tell whether ``words`` are the elements of that dtype that ``bits``, as many, round to."""
    for start in range(0, len(bits), _BLOCK):
        wanted = words[start : start + _BLOCK]
        found = _scratch(2, np.dtype("<u2"), len(wanted))
        _TO[dtype](bits[start : start + _BLOCK], found)
        if np.not_equal(found, wanted, out=_scratch(1, np.dtype(bool), len(wanted))).any():
            return False
    return True


def _scratch(number: int, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    """Return memory of this thread, which it has used before: new memory costs more than what is done in it."""
    kept: dict[int, npt.NDArray[Any]] = _own.__dict__.setdefault("kept", {})
    if number not in kept:
        kept[number] = np.empty(_BLOCK, dtype=dtype)
    return kept[number][:length]


def _to_bfloat16(bits: _Bits, result: _Rounded) -> None:
    # What the lower half is worth is added to the upper half: more than a half of it carries, and so does exactly a
    # half when the upper half is odd. A carry out of the fraction raises the exponent, up to infinity.
    odd = np.right_shift(bits, np.uint32(16), out=_scratch(0, np.dtype("<u4"), len(bits)))
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    # The upper halves.
    np.copyto(result, odd.view(np.dtype("<u2"))[1::2])
    nan = np.isnan(bits.view(np.dtype("<f4")), out=_scratch(1, np.dtype(bool), len(bits)))
    if nan.any():
        result[nan] = 0x7FC0


def _to_float16(bits: _Bits, result: _Rounded) -> None:
    floats = bits.view(np.dtype("<f4"))
    with np.errstate(all="ignore"):
        np.copyto(result.view(np.dtype("<f2")), floats, casting="same_kind")
    nan = np.isnan(floats, out=_scratch(1, np.dtype(bool), len(bits)))
    if nan.any():
        result[nan] = 0x7E00 | ((bits[nan] >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)


_TO = {BFLOAT16: _to_bfloat16, FLOAT16: _to_float16}
