"""Bases: what a partition of a capture could be decoded from: an older state of it, or what it was rounded from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from asymcheck.codecs import derived
from asymcheck.codecs.rounding import DTYPES
from asymcheck.format.registry import CODEC_DELTA, CODEC_DERIVED
from asymcheck.partition.plan import Originals, Plan
from asymcheck.pipeline.capture import Capture
from asymcheck.pipeline.encoder import Base
from asymcheck.tiers.dram_ring import Ring
from asymcheck.types import Digest

_LOOK_BYTES = 512
_NUMBERS = {name: number for number, name in DTYPES.items()}

Read = Callable[[int, int, int | None], tuple[Digest, memoryview] | None]
"""Gives of a partition, by number, the digest and bytes, from a byte on so many, or all that follow; None while it has
none."""


def original_of(plain: memoryview, dtype: str, number: int, originals: Originals, read: Read) -> Base | None:
    """Return the partition that ``plain``, of 2-byte floats, was rounded from, as far as a look at some of it shows."""
    look = min(len(plain), _LOOK_BYTES)
    # One place tells too little: where a row of padding is zero, it is so in the moments, too.
    places = [start // 2 * 2 for start in (0, (len(plain) - look) // 2, len(plain) - look)]
    for other, offset in originals.candidates(number):
        # Every layer has tensors of this shape, and each three of them: most candidates are none.
        if all(_is_rounded(plain[at : at + look], dtype, read(other, offset + 2 * at, 2 * look)) for at in places):
            whole = read(other, 0, None)
            if whole is not None:
                return Base(CODEC_DERIVED, *whole, offset, _NUMBERS[dtype])
    return None


def _is_rounded(plain: memoryview, dtype: str, found: tuple[Digest, memoryview] | None) -> bool:
    if found is None:
        return False
    rounded = derived.rounded_base(found[1], 0, len(plain), _NUMBERS[dtype])
    return np.array_equal(np.frombuffer(plain, dtype=np.uint8), rounded)


class Bases:
    """Bases that lie in a ring. Thread-safe."""

    def __init__(self, ring: Ring) -> None:
        """Look for them in ``ring``."""
        self._ring = ring
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._originals = Originals((), (), ())

    def may_be_derived(self, capture: Capture, number: int) -> bool:
        """Tell whether a partition may be a rounded copy of others of its capture."""
        return next(self._originals_of(capture).candidates(number), None) is not None

    def of(self, capture: Capture, number: int, older: Capture | None) -> list[Base]:
        """Return what a partition that is complete in the ring may be decoded from.

        ``older`` is a capture before it. The frames of both have to stay in the ring meanwhile.
        """
        found = self._read(capture, number)
        if found is None:
            return []
        _, plain = found
        dtype = capture.dtypes[capture.partitions[number].pieces[0].row]
        original = original_of(plain, dtype, number, self._originals_of(capture), partial(self._read, capture))
        bases = [] if original is None else [original]
        if older is not None and older.plan is capture.plan:
            before = self._read(older, number)
            if before is not None and len(before[1]) == len(plain):
                bases.append(Base(CODEC_DELTA, *before))
        return bases

    def _read(
        self, capture: Capture, number: int, start: int = 0, length: int | None = None
    ) -> tuple[Digest, memoryview] | None:
        name, slot = capture.digests[number], capture.slots[number]
        if name is None or slot is None:
            return None
        return name, self._ring.payload(slot)[start : None if length is None else start + length]

    def _originals_of(self, capture: Capture) -> Originals:
        with self._lock:
            if self._plan is not capture.plan:
                self._plan = capture.plan
                self._originals = Originals(capture.partitions, capture.dtypes, capture.shapes)
            return self._originals
