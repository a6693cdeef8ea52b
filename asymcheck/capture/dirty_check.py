"""Unchanged: partitions that still have the bytes of an earlier capture are neither copied nor written again.

Tensors that no optimizer owns may change at any time, and are captured inside ``step()``. In a model that is mostly
frozen, these are most of the weights. Only their content shows that they are unchanged: no version counter sees every
write. Therefore their bytes are digested in place, which is several times faster than a copy into the ring, and
compared with the digest of an earlier capture whose frame is still in the ring. Both captures then share the frame.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence

from asymcheck.capture.inflight import Capture
from asymcheck.events import timed
from asymcheck.executor import together
from asymcheck.format.digest import digest
from asymcheck.storage.shm import Ring, RingSlot
from asymcheck.types import Digest

_REMEMBERED = 4
"""Captures looked at: the newest ones may not be digested yet."""
_ALONE_BYTES = 16 << 20
"""Bytes that one thread digests before other threads could start."""
_THREADS_MAX = 8
"""Threads that saturate the memory of most machines."""

Key = tuple[str, int, int]
"""Name of a tensor, and first byte and length of a part of it."""


class _Seen:
    """One earlier capture, without its tensors."""

    def __init__(self, capture: Capture, numbers: dict[Key, int]) -> None:
        self._numbers = numbers
        # They fill while it is captured, and its places become free in the end.
        self._digests, self._slots = capture.digests, capture.slots

    def digest(self, key: Key) -> Digest | None:
        return self._digests[self._numbers[key]] if key in self._numbers else None

    def slot(self, key: Key) -> RingSlot | None:
        return self._slots[self._numbers[key]]


class DirtyCheck:
    """Finds out what is as it was. For the training thread."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._seen: deque[_Seen] = deque(maxlen=_REMEMBERED)

    def take(self, capture: Capture, numbers: Sequence[int]) -> list[int]:
        """Give a capture the frames of earlier ones for those partitions, of ``numbers``, that are as they were.

        Only large parts of contiguous tensors in host memory are looked at, and of these only what did not change the
        last time: the digest of what changes is worth nothing, for it has to be copied then.
        """
        keys = {key: number for number in numbers if (key := _key(capture, number)) is not None}
        shared: dict[int, tuple[RingSlot, Digest, memoryview]] = {}
        for key, number in keys.items():
            found = self._share(key)
            source = None if found is None else _source(capture, number)
            if found is not None and source is not None:
                shared[number] = *found, source
            elif found is not None:
                self._ring.give_back(found[0])
        unchanged = self._compare(capture, shared) if shared else []
        self._seen.appendleft(_Seen(capture, keys))
        return unchanged

    def _compare(self, capture: Capture, shared: Mapping[int, tuple[RingSlot, Digest, memoryview]]) -> list[int]:
        sources = [source for _, _, source in shared.values()]
        try:
            with timed("compare", sum(map(len, sources)), capture.named):
                digests = _digest_all(sources)
        except BaseException:
            for slot, _, _ in shared.values():
                self._ring.give_back(slot)
            raise
        unchanged = []
        for (number, (slot, name, _)), now in zip(shared.items(), digests, strict=True):
            if now == name:
                capture.slots[number], capture.digests[number] = slot, name
                unchanged.append(number)
            else:
                self._ring.give_back(slot)
        return unchanged

    def _share(self, key: Key) -> tuple[RingSlot, Digest] | None:
        """Return a frame of a partition in the newest capture that has one; None when it changed the last time."""
        known = [(seen, name) for seen in self._seen if (name := seen.digest(key)) is not None]
        if not known or (len(known) > 1 and known[0][1] != known[1][1]):
            return None
        for seen, name in known:
            slot = seen.slot(key)
            mine = None if slot is None or name != known[0][1] else self._ring.share(slot)
            if mine is not None:
                return mine, name
        return None


def _key(capture: Capture, number: int) -> Key | None:
    pieces = capture.partitions[number].pieces
    if len(pieces) > 1 or capture.transfers.is_on_device(number):
        return None
    return capture.names[pieces[0].row], pieces[0].start, pieces[0].length


def _source(capture: Capture, number: int) -> memoryview | None:
    piece = capture.partitions[number].pieces[0]
    return capture.state.leaves[piece.row].lying_bytes(piece.start, piece.length)


def _digest_all(sources: Sequence[memoryview]) -> list[Digest]:
    """Return the digests, made by several threads if that is worth it: nothing else runs in ``step()``."""
    threads = min(len(os.sched_getaffinity(0)), _THREADS_MAX, sum(map(len, sources)) // _ALONE_BYTES)
    found: list[Digest] = [Digest(b"")] * len(sources)

    numbers = iter(range(len(sources)))

    def work() -> None:
        for number in numbers:
            found[number] = digest(sources[number])

    together(work, max(threads, 1), "digest", lambda: None)
    return found
