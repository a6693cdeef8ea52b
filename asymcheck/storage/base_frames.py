"""Lookup of base frames, against which deltas and derived partitions are encoded, in all packs of a tier."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from asymcheck.errors import AsymcheckError, result_or_error
from asymcheck.format import registry
from asymcheck.format.frame import FrameDescriptor, check_frame
from asymcheck.format.pack import Entries, check_entry, described
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId

_ATTEMPTS = 3
"""Limit on rescans: garbage may lack its base for good, and a training keeps adding packs."""
_NAME = f"S{registry.DIGEST_BYTES}"
"""Type of a digest in an array that can be sorted."""

OpenPackOf = Callable[[PackId], OpenPack]
"""Open a complete pack for reading."""


def bases_in(entries: Entries) -> dict[Digest, Digest]:
    """Return the digests of the frames that need a base, with the digest of the base."""
    based = entries[entries["kind"] != registry.KIND_FULL]
    return dict(zip(based["digest"].tolist(), based["base_digest"].tolist(), strict=True))


class BaseFrames:
    """Frames in the packs of ``tier``, to be found by digest. Packs are scanned at the first lookup. For one thread."""

    def __init__(self, tier: ReadTier, open_pack: OpenPackOf | None = None) -> None:
        """Find bases as readers do. With ``open_pack``, for a repair, also use frames with a damaged header."""
        self._tier, self._open_pack = tier, open_pack or tier.open_pack
        self._is_repair = open_pack is not None
        self._packs: dict[PackId, int] = {}
        # Digests of all frames in order, with the number of the pack and of the frame.
        self._names = np.empty(0, dtype=_NAME)
        self._places = np.empty((0, 2), dtype=np.int64)
        self._missed: Counter[Digest] = Counter()

    def copies_of(self, name: Digest) -> Iterator[Callable[[], tuple[FrameDescriptor, memoryview, str]]]:
        """Yield a reader for each copy of a base frame. Readers return the checked descriptor, payload and frame name.

        Readers raise FormatError, MissingPartitionError, or StorageError. Request the next copy only if no earlier
        copy could be read.
        """
        known = self._locations(name)
        yield from (partial(self._read, *location) for location in known)
        self._missed[name] += 1
        if self._missed[name] <= _ATTEMPTS:
            # A repack may have copied the base into a new pack.
            self._scan()
            yield from (partial(self._read, *location) for location in self._locations(name) if location not in known)

    def _locations(self, name: Digest) -> list[tuple[PackId, int]]:
        if not self._packs:
            self._scan()
        key = np.frombuffer(name, dtype=_NAME)
        first, end = (int(np.searchsorted(self._names, key, side)[0]) for side in ("left", "right"))
        pack_ids = list(self._packs)
        return [(pack_ids[pack], frame) for pack, frame in self._places[first:end].tolist()]

    def _scan(self) -> None:
        """Add the frames of new packs."""
        names, places = [self._names], [self._places]
        for pack_id in self._tier.pack_ids():
            if pack_id not in self._packs:
                number = self._packs[pack_id] = len(self._packs)
                pack = result_or_error(self._open_pack, pack_id)
                if not isinstance(pack, AsymcheckError):
                    with contextlib.closing(pack):
                        names.append(np.frombuffer(pack.entries["digest"].tobytes(), dtype=_NAME))
                    frames = np.arange(len(names[-1]))
                    places.append(np.column_stack((np.full_like(frames, number), frames)))
        if len(names) > 1:
            joined = np.concatenate(names)
            order = np.argsort(joined, kind="stable")
            self._names, self._places = joined[order], np.concatenate(places)[order]

    def _read(self, pack_id: PackId, sequence: int) -> tuple[FrameDescriptor, memoryview, str]:
        where = f"frame {sequence} of pack {pack_id.hex()}"
        with contextlib.closing(self._open_pack(pack_id)) as pack:
            entry = pack.entries[sequence]
            frame = pack.read_frame(sequence, Slot(int(entry["stored_length"])))
            if self._is_repair:
                return *described(entry, frame), where
            descriptor, payload = check_frame(frame, pack_id, sequence, where)
            check_entry(entry, descriptor, where)
        return descriptor, payload, where
