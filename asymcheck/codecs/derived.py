"""The payload of codec derived-round-to-nearest: which part of the base is rounded to what (SPEC.md §12.4)."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from asymcheck.codecs import rounding
from asymcheck.codecs.planes import Bytes
from asymcheck.errors import StructureError, TruncatedError

SOURCE = struct.Struct("<B7sQ")


def encode_source(dtype: int, offset: int) -> bytes:
    """Return the payload: the number of the target's dtype, and where its elements begin in the base."""
    return SOURCE.pack(dtype, bytes(7), offset)


def rounded_base(base: memoryview, offset: int, plain_length: int, dtype: int) -> Bytes:
    """Return the ``plain_length`` bytes that the float32 elements of the base from ``offset`` on round to."""
    return rounding.rounded(_bits(base, offset, plain_length), dtype).view(np.uint8)


def is_rounded_base(plain: memoryview, base: memoryview, offset: int, dtype: int) -> bool:
    """Tell whether ``plain`` is what the float32 elements of the base from ``offset`` on round to."""
    words = np.frombuffer(plain, dtype=np.dtype("<u2"))
    return rounding.is_rounded(words, _bits(base, offset, len(plain)), dtype)


def _bits(base: memoryview, offset: int, plain_length: int) -> npt.NDArray[np.uint32]:
    elements = np.frombuffer(base, dtype=np.uint8)[offset : offset + 2 * plain_length]
    return (elements if offset % 4 == 0 else elements.copy()).view(np.dtype("<u4"))


def decode_derived(payload: memoryview, plain_length: int, base: memoryview, where: str) -> memoryview:
    """Return the plain bytes of a derived partition.

    Raises:
        TruncatedError, StructureError: the payload breaks a rule, or does not fit the base.
    """
    if len(payload) < SOURCE.size:
        raise TruncatedError(f"{where}: {len(payload)} of {SOURCE.size} bytes that say what is derived")
    if len(payload) > SOURCE.size:
        raise StructureError(f"{where}: {len(payload)} bytes of payload, a derived partition has {SOURCE.size}")
    dtype, reserved, offset = SOURCE.unpack(payload)
    if dtype not in rounding.DTYPES or any(reserved):
        raise StructureError(f"{where}: derived dtype {dtype}, or reserved bytes that are not zero")
    if plain_length % 2 or offset + 2 * plain_length > len(base):
        raise StructureError(
            f"{where}: {plain_length} bytes from byte {offset} of a base of {len(base)} bytes are not there"
        )
    return rounded_base(base, offset, plain_length, dtype).data
