"""Skip partitions whose bytes are unchanged since an earlier capture.

Tensors that no optimizer owns may change at any time, and are captured inside ``step()``. In a mostly frozen
model, these are most of the weights. Version counters miss some writes, so only the bytes show that a tensor is
unchanged. The bytes are digested in place, which is several times faster than a copy into the ring. If the digest
equals that of an earlier capture whose frame is still in the ring, both captures share the frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from asymcheck.capture.inflight import Capture
from asymcheck.events import timed
from asymcheck.state.leaves import digest_pieces
from asymcheck.storage.shm.ring_writer import Ring, RingSlot
from asymcheck.types import Digest

_REMEMBERED = 4
"""Number of earlier captures to compare with; the newest captures may not be digested yet."""

Key = tuple[str, int, int]
"""Tensor name, first byte and length of a piece."""
_Earlier = tuple[dict[Key, int], Sequence[Digest | None], Sequence[RingSlot | None]]


class DirtyCheck:
    """Detector of unchanged partitions, for use on the training thread."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        # Numbers of partitions, digests and slots. The capture thread fills the digests; the flush frees the slots.
        self._earlier: deque[_Earlier] = deque(maxlen=_REMEMBERED)

    def take(self, capture: Capture, numbers: Sequence[int]) -> list[int]:
        """Assign frames of earlier captures to the unchanged partitions of ``numbers``, and return their numbers.

        Only large pieces of contiguous tensors in host memory are compared. A partition that changed in the last
        capture is skipped, because its digest would be wasted if it changes again.
        """
        keys = {key: number for number in numbers if (key := _key(capture, number)) is not None}
        shared = {number: frame for key, number in keys.items() if (frame := self._share(key)) is not None}
        unchanged = self._compare(capture, shared) if shared else []
        self._earlier.appendleft((keys, capture.digests, capture.slots))
        return unchanged

    def _compare(self, capture: Capture, shared: Mapping[int, tuple[RingSlot, Digest]]) -> list[int]:
        pieces = [capture.partitions[number].pieces[0] for number in shared]
        unchanged: list[int] = []
        try:
            with timed("compare", sum(piece.length for piece in pieces), capture.named):
                digests = digest_pieces(pieces, capture.state.leaves)
            for (number, (slot, name)), current in zip(shared.items(), digests, strict=True):
                if current == name:
                    capture.slots[number], capture.digests[number] = slot, name
                    unchanged.append(number)
        finally:
            for number in shared.keys() - {*unchanged}:
                self._ring.give_back(shared[number][0])
        return unchanged

    def _share(self, key: Key) -> tuple[RingSlot, Digest] | None:
        """Return the newest frame of a partition; None if the partition changed in the last capture."""
        known: list[tuple[Digest, RingSlot | None]] = []
        for numbers, digests, slots in self._earlier:
            if key in numbers and (name := digests[numbers[key]]) is not None:
                known.append((name, slots[numbers[key]]))
        if not known or len({name for name, _ in known[:2]}) > 1:
            return None
        for name, slot in known:
            shared_slot = None if slot is None or name != known[0][0] else self._ring.share(slot)
            if shared_slot is not None:
                return shared_slot, name
        return None


def _key(capture: Capture, number: int) -> Key | None:
    (piece, *others), leaves = capture.partitions[number].pieces, capture.state.leaves
    if others or capture.transfers.is_on_device(number) or leaves[piece.row].bytes_in_place(piece.start, 1) is None:
        return None
    return capture.names[piece.row], piece.start, piece.length
