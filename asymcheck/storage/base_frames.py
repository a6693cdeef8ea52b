"""Frames that others are encoded against, looked for in all packs, and read one pack at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from asymcheck.errors import UNKNOWING, AsymcheckError
from asymcheck.format import registry
from asymcheck.format.digest_set import DigestSet, as_column
from asymcheck.format.frame import FrameDescriptor, check_frame
from asymcheck.format.pack import Entries, check_entry
from asymcheck.storage.interfaces import OpenPack, ReadTier
from asymcheck.storage.slots import Slot
from asymcheck.types import Digest, PackId

_ATTEMPTS = 3
"""Garbage may lack its base for good, and beside a training there is always a new pack."""


def bases_in(entries: Entries) -> dict[Digest, Digest]:
    """Return the frames of an index that need a base, with it."""
    based = entries[entries["kind"] != registry.KIND_FULL]
    return {
        Digest(name.tobytes()): Digest(base.tobytes())
        for name, base in zip(based["digest"], based["base_digest"], strict=True)
    }


class BaseFrames:
    """The bases in the packs of ``tier``, found when the first is asked for. Thread-safe."""

    def __init__(self, tier: ReadTier) -> None:
        self._tier = tier
        self._places: dict[Digest, list[tuple[PackId, int]]] | None = None
        self._listed: set[PackId] = set()
        self._missed: Counter[Digest] = Counter()
        self._lock = threading.Lock()

    def copies_of(self, name: Digest) -> Iterator[Callable[[], tuple[FrameDescriptor, memoryview, str]]]:
        """Yield for each frame of this base a function that reads and checks it: descriptor, payload, its name.

        The functions raise FormatError, MissingPartitionError, or StorageError. Ask for the next copy only when no
        earlier one could be read.
        """
        known = self._known(name)
        yield from (partial(self._read, *place) for place in known)
        yield from (partial(self._read, *place) for place in self._moved(name) if place not in known)

    def _known(self, name: Digest) -> list[tuple[PackId, int]]:
        with self._lock:
            if self._places is None:
                self._places = self._find()
            if name not in self._places:
                # Only a scan for a repair finds the frame that needs this base.
                self._places.update(self._lying({name}, self._tier.pack_ids()))
            return list(self._places[name])

    def _moved(self, name: Digest) -> list[tuple[PackId, int]]:
        """Return where a base lies after a look into packs that are new: it may have been copied into one of them."""
        with self._lock:
            assert self._places is not None  # noqa: S101 - for the reader and mypy
            self._missed[name] += 1
            if self._missed[name] <= _ATTEMPTS:
                new = [pack_id for pack_id in self._tier.pack_ids() if pack_id not in self._listed]
                self._listed.update(new)
                # All of them, for no pack is looked into twice.
                for other, places in self._lying(set(self._places), new).items() if new else ():
                    self._places[other] += [place for place in places if place not in self._places[other]]
            return list(self._places[name])

    def _find(self) -> dict[Digest, list[tuple[PackId, int]]]:
        places: dict[Digest, list[tuple[PackId, int]]] = {}
        for _ in range(_ATTEMPTS):
            # A base that is missing may have been copied meanwhile into a pack that was not listed yet.
            now = set(self._tier.pack_ids())
            if self._listed >= now:
                break
            self._listed = now
            packs = self._packs(self._tier.pack_ids())
            names = {name for _, pack in packs for name in bases_in(pack.entries).values()}
            places = self._lying(names, self._tier.pack_ids()) if names else {}
            if all(places.values()):
                break
        return places

    def _lying(self, names: set[Digest], pack_ids: Iterable[PackId]) -> dict[Digest, list[tuple[PackId, int]]]:
        places: dict[Digest, list[tuple[PackId, int]]] = {name: [] for name in names}
        wanted = DigestSet(as_column(sorted(names)))
        for pack_id, pack in self._packs(pack_ids):
            for frame in np.flatnonzero(wanted.numbers(pack.entries["digest"]) >= 0).tolist():
                places[Digest(pack.entries["digest"][frame].tobytes())].append((pack_id, frame))
        return places

    def _packs(self, pack_ids: Iterable[PackId]) -> Iterator[tuple[PackId, OpenPack]]:
        for pack_id in pack_ids:
            try:
                pack = self._tier.open_pack(pack_id)
            except UNKNOWING:
                raise
            except AsymcheckError:
                continue
            with contextlib.closing(pack):
                yield pack_id, pack

    def _read(self, pack_id: PackId, sequence: int) -> tuple[FrameDescriptor, memoryview, str]:
        where = f"frame {sequence} of pack {pack_id.hex()}"
        with contextlib.closing(self._tier.open_pack(pack_id)) as pack:
            entry = pack.entries[sequence]
            frame = pack.read_frame(sequence, Slot(int(entry["stored_length"])))
            descriptor, payload = check_frame(frame, pack_id, sequence, where)
            check_entry(entry, descriptor, where)
        return descriptor, payload, where
