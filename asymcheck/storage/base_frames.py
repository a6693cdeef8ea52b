"""Lookup of base frames, against which deltas and derived partitions are encoded, in all packs of a tier."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from asymcheck.errors import AsymcheckError, result_or_error
from asymcheck.format import registry
from asymcheck.format.digest_set import DigestSet, as_column
from asymcheck.format.frame import FrameDescriptor, check_frame
from asymcheck.format.pack import Entries, check_entry, described
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId

_ATTEMPTS = 3
"""Limit on rescans: garbage may lack its base for good, and a training keeps adding packs."""


OpenPackOf = Callable[[PackId], OpenPack]
"""Open a complete pack for reading."""


def bases_in(entries: Entries) -> dict[Digest, Digest]:
    """Return the digests of the frames that need a base, with the digest of the base."""
    based = entries[entries["kind"] != registry.KIND_FULL]
    return {
        Digest(name.tobytes()): Digest(base.tobytes())
        for name, base in zip(based["digest"], based["base_digest"], strict=True)
    }


class BaseFrames:
    """Base frames in the packs of ``tier``. Packs are scanned at the first lookup. Thread-safe."""

    def __init__(self, tier: ReadTier, open_pack: OpenPackOf | None = None) -> None:
        """Find bases as readers do. With ``open_pack``, for a repair, also use frames with a damaged header."""
        self._tier, self._open_pack = tier, open_pack or tier.open_pack
        self._is_repair = open_pack is not None
        self._locations: dict[Digest, list[tuple[PackId, int]]] | None = None
        self._listed: set[PackId] = set()
        self._missed: Counter[Digest] = Counter()
        self._lock = threading.Lock()

    def copies_of(self, name: Digest) -> Iterator[Callable[[], tuple[FrameDescriptor, memoryview, str]]]:
        """Yield a reader for each copy of a base frame. Readers return the checked descriptor, payload and frame name.

        Readers raise FormatError, MissingPartitionError, or StorageError. Request the next copy only if no earlier
        copy could be read.
        """
        known = self._known_locations(name)
        yield from (partial(self._read, *location) for location in known)
        yield from (partial(self._read, *location) for location in self._new_locations(name) if location not in known)

    def _known_locations(self, name: Digest) -> list[tuple[PackId, int]]:
        with self._lock:
            if self._locations is None:
                self._locations = self._locate_all()
            if name not in self._locations:
                # Only a thorough scan for a repair finds the frame that needs this base.
                self._locations.update(self._locate({name}, self._tier.pack_ids()))
            return list(self._locations[name])

    def _new_locations(self, name: Digest) -> list[tuple[PackId, int]]:
        """Return the locations of a base after a scan of new packs, into which a repack may have copied the base."""
        with self._lock:
            assert self._locations is not None  # noqa: S101 - for the reader and mypy
            self._missed[name] += 1
            if self._missed[name] <= _ATTEMPTS:
                new = [pack_id for pack_id in self._tier.pack_ids() if pack_id not in self._listed]
                self._listed.update(new)
                # Locate all bases, because no pack is scanned twice.
                for base, locations in self._locate(set(self._locations), new).items() if new else ():
                    self._locations[base] += [place for place in locations if place not in self._locations[base]]
            return list(self._locations[name])

    def _locate_all(self) -> dict[Digest, list[tuple[PackId, int]]]:
        locations: dict[Digest, list[tuple[PackId, int]]] = {}
        for _ in range(_ATTEMPTS):
            # A repack may have copied a missing base into a pack that was not listed yet.
            pack_ids = set(self._tier.pack_ids())
            if self._listed >= pack_ids:
                break
            self._listed = pack_ids
            packs = self._packs(self._tier.pack_ids())
            names = {name for _, pack in packs for name in bases_in(pack.entries).values()}
            locations = self._locate(names, self._tier.pack_ids()) if names else {}
            if all(locations.values()):
                break
        return locations

    def _locate(self, names: set[Digest], pack_ids: Iterable[PackId]) -> dict[Digest, list[tuple[PackId, int]]]:
        locations: dict[Digest, list[tuple[PackId, int]]] = {name: [] for name in names}
        wanted = DigestSet(as_column(sorted(names)))
        for pack_id, pack in self._packs(pack_ids):
            for frame in np.flatnonzero(wanted.numbers(pack.entries["digest"]) >= 0).tolist():
                locations[Digest(pack.entries["digest"][frame].tobytes())].append((pack_id, frame))
        return locations

    def _packs(self, pack_ids: Iterable[PackId]) -> Iterator[tuple[PackId, OpenPack]]:
        for pack_id in pack_ids:
            pack = result_or_error(self._open_pack, pack_id)
            if not isinstance(pack, AsymcheckError):
                with contextlib.closing(pack):
                    yield pack_id, pack

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
