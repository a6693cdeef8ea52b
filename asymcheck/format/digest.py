"""Compute digests (xxh3-128) and the checksum sum8 (SPEC.md §A4)."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from asymcheck.types import Digest

Buffer = bytes | bytearray | memoryview
"""Bytes that are hashed without a copy."""

ZERO_DIGEST = bytes(16)


def digest(data: Buffer) -> Digest:
    """Return the xxh3-128 hash of ``data`` (16 bytes, canonical order). Releases the GIL for large data."""
    return Digest(xxhash.xxh3_128_digest(data))


def is_zero(data: Buffer) -> bool:
    """Tell whether all bytes are zero."""
    return bytes(data).count(0) == len(data)


def sum8(data: Buffer) -> bytes:
    """Return the last 8 bytes of the digest of ``data``."""
    return bytes(xxhash.xxh3_128_digest(data)[8:])


def sum8_of(parts: Iterable[Buffer]) -> bytes:
    """Return the sum8 of the concatenation of ``parts``."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return bytes(state.digest()[8:])
