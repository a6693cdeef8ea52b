"""Differences of elements in the order of their values, small where two tensors are close (SPEC.md §12.3)."""

from __future__ import annotations

import numpy as np

from asymcheck.codecs.planes import Words


def _signed_shift(words: Words) -> Words:
    """Return all ones for each element whose first bit is set, else zero."""
    signed = words.view(np.dtype(f"<i{words.itemsize}"))
    bits = signed.dtype.type(8 * words.itemsize - 1)
    result: Words = np.right_shift(signed, bits).view(words.dtype)
    return result


def in_order(words: Words) -> Words:
    """Map floats, sign and magnitude, to two's complement integers of the same order; it undoes itself."""
    mask = _signed_shift(words)
    np.right_shift(mask, words.dtype.type(1), out=mask)
    mask ^= words
    return mask


def difference(target: Words, base: Words, *, is_float: bool) -> Words:
    """Return target minus base modulo 2^w, zig-zag: 0, -1, 1, -2 become 0, 1, 2, 3."""
    if is_float:
        target, base = in_order(target), in_order(base)
    delta: Words = np.subtract(target, base)
    result = _signed_shift(delta)
    np.left_shift(delta, delta.dtype.type(1), out=delta)
    result ^= delta
    return result


def applied(zigzag: Words, base: Words, *, is_float: bool) -> Words:
    """Undo :func:`difference`: return the target."""
    one = zigzag.dtype.type(1)
    sign = np.bitwise_and(zigzag, one)
    np.negative(sign, out=sign)
    target: Words = np.right_shift(zigzag, one)
    target ^= sign
    target += in_order(base) if is_float else base
    return in_order(target) if is_float else target
