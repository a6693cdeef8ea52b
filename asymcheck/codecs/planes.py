"""Byte planes of elements, and zig-zag differences of elements in value order (SPEC.md §A10.2, §A10.3)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]

# Comparing 8-byte integers takes eight times as long as comparing 4-byte integers.
_FAST_COMPARE_BYTES_MAX = 4

_thread = threading.local()


def scratch(use: str, dtype: npt.DTypeLike, length: int) -> npt.NDArray[Any]:
    """Return memory of this thread that the next call for the same ``use`` returns again.

    Measured: page faults of new memory take six times as long as the computation in it.
    """
    nbytes = np.dtype(dtype).itemsize * length
    buffers: dict[str, Bytes] = _thread.__dict__.setdefault("buffers", {})
    if len(buffers.get(use, ())) < nbytes:
        buffers[use] = np.empty(nbytes, dtype=np.uint8)
    return buffers[use][:nbytes].view(dtype)


def _like(use: str, words: Words) -> Words:
    return scratch(use, words.dtype, len(words))


def as_words(chunk: Bytes, width: int) -> Words:
    """View bytes as unsigned little-endian integers of ``width`` bytes, without a copy."""
    words: Words = chunk.view(np.dtype(f"<u{width}"))
    return words


def rotated(words: Words, out: Words, bits: int = 1) -> Words:
    """Rotate each element left. By one bit, the sign becomes the lowest bit, and the exponent fills the top byte."""
    left, right = words.dtype.type(bits), words.dtype.type(8 * words.itemsize - bits)
    np.left_shift(words, left, out=out)
    out |= np.right_shift(words, right, out=_like("shifted", words))
    return out


def rotated_back(words: Words, out: Words) -> Words:
    """Undo :func:`rotated` by one bit."""
    return rotated(words, out, 8 * words.itemsize - 1)


def split(words: Words) -> Bytes:
    """Return the planes as rows, starting with the least significant bytes, in memory of this thread."""
    planes: Bytes = scratch("planes", np.uint8, words.nbytes).reshape(words.itemsize, len(words))
    _split_into(words, planes)
    return planes


def _split_into(words: Words, planes: Bytes) -> None:
    """Split the elements into halves until they are bytes.

    Shifting and narrowing whole elements uses vector registers, and each step halves the bytes to process. A strided
    copy of bytes takes three times as long.
    """
    if words.itemsize == 1:
        np.copyto(planes[0], words)
        return
    half = words.itemsize // 2
    upper = np.right_shift(words, words.dtype.type(8 * half), out=_like(f"upper {half}", words))
    for part, rows in ((words, planes[:half]), (upper, planes[half:])):
        narrow = rows[0] if half == 1 else scratch(f"half {half}", f"<u{half}", len(words))
        np.copyto(narrow, part, casting="unsafe")
        if half > 1:
            _split_into(narrow, rows)


def split_rotated(words: Words) -> Bytes:
    """Return the planes of :func:`rotated` elements, as :func:`split` does."""
    out = _like("target", words)
    if words.itemsize > _FAST_COMPARE_BYTES_MAX:
        return split(rotated(words, out))
    # Doubling shifts out the sign only. A comparison restores it faster than a shift.
    planes = split(np.add(words, words, out=out))
    sign = scratch("sign", bool, len(words))
    planes[0] |= np.less(words.view(np.dtype(f"<i{words.itemsize}")), 0, out=sign).view(np.uint8)
    return planes


def join(planes: list[Bytes | int], count: int) -> Words:
    """Join planes (rows of bytes, or one repeated byte) into elements, in a plane or in memory of this thread."""
    width, half = len(planes), len(planes) // 2
    if width == 1 and not isinstance(planes[0], int):
        return planes[0]
    words: Words = scratch(f"joined {width}", f"<u{width}", count)
    constant = [plane for plane in planes if isinstance(plane, int)]
    if len(constant) == width:
        words.fill(sum(plane << 8 * number for number, plane in enumerate(constant)))
        return words
    np.copyto(words, join(planes[half:], count))
    np.left_shift(words, words.dtype.type(8 * half), out=words)
    words |= join(planes[:half], count)
    return words


def _signed_shift(words: Words, out: Words) -> Words:
    """Return all ones for each element with its highest bit set, else zero."""
    signed = np.dtype(f"<i{words.itemsize}")
    np.right_shift(words.view(signed), signed.type(8 * words.itemsize - 1), out=out.view(signed))
    return out


def in_order(words: Words, out: Words) -> Words:
    """Map floats to two's complement integers of the same order, into ``out``. The mapping is its own inverse."""
    _signed_shift(words, out)
    np.right_shift(out, words.dtype.type(1), out=out)
    out ^= words
    return out


def difference(target: Words, base: Words, *, is_float: bool) -> Words:
    """Return target minus base modulo 2^b in zig-zag form: 0, -1, 1, -2 become 0, 1, 2, 3. In memory of this thread."""
    delta, result = _like("target", target), _like("base", base)
    if is_float:
        target, base = in_order(target, delta), in_order(base, result)
    np.subtract(target, base, out=delta)
    _signed_shift(delta, result)
    np.left_shift(delta, delta.dtype.type(1), out=delta)
    result ^= delta
    return result


def apply_difference(zigzag: Words, base: Words, target: Words, *, is_float: bool) -> None:
    """Undo :func:`difference`: compute ``target``."""
    one, other = zigzag.dtype.type(1), _like("target", zigzag)
    np.bitwise_and(zigzag, one, out=other)
    np.negative(other, out=other)
    np.right_shift(zigzag, one, out=target)
    target ^= other
    target += in_order(base, other) if is_float else base
    if is_float:
        _signed_shift(target, other)
        np.right_shift(other, one, out=other)
        target ^= other
