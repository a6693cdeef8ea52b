"""Codec derived-round-to-nearest: round float32 elements of a base to bfloat16 or float16 (SPEC.md §A10.4)."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from asymcheck.codecs.planes import Bytes, scratch
from asymcheck.errors import StructureError, TruncatedError

BFLOAT16 = 1
FLOAT16 = 2
DTYPES = {BFLOAT16: "bfloat16", FLOAT16: "float16"}
"""Target dtypes by their number in the payload."""
SOURCE = struct.Struct("<B7sQ")
"""Payload: number of the target dtype, reserved bytes, and offset of the float32 elements in the base."""

_Rounded = npt.NDArray[np.uint16]
_Bits = npt.NDArray[np.uint32]
_BLOCK = 1 << 18
"""Elements per numpy call. Measured: with smaller blocks, threads wait for each other longer than they compute."""


def _round_to_bfloat16(bits: _Bits, result: _Rounded) -> None:
    # Add 0x7fff plus the lowest bit of the upper half. The sum carries into the upper half if the lower half is more
    # than one half, or exactly one half and the upper half is odd. A carry out of the fraction raises the exponent.
    total = np.right_shift(bits, np.uint32(16), out=scratch("total", "<u4", len(bits)))
    total &= np.uint32(1)
    total += np.uint32(0x7FFF)
    total += bits
    np.copyto(result, total.view(np.dtype("<u2"))[1::2])
    nan = np.isnan(bits.view(np.dtype("<f4")), out=scratch("nan", bool, len(bits)))
    if nan.any():
        result[nan] = 0x7FC0


def _round_to_float16(bits: _Bits, result: _Rounded) -> None:
    floats = bits.view(np.dtype("<f4"))
    with np.errstate(all="ignore"):
        np.copyto(result.view(np.dtype("<f2")), floats, casting="same_kind")
    nan = np.isnan(floats, out=scratch("nan", bool, len(bits)))
    if nan.any():
        result[nan] = 0x7E00 | ((bits[nan] >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)


_ROUND = {BFLOAT16: _round_to_bfloat16, FLOAT16: _round_to_float16}


def rounded_base(base: memoryview, offset: int, plain_length: int, dtype: int) -> Bytes:
    """Round the float32 elements of the base from ``offset`` on. Return the ``plain_length`` bytes of the result."""
    bits = _bits(base, offset, plain_length)
    result: _Rounded = np.empty(len(bits), dtype=np.uint16)
    for start in range(0, len(bits), _BLOCK):
        _ROUND[dtype](bits[start : start + _BLOCK], result[start : start + _BLOCK])
    return result.view(np.uint8)


def is_rounded_base(plain: memoryview, base: memoryview, offset: int, dtype: int) -> bool:
    """Tell whether ``plain`` equals the rounded float32 elements of the base from ``offset`` on."""
    words = np.frombuffer(plain, dtype=np.dtype("<u2"))
    bits = _bits(base, offset, len(plain))
    for start in range(0, len(bits), _BLOCK):
        expected = words[start : start + _BLOCK]
        actual = scratch("rounded", "<u2", len(expected))
        _ROUND[dtype](bits[start : start + _BLOCK], actual)
        if np.not_equal(actual, expected, out=scratch("differs", bool, len(expected))).any():
            return False
    return True


def _bits(base: memoryview, offset: int, plain_length: int) -> _Bits:
    elements = np.frombuffer(base, dtype=np.uint8)[offset : offset + 2 * plain_length]
    return (elements if offset % 4 == 0 else elements.copy()).view(np.dtype("<u4"))


def decode_derived(payload: memoryview, plain_length: int, base: memoryview, where: str) -> memoryview:
    """Return the plain bytes of a derived partition."""
    if len(payload) < SOURCE.size:
        raise TruncatedError(f"{where}: payload has {len(payload)} of {SOURCE.size} bytes")
    if len(payload) > SOURCE.size:
        raise StructureError(f"{where}: payload has {len(payload)} bytes, a derived partition has {SOURCE.size}")
    dtype, reserved, offset = SOURCE.unpack(payload)
    if dtype not in DTYPES or any(reserved):
        raise StructureError(f"{where}: unknown derived dtype {dtype}, or reserved bytes are not zero")
    if plain_length % 2 or offset + 2 * plain_length > len(base):
        raise StructureError(
            f"{where}: a base of {len(base)} bytes cannot give {plain_length} rounded bytes from offset {offset}"
        )
    return rounded_base(base, offset, plain_length, dtype).data
