"""Byte planes of elements, and zig-zag differences of elements in value order (SPEC.md §A10.2, §A10.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]

# Comparing 8-byte integers takes eight times as long as comparing 4-byte integers.
_FAST_COMPARE_BYTES_MAX = 4


def as_words(chunk: Bytes, width: int) -> Words:
    """View bytes as unsigned little-endian integers of ``width`` bytes, without a copy."""
    words: Words = chunk.view(np.dtype(f"<u{width}"))
    return words


def rotated(words: Words, bits: int = 1) -> Words:
    """Rotate each element left. By one bit, the sign becomes the lowest bit, and the exponent fills the top byte."""
    left, right = words.dtype.type(bits), words.dtype.type(8 * words.itemsize - bits)
    result: Words = np.left_shift(words, left)
    result |= np.right_shift(words, right)
    return result


def rotated_back(words: Words) -> Words:
    """Undo :func:`rotated` by one bit."""
    return rotated(words, 8 * words.itemsize - 1)


def split(words: Words) -> Bytes:
    """Return the planes as rows, starting with the least significant bytes."""
    planes = np.empty((words.itemsize, len(words)), dtype=np.uint8)
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
    upper = np.right_shift(words, words.dtype.type(8 * half))
    if half == 1:
        np.copyto(planes[0], words, casting="unsafe")
        np.copyto(planes[1], upper, casting="unsafe")
        return
    narrow = np.dtype(f"<u{half}")
    _split_into(words.astype(narrow), planes[:half])
    _split_into(upper.astype(narrow), planes[half:])


def split_rotated(words: Words) -> Bytes:
    """Return the planes of :func:`rotated` elements."""
    if words.itemsize > _FAST_COMPARE_BYTES_MAX:
        return split(rotated(words))
    # Doubling shifts out the sign only. A comparison restores it faster than a shift.
    planes = split(np.add(words, words))
    planes[0] |= np.less(words.view(np.dtype(f"<i{words.itemsize}")), 0).view(np.uint8)
    return planes


def join(planes: list[Bytes | int], count: int) -> Words:
    """Join planes (rows of bytes, or one repeated byte) into ``count`` elements. May return the memory of a plane."""
    dtype = np.dtype(f"<u{len(planes)}")
    constant = [plane for plane in planes if isinstance(plane, int)]
    if len(constant) == len(planes):
        return np.full(count, dtype.type(sum(plane << 8 * number for number, plane in enumerate(constant))))
    if not isinstance(planes[0], int) and len(planes) == 1:
        return planes[0]
    half = len(planes) // 2
    words: Words = join(planes[half:], count).astype(dtype)
    np.left_shift(words, dtype.type(8 * half), out=words)
    words |= join(planes[:half], count)
    return words


def _signed_shift(words: Words) -> Words:
    """Return all ones for each element with its highest bit set, else zero."""
    signed = words.view(np.dtype(f"<i{words.itemsize}"))
    bits = signed.dtype.type(8 * words.itemsize - 1)
    result: Words = np.right_shift(signed, bits).view(words.dtype)
    return result


def in_order(words: Words) -> Words:
    """Map floats to two's complement integers of the same order. The mapping is its own inverse."""
    mask = _signed_shift(words)
    np.right_shift(mask, words.dtype.type(1), out=mask)
    mask ^= words
    return mask


def difference(target: Words, base: Words, *, is_float: bool) -> Words:
    """Return target minus base modulo 2^b in zig-zag form: 0, -1, 1, -2 become 0, 1, 2, 3."""
    if is_float:
        target, base = in_order(target), in_order(base)
    delta: Words = np.subtract(target, base)
    result = _signed_shift(delta)
    np.left_shift(delta, delta.dtype.type(1), out=delta)
    result ^= delta
    return result


def apply_difference(zigzag: Words, base: Words, *, is_float: bool) -> Words:
    """Undo :func:`difference` and return the target."""
    one = zigzag.dtype.type(1)
    sign = np.bitwise_and(zigzag, one)
    np.negative(sign, out=sign)
    target: Words = np.right_shift(zigzag, one)
    target ^= sign
    target += in_order(base) if is_float else base
    return in_order(target) if is_float else target
