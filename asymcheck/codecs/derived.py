"""Codec derived-round-to-nearest: float32 elements of a base rounded to 2 bytes, ties to even (SPEC.md §12.4)."""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from asymcheck.codecs.planes import Bytes
from asymcheck.errors import StructureError, TruncatedError

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


SOURCE = struct.Struct("<B7sQ")


def encode_source(dtype: int, offset: int) -> bytes:
    """Return the payload: the number of the target's dtype, and where its elements begin in the base."""
    return SOURCE.pack(dtype, bytes(7), offset)


def rounded_base(base: memoryview, offset: int, plain_length: int, dtype: int) -> Bytes:
    """Return the ``plain_length`` bytes that the float32 elements of the base from ``offset`` on round to."""
    return rounded(_bits(base, offset, plain_length), dtype).view(np.uint8)


def is_rounded_base(plain: memoryview, base: memoryview, offset: int, dtype: int) -> bool:
    """Tell whether ``plain`` is what the float32 elements of the base from ``offset`` on round to."""
    words = np.frombuffer(plain, dtype=np.dtype("<u2"))
    bits = _bits(base, offset, len(plain))
    for start in range(0, len(bits), _BLOCK):
        wanted = words[start : start + _BLOCK]
        found = _scratch(2, np.dtype("<u2"), len(wanted))
        _TO[dtype](bits[start : start + _BLOCK], found)
        if np.not_equal(found, wanted, out=_scratch(1, np.dtype(bool), len(wanted))).any():
            return False
    return True


def _bits(base: memoryview, offset: int, plain_length: int) -> _Bits:
    elements = np.frombuffer(base, dtype=np.uint8)[offset : offset + 2 * plain_length]
    return (elements if offset % 4 == 0 else elements.copy()).view(np.dtype("<u4"))


def decode_derived(payload: memoryview, plain_length: int, base: memoryview, where: str) -> memoryview:
    """Return the plain bytes of a derived partition."""
    if len(payload) < SOURCE.size:
        raise TruncatedError(f"{where}: {len(payload)} of {SOURCE.size} bytes that say what is derived")
    if len(payload) > SOURCE.size:
        raise StructureError(f"{where}: {len(payload)} bytes of payload, a derived partition has {SOURCE.size}")
    dtype, reserved, offset = SOURCE.unpack(payload)
    if dtype not in DTYPES or any(reserved):
        raise StructureError(f"{where}: derived dtype {dtype}, or reserved bytes that are not zero")
    if plain_length % 2 or offset + 2 * plain_length > len(base):
        raise StructureError(
            f"{where}: {plain_length} bytes from byte {offset} of a base of {len(base)} bytes are not there"
        )
    return rounded_base(base, offset, plain_length, dtype).data
